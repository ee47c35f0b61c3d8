"""The bounded queue of requests that wait for memory: one line a pool, shared fairly.

Only the head of a line is woken, so that requests are served in order (`policy/fair_queue.py`) and
a burst of headroom reports costs one decision a pool. A full queue is shared fairly as well: a
newcomer takes the place of what the tenant with the largest share of it needs least.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from ullage_common.config.router import QueueSection
from ullage_router.policy.fair_queue import Entry, FairLine

MAX_EVICTED = 8
"""Number of requests whose places one newcomer may take."""


class QueueFull(Exception):
    """The queue has no room for the request."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """The request of a queue entry, in numbers."""

    size: int
    """Bytes that the request waits for: its predicted KV."""
    arrival: float
    deadline: float
    """Deadline of the answer; like the arrival, on the monotonic clock."""
    prompt_bytes: int = 0
    """Memory of this process that the request holds."""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    is_charged: bool = False
    """Whether the request was served before and came back from an engine: it is not charged again.
    """


class QueueEntry:
    """One request's place in the queue; leave it when served, refused or abandoned.

    is_evicted: another one took the place.
    """

    def __init__(self, queue: "RequestQueue", pool: str, waiter: Waiter, place: Entry) -> None:
        self.pool = pool
        self.waiter = waiter
        self.place = place
        self.is_evicted = False
        self._queue = queue
        self._event = asyncio.Event()

    async def wait_turn(self, timeout_s: float) -> bool:
        """Waits until the entry is first in line and something has changed; False when the time is
        over."""
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
        """Leaves the queue for an engine of the pool."""
        self._queue.remove(self, served=True)

    def leave(self) -> None:
        """Gives up the place in the queue; harmless when done twice."""
        self._queue.remove(self)


@dataclass(slots=True)
class _Holding:
    """The queue entries of one tenant."""

    weight: float
    size: int = 0
    entries: "SortedList[tuple[int, float, int, QueueEntry]]" = field(default_factory=SortedList)
    """(priority, -deadline, -number, entry); the first one is evicted first."""


class RequestQueue:
    """The lines of all pools, under common bounds.

    Args:
        bounds: requests, predicted bytes and prompts' bytes that wait at once, over all pools.
    """

    def __init__(self, bounds: QueueSection) -> None:
        self._bounds = bounds
        self._lines: dict[str, FairLine] = {}
        self._entries: dict[int, QueueEntry] = {}
        self._holdings: dict[str, _Holding] = {}
        self._shares: SortedList[tuple[float, str]] = SortedList()
        """(bytes / weight, tenant)"""
        self._numbers: Iterator[int] = itertools.count()
        self.size = 0
        """Bytes that all entries wait for."""
        self.prompt_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def join(self, pool: str, waiter: Waiter) -> QueueEntry:
        """Adds an entry to the line of a pool; a new head may decide anew at once.

        Raises:
            QueueFull: a bound is reached, and by nobody who has more than a fair share.
        """
        for loser in self._losers(waiter):
            loser.is_evicted = True
            self.remove(loser)
            loser.wake()
        entry = QueueEntry(self, pool, waiter, _place(waiter, next(self._numbers)))
        line = self._lines.setdefault(pool, FairLine(self._bounds.aging))
        line.add(entry.place)
        self._entries[entry.place.number] = entry
        self._hold(entry)
        if line.head is entry.place:
            entry.wake()
        return entry

    def remove(self, entry: QueueEntry, served: bool = False) -> None:
        """Removes an entry, if it is in the queue, and wakes a new head."""
        if self._entries.pop(entry.place.number, None) is None:
            return
        line = self._lines[entry.pool]
        was_head = line.head is entry.place
        (line.serve if served else line.remove)(entry.place)
        self._release(entry)
        if was_head:
            self._wake_head(line)

    def wake(self) -> None:
        """Wakes the head of every line, since memory or an engine may have come."""
        for line in self._lines.values():
            self._wake_head(line)

    def ahead(self, priority: int, entry: QueueEntry | None = None) -> Mapping[str, int]:
        """Returns the bytes that others wait for before a request, by pool; absent where it is the
        next.

        All of its own priority count as before it: their order may change with every arrival.
        """
        result = {}
        for pool, line in self._lines.items():
            head, own = line.head, entry and entry.place
            if head is not None and head is not own:
                is_here = entry is not None and entry.pool == pool and not entry.is_evicted
                result[pool] = line.size_from(priority) - (own.size if own and is_here else 0)
        return result

    def lengths(self) -> Mapping[str, int]:
        return {pool: len(line) for pool, line in self._lines.items()}

    def waits(self) -> Mapping[str, tuple[int, int, float]]:
        """Returns (requests, bytes, arrival of the first) of each pool with waiters."""
        result: dict[str, tuple[int, int, float]] = {}
        for entry in self._entries.values():
            number, size, oldest = result.get(entry.pool, (0, 0, math.inf))
            waiter = entry.waiter
            result[entry.pool] = (number + 1, size + waiter.size, min(oldest, waiter.arrival))
        return result

    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes that each tenant waits for."""
        return {tenant: holding.size for tenant, holding in sorted(self._holdings.items())}

    def _wake_head(self, line: FairLine) -> None:
        if line.head is not None:
            self._entries[line.head.number].wake()

    def _losers(self, waiter: Waiter) -> list[QueueEntry]:
        """Returns the entries that are evicted for a newcomer: none while there is room."""
        losers: list[QueueEntry] = []
        missing = self._missing(waiter, losers)
        if not missing:
            return losers
        for entry in self._candidates(waiter):
            losers.append(entry)
            if not self._missing(waiter, losers):
                return losers
        raise QueueFull

    def _missing(self, waiter: Waiter, losers: list[QueueEntry]) -> bool:
        """Whether a bound would be exceeded."""
        size = waiter.size - sum(entry.waiter.size for entry in losers)
        prompts = waiter.prompt_bytes - sum(entry.waiter.prompt_bytes for entry in losers)
        return (
            len(self) + 1 - len(losers) > self._bounds.max_requests
            or self.size + size > self._bounds.max_bytes
            or self.prompt_bytes + prompts > self._bounds.max_prompt_bytes
        )

    def _candidates(self, waiter: Waiter) -> Iterator[QueueEntry]:
        """Yields entries to evict: of the tenant with the largest share, while that share stays the
        larger one, and of the newcomer's own tenant those of a lower priority."""
        if not self._shares:
            return
        tenant = self._shares[-1][1]
        largest, is_own = self._holdings[tenant], tenant == waiter.tenant
        own = self._holdings.get(waiter.tenant)
        least_share, rest = (waiter.size + (own.size if own else 0)) / waiter.weight, largest.size
        for priority, _, _, entry in itertools.islice(largest.entries, MAX_EVICTED):
            rest -= entry.waiter.size
            is_less = priority < waiter.priority if is_own else priority <= waiter.priority
            if not is_less or not (is_own or rest / largest.weight >= least_share):
                return
            yield entry

    def _hold(self, entry: QueueEntry) -> None:
        waiter = entry.waiter
        holding = self._holdings.setdefault(waiter.tenant, _Holding(waiter.weight))
        self._shares.discard((holding.size / holding.weight, waiter.tenant))
        holding.weight = waiter.weight
        self._count(entry, holding, 1)
        holding.entries.add(_worth(entry))
        self._shares.add((holding.size / holding.weight, waiter.tenant))

    def _release(self, entry: QueueEntry) -> None:
        tenant = entry.waiter.tenant
        holding = self._holdings[tenant]
        self._shares.remove((holding.size / holding.weight, tenant))
        self._count(entry, holding, -1)
        holding.entries.remove(_worth(entry))
        if holding.entries:
            self._shares.add((holding.size / holding.weight, tenant))
        else:
            del self._holdings[tenant]

    def _count(self, entry: QueueEntry, holding: _Holding, sign: int) -> None:
        holding.size += sign * entry.waiter.size
        self.size += sign * entry.waiter.size
        self.prompt_bytes += sign * entry.waiter.prompt_bytes

    def check_integrity(self) -> None:
        waiters = [entry.waiter for entry in self._entries.values()]
        assert self.size == sum(waiter.size for waiter in waiters)
        assert self.prompt_bytes == sum(waiter.prompt_bytes for waiter in waiters)
        assert len(self) == sum(map(len, self._lines.values()))
        assert len(self) == sum(len(holding.entries) for holding in self._holdings.values())
        assert sorted(tenant for _, tenant in self._shares) == sorted(self._holdings)
        for line in self._lines.values():
            line.check_integrity()


def _place(waiter: Waiter, number: int) -> Entry:
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


def _worth(entry: QueueEntry) -> tuple[int, float, int, QueueEntry]:
    place = entry.place
    return place.priority, -place.deadline, -place.number, entry
