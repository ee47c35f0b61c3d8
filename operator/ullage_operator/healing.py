"""Which pods to make anew: pure.

The engine's own supervisor restarts workers, and the kubelet restarts containers that end or fail
their liveness probe. What is left is a pod that started, no longer serves, and stays like that:
it is deleted, so that its StatefulSet makes another. Whatever is done is bounded: by a budget an
hour, by a backoff that doubles, by one pod of a pool at a time, and never the last that serves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

HOUR = timedelta(hours=1)
FORCE_AFTER_S = 60.0
"""A pod on a lost node may be overdue for so long before Kubernetes is made to forget it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`spec.healing`, in seconds."""

    enabled: bool
    not_ready_after: float
    silent_after: float
    min_health: float
    restarts_per_hour: int
    first_backoff: float
    max_backoff: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """An engine's pod, as healing sees it."""

    name: str
    uid: str
    pool: str
    has_started: bool
    """Its startup probe passed: a pod that still loads is never touched."""
    is_ready: bool
    not_ready_s: float = 0.0
    """How long it has not been ready since it started, as far as the operator saw."""
    was_heard: bool = False
    """It has reported headroom before."""
    silent_s: float = 0.0
    unhealthy_s: float = 0.0
    is_leaving: bool = False
    overdue_s: float = 0.0
    """How long ago it should have been gone."""
    is_on_lost_node: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """A restart that was done."""

    pool: str
    pod: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Cure:
    """A pod to delete."""

    pod: Patient
    reason: str
    message: str
    by_force: bool = False
    """Kubernetes forgets it without its node's word; costs no budget."""


