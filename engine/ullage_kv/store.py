"""The store: blocks in host memory, and copies of them in lower tiers.

Blocks are written to host memory first. From there those that are worth it are copied down, in the
background, and never at the moment when room is needed: what is evicted is only forgotten. Blocks
that only a lower tier has are fetched back to host memory before they are read.
"""

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
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
_PART_BLOCKS = 128
"""Most blocks that are given together to a lower tier. A caller's thread, such as that of an event
loop, gives a few parts at most; those behind them are given by the threads of the tier."""
_PARTS_AT_ONCE = 2
"""Parts of one fetch that are on their way: while one ends, the threads of tiers have another."""
_SAVED_BYTES = 16 << 20
"""Most bytes that are given together to a lower tier to be saved, and pinned meanwhile."""
_IN_HOST = Result(Status.HIT, HOST)
_REFUSALS = {Status.FULL, Status.BUSY, Status.TIMEOUT, Status.UNAVAILABLE}
"""Results that are about a tier rather than about a block."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Block(NamedTuple):
    """A block to store: its key, and the key of the block that it continues, if any."""

    key: bytes
    parent: bytes | None = None
    is_kept: bool = False
    """Whether it is copied down at once, as it will be asked for again: blocks that nobody says
    that of are copied down when they are used a second time."""


class _Load(NamedTuple):
    """Blocks that one tier is loading to reserved slots."""

    tier: str
    ends_at: float
    """Time of its deadline by the store's clock."""
    keys: list[bytes]
    refs: list[SlotRef]
    results: "Future[list[Result]]"


@dataclass(slots=True)
class _Fetch:
    """One call's blocks, and what has become of each."""

    keys: Sequence[bytes]
    ends_at: float
    """Time of its deadline by the store's clock."""
    results: list[Result]
    refusal: Result | None = None
    """Result of all blocks in lower tiers that are not loaded yet, as there is no use in it; None:
    there is."""


