"""A thread for the work of requests that nobody has admitted yet, in which tenants take turns.

A body is read, checked and made a conversation here where that takes longer than others may wait
for the event loop. Python code hands the interpreter's lock on; parsers do not, so the texts that
they are given are bounded before (`ullage_common.wire.json_size`).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

INLINE_BYTES = 16 << 10
"""Bytes that are handled at once: parsing and checking them takes about a millisecond."""

T = TypeVar("T")
_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class IntakeThread:
    """Runs functions one after another; a tenant with much work delays its own alone.

    More threads would be no faster, since all of them need the interpreter's lock, and two that
    hand it to each other keep the event loop waiting for both.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        """Work by tenant; the first tenant is next."""
        self._is_running = False

    async def run(self, num_bytes: int, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` and return its result; it runs here and now if the bytes are few."""
        if num_bytes <= INLINE_BYTES:
            return work()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((work, done))
        self._start_next()
        try:
            return await done
        finally:
            # An error's traceback holds this frame, which would hold the error: this cycle would
            # keep the body until the garbage collector runs, which is rare.
            del done, work

    def close(self) -> None:
        """Start no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while self._waiting and not self._is_running:
            tenant, queue = self._waiting.popitem(last=False)
            work, done = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all others
            if done.cancelled():
                continue
            self._is_running = True
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
            running.add_done_callback(partial(self._on_end, done))

    def _on_end(self, done: "asyncio.Future[Any]", ended: "asyncio.Future[Any]") -> None:
        self._is_running = False
        error = None if ended.cancelled() else ended.exception()
        if done.cancelled():
            pass  # nobody waits any more
        elif ended.cancelled():
            done.cancel()
        elif error:
            done.set_exception(error)
        else:
            done.set_result(ended.result())
        self._start_next()
