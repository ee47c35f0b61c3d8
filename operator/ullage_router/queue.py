"""The bounded queue of requests that wait for memory: one line a pool, highest priority first.

Only the head of a line is woken, so that requests are served in order and a burst of headroom
reports costs one decision a pool.
"""

import asyncio
import bisect
import itertools
from collections.abc import Iterator, Mapping

Key = tuple[int, float, int]
"""Order of service: priority (negated), arrival, a number that tells equals apart."""


class QueueFull(Exception):
    """The queue holds as many requests as it may."""


class Ticket:
    """One request's place in the queue; leave it when served, refused or abandoned."""

    def __init__(self, line: "Line", key: "Key", size: int) -> None:
        self.size = size
        self.key = key
        self._line = line
        self._event = asyncio.Event()

    async def turn(self, timeout_s: float) -> bool:
        """Waits to be first in line with something changed; False when the time is over."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def wake(self) -> None:
        self._event.set()

    def leave(self) -> None:
        """Gives the place up; harmless when done twice."""
        self._line.remove(self)


class Line:
    """Tickets of one pool in the order of service."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        bisect.insort(self._tickets, ticket, key=lambda t: t.key)

    def remove(self, ticket: Ticket) -> None:
        if ticket not in self._tickets:
            return
        was_head = self._tickets[0] is ticket
        self._tickets.remove(ticket)
        if was_head:
            self.wake()

    def wake(self) -> None:
        if self._tickets:
            self._tickets[0].wake()

    def before(self, ticket: Ticket | None) -> list[Ticket]:
        """Those that are served before a ticket; all of them for one that is not in this line."""
        place = self._tickets.index(ticket) if ticket in self._tickets else len(self._tickets)
        return self._tickets[:place]

    def check_integrity(self) -> None:
        keys = [ticket.key for ticket in self._tickets]
        assert keys == sorted(set(keys)), keys


class WaitingRoom:
    """All lines, under one bound.

    Args:
        max_requests: most requests that wait at once, over all pools.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._lines: dict[str, Line] = {}
        self._numbers: Iterator[int] = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def is_full(self) -> bool:
        return len(self) >= self._max_requests

    def join(self, pool: str, priority: int, arrived: float, size: int) -> Ticket:
        """A place behind those of higher priority and those that arrived before.

        Args:
            arrived: of the request; one that comes back from an engine gets its old place.
            size: bytes the request waits for.

        Raises:
            QueueFull: the bound is reached.
        """
        if self.is_full:
            raise QueueFull
        line = self._lines.setdefault(pool, Line())
        ticket = Ticket(line, (-priority, arrived, next(self._numbers)), size)
        line.add(ticket)
        return ticket

    def wake(self) -> None:
        """Tells the head of every line that memory or an engine may have come."""
        for line in self._lines.values():
            line.wake()

    def ahead(self, ticket: Ticket | None = None) -> Mapping[str, int]:
        """Bytes that others wait for before a ticket, by pool where there are any."""
        before = {pool: line.before(ticket) for pool, line in self._lines.items()}
        return {pool: sum(t.size for t in tickets) for pool, tickets in before.items() if tickets}

    def lengths(self) -> Mapping[str, int]:
        return {pool: len(line) for pool, line in self._lines.items()}

    def check_integrity(self) -> None:
        for line in self._lines.values():
            line.check_integrity()
