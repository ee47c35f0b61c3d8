"""Conditions of an LLMService: types, reasons and transitions.

Every valid service has four conditions:

Ready        every pool serves through a router, and no pod outside a canary crash-loops
Available    at least one router and one engine are serving
Progressing  a change is being rolled out, or new pods are starting
Degraded     there is a problem that may not resolve on its own

As long as a service is serving, it stays Ready during rollouts and scaling, and while one of
several replicas is missing. The Progressing and Degraded conditions report these states.

Three conditions exist only for some services:

EnginesConsistent    all engines have the same fingerprint, and so generate the same text
AdaptersReady        every LoRA adapter is on every engine that is ready
ModelCacheWarm       Jobs have filled every shared model cache that the spec asks to pre-fill

Four conditions describe the cluster: the kinds that it serves, the operator's permissions and the
CRD. The first three exist only while they are true:

DefinitionOutdated   the cluster's CRD of LLMService is older than the operator
MissingPermission    the operator lacks the permission that the message states
KindsUnlisted        the API server serves a kind but cannot list its objects
MonitoringAvailable  whether the cluster serves the kinds of the Prometheus operator
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ullage_operator.api.naming import MONITORING_API, OWNED
from ullage_operator.conditions.missing_pods import PROGRESSING
from ullage_operator.conditions.pod_problem import PodProblem

READY = "Ready"
AVAILABLE = "Available"
DEGRADED = "Degraded"
ENGINES_CONSISTENT = "EnginesConsistent"
ADAPTERS_READY = "AdaptersReady"
DEFINITION_OUTDATED = "DefinitionOutdated"
CONTESTED = "Contested"
MISSING_PERMISSION = "MissingPermission"
KINDS_UNLISTED = "KindsUnlisted"
MONITORING_AVAILABLE = "MonitoringAvailable"
MONITORING = tuple(kind.name for kind in OWNED if kind.api_version == MONITORING_API)
"""Kinds defined by the Prometheus operator that this operator creates."""
_MAX_FIELDS = 3
"""Maximum number of fields that a condition lists."""
MAX_MESSAGE = 32_768
"""Maximum number of characters of a condition's message in the CRD.

The API server refuses the whole status if a message is longer.
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """The state of a Deployment or StatefulSet from which a service's conditions are computed."""

    name: str
    desired: int
    exist: int = 0
    ready: int = 0
    settled: bool = False
    """Whether the controller has observed the latest spec and created every pod from it."""
    sleeps: bool = False
    """Whether the workload may stay at zero pods until a request wakes it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a service's status, without the transition time, which `render` adds."""

    type: str
    holds: bool
    reason: str
    message: str


STOPPED = Condition(
    AVAILABLE, False, "Stopped", "spec.stop is true; set it to false to serve again"
)
"""The Available condition of a service that is stopped on purpose."""


def workload_of(name: str, desired: int, live: Mapping[str, Any] | None) -> Workload:
    """Return the state of a live workload. A missing workload counts as having no pods."""
    if live is None:
        return Workload(name, desired)

    status = live.get("status", {})
    generation = live["metadata"].get("generation", 0)
    is_observed = status.get("observedGeneration", 0) >= generation
    exist = status.get("replicas", 0)
    # A StatefulSet that has finished rolling reports its one revision as current and updated.
    updated = status.get("updatedReplicas", 0)
    applied = live.get("spec", {}).get("replicas", 1) == desired
    settled = is_observed and applied and updated >= desired and exist == desired
    return Workload(name, desired, exist, status.get("readyReplicas", 0), settled)


