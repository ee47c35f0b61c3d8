"""The order in which one pool's waiting requests are served: pure, no clock, O(log n) a step.

Of the heads of all priority levels the one with the largest

    priority * aging - arrival

goes first: waiting makes up for priority, so no level starves. Within a level tenants share the
bytes served by their weights (start-time fair queueing: each tenant's tag grows by cost / weight,
the smallest tag is served, and a tenant that comes anew starts at the tag served last). A tenant's
own requests go by their deadlines, of which none counts as later than `MAX_LEAD_S` after arrival:
so a request is overtaken only by what came within that time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

MAX_LEAD_S = 1.0
"""Seconds by which a request may overtake others of its tenant that came before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A waiting request, as far as its order goes."""

    number: int
    """Tie-breaker between equal entries: the smaller one came earlier."""
    tenant: str
    weight: float
    priority: int
    arrival: float
    deadline: float
    """Both on one clock, seconds."""
    size: int
    """Bytes that the request waits for."""
    cost: int
    """Bytes that the tenant is charged when the request is served."""

    @property
    def due(self) -> float:
        """The time by which a tenant's requests are ordered."""
        return min(self.deadline, self.arrival + MAX_LEAD_S)


@dataclass(slots=True)
class _Flow:
    """One tenant's requests at one priority."""

    tag: float
    """Virtual time at which its next request begins."""
    number: int
    entries: "SortedList[tuple[float, int, Entry]]" = field(default_factory=SortedList)
    """(due, number, entry)"""

    @property
    def head(self) -> Entry:
        entry: Entry = self.entries[0][2]
        return entry


class _Level:
    """The tenants of one priority; forgotten when nobody waits at it."""

    def __init__(self) -> None:
        self.size = 0
        self._now = 0.0
        """Virtual time: the tag served last."""
        self._flows: dict[str, _Flow] = {}
        self._order: SortedList[tuple[float, int, str]] = SortedList()
        """(tag, number, tenant) of those that wait."""
        self._idle: SortedList[tuple[float, str]] = SortedList()
        """(tag, tenant) of those that wait no more and had more than their share."""

    @property
    def is_empty(self) -> bool:
        return not self._order

    @property
    def head(self) -> Entry:
        return self._flows[self._order[0][2]].head

    def add(self, entry: Entry) -> None:
        flow = self._flows.get(entry.tenant)
        if flow is None:
            flow = self._flows[entry.tenant] = _Flow(self._now, entry.number)
        if not flow.entries:
            self._idle.discard((flow.tag, entry.tenant))
            flow.number = entry.number
            self._order.add((flow.tag, flow.number, entry.tenant))
        flow.entries.add((entry.due, entry.number, entry))
        self.size += entry.size

    def remove(self, entry: Entry) -> None:
        flow = self._flows[entry.tenant]
        flow.entries.remove((entry.due, entry.number, entry))
        self.size -= entry.size
        if not flow.entries:
            self._order.remove((flow.tag, flow.number, entry.tenant))
            self._rest(entry.tenant, flow)

    def charge(self, entry: Entry) -> None:
        """The entry, which is still here, is served."""
        flow = self._flows[entry.tenant]
        if self._order[0][2] == entry.tenant:  # one that passed others says nothing of the time
            self._now = max(self._now, flow.tag)
        self._order.remove((flow.tag, flow.number, entry.tenant))
        flow.tag += entry.cost / entry.weight
        self._order.add((flow.tag, flow.number, entry.tenant))
        while self._idle and self._idle[0][0] <= self._now:
            del self._flows[self._idle.pop(0)[1]]

    def _rest(self, tenant: str, flow: _Flow) -> None:
        """Remembers a tenant that had more than its share, until the others have caught up."""
        if flow.tag > self._now:
            self._idle.add((flow.tag, tenant))
        else:
            del self._flows[tenant]

    def in_turns(self) -> Iterator[Entry]:
        """Yield all entries, the tenants taking turns."""
        flows = [self._flows[tenant].entries for _, _, tenant in self._order]
        for row in itertools.zip_longest(*flows):
            yield from (item[2] for item in row if item is not None)

    def entries(self) -> Iterator[Entry]:
        for flow in self._flows.values():
            yield from (entry for _, _, entry in flow.entries)

    def check_integrity(self) -> None:
        waiting = {tenant for _, _, tenant in self._order}
        resting = {tenant for _, tenant in self._idle}
        assert waiting | resting == self._flows.keys()
        assert not waiting & resting
        assert waiting == {tenant for tenant, flow in self._flows.items() if flow.entries}
        for tag, number, tenant in self._order:
            assert (self._flows[tenant].tag, self._flows[tenant].number) == (tag, number)
        assert self.size == sum(entry.size for entry in self.entries())


class FairLine:
    """Entries in the order of service.

    Args:
        aging_s: waiting this long makes up for one level of priority, seconds.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._levels: dict[int, _Level] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def head(self) -> Entry | None:
        """The next to be served."""
        return max((level.head for level in self._levels.values()), key=self.claim, default=None)

    def first(self, count: int) -> list[Entry]:
        """Return up to so many entries about in the order in which they will be served."""
        levels = sorted(self._levels.values(), key=lambda x: self.claim(x.head), reverse=True)
        entries = itertools.chain.from_iterable(level.in_turns() for level in levels)
        return list(itertools.islice(entries, count))

    def add(self, entry: Entry) -> None:
        self._levels.setdefault(entry.priority, _Level()).add(entry)
        self._len += 1

    def remove(self, entry: Entry) -> None:
        """An entry that is in the line leaves it unserved."""
        level = self._levels[entry.priority]
        level.remove(entry)
        self._len -= 1
        if level.is_empty:
            del self._levels[entry.priority]

    def serve(self, entry: Entry) -> None:
        """An entry that is in the line leaves it for an engine; its tenant is charged."""
        self._levels[entry.priority].charge(entry)
        self.remove(entry)

    def size_from(self, priority: int) -> int:
        """Return the bytes that requests of at least this priority wait for."""
        return sum(level.size for p, level in self._levels.items() if p >= priority)

    def claim(self, entry: Entry) -> tuple[float, int]:
        """Return what is largest for the entry that is served first, of several lines too."""
        return entry.priority * self._aging_s - entry.arrival, -entry.number

    def check_integrity(self) -> None:
        for priority, level in self._levels.items():
            level.check_integrity()
            assert not level.is_empty
            assert {entry.priority for entry in level.entries()} == {priority}
        assert self._len == sum(1 for level in self._levels.values() for _ in level.entries())
