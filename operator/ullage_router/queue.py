"""The bounded queue of requests that wait for memory: one line a pool, shared fairly.

Only the head of a line is woken, so that requests are served in order (`fair.py`) and a burst of
headroom reports costs one decision a pool. A full queue is shared fairly as well: a newcomer takes
the place of what the tenant with the largest share of it needs least.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from ullage_router.config import QueueSection
from ullage_router.fair import Entry, FairLine

MAX_DISPLACED = 8
"""Requests that one newcomer may take the places of."""


class QueueFull(Exception):
    """The queue holds as much as it may."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """What somebody brings into the queue."""

    size: int
    """Bytes it waits for: predicted KV."""
    arrival: float
    deadline: float
    """Of the answer; both on the monotonic clock."""
    prompt_bytes: int = 0
    """Memory of this process that the request holds."""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    is_charged: bool = False
    """It was served and came back from an engine: it is not charged for again."""


class Ticket:
    """One request's place in the queue; leave it when served, refused or abandoned.

    is_displaced: another one took the place.
    """

    def __init__(self, room: "WaitingRoom", pool: str, waiter: Waiter, entry: Entry) -> None:
        self.pool = pool
        self.waiter = waiter
        self.entry = entry
        self.is_displaced = False
        self._room = room
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

    def serve(self) -> None:
        """Leaves for an engine of the pool it waited for."""
        self._room.remove(self, served=True)

    def leave(self) -> None:
        """Gives the place up; harmless when done twice."""
        self._room.remove(self)


@dataclass(slots=True)
class _Holding:
    """What one tenant has in the queue."""

    weight: float
    size: int = 0
    tickets: "SortedList[tuple[int, float, int, Ticket]]" = field(default_factory=SortedList)
    """(priority, -deadline, -number, ticket): the first one is missed least."""


class WaitingRoom:
    """All lines, under common bounds.

    Args:
        bounds: requests, predicted bytes and prompts' bytes that wait at once, over all pools.
    """

    def __init__(self, bounds: QueueSection) -> None:
        self._bounds = bounds
        self._lines: dict[str, FairLine] = {}
        self._tickets: dict[int, Ticket] = {}
        self._holdings: dict[str, _Holding] = {}
        self._shares: SortedList[tuple[float, str]] = SortedList()
        """(bytes / weight, tenant)"""
        self._numbers: Iterator[int] = itertools.count()
        self.size = 0
        """Bytes that all wait for."""
        self.prompt_bytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self, pool: str, waiter: Waiter) -> Ticket:
        """A place in the line of a pool; a new head may decide anew at once.

        Raises:
            QueueFull: a bound is reached, and by nobody who has more than a fair share.
        """
        for loser in self._losers(waiter):
            loser.is_displaced = True
            self.remove(loser)
            loser.wake()
        ticket = Ticket(self, pool, waiter, _entry(waiter, next(self._numbers)))
        line = self._lines.setdefault(pool, FairLine(self._bounds.aging))
        line.add(ticket.entry)
        self._tickets[ticket.entry.number] = ticket
        self._hold(ticket)
        if line.head is ticket.entry:
            ticket.wake()
        return ticket

    def remove(self, ticket: Ticket, served: bool = False) -> None:
        """Takes a ticket out, if it is here, and wakes a new head."""
        if self._tickets.pop(ticket.entry.number, None) is None:
            return
        line = self._lines[ticket.pool]
        was_head = line.head is ticket.entry
        (line.serve if served else line.remove)(ticket.entry)
        self._release(ticket)
        if was_head:
            self._wake_head(line)

    def wake(self) -> None:
        """Tells the head of every line that memory or an engine may have come."""
        for line in self._lines.values():
            self._wake_head(line)

    def ahead(self, priority: int, ticket: Ticket | None = None) -> Mapping[str, int]:
        """Bytes that others wait for before a request, by pool; absent where it is the next.

        All of its own priority count as before it: their order may change with every arrival.
        """
        found = {}
        for pool, line in self._lines.items():
            head, own = line.head, ticket and ticket.entry
            if head is not None and head is not own:
                is_here = ticket is not None and ticket.pool == pool and not ticket.is_displaced
                found[pool] = line.size_from(priority) - (own.size if own and is_here else 0)
        return found

    def lengths(self) -> Mapping[str, int]:
        return {pool: len(line) for pool, line in self._lines.items()}

    def waits(self) -> Mapping[str, tuple[int, int, float]]:
        """By pool where somebody waits: (requests, bytes, arrival of the first)."""
        found: dict[str, tuple[int, int, float]] = {}
        for ticket in self._tickets.values():
            number, size, oldest = found.get(ticket.pool, (0, 0, math.inf))
            waiter = ticket.waiter
            found[ticket.pool] = (number + 1, size + waiter.size, min(oldest, waiter.arrival))
        return found

    def sizes(self) -> Mapping[str, int]:
        """Bytes that each tenant waits for."""
        return {tenant: holding.size for tenant, holding in sorted(self._holdings.items())}

    def _wake_head(self, line: FairLine) -> None:
        if line.head is not None:
            self._tickets[line.head.number].wake()

    def _losers(self, waiter: Waiter) -> list[Ticket]:
        """Who leaves for a newcomer: nobody while there is room."""
        losers: list[Ticket] = []
        missing = self._missing(waiter, losers)
        if not missing:
            return losers
        for ticket in self._candidates(waiter):
            losers.append(ticket)
            if not self._missing(waiter, losers):
                return losers
        raise QueueFull

    def _missing(self, waiter: Waiter, losers: list[Ticket]) -> bool:
        """Whether a bound would be exceeded."""
        size = waiter.size - sum(ticket.waiter.size for ticket in losers)
        prompts = waiter.prompt_bytes - sum(ticket.waiter.prompt_bytes for ticket in losers)
        return (
            len(self) + 1 - len(losers) > self._bounds.max_requests
            or self.size + size > self._bounds.max_bytes
            or self.prompt_bytes + prompts > self._bounds.max_prompt_bytes
        )

    def _candidates(self, waiter: Waiter) -> Iterator[Ticket]:
        """Of the tenant with the largest share, what it misses least, while its share stays the
        larger one; of the newcomer's own tenant, what has a lower priority."""
        if not self._shares:
            return
        tenant = self._shares[-1][1]
        largest, is_own = self._holdings[tenant], tenant == waiter.tenant
        own = self._holdings.get(waiter.tenant)
        wanted, rest = (waiter.size + (own.size if own else 0)) / waiter.weight, largest.size
        for priority, _, _, ticket in itertools.islice(largest.tickets, MAX_DISPLACED):
            rest -= ticket.waiter.size
            is_less = priority < waiter.priority if is_own else priority <= waiter.priority
            if not is_less or not (is_own or rest / largest.weight >= wanted):
                return
            yield ticket

    def _hold(self, ticket: Ticket) -> None:
        waiter = ticket.waiter
        holding = self._holdings.setdefault(waiter.tenant, _Holding(waiter.weight))
        self._shares.discard((holding.size / holding.weight, waiter.tenant))
        holding.weight = waiter.weight
        self._count(ticket, holding, 1)
        holding.tickets.add(_worth(ticket))
        self._shares.add((holding.size / holding.weight, waiter.tenant))

    def _release(self, ticket: Ticket) -> None:
        tenant = ticket.waiter.tenant
        holding = self._holdings[tenant]
        self._shares.remove((holding.size / holding.weight, tenant))
        self._count(ticket, holding, -1)
        holding.tickets.remove(_worth(ticket))
        if holding.tickets:
            self._shares.add((holding.size / holding.weight, tenant))
        else:
            del self._holdings[tenant]

    def _count(self, ticket: Ticket, holding: _Holding, sign: int) -> None:
        holding.size += sign * ticket.waiter.size
        self.size += sign * ticket.waiter.size
        self.prompt_bytes += sign * ticket.waiter.prompt_bytes

    def check_integrity(self) -> None:
        waiters = [ticket.waiter for ticket in self._tickets.values()]
        assert self.size == sum(waiter.size for waiter in waiters)
        assert self.prompt_bytes == sum(waiter.prompt_bytes for waiter in waiters)
        assert len(self) == sum(map(len, self._lines.values()))
        assert len(self) == sum(len(holding.tickets) for holding in self._holdings.values())
        assert sorted(tenant for _, tenant in self._shares) == sorted(self._holdings)
        for line in self._lines.values():
            line.check_integrity()


def _entry(waiter: Waiter, number: int) -> Entry:
    return Entry(
        number=number,
        tenant=waiter.tenant,
        weight=waiter.weight,
        priority=waiter.priority,
        arrival=waiter.arrival,
        deadline=waiter.deadline,
        size=waiter.size,
        cost=0 if waiter.is_charged else waiter.size,
    )


def _worth(ticket: Ticket) -> tuple[int, float, int, Ticket]:
    entry = ticket.entry
    return entry.priority, -entry.deadline, -entry.number, ticket