class Store:
    """Content-addressed blocks of one namespace and one size; safe to use from several threads."""

    def __init__(
        self,
        arena: Arena,
        block_bytes: int,
        tiers: Sequence[LowerTier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            tiers: those below host memory, the fastest first; the store closes them.
            clock: in seconds, by which a fetch divides its deadline among its parts.
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
        self._lock = threading.Lock()
        self._alarms = _Alarms(clock)
        self._fetching: dict[bytes, tuple[_Load, int]] = {}
        """The load that each block will come with, and its place in that. A block enters and leaves
        together with the reservation of its slot, under the lock."""

    # whole blocks --------------------------------------------------------------------------------

    def put_batch(self, blocks: Sequence[Block | bytes], buffers: Sequence[Any]) -> list[Result]:
        """Store copies of buffers, each `block_bytes` long.

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
        self._counter.saved([each for each in results if each.num_bytes])
        self._copy_down_if(wanted, [each.num_bytes > 0 for each in results])
        return results

    def get_batch(
        self, keys: Sequence[bytes], into: Sequence[Any], deadline_s: float = DEADLINE_S
    ) -> list[Result]:
        """Copy blocks to writable buffers, each `block_bytes` long; HIT names the tier that had
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
        fetch = _Fetch(keys, self._clock() + deadline_s, [MISS] * len(keys))
        fetching = []
        if None in refs:
            wait([self.look(keys)], max(0.0, deadline_s))
            fetching = [(part, self._begin(fetch, part)) for part in _parts(len(keys))]
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
        """Find out which lower tiers have blocks, where that must be asked for: afterwards
        `contains`, `lookup_prefix` and `fetch` go by it. It takes a part of a deadline at most."""
        if not self._tiers:
            return done(None)
        in_host = self.index.contains_each(keys)
        missing = [key for key, is_here in zip(keys, in_host, strict=True) if not is_here]
        if not missing:
            return done(None)
        return _all_done([tier.look(missing) for tier in self._tiers])

    def contains(self, keys: Sequence[bytes]) -> list[str]:
        """Names for each block the highest tier that has it, as far as is known without waiting;
        empty: none."""
        names = [HOST if is_here else "" for is_here in self.index.contains_each(keys)]
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
        """Keep blocks in host memory while the body of a with statement runs, which may read them
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
        """Drop all blocks of chains from all tiers, by the first `CHAIN_BYTES` of their keys.

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
        """Drop blocks from all tiers, as when their bytes may be damaged."""
        removed = list(keys)
        for key in removed:
            self.index.remove(key)
        for tier in self._tiers:
            tier.remove(removed)

    def fetch(
        self, keys: Sequence[bytes], deadline_s: float = DEADLINE_S
    ) -> "Future[list[Result]]":
        """Brings blocks to host memory that only lower tiers have; returns at once.

        Each result is HIT, with the tier that had the block, or why it is not there; all are there
        when `deadline_s` seconds have passed. What is being fetched already is not fetched twice,
        and goes on where this deadline is sooner than its own. Of many blocks the first are begun
        at once, and others when those have come; where nothing comes, because a tier is full, busy
        or does not answer, the others have the same result.
        """
        fetch = _Fetch(keys, self._clock() + deadline_s, [MISS] * len(keys))
        parts = iter(_parts(len(keys)))
        finished = [Future[None]() for _ in range(_PARTS_AT_ONCE)]
        for each in finished:
            self._go_on(fetch, parts, each)
        results = Future[list[Result]]()
        _all_done(finished).add_done_callback(lambda _: results.set_result(fetch.results))
        return results

    def _go_on(self, fetch: _Fetch, parts: Iterator[range], finished: "Future[None]") -> None:
        """Fetch one part after the other; in the thread of the caller until one is waited for,
        then in those of tiers."""
        for part in parts:
            arrived = self._begin(fetch, part)
            if not arrived.done():
                arrived.add_done_callback(lambda _: self._go_on(fetch, parts, finished))
                return
        finished.set_result(None)

    def _begin(self, fetch: _Fetch, part: range) -> "Future[None]":
        """Begin to fetch a part; returns when its results are there."""
        keys = fetch.keys
        wanted = dict[str, list[int]]()
        for place, name in zip(part, self.contains(keys[part.start : part.stop]), strict=True):
            if name and name != HOST:
                wanted.setdefault(name, []).append(place)
            elif name:
                fetch.results[place] = _IN_HOST
        if not wanted:
            return done(None)
        places = [place for each in wanted.values() for place in each]
        deadline_s = fetch.ends_at - self._clock()
        if fetch.refusal is None and deadline_s <= 0:
            fetch.refusal = Result(Status.TIMEOUT, next(iter(wanted)))
        if fetch.refusal is not None:
            for place in places:
                fetch.results[place] = fetch.refusal
            return done(None)
        arriving: list[tuple[int, _Load, int]] = []
        for tier in self._tiers:
            load = self._reserve(fetch, tier, wanted.get(tier.name, ()), arriving)
            if load.keys:
                self._load(tier, load, deadline_s)
        loads = {id(load): load for _, load, _ in arriving}
        ended = _all_done([load.results for load in loads.values()])
        if any(load.ends_at > fetch.ends_at for load in loads.values()):  # begun by others
            self._alarms.finish_at(fetch.ends_at, ended)
        arrived = Future[None]()

        def take_results(_: "Future[None]") -> None:
            for place, load, number in arriving:
                late = Result(Status.TIMEOUT, load.tier)
                is_done = load.results.done()
                fetch.results[place] = load.results.result()[number] if is_done else late
            if all(fetch.results[place].status in _REFUSALS for place in places):
                fetch.refusal = fetch.results[places[-1]]
            arrived.set_result(None)

        ended.add_done_callback(take_results)
        return arrived

    def _reserve(
        self,
        fetch: _Fetch,
        tier: LowerTier,
        places: Sequence[int],
        arriving: list[tuple[int, _Load, int]],
    ) -> _Load:
        """Reserve slots for blocks that one tier is to load, and add to `arriving` where their
        results will be, and those of what is being loaded already."""
        load = _Load(tier.name, fetch.ends_at, [], [], Future())
        with self._lock:
            for place in places:
                key = fetch.keys[place]
                if (other := self._fetching.get(key)) is not None:
                    arriving.append((place, *other))
                    continue
                if fetch.refusal is not None:
                    fetch.results[place] = fetch.refusal
                    continue
                reserved = self._own.reserve(key, _parent(fetch.keys, place))
                if reserved.ref is None:
                    is_here = reserved.status is Status.EXISTS
                    fetch.results[place] = _IN_HOST if is_here else Result(reserved.status, HOST)
                    if reserved.status is Status.FULL:
                        # Or blocks behind this one would take the slots of those before it.
                        fetch.refusal = fetch.results[place]
                    continue
                arriving.append((place, load, len(load.keys)))
                self._fetching[key] = load, len(load.keys)
                load.keys.append(key)
                load.refs.append(reserved.ref)
        return load

    def _load(self, tier: LowerTier, load: _Load, deadline_s: float) -> None:
        def finish(loaded: "Future[list[Result]]") -> None:
            results = list(loaded.result())
            with self._lock:
                for number, (key, ref) in enumerate(zip(load.keys, load.refs, strict=True)):
                    if results[number].status is not Status.HIT:
                        self._own.abort(ref)
                    elif self._own.commit(ref) is not Status.STORED:
                        results[number] = MISS  # removed meanwhile
                    del self._fetching[key]
            load.results.set_result(results)

        transfers = [
            Transfer(key, self.arena.slot(ref.slot, self.block_bytes))
            for key, ref in zip(load.keys, load.refs, strict=True)
        ]
        tier.load(transfers, deadline_s).add_done_callback(finish)

    # for those that write and read slots themselves ----------------------------------------------

    def offer(self, lease: Lease, blocks: Sequence[Block]) -> list[SlotRef | None]:
        """Reserve a slot for each block that is not here, to be written by the holder of the
        lease; None: it is here, or there is no room."""
        reserved = [lease.reserve(block.key, block.parent) for block in blocks]
        statuses = [each.status for each in reserved]
        self._copy_down_if(blocks, [status is Status.EXISTS for status in statuses])
        return [each.ref for each in reserved]

    def committed(
        self, lease: Lease, refs: Sequence[SlotRef], blocks: Sequence[Block]
    ) -> list[Result]:
        """Make blocks readable that were written to reserved slots, and copy those down that are
        kept."""
        results = [self._commit(lease, ref) for ref in refs]
        self._counter.saved(results)
        self._copy_down_if(blocks, [each.status is Status.STORED for each in results])
        return results

    def _commit(self, lease: Lease, ref: SlotRef) -> Result:
        status = lease.commit(ref)
        return self._stored if status is Status.STORED else Result(status, HOST)

    def was_read(self, results: Sequence[Result]) -> None:
        """Count reads of slots that somebody else has done."""
        self._counter.loaded(results)

    def stats(self) -> list[TierStats]:
        """Return the figures of every tier, that of the host first."""
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

    def check_integrity(self, leases: Sequence[Lease]) -> None:
        """Asserts that slots are reserved and pinned by these leases and by the store alone."""
        self.index.check_integrity([self._own, *leases])

    def close(self) -> None:
        """End all tiers; the memory is its owner's."""
        for tier in self._tiers:
            tier.close()
        self._alarms.close()
        self._own.close()

    def _copy_down_if(self, blocks: Sequence[Block], in_host: Sequence[bool]) -> None:
        """Copy those blocks down that are here and worth it."""
        for is_kept in (False, True):
            chosen = [
                block.key
                for block in itertools.compress(blocks, in_host)
                if block.is_kept is is_kept
            ]
            self._copy_down(chosen, are_kept=is_kept)

    def _copy_down(self, keys: Sequence[bytes], *, are_kept: bool = False) -> None:
        """Copy blocks to lower tiers that have come to be worth it, or are kept."""
        if self._tiers:
            least = 1 if are_kept else _USES_TO_COPY_DOWN
            uses = self.index.uses_of_each(keys)
            worth = [key for key, num_uses in zip(keys, uses, strict=True) if num_uses >= least]
            num_blocks = max(1, min(_PART_BLOCKS, _SAVED_BYTES // self.block_bytes))
            for tier in self._tiers:
                self._save(tier, worth, iter(_parts(len(worth), num_blocks)))

    def _save(self, tier: LowerTier, keys: Sequence[bytes], parts: Iterator[range]) -> None:
        """Copy one part after the other to a tier, until it takes no more; in the thread of the
        caller until one is waited for, then in those of the tier."""

        def on_saved(saved: "Future[list[Result]]") -> None:
            if _takes_more(saved):
                self._save(tier, keys, parts)

        for part in parts:
            saving = self._save_part(tier, keys[part.start : part.stop])
            if saving is None:
                continue
            if not saving.done():
                saving.add_done_callback(on_saved)
                return
            if not _takes_more(saving):
                return

    def _save_part(self, tier: LowerTier, keys: Sequence[bytes]) -> "Future[list[Result]] | None":
        """Begin to copy blocks that a tier wants; None: it wants none that is here."""
        wanted = itertools.compress(keys, tier.wants(keys))
        pinned = [(key, ref) for key in wanted if (ref := self._own.pin(key)) is not None]
        if not pinned:
            return None

        def unpin(_: object) -> None:
            for _, ref in pinned:
                self._own.unpin(ref)

        transfers = [
            Transfer(key, self.arena.slot(ref.slot, self.block_bytes), self.index.parent(key))
            for key, ref in pinned
        ]
        saving = tier.save(transfers)
        saving.add_done_callback(unpin)
        return saving

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


def _block(block: Block | bytes) -> Block:
    return block if isinstance(block, Block) else Block(block)


def _takes_more(saved: "Future[list[Result]]") -> bool:
    return not any(result.status in _REFUSALS for result in saved.result())


def _parts(num_blocks: int, size: int = _PART_BLOCKS) -> list[range]:
    return [range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]


def _parent(keys: Sequence[bytes], place: int) -> bytes | None:
    """Return the block before one of a list, if they may be of one chain."""
    is_chain = place > 0 and keys[place - 1][:CHAIN_BYTES] == keys[place][:CHAIN_BYTES]
    return keys[place - 1] if is_chain else None


def _all_done(futures: "Sequence[Future[Any]]") -> "Future[None]":
    """Return one future for all of some that never fail."""
    together = Future[None]()
    if not futures:
        together.set_result(None)
    countdown = itertools.count(1)

    def count(_: "Future[Any]") -> None:
        if next(countdown) == len(futures):
            _finish(together)

    for future in futures:
        future.add_done_callback(count)
    return together


def _finish(future: "Future[None]") -> None:
    with contextlib.suppress(InvalidStateError):  # an alarm was sooner
        future.set_result(None)


class _Alarms:
    """Ends futures at given times, in one thread that runs once there was one to end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Future[None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def finish_at(self, at: float, future: "Future[None]") -> None:
        """Give a future its result at a time by the clock, unless it has one by then."""
        with self._changed:
            heapq.heappush(self._due, (at, next(self._numbers), future))
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="kv-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _work(self) -> None:
        while (future := self._next()) is not None:
            _finish(future)

    def _next(self) -> "Future[None] | None":
        """Wait for the next future that is due; None: it is closed."""
        with self._changed:
            while not self._is_closed:
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
        return None

    def close(self) -> None:
        """End nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
