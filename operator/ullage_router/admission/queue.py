"""The bounded queue of requests that wait for memory: one line a pool, shared fairly, and one more
for each adapter that some of the pool's engines lack.

Only the head of a line is woken, so that requests are served in order (`policy/fair_queue.py`) and
a burst of headroom reports costs one decision a pool. While the head cannot run, those behind it
that fit may pass it, if they end before it could begin (`policy/decide.py`), and no more than
`backfill` of them pass one head. A full queue is shared fairly as well, by the
bound that is short: a newcomer takes the place of what the tenant with the largest share of that
needs least. A higher priority takes the place of a lower one, whosever they are.

Heads of several lines of a pool go by priority and arrival. Whoever can use every engine lets the
engines alone that have the adapter of a head before it, unless it may pass that head there; whoever
needs an adapter stands behind the head of those that can use every engine.
"""

import asyncio
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sortedcontainers import SortedList

from ullage_common.config.router import QueueSection
from ullage_router.policy.fair_queue import Entry, FairQueue

LOOKED_AHEAD = 16
"""Number of requests first in line among which those are looked for that may pass the head."""
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
    adapter: str = ""
    """The adapter that the request needs and some engines lack; empty where all can serve it."""


LineKey = tuple[str, str]
"""(pool, adapter), the adapter as of `Waiter`."""


