"""The file tier: copies of blocks in a slot file, which outlive the process.

Loads and saves have separate threads, so that loads never wait behind saves. Each thread reads into
a private buffer. A thread that hangs on a dead mount can therefore be abandoned at any time. Even
if the mount recovers, the thread does not write to a caller's memory. A block that it was saving is
not added to the table of contents.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from ullage_kv.file_io import FULL_ERRORS, Calls, FileTierError, Leftovers, SlotFile, TableEntry
from ullage_kv.file_queue import NAME, Deadlines, Job, Lane, TransferBatch
from ullage_kv.futures import done
from ullage_kv.index import SlotIndex, SlotRef
from ullage_kv.keys import CHAIN_BYTES
from ullage_kv.results import MISS, Result, Status
from ullage_kv.tier import CircuitBreaker, TierCounter, TierStats, Transfer

log = logging.getLogger(__name__)

NUM_LOADING = 4
"""Number of loading threads. Some keep the device busy while others copy and verify blocks."""
NUM_SAVING = 4
"""Number of saving threads."""

_MAX_QUEUED_BYTES = 64 << 20
"""Maximum total bytes of blocks waiting to be saved. Each waiting block pins a host tier slot."""
_TURN_BYTES = 4 << 20
"""Maximum bytes of blocks that a thread takes from the queue at a time.

If threads took only one block at a time, they would mostly wait for each other.
"""
_TURN_SHARE = 1 / 64
"""Maximum number of blocks that a thread takes at a time, as a fraction of all slots."""

SAVE_DEADLINE_S = 30.0
"""Seconds after which the tier gives up saving a block."""
_CLOSE_S = 5.0
"""Maximum time in seconds to wait for pending saves when the tier is closed."""
_LOOK_S = 1.0
"""Interval in seconds between checks for deleted files."""
_TRIM_S = 60.0
"""Interval in seconds between searches for folders of stopped engines.

