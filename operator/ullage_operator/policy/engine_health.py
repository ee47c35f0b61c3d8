"""Decides which engines to follow, and sums up their headroom reports. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ullage.headroom.v1 import headroom_pb2
from ullage_common.process.addresses import joined
from ullage_operator.api import naming
from ullage_operator.conditions.events import EventNote
from ullage_operator.conditions.pods import has_started, is_follower, pool_of

Pod = Mapping[str, Any]

REPORT_INTERVAL_MS = 10_000
SILENT_S = 2.5 * REPORT_INTERVAL_MS / 1000
"""A stream that is silent for so long is worth a look at its service."""
TRIAL_INTERVAL_MS = 1_000
"""Least time between two reports of a canary: one that falls before it is promoted must say so."""
FRESH_S = 10.0
"""A canary's report that is older says nothing of the present."""
PressureLevels = Mapping[str, int]
"""Highest level of memory pressure of the engines that report, by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Reports of one engine, with ages in seconds of the operator's own running time."""

    pool: str
    report: headroom_pb2.Headroom | None = None
    """The last report; None before the first since the operator follows it."""
    known_s: float = 0.0
    """Since the operator first saw it started."""
    silent_s: float = 0.0
    """Since its last report, or since the operator follows it."""
    unhealthy_s: float = 0.0
    """Since when its health is below what the service asks for."""
    trouble: str = ""
    """Why the operator could not follow its reports last; empty while they come."""


def pressure_by_pool(
    reports: Iterable[tuple[str, headroom_pb2.Headroom]],
) -> dict[str, int]:
    """Return the highest level of each pool's engines, of (pool, report)."""
    levels: dict[str, int] = {}
    for pool, report in reports:
        levels[pool] = max(levels.get(pool, 0), report.pressure_level)
    return levels


def worker_restarts(engines: Iterable[EngineHealth], before: int) -> int:
    """Return how many workers of a pool's engines ended unasked and were started again.

    Args:
        before: what the service's status says, which holds until every engine has reported.
    """
    reports = [engine.report for engine in engines]
    return sum(each.worker_restarts for each in reports if each) if all(reports) else before


def boost_off_engines(engines: Iterable[EngineHealth], before: int) -> int:
    """Return how many engines of a pool run smaller batches because their GPUs are throttled.

    Args:
        before: what the service's status says, which is the least until all have reported.
    """
    reports = [engine.report for engine in engines]
    num_hot = sum(bool(each and each.throttle_reasons) for each in reports)
    return num_hot if reports and all(reports) else max(num_hot, before)


def boost_notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[EventNote]:
    """Return Events for pools in which more engines run smaller batches than before, or none any
    more, from the service's status before and after."""
    notes = []
    for name, pool in after.get("pools", {}).items():
        count = pool.get("boostOff", 0)
        previous = before.get("pools", {}).get(name, {}).get("boostOff", 0)
        if count > previous:
            engines = "an engine runs" if count == 1 else f"{count} engines run"
            message = (
                f"pool {name}: {engines} smaller batches because GPUs are throttled; "
                "ullage_gpu_throttled names the GPUs and why"
            )
            notes.append(EventNote("BoostOff", "Observe", message, warning=True))
        elif previous and not count:
            message = f"pool {name}: its GPUs are not throttled any more, and batches are whole"
            notes.append(EventNote("BoostOn", "Observe", message))
    return notes


def worker_restart_notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[EventNote]:
    """Return Events for workers that were started again, from the service's status before and
    after."""
    notes = []
    for name, pool in after.get("pools", {}).items():
        total = pool.get("workerRestarts", 0)
        count = total - before.get("pools", {}).get(name, {}).get("workerRestarts", total)
        if count > 0:
            workers = "a worker" if count == 1 else f"{count} workers"
            message = (
                f"pool {name}: {workers} of its engines ended unasked and started again, {total} "
                "since these engines started; their logs and ullage_worker_restarts_total say why"
            )
            notes.append(EventNote("WorkerRestarted", "Observe", message, warning=True))
    return notes


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine to follow."""

    pool: str
    address: str
    min_health: float
    interval_ms: int = REPORT_INTERVAL_MS
    """Least time between two reports."""


def stream_targets(pods: Iterable[Pod], min_health: float) -> dict[str, EngineTarget]:
    """Return the started engines whose headroom to follow, by uid."""
    return {
        pod["metadata"]["uid"]: EngineTarget(
            pool_of(pod),
            joined(pod["status"]["podIP"], naming.PROBE_PORT),
            min_health,
            TRIAL_INTERVAL_MS if naming.is_canary_pool(pool_of(pod)) else REPORT_INTERVAL_MS,
        )
        for pod in pods
        if pool_of(pod) and not is_follower(pod) and _is_reachable(pod)
    }


def _is_reachable(pod: Pod) -> bool:
    has_address = bool(pod.get("status", {}).get("podIP"))
    return has_address and has_started(pod) and not is_terminating(pod)


def is_terminating(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def silent_pools(engine_health: Iterable[EngineHealth], silent_after: float) -> frozenset[str]:
    """Return pools with a silent engine: the operator asks routers whether they hear it."""
    return frozenset(v.pool for v in engine_health if v.report and v.silent_s >= silent_after)