class QueueEntry:
    """One request's place in the queue; leave it when served, refused or abandoned.

    is_evicted: another one took the place.
    """

    def __init__(self, queue: "RequestQueue", pool: str, waiter: Waiter, place: Entry) -> None:
        self.pool = pool
        self.waiter = waiter
        self.place = place
        self.is_evicted = False
        self.num_passed = 0
        """Requests that passed this one while it was the head of its line."""
        self._queue = queue
        self._event = asyncio.Event()

    async def wait_turn(self, timeout_s: float) -> bool:
        """Wait until the entry is first in line and something has changed; False when the time is
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

    @property
    def line(self) -> LineKey:
        return self.pool, self.waiter.adapter

    @property
    def is_head(self) -> bool:
        """Whether the entry is the next of its line."""
        return self._queue.head(self.line) is self

    def serve(self) -> None:
        """Leave the queue for an engine of the pool."""
        self._queue.remove(self, served=True)

    def leave(self) -> None:
        """Give up the place in the queue; harmless when done twice."""
        self._queue.remove(self)


class _Amounts(NamedTuple):
    """What entries take of each bound."""

    requests: int = 0
    size: int = 0
    prompt_bytes: int = 0

    def plus(self, waiter: Waiter, sign: int = 1) -> "_Amounts":
        return _Amounts(
            self.requests + sign,
            self.size + sign * waiter.size,
            self.prompt_bytes + sign * waiter.prompt_bytes,
        )


@dataclass(slots=True)
class _Holding:
    """The queue entries of one tenant."""

    weight: float
    amounts: _Amounts = _Amounts()  # noqa: RUF009 - immutable
    entries: "SortedList[_Worth]" = field(default_factory=SortedList)
    """The first one is evicted first."""

    def shares(self, tenant: str) -> "Iterator[tuple[float, str]]":
        """Yield (amount / weight, tenant) of each bound."""
        for amount in self.amounts:
            yield amount / self.weight, tenant


_Worth = tuple[int, float, int, QueueEntry]
"""(priority, -deadline, -number, entry): who is evicted before others has the lowest."""


class RequestQueue:
    """The lines of all pools, under common bounds.

    Args:
        bounds: requests, predicted bytes and prompts' bytes that wait at once, over all pools.
    """

    def __init__(self, bounds: QueueSection) -> None:
        self._bounds = bounds
        self._lines: dict[LineKey, FairQueue] = {}
        self._entries: dict[int, QueueEntry] = {}
        self._holdings: dict[str, _Holding] = {}
        self._worths: SortedList[_Worth] = SortedList()
        """Of all entries."""
        self._shares = [SortedList[tuple[float, str]]() for _ in _Amounts()]
        """(amount / weight, tenant) of each bound."""
        self._numbers: Iterator[int] = itertools.count()
        self._amounts = _Amounts()
        self.passed = 0
        """Requests that passed a head."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that all entries wait for."""
        return self._amounts.size

    @property
    def prompt_bytes(self) -> int:
        """Memory of this process that all entries hold."""
        return self._amounts.prompt_bytes

    def join(self, pool: str, waiter: Waiter) -> QueueEntry:
        """Add an entry to the line of a pool; a new head may decide anew at once.

        Raises:
            QueueFull: a bound is reached, and by nobody who has more than a fair share of it or
                waits with a lower priority.
        """
        for loser in self._make_room(waiter):
            loser.is_evicted = True
            self._leave_line(loser)
            loser.wake()
        entry = QueueEntry(self, pool, waiter, _place(waiter, next(self._numbers)))
        line = self._lines.setdefault(entry.line, FairQueue(self._bounds.aging))
        line.add(entry.place)
        self._entries[entry.place.number] = entry
        self._hold(entry)
        if line.head is entry.place:
            entry.wake()
        return entry

    def remove(self, entry: QueueEntry, served: bool = False) -> None:
        """Remove an entry, if it is in the queue, and wake a new head."""
        if entry.place.number in self._entries:
            self._release(entry)
            self._leave_line(entry, served)

    def _leave_line(self, entry: QueueEntry, served: bool = False) -> None:
        del self._entries[entry.place.number]
        line = self._lines[entry.line]
        was_head = line.head is entry.place
        (line.serve if served else line.remove)(entry.place)
        if entry.waiter.adapter and not len(line):  # the adapter may be gone for good
            del self._lines[entry.line]
        if was_head:
            for (pool, _), other in self._lines.items():
                if pool == entry.pool:
                    self._wake_head(other)

    def wake(self) -> None:
        """Wake the head of every line, since memory or an engine may have come."""
        for line in self._lines.values():
            self._wake_head(line)

    def ahead(
        self, priority: int, entry: QueueEntry | None = None, adapter: str = ""
    ) -> Mapping[str, int]:
        """Return the bytes that others wait for before a request on all its engines, by pool;
        absent where it is the next.

        All of its own priority count as before it: their order may change with every arrival.

        Args:
            adapter: as of `Waiter`.
        """
        result: dict[str, int] = {}
        for head in self._heads_before(entry, adapter):
            is_here = entry is not None and entry.line == head.line and not entry.is_evicted
            own = entry.place.size if entry and is_here else 0
            size = self._lines[head.line].size_from(priority) - own
            result[head.pool] = result.get(head.pool, 0) + size
        return result

    def head(self, key: LineKey) -> QueueEntry | None:
        """Return the first of a line; None when nobody waits in it."""
        line = self._lines.get(key)
        place = line.head if line else None
        return self._entries[place.number] if place else None

    def claims(self, entry: QueueEntry | None = None, adapter: str = "") -> Mapping[LineKey, int]:
        """Return the bytes that heads before a request wait for, for which it keeps engines: those
        of the pool that have the adapter. 0 stands for a head that may be passed no more."""
        keys = [key for key in self._lines if key[1] not in ("", adapter)]
        return {
            head.line: 0 if self._is_full(head) else head.place.size
            for head in self._heads(entry, keys)
        }

    def passable(self, entry: QueueEntry | None = None, adapter: str = "") -> Mapping[str, int]:
        """Return the bytes that the smallest head before a request waits for, of those pools in
        `ahead` of which each head may be passed once more."""
        sizes: dict[str, int] = {}
        full = set()
        for head in self._heads_before(entry, adapter):
            sizes[head.pool] = min(head.place.size, sizes.get(head.pool, head.place.size))
            if self._is_full(head):
                full.add(head.pool)
        return {pool: size for pool, size in sizes.items() if pool not in full}

    def on_passed(
        self, pool: str, entry: QueueEntry | None, adapters: Collection[str] = ()
    ) -> None:
        """Count a request that takes memory of an engine, if it passes heads by that.

        Args:
            pool: of the engine.
            adapters: that the engine has.
        """
        names = ("", *adapters)
        keys = [key for key in self._lines if key[0] == pool and key[1] in names]
        passed = list(self._heads(entry, keys))
        for head in passed:
            head.num_passed += 1
        self.passed += bool(passed)

    def _is_full(self, head: QueueEntry) -> bool:
        """Whether as many requests as may have passed it."""
        return head.num_passed >= self._bounds.backfill

    def _heads_before(self, entry: QueueEntry | None, adapter: str) -> Iterator[QueueEntry]:
        """Yield the heads before a request of the lines whose engines include all of its own."""
        return self._heads(entry, [key for key in self._lines if key[1] in ("", adapter)])

    def _heads(self, entry: QueueEntry | None, keys: Iterable[LineKey]) -> Iterator[QueueEntry]:
        """Yield the heads before a request, of some lines; of other pools than its own, all heads.

        Args:
            entry: of the request; None: it is not in the queue yet, so that all are before it.
        """
        for key in keys:
            if (head := self.head(key)) is None:
                continue
            if entry is None or head.pool != entry.pool or key == entry.line:
                is_before = head is not entry
            else:
                line = self._lines[key]
                is_before = line.claim(head.place) > line.claim(entry.place)
            if is_before:
                yield head

    def wake_followers(self, head: QueueEntry, available: int) -> None:
        """Wake those behind a head that stays which may fit so many bytes.

        Args:
            available: most bytes that an engine of the pool has.
        """
        if not self._is_full(head) and available > 0:
            for place in self._lines[head.line].first(LOOKED_AHEAD):
                if place is not head.place and place.size <= available:
                    self._entries[place.number].wake()

    def lengths(self) -> Mapping[str, int]:
        """Return how many requests wait, by pool."""
        result: dict[str, int] = {}
        for (pool, _), line in self._lines.items():
            result[pool] = result.get(pool, 0) + len(line)
        return result

    def waits(self) -> Mapping[str, tuple[int, int, float]]:
        """Return (requests, bytes, arrival of the first) of each pool with waiters."""
        result: dict[str, tuple[int, int, float]] = {}
        for entry in self._entries.values():
            number, size, oldest = result.get(entry.pool, (0, 0, math.inf))
            waiter = entry.waiter
            result[entry.pool] = (number + 1, size + waiter.size, min(oldest, waiter.arrival))
        return result

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes that each tenant waits for."""
        return {tenant: holding.amounts.size for tenant, holding in sorted(self._holdings.items())}

    def _wake_head(self, line: FairQueue) -> None:
        if line.head is not None:
            self._entries[line.head.number].wake()

    def _make_room(self, waiter: Waiter) -> list[QueueEntry]:
        """Return the entries that are evicted for a newcomer, which are counted no more; none
        while there is room.

        Raises:
            QueueFull: nobody is to be evicted for it.
        """
        losers: list[QueueEntry] = []
        while (bound := self._exceeded(waiter)) is not None:
            loser = self._loser(waiter, bound) if len(losers) < MAX_EVICTED else None
            if loser is None:
                for entry in losers:
                    self._hold(entry)
                raise QueueFull
            self._release(loser)
            losers.append(loser)
        return losers

    def _exceeded(self, waiter: Waiter) -> int | None:
        """Return which bound a newcomer would exceed; None when it has room."""
        bounds = self._bounds
        limits = (bounds.max_requests, bounds.max_bytes, bounds.max_prompt_bytes)
        pairs = zip(self._amounts.plus(waiter), limits, strict=True)
        return next((i for i, (amount, limit) in enumerate(pairs) if amount > limit), None)

    def _loser(self, waiter: Waiter, bound: int) -> QueueEntry | None:
        """Return who makes room for a newcomer: of the tenant with the largest share of the bound
        that is short, while that share stays the larger one; or whoever waits with the lowest
        priority, if the newcomer's is higher."""
        if not self._worths:
            return None
        _, tenant = self._shares[bound][-1]
        largest = self._holdings[tenant]
        entry: QueueEntry
        priority, _, _, entry = largest.entries[0]
        if priority < waiter.priority:
            return entry
        if priority == waiter.priority and tenant != waiter.tenant:
            own = self._holdings.get(waiter.tenant, _Holding(waiter.weight)).amounts
            least = own.plus(waiter)[bound] / waiter.weight
            if largest.amounts.plus(entry.waiter, -1)[bound] / largest.weight >= least:
                return entry
        priority, _, _, entry = self._worths[0]
        return entry if priority < waiter.priority else None

    def _hold(self, entry: QueueEntry) -> None:
        """Count an entry."""
        waiter = entry.waiter
        holding = self._holdings.setdefault(waiter.tenant, _Holding(waiter.weight))
        if holding.entries:
            self._forget_shares(waiter.tenant, holding)
        holding.weight = waiter.weight
        holding.amounts = holding.amounts.plus(waiter)
        self._amounts = self._amounts.plus(waiter)
        holding.entries.add(_worth(entry))
        self._worths.add(_worth(entry))
        self._add_shares(waiter.tenant, holding)

    def _release(self, entry: QueueEntry) -> None:
        """Count an entry no more."""
        tenant = entry.waiter.tenant
        holding = self._holdings[tenant]
        self._forget_shares(tenant, holding)
        holding.amounts = holding.amounts.plus(entry.waiter, -1)
        self._amounts = self._amounts.plus(entry.waiter, -1)
        holding.entries.remove(_worth(entry))
        self._worths.remove(_worth(entry))
        if holding.entries:
            self._add_shares(tenant, holding)
        else:
            del self._holdings[tenant]

    def _add_shares(self, tenant: str, holding: _Holding) -> None:
        for shares, share in zip(self._shares, holding.shares(tenant), strict=True):
            shares.add(share)

    def _forget_shares(self, tenant: str, holding: _Holding) -> None:
        for shares, share in zip(self._shares, holding.shares(tenant), strict=True):
            shares.remove(share)

    def check_integrity(self) -> None:
        waiters = [entry.waiter for entry in self._entries.values()]
        assert self.size == sum(waiter.size for waiter in waiters)
        assert self.prompt_bytes == sum(waiter.prompt_bytes for waiter in waiters)
        assert len(self) == sum(map(len, self._lines.values()))
        assert len(self) == sum(len(holding.entries) for holding in self._holdings.values())
        assert len(self) == len(self._worths) == self._amounts.requests
        for shares in self._shares:
            assert sorted(tenant for _, tenant in shares) == sorted(self._holdings)
        for holding in self._holdings.values():
            assert holding.amounts.requests == len(holding.entries) > 0
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


def _worth(entry: QueueEntry) -> _Worth:
    place = entry.place
    return place.priority, -place.deadline, -place.number, entry
