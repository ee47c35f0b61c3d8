"""Threads for long texts, which the tenants share evenly.

Texts are handled in the order in which they would end if every tenant had a thread's equal share
(start-time fair queueing, Goyal, Vin and Cheng 1996), a tenant's own in the order in which they
came. One thread takes no long texts, so that others need not wait for these, and long ones take
memory one after another.
"""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ullage_router.errors import texts_full

INLINE_CHARACTERS = 4096
"""Size up to which a text is handled on the event loop, in about a millisecond."""
LONG_CHARACTERS = 256 << 10
"""Size from which on a text is long: it may take a second."""
MAX_WAITING_CHARACTERS = 64 << 20
"""Characters of the texts that wait; one tenant's take half of them at most."""

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Job:
    start: float
    """Virtual time at which it begins: characters of each tenant's share."""
    number: int
    size: int = field(compare=False)
    tenant: str = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: "asyncio.Future[Any]" = field(compare=False)


class TokenizerThreads:
    """Keeps long texts off the event loop; the tokenizer releases the interpreter's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._waiting: list[_Job] = []
        self._numbers = itertools.count()
        self._now = 0.0
        """Virtual time: the latest beginning of a job."""
        self._ends: dict[str, float] = {}
        """Virtual time at which a tenant's last job ends, where that is to come."""
        self._num_running = 0
        self._is_long_running = False

    @property
    def waiting_characters(self) -> int:
        """Characters of the texts that wait for a thread."""
        return sum(job.size for job in self._waiting)

    async def run(self, num_characters: int, work: Callable[[], T], tenant: str = "") -> T:
        """Return the result of `work`, done here where it is short.

        Args:
            num_characters: about how many characters it handles.
            tenant: in whose share.

        Raises:
            ServiceError: too many texts wait.
        """
        if num_characters <= INLINE_CHARACTERS:
            return work()
        job = self._add(num_characters, work, tenant)
        self._start_jobs()
        return cast(T, await job.future)

    def close(self) -> None:
        for job in self._waiting:
            job.future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, size: int, work: Callable[[], Any], tenant: str) -> _Job:
        self._waiting = [job for job in self._waiting if not job.future.done()]
        own = sum(job.size for job in self._waiting if job.tenant == tenant)
        of_others = self.waiting_characters - own
        is_too_much = tenant and own and own + size > MAX_WAITING_CHARACTERS // 2
        if is_too_much or (self._waiting and of_others + own + size > MAX_WAITING_CHARACTERS):
            raise texts_full()

        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + size
        future = asyncio.get_running_loop().create_future()
        job = _Job(start, next(self._numbers), size, tenant, work, future)
        self._waiting.append(job)
        return job

    def _start_jobs(self) -> None:
        while self._num_running < 2 and (job := self._next_job()):
            self._waiting.remove(job)
            self._now = max(self._now, job.start)
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            self._num_running += 1
            is_long = job.size >= LONG_CHARACTERS
            self._is_long_running = self._is_long_running or is_long
            running = asyncio.get_running_loop().run_in_executor(self._pool, job.work)
            running.add_done_callback(lambda done, job=job: self._end_job(job, done))  # type: ignore[misc]

    def _next_job(self) -> _Job | None:
        """Return the job to begin, long ones only where none is running."""
        ready = (
            job
            for job in self._waiting
            if not job.future.done() and not (self._is_long_running and job.size >= LONG_CHARACTERS)
        )
        return min(ready, default=None)

    def _end_job(self, job: _Job, done: "asyncio.Future[Any]") -> None:
        self._num_running -= 1
        if job.size >= LONG_CHARACTERS:
            self._is_long_running = False
        if not job.future.done():
            _copy(done, job.future)
        elif not done.cancelled():
            done.exception()  # nobody waits for it
        self._start_jobs()


def _copy(done: "asyncio.Future[Any]", waiting: "asyncio.Future[Any]") -> None:
    if done.cancelled():
        waiting.cancel()
    elif error := done.exception():
        waiting.set_exception(error)
    else:
        waiting.set_result(done.result())
