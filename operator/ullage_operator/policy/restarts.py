"""Decides which engine pods to restart, from pods, nodes and headroom reports.

The engine's own supervisor restarts workers. The kubelet restarts containers that exit or fail
their liveness probe. Neither of them restarts a pod that started, stopped serving and stays
unready. The operator deletes such a pod, so that its StatefulSet creates a new one.

Restarts are limited by an hourly budget, by an exponential backoff, and to one pod per pool at a
time. The last serving pod is never deleted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

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
from ullage_operator.policy.engine_health import EngineHealth, is_terminating
from ullage_operator.policy.lost_nodes import elapsed_s

HOUR = timedelta(hours=1)
"""Window of the restart budget."""
MAX_CLOCK_SKEW = timedelta(minutes=1)
"""Difference between the clocks of operators, one of which may have recorded a restart."""
MAX_DOUBLINGS = 64
"""Number of doublings after which a backoff is at its maximum."""
HUNG_GRACE_S = 30
"""Termination grace period, in seconds, of a pod that hangs or does not serve.

A longer period would not let any of the pod's requests finish, but would keep its GPUs occupied.
"""
FORCE_AFTER_S = 60.0
"""Seconds by which the deletion of a pod on a lost node must be overdue before it is forced."""

Pod = Mapping[str, Any]

_UNKNOWN = EngineHealth(pool="")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """What the operator knows about an engine pod when it decides whether to restart it."""

    name: str
    uid: str
    pool: str
    has_started: bool
    """Whether the startup probe passed. A pod that is loading its model is never restarted."""
    is_ready: bool
    not_ready_s: float = 0.0
    """Seconds for which the operator has seen the started pod unready."""
    not_ready_reason: str = ""
    """The reason that the engine gives for not being ready (empty without one)."""
    has_reported: bool = False
    """Whether the engine has reported headroom since the pod started."""
    silent_s: float = 0.0
    """Seconds since the engine's last headroom report."""
    unhealthy_s: float = 0.0
    """Seconds for which the reported health has been below the service's minimum."""
    is_terminating: bool = False
    overdue_s: float = 0.0
    """Seconds since the pod's termination grace period ended."""
    is_on_lost_node: bool = False
    is_follower: bool = False
    """Whether the pod is a follower without a server, which only its own probes can restart."""