If the device is full, the tier also waits this long before it tries to grow its files again.
"""

_CALLS = Calls()


class _Volume:
    """An open slot file, with an index of its blocks and the tier's lease on their slots.

    If the file is deleted, the tier replaces the whole volume with a new one.
    """

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
    """Keeps copies of blocks in files that outlive the process (see `LowerTier`)."""

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
        """Open or create the files of a namespace.

        Args:
            path: folder that engines may share. Each engine has its own files in it.
            space: the 32-byte namespace from `keys.namespace`.
            block_bytes: size of every block.
            max_bytes: maximum total size of this tier's files.
            calls: the file system calls.
            clock: returns the time in seconds, for pauses between attempts but not for deadlines.
            save_deadline_s: seconds after which the tier gives up saving a block.

        Raises:
            FileTierError: the folder cannot be created, written or locked, or `max_bytes` is too
                small for a block. Later failures are returned as results.
        """
        self._path = Path(path)
        self._open_file = partial(SlotFile, self._path, space, block_bytes, max_bytes, calls)
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._clock = clock
        self._save_deadline_s = save_deadline_s
        self._counter = TierCounter()
        self._load_breaker = CircuitBreaker(clock)
        self._save_breaker = CircuitBreaker(clock)
        self._lock = threading.Lock()
        self._saving: dict[bytes, bool] = {}
        """Maps each block that is waiting to be saved to whether it was removed in the meantime."""
        self._leftovers = Leftovers(self._path, clock)
        self._answered_at = 0.0
        """Monotonic time at which the file system last completed a read."""
        now = clock()
        self._look_at = now
        self._trim_at = now
        self._grow_at = now
        self._num_evicted_before = 0
        self._volume = _Volume(self._open_file())
        slot_bytes = self._volume.file.slot_bytes

        # Loads need no limit, since each holds a slot of its caller until its deadline.
        self._loads = Lane("load", NUM_LOADING, slot_bytes)
        max_saves = max(NUM_SAVING, _MAX_QUEUED_BYTES // slot_bytes)
        of_all = int(_TURN_SHARE * self._volume.file.max_slots)
        max_taken = max(1, min(_TURN_BYTES // slot_bytes, of_all))
        self._saves = Lane("save", NUM_SAVING, slot_bytes, max_saves, max_taken)
        self._deadlines = Deadlines()
        self._is_closed = False

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        return done(None)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        if self._is_closed or self._load_breaker.is_paused:
            return [False] * len(keys)
        return self._volume.index.contains_each(keys)

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        index = self._volume.index
        # The caller uses these blocks in host memory, so their copies here count as used, too.
        index.touch(keys)
        if self._is_closed or self._save_breaker.is_paused or self._saves.is_full:
            return [False] * len(keys)
        held = index.contains_each(keys)
        return [
            not is_held and key not in self._saving for key, is_held in zip(keys, held, strict=True)
        ]

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        self._volume.index.touch([transfer.key for transfer in transfers])
        batch = TransferBatch(len(transfers), self._counter.loaded)
        if self._is_closed or not self._load_breaker.allows():
            batch.expire(Result(Status.UNAVAILABLE, NAME))
            return batch.future

        job = Job(partial(self._load, batch, transfers), range(len(transfers)), batch)
        asked_at = time.monotonic()

        def on_expired() -> None:
            self._loads.drop(job)
            if self._answered_at < asked_at:  # else the tier answers, but has too much to load
                self._on_failure(self._load_breaker, "no answer to loads in time")

        self._deadlines.add(batch, deadline_s, on_expired)
        if self._loads.put(job):  # closed meanwhile
            batch.expire(Result(Status.UNAVAILABLE, NAME))
        return batch.future

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        batch = TransferBatch(len(transfers), self._counter.saved)
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
            # Before `put`, since a thread may begin before it returns.
            self._saving.update((key, False) for key in places)
            job = Job(partial(self._save, batch, transfers), places.values(), batch)
            refused = self._saves.put(job)
            for place in refused:
                del self._saving[transfers[place].key]
            queued = {*places.values()}.difference(refused)

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
            self._saves.put(Job(partial(self._clear, volume, listed), [0]), must=True)

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
        """Finish pending saves within 5 seconds and close the files.

        Later calls return UNAVAILABLE.
        """
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
        batch: TransferBatch,
        transfers: Sequence[Transfer],
        places: Sequence[int],
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> None:
        end_turn()
        [place] = places
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
        batch: TransferBatch,
        transfers: Sequence[Transfer],
        places: Sequence[int],
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> None:
        results = dict[int, Result]()
        try:
            volume = self._writable_volume(len(places))
            # In the order of the queue, since a block must find the one that it continues.
            refs = self._reserve(volume, batch, transfers, places, results)
            end_turn()
            with self._counter.writing:
                self._save_blocks(volume, batch, transfers, refs, buffer, results)
        except (OSError, FileTierError) as error:
            results = dict.fromkeys(places, self._failed_save(error)) | results
        finally:
            with self._lock:
                for place in places:
                    self._saving.pop(transfers[place].key, None)
        for place in places:
            batch.finish(place, results[place])

    def _failed_save(self, error: OSError | FileTierError) -> Result:
        if isinstance(error, OSError) and error.errno in FULL_ERRORS:
            return Result(Status.FULL, NAME, error=str(error))
        self._on_failure(self._save_breaker, str(error))
        return Result(Status.ERROR, NAME, error=str(error))

    def _reserve(
        self,
        volume: _Volume,
        batch: TransferBatch,
        transfers: Sequence[Transfer],
        places: Sequence[int],
        results: dict[int, Result],
    ) -> dict[int, SlotRef]:
        """Reserve a slot for each transfer, and return the slots by the transfers' indices.

        If no slot can be reserved for a transfer, the reason is added to `results`.
        """
        refs = dict[int, SlotRef]()
        for place in places:
            if not batch.is_open(place):
                results[place] = Result(Status.TIMEOUT, NAME)
                continue
            reserved = volume.lease.reserve(transfers[place].key, transfers[place].parent)
            if reserved.ref is None:
                results[place] = Result(reserved.status, NAME)
            else:
                refs[place] = reserved.ref
        return refs

    def _save_blocks(
        self,
        volume: _Volume,
        batch: TransferBatch,
        transfers: Sequence[Transfer],
        refs: dict[int, SlotRef],
        buffer: memoryview,
        results: dict[int, Result],
    ) -> None:
        """Write blocks to their slots, then write their table entries and set their results."""
        entries = dict[int, TableEntry]()
        try:
            for place, ref in refs.items():
                transfer = transfers[place]
                try:
                    digest = volume.file.write(ref.slot, transfer.memory, buffer)
                except OSError as error:
                    results[place] = self._failed_save(error)
                    continue
                # After the deadline the owner may have written another block to the memory.
                if self._saving[transfer.key] or not batch.is_open(place):
                    results[place] = Result(Status.STALE, NAME)
                    continue
                entries[place] = TableEntry(ref.slot, transfer.key, transfer.parent, digest)

            volume.file.enter([*entries.values()])
            with self._lock:
                removed = [each.key for each in entries.values() if self._saving[each.key]]
                for place, entry in entries.items():
                    if entry.key in removed:
                        results[place] = Result(Status.STALE, NAME)
                        continue
                    volume.lease.commit(refs[place])
                    results[place] = Result(Status.STORED, NAME, self._block_bytes)
            if len(removed) < len(entries):
                self._save_breaker.succeeded()
            volume.file.clear(removed)
        finally:
            for place, ref in refs.items():
                if results.get(place, MISS).status is not Status.STORED:
                    volume.lease.abort(ref)

    def _clear(
        self,
        volume: _Volume,
        keys: Sequence[bytes],
        places: Sequence[int],
        buffer: memoryview,
        end_turn: Callable[[], None],
    ) -> None:
        end_turn()
        try:
            volume.file.clear(keys)
        except OSError as error:
            self._on_failure(self._save_breaker, str(error))

    def _writable_volume(self, num_slots: int) -> _Volume:
        """Return the volume to save to, growing it first if fewer than `num_slots` slots are free.

        The volume may still have fewer free slots than that, if it cannot grow far enough.

        Deleted files are replaced with new ones. Only the saving thread that is currently taking
        transfers from the queue may call this method.
        """
        now = self._clock()
        if now >= self._look_at:
            self._replace_removed()
            self._look_at = now + _LOOK_S
        volume = self._volume
        if now >= self._trim_at:
            self._trim_at = now + _TRIM_S
            self._leftovers.trim(volume.file.num_bytes, self._max_bytes)
        while volume.index.num_free < num_slots and now >= self._grow_at:
            if not self._grow(volume, now):
                break
        return volume

    def _replace_removed(self) -> None:
        if self._volume.file.is_removed:
            log.warning("%s was removed, so the tier begins empty", self._volume.file)
            evicted = self._volume.index.num_evicted
            self._volume = _Volume(self._open_file())
            self._num_evicted_before += evicted

    def _grow(self, volume: _Volume, now: float) -> int:
        """Grow the files, and return the number of new slots, or 0 if the device is full."""
        try:
            num_more = volume.file.grow()
            volume.index.add_slots(num_more)
            return num_more
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            log.warning("%s cannot grow: %s", volume.file, error)
            needed_bytes = volume.file.slot_bytes
            if not self._leftovers.trim(volume.file.num_bytes, self._max_bytes, needed_bytes):
                self._grow_at = now + _TRIM_S
            return 0

    def _on_failure(self, breaker: CircuitBreaker, error: str) -> None:
        if breaker.failed():
            log.warning("%s is left alone for a while: %s", self._volume.file, error)
