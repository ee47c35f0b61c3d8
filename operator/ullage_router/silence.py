"""Waits for an engine that end when the engine has fallen silent and another could do its work."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

CHECK_INTERVAL_S = 1.0


class Waits:
    """Everything that waits for one engine's first words.

    Args:
        is_silent: whether the engine has missed so many heartbeats that it must be given up.
        error: what is raised then.
    """

    def __init__(self, is_silent: Callable[[], bool], error: Callable[[], Exception]) -> None:
        self._is_silent = is_silent
        self._error = error
        self._open: set[asyncio.Timeout] = set()
        self._check_at: float | None = None

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Ends the block with the error when the engine is silent."""
        limit = asyncio.timeout(None)
        self._open.add(limit)
        self._arm()
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if limit.expired():
                raise self._error() from error
            raise
        finally:
            self._open.discard(limit)

    def _arm(self) -> None:
        if self._check_at is None:
            loop = asyncio.get_running_loop()
            self._check_at = loop.time() + CHECK_INTERVAL_S
            loop.call_at(self._check_at, self._check, self._check_at)

    def _check(self, planned: float) -> None:
        self._check_at = None
        if not self._open:
            return
        now = asyncio.get_running_loop().time()
        # After a pause of this very process the reports of that time are still to be read.
        was_asleep = now - planned > CHECK_INTERVAL_S
        if not was_asleep and self._is_silent():
            for limit in self._open:
                limit.reschedule(now)
        else:
            self._arm()
