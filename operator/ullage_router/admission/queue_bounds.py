"""Limits the queue's size, and evicts requests when a limit is reached.

There are limits on the number of requests, on their predicted KV bytes, and on the router memory of
their prompts. When a limit is reached, tenants share the queue in proportion to their weights: a
new request evicts the least urgent request of the tenant that uses the most relative to its weight.
A request may also evict a lower-priority request of any tenant.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sortedcontainers import SortedList

from ullage_common.config.router import QueueSection

if TYPE_CHECKING:
    from ullage_router.admission.queue import QueueEntry, Waiter

MAX_EVICTED = 8
"""Maximum number of requests that one new request may evict."""

_EvictionKey = tuple[int, float, int, "QueueEntry"]
"""An entry's eviction order: (priority, -deadline, -number, entry).

The entry with the smallest tuple is evicted first. `number` increases with each arrival.
"""


class QueueFull(Exception):
    """Raised when the queue has no room for a request."""


class Amounts(NamedTuple):
    """The amount of each limited resource that a set of queue entries uses."""

    requests: int = 0
    size: int = 0
    """Predicted size of the entries' KV caches, in bytes."""
    prompt_bytes: int = 0
    """Router memory that the entries' prompts use, in bytes."""

    def plus(self, waiter: "Waiter", sign: int = 1) -> "Amounts":
        """Return these amounts plus those of one request, or minus them if `sign` is -1."""
        return Amounts(
            self.requests + sign,
            self.size + sign * waiter.size,
            self.prompt_bytes + sign * waiter.prompt_bytes,
        )


@dataclass(slots=True)
class _Holding:
    """One tenant's queue entries, and how much of each limited resource they use in total."""

    weight: float
    amounts: Amounts = Amounts()  # noqa: RUF009 - immutable
    entries: "SortedList[_EvictionKey]" = field(default_factory=SortedList)

    def shares(self, tenant: str) -> "Iterator[tuple[float, str]]":
        """Yield (weighted usage, tenant's name) for each limited resource.

        The weighted usage is the amount that the tenant uses, divided by its weight.
        """
        for amount in self.amounts:
            yield amount / self.weight, tenant


class QueueBounds:
    """Tracks how much of each limited resource the queue uses, and selects entries for eviction.

    Args:
        section: the configured limits, which apply to all pools together.
    """

    def __init__(self, section: QueueSection) -> None:
        self._limits = (section.max_requests, section.max_bytes, section.max_prompt_bytes)
        self.total = Amounts()
        """Resources in use by all entries together."""
        self._holdings: dict[str, _Holding] = {}
        """Each tenant's entries and their total amounts, by tenant name."""
        self._entries: SortedList[_EvictionKey] = SortedList()
        """All entries, in the order in which they would be evicted."""
        self._shares = [SortedList[tuple[float, str]]() for _ in Amounts()]
        """For each limited resource, all tenants' (amount used / weight, tenant) pairs, sorted."""

    def add(self, entry: "QueueEntry") -> None:
        """Include an entry in the resource totals."""
        waiter = entry.waiter
        holding = self._holdings.setdefault(waiter.tenant, _Holding(waiter.weight))
        if holding.entries:
            self._remove_shares(waiter.tenant, holding)

        holding.weight = waiter.weight
        holding.amounts = holding.amounts.plus(waiter)
        holding.entries.add(_eviction_key(entry))
        self.total = self.total.plus(waiter)
        self._entries.add(_eviction_key(entry))
        self._add_shares(waiter.tenant, holding)

    def remove(self, entry: "QueueEntry") -> None:
        """Remove an entry from the resource totals."""
        tenant = entry.waiter.tenant
        holding = self._holdings[tenant]
        self._remove_shares(tenant, holding)

        holding.amounts = holding.amounts.plus(entry.waiter, -1)
        holding.entries.remove(_eviction_key(entry))
        self.total = self.total.plus(entry.waiter, -1)
        self._entries.remove(_eviction_key(entry))

        if holding.entries:
            self._add_shares(tenant, holding)
        else:
            del self._holdings[tenant]

    def make_room(self, waiter: "Waiter") -> "list[QueueEntry]":
        """Choose entries to evict so that a new request fits, and subtract them from the totals.

        Raises:
            QueueFull: the request does not fit even after the allowed evictions. All entries remain
                counted.
        """
        evicted: list[QueueEntry] = []
        while (bound := self._exceeded(waiter)) is not None:
            victim = self._victim(waiter, bound) if len(evicted) < MAX_EVICTED else None
            if victim is None:
                for entry in evicted:
                    self.add(entry)
                raise QueueFull
            self.remove(victim)
            evicted.append(victim)
        return evicted

    def sizes(self) -> dict[str, int]:
        """Return the predicted KV bytes of each tenant's queued requests."""
        return {tenant: holding.amounts.size for tenant, holding in sorted(self._holdings.items())}

    def _exceeded(self, waiter: "Waiter") -> int | None:
        """Return the index of the first limit that a request would exceed, or None if it fits."""
        pairs = zip(self.total.plus(waiter), self._limits, strict=True)
        return next((i for i, (amount, limit) in enumerate(pairs) if amount > limit), None)

    def _victim(self, waiter: "Waiter", bound: int) -> "QueueEntry | None":
        """Return the entry to evict for a new request, or None if no entry may be evicted.

        The first candidate is the least urgent entry of the tenant that uses the most of the
        limited resource relative to its weight. It is evicted if its priority is lower than the new
        request's. If the priorities are equal, it is evicted only if its tenant would still use at
        least as much, relative to its weight, as the new request's tenant. Otherwise, the
        lowest-priority entry of all tenants is evicted if the new request has a higher priority.
        """
        if not self._entries:
            return None
        _, tenant = self._shares[bound][-1]
        largest = self._holdings[tenant]
        entry: QueueEntry
        priority, _, _, entry = largest.entries[0]
        if priority < waiter.priority:
            return entry

        if priority == waiter.priority and tenant != waiter.tenant:
            own = self._holdings.get(waiter.tenant, _Holding(waiter.weight)).amounts
            newcomers_share = own.plus(waiter)[bound] / waiter.weight
            remaining = largest.amounts.plus(entry.waiter, -1)[bound] / largest.weight
            if remaining >= newcomers_share:
                return entry

        priority, _, _, entry = self._entries[0]
        return entry if priority < waiter.priority else None

    def _add_shares(self, tenant: str, holding: _Holding) -> None:
        for shares, share in zip(self._shares, holding.shares(tenant), strict=True):
            shares.add(share)

    def _remove_shares(self, tenant: str, holding: _Holding) -> None:
        for shares, share in zip(self._shares, holding.shares(tenant), strict=True):
            shares.remove(share)

    def check_integrity(self) -> None:
        """Assert that the overall and per-tenant totals are consistent with the entries."""
        waiters = [entry.waiter for *_, entry in self._entries]
        assert self.total.requests == len(waiters)
        assert self.total.size == sum(waiter.size for waiter in waiters)
        assert self.total.prompt_bytes == sum(waiter.prompt_bytes for waiter in waiters)
        assert len(waiters) == sum(len(holding.entries) for holding in self._holdings.values())
        for shares in self._shares:
            assert sorted(tenant for _, tenant in shares) == sorted(self._holdings)
        for holding in self._holdings.values():
            assert holding.amounts.requests == len(holding.entries) > 0


def _eviction_key(entry: "QueueEntry") -> _EvictionKey:
    place = entry.place
    return place.priority, -place.deadline, -place.number, entry
