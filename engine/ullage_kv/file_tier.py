"""The file tier: copies of blocks in a slot file, which the next process finds again.

Threads read and write, some for loads and some for saves, so that no load waits behind a save. They
read to memory of their own: a thread that hangs in a mount that does not answer can then be given
up at any moment, and writes to nobody's memory when the mount comes back. What a thread was writing
when it was given up is not entered in the table.
"""

import contextlib
import heapq
import itertools
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from ullage_kv.breaker import Breaker
from ullage_kv.file_io import FULL_ERRORS, Calls, FileTierError, Leftovers, SlotFile
from ullage_kv.index import SlotIndex
from ullage_kv.keys import CHAIN_BYTES
from ullage_kv.results import MISS, Result, Status
from ullage_kv.tier import TierCounter, TierStats, Transfer, done

log = logging.getLogger(__name__)

NAME = "file"
NUM_LOADING, NUM_SAVING = 4, 4
"""Threads: while some copy and take checksums, the device must have enough to do."""
_MAX_QUEUED_BYTES = 64 << 20
"""Most bytes of blocks that wait to be saved: each of them holds a slot of the host tier."""
_CALLS = Calls()
SAVE_DEADLINE_S = 30.0
"""Seconds after which a block that was not saved is given up."""
_CLOSE_S = 5.0
"""Seconds in which what waits to be saved is written when the tier is closed."""
_LOOK_S = 1.0
"""Seconds between two looks whether somebody has removed the files."""
_TRIM_S = 60.0
"""Seconds between two looks for folders without an engine, and between two tries to grow on a
device that is full."""

_Work = Callable[[int, memoryview, Callable[[], None]], None]
"""What a thread does for the transfer at a place of a batch, with memory of its own of a slot's
size. It calls the third argument when the next in the queue may begin."""


class _Batch:
    """What becomes of each transfer of one call: the first result counts."""

    def __init__(self, num_transfers: int, on_done: Callable[[Sequence[Result]], None]) -> None:
        self.future = Future[list[Result]]()
        self.future.set_running_or_notify_cancel()
        self._on_done = on_done
        self._lock = threading.Lock()
        self._results: list[Result | None] = [None] * num_transfers
        self._num_open = num_transfers
        self._copying = set[int]()
        self._expired: Result | None = None
        if not num_transfers:
            self.future.set_result([])

    def is_open(self, place: int) -> bool:
        """Whether the transfer has no result yet."""
        return self._results[place] is None and self._expired is None

    def copy(self, place: int, into: memoryview, source: memoryview) -> bool:
        """Copies to the transfer's memory; False: its owner has it back already."""
        with self._lock:
            if not self.is_open(place):
                return False
            self._copying.add(place)
        try:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
        finally:
            with self._lock:
                self._copying.discard(place)
                expired = self._expired
        if expired is not None:
            self.finish(place, expired)
        return expired is None

    def finish(self, place: int, result: Result) -> None:
        """Sets the result of one transfer, unless it has one."""
        with self._lock:
            if self._results[place] is not None:
                return
            self._results[place] = result
            self._num_open -= 1
            is_done = not self._num_open
        if is_done:
            results = [each for each in self._results if each is not None]
            self._on_done(results)
            self.future.set_result(results)

    def expire(self, result: Result) -> bool:
        """Ends what is under way with this result; False: nothing was."""
        with self._lock:
            if not self._num_open:
                return False
            self._expired = result
            places = [
                place
                for place, earlier in enumerate(self._results)
                if earlier is None and place not in self._copying
            ]
        for place in places:
            self.finish(place, result)
        return True


class _Deadlines:
    """Ends batches whose time is over. A thread of its own, as all others may hang."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, _Batch, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="file-deadlines", daemon=True)
        self._thread.start()

    def add(self, batch: _Batch, deadline_s: float, on_expired: Callable[[], None]) -> None:
        """`on_expired` is called when that has ended something."""
        at = time.monotonic() + deadline_s
        with self._condition:
            heapq.heappush(self._heap, (at, next(self._order), batch, on_expired))
            if self._heap[0][2] is batch:
                self._condition.notify()

    def close(self) -> None:
        """Ends all batches."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()
        for _, _, batch, _ in self._heap:
            batch.expire(Result(Status.UNAVAILABLE, NAME))

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            ended, on_expired = batch
            if ended.expire(Result(Status.TIMEOUT, NAME)):
                on_expired()

    def _next(self) -> tuple[_Batch, Callable[[], None]] | None:
        with self._condition:
            while not self._is_closed:
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    _, _, batch, on_expired = heapq.heappop(self._heap)
                    return batch, on_expired
                self._condition.wait(wait_s)
        return None


