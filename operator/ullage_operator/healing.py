"""Decides which engine pods to restart, from pods, nodes and headroom reports, and words the
restarts for the status, conditions and Events. Pure.

The engine's own supervisor restarts workers, and the kubelet restarts containers that end or fail
their liveness probe. Neither helps a pod that started, no longer serves, and stays like that: the
operator deletes it, so that its StatefulSet creates another. Restarts are bounded: by a budget an
hour, by a backoff that doubles, by one pod of a pool at a time, and the last pod that serves is
never deleted.

The memory pressure of a pool comes from the same reports.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ullage.headroom.v1 import headroom_pb2
from ullage_common.process.addresses import joined
from ullage_operator.api import naming
from ullage_operator.api.spec import HealingSpec
from ullage_operator.conditions.conditions import timestamp
from ullage_operator.conditions.events import EventNote
from ullage_operator.conditions.pod_problem import PodProblem
from ullage_operator.conditions.pods import (
    has_started,
    is_follower,
    is_ready,
    node_of,
    parse_time,
    pool_of,
    ready_since,
)

HOUR = timedelta(hours=1)
REPORT_INTERVAL_MS = 10_000
SILENT_S = 2.5 * REPORT_INTERVAL_MS / 1000
"""A stream that is silent for so long is worth a look at its service."""
TRIAL_INTERVAL_MS = 1_000
"""Least time between two reports of a canary: one that falls before it is promoted must say so."""
FRESH_S = 10.0
"""A canary's report that is older says nothing of the present."""
HUNG_GRACE_S = 30
"""Seconds that a pod has to end that hangs or serves nothing: it ends no request however long it is
given, and keeps its GPUs meanwhile."""
FORCE_AFTER_S = 60.0
"""A pod on a lost node may be overdue for so long before Kubernetes is made to forget it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """An engine pod with the fields that healing reads."""

    name: str
    uid: str
    pool: str
    has_started: bool
    """Its startup probe passed: a pod that still loads is never touched."""
    is_ready: bool
    not_ready_s: float = 0.0
    """Seconds for which the pod was not ready since it started, as far as the operator saw."""
    not_ready_reason: str = ""
    """Why its engine stays out, as it reports; empty where it does not."""
    has_reported: bool = False
    """Whether it has reported headroom since it started."""
    silent_s: float = 0.0
    unhealthy_s: float = 0.0
    is_terminating: bool = False
    overdue_s: float = 0.0
    """Seconds since the pod should have been gone."""
    is_on_lost_node: bool = False
    is_follower: bool = False
    """Whether it has no server; its leader serves, and its own probes find that it hangs."""


@dataclass(frozen=True, slots=True)
class RestartEvent:
    """A restart that happened."""

    pool: str
    pod: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Restart:
    """A pod to delete, so that its StatefulSet creates another."""

    pod: EnginePod
    reason: str
    message: str
    by_force: bool = False
    """Kubernetes forgets it without its node's word; costs no budget."""
    grace_s: int | None = None
    """Grace period of the deletion in seconds; None: the time that the pod drains in."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """Which pods of a service to restart now, and which later."""

    restarts: tuple[Restart, ...] = ()
    deferred: tuple[Restart, ...] = ()
    """Pods that should be restarted; the message says why they are not yet."""
    recheck_s: float | None = None
    """Seconds until the next decision is due, whatever happens meanwhile."""


def decide_restarts(
    policy: HealingSpec,
    pods: Sequence[EnginePod],
    history: Iterable[RestartEvent],
    now: datetime,
    is_unreachable: frozenset[str],
) -> RestartDecision:
    """Decides which of a service's engine pods to restart.

    Args:
        history: restarts of the last hour at least.
        now: in UTC.
        is_unreachable: pools that no router reaches, so that an engine of theirs that is silent to
            the operator is silent to others too, and not the operator alone gets no reports.
    """
    forced = tuple(map(_forced, filter(_is_lost, pods)))
    waits = [_until_forced(pod) for pod in pods]
    if not policy.enabled:
        return RestartDecision(forced, (), _soonest(waits))
    pools = sorted({pod.pool for pod in pods})
    recent = [each for each in history if each.at > now - HOUR]
    decisions = [
        _decide_for_pool(
            policy,
            [pod for pod in pods if pod.pool == pool],
            [each.at for each in recent if each.pool == pool],
            now,
            pool in is_unreachable,
        )
        for pool in pools
    ]
    return RestartDecision(
        forced + tuple(restart for decision in decisions for restart in decision.restarts),
        tuple(deferred for decision in decisions for deferred in decision.deferred),
        _soonest([*waits, *(decision.recheck_s for decision in decisions)]),
    )


def _is_lost(pod: EnginePod) -> bool:
    return pod.is_terminating and pod.is_on_lost_node and pod.overdue_s >= FORCE_AFTER_S


def _until_forced(pod: EnginePod) -> float | None:
    is_coming = pod.is_terminating and pod.is_on_lost_node and not _is_lost(pod)
    return FORCE_AFTER_S - pod.overdue_s if is_coming else None


def _forced(pod: EnginePod) -> Restart:
    message = f"its node is lost and it should have been gone {pod.overdue_s:.0f} s ago"
    return Restart(pod, "NodeLost", message, by_force=True, grace_s=0)


def _decide_for_pool(
    policy: HealingSpec,
    pods: Sequence[EnginePod],
    history: Sequence[datetime],
    now: datetime,
    is_unreachable: bool,
) -> RestartDecision:
    """Restarts at most one pod of a pool: the next waits for the backoff."""
    diagnoses = [diagnosis for pod in pods if (diagnosis := _diagnose(policy, pod))]
    waits = [_due_s(policy, pod) for pod in pods]
    if not diagnoses:
        return RestartDecision(recheck_s=_soonest(waits))
    diagnosis = min(diagnoses, key=lambda each: (each.pod.is_ready, each.pod.name))
    wait_s, reason = _wait(policy, history, now)
    others = [pod for pod in pods if pod is not diagnosis.pod]
    if why := _why_spared(diagnosis, others, {each.pod.uid for each in diagnoses}, is_unreachable):
        reason = why
        wait_s = policy.silent_after
    if not wait_s:
        return RestartDecision((diagnosis,))
    message = f"{diagnosis.message}; {_explanation(reason, policy)}"
    deferred = Restart(diagnosis.pod, reason, message)
    return RestartDecision((), (deferred,), _soonest([*waits, wait_s]))


def _diagnose(policy: HealingSpec, pod: EnginePod) -> Restart | None:
    """Return the restart that a pod needs; None while it starts, ends or serves."""
    if pod.is_follower or pod.is_terminating or not pod.has_started or pod.is_on_lost_node:
        return None
    if not pod.is_ready:
        if pod.not_ready_s < policy.not_ready_after:
            return None
        message = f"not ready for more than {policy.not_ready_after:g} s"
        if pod.not_ready_reason:
            message += f": {pod.not_ready_reason}"
        return Restart(pod, "NotReady", message, grace_s=HUNG_GRACE_S)
    if pod.has_reported and pod.silent_s >= policy.silent_after:
        message = f"no headroom report for more than {policy.silent_after:g} s"
        return Restart(pod, "Silent", message, grace_s=HUNG_GRACE_S)
    if pod.unhealthy_s >= policy.not_ready_after:
        message = f"health below {policy.min_health:g} for more than {policy.not_ready_after:g} s"
        return Restart(pod, "Unhealthy", message)
    return None


def _due_s(policy: HealingSpec, pod: EnginePod) -> float | None:
    """Return the seconds until a pod may be due for a restart; None if it serves."""
    if pod.is_follower or pod.is_terminating or not pod.has_started or pod.is_on_lost_node:
        return None
    if not pod.is_ready:
        return max(0.0, policy.not_ready_after - pod.not_ready_s) or None
    spans = []
    if pod.has_reported and pod.silent_s > policy.silent_after / 2:
        spans.append(policy.silent_after - pod.silent_s)
    if pod.unhealthy_s:
        spans.append(policy.not_ready_after - pod.unhealthy_s)
    return min((span for span in spans if span > 0), default=None)


def _why_spared(
    diagnosis: Restart, others: Sequence[EnginePod], diagnoses: set[str], is_unreachable: bool
) -> str | None:
    """Say why a ready pod is left alone, such as being the last that serves."""
    if not diagnosis.pod.is_ready:
        return None
    if any(pod.is_terminating or not pod.has_started for pod in others):
        return "OthersNotBack"
    # Where none reports, it may be the operator that is cut off, and not the pods.
    healthy = [
        pod for pod in others if pod.is_ready and pod.has_reported and pod.uid not in diagnoses
    ]
    if healthy or (diagnosis.reason == "Silent" and is_unreachable):
        return None
    return "LastServing"


def _wait(policy: HealingSpec, history: Sequence[datetime], now: datetime) -> tuple[float, str]:
    """Seconds until the pool may have its next restart, and what it waits for."""
    if not history:
        return 0.0, ""
    if len(history) >= policy.restarts_per_hour:
        budget_s = (sorted(history)[-policy.restarts_per_hour] + HOUR - now).total_seconds()
        return budget_s, "RestartBudgetSpent"
    pause_s = min(policy.backoff.max, policy.backoff.first * 2.0 ** (len(history) - 1))
    return max(0.0, pause_s - (now - max(history)).total_seconds()), "RestartBackoff"


def _explanation(reason: str, policy: HealingSpec) -> str:
    """Words what a restart waits for, the same each time, so that it makes one Event."""
    match reason:
        case "RestartBudgetSpent":
            number = policy.restarts_per_hour
            remedy = "see why restarts do not help, or raise spec.healing.restartsPerHour"
            return f"{number} restarts of its pool in an hour are spent; {remedy}"
        case "RestartBackoff":
            return "it is made anew after a backoff"
        case "OthersNotBack":
            return "another pod of its pool is not back yet"
    return "it may be the last of its pool that serves, so it is left alone"


def _soonest(waits: Iterable[float | None]) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)


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


PressureLevels = Mapping[str, int]
"""Highest level of memory pressure of the engines that report, by pool."""


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


Pod = Mapping[str, Any]
DOUBT_AFTER_S = 20.0
"""A pod that was ready and is not for so long may have lost its node."""
NODE_CHECK_S = 15.0
"""Seconds between two requests for a node in doubt."""
_UNKNOWN = EngineHealth(pool="")


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
    return has_address and has_started(pod) and not _is_terminating(pod)


def _is_terminating(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def engine_pods(
    pods: Iterable[Pod],
    engine_health: Mapping[str, EngineHealth],
    lost_nodes: frozenset[str],
    now: datetime,
) -> list[EnginePod]:
    """The engines' pods as healing sees them.

    Args:
        engine_health: by uid.
        now: in UTC.
    """
    engines = (pod for pod in pods if pool_of(pod))
    return [
        _engine_pod(pod, engine_health.get(pod["metadata"]["uid"]), lost_nodes, now)
        for pod in engines
    ]


def _engine_pod(
    pod: Pod, health: EngineHealth | None, lost: frozenset[str], now: datetime
) -> EnginePod:
    health = health or _UNKNOWN
    ready = is_ready(pod)
    return EnginePod(
        name=str(pod["metadata"]["name"]),
        uid=str(pod["metadata"]["uid"]),
        pool=pool_of(pod),
        has_started=has_started(pod),
        is_ready=ready,
        # A pod that has only just started was "not ready" all the time that it loaded.
        not_ready_s=0.0 if ready else min(health.known_s, _since(ready_since(pod), now)),
        not_ready_reason=health.report.not_ready_reason if health.report else "",
        has_reported=health.report is not None,
        silent_s=health.silent_s,
        unhealthy_s=health.unhealthy_s,
        is_terminating=_is_terminating(pod),
        overdue_s=_since(parse_time(pod["metadata"].get("deletionTimestamp")), now),
        is_on_lost_node=node_of(pod) in lost,
        is_follower=is_follower(pod),
    )


def _since(at: datetime | None, now: datetime) -> float:
    return max(0.0, (now - at).total_seconds()) if at else 0.0


def silent_pools(engine_health: Iterable[EngineHealth], silent_after: float) -> frozenset[str]:
    """Return pools with a silent engine: the operator asks routers whether they hear it."""
    return frozenset(v.pool for v in engine_health if v.report and v.silent_s >= silent_after)


def doubtful_nodes(pods: Iterable[Pod], now: datetime) -> frozenset[str]:
    """Nodes worth asking for: pods of theirs should be gone, or are not ready though started."""
    return frozenset(node_of(pod) for pod in pods if node_of(pod) and _doubtful_in_s(pod, now) == 0)


def node_wait_s(pod: Pod, now: datetime) -> float | None:
    """Seconds until its node should be asked for; None while the pod is well."""
    wait_s = _doubtful_in_s(pod, now) if node_of(pod) else None
    return NODE_CHECK_S if wait_s == 0 else wait_s


def _doubtful_in_s(pod: Pod, now: datetime) -> float | None:
    if ends := parse_time(pod["metadata"].get("deletionTimestamp")):
        return max(0.0, (ends - now).total_seconds())
    # A follower is not ready while its group loads, which is no sign of a bad node.
    if has_started(pod) and not is_ready(pod) and not is_follower(pod):
        return max(0.0, DOUBT_AFTER_S - _since(ready_since(pod), now))
    return None


def is_lost(node: Mapping[str, Any] | None) -> bool:
    """Whether a node is gone, or does not answer."""
    if node is None:
        return True
    listed = node.get("status", {}).get("conditions", ())
    ready = next((each["status"] for each in listed if each["type"] == "Ready"), "Unknown")
    return bool(ready != "True")


def restart_history(status: Mapping[str, Any]) -> list[RestartEvent]:
    """The restarts that a service's status lists."""
    listed = status.get("healing", {}).get("restarts", ())
    return [RestartEvent(r["pool"], r["pod"], r["reason"], _at(r["time"])) for r in listed]


