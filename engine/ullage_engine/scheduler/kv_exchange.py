"""The messages between a worker and its server about KV stored outside the device.

The native scheduler and the vLLM worker plan the copies themselves. They use this module to offer
new blocks to the server, query it for stored blocks, and report completed copies.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ullage_engine.protocol.messages import (
    FromKv,
    KvBlock,
    KvDamaged,
    KvFound,
    KvOffer,
    KvRead,
    KvSlot,
    KvWanted,
    KvWritten,
)
from ullage_kv.keys import CHAIN_BYTES

ANSWER_S = 15.0
"""Maximum time in seconds that a sequence waits for the answer to its query.

A healthy server answers sooner even if its tiers are slow, so the timeout only guards against a
faulty server.
"""
_MAX_OFFERED = 4096
"""Maximum total number of blocks in the next offer and in all unanswered offers."""
_MAX_STORED = 64
"""Maximum number of blocks to copy to the host per step, so that the step is not delayed too
much."""

Place = TypeVar("Place")
"""Type of an offered block's location.

The location also identifies the block's content, so that an overwritten block is not copied.
"""


class Granted(NamedTuple, Generic[Place]):
    """Host slots granted by the server, split by whether their blocks are still on the device."""

    stored: list[tuple[KvSlot, Place]]
    """Slots to copy blocks to, each with the location of its block."""
    dropped: list[KvSlot]
    """Slots to return to the server, because their blocks are no longer on the device."""


class BlockOffers(Generic[Place]):
    """Tracks blocks from when they are offered to the server until they are copied.

    The server answers offers in the order in which it receives them.
    """

    def __init__(self) -> None:
        self._new_blocks: dict[bytes, tuple[KvBlock, Place]] = {}
        """Blocks to offer with the next message, by content key."""
        self._unanswered: deque[dict[bytes, Place]] = deque()
        """Locations of the blocks in each unanswered offer, by content key, oldest offer first."""
        self._num_offered = 0
        """Number of blocks in the next message and in unanswered offers."""
        self._granted: deque[tuple[KvSlot, Place]] = deque()
        """Granted slots that have not been filled yet, each with the location of its block."""

    @property
    def has_granted(self) -> bool:
        """Whether there are granted slots to which no block has been copied yet."""
        return bool(self._granted)

    def add(self, block: KvBlock, place: Place) -> bool:
        """Add a block to the next offer. Return False if too many offers are unanswered."""
        if self._num_offered >= _MAX_OFFERED:
            return False
        if block.key not in self._new_blocks:
            self._num_offered += 1
            self._new_blocks[block.key] = block, place
        return True

    def withdraw(self, chains: Collection[bytes] | None) -> None:
        """Remove blocks from the next offer.

        Args:
            chains: key prefixes of the blocks to remove, or None to remove all blocks.
        """
        keys = [key for key in self._new_blocks if chains is None or key[:CHAIN_BYTES] in chains]
        for key in keys:
            del self._new_blocks[key]
        self._num_offered -= len(keys)

    def take_message(self) -> KvOffer | None:
        """Return an offer of the blocks added since the last call, or None if there are none."""
        if not self._new_blocks:
            return None

        message = KvOffer(blocks=[block for block, _ in self._new_blocks.values()])
        self._unanswered.append({key: place for key, (_, place) in self._new_blocks.items()})
        self._new_blocks = {}
        return message

    def on_granted(self, slots: list[KvSlot]) -> None:
        """Record which slots the server has granted for the oldest unanswered offer."""
        places = self._unanswered.popleft()
        self._num_offered -= len(places)
        self._granted += [(slot, places[slot.key]) for slot in slots]

    def take_granted(self, is_there: Callable[[Place], bool]) -> Granted[Place]:
        """Remove and return granted slots: those to fill in the next step, and those to give back.

        Args:
            is_there: returns whether the offered block is still at this location.
        """
        granted = Granted[Place]([], [])
        for _ in range(min(_MAX_STORED, len(self._granted))):
            slot, place = self._granted.popleft()
            if is_there(place):
                granted.stored.append((slot, place))
            else:
                granted.dropped.append(slot)
        return granted


@dataclass(slots=True, eq=False)
class KvQuery:
    """A query that asks the server which of a sequence's blocks are in tiers outside the device."""

    number: int
    first: int
    """Index of the first requested block."""
    keys: list[bytes]
    answer: KvFound | None = None