def service_conditions(
    router: Workload,
    pools: Sequence[Workload],
    troubles: Sequence[PodProblem],
    trying: Sequence[PodProblem] = (),
    change: Condition | None = None,
    was_progressing: bool = True,
    *,
    is_stopped: bool = False,
) -> list[Condition]:
    """Return the four conditions of a service whose spec is valid.

    Args:
        router: the routers' Deployment.
        pools: the pools' StatefulSets.
        troubles: problems of the pods. Problems that block the service come first.
        trying: problems of a canary's pods, which do not block the service.
        change: the Progressing condition of an unfinished change, or None.
        was_progressing: whether Progressing was True in the last status (True for a new
            service).
        is_stopped: whether the service is stopped on purpose, without engines.
    """
    available = STOPPED if is_stopped else available_condition(router, pools)
    progressing = progressing_condition([router, *pools], change, was_progressing)
    degraded = degraded_condition([*troubles, *trying])
    ready = ready_condition(router, pools, available, troubles)
    return [ready, available, progressing, degraded]


def available_condition(router: Workload, pools: Sequence[Workload]) -> Condition:
    if not any(pool.desired for pool in pools):
        if router.ready and any(pool.sleeps for pool in pools):
            return Condition(AVAILABLE, True, "Asleep", "the next request wakes a pool")
        return Condition(AVAILABLE, False, "ScaledToZero", "no pool asks for an engine")
    if not any(pool.ready for pool in pools):
        return Condition(AVAILABLE, False, "NoEngineReady", counts(pools))
    if not router.ready:
        return Condition(AVAILABLE, False, "NoRouterReady", counts([router]))
    return Condition(AVAILABLE, True, "Serving", counts([router, *pools]))


def progressing_condition(
    workloads: Sequence[Workload], change: Condition | None = None, was_progressing: bool = True
) -> Condition:
    """Return the Progressing condition, derived from the state of a service's workloads.

    A change is complete once its pods have become ready. If a pod fails later, the condition does
    not return to True.
    """
    rolling = [workload.name for workload in workloads if not workload.settled]
    if change and (change.holds or not rolling):
        return change
    if rolling:
        return Condition(PROGRESSING, True, "RollingOut", f"rolling out {', '.join(rolling)}")
    starting = [workload for workload in workloads if workload.desired and not workload.ready]
    if was_progressing and starting:
        return Condition(PROGRESSING, True, "Starting", f"waiting until {counts(starting)}")
    return Condition(PROGRESSING, False, "Settled", "every pod has the newest configuration")


def degraded_condition(troubles: Sequence[PodProblem]) -> Condition:
    """Return the Degraded condition, which quotes the first problem and counts the others."""
    if not troubles:
        return Condition(DEGRADED, False, "AsExpected", "no pod is stuck")
    return Condition(DEGRADED, True, troubles[0].reason, summary(troubles))


def summary(troubles: Sequence[PodProblem]) -> str:
    others = len(troubles) - 1
    return f"{troubles[0]}{f' (and {others} more)' if others else ''}"


def ready_condition(
    router: Workload,
    pools: Sequence[Workload],
    available: Condition,
    troubles: Sequence[PodProblem],
) -> Condition:
    """Return the Ready condition.

    If it is False, the reason is the one that helps users most, for example a problem of a pod
    instead of the general `PodsNotReady`.
    """
    if available is STOPPED:
        return Condition(READY, False, available.reason, available.message)

    blocked = [trouble for trouble in troubles if trouble.blocks]
    lacking = [pool for pool in pools if pool.desired and not pool.ready]
    if blocked:
        return Condition(READY, False, blocked[0].reason, summary(blocked))
    if troubles and (lacking or not available.holds):
        return Condition(READY, False, troubles[0].reason, summary(troubles))
    if not available.holds:
        return Condition(READY, False, available.reason, available.message)
    if available.reason == "Asleep":
        return Condition(READY, True, available.reason, available.message)
    if lacking:
        return Condition(READY, False, "PodsNotReady", counts(lacking))

    workloads = [router, *pools]
    is_full = all(each.ready >= each.desired for each in workloads)
    return Condition(READY, True, "AllReady" if is_full else "Serving", counts(workloads))


def counts(workloads: Iterable[Workload]) -> str:
    return ", ".join(f"{each.name} {each.ready}/{each.desired} ready" for each in workloads)