def _at(text: str) -> datetime:
    time = parse_time(text)
    assert time is not None, "the schema requires it"
    return time


def restarts_status(
    history: Iterable[RestartEvent], restarts: Sequence[Restart], now: datetime
) -> list[dict[str, str]]:
    """`status.healing.restarts`: written before a pod is deleted, so that none is uncounted."""
    new = [RestartEvent(c.pod.pool, c.pod.name, c.reason, now) for c in restarts if not c.by_force]
    kept = [each for each in history if each.at > now - HOUR]
    return [
        {"pool": each.pool, "pod": each.pod, "reason": each.reason, "time": timestamp(each.at)}
        for each in [*kept, *new]
    ]


def deferred_problems(deferred: Iterable[Restart]) -> list[PodProblem]:
    """Pods whose restart is deferred, for the condition Degraded."""
    return [PodProblem(each.pod.name, each.reason, each.message, blocks=False) for each in deferred]


def restart_note(restart: Restart) -> EventNote:
    if restart.by_force:
        return EventNote(
            "PodForgotten", "Delete", f"pod {restart.pod.name}: {restart.message}", True
        )
    message = f"pod {restart.pod.name}: {restart.reason}: {restart.message}; it is made anew"
    return EventNote("PodRestarted", "Restart", message, True)
