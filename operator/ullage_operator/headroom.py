"""What engines say of their memory and health, as far as the operator cares: pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NEWS_SHARE = 0.01
"""A change of headroom below this share of the whole is not worth a status update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The last that one engine said."""

    ready: bool
    draining: bool
    health: float
    """0 (failing) to 1 (healthy)."""
    free_bytes: int
    """Of KV, what a new request may take."""
    total_bytes: int
    """Of KV."""
    token_bytes: int
    """Of KV that one more token of a context takes; 0 when unknown."""
    pressure_level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What the operator heard of one engine, as seconds of its own waking time."""

    pool: str
    report: Report | None = None
    """None: it never said anything since the operator follows it."""
    known_s: float = 0.0
    """Since the operator first saw it started."""
    silent_s: float = 0.0
    """Since its last report, or since the operator follows it."""
    unhealthy_s: float = 0.0
    """Since when its health is below what the service asks for."""


@dataclass(frozen=True, slots=True)
class PoolHeadroom:
    """Of all engines of a pool that report."""

    engines: int
    free_bytes: int
    total_bytes: int
    free_tokens: int
    total_tokens: int
    pressure_level: int
    """The highest of them."""

    def status(self) -> dict[str, Any]:
        """As `status.pools.*.headroom` has it."""
        return {
            "engines": self.engines,
            "freeBytes": self.free_bytes,
            "totalBytes": self.total_bytes,
            "freeTokens": self.free_tokens,
            "totalTokens": self.total_tokens,
            "pressureLevel": self.pressure_level,
        }


Headroom = Mapping[str, PoolHeadroom]
"""By pool."""


def summed(reports: Iterable[tuple[str, Report]]) -> dict[str, PoolHeadroom]:
    """The pools' headroom of (pool, report); engines that do not serve offer none."""
    pools: dict[str, list[Report]] = {}
    for pool, report in reports:
        pools.setdefault(pool, []).append(report)
    return {pool: _of_pool(found) for pool, found in sorted(pools.items())}


def _of_pool(reports: list[Report]) -> PoolHeadroom:
    serving = [report for report in reports if report.ready and not report.draining]
    known = [report for report in reports if report.token_bytes]
    return PoolHeadroom(
        engines=len(reports),
        free_bytes=sum(report.free_bytes for report in serving),
        total_bytes=sum(report.total_bytes for report in reports),
        free_tokens=sum(r.free_bytes // r.token_bytes for r in serving if r.token_bytes),
        total_tokens=sum(report.total_bytes // report.token_bytes for report in known),
        pressure_level=max(report.pressure_level for report in reports),
    )


def is_news(before: Headroom, now: Headroom) -> bool:
    """Whether the difference is worth telling."""
    return before.keys() != now.keys() or any(_differs(before[pool], now[pool]) for pool in now)


def _differs(before: PoolHeadroom, now: PoolHeadroom) -> bool:
    def whole(each: PoolHeadroom) -> tuple[int, ...]:
        return each.engines, each.total_bytes, each.total_tokens, each.pressure_level

    change = abs(now.free_bytes - before.free_bytes)
    is_end = now.free_bytes != before.free_bytes and now.free_bytes in (0, now.total_bytes)
    return whole(before) != whole(now) or is_end or change >= NEWS_SHARE * max(1, now.total_bytes)