class _Job:
    """Work for the transfers of one call, which threads take one after the other."""

    def __init__(self, work: _Work, places: Iterable[int]) -> None:
        self.work = work
        self.places = deque(places)
        """Places of the transfers that no thread has taken."""


class _Lane:
    """A queue of jobs and the threads that work on it."""

    def __init__(
        self, name: str, num_threads: int, buffer_bytes: int, max_queued: int | None = None
    ) -> None:
        """`max_queued`: most transfers that wait; None: nothing bounds them."""
        self._condition = threading.Condition()
        self._turn = threading.Lock()
        """Held by the one whose turn it is to begin."""
        self._queue = deque[_Job]()
        self._num_waiting = 0
        """Transfers that no thread has taken."""
        self._max_queued = max_queued
        self._buffer_bytes = buffer_bytes
        self._num_active = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"file-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_queued(self) -> int:
        """Counts the transfers that wait and those that are under way."""
        return self._num_waiting + self._num_active

    @property
    def is_full(self) -> bool:
        return self._max_queued is not None and self._num_waiting >= self._max_queued

    def put(self, job: _Job, *, must: bool = False) -> list[int]:
        """Queues a job, up to where it is full; returns the places for which there is no room.

        `must`: there is room for all.
        """
        with self._condition:
            room = len(job.places)
            if self._max_queued is not None and not must:
                room = max(0, min(room, self._max_queued - self._num_waiting))
            if self._is_closed:
                room = 0
            refused = [job.places.pop() for _ in range(len(job.places) - room)]
            if job.places:
                self._queue.append(job)
                self._num_waiting += room
                self._condition.notify(room)
        return refused

    def drop(self, job: _Job) -> None:
        """Takes what waits of a job out of the queue."""
        with self._condition:
            if job in self._queue:
                self._queue.remove(job)
                self._num_waiting -= len(job.places)

    def close(self, ends_at: float, *, drop: bool = False) -> bool:
        """Ends the threads when all is done; False: some are not ready at `ends_at`.

        `drop`: what waits is not done any more.
        """
        with self._condition:
            self._is_closed = True
            if drop:
                self._clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        with self._condition:
            self._clear()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        # At the beginning of a page, as transfers past the page cache want it.
        buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
        while True:
            with contextlib.ExitStack() as turn:
                turn.enter_context(self._turn)
                taken = self._next()
                if taken is None:
                    return
                work, place = taken
                try:
                    work(place, buffer, turn.close)
                except Exception:
                    log.exception("a transfer failed unexpectedly")
            del work, taken  # they hold their caller's memory
            with self._condition:
                self._num_active -= 1

    def _clear(self) -> None:
        self._queue.clear()
        self._num_waiting = 0

    def _next(self) -> tuple[_Work, int] | None:
        with self._condition:
            while not self._queue:
                if self._is_closed:
                    return None
                self._condition.wait()
            job = self._queue[0]
            place = job.places.popleft()
            if not job.places:
                self._queue.popleft()
            self._num_waiting -= 1
            self._num_active += 1
            return job.work, place


class _Volume:
    """A slot file, the index of its blocks, and the lease of those who read and write them."""

    def __init__(self, file: SlotFile) -> None:
        self.file = file
        self.index = SlotIndex(0)
        self.index.add_slots(file.num_slots, [each[:3] for each in file.stored_blocks])
        self.lease = self.index.lease()
        way = "O_DIRECT" if file.is_direct else "buffered"
        self.backend = f"threads, {way}"
        log.info(
            "%s: %d blocks were stored before (%s)", file, len(file.stored_blocks), self.backend
        )


