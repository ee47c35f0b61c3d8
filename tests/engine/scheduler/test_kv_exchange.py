"""What is offered to tiers is answered, copied or given back once, whatever happens between."""

from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.protocol.messages import KvBlock, KvOffer, KvSlot
from ullage_engine.scheduler.kv_exchange import BlockOffers
from ullage_kv import block_keys
from ullage_kv.keys import CHAIN_BYTES

KEYS = [key for first in range(3) for key in block_keys(bytes(32), [first, *range(19)], 2)]
"""Ten blocks of each of three texts."""


@given(st.data())
def test_every_slot_is_used_or_given_back_once(data: st.DataObject) -> None:
    offers = BlockOffers[int]()
    unanswered = list[KvOffer]()
    granted = set[KvSlot]()
    taken = list[KvSlot]()
    slot = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["add", "send", "answer", "withdraw", "take"])):
            case "add":
                index = data.draw(st.integers(0, len(KEYS) - 1))
                offers.add(KvBlock(KEYS[index], None, False), index)
            case "send":
                message = offers.take_message()
                if message is not None:
                    keys = [block.key for block in message.blocks]
                    assert keys == list(dict.fromkeys(keys)), "a block is offered twice at once"
                    unanswered.append(message)
            case "answer" if unanswered:
                slots = []
                for block in unanswered.pop(0).blocks:
                    if data.draw(st.booleans()):
                        slots.append(KvSlot(block.key, slot, 0))
                        slot += 1
                granted.update(slots)
                offers.on_granted(slots)
            case "withdraw":
                chain = data.draw(st.sampled_from(KEYS))[:CHAIN_BYTES]
                offers.withdraw([chain])
                message = offers.take_message()
                if message is not None:
                    assert all(block.key[:CHAIN_BYTES] != chain for block in message.blocks)
                    unanswered.append(message)
            case "take":
                stored, dropped = offers.take_granted(lambda index: index % 2 == 0)
                assert all(slot.key == KEYS[index] and index % 2 == 0 for slot, index in stored)
                taken += [*[slot for slot, _ in stored], *dropped]
    while offers.has_granted:
        stored, dropped = offers.take_granted(lambda _: False)
        assert not stored
        taken += dropped
    assert len(taken) == len(set(taken))
    assert set(taken) == granted


def test_too_many_unanswered_offers_are_no_more_offered_until_one_is_answered() -> None:
    offers = BlockOffers[int]()
    count = 0
    while offers.add(KvBlock(count.to_bytes(48), None, False), count):
        count += 1
    assert offers.take_message() is not None
    assert not offers.add(KvBlock(count.to_bytes(48), None, False), count)
    offers.on_granted([])
    assert offers.add(KvBlock(count.to_bytes(48), None, False), count)
