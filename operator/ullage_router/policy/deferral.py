"""Remembers refused requests until the second at which they were told to come back.

A burst of refusals sees one forecast. If all of it came back at the second at which the first one
fits, all but a few would be refused again. So those who were refused earlier count as ahead of
those who are refused later: each is told a second by which memory for all of them was released.

Nobody's place is kept. Whoever comes and fits runs, and a request that does not come back is
forgotten when it is due.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Deferred(NamedTuple):
    """A kind of requests: their pool, tenant and priority."""

    pool: str
    tenant: str
    priority: int


class DeferralBook:
    """Counts the bytes of refused requests by kind. Times are of any steady clock, in seconds."""

    def __init__(self) -> None:
        self._sizes: dict[Deferred, int] = {}
        self._weights: dict[str, float] = {}
        self._due: dict[int, dict[Deferred, int]] = {}
        """The same bytes by the second by which all of them have come back."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def add(self, kind: Deferred, weight: float, size: int, due: float) -> None:
        """Remember a refused request.

        Args:
            weight: of its tenant.
            size: bytes that it would have taken.
            due: time at which it was told to come back.
        """
        if size <= 0:  # nothing to wait for, as where a model has no KV
            return
        sizes = self._due.setdefault(math.ceil(due), {})
        sizes[kind] = sizes.get(kind, 0) + size
        self._sizes[kind] = self._sizes.get(kind, 0) + size
        self._weights[kind.tenant] = weight

    def expire(self, now: float) -> None:
        """Remove requests that are due: they came back, and are counted there, or will not come."""
        for second in [second for second in self._due if second <= now]:
            for kind, size in self._due.pop(second).items():
                self._sizes[kind] -= size
                if not self._sizes[kind]:
                    del self._sizes[kind]
        if not self._sizes:
            self._weights.clear()

    def ahead(self, pool: str, tenant: str, weight: float, priority: int) -> int:
        """Return the bytes before a tenant's next refused request of a pool.

        Higher priorities come first. Within one, tenants take turns by their weights, as in the
        queue: another tenant's bytes count up to those that the tenant itself was refused, scaled
        by the ratio of the weights.
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
        """Return the bytes that come back to a pool, by whole seconds from now."""
        result: dict[int, int] = {}
        for second, sizes in self._due.items():
            after_s = math.floor(second - now)
            own = [size for kind, size in sizes.items() if kind.pool == pool]
            result[after_s] = result.get(after_s, 0) + sum(own)
        return result


class Deferrals(NamedTuple):
    """The book as one request sees it; it is read only if the request is refused itself."""

    book: DeferralBook
    now: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0

    def ahead(self, pool: str) -> int:
        """Return the bytes of requests that were refused before this one and will come back."""
        return self.book.ahead(pool, self.tenant, self.weight, self.priority)

    def returns(self, pool: str) -> Mapping[int, int]:
        """Return the bytes of all that come back, by whole seconds from now."""
        return self.book.returns(pool, self.now)


NOBODY = Deferrals(DeferralBook())
