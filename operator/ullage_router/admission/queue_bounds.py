"""The bounds of the queue, and the evictions when one of them is reached.

The queue is bounded by requests, predicted bytes and memory of prompts. When a bound is reached,
tenants share it by their weights: a newcomer evicts the least urgent request of the tenant with the
largest share. A request of a higher priority evicts one of a lower priority, in any tenant.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sortedcontainers import SortedList

from ullage_common.config.router import QueueSection

if TYPE_CHECKING:
    from ullage_router.admission.queue import QueueEntry, Waiter

MAX_EVICTED = 8
"""Most requests that one newcomer may evict."""

_EvictionKey = tuple[int, float, int, "QueueEntry"]
"""(priority, -deadline, -number, entry). The entry with the smallest key is evicted first."""


class QueueFull(Exception):
    """The queue has no room for the request."""


class Amounts(NamedTuple):
    """The amounts of each bound that entries use."""

    requests: int = 0
    size: int = 0
    """Predicted bytes."""
    prompt_bytes: int = 0
    """Memory of this process."""

    def plus(self, waiter: "Waiter", sign: int = 1) -> "Amounts":
        """Return the amounts with one more request, or with one less for the sign -1."""
        return Amounts(
            self.requests + sign,
            self.size + sign * waiter.size,
            self.prompt_bytes + sign * waiter.prompt_bytes,
        )


@dataclass(slots=True)
class _Holding:
    """The queue entries of one tenant."""

    weight: float
    amounts: Amounts = Amounts()  # noqa: RUF009 - immutable
    entries: "SortedList[_EvictionKey]" = field(default_factory=SortedList)

    def shares(self, tenant: str) -> "Iterator[tuple[float, str]]":
        """Yield (amount / weight, tenant) for each bound."""
        for amount in self.amounts:
            yield amount / self.weight, tenant


class QueueBounds:
    """Counts the entries of the queue against its bounds.

    Args:
        section: the bounds, over all pools.
    """

    def __init__(self, section: QueueSection) -> None:
        self._limits = (section.max_requests, section.max_bytes, section.max_prompt_bytes)
        self.total = Amounts()
        """Amounts of all entries."""
        self._holdings: dict[str, _Holding] = {}
        """Entries by tenant."""
        self._entries: SortedList[_EvictionKey] = SortedList()
        """All entries."""
        self._shares = [SortedList[tuple[float, str]]() for _ in Amounts()]
        """(amount / weight, tenant) of all tenants, for each bound."""

    def add(self, entry: "QueueEntry") -> None:
        """Count an entry."""
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
        """Remove an entry from the counts."""
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
        """Remove entries from the counts until a newcomer has room, and return them.

        Raises:
            QueueFull: too few entries may be evicted. All of them remain counted.
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
        """Return the bytes that each tenant waits for."""
        return {tenant: holding.amounts.size for tenant, holding in sorted(self._holdings.items())}

    def _exceeded(self, waiter: "Waiter") -> int | None:
        """Return the index of the bound that a newcomer would exceed, or None when it has room."""
        pairs = zip(self.total.plus(waiter), self._limits, strict=True)
        return next((i for i, (amount, limit) in enumerate(pairs) if amount > limit), None)

    def _victim(self, waiter: "Waiter", bound: int) -> "QueueEntry | None":
        """Return the entry that a newcomer evicts, or None if it may evict none.

        The tenant with the largest share of the bound loses an entry of a lower priority, or one of
        the same priority if its share is still no smaller than the newcomer's afterwards. Otherwise
        the entry with the lowest priority of all is evicted, if the newcomer's is higher.
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
        """Assert that totals and shares agree with the entries."""
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
