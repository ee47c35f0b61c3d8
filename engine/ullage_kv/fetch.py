"""Loads blocks from lower tiers into host memory.

A `BlockFetch` handles one call for a list of blocks. Each block that a lower tier is loading is
represented by a `PendingBlock`, which several fetches may share so that the block is loaded only
once. A `TierLoad` is a group of blocks that one tier loads together.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ullage_kv.arena import Arena
from ullage_kv.futures import Alarms, Steps, all_done, done, run
from ullage_kv.index import Lease, SlotRef
from ullage_kv.keys import CHAIN_BYTES
from ullage_kv.results import HOST, MISS, Result, Status
from ullage_kv.tier import LowerTier, Transfer

PART_BLOCKS = 128
"""Maximum number of blocks per call to a lower tier. Longer fetches are split into chunks.

The caller's thread may run an event loop, so it submits only the first few chunks to avoid blocking
for long. The tier's own threads submit the rest.
"""

_PARTS_AT_ONCE = 2
"""Number of a fetch's chunks that are loaded concurrently, so that tiers never sit idle."""

_IN_HOST = Result(Status.HIT, HOST)


def parts_of(num_blocks: int, size: int = PART_BLOCKS) -> list[range]:
    """Split `range(num_blocks)` into ranges of `size` indices. The last range may be shorter."""
    return [range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]


@dataclass(slots=True, eq=False)
class PendingBlock:
    """A block that a lower tier is loading into a reserved slot of host memory."""

    key: bytes
    ref: SlotRef
    load: "TierLoad"
    result: Result | None = None
    """The tier's result, or None while the block is being loaded.

    It is set before `load.arrived` completes.
    """


@dataclass(slots=True, eq=False)
class TierLoad:
    """One load from a tier: the blocks that it loads together, and their common deadline."""

    tier: str
    ends_at: float
    """Time of the deadline on the store's clock."""
    blocks: list[PendingBlock] = field(default_factory=list)
    arrived: "Future[None]" = field(default_factory=Future)
    """Future that completes once every block has its result."""


class BlockFetch:
    """One call that fetches a list of blocks, with a result for each block."""

    def __init__(self, loader: "Loader", keys: Sequence[bytes], ends_at: float) -> None:
        self.keys = keys
        self.ends_at = ends_at
        """Deadline as a time on the store's clock."""
        self.results = [MISS] * len(keys)
        self.refusal: Result | None = None
        """Result for all remaining blocks once further loads are pointless, or None until then.

        For example, a tier has refused a whole chunk, or the deadline has passed.
        """
        self._loader = loader
        self._pending: list[PendingBlock | None] = [None] * len(keys)

    def run(self) -> "Future[list[Result]]":
        """Fetch all blocks, a few chunks at a time, and return a future for their results."""
        parts = iter(parts_of(len(self.keys)))
        # Both tasks draw from one iterator, so the one that has fetched its part takes the next.
        tasks = [run(self._fetch_each(parts)) for _ in range(_PARTS_AT_ONCE)]

        results = Future[list[Result]]()
        all_done(tasks).add_done_callback(lambda _: results.set_result(self.results))
        return results

    def begin(self, part: range) -> "Future[None]":
        """Start fetching the blocks at the indices in `part`.

        Returns:
            A future that completes once the results of these blocks are set.
        """
        places_by_tier = self._locate(part)
        places = [place for each in places_by_tier.values() for place in each]
        if not places:
            return done(None)

        remaining_s = self.ends_at - self._loader.now()
        if self.refusal is None and remaining_s <= 0:
            self.refusal = Result(Status.TIMEOUT, next(iter(places_by_tier)))
        if self.refusal is not None:
            for place in places:
                self.results[place] = self.refusal
            return done(None)

        for tier in self._loader.tiers:
            if tier.name in places_by_tier:
                self._loader.load(self, tier, places_by_tier[tier.name], remaining_s)
        return run(self._await(places))

    def expect(self, place: int, block: PendingBlock) -> None:
        """Record that a tier is loading the block at index `place`, perhaps for several fetches."""
        self._pending[place] = block

    def _fetch_each(self, parts: Iterator[range]) -> Steps:
        for part in parts:
            yield self.begin(part)

    def _locate(self, part: range) -> dict[str, list[int]]:
        """Group the blocks that are not in host memory by the lower tier that stores them.

        Blocks already in host memory get their results immediately. Blocks not found in any tier
        are skipped.
        """
        places_by_tier = dict[str, list[int]]()
        tiers = self._loader.locate(self.keys[part.start : part.stop])
        for place, tier in zip(part, tiers, strict=True):
            if tier == HOST:
                self.results[place] = _IN_HOST
            elif tier:
                places_by_tier.setdefault(tier, []).append(place)
        return places_by_tier

    def _await(self, places: Sequence[int]) -> Steps:
        """Wait until pending blocks are loaded or the deadline passes, and set their results.

        `places` lists the indices of the blocks.
        """
        blocks = [(place, block) for place in places if (block := self._pending[place]) is not None]
        loads = {id(block.load): block.load for _, block in blocks}.values()

        arrived = all_done([load.arrived for load in loads])
        if any(load.ends_at > self.ends_at for load in loads):  # begun by another fetch
            # Without a thread for the alarm, the loads' own deadlines end the wait.
            with contextlib.suppress(RuntimeError):
                self._loader.alarms.finish_at(self.ends_at, arrived)
        yield arrived

        for place, block in blocks:
            self.results[place] = block.result or Result(Status.TIMEOUT, block.load.tier)
        if all(self.results[place].is_refusal for place in places):
            self.refusal = self.results[places[-1]]