@dataclass(frozen=True, slots=True)
class RestartEvent:
    """A past restart of an engine pod."""

    pool: str
    pod: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Restart:
    """A pod to delete, so that its StatefulSet creates a replacement."""

    pod: EnginePod
    reason: str
    message: str
    by_force: bool = False
    """Whether to remove the pod without waiting for its node. This costs no restart budget."""
    grace_s: int | None = None
    """Grace period of the deletion in seconds, or None for the pod's own, which lets it drain."""


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The pods of a service to restart now, and the pods to restart later."""

    restarts: tuple[Restart, ...] = ()
    deferred: tuple[Restart, ...] = ()
    """Restarts that must wait. Each message gives the reason."""
    recheck_s: float | None = None
    """Seconds until the next decision is due even if nothing changes, or None if none is due."""


def decide_restarts(
    policy: HealingSpec,
    pods: Sequence[EnginePod],
    history: Iterable[RestartEvent],
    now: datetime,
    is_unreachable: frozenset[str],
) -> RestartDecision:
    """Decide which engine pods of a service to restart.

    Args:
        policy: the service's `healing`.
        pods: the engine pods of the service.
        history: the restarts of the service, at least those of the last hour.
        now: the current time, in UTC.
        is_unreachable: pools that no router can reach. A silent engine in such a pool is considered
            broken. In any other pool, the operator's network may be at fault.
    """
    forced = tuple(map(_forced, filter(_is_lost, pods)))
    waits = [_until_forced(pod) for pod in pods]
    if not policy.enabled:
        return RestartDecision(forced, (), _soonest(waits))

    pools = sorted({pod.pool for pod in pods})
    recent = recent_restarts(history, now)
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

    restarts = (restart for decision in decisions for restart in decision.restarts)
    deferred = (restart for decision in decisions for restart in decision.deferred)
    recheck_s = _soonest([*waits, *(decision.recheck_s for decision in decisions)])
    return RestartDecision((*forced, *restarts), tuple(deferred), recheck_s)


def _is_lost(pod: EnginePod) -> bool:
    return pod.is_terminating and pod.is_on_lost_node and pod.overdue_s >= FORCE_AFTER_S


def _until_forced(pod: EnginePod) -> float | None:
    is_coming = pod.is_terminating and pod.is_on_lost_node and not _is_lost(pod)
    return FORCE_AFTER_S - pod.overdue_s if is_coming else None


def _forced(pod: EnginePod) -> Restart:
    message = f"its node is lost and its deletion is {pod.overdue_s:.0f} s overdue"
    return Restart(pod, "NodeLost", message, by_force=True, grace_s=0)


def _decide_for_pool(
    policy: HealingSpec,
    pods: Sequence[EnginePod],
    history: Sequence[datetime],
    now: datetime,
    is_unreachable: bool,
) -> RestartDecision:
    """Choose at most one pod of a pool to restart now. The next restart waits for the backoff."""
    diagnoses = [diagnosis for pod in pods if (diagnosis := _diagnose(policy, pod))]
    waits = [_due_s(policy, pod) for pod in pods]
    if not diagnoses:
        return RestartDecision(recheck_s=_soonest(waits))

    # Pods that are not ready come first, since their restart costs no capacity.
    diagnosis = min(diagnoses, key=lambda each: (each.pod.is_ready, each.pod.name))
    others = [pod for pod in pods if pod is not diagnosis.pod]

    wait_s, reason = _wait(policy, history, now)
    if why := _why_spared(diagnosis, others, {each.pod.uid for each in diagnoses}, is_unreachable):
        reason = why
        wait_s = policy.silent_after
    if not wait_s:
        return RestartDecision((diagnosis,))
    message = f"{diagnosis.message}; {_explanation(reason, policy)}"
    deferred = Restart(diagnosis.pod, reason, message)
    return RestartDecision((), (deferred,), _soonest([*waits, wait_s]))


def _diagnose(policy: HealingSpec, pod: EnginePod) -> Restart | None:
    """Return the restart that a pod needs, or None if it needs none.

    For example, a pod that is serving needs no restart.
    """
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
    """Return the seconds until a pod may need a restart, or None if no restart is foreseeable."""
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
    """Return why a pod must not be restarted, for example `LastServing`, or None if it may be."""
    if not diagnosis.pod.is_ready:
        return None
    if any(pod.is_terminating or not pod.has_started for pod in others):
        return "OthersNotBack"

    # If no engine reports, the operator may be cut off, so other pods count only if they report.
    healthy = [
        pod for pod in others if pod.is_ready and pod.has_reported and pod.uid not in diagnoses
    ]
    if healthy or (diagnosis.reason == "Silent" and is_unreachable):
        return None
    return "LastServing"


def _wait(policy: HealingSpec, history: Sequence[datetime], now: datetime) -> tuple[float, str]:
    """Return the seconds until a pool's next restart is allowed, and the reason for the wait.

    If there were no earlier restarts, the wait is 0 and the reason is empty.
    """
    if not history:
        return 0.0, ""
    if len(history) >= policy.restarts_per_hour:
        budget_s = (sorted(history)[-policy.restarts_per_hour] + HOUR - now).total_seconds()
        return budget_s, "RestartBudgetSpent"

    doublings = min(len(history) - 1, MAX_DOUBLINGS)
    pause_s = min(policy.backoff.max, policy.backoff.first * 2.0**doublings)
    return max(0.0, pause_s - (now - max(history)).total_seconds()), "RestartBackoff"


def _explanation(reason: str, policy: HealingSpec) -> str:
    """Return the message that explains why a restart is deferred.

    The text contains no times, so that Kubernetes aggregates repetitions into one Event.
    """
    match reason:
        case "RestartBudgetSpent":
            number = policy.restarts_per_hour
            remedy = "see why restarts do not help, or raise spec.healing.restartsPerHour"
            return f"the budget of {number} restarts an hour for its pool is spent; {remedy}"
        case "RestartBackoff":
            return "it is recreated after a backoff"
        case "OthersNotBack":
            return "another pod of its pool is not back yet"
    return "it may be the last of its pool that serves, so it is left alone"


def _soonest(waits: Iterable[float | None]) -> float | None:
    return min((wait for wait in waits if wait is not None), default=None)


def engine_pods(
    pods: Iterable[Pod],
    engine_health: Mapping[str, EngineHealth],
    lost_nodes: frozenset[str],
    now: datetime,
) -> list[EnginePod]:
    """Return the engine pods of a service, each with what restart decisions are based on.

    Args:
        pods: the pods of a service.
        engine_health: health of the engines, by the pods' uid.
        lost_nodes: names of nodes that do not respond.
        now: the current time, in UTC.
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
        # The Ready condition turned False when the pod began to load, which must not count.
        not_ready_s=0.0 if ready else min(health.known_s, elapsed_s(ready_since(pod), now)),
        not_ready_reason=health.report.not_ready_reason if health.report else "",
        has_reported=health.report is not None,
        silent_s=health.silent_s,
        unhealthy_s=health.unhealthy_s,
        is_terminating=is_terminating(pod),
        overdue_s=elapsed_s(parse_time(pod["metadata"].get("deletionTimestamp")), now),
        is_on_lost_node=node_of(pod) in lost,
        is_follower=is_follower(pod),
    )


