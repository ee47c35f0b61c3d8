"""Waits for an engine that end when the engine has fallen silent and another could do its work."""

import asyncio
from collections.abc import Callable

from ullage_router.flow import Source
from ullage_rpc.errors import ServiceError

CHECK_INTERVAL_S = 1.0


class Waits:
    """Everything that waits for one engine's first words.

    Args:
        is_silent: whether the engine has missed so many heartbeats that it must be given up.
        error: what is raised then.
    """

    def __init__(self, is_silent: Callable[[], bool], error: Callable[[], ServiceError]) -> None:
        self._is_silent = is_silent
        self._error = error
        self._open: set[Source] = set()
        self._check_at: float | None = None

    def begin(self, stream: Source) -> None:
        """The stream ends with the error when the engine falls silent."""
        self._open.add(stream)
        self._arm()

    def end(self, stream: Source) -> None:
        """The first words came, or never will."""
        self._open.discard(stream)

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
            for stream in self._open:
                stream.end(self._error())
        else:
            self._arm()
