"""The store: blocks in host memory, and copies of them in lower tiers.

Blocks are written to host memory first. From there those that are worth it are copied down, in the
background, and never at the moment when room is needed: what is evicted is only forgotten. Blocks
that only a lower tier has are fetched back to host memory before they are read.
"""

import contextlib
import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from ullage_kv.arena import Arena
from ullage_kv.index import Lease, SlotIndex, SlotRef
from ullage_kv.keys import CHAIN_BYTES
from ullage_kv.results import MISS, Result, Status
from ullage_kv.tier import BusyTime, LowerTier, TierCounter, TierStats, Transfer, done

HOST = "host"
"""Name of the tier in host memory."""

_USES_TO_COPY_DOWN = 2
DEADLINE_S = 5.0
"""Seconds after which a block that is being fetched counts as a miss, unless the caller says."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Block(NamedTuple):
    """A block to store: its key, and the key of the block that it continues, if any."""

    key: bytes
    parent: bytes | None = None
    is_kept: bool = False
    """Whether it is copied down at once, as it will be asked for again: blocks that nobody says
    that of are copied down when they are used a second time."""


class Store:
    """Content-addressed blocks of one namespace and one size; safe to use from several threads."""

    def __init__(self, arena: Arena, block_bytes: int, tiers: Sequence[LowerTier] = ()) -> None:
        """`tiers`: those below host memory, the fastest first; the store closes them."""
        arena.cut(block_bytes)
        self.block_bytes = block_bytes
        self.arena = arena
        self.index = SlotIndex(arena.num_slots)
        self._tiers = list(tiers)
        self._counter = TierCounter()
        self._own = self.index.lease()
        self._lock = threading.Lock()
        self._fetching: dict[bytes, Future[Result]] = {}

    # whole blocks --------------------------------------------------------------------------------

    def put_batch(self, blocks: Sequence[Block | bytes], buffers: Sequence[Any]) -> list[Result]:
        """Stores copies of buffers, each `block_bytes` long.

        Args:
            blocks: keys, or blocks that say more.
            buffers: objects with the buffer protocol or DLPack, contiguous, on the CPU.

        Raises:
            ValueError: a buffer has another size.
        """
        views = [self._bytes_of(each) for each in buffers]
        wanted = [_block(each) for each in blocks]
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
        stored = [each for each in zip(wanted, results, strict=True) if each[1].num_bytes]
        self._counter.saved([result for _, result in stored])
        for is_kept in (False, True):
            keys = [block.key for block, _ in stored if block.is_kept is is_kept]
            self._copy_down(keys, are_kept=is_kept)
        return results

    def get_batch(
        self, keys: Sequence[bytes], into: Sequence[Any], deadline_s: float = DEADLINE_S
    ) -> list[Result]:
        """Copies blocks to writable buffers, each `block_bytes` long; HIT names the tier that had
        the block. Waits for lower tiers, at most `deadline_s` seconds.

        Raises:
            ValueError: a buffer has another size.
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
        self._copy_down(keys)
        return results

    def _read(
        self,
        keys: Sequence[bytes],
        views: Sequence[Bytes],
        refs: list[SlotRef | None],
        deadline_s: float,
    ) -> list[Result]:
        """Copies from the slots that are pinned, and from those that are fetched and then are."""
        fetched: list[Future[Result]] = []
        if None in refs:
            self.look(keys).result()
            fetched = self.fetch(keys, deadline_s)
        self._copy(views, refs, self._counter.reading)
        results = [Result(Status.HIT, HOST, self.block_bytes)] * len(keys)
        for place in [place for place, ref in enumerate(refs) if ref is None]:
            result = fetched[place].result()
            ref = self._own.pin(keys[place]) if result.status is Status.HIT else None
            if ref is not None:
                refs[place] = ref
                self._copy([views[place]], [ref], self._counter.reading)
                result = Result(Status.HIT, result.tier, self.block_bytes)
            elif result.status is Status.HIT:
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
        """Copies between callers' memory and slots. Nothing else happens between two blocks: what
        Python needs itself is no longer in the processor's caches after each."""
        memory = np.frombuffer(self.arena.memory, np.uint8)
        starts = [None if ref is None else ref.slot * self.arena.slot_bytes for ref in refs]
        slots = [None if at is None else memory[at : at + self.block_bytes] for at in starts]
        with busy:
            for view, slot in zip(views, slots, strict=True):
                if slot is not None:
                    np.copyto(slot, view) if is_put else np.copyto(view, slot)

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        """Finds out which lower tiers have blocks, where that must be asked for: afterwards
        `contains`, `lookup_prefix` and `fetch` go by it. It takes a part of a deadline at most."""
        missing = [key for key in keys if not self.index.contains(key)]
        if not missing or not self._tiers:
            return done(None)
        return _all_done([tier.look(missing) for tier in self._tiers])

    def contains(self, keys: Sequence[bytes]) -> list[str]:
        """Names for each block the highest tier that has it, as far as is known without waiting;
        empty: none."""
        names = [HOST if self.index.contains(key) else "" for key in keys]
        for tier in self._tiers:
            missing = [place for place, name in enumerate(names) if not name]
            held = tier.holds([keys[place] for place in missing])
            for place, is_held in zip(missing, held, strict=True):
                names[place] = tier.name if is_held else ""
        return names

    def lookup_prefix(self, keys: Sequence[bytes]) -> list[str]:
        """Names the tiers of the first blocks, up to the first one that none has."""
        names = self.contains(keys)
        return names[: names.index("")] if "" in names else names

    @contextlib.contextmanager
    def pin(self, keys: Sequence[bytes]) -> Iterator[list[memoryview | None]]:
        """Keeps blocks in host memory while the body of a with statement runs, which may read them
        where they are: yields the memory of each, None for those that are not there."""
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
        """Drops all blocks of chains from all tiers, by the first `CHAIN_BYTES` of their keys.

        None: everything. What is being written is found by nobody either.
        """
        self.index.remove_chains(chains)
        for tier in self._tiers:
            tier.remove_chains(chains)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts as a use of a chain; what is used a second time is copied down."""
        self.index.touch(keys)
        self._copy_down(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Drops blocks from all tiers, as when their bytes may be damaged."""
        removed = list(keys)
        for key in removed:
            self.index.remove(key)
        for tier in self._tiers:
            tier.remove(removed)

    def fetch(
        self, keys: Sequence[bytes], deadline_s: float = DEADLINE_S
    ) -> "list[Future[Result]]":
        """Brings blocks to host memory that only lower tiers have; returns at once.

        Each result is HIT, with the tier that had the block, or why it is not there. What is being
        fetched already is not fetched twice.
        """
        futures: list[Future[Result] | None] = [None] * len(keys)
        wanted: dict[str, list[int]] = {}
        for place, name in enumerate(self.contains(keys)):
            if name and name != HOST:
                wanted.setdefault(name, []).append(place)
            else:
                futures[place] = done(Result(Status.HIT, HOST) if name else MISS)
        with self._lock:
            for places in wanted.values():
                for place in places:
                    futures[place] = self._fetching.get(keys[place])
        for tier in self._tiers:
            places = [place for place in wanted.get(tier.name, []) if futures[place] is None]
            blocks = [Block(keys[place], _parent(keys, place)) for place in places]
            loaded = self._load(tier, blocks, deadline_s)
            for place, future in zip(places, loaded, strict=True):
                futures[place] = future
        return [future if future is not None else done(MISS) for future in futures]

    def _load(
        self, tier: LowerTier, blocks: Sequence[Block], deadline_s: float
    ) -> "list[Future[Result]]":
        futures: list[Future[Result]] = []
        loading: list[tuple[bytes, SlotRef, Future[Result]]] = []
        for block in blocks:
            reserved = self._own.reserve(block.key, block.parent)
            if reserved.ref is None:
                futures.append(self._arriving(block.key, reserved.status))
                continue
            future = Future[Result]()
            futures.append(future)
            loading.append((block.key, reserved.ref, future))
            with self._lock:
                self._fetching[block.key] = future
        if not loading:
            return futures
        transfers = [
            Transfer(key, self.arena.slot(ref.slot, self.block_bytes)) for key, ref, _ in loading
        ]

        def finish(results: "Future[list[Result]]") -> None:
            for (key, ref, future), result in zip(loading, results.result(), strict=True):
                if result.status is not Status.HIT:
                    self._own.abort(ref)
                elif self._own.commit(ref) is not Status.STORED:
                    result = MISS  # removed meanwhile
                with self._lock:
                    self._fetching.pop(key, None)
                future.set_result(result)

        tier.load(transfers, deadline_s).add_done_callback(finish)
        return futures

    def _arriving(self, key: bytes, status: Status) -> "Future[Result]":
        """Returns the result of a block that has no slot to be loaded to, by the reason of that."""
        if status is Status.EXISTS:
            return done(Result(Status.HIT, HOST))
        with self._lock:
            return self._fetching.get(key) or done(Result(status, HOST))

    # for those that write and read slots themselves ----------------------------------------------

    def offer(self, lease: Lease, block: Block) -> SlotRef | None:
        """Reserves a slot for a block that is not here, and is to be written by the holder of the
        lease; None: it is here, or there is no room."""
        reserved = lease.reserve(block.key, block.parent)
        if reserved.status is Status.EXISTS:
            self._copy_down([block.key], are_kept=block.is_kept)
        return reserved.ref

    def committed(self, lease: Lease, ref: SlotRef, block: Block) -> Result:
        """Makes the block readable that was written to a reserved slot, and copies it down if it is
        kept."""
        result = self._commit(lease, ref)
        self._counter.saved([result])
        if result.status is Status.STORED:
            self._copy_down([block.key], are_kept=block.is_kept)
        return result

    def _commit(self, lease: Lease, ref: SlotRef) -> Result:
        status = lease.commit(ref)
        return Result(status, HOST, self.block_bytes if status is Status.STORED else 0)

    def was_read(self, results: Sequence[Result]) -> None:
        """Counts reads of slots that somebody else has done."""
        self._counter.loaded(results)

    def stats(self) -> list[TierStats]:
        """Returns the figures of every tier, that of the host first."""
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

    def close(self) -> None:
        """Ends all tiers; the memory is its owner's."""
        for tier in self._tiers:
            tier.close()
        self._own.close()

    def _copy_down(self, keys: Sequence[bytes], *, are_kept: bool = False) -> None:
        """Copies blocks to lower tiers that have come to be worth it, or are kept."""
        if self._tiers:
            least = 1 if are_kept else _USES_TO_COPY_DOWN
            self._save([key for key in keys if self.index.num_uses(key) >= least])

    def _save(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            wanted = [key for key, wants in zip(keys, tier.wants(keys), strict=True) if wants]
            pinned = [(key, ref) for key in wanted if (ref := self._own.pin(key)) is not None]
            if not pinned:
                continue
            refs = [ref for _, ref in pinned]

            def unpin(_: object, refs: list[SlotRef] = refs) -> None:
                for ref in refs:
                    self._own.unpin(ref)

            transfers = [
                Transfer(key, self.arena.slot(ref.slot, self.block_bytes), self.index.parent(key))
                for key, ref in pinned
            ]
            tier.save(transfers).add_done_callback(unpin)

    def _bytes_of(self, buffer: Any) -> Bytes:
        """Returns a view of a buffer's bytes."""
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


def _block(block: Block | bytes) -> Block:
    return block if isinstance(block, Block) else Block(block)


def _parent(keys: Sequence[bytes], place: int) -> bytes | None:
    """Returns the block before one of a list, if they may be of one chain."""
    is_chain = place > 0 and keys[place - 1][:CHAIN_BYTES] == keys[place][:CHAIN_BYTES]
    return keys[place - 1] if is_chain else None


def _all_done(futures: "Sequence[Future[None]]") -> "Future[None]":
    """Returns one future for all of some that never fail."""
    together = Future[None]()
    countdown = itertools.count(1)

    def count(_: "Future[None]") -> None:
        if next(countdown) == len(futures):
            together.set_result(None)

    for future in futures:
        future.add_done_callback(count)
    return together
