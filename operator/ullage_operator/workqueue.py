"""Which services wait for reconciliation: each key once, one run a key at a time, with retries.

Events say only that something about a key may have changed. A key that is already waiting is not
queued twice; a key that changes while it is being worked on is worked on once more afterwards.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_AT_ONCE = 16
_GAP_S = 0.2
_BACKOFF_FIRST_S = 1.0
_BACKOFF_MOST_S = 60.0
_logger = logging.getLogger(__name__)


class WorkQueue(Generic[Key]):
    """Runs `work(key)`, which answers after how many seconds it wants to run again; None: never.

    A `work` that raises is run again after a delay that doubles from 1 s to 60 s. At most 16 keys
    are worked on at once, in the order of their events; between two runs of a key lie 0.2 s, so
    that a burst of events is one run.
    """

    def __init__(self, work: Callable[[Key], Awaitable[float | None]]) -> None:
        self._work = work
        self._dirty: dict[Key, asyncio.Event] = {}
        self._workers: dict[Key, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def add(self, key: Key) -> None:
        """Asks for a run of `key`, soon."""
        if key not in self._workers:
            self._dirty[key] = asyncio.Event()
            self._workers[key] = asyncio.create_task(self._serve(key), name=f"reconcile {key}")
        self._dirty[key].set()

    def keys(self) -> list[Key]:
        return list(self._workers)

    async def close(self) -> None:
        """Cancels all runs and waits for their end."""
        await asyncio.gather(*self._cancelled(), return_exceptions=True)

    def drop(self) -> None:
        """Cancels all runs and forgets all keys."""
        self._cancelled()

    def _cancelled(self) -> list[asyncio.Task[None]]:
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        self._workers.clear()
        self._dirty.clear()
        return workers

    async def _serve(self, key: Key) -> None:
        dirty, failures, me = self._dirty[key], 0, asyncio.current_task()
        delay_s: float | None = 0.0
        # A cancellation may be lost in code that catches it for a time limit of its own.
        while self._workers.get(key) is me and (delay_s is not None or dirty.is_set()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s or None):
                    await dirty.wait()
            try:
                async with self._slots:
                    dirty.clear()
                    delay_s, failures = await self._work(key), 0
            except Exception:
                # A bug must neither end the operator nor be repeated in a tight loop.
                _logger.exception("reconciling %s failed", key)
                delay_s = min(_BACKOFF_MOST_S, _BACKOFF_FIRST_S * 2**failures)
                failures += 1
            await asyncio.sleep(_GAP_S)
        if self._workers.get(key) is me:
            del self._workers[key], self._dirty[key]
