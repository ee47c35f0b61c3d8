"""Orders the waiting requests of one pool, in O(log n) per operation.

Three rules apply, from the outermost to the innermost.

 * Priority: each priority has its own queue. The first requests of these queues are compared, and
   the one with the largest `priority * aging - arrival` is served first. A long wait makes up for a
   low priority, so no priority starves. Only RESUMED comes before all others, however long they
   wait.
 * Fairness: within a priority, tenants share the served bytes in proportion to their weights, by
   start-time fair queueing (Goyal, Vin and Cheng, 1996). Each tenant has a tag, its virtual start
   time, which grows by cost / weight with each request served. The tenant with the smallest tag is
   served next. A tenant that joins the queue starts at the tag served last.
 * Urgency: a tenant's own requests are ordered by deadline, capped at MAX_LEAD_S after arrival.
   A request can therefore overtake only requests that arrived at most MAX_LEAD_S earlier.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from ullage_common.wire.limits import MAX_PRIORITY

RESUMED = MAX_PRIORITY + 1
"""Priority of answers that lost their engine. No client can ask for it."""
MAX_LEAD_S = 1.0
"""Maximum number of seconds by which a request may overtake its tenant's earlier requests."""


@dataclass(frozen=True, slots=True, eq=False)
class FairEntry:
    """The properties of a waiting request that determine its order.

    All times use the same clock.
    """

    number: int
    """Sequence number in order of arrival. Breaks ties between entries."""
    tenant: str
    weight: float
    """Weight of the request's tenant."""
    priority: int
    arrival: float
    """Time of arrival in seconds."""
    deadline: float
    """Time by which the first token must have arrived, in seconds."""
    size: int
    """Bytes of KV memory that the request is waiting for."""
    cost: int
    """Bytes that the tenant is charged when the request is served."""

    @property
    def due(self) -> float:
        """The request's deadline in seconds, but at most MAX_LEAD_S after its arrival.

        This orders a tenant's own requests.
        """
        return min(self.deadline, self.arrival + MAX_LEAD_S)


@dataclass(slots=True)
class _Flow:
    """The waiting requests of one tenant at one priority."""

    tag: float
    """Virtual start time of the tenant's next request."""
    number: int
    """Number of the request with which the tenant last joined the queue.

    Breaks ties between equal tags.
    """
    entries: "SortedList[tuple[float, int, FairEntry]]" = field(default_factory=SortedList)
    """A (due, number, entry) tuple for each request."""

    @property
    def head(self) -> FairEntry:
        """The tenant's next request to serve."""
        entry: FairEntry = self.entries[0][2]
        return entry


