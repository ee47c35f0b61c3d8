"""Aggregates the load of a pool from the reports of all routers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ullage_common.wire.load_report import PoolReport

LATE_WINDOW_S = 60.0
"""Window in seconds over which routers count first tokens."""
RouterReport = Mapping[str, PoolReport]
"""Reports of one router, by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The load of one pool, aggregated over all routers."""

    ready: int = 0
    """Number of engines that accept requests."""
    capacity: int = 0
    """Total KV memory of these engines, in bytes."""
    claimed: int = 0
    """Bytes of the capacity that are in use, or reserved based on predictions."""
    waiting: int = 0
    """Bytes of KV memory that queued requests are waiting for."""
    queue_s: float = 0.0
    """Longest time that a queued request has been waiting, in seconds."""
    answered: int = 0
    """Number of first tokens within the last `LATE_WINDOW_S`."""
    late: int = 0
    """Number of these first tokens that missed the latency objective."""
    active: int = 0
    """Number of running and waiting requests."""
    wanted: int = 0
    """Number of requests that arrived while the pool slept and that were held or sent elsewhere."""
    idle_s: float = 0.0
    """Seconds since the last request."""
    is_partial: bool = False
    """Whether at least one router did not respond."""


def parse_reports(body: bytes) -> list[RouterReport]:
    """Parse the load reports of a router.

    A router sends one report. A router of version 0.1.0 sends one for each of its processes.

    Raises:
        ValueError: the body is not a list of reports.
    """
    reports: list[RouterReport] = msgspec.json.decode(body, type=list[dict[str, PoolReport]])
    return reports


def is_wanted(reports: Iterable[RouterReport]) -> bool:
    """Return whether a sleeping pool should wake."""
    return any(pool.wanted for report in reports for pool in report.values())


def pool_load(name: str, reports: Iterable[RouterReport], is_partial: bool) -> PoolLoad:
    """Return the load of one pool.

    Values reported by engines are the same at every router, so they are taken from the router that
    sees the most engines. Values that each router counts itself are summed.

    Args:
        name: the name of the pool.
        reports: the reports of all routers.
        is_partial: whether at least one router did not respond.
    """
    pools = [report[name] for report in reports if name in report]
    if not pools:
        return PoolLoad(is_partial=True)

    best = max(pools, key=lambda each: (each.ready, -each.headroom_bytes))
    credit = sum(each.credit_bytes for each in pools)
    claimed = best.capacity_bytes - best.headroom_bytes + credit

    return PoolLoad(
        ready=best.ready,
        capacity=best.capacity_bytes,
        claimed=max(0, min(best.capacity_bytes, claimed)),
        waiting=sum(each.queue_bytes for each in pools),
        queue_s=max(each.queue_s for each in pools),
        answered=sum(each.answered for each in pools),
        late=sum(each.late for each in pools),
        active=max(each.engine_requests for each in pools)
        + sum(each.queued + each.held for each in pools),
        wanted=sum(each.wanted for each in pools),
        idle_s=min(each.idle_s for each in pools),
        is_partial=is_partial,
    )
