"""Conditions of an LLMService: types, reasons and transitions.

Ready        every pool serves through a router, and nothing but a canary crash-loops
Available    at least one router and one engine serve
Progressing  a change is being rolled out, or replicas are on their way
Degraded     something is wrong that waiting alone may not cure

A service that serves stays Ready while it rolls, scales or lacks one replica of several: that is
what Progressing and Degraded tell.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ullage_operator.trouble import Trouble

READY = "Ready"
AVAILABLE = "Available"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet as far as conditions care."""

    name: str
    desired: int
    exist: int = 0
    ready: int = 0
    settled: bool = False
    """Its controller has seen the newest spec, and every pod is of it."""
    sleeps: bool = False
    """Without pods, a request wakes it."""


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
    troubles: Sequence[Trouble],
    trying: Sequence[Trouble] = (),
    change: Finding | None = None,
) -> list[Finding]:
    """The four conditions of a service whose spec is valid.

    Args:
        troubles: of its pods, what blocks first.
        trying: of a canary's pods, which block nothing.
        change: how far a rollout is that is not over, as Progressing tells it.
    """
    available = availability(router, pools)
    progressing = progress([router, *pools], change)
    degraded = degradation([*troubles, *trying])
    ready = readiness(router, pools, available, troubles)
    return [ready, available, progressing, degraded]


def availability(router: Workload, pools: Sequence[Workload]) -> Finding:
    if not any(pool.desired for pool in pools):
        if router.ready and any(pool.sleeps for pool in pools):
            return Finding(AVAILABLE, True, "Asleep", "the next request wakes a pool")
        return Finding(AVAILABLE, False, "ScaledToZero", "no pool asks for an engine")
    if not any(pool.ready for pool in pools):
        return Finding(AVAILABLE, False, "NoEngineReady", counts(pools))
    if not router.ready:
        return Finding(AVAILABLE, False, "NoRouterReady", counts([router]))
    return Finding(AVAILABLE, True, "Serving", counts([router, *pools]))


def progress(workloads: Sequence[Workload], change: Finding | None = None) -> Finding:
    rolling = [workload.name for workload in workloads if not workload.settled]
    if change and (change.holds or not rolling):
        return change
    if rolling:
        return Finding(PROGRESSING, True, "RollingOut", f"rolling out {', '.join(rolling)}")
    return Finding(PROGRESSING, False, "Settled", "every pod is of the newest configuration")


def degradation(troubles: Sequence[Trouble]) -> Finding:
    """The first pod that cannot start, be placed or stay up, and how many there are."""
    if not troubles:
        return Finding(DEGRADED, False, "AsExpected", "no pod is stuck")
    return Finding(DEGRADED, True, troubles[0].reason, told(troubles))


def told(troubles: Sequence[Trouble]) -> str:
    others = len(troubles) - 1
    return f"{troubles[0]}{f' (and {others} more)' if others else ''}"


def readiness(
    router: Workload, pools: Sequence[Workload], available: Finding, troubles: Sequence[Trouble]
) -> Finding:
    """Ready if all pools serve and nothing blocks; otherwise the reason that helps most."""
    blocked = [trouble for trouble in troubles if trouble.blocks]
    lacking = [pool for pool in pools if pool.desired and not pool.ready]
    if blocked:
        return Finding(READY, False, blocked[0].reason, told(blocked))
    if troubles and (lacking or not available.holds):
        return Finding(READY, False, troubles[0].reason, told(troubles))
    if not available.holds:
        return Finding(READY, False, available.reason, available.message)
    if available.reason == "Asleep":
        return Finding(READY, True, available.reason, available.message)
    if lacking:
        return Finding(READY, False, "PodsNotReady", counts(lacking))
    workloads = [router, *pools]
    is_full = all(each.ready >= each.desired for each in workloads)
    return Finding(READY, True, "AllReady" if is_full else "Serving", counts(workloads))


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