def restart_history(status: Mapping[str, Any]) -> list[RestartEvent]:
    """Return the restarts that a service's status lists."""
    listed = status.get("healing", {}).get("restarts", ())
    return [RestartEvent(r["pool"], r["pod"], r["reason"], _at(r["time"])) for r in listed]


def _at(text: str) -> datetime:
    time = parse_time(text)
    assert time is not None, "the schema requires it"
    return time


def recent_restarts(history: Iterable[RestartEvent], now: datetime) -> list[RestartEvent]:
    """Return the restarts of the last hour, which count for backoff and budget.

    Restarts in the future do not count, because the clock was set back after them. They would delay
    healing until the clock shows their time again.
    """
    return [each for each in history if now - HOUR < each.at <= now + MAX_CLOCK_SKEW]


def restarts_status(
    history: Iterable[RestartEvent], restarts: Sequence[Restart], now: datetime
) -> list[dict[str, str]]:
    """Return a service's `status.healing.restarts` section.

    The status is written before a pod is deleted, so that no restart goes uncounted.
    """
    new = [RestartEvent(c.pod.pool, c.pod.name, c.reason, now) for c in restarts if not c.by_force]
    return [
        {"pool": each.pool, "pod": each.pod, "reason": each.reason, "time": timestamp(each.at)}
        for each in [*recent_restarts(history, now), *new]
    ]


def deferred_problems(deferred: Iterable[Restart]) -> list[PodProblem]:
    """Return a problem for each deferred restart, for the Degraded condition."""
    return [PodProblem(each.pod.name, each.reason, each.message, blocks=False) for each in deferred]


def restart_note(restart: Restart) -> EventNote:
    if restart.by_force:
        return EventNote(
            "PodForgotten", "Delete", f"pod {restart.pod.name}: {restart.message}", True
        )

    message = f"pod {restart.pod.name}: {restart.reason}: {restart.message}; it is recreated"
    return EventNote("PodRestarted", "Restart", message, True)


def refused_restart_note(restart: Restart, error: str) -> EventNote:
    """Return the Event about a pod that Kubernetes does not let the operator delete."""
    message = (
        f"pod {restart.pod.name}: {restart.reason}: {restart.message}; it cannot be deleted: "
        f"{error}; let the operator delete pods, or delete it yourself"
    )
    return EventNote("PodNotRestarted", "Restart", message, True)