class _Level:
    """The waiting requests of all tenants at one priority. An empty level is removed."""

    def __init__(self) -> None:
        self.size = 0
        """Total bytes that this level's requests are waiting for."""
        self.num_entries = 0
        self._now = 0.0
        """Virtual time: the tag of the tenant that was served last."""
        self._flows: dict[str, _Flow] = {}
        self._order: SortedList[tuple[float, int, str]] = SortedList()
        """A (tag, number, tenant) tuple for each tenant with waiting requests."""
        self._idle: SortedList[tuple[float, str]] = SortedList()
        """A (tag, tenant) tuple for each tenant without requests that got more than its share."""

    @property
    def is_empty(self) -> bool:
        """Whether the level has no waiting requests."""
        return not self._order

    @property
    def head(self) -> FairEntry:
        """The next request of the tenant with the smallest tag."""
        return self._flows[self._order[0][2]].head

    def add(self, entry: FairEntry) -> None:
        """Add a request to its tenant's queue."""
        flow = self._flows.get(entry.tenant)
        if flow is None:
            flow = self._flows[entry.tenant] = _Flow(self._now, entry.number)

        if not flow.entries:
            self._idle.discard((flow.tag, entry.tenant))
            flow.number = entry.number
            self._order.add((flow.tag, flow.number, entry.tenant))
        flow.entries.add((entry.due, entry.number, entry))
        self.size += entry.size
        self.num_entries += 1

    def remove(self, entry: FairEntry) -> None:
        """Remove a request without charging its tenant."""
        flow = self._flows[entry.tenant]
        flow.entries.remove((entry.due, entry.number, entry))
        self.size -= entry.size
        self.num_entries -= 1
        if not flow.entries:
            self._order.remove((flow.tag, flow.number, entry.tenant))
            self._rest(entry.tenant, flow)

    def charge(self, entry: FairEntry) -> None:
        """Charge a tenant for a request that is about to be served and removed."""
        flow = self._flows[entry.tenant]
        # Virtual time follows only the smallest tag. An entry that backfills passed other tenants.
        if self._order[0][2] == entry.tenant:
            self._now = max(self._now, flow.tag)

        self._order.remove((flow.tag, flow.number, entry.tenant))
        flow.tag += entry.cost / entry.weight
        self._order.add((flow.tag, flow.number, entry.tenant))

        # Tenants that the others have caught up with start afresh.
        while self._idle and self._idle[0][0] <= self._now:
            del self._flows[self._idle.pop(0)[1]]

    def _rest(self, tenant: str, flow: _Flow) -> None:
        """Forget a tenant that has no more requests, unless it got more than its share.

        The tag of a tenant that got more is kept until the virtual time has reached the tag.
        Otherwise, the tenant could rejoin with a smaller tag and be served too early.
        """
        if flow.tag > self._now:
            self._idle.add((flow.tag, tenant))
        else:
            del self._flows[tenant]

    def in_turns(self) -> Iterator[FairEntry]:
        """Yield all requests, taking one from each tenant in turn."""
        flows = [self._flows[tenant].entries for _, _, tenant in self._order]
        for row in itertools.zip_longest(*flows):
            yield from (item[2] for item in row if item is not None)

    def entries(self) -> Iterator[FairEntry]:
        """Yield all requests in arbitrary order."""
        for flow in self._flows.values():
            yield from (entry for _, _, entry in flow.entries)

    def check_integrity(self) -> None:
        """Assert that every tenant is either waiting or idle, and is sorted by its current tag."""
        waiting = {tenant for _, _, tenant in self._order}
        resting = {tenant for _, tenant in self._idle}
        assert waiting | resting == self._flows.keys()
        assert not waiting & resting
        assert waiting == {tenant for tenant, flow in self._flows.items() if flow.entries}
        for tag, number, tenant in self._order:
            assert (self._flows[tenant].tag, self._flows[tenant].number) == (tag, number)
        assert self.size == sum(entry.size for entry in self.entries())
        assert self.num_entries == sum(1 for _ in self.entries())


class FairQueue:
    """The waiting requests of a pool, in the order in which they are served.

    Args:
        aging_s: seconds of waiting that make up for one level of priority.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._levels: dict[int, _Level] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def head(self) -> FairEntry | None:
        """The request to serve next, or None if the queue is empty."""
        return max((level.head for level in self._levels.values()), key=self.claim, default=None)

    def first(self, count: int) -> list[FairEntry]:
        """Return up to `count` requests, roughly in the order in which they will be served."""
        levels = sorted(self._levels.values(), key=lambda x: self.claim(x.head), reverse=True)
        entries = itertools.chain.from_iterable(level.in_turns() for level in levels)
        return list(itertools.islice(entries, count))

    def add(self, entry: FairEntry) -> None:
        """Add a waiting request to the queue."""
        self._levels.setdefault(entry.priority, _Level()).add(entry)
        self._len += 1

    def remove(self, entry: FairEntry) -> None:
        """Remove a request from the queue without serving it."""
        level = self._levels[entry.priority]
        level.remove(entry)
        self._len -= 1
        if level.is_empty:
            del self._levels[entry.priority]

    def serve(self, entry: FairEntry) -> None:
        """Remove a request that is about to be sent to an engine, and charge its tenant."""
        self._levels[entry.priority].charge(entry)
        self.remove(entry)

    def size_from(self, priority: int) -> int:
        """Return the total bytes that requests of at least this priority are waiting for."""
        return sum(level.size for p, level in self._levels.items() if p >= priority)

    def len_from(self, priority: int) -> int:
        """Return the number of waiting requests of at least this priority."""
        return sum(level.num_entries for p, level in self._levels.items() if p >= priority)

    def claim(self, entry: FairEntry) -> tuple[float, int]:
        """Return a sort key for choosing between the first requests of different priorities.

        The request with the largest key is served first.
        """
        if entry.priority >= RESUMED:
            return math.inf, -entry.number
        return entry.priority * self._aging_s - entry.arrival, -entry.number

    def check_integrity(self) -> None:
        """Assert that all levels are consistent and not empty."""
        for priority, level in self._levels.items():
            level.check_integrity()
            assert not level.is_empty
            assert {entry.priority for entry in level.entries()} == {priority}
        assert self._len == sum(1 for level in self._levels.values() for _ in level.entries())
