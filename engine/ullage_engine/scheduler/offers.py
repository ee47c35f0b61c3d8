"""Blocks that a worker offers to the tiers outside its device, until they are copied there."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, NamedTuple, TypeVar

from ullage_engine.protocol.messages import KvBlock, KvOffer, KvSlot
from ullage_kv.keys import CHAIN_BYTES

ANSWER_S = 15.0
"""Seconds after which an answer to a query is not waited for any more. Servers answer sooner,
whatever tiers do: this is for faults of their own."""
_MAX_OFFERED = 4096
"""Blocks whose offers may be unanswered; what is complete meanwhile is not offered."""
_MAX_STORED = 64
"""Blocks that are copied to the host with one step, so that it is not delayed for long."""

Place = TypeVar("Place")
"""Says where an offered block is, and what must be in it still when it is copied."""


class Granted(NamedTuple, Generic[Place]):
    """Slots for blocks that are still there, with their places, and slots of those that are not."""

    stored: list[tuple[KvSlot, Place]]
    dropped: list[KvSlot]


class BlockOffers(Generic[Place]):
    """What was offered and is not copied yet. Offers are answered in their order."""

    def __init__(self) -> None:
        self._new_blocks: dict[bytes, tuple[KvBlock, Place]] = {}
        """What the next message offers, by key."""
        self._unanswered: deque[dict[bytes, Place]] = deque()
        self._num_offered = 0
        self._granted: deque[tuple[KvSlot, Place]] = deque()

    @property
    def has_granted(self) -> bool:
        """Whether blocks wait to be copied to slots."""
        return bool(self._granted)

    def add(self, block: KvBlock, place: Place) -> bool:
        """Offers a block with the next message; returns False if too many are unanswered."""
        if self._num_offered >= _MAX_OFFERED:
            return False
        if block.key not in self._new_blocks:
            self._num_offered += 1
            self._new_blocks[block.key] = block, place
        return True

    def withdraw(self, chains: Collection[bytes] | None) -> None:
        """Offers nothing of these chains with the next message; None: of none."""
        keys = [key for key in self._new_blocks if chains is None or key[:CHAIN_BYTES] in chains]
        for key in keys:
            del self._new_blocks[key]
        self._num_offered -= len(keys)

    def take_message(self) -> KvOffer | None:
        """Return what offers the blocks that were added since the last call; None: there are
        none."""
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
        """Return slots of blocks to copy with one step, each once."""
        granted = Granted[Place]([], [])
        for _ in range(min(_MAX_STORED, len(self._granted))):
            slot, place = self._granted.popleft()
            if is_there(place):
                granted.stored.append((slot, place))
            else:
                granted.dropped.append(slot)
        return granted
