"""Diagnoses workloads whose pods were never created, for example because of a quota."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from ullage_operator.conditions.pod_problem import PodProblem, Warnings
from ullage_operator.conditions.pods import parse_time

PROGRESSING = "Progressing"
"""Type of the condition that is True while a change is being rolled out."""
WAIT_S = 30.0
"""Seconds after which missing pods are reported as a problem.

A webhook that is restarting is usually available again within this time.
"""


class WorkloadPods(NamedTuple):
    """A live Deployment or StatefulSet, and its number of pods."""

    live: Mapping[str, Any]
    pods: int
    """Pods that exist, including terminating pods."""
    reported: int | None
    """Number of pods according to the service's last status, or None before the first one."""


def missing_pods(
    workloads: Iterable[WorkloadPods],
    status: Mapping[str, Any],
    now: datetime,
    warnings: Warnings = MappingProxyType({}),
) -> list[PodProblem]:
    """Return a problem for each workload that has lacked pods for too long.

    Args:
        workloads: the workloads of the service, with their pods.
        status: the current status of the service.
        now: the current time, in UTC.
        warnings: Events about these workloads.
    """
    return [
        PodProblem("", "PodsNotMade", _message(each, warnings), False)
        for each in lacking_workloads(workloads, status, now)
    ]


def lacking_workloads(
    workloads: Iterable[WorkloadPods], status: Mapping[str, Any], now: datetime
) -> list[WorkloadPods]:
    """Return the workloads that have had fewer pods than desired for too long."""
    return [*filter(_lacks, workloads)] if _progressing_s(status, now) >= WAIT_S else []


def missing_pods_due_s(
    workloads: Iterable[WorkloadPods], status: Mapping[str, Any], now: datetime
) -> float | None:
    """Return the seconds until missing pods must be reported as a problem.

    The result is None if no pods are missing, or if they must already be reported.
    """
    left_s = WAIT_S - _progressing_s(status, now)
    return left_s if left_s > 0 and any(map(_lacks, workloads)) else None


def _lacks(workload: WorkloadPods) -> bool:
    """Return whether a workload lacks pods now and lacked them in the last status.

    Checking both ignores pods that are missing only briefly while they are being replaced. For a
    Deployment, its controller must also report a failure, because it may have observed the latest
    spec but not created the pods yet.
    """
    live = workload.live
    desired = _desired(workload.live)
    if live["kind"] == "Deployment" and not _failure(live):
        return False

    reported = desired if workload.reported is None else workload.reported
    seen = live.get("status", {}).get("observedGeneration", 0)
    is_newest = seen >= live["metadata"].get("generation", 0)
    return is_newest and max(_exist(live), workload.pods, reported) < desired


def _desired(live: Mapping[str, Any]) -> int:
    return int(live["spec"].get("replicas", 1))


def _exist(live: Mapping[str, Any]) -> int:
    return int(live.get("status", {}).get("replicas", 0))


def _message(workload: WorkloadPods, warnings: Warnings) -> str:
    """Return the message about a workload's missing pods, including the API server's explanation.

    For a Deployment, the explanation comes from a condition. For a StatefulSet, it comes from an
    Event.
    """
    kind = workload.live["kind"]
    name = workload.live["metadata"]["name"]
    look = f"kubectl describe {kind.lower()} {name}"
    warning = warnings.get(str(workload.live["metadata"].get("uid", "")))
    why = _failure(workload.live) or (warning.message if warning else "")
    why = why or f"a quota or an admission policy may refuse them; {look}"
    return f"{kind} {name} has {workload.pods} of {_desired(workload.live)} pods: {why}"


def _failure(live: Mapping[str, Any]) -> str:
    """Return why a Deployment's controller could not create a pod (empty if it did not fail)."""
    listed = live.get("status", {}).get("conditions", ())
    failed = (each for each in listed if each["type"] == "ReplicaFailure")
    return next((each.get("message", "") for each in failed if each["status"] == "True"), "")


def _progressing_s(status: Mapping[str, Any], now: datetime) -> float:
    """Return how long, in seconds, the service has been progressing (0 if it is not)."""
    progressing = (each for each in status.get("conditions", ()) if each["type"] == PROGRESSING)
    condition = next(progressing, {"status": "False"})
    since = parse_time(condition.get("lastTransitionTime"))
    return (now - since).total_seconds() if since and condition["status"] == "True" else 0.0