class FileTier:
    """Copies of blocks in files that outlive the process; see `LowerTier`."""

    name = NAME

    def __init__(
        self,
        path: Path | str,
        space: bytes,
        block_bytes: int,
        max_bytes: int,
        *,
        calls: Calls = _CALLS,
        clock: Callable[[], float] = time.monotonic,
        save_deadline_s: float = SAVE_DEADLINE_S,
    ) -> None:
        """Opens the files of a namespace, or makes them.

        Args:
            path: folder; engines may share it, each has its own files in it.
            space: the namespace, 32 bytes, which `keys.namespace` makes.
            block_bytes: size of every block.
            max_bytes: most bytes that all files of this tier take.
            clock: seconds of the pauses between tries, not of deadlines.

        Raises:
            FileTierError: the folder cannot be made, written or locked, or `max_bytes` hold no
                block. Later failures are results.
        """
        self._path = Path(path)
        self._open_file = partial(SlotFile, self._path, space, block_bytes, max_bytes, calls)
        self._block_bytes, self._max_bytes = block_bytes, max_bytes
        self._clock = clock
        self._save_deadline_s = save_deadline_s
        self._counter = TierCounter()
        self._load_breaker, self._save_breaker = Breaker(clock), Breaker(clock)
        self._lock = threading.Lock()
        self._saving: dict[bytes, bool] = {}
        """Blocks that wait to be saved; True: they were removed since."""
        self._leftovers = Leftovers(self._path, clock)
        self._answered_at = 0.0
        """Monotonic time of the last load that had an answer."""
        self._look_at = self._trim_at = self._grow_at = clock()
        self._num_evicted_before = 0
        self._volume = _Volume(self._open_file())
        slot_bytes = self._volume.file.slot_bytes
        # Each load holds memory of its caller's until its deadline, which bounds how many wait.
        self._loads = _Lane("load", NUM_LOADING, slot_bytes)
        max_saves = max(NUM_SAVING, _MAX_QUEUED_BYTES // slot_bytes)
        self._saves = _Lane("save", NUM_SAVING, slot_bytes, max_saves)
        self._deadlines = _Deadlines()
        self._is_closed = False

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        return done(None)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        if self._is_closed or self._load_breaker.is_paused:
            return [False] * len(keys)
        return self._volume.index.contains_each(keys)

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        index = self._volume.index
        # Who asks uses them, though not from here: they stay as long as they are used at all.
        index.touch(keys)
        if self._is_closed or self._save_breaker.is_paused or self._saves.is_full:
            return [False] * len(keys)
        held = index.contains_each(keys)
        return [
            not is_held and key not in self._saving for key, is_held in zip(keys, held, strict=True)
        ]

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        self._volume.index.touch([transfer.key for transfer in transfers])
        batch = _Batch(len(transfers), self._counter.loaded)
        if self._is_closed or not self._load_breaker.allows():
            batch.expire(Result(Status.UNAVAILABLE, NAME))
            return batch.future
        job = _Job(partial(self._load, batch, transfers), range(len(transfers)))
        asked_at = time.monotonic()

        def on_expired() -> None:
            self._loads.drop(job)
            if self._answered_at < asked_at:  # else it only had too much to load
                self._on_failure(self._load_breaker, "no answer to loads in time")

        self._deadlines.add(batch, deadline_s, on_expired)
        if self._loads.put(job):  # closed meanwhile
            batch.expire(Result(Status.UNAVAILABLE, NAME))
        return batch.future

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        batch = _Batch(len(transfers), self._counter.saved)
        if self._is_closed or not self._save_breaker.allows():
            batch.expire(Result(Status.UNAVAILABLE, NAME))
            return batch.future
        on_expired = partial(self._on_failure, self._save_breaker, "no answer to saves in time")
        self._deadlines.add(batch, self._save_deadline_s, on_expired)
        places = dict[bytes, int]()
        with self._lock:
            for place, transfer in enumerate(transfers):
                if transfer.key not in self._saving:
                    places.setdefault(transfer.key, place)
            job = _Job(partial(self._save, batch, transfers), places.values())
            refused = self._saves.put(job)
            queued = {*places.values()}.difference(refused)
            self._saving.update((transfers[place].key, False) for place in queued)
        for place in {*range(len(transfers))} - queued:
            batch.finish(place, Result(Status.BUSY, NAME))
        return batch.future

    def remove(self, keys: Sequence[bytes]) -> None:
        volume = self._volume
        with self._lock:
            for key in keys:
                volume.index.remove(key)
                if key in self._saving:
                    self._saving[key] = True
        if listed := [key for key in keys if volume.file.has_entry(key)]:
            self._saves.put(_Job(partial(self._clear, volume, listed), [0]), must=True)

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        keys = [*self._volume.index.readable_keys(), *list(self._saving)]
        self.remove([key for key in keys if chains is None or key[:CHAIN_BYTES] in chains])

    def stats(self) -> TierStats:
        volume = self._volume
        slot_bytes = volume.file.slot_bytes
        return self._counter.stats(
            NAME,
            volume.backend,
            capacity_bytes=volume.file.max_slots * slot_bytes,
            used_bytes=(volume.index.num_slots - volume.index.num_free) * slot_bytes,
            num_blocks=len(volume.index),
            evictions=self._num_evicted_before + volume.index.num_evicted,
            queued=self._loads.num_queued + self._saves.num_queued,
        )

    def close(self) -> None:
        """Writes what waits to be saved, for 5 seconds at most; later calls are UNAVAILABLE."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        ends_at = time.monotonic() + _CLOSE_S
        have_ended = self._loads.close(ends_at, drop=True)
        have_ended &= self._saves.close(ends_at)
        self._deadlines.close()
        self._volume.lease.close()
        if have_ended:
            self._volume.file.close()

    # in the threads ------------------------------------------------------------------------------

    def _load(
        self,
        batch: _Batch,
        transfers: Sequence[Transfer],
        place: int,
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> None:
        end_turn()
        transfer = transfers[place]
        volume = self._volume
        ref = volume.lease.pin(transfer.key) if batch.is_open(place) else None
        if ref is None:
            batch.finish(place, MISS)
            return
        try:
            with self._counter.reading:
                is_whole = volume.file.read(ref.slot, buffer)
        except OSError as error:
            self._on_failure(self._load_breaker, str(error))
            batch.finish(place, Result(Status.ERROR, NAME, error=str(error)))
            return
        finally:
            volume.lease.unpin(ref)
        self._answered_at = time.monotonic()
        if not is_whole:
            log.warning("%s: a block in slot %d is damaged and dropped", volume.file, ref.slot)
            self.remove([transfer.key])
            batch.finish(place, Result(Status.CORRUPT, NAME))
        elif batch.copy(place, transfer.memory, buffer[: self._block_bytes]):
            self._load_breaker.succeeded()
            batch.finish(place, Result(Status.HIT, NAME, self._block_bytes))

    def _save(
        self,
        batch: _Batch,
        transfers: Sequence[Transfer],
        place: int,
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> None:
        transfer = transfers[place]
        try:
            result = self._save_block(batch, place, transfer, buffer, end_turn)
        except (OSError, FileTierError) as error:
            is_full = isinstance(error, OSError) and error.errno in FULL_ERRORS
            if not is_full:
                self._on_failure(self._save_breaker, str(error))
            status = Status.FULL if is_full else Status.ERROR
            result = Result(status, NAME, error=str(error))
        finally:
            with self._lock:
                self._saving.pop(transfer.key, None)
        batch.finish(place, result)

    def _save_block(
        self,
        batch: _Batch,
        place: int,
        transfer: Transfer,
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> Result:
        if not batch.is_open(place):
            return Result(Status.TIMEOUT, NAME)
        volume = self._writable_volume()
        # In the order of the queue: a block must find the one that it continues.
        reserved = volume.lease.reserve(transfer.key, transfer.parent)
        end_turn()
        if reserved.ref is None:
            return Result(reserved.status, NAME)
        slot = reserved.ref.slot
        try:
            with self._counter.writing:
                digest = volume.file.write(slot, transfer.memory, buffer)
            with self._lock:
                is_removed = self._saving[transfer.key]
            # Its owner may have written something else to memory that it has back.
            if is_removed or not batch.is_open(place):
                return Result(Status.STALE, NAME)
            volume.file.enter(slot, transfer.key, transfer.parent, digest)
            with self._lock:
                if not self._saving[transfer.key]:
                    volume.lease.commit(reserved.ref)
                    self._save_breaker.succeeded()
                    return Result(Status.STORED, NAME, self._block_bytes)
            volume.file.clear([transfer.key])
            return Result(Status.STALE, NAME)
        finally:
            volume.lease.abort(reserved.ref)

    def _clear(
        self,
        volume: _Volume,
        keys: Sequence[bytes],
        place: int,
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> None:
        end_turn()
        try:
            volume.file.clear(keys)
        except OSError as error:
            self._on_failure(self._save_breaker, str(error))

    def _writable_volume(self) -> _Volume:
        """Returns the files, new ones if somebody has removed them, with room if there can be.

        Only the one whose turn it is among the saves calls this.
        """
        now = self._clock()
        if now >= self._look_at:
            self._replace_removed()
            self._look_at = now + _LOOK_S
        volume = self._volume
        if now >= self._trim_at:
            self._trim_at = now + _TRIM_S
            self._leftovers.trim(volume.file.num_bytes, self._max_bytes)
        if not volume.index.num_free and now >= self._grow_at:
            self._grow(volume, now)
        return volume

    def _replace_removed(self) -> None:
        if self._volume.file.is_removed:
            log.warning("%s was removed; it begins empty", self._volume.file)
            evicted = self._volume.index.num_evicted
            self._volume = _Volume(self._open_file())
            self._num_evicted_before += evicted

    def _grow(self, volume: _Volume, now: float) -> None:
        try:
            volume.index.add_slots(volume.file.grow())
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            log.warning("%s cannot grow: %s", volume.file, error)
            needed_bytes = volume.file.slot_bytes
            if not self._leftovers.trim(volume.file.num_bytes, self._max_bytes, needed_bytes):
                self._grow_at = now + _TRIM_S

    def _on_failure(self, breaker: Breaker, error: str) -> None:
        if breaker.failed():
            log.warning("%s is left alone for a while: %s", self._volume.file, error)
