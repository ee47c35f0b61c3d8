"""Blocks that a worker offers to the tiers outside its device, until they are copied there."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, NamedTuple, TypeVar

from ullage_engine.protocol.messages import KvBlock, KvOffer, KvSlot
from ullage_kv.keys import CHAIN_BYTES

ANSWER_S = 15.0
"""Longest wait for the answer to a query, seconds. Servers answer sooner, however slow their tiers
are. The bound is for faults of the server."""
_MAX_OFFERED = 4096
"""Most blocks with unanswered offers. Blocks that become complete meanwhile are not offered."""
_MAX_STORED = 64
"""Most blocks that one step copies to the host, so that it is not delayed for long."""

Place = TypeVar("Place")
"""Where an offered block is, and the content that it must still have when it is copied."""


class Granted(NamedTuple, Generic[Place]):
    """Granted slots, by whether their blocks are still on the device."""

    stored: list[tuple[KvSlot, Place]]
    """Slots to copy blocks to, with the blocks' places."""
    dropped: list[KvSlot]
    """Slots of blocks that are gone."""


class BlockOffers(Generic[Place]):
    """Offered blocks that are not copied yet. The server answers offers in their order."""

    def __init__(self) -> None:
        self._new_blocks: dict[bytes, tuple[KvBlock, Place]] = {}
        """Blocks that the next message offers, by key."""
        self._unanswered: deque[dict[bytes, Place]] = deque()
        """Places of the blocks of each offer, by key, the oldest offer first."""
        self._num_offered = 0
        """Blocks of both."""
        self._granted: deque[tuple[KvSlot, Place]] = deque()
        """Blocks that have a slot and wait to be copied."""

    @property
    def has_granted(self) -> bool:
        """Whether blocks wait to be copied to slots."""
        return bool(self._granted)

    def add(self, block: KvBlock, place: Place) -> bool:
        """Offer a block with the next message; return False if too many are unanswered."""
        if self._num_offered >= _MAX_OFFERED:
            return False
        if block.key not in self._new_blocks:
            self._num_offered += 1
            self._new_blocks[block.key] = block, place
        return True

    def withdraw(self, chains: Collection[bytes] | None) -> None:
        """Take the blocks of these chains out of the next message; None: all blocks."""
        keys = [key for key in self._new_blocks if chains is None or key[:CHAIN_BYTES] in chains]
        for key in keys:
            del self._new_blocks[key]
        self._num_offered -= len(keys)

    def take_message(self) -> KvOffer | None:
        """Return the offer of the blocks added since the last call; None: there are none."""
        if not self._new_blocks:
            return None

        message = KvOffer(blocks=[block for block, _ in self._new_blocks.values()])
        self._unanswered.append({key: place for key, (_, place) in self._new_blocks.items()})
        self._new_blocks = {}
        return message

    def on_granted(self, slots: list[KvSlot]) -> None:
        """Take the answer to the oldest offer."""
        places = self._unanswered.popleft()
        self._num_offered -= len(places)
        self._granted += [(slot, places[slot.key]) for slot in slots]

    def take_granted(self, is_there: Callable[[Place], bool]) -> Granted[Place]:
        """Return the slots of blocks to copy with one step; each slot is returned once.

        `is_there`: whether a place still has the offered block.
        """
        granted = Granted[Place]([], [])
        for _ in range(min(_MAX_STORED, len(self._granted))):
            slot, place = self._granted.popleft()
            if is_there(place):
                granted.stored.append((slot, place))
            else:
                granted.dropped.append(slot)
        return granted