@dataclass(frozen=True, slots=True)
class Held:
    """A pod that should be made anew, and why it is not yet."""

    pod: Patient
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do now."""

    cures: tuple[Cure, ...] = ()
    held: tuple[Held, ...] = ()
    again_s: float | None = None
    """When to decide anew, though nothing is heard until then."""


@dataclass(frozen=True, slots=True)
class _Ailment:
    pod: Patient
    reason: str
    message: str
    serves: bool
    """The kubelet calls it ready, so that its end may cost something."""


def decide(
    policy: Policy,
    patients: Sequence[Patient],
    past: Iterable[Past],
    now: datetime,
    cut_off: frozenset[str],
) -> Verdict:
    """What to do about a service's engine pods.

    Args:
        past: restarts of the last hour at least.
        now: in UTC.
        cut_off: pools that no router reaches, so that an engine of theirs that is silent to the
            operator is silent to others too, and it is not just the operator that hears nothing.
    """
    forced = tuple(map(_forced, filter(_is_lost, patients)))
    waits = [_until_forced(patient) for patient in patients]
    if not policy.enabled:
        return Verdict(forced, (), _soonest(waits))
    pools = sorted({patient.pool for patient in patients})
    recent = [each for each in past if each.at > now - HOUR]
    verdicts = [
        _pool_verdict(
            policy,
            [patient for patient in patients if patient.pool == pool],
            [each.at for each in recent if each.pool == pool],
            now,
            pool in cut_off,
        )
        for pool in pools
    ]
    return Verdict(
        forced + tuple(cure for verdict in verdicts for cure in verdict.cures),
        tuple(held for verdict in verdicts for held in verdict.held),
        _soonest([*waits, *(verdict.again_s for verdict in verdicts)]),
    )


def _is_lost(pod: Patient) -> bool:
    return pod.is_leaving and pod.is_on_lost_node and pod.overdue_s >= FORCE_AFTER_S


def _until_forced(pod: Patient) -> float | None:
    is_coming = pod.is_leaving and pod.is_on_lost_node and not _is_lost(pod)
    return FORCE_AFTER_S - pod.overdue_s if is_coming else None


def _forced(pod: Patient) -> Cure:
    message = f"its node is lost and it should have been gone {pod.overdue_s:.0f} s ago"
    return Cure(pod, "NodeLost", message, by_force=True)


def _pool_verdict(
    policy: Policy, pods: Sequence[Patient], past: Sequence[datetime], now: datetime, cut_off: bool
) -> Verdict:
    """At most one cure: the next waits for the backoff."""
    ailing = [ailment for pod in pods if (ailment := _ailment(policy, pod))]
    waits = [_until_ill(policy, pod) for pod in pods]
    if not ailing:
        return Verdict(again_s=_soonest(waits))
    ailment = min(ailing, key=lambda each: (each.serves, each.pod.name))
    wait_s, reason = _wait(policy, past, now)
    others = [pod for pod in pods if pod is not ailment.pod]
    if why := _spares(ailment, others, {each.pod.uid for each in ailing}, cut_off):
        reason, wait_s = why, policy.silent_after
    if not wait_s:
        return Verdict((Cure(ailment.pod, ailment.reason, ailment.message),))
    held = Held(ailment.pod, reason, f"{ailment.message}; {_why(reason, policy)}")
    return Verdict((), (held,), _soonest([*waits, wait_s]))


def _ailment(policy: Policy, pod: Patient) -> _Ailment | None:
    """Why a pod should be made anew; None while it starts, ends or serves."""
    if pod.is_leaving or not pod.has_started or pod.is_on_lost_node:
        return None
    if not pod.is_ready:
        if pod.not_ready_s < policy.not_ready_after:
            return None
        return _Ailment(
            pod, "NotReady", f"not ready for more than {policy.not_ready_after:g} s", False
        )
    if pod.was_heard and pod.silent_s >= policy.silent_after:
        return _Ailment(
            pod, "Silent", f"no headroom report for more than {policy.silent_after:g} s", True
        )
    if pod.unhealthy_s >= policy.not_ready_after:
        message = f"health below {policy.min_health:g} for more than {policy.not_ready_after:g} s"
        return _Ailment(pod, "Unhealthy", message, True)
    return None


def _until_ill(policy: Policy, pod: Patient) -> float | None:
    """Seconds until a pod that ails already may be due for a cure; None for one that is well."""
    if pod.is_leaving or not pod.has_started or pod.is_on_lost_node:
        return None
    if not pod.is_ready:
        return max(0.0, policy.not_ready_after - pod.not_ready_s) or None
    spans = []
    if pod.was_heard and pod.silent_s > policy.silent_after / 2:
        spans.append(policy.silent_after - pod.silent_s)
    if pod.unhealthy_s:
        spans.append(policy.not_ready_after - pod.unhealthy_s)
    return min((span for span in spans if span > 0), default=None)


def _spares(
    ailment: _Ailment, others: Sequence[Patient], ailing: set[str], cut_off: bool
) -> str | None:
    """Why a pod that is called ready is left alone; it may be the last that serves."""
    if not ailment.serves:
        return None
    if any(pod.is_leaving or not pod.has_started for pod in others):
        return "OthersNotBack"
    # Of two that are silent, or that the operator never heard, it may be the operator who is deaf.
    well = [pod for pod in others if pod.is_ready and pod.was_heard and pod.uid not in ailing]
    if well or (ailment.reason == "Silent" and cut_off):
        return None
    return "LastServing"


def _wait(policy: Policy, past: Sequence[datetime], now: datetime) -> tuple[float, str]:
    """Seconds until the pool may have its next restart, and what it waits for."""
    if not past:
        return 0.0, ""
    if len(past) >= policy.restarts_per_hour:
        budget_s = (sorted(past)[-policy.restarts_per_hour] + HOUR - now).total_seconds()
        return budget_s, "RestartBudgetSpent"
    pause_s = min(policy.max_backoff, policy.first_backoff * 2.0 ** (len(past) - 1))
    return max(0.0, pause_s - (now - max(past)).total_seconds()), "RestartBackoff"


def _why(reason: str, policy: Policy) -> str:
    """The same words each time, so that what is told of it is one Event."""
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
