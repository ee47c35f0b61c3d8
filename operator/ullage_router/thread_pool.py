"""Threads for work that would block the event loop."""

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

JOIN_S = 5.0
"""Maximum seconds to wait for native code at the end of the router."""

T = TypeVar("T")


class NoThread(OSError):
    """Raised if the system allows no more threads, or if the pool is closed."""


class ThreadPool:
    """Runs functions in a few threads, which start when they are needed.

    The executors of the standard library keep work for which they could not start a thread, and the
    process waits for their threads at its end. This pool drops such work. Its threads are daemons,
    so that a disk that hangs cannot keep the process alive.

    Args:
        size: maximum number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._queue: SimpleQueue[list[Any]] = SimpleQueue()
        """Pairs of work and its future. An empty list ends a thread."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_jobs = 0
        self._is_closed = False

    @property
    def num_jobs(self) -> int:
        """Number of functions that run or wait for a thread, even if nobody waits for them."""
        return self._num_jobs

    def start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `work` in a thread, and return the future of its result.

        If no further thread can be started, the work waits for one that runs.

        Raises:
            NoThread: there is no thread to run the work, which is not done.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed:
                raise NoThread(errno.ESHUTDOWN, "its threads have ended")
            if len(self._threads) <= self._num_jobs and len(self._threads) < self._size:
                self._start_thread()
            self._num_jobs += 1
            self._queue.put([work, future])
        return future

    def close(self, join_s: float = 0.0) -> None:
        """Take no more work. Threads end once they have done the work that they were given.

        Args:
            join_s: maximum seconds to wait for the threads. Native code that still runs when the
                interpreter ends could abort the process.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._queue.put([])
        ends_at = time.monotonic() + join_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _start_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise NoThread(errno.EAGAIN, str(error)) from error
        else:
            self._threads.append(thread)

    def _serve(self) -> None:
        while handed := self._queue.get():
            loop: asyncio.AbstractEventLoop = handed[1].get_loop()
            deliver = _run(handed)
            with self._lock:  # before the delivery, after which the caller may start more work
                self._num_jobs -= 1

            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver)
            del deliver, loop  # or they would live until there is more work


def _run(handed: list[Any]) -> Callable[[], None]:
    """Do the work, and return the function that sets its future. Empty the list of both.

    An error's traceback holds this frame. A cycle would keep the work, such as a long body, until
    the garbage collector runs, which is rare.
    """
    work, future = handed
    handed.clear()
    try:
        if future.cancelled():
            return _do_nothing
        return partial(_set_result, future, work())
    except BaseException as error:
        return partial(_set_exception, future, error)
    finally:
        del work, future


def _do_nothing() -> None:
    """Do nothing, because nobody waits for the work."""


def _set_result(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
