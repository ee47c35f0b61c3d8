"""Helpers to join futures, chain them and complete them at a deadline, across threads."""

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

Value = TypeVar("Value")
Steps = Iterator["Future[Any]"]
"""A task in the form of a generator, which yields every future that it waits for."""


def done(value: Value) -> "Future[Value]":
    """Return a future that has already completed with this result."""
    future = Future[Value]()
    future.set_result(value)
    return future


def all_done(futures: "Sequence[Future[Any]]") -> "Future[None]":
    """Return a future that completes once all the given futures have completed.

    None of the given futures may fail.
    """
    if not futures:
        return done(None)

    together = Future[None]()
    # `next` of a count is atomic, so that exactly one thread sees the last number.
    countdown = itertools.count(1)

    def count(_: "Future[Any]") -> None:
        if next(countdown) == len(futures):
            finish(together)

    for future in futures:
        future.add_done_callback(count)
    return together


def finish(future: "Future[None]") -> None:
    """Complete a future unless it has already been completed, for example at its deadline."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(None)


def run(
    steps: Steps, call_soon: Callable[[Callable[[], None]], object] | None = None
) -> "Future[None]":
    """Run a task, and return a future that completes when the task has finished.

    The task runs in the caller's thread until it waits for a future, and resumes when that future
    completes.

    Args:
        steps: the task, a generator that yields each future that it waits for.
        call_soon: schedules a function in the thread in which the task should resume. With None,
            the task resumes in the thread that completed the future.
    """
    ended = Future[None]()

    def go_on() -> None:
        for future in steps:
            if not future.done():
                future.add_done_callback(wake)
                return
        ended.set_result(None)

    def wake(_: "Future[Any]") -> None:
        if call_soon is None:
            go_on()
        else:
            call_soon(go_on)

    go_on()
    return ended


class Alarms:
    """Completes futures at given times, in one thread that starts with the first alarm."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Future[None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def finish_at(self, at: float, future: "Future[None]") -> None:
        """Complete a future at the given clock time, unless it has completed by then.

        Raises:
            RuntimeError: no thread can be started. There is no alarm then.
        """
        with self._changed:
            if self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._work, name="kv-alarms", daemon=True)
                thread.start()
                self._thread = thread
            heapq.heappush(self._due, (at, next(self._numbers), future))
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread. Pending alarms no longer complete their futures."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (future := self._next()) is not None:
            finish(future)

    def _next(self) -> "Future[None] | None":
        """Wait for the next alarm and return its future, or None after `close`."""
        with self._changed:
            while not self._is_closed:
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
        return None
