"""Prepares long requests for admission in a worker thread, in which tenants take turns.

Long bodies are parsed, checked and converted to conversations in this thread, because this work
would block the event loop for too long. Pure Python code lets other threads run regularly, but
native parsers hold the GIL. The size of the texts that they parse is therefore limited beforehand
(`ullage_common.wire.json_size`).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ullage_router.errors import no_thread
from ullage_router.thread_pool import JOIN_S, NoThread, ThreadPool

INLINE_BYTES = 16 << 10
"""Maximum size in bytes of a body that is handled on the event loop, in about a millisecond."""

T = TypeVar("T")
_Job = list[Any]
"""Work and the future of its result. The list is empty if nobody waits for the result any more."""


class IntakeThread:
    """Runs functions one at a time. Tenants take turns, so that a busy one delays only itself.

    More threads would be no faster, because all of them need the GIL. Two threads that contend for
    the GIL would also make the event loop wait for both.
    """

    def __init__(self) -> None:
        self._threads = ThreadPool(1, "intake")
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Pending work by tenant, starting with the tenant whose turn is next."""
        self._is_running = False

    async def run(self, num_bytes: int, tenant: str, work: Callable[[], T]) -> T:
        """Run `work`, and return its result.

        If the body is small, `work` runs on the event loop instead of in the thread.

        Args:
            num_bytes: size of the body that `work` handles.
            tenant: the tenant for which the work is done.
            work: the function to run.

        Raises:
            ServiceError: the thread cannot be started.
        """
        if num_bytes <= INLINE_BYTES:
            return work()

        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job: _Job = [work, done]
        self._waiting.setdefault(tenant, deque()).append(job)
        self._start_next()
        try:
            return await done
        finally:
            job.clear()  # a client that has gone leaves no body in the queue
            # An error's traceback holds this frame, and the frame would hold the error. This cycle
            # would keep the body until the garbage collector runs, which is rare.
            del done, work

    def close(self) -> None:
        """Stop the thread after the current function, and drop all pending work."""
        self._threads.close(JOIN_S)

    def _start_next(self) -> None:
        while self._waiting and not self._is_running:
            tenant, queue = self._waiting.popitem(last=False)
            job = queue.popleft()
            while queue and _is_abandoned(job):  # it must not cost its tenant a turn
                job = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all others
            if _is_abandoned(job):
                continue

            work, done = job
            try:
                running = self._threads.start(work)
            except NoThread as error:
                done.set_exception(no_thread(error))
                continue
            self._is_running = True
            running.add_done_callback(partial(self._on_end, done))

    def _on_end(self, done: "asyncio.Future[Any]", ended: "asyncio.Future[Any]") -> None:
        self._is_running = False
        error = None if ended.cancelled() else ended.exception()
        if done.cancelled():
            pass  # nobody waits for it any more
        elif ended.cancelled():
            done.cancel()
        elif error:
            done.set_exception(error)
        else:
            done.set_result(ended.result())
        self._start_next()


def _is_abandoned(job: _Job) -> bool:
    """Return whether nobody waits for the result of a job any more."""
    return not job or job[1].cancelled()
