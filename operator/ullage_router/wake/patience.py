"""A request's time limit, which stands still while the request is held."""

import asyncio
import contextlib
from collections.abc import Iterator


class Patience:
    """Whoever has set a time limit hands it in; whoever holds the request stops it.

    held_s: for how long it stood still so far, seconds.
    """

    def __init__(self) -> None:
        self.held_s = 0.0
        self._limits: list[asyncio.Timeout] = []

    @contextlib.contextmanager
    def under(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Within the block the limit is stopped with the others."""
        self._limits.append(limit)
        try:
            yield
        finally:
            self._limits.remove(limit)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The limits are later by as long as the block takes."""
        loop = asyncio.get_running_loop()
        began, ends = loop.time(), [limit.when() for limit in self._limits]
        for limit in self._limits:
            limit.reschedule(None)
        try:
            yield
        finally:
            passed = loop.time() - began
            self.held_s += passed
            for limit, end in zip(self._limits, ends, strict=True):
                limit.reschedule(None if end is None else end + passed)
