"""Queues block transfers for worker threads, and enforces deadlines even if a thread hangs."""

import contextlib
import heapq
import itertools
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from ullage_kv.results import Result, Status

log = logging.getLogger(__name__)

NAME = "file"
"""Name of the tier."""

Work = Callable[[Sequence[int], memoryview, Callable[[], None]], None]
"""A function that a worker thread calls to process some of a batch's transfers.

Its arguments are the indices of the transfers, the thread's private buffer (as large as a slot),
and a callback that lets the next thread take transfers from the queue.
"""


class TransferBatch:
    """Collects the results of one call's transfers. Only the first result per transfer counts."""

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
        """Return whether the transfer has no result yet."""
        return self._results[place] is None and self._expired is None

    def copy(self, place: int, into: memoryview, source: memoryview) -> bool:
        """Copy data to a transfer's memory, unless the transfer already has a result.

        Return False if it has one, or if the batch expires during the copy.
        """
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
        """Set the result of one transfer, unless it already has a result."""
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
        """Set `result` for all unfinished transfers. Return False if there were none."""
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


class Deadlines:
    """Expires batches at their deadlines, in its own thread because worker threads may hang."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, TransferBatch, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="file-deadlines", daemon=True)
        self._thread.start()

    def add(self, batch: TransferBatch, deadline_s: float, on_expired: Callable[[], None]) -> None:
        """Expire a batch at its deadline. Call `on_expired` if any transfer is still unfinished."""
        at = time.monotonic() + deadline_s
        with self._condition:
            heapq.heappush(self._heap, (at, next(self._order), batch, on_expired))
            if self._heap[0][2] is batch:
                self._condition.notify()

    def close(self) -> None:
        """Stop the thread and expire all batches."""
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

    def _next(self) -> tuple[TransferBatch, Callable[[], None]] | None:
        with self._condition:
            while not self._is_closed:
                wait_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    _, _, batch, on_expired = heapq.heappop(self._heap)
                    return batch, on_expired
                self._condition.wait(wait_s)
        return None


class Job:
    """The transfers of one call, in order, and the function that performs them."""

    def __init__(
        self, work: Work, places: Iterable[int], batch: TransferBatch | None = None
    ) -> None:
        """Create a job that calls `work` for a batch's transfers at the indices `places`.

        `batch` is None if no caller is waiting for results.
        """
        self.work = work
        self.places = deque(places)
        """Indices of the transfers that no thread has taken yet."""
        self._batch = batch

    def fail(self, places: Iterable[int], error: Exception) -> None:
        """Set an error as the result of each given transfer that has no result yet."""
        if self._batch is None:
            return
        for place in places:
            self._batch.finish(place, Result(Status.ERROR, NAME, error=repr(error)))


class Lane:
    """A job queue with its own worker threads."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        buffer_bytes: int,
        max_queued: int | None = None,
        max_taken: int = 1,
    ) -> None:
        """Start the threads.

        Args:
            name: part of the threads' names.
            num_threads: number of threads.
            buffer_bytes: size of each thread's private buffer.
            max_queued: maximum number of waiting transfers, or None for no limit.
            max_taken: maximum number of transfers of one job that a thread takes at a time.
        """
        self._condition = threading.Condition()
        self._turn = threading.Lock()
        """Held by a thread while it takes transfers from the queue, so that threads take turns."""
        self._queue = deque[Job]()
        self._num_waiting = 0
        """Number of transfers that no thread has taken yet."""
        self._max_queued = max_queued
        self._max_taken = max_taken
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
        """Number of transfers that are waiting or running."""
        return self._num_waiting + self._num_active

    @property
    def is_full(self) -> bool:
        return self._max_queued is not None and self._num_waiting >= self._max_queued

    def put(self, job: Job, *, must: bool = False) -> list[int]:
        """Queue as many of a job's transfers as the queue's limit allows.

        If `must` is set, all transfers are queued, even beyond the limit.

        Returns:
            The indices of the transfers that were not queued.
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

    def drop(self, job: Job) -> None:
        """Remove a job's waiting transfers from the queue."""
        with self._condition:
            if job in self._queue:
                self._queue.remove(job)
                self._num_waiting -= len(job.places)

    def close(self, ends_at: float, *, drop: bool = False) -> bool:
        """Stop the threads once the queue is empty.

        If `drop` is set, waiting transfers are dropped first.

        Returns:
            Whether all threads have stopped by the monotonic time `ends_at`.
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
        # O_DIRECT needs memory at the beginning of a page.
        buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
        while True:
            with contextlib.ExitStack() as turn:
                turn.enter_context(self._turn)
                taken = self._next()
                if taken is None:
                    return
                job, places = taken
                num_taken = len(places)
                try:
                    job.work(places, buffer, turn.close)
                except Exception as error:
                    log.exception("a transfer failed unexpectedly")
                    job.fail(places, error)
            del job, taken  # They refer to the caller's memory.
            with self._condition:
                self._num_active -= num_taken

    def _clear(self) -> None:
        self._queue.clear()
        self._num_waiting = 0

    def _next(self) -> tuple[Job, list[int]] | None:
        with self._condition:
            while not self._queue:
                if self._is_closed:
                    return None
                self._condition.wait()
            job = self._queue[0]
            own_share = max(1, self._num_waiting // len(self._threads))
            num_taken = min(self._max_taken, own_share, len(job.places))
            places = [job.places.popleft() for _ in range(num_taken)]
            if not job.places:
                self._queue.popleft()
            self._num_waiting -= num_taken
            self._num_active += num_taken
            return job, places
