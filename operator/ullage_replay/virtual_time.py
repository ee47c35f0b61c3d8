"""An asyncio event loop in virtual time: when nothing is left to do now, the clock jumps.

The router's code reads `time.monotonic` and the event loop's clock. While `virtual_time` is active,
both return the virtual time, so that code runs unchanged. A replay therefore needs a process, or at
least a thread of execution, of its own.
"""

import asyncio
import contextlib
import math
import random
import selectors
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar
from unittest import mock

START_S = 1000.0
"""Virtual time at which a replay begins, in seconds. Some code treats 0 as "never"."""

T = TypeVar("T")


class StalledError(Exception):
    """Raised if tasks wait, but no event is left that could wake them."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that, rather than wait for files, advances the clock by the time to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("the replay has requests left, but no event that would end them")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at `START_S` and advances only from event to event."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds. It never goes back."""
        return self._jumping.now

    @property
    def next_event(self) -> float:
        """Return the time at which something else than the current callback happens."""
        if self._ready:
            return self._jumping.now
        return self._scheduled[0].when() if self._scheduled else math.inf

    def advance(self, when: float) -> bool:
        """Advance to a time if nothing else happens before it. Return whether nothing does.

        A callback may use this in place of `call_at`, which takes ten times as long.
        """
        if self.next_event <= when:
            return False
        self._jumping.now = max(self._jumping.now, when)
        return True

    # Attributes of asyncio's base class, which its type stubs leave out.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Let all code see the loop's time, and draw the same random numbers in every replay."""
    state = random.getstate()
    random.seed(seed)
    try:
        with (
            mock.patch.object(time, "monotonic", loop.time),
            mock.patch.object(time, "time", loop.time),
        ):
            yield
    finally:
        random.setstate(state)


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop, seed: int = 0) -> T:
    """Run a coroutine to its end in virtual time, cancel what it leaves, and close the loop."""
    with virtual_time(loop, seed):
        try:
            return loop.run_until_complete(main)
        finally:
            loop.run_until_complete(_cancel_others())
            loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