class KvExchange(Generic[Place]):
    """Exchanges messages about KV outside the device between a worker and its server."""

    def __init__(self) -> None:
        self._offers = BlockOffers[Place]()
        self._numbers = itertools.count(1)
        self._queries: dict[int, KvQuery] = {}
        """Queries whose sequences are still waiting, by query number."""
        self._outgoing: list[FromKv] = []

    @property
    def has_granted(self) -> bool:
        """Whether there are granted slots to which no block has been copied yet."""
        return self._offers.has_granted

    def take_messages(self) -> list[FromKv]:
        """Return the messages to the server that have been queued since the last call."""
        offer = self._offers.take_message()
        if offer is not None:
            self._outgoing.append(offer)
        outgoing = self._outgoing
        self._outgoing = []
        return outgoing

    # from the device -----------------------------------------------------------------------------

    def offer(self, block: KvBlock, place: Place) -> bool:
        """Offer a block to the server. Return False if too many offers are unanswered."""
        return self._offers.add(block, place)

    def on_granted(self, slots: list[KvSlot]) -> None:
        """Record which slots the server has granted for the oldest unanswered offer."""
        self._offers.on_granted(slots)

    def take_granted(self, is_there: Callable[[Place], bool]) -> list[tuple[KvSlot, Place]]:
        """Remove and return the slots to fill in one step, each with the location of its block.

        If a block is no longer on the device, its slot is returned to the server.

        Args:
            is_there: returns whether a location still holds the offered block.
        """
        granted = self._offers.take_granted(is_there)
        if granted.dropped:
            self._outgoing.append(KvWritten(stored=[], dropped=granted.dropped))
        return granted.stored

    def discard(self, chains: list[bytes] | None) -> None:
        """Make all tiers outside the device discard blocks.

        Args:
            chains: key prefixes of the blocks to discard, or None to discard all blocks.
        """
        self._offers.withdraw(chains)
        self._outgoing.append(KvDamaged(chains=chains))

    # to the device -------------------------------------------------------------------------------

    def ask(
        self, request_id: str, first: int, keys: list[bytes], *, is_rest: bool = False
    ) -> KvQuery:
        """Query the server for stored blocks.

        Args:
            request_id: the request that needs the blocks.
            first: index of the first requested block.
            keys: content keys of all blocks up to the last requested block.
            is_rest: whether this is a follow-up query, for blocks that were still being loaded when
                an earlier query was answered.
        """
        query = KvQuery(next(self._numbers), first, keys)
        self._queries[query.number] = query
        self._outgoing.append(
            KvWanted(
                number=query.number,
                request_id=request_id,
                first=first,
                keys=keys,
                is_rest=is_rest,
            )
        )
        return query

    def on_found(self, answer: KvFound) -> None:
        """Record the server's answer to a query.

        If the query has ended in the meantime, release the slots in the answer.
        """
        query = self._queries.get(answer.number)
        if query is None:
            self.give_back(answer.number)
        else:
            query.answer = answer

    def drop(self, query: KvQuery) -> None:
        """End a query without copying its blocks. Any slots in its answer are released."""
        self.settle(query)
        if query.answer is not None:
            self.give_back(query.number)

    def settle(self, query: KvQuery) -> None:
        """End a query after the copies of its blocks to the device have been planned.

        Call `report` once the copies are done, so that the server can release the slots.
        """
        del self._queries[query.number]

    def give_back(self, number: int) -> None:
        """Tell the server that an answer's slots are not needed, so that it can release them."""
        self._outgoing.append(KvRead(number=number, num_blocks=0))

    def report(self, stored: Iterable[KvSlot], read: Iterable[KvRead]) -> None:
        """Tell the server which copies all ranks have completed.

        Args:
            stored: slots to which blocks have been copied.
            read: reports on the `KvFound` answers whose blocks have been copied to the device.
        """
        if written := list(stored):
            self._outgoing.append(KvWritten(stored=written))
        self._outgoing += read
