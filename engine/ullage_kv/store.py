"""The KV store, which keeps blocks in host memory, and copies of them in lower tiers.

Blocks are written to host memory first. Those that are likely to be read again are copied to lower
tiers in the background (see `write_through`). Eviction drops blocks without copying them. Blocks
that only a lower tier has are fetched into host memory before they are read (see `fetch`).
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np

from ullage_kv.arena import Arena
from ullage_kv.fetch import BlockFetch, Loader, parts_of
from ullage_kv.futures import all_done, done
from ullage_kv.index import Lease, SlotIndex, SlotRef
from ullage_kv.results import HOST, MISS, Result, Status
from ullage_kv.tier import BusyTime, LowerTier, TierCounter, TierStats
from ullage_kv.write_through import WriteThrough

DEADLINE_S = 5.0
"""Default deadline for fetching a block, in seconds. After that, the block counts as a miss."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Block(NamedTuple):
    """A block to store."""

    key: bytes
    parent: bytes | None = None
    """Key of the previous block in the chain, or None if unknown or if there is no such block."""
    is_kept: bool = False
    """Whether to copy the block to lower tiers at once, because it is expected to be read again.

    Other blocks are copied when they are used for the second time.
    """


class Store:
    """Stores content-addressed blocks of equal size from one namespace. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        block_bytes: int,
        tiers: Sequence[LowerTier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open a store in an arena.

        Args:
            arena: the memory of the host tier, which the caller closes after the store.
            block_bytes: size of every block.
            tiers: tiers below host memory, the fastest first. The store closes them.
            clock: returns the time in seconds, for the deadlines of fetches.
        """
        arena.cut(block_bytes)
        self.block_bytes = block_bytes
        self.arena = arena
        self.index = SlotIndex(arena.num_slots)

        self._tiers = list(tiers)
        self._clock = clock
        self._counter = TierCounter()
        self._stored = Result(Status.STORED, HOST, block_bytes)
        self._own = self.index.lease()
        self._loader = Loader(arena, block_bytes, self._own, self._tiers, self.contains, clock)
        self._write_through = WriteThrough(arena, block_bytes, self.index, self._own, self._tiers)

    # whole blocks --------------------------------------------------------------------------------

    def put_batch(self, blocks: Sequence[Block | bytes], buffers: Sequence[Any]) -> list[Result]:
        """Store copies of buffers, each `block_bytes` long.

        Args:
            blocks: a `Block`, or its key alone, for each buffer.
            buffers: objects with the buffer protocol or DLPack, contiguous, on the CPU.

        Returns:
            For each block, STORED, EXISTS, or the reason why it was not stored.

        Raises:
            ValueError: a buffer has the wrong size, or there are not as many buffers as blocks.
        """
        views = [self._bytes_of(each) for each in buffers]
        wanted = [each if isinstance(each, Block) else Block(each) for each in blocks]
        reserved = [self._own.reserve(each.key, each.parent) for each in wanted]
        refs = [each.ref for each in reserved]

        try:
            self._copy(views, refs, self._counter.writing, is_put=True)
        except ValueError:  # not as many buffers as blocks
            for ref in refs:
                if ref is not None:
                    self._own.abort(ref)
            raise

        results = [
            Result(status, HOST) if ref is None else self._commit(self._own, ref)
            for status, ref in reserved
        ]
        self._counter.saved([each for each in results if each.num_bytes])
        self._copy_down_if(wanted, [each.num_bytes > 0 for each in results])
        return results

    def get_batch(
        self, keys: Sequence[bytes], into: Sequence[Any], deadline_s: float = DEADLINE_S
    ) -> list[Result]:
        """Copy blocks to writable buffers, each `block_bytes` long.

        The call waits for lower tiers for at most `deadline_s` seconds.

        Returns:
            For each block, HIT with the tier that had it, or the reason why it was not copied.

        Raises:
            ValueError: a buffer has the wrong size.
        """
        views = [self._bytes_of(each) for each in into]
        self.index.touch(keys)
        refs = [self._own.pin(key) for key in keys]
        try:
            results = self._read(keys, views, refs, deadline_s)
        finally:
            for ref in refs:
                if ref is not None:
                    self._own.unpin(ref)

        self._counter.loaded([each if each.tier == HOST else MISS for each in results])
        self._write_through.copy(keys)
        return results

    def _read(
        self,
        keys: Sequence[bytes],
        views: Sequence[Bytes],
        refs: list[SlotRef | None],
        deadline_s: float,
    ) -> list[Result]:
        """Copy blocks from pinned slots, after fetching and pinning any that are not pinned yet."""
        fetch = BlockFetch(self._loader, keys, self._clock() + deadline_s)
        fetching = []
        if None in refs:
            wait([self.look(keys)], max(0.0, deadline_s))
            fetching = [(part, fetch.begin(part)) for part in parts_of(len(keys))]

        # The blocks in host memory are copied while lower tiers load the others.
        self._copy(views, refs, self._counter.reading)

        results = [Result(Status.HIT, HOST, self.block_bytes)] * len(keys)
        for part, arrived in fetching:
            arrived.result()
            for place in [place for place in part if refs[place] is None]:
                result = fetch.results[place]
                ref = self._own.pin(keys[place]) if result.status is Status.HIT else None
                if ref is not None:
                    refs[place] = ref
                    self._copy([views[place]], [ref], self._counter.reading)
                    result = Result(Status.HIT, result.tier, self.block_bytes)
                elif result.status is Status.HIT:  # evicted or removed since
                    result = MISS
                results[place] = result
        return results

    def _copy(
        self,
        views: Sequence[Bytes],
        refs: Sequence[SlotRef | None],
        busy: BusyTime,
        *,
        is_put: bool = False,
    ) -> None:
        """Copy blocks from buffers to slots if `is_put`, otherwise from slots to buffers."""
        memory = np.frombuffer(self.arena.memory, np.uint8)
        starts = [None if ref is None else ref.slot * self.arena.slot_bytes for ref in refs]
        slots = [None if at is None else memory[at : at + self.block_bytes] for at in starts]

        # All else is done before, since copying a block evicts Python's own data from the caches.
        with busy:
            for view, slot in zip(views, slots, strict=True):
                if slot is not None:
                    np.copyto(slot, view) if is_put else np.copyto(view, slot)

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        """Find out which of the blocks the lower tiers have, unless this is already known.

        `contains`, `lookup_prefix` and `fetch` can use the answers once the returned future
        completes, which takes at most a fraction of a load's deadline.
        """
        if not self._tiers:
            return done(None)

        in_host = self.index.contains_each(keys)
        missing = [key for key, is_here in zip(keys, in_host, strict=True) if not is_here]
        if not missing:
            return done(None)
        return all_done([tier.look(missing) for tier in self._tiers])

    def contains(self, keys: Sequence[bytes]) -> list[str]:
        """Return the name of the fastest tier known to have each block, or "" if none has it.

        The call does not block.
        """
        names = [HOST if is_here else "" for is_here in self.index.contains_each(keys)]
        for tier in self._tiers:
            missing = [place for place, name in enumerate(names) if not name]
            held = tier.holds([keys[place] for place in missing])
            for place, is_held in zip(missing, held, strict=True):
                names[place] = tier.name if is_held else ""
        return names

    def lookup_prefix(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier of each block in the longest prefix of `keys` that is stored in full."""
        names = self.contains(keys)
        return names[: names.index("")] if "" in names else names

    @contextlib.contextmanager
    def pin(self, keys: Sequence[bytes]) -> Iterator[list[memoryview | None]]:
        """Pin blocks in host memory so that the body of a with statement can read them in place.

        Yields:
            The memory of each block, or None if the block is not in host memory.
        """
        lease = self.index.lease()
        try:
            refs = [lease.pin(key) for key in keys]
            yield [
                None if ref is None else self.arena.slot(ref.slot, self.block_bytes).toreadonly()
                for ref in refs
            ]
        finally:
            lease.close()

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        """Drop all blocks in the given chains from all tiers.

        Blocks that are being written are dropped on commit.

        Args:
            chains: the first `CHAIN_BYTES` of each chain's keys, or None for all blocks.
        """
        self.index.remove_chains(chains)
        for tier in self._tiers:
            tier.remove_chains(chains)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each block in a chain. Copy blocks to lower tiers on their second use."""
        self.index.touch(keys)
        self._write_through.copy(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Drop blocks from all tiers, for example because their contents may be damaged."""
        removed = list(keys)
        for key in removed:
            self.index.remove(key)
        for tier in self._tiers:
            tier.remove(removed)

    def fetch(
        self, keys: Sequence[bytes], deadline_s: float = DEADLINE_S
    ) -> "Future[list[Result]]":
        """Start fetching blocks into host memory if only lower tiers have them.

        If another call is already fetching a block, this call waits for that load instead of
        starting a second one. The load continues even if this call times out. Long lists of blocks
        are split into chunks. The first few chunks start immediately, and each later chunk starts
        when an earlier one has finished. If a tier refuses every block in a chunk because it is
        full, busy or unresponsive, all remaining blocks get the same result.

        Returns:
            A future that completes within `deadline_s` seconds. For each block, its result is HIT
            with the tier that had the block, or the reason why the block is not in host memory.
        """
        return BlockFetch(self._loader, keys, self._clock() + deadline_s).run()

    # for those that write and read slots themselves ----------------------------------------------

    def offer(self, lease: Lease, blocks: Sequence[Block]) -> list[SlotRef | None]:
        """Reserve slots in which the lease holder can write the blocks that are not stored yet.

        Returns:
            The slot of each block, or None if the block is already stored or no slot is free.
        """
        reserved = [lease.reserve(block.key, block.parent) for block in blocks]
        statuses = [each.status for each in reserved]
        self._copy_down_if(blocks, [status is Status.EXISTS for status in statuses])
        return [each.ref for each in reserved]

    def committed(
        self, lease: Lease, refs: Sequence[SlotRef], blocks: Sequence[Block]
    ) -> list[Result]:
        """Make blocks in reserved slots readable, and copy some of them to lower tiers.

        Blocks are copied if their `is_kept` is set or they are used often.
        """
        results = [self._commit(lease, ref) for ref in refs]
        self._counter.saved(results)
        self._copy_down_if(blocks, [each.status is Status.STORED for each in results])
        return results

    def _commit(self, lease: Lease, ref: SlotRef) -> Result:
        status = lease.commit(ref)
        return self._stored if status is Status.STORED else Result(status, HOST)

    def was_read(self, results: Sequence[Result]) -> None:
        """Update the statistics for blocks that a lease holder has read directly from slots."""
        self._counter.loaded(results)

    def stats(self) -> list[TierStats]:
        """Return every tier's statistics, with host memory first."""
        index = self.index
        num_used = index.num_slots - index.num_free
        host = self._counter.stats(
            HOST,
            "shared memory",
            capacity_bytes=index.num_slots * self.arena.slot_bytes,
            used_bytes=num_used * self.arena.slot_bytes,
            num_blocks=len(index),
            evictions=index.num_evicted,
        )
        return [host, *(tier.stats() for tier in self._tiers)]

    @property
    def num_pending(self) -> int:
        """Number of blocks that lower tiers are currently loading into host memory."""
        return self._loader.num_pending

    def check_integrity(self, leases: Sequence[Lease]) -> None:
        """Assert that all reserved and pinned slots belong to `leases` or to the store itself."""
        self.index.check_integrity([self._own, *leases])

    def close(self) -> None:
        """Close all tiers. The arena stays open until its owner closes it."""
        for tier in self._tiers:
            tier.close()
        self._loader.close()
        self._own.close()

    def _copy_down_if(self, blocks: Sequence[Block], in_host: Sequence[bool]) -> None:
        """Copy blocks to lower tiers if their `is_kept` is set or they are used often.

        Blocks whose value in `in_host` is false are skipped, because host memory lacks them.
        """
        for is_kept in (False, True):
            chosen = [
                block.key
                for block in itertools.compress(blocks, in_host)
                if block.is_kept is is_kept
            ]
            self._write_through.copy(chosen, are_kept=is_kept)

    def _bytes_of(self, buffer: Any) -> Bytes:
        """Return a view of a buffer's bytes."""
        try:
            view = np.frombuffer(buffer, np.uint8)
        except TypeError:
            array = np.from_dlpack(buffer)
            view = array.reshape(-1).view(np.uint8)
        if view.nbytes != self.block_bytes:
            raise ValueError(
                f"a buffer has {view.nbytes} bytes, and blocks have {self.block_bytes}"
            )
        return view
