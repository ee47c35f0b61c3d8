"""Decides which engines' headroom reports to subscribe to, and summarises the reports."""

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
"""Minimum time between reports of a stable engine, in milliseconds."""
SILENT_S = 2.5 * REPORT_INTERVAL_MS / 1000
"""Seconds without a report after which the operator reconciles the engine's service."""
TRIAL_INTERVAL_MS = 1_000
"""Minimum time between reports of a canary's engine, in milliseconds.

The interval is short, so that the operator learns of a crash before it promotes the canary.
"""
FRESH_S = 10.0
"""Seconds after which a report of a canary's engine is too old for the analysis."""

PressureLevels = Mapping[str, int]
"""Highest memory pressure level among the reporting engines, by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """The latest report of one engine.

    Ages are in seconds and exclude time when the operator was not running.
    """

    pool: str
    report: headroom_pb2.Headroom | None = None
    """The last report, or None if the operator has not received a report yet."""
    known_s: float = 0.0
    """Seconds since the operator first saw that the engine had started."""
    silent_s: float = 0.0
    """Seconds since the last report, or since the operator subscribed to the engine's reports."""
    unhealthy_s: float = 0.0
    """Seconds for which the engine has reported health below the service's minimum."""
    trouble: str = ""
    """Error of the engine's report stream (empty while reports arrive)."""


def pressure_by_pool(
    reports: Iterable[tuple[str, headroom_pb2.Headroom]],
) -> dict[str, int]:
    """Return the highest memory pressure level of each pool.

    Args:
        reports: pairs of an engine's pool and its report.
    """
    levels: dict[str, int] = {}
    for pool, report in reports:
        levels[pool] = max(levels.get(pool, 0), report.pressure_level)
    return levels


def worker_restarts(engines: Iterable[EngineHealth], before: int) -> int:
    """Return the number of workers in a pool that crashed and were restarted.

    Args:
        engines: the engines of the pool.
        before: the number in the service's status, which is returned until every engine has
            reported.
    """
    reports = [engine.report for engine in engines]
    return sum(each.worker_restarts for each in reports if each) if all(reports) else before


def boost_off_engines(engines: Iterable[EngineHealth], before: int) -> int:
    """Return the number of engines that have reduced their batch size because of throttled GPUs.

    Args:
        engines: the engines of the pool.
        before: the number in the service's status. The result is not below it until every engine
            has reported.
    """
    reports = [engine.report for engine in engines]
    num_hot = sum(bool(each and each.throttle_reasons) for each in reports)
    return num_hot if reports and all(reports) else max(num_hot, before)


def boost_notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[EventNote]:
    """Return Events for pools whose number of throttled engines increased or dropped to zero.

    Args:
        before: the previous status of the service.
        after: the current status of the service.
    """
    notes = []
    for name, pool in after.get("pools", {}).items():
        count = pool.get("boostOff", 0)
        previous = before.get("pools", {}).get(name, {}).get("boostOff", 0)
        if count > previous:
            engines = "an engine runs" if count == 1 else f"{count} engines run"
            message = (
                f"pool {name}: {engines} smaller batches because GPUs are throttled; "
                "ullage_gpu_throttled names the GPUs and the reasons"
            )
            notes.append(EventNote("BoostOff", "Observe", message, warning=True))
        elif previous and not count:
            message = f"pool {name}: its GPUs are not throttled any more; batches have full size"
            notes.append(EventNote("BoostOn", "Observe", message))
    return notes


def worker_restart_notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[EventNote]:
    """Return Events for worker restarts between two statuses.

    Args:
        before: the previous status of the service.
        after: the current status of the service.
    """
    notes = []
    for name, pool in after.get("pools", {}).items():
        total = pool.get("workerRestarts", 0)
        count = total - before.get("pools", {}).get(name, {}).get("workerRestarts", total)
        if count > 0:
            workers = "a worker" if count == 1 else f"{count} workers"
            message = (
                f"pool {name}: {workers} of its engines ended unexpectedly and restarted, {total} "
                "since these engines started; their logs and ullage_worker_restarts_total say why"
            )
            notes.append(EventNote("WorkerRestarted", "Observe", message, warning=True))
    return notes


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine whose headroom reports the operator subscribes to."""

    pool: str
    address: str
    min_health: float
    interval_ms: int = REPORT_INTERVAL_MS
    """Minimum time between headroom reports, in milliseconds."""


def stream_targets(pods: Iterable[Pod], min_health: float) -> dict[str, EngineTarget]:
    """Return the engines whose headroom reports the operator should subscribe to, by pod uid.

    Only engines that have started are included.
    """
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
    """Return the pools in which an engine has sent no report for at least `silent_after` seconds.

    The operator then asks the routers whether they can still reach these pools.
    """
    return frozenset(v.pool for v in engine_health if v.report and v.silent_s >= silent_after)
