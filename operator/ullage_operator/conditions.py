"""Conditions of an LLMService: types, reasons and transitions.

Ready        everything that the spec asks for serves
Available    at least one router and one engine serve
Progressing  a change is being rolled out
Degraded     something is wrong that waiting alone may not cure
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

READY = "Ready"
AVAILABLE = "Available"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"

_STUCK = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet as far as conditions care."""

    name: str
    desired: int
    exist: int = 0
    ready: int = 0
    settled: bool = False
    """Its controller has seen the newest spec, and every pod is of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition before it has a time."""

    type: str
    holds: bool
    reason: str
    message: str


def observe(name: str, desired: int, live: Mapping[str, Any] | None) -> Workload:
    """What the live object says; nothing exists of one that is not there yet."""
    if live is None:
        return Workload(name, desired)
    status, generation = live.get("status", {}), live["metadata"].get("generation", 0)
    seen = status.get("observedGeneration", 0) >= generation
    exist = status.get("replicas", 0)
    # A StatefulSet that has finished rolling reports its one revision as current and updated.
    updated = status.get("updatedReplicas", 0)
    applied = live.get("spec", {}).get("replicas", 1) == desired
    settled = seen and applied and updated >= desired and exist == desired
    return Workload(name, desired, exist, status.get("readyReplicas", 0), settled)


def findings(
    router: Workload,
    pools: Sequence[Workload],
    pods: Iterable[Mapping[str, Any]],
) -> list[Finding]:
    """The four conditions of a service whose spec is valid."""
    available = availability(router, pools)
    progressing = progress([router, *pools])
    degraded = degradation(pods)
    ready = readiness(available, progressing, degraded, [router, *pools])
    return [ready, available, progressing, degraded]


def availability(router: Workload, pools: Sequence[Workload]) -> Finding:
    if not any(pool.desired for pool in pools):
        return Finding(AVAILABLE, False, "ScaledToZero", "no pool asks for an engine")
    if not any(pool.ready for pool in pools):
        return Finding(AVAILABLE, False, "NoEngineReady", counts(pools))
    if not router.ready:
        return Finding(AVAILABLE, False, "NoRouterReady", counts([router]))
    return Finding(AVAILABLE, True, "Serving", counts([router, *pools]))


def progress(workloads: Sequence[Workload]) -> Finding:
    rolling = [workload.name for workload in workloads if not workload.settled]
    if rolling:
        return Finding(PROGRESSING, True, "RollingOut", f"rolling out {', '.join(rolling)}")
    return Finding(PROGRESSING, False, "Settled", "every pod is of the newest configuration")


def degradation(pods: Iterable[Mapping[str, Any]]) -> Finding:
    """The first pod that cannot start or cannot be placed, by name."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        if trouble := pod_trouble(pod):
            reason, message = trouble
            return Finding(DEGRADED, True, reason, f"pod {pod['metadata']['name']}: {message}")
    return Finding(DEGRADED, False, "AsExpected", "no pod is stuck")


def pod_trouble(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a pod is stuck: (reason, message)."""
    status = pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return "Unschedulable", condition.get("message", "no node fits")
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _STUCK:
            ended = container.get("lastState", {}).get("terminated", {})
            said = ended.get("message") or waiting.get("message") or "see its log"
            return waiting["reason"], said.strip()
    return None


def readiness(
    available: Finding, progressing: Finding, degraded: Finding, workloads: Sequence[Workload]
) -> Finding:
    """Ready only if all serve; otherwise the reason that helps most."""
    if degraded.holds:
        return Finding(READY, False, degraded.reason, degraded.message)
    if not available.holds:
        return Finding(READY, False, available.reason, available.message)
    if progressing.holds:
        return Finding(READY, False, progressing.reason, progressing.message)
    if any(workload.ready < workload.desired for workload in workloads):
        return Finding(READY, False, "PodsNotReady", counts(workloads))
    return Finding(READY, True, "AllReady", counts(workloads))


def counts(workloads: Iterable[Workload]) -> str:
    return ", ".join(f"{each.name} {each.ready}/{each.desired} ready" for each in workloads)


def render(
    found: Iterable[Finding],
    previous: Iterable[Mapping[str, Any]],
    generation: int,
    now: datetime,
) -> list[dict[str, Any]]:
    """Conditions for status; the time changes only with the condition's status."""
    before = {condition["type"]: condition for condition in previous}
    return [condition(finding, before.get(finding.type), generation, now) for finding in found]


def condition(
    finding: Finding, before: Mapping[str, Any] | None, generation: int, now: datetime
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
        "message": finding.message,
    }


def timestamp(now: datetime) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes it; `now` is in UTC."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
