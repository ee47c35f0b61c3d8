"""Decides which engine pods to restart, from pods, nodes and headroom reports. Pure.

The engine's own supervisor restarts workers, and the kubelet restarts containers that end or fail
their liveness probe. Neither helps a pod that started, stopped serving, and stays like that. The
operator deletes this pod, so that its StatefulSet creates another.

Restarts are bounded by a budget an hour, by a backoff that doubles, and to one pod of a pool at a
time. The last pod that serves is never deleted.
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
HUNG_GRACE_S = 30
"""Seconds that a pod has to end that hangs or serves nothing: it ends no request however long it is
given, and keeps its GPUs meanwhile."""
FORCE_AFTER_S = 60.0
"""A pod on a lost node may be overdue for so long before Kubernetes is made to forget it."""
Pod = Mapping[str, Any]

_UNKNOWN = EngineHealth(pool="")


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
