"""Threads that process long texts and are shared fairly between tenants.

Texts are scheduled by start-time fair queueing (Goyal, Vin and Cheng, 1996): tenants get equal
shares of the threads, and a tenant's own texts are processed in order of arrival. Long texts are
processed one at a time. One of the two threads is therefore always free for short texts, and only
one long text needs memory at a time.
"""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ullage_router.errors import no_thread, texts_full
from ullage_router.thread_pool import JOIN_S, NoThread, ThreadPool

INLINE_CHARACTERS = 4096
"""Maximum characters of a text processed on the event loop, which takes about a millisecond."""
LONG_CHARACTERS = 256 << 10
"""Minimum characters of a text that counts as long. Processing it may take a second."""
MAX_WAITING_CHARACTERS = 64 << 20
"""Maximum total characters of waiting texts. A single tenant may use half of this."""

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Job:
    start: float
    """The job's virtual start time, in characters processed per tenant."""
    number: int
    size: int = field(compare=False)
    tenant: str = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: "asyncio.Future[Any]" = field(compare=False)
    is_waiting: bool = field(default=True, compare=False)


class TokenizerThreads:
    """Processes long texts outside the event loop, since the tokenizer releases the GIL."""

    def __init__(self) -> None:
        self._threads = ThreadPool(2, "tokenizer")
        self._short: list[_Job] = []
        """Heap of jobs with short texts. Some may no longer be waiting."""
        self._long: list[_Job] = []
        """Heap of jobs with long texts. Some may no longer be waiting."""
        self._numbers = itertools.count()

        self._sizes = Counter[str]()
        """Total characters of the waiting texts, by tenant."""
        self._total_size = 0

        self._now = 0.0
        """Current virtual time: the latest virtual start time of a job that has started."""
        self._ends: dict[str, float] = {}
        """Virtual time at which each tenant's last job ends. Times in the past are removed."""
        self._end_times: list[tuple[float, str]] = []
        """Heap of the future end times of all jobs, used to remove tenants from `_ends`."""

        self._num_running = 0
        self._is_long_running = False

    @property
    def waiting_characters(self) -> int:
        """Total characters of the texts that are waiting for a thread."""
        return self._total_size

    async def run(self, num_characters: int, work: Callable[[], T], tenant: str = "") -> T:
        """Run `work` and return the result. Short texts are processed on the event loop.

        Args:
            num_characters: approximate number of characters that the work processes.
            tenant: the tenant to which the work is charged.

        Raises:
            ServiceError: too many texts are waiting, or no thread can be started.
        """
        if num_characters <= INLINE_CHARACTERS:
            return work()
        job = self._add(num_characters, work, tenant)
        self._start_jobs()
        try:
            return cast(T, await job.future)
        finally:
            if job.is_waiting:
                self._refund(job)
            self._leave_queue(job)

    def close(self) -> None:
        """Cancel all waiting jobs, and shut down the thread pool."""
        for job in (*self._short, *self._long):
            job.future.cancel()
        self._threads.close(JOIN_S)

    def _add(self, size: int, work: Callable[[], Any], tenant: str) -> _Job:
        own = self._sizes[tenant]
        is_too_much = tenant and own and own + size > MAX_WAITING_CHARACTERS // 2
        if is_too_much or (self._total_size and self._total_size + size > MAX_WAITING_CHARACTERS):
            raise texts_full()

        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + size
        heapq.heappush(self._end_times, (start + size, tenant))
        future = asyncio.get_running_loop().create_future()
        job = _Job(start, next(self._numbers), size, tenant, work, future)
        heapq.heappush(self._long if size >= LONG_CHARACTERS else self._short, job)
        self._sizes[tenant] += size
        self._total_size += size
        return job

    def _refund(self, job: _Job) -> None:
        """Return the virtual time of a job that nobody waits for any more to its tenant."""
        end = self._ends.get(job.tenant, self._now) - job.size
        if end > self._now:
            self._ends[job.tenant] = end
            heapq.heappush(self._end_times, (end, job.tenant))
        else:
            self._ends.pop(job.tenant, None)

    def _leave_queue(self, job: _Job) -> None:
        """Stop counting a job as waiting, and free its text. The job may stay in its heap."""
        if not job.is_waiting:
            return
        job.is_waiting = False
        job.work = _do_nothing  # drops the reference to the text
        self._total_size -= job.size
        self._sizes[job.tenant] -= job.size
        if not self._sizes[job.tenant]:
            del self._sizes[job.tenant]

    def _start_jobs(self) -> None:
        while self._num_running < 2 and (job := self._next_job()):
            work = job.work
            self._leave_queue(job)
            self._pass_time(job.start)
            try:
                running = self._threads.start(work)
            except NoThread as error:
                if not job.future.done():
                    job.future.set_exception(no_thread(error))
                continue
            self._num_running += 1
            is_long = job.size >= LONG_CHARACTERS
            self._is_long_running = self._is_long_running or is_long
            running.add_done_callback(lambda done, job=job: self._end_job(job, done))  # type: ignore[misc]

    def _pass_time(self, start: float) -> None:
        """Advance the virtual time to `start`, and forget tenants whose jobs have all ended."""
        self._now = max(self._now, start)
        while self._end_times and self._end_times[0][0] <= self._now:
            end, tenant = heapq.heappop(self._end_times)
            if self._ends.get(tenant) == end:
                del self._ends[tenant]

    def _next_job(self) -> _Job | None:
        """Pop the next job, or return None if no job may start.

        Long jobs are skipped while another one is running.
        """
        heaps = [self._short] if self._is_long_running else [self._short, self._long]
        for heap in heaps:
            while heap and not heap[0].is_waiting:
                heapq.heappop(heap)
        first = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
        return heapq.heappop(first) if first else None

    def _end_job(self, job: _Job, done: "asyncio.Future[Any]") -> None:
        self._num_running -= 1
        if job.size >= LONG_CHARACTERS:
            self._is_long_running = False
        if not job.future.done():
            _copy(done, job.future)
        elif not done.cancelled():
            done.exception()  # nobody waits for it
        self._start_jobs()


def _do_nothing() -> None:
    """Do nothing. This replaces the work of a job that left the queue, to free its text."""


def _copy(done: "asyncio.Future[Any]", waiting: "asyncio.Future[Any]") -> None:
    if done.cancelled():
        waiting.cancel()
    elif error := done.exception():
        waiting.set_exception(error)
    else:
        waiting.set_result(done.result())