def render(
    conditions: Iterable[Condition],
    previous: Iterable[Mapping[str, Any]],
    generation: int,
    now: datetime,
) -> list[dict[str, Any]]:
    """Return conditions in the format of a Kubernetes status.

    A transition time changes only when the status of its condition changes.
    """
    before = {condition["type"]: condition for condition in previous}
    return [
        _as_manifest(finding, before.get(finding.type), generation, now) for finding in conditions
    ]


def _as_manifest(
    finding: Condition, before: Mapping[str, Any] | None, generation: int, now: datetime
) -> dict[str, Any]:
    status = "True" if finding.holds else "False"
    same = before is not None and before["status"] == status
    time = before["lastTransitionTime"] if before and same else timestamp(now)
    return {
        "type": finding.type,
        "status": status,
        "observedGeneration": generation,
        "lastTransitionTime": time,
        "reason": finding.reason,
        "message": shortened(finding.message),
    }


def shortened(message: str) -> str:
    """Return a condition's message, cut to the maximum length."""
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"


def timestamp(now: datetime) -> str:
    """Format a UTC time as Kubernetes does: RFC 3339, in whole seconds."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def cluster_conditions(
    serves: Collection[str], missing: Sequence[str], unlisted: Sequence[str] = ()
) -> list[Condition]:
    """Return the status conditions that describe the cluster.

    Args:
        serves: the optional kinds that the cluster serves.
        missing: the permissions that the operator lacks.
        unlisted: kinds that the cluster serves but the operator cannot list.
    """
    return [
        monitoring_condition(serves),
        *missing_permissions(missing),
        *unlisted_kinds(unlisted),
    ]


def monitoring_condition(serves: Collection[str]) -> Condition:
    absent = [kind for kind in MONITORING if kind not in serves]
    if not absent:
        message = "PodMonitors tell Prometheus what to scrape, and PrometheusRules when to alert"
        return Condition(MONITORING_AVAILABLE, True, "Served", message)
    message = (
        f"the cluster does not serve {' and '.join(absent)} of {MONITORING_API}: "
        "install the Prometheus operator, or scrape the pods' port named metrics"
    )
    return Condition(MONITORING_AVAILABLE, False, "KindsAbsent", message)


def unlisted_kinds(unlisted: Sequence[str]) -> list[Condition]:
    if not unlisted:
        return []
    message = f"the operator creates no objects of kinds it cannot list: {'; '.join(unlisted)}"
    return [Condition(KINDS_UNLISTED, True, "ListFailed", message)]


def outdated_definition(undefined: Sequence[str]) -> list[Condition]:
    """Return the DefinitionOutdated condition (empty if the CRD has defaults for all fields).

    Args:
        undefined: fields for which the installed CRD has no default, which shows that it is older.
    """
    if not undefined:
        return []
    others = len(undefined) - _MAX_FIELDS
    more = f" and {others} more" if others > 0 else ""
    message = (
        "the cluster's definition of LLMService is older than the operator, which fills in the "
        f"defaults of {', '.join(undefined[:_MAX_FIELDS])}{more}; apply the crds/ of its version"
    )
    return [Condition(DEFINITION_OUTDATED, True, "DefaultsMissing", message)]


def contested(challenger: str) -> list[Condition]:
    """Return the Contested condition (empty unless a second operator watches the service)."""
    if not challenger:
        return []
    message = (
        f"operator {challenger} also watches this service and leaves it alone; give each of the "
        "two releases namespaces of its own (watch.namespaces), or uninstall one"
    )
    return [Condition(CONTESTED, True, "SeveralOperators", message)]


def missing_permissions(missing: Sequence[str]) -> list[Condition]:
    if not missing:
        return []
    message = f"the operator lacks rights, but goes on without them; grant: {'; '.join(missing)}"
    return [Condition(MISSING_PERMISSION, True, "Forbidden", message)]