class Loader:
    """Loads blocks from lower tiers to host memory. Concurrent fetches share loads. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        block_bytes: int,
        lease: Lease,
        tiers: Sequence[LowerTier],
        locate: Callable[[Sequence[bytes]], list[str]],
        clock: Callable[[], float],
    ) -> None:
        """Create the loader.

        Args:
            arena: the memory that contains the slots into which blocks are loaded.
            block_bytes: bytes per block.
            lease: lease under which slots are reserved.
            tiers: tiers below host memory, the fastest first.
            locate: returns, for each block, the name of the fastest tier that has it, or "" if none
                has it.
            clock: returns the time in seconds.
        """
        self.tiers = tiers
        self.locate = locate
        self.now = clock
        self.alarms = Alarms(clock)
        self._arena = arena
        self._block_bytes = block_bytes
        self._lease = lease
        self._lock = threading.Lock()
        self._pending: dict[bytes, PendingBlock] = {}
        """Blocks that are being loaded, by key.

        A block stays in this map while its slot is reserved. The loader's lock protects the map.
        """

    @property
    def num_pending(self) -> int:
        """Number of blocks that are being loaded."""
        return len(self._pending)

    def load(
        self, fetch: BlockFetch, tier: LowerTier, places: Sequence[int], deadline_s: float
    ) -> None:
        """Start loading a fetch's blocks at the indices `places` from one tier."""
        load = self._reserve(fetch, tier, places)
        if not load.blocks:
            return

        transfers = [
            Transfer(block.key, self._arena.slot(block.ref.slot, self._block_bytes))
            for block in load.blocks
        ]
        loading = tier.load(transfers, deadline_s)
        loading.add_done_callback(lambda loaded: self._commit(load, loaded.result()))

    def close(self) -> None:
        """Stop the deadline alarms. Close the tiers first, so that no loads are still running."""
        self.alarms.close()

    def _reserve(self, fetch: BlockFetch, tier: LowerTier, places: Sequence[int]) -> TierLoad:
        """Reserve slots for blocks that no fetch is loading yet. Return them as a `TierLoad`."""
        load = TierLoad(tier.name, fetch.ends_at)
        with self._lock:
            for place in places:
                key = fetch.keys[place]
                if (pending := self._pending.get(key)) is not None:
                    fetch.expect(place, pending)
                    continue
                if fetch.refusal is not None:
                    fetch.results[place] = fetch.refusal
                    continue

                reserved = self._lease.reserve(key, _parent(fetch.keys, place))
                if reserved.ref is None:
                    is_here = reserved.status is Status.EXISTS
                    fetch.results[place] = _IN_HOST if is_here else Result(reserved.status, HOST)
                    if reserved.status is Status.FULL:
                        # Blocks behind this one would take the slots of those before it.
                        fetch.refusal = fetch.results[place]
                    continue

                block = PendingBlock(key, reserved.ref, load)
                self._pending[key] = block
                load.blocks.append(block)
                fetch.expect(place, block)
        return load

    def _commit(self, load: TierLoad, results: Sequence[Result]) -> None:
        """Make successfully loaded blocks readable, and free the slots of all others."""
        with self._lock:
            for block, result in zip(load.blocks, results, strict=True):
                if result.status is not Status.HIT:
                    self._lease.abort(block.ref)
                    block.result = result
                elif self._lease.commit(block.ref) is Status.STORED:
                    block.result = result
                else:  # removed meanwhile
                    block.result = MISS
                del self._pending[block.key]
        load.arrived.set_result(None)


def _parent(keys: Sequence[bytes], place: int) -> bytes | None:
    """Return the key at index `place` - 1 if it is in the same chain, or None otherwise.

    A chain consists of the consecutive blocks of one text, whose keys share a prefix.
    """
    is_chain = place > 0 and keys[place - 1][:CHAIN_BYTES] == keys[place][:CHAIN_BYTES]
    return keys[place - 1] if is_chain else None
