"""Threads for work that would block the event loop."""

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class NoThread(OSError):
    """Raised if the system allows no more threads, or if the pool is closed."""


class ThreadPool:
    """Runs functions in a few threads, which start when they are needed.

    An executor that cannot start a thread keeps the work and may do it later, though the caller got
    an error. This pool never does the work then.

    Args:
        size: maximum number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, size: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(size, thread_name_prefix=name)

    def start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `work` in a thread, and return the future of its result.

        Raises:
            NoThread: no thread can run the work, which is not done.
        """
        result: Future[T] = Future()
        try:
            self._executor.submit(_run, [work, result])
        except RuntimeError as error:
            if result.cancel():
                raise NoThread(errno.EAGAIN, str(error)) from error
            # Otherwise, another thread has become free and does the work.
        return asyncio.wrap_future(result)

    def close(self) -> None:
        """Take no more work. Threads end once they have done the work that they were given."""
        self._executor.shutdown(wait=False)


def _run(handed: list[Any]) -> None:
    """Do the work for its result, and empty the list of both.

    An error's traceback holds this frame and that of the executor, which holds the list. A cycle
    would keep the work, such as a long body, until the garbage collector runs, which is rare.
    """
    work, result = handed
    handed.clear()
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)
        del work, result
