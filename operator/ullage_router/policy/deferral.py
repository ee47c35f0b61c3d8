"""Remembers refused requests until their Retry-After expires.

All requests in a refused burst see the same forecast. If all clients retried as soon as the first
request fits, most would be refused again. Clients that were refused earlier therefore go first:
each Retry-After accounts for the memory that all previously refused requests need.

No memory is reserved. A request that arrives and fits runs immediately. A refused request that is
not retried is forgotten when its Retry-After expires.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Deferred(NamedTuple):
    """The key by which refused requests are grouped: pool, tenant and priority."""

    pool: str
    tenant: str
    priority: int


class DeferralBook:
    """Tracks how much KV memory recently refused requests need, by pool, tenant and priority.

    Times are in seconds, from any monotonic clock.
    """

    def __init__(self) -> None:
        self._sizes: dict[Deferred, int] = {}
        self._weights: dict[str, float] = {}
        self._due: dict[int, dict[Deferred, int]] = {}
        """Bytes that refused requests need, by the second when Retry-After expires and by group."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def add(self, kind: Deferred, weight: float, size: int, due: float) -> None:
        """Record a refused request.

        Args:
            weight: weight of the request's tenant.
            size: bytes of KV memory that the request needs.
            due: time at which the request's Retry-After expires.
        """
        if size <= 0:  # a request of a model without KV waits for nothing
            return
        sizes = self._due.setdefault(math.ceil(due), {})
        sizes[kind] = sizes.get(kind, 0) + size
        self._sizes[kind] = self._sizes.get(kind, 0) + size
        self._weights[kind.tenant] = weight

    def expire(self, now: float) -> None:
        """Remove requests whose Retry-After has expired.

        Requests that were retried are counted in the queue instead.
        """
        for second in [second for second in self._due if second <= now]:
            for kind, size in self._due.pop(second).items():
                self._sizes[kind] -= size
                if not self._sizes[kind]:
                    del self._sizes[kind]
        if not self._sizes:
            self._weights.clear()

    def ahead(self, pool: str, tenant: str, weight: float, priority: int) -> int:
        """Return the KV bytes needed by refused requests that come before a tenant's next request.

        Higher priorities come first. Within a priority, tenants take turns by their weights, as in
        the queue. Another tenant's refused bytes therefore count only up to a limit: this tenant's
        own refused bytes, times the other tenant's weight, divided by this tenant's weight.
        """
        own = self._sizes.get(Deferred(pool, tenant, priority), 0)
        ahead = 0
        for kind, size in self._sizes.items():
            if kind.pool != pool or kind.priority < priority:
                continue
            if kind.priority == priority and kind.tenant != tenant:
                ahead += min(size, math.ceil(own * self._weights[kind.tenant] / weight))
            else:
                ahead += size
        return ahead

    def returns(self, pool: str, now: float) -> Mapping[int, int]:
        """Return the KV bytes that a pool's refused requests will need, by time of retry.

        The keys are whole seconds from now until the retries. The values are bytes.
        """
        result: dict[int, int] = {}
        for second, sizes in self._due.items():
            after_s = math.floor(second - now)
            own = [size for kind, size in sizes.items() if kind.pool == pool]
            result[after_s] = result.get(after_s, 0) + sum(own)
        return result


class Deferrals(NamedTuple):
    """Tells one request how much memory earlier refused requests need, and when they retry.

    If this request is refused as well, these values determine its Retry-After.
    """

    book: DeferralBook
    now: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0

    def ahead(self, pool: str) -> int:
        """Return the KV bytes needed by the refused requests that come before this one."""
        return self.book.ahead(pool, self.tenant, self.weight, self.priority)

    def returns(self, pool: str) -> Mapping[int, int]:
        """Return the KV bytes that a pool's refused requests will need, by time of retry.

        The keys are whole seconds from now until the retries. The values are bytes.
        """
        return self.book.returns(pool, self.now)


NOBODY = Deferrals(DeferralBook())
