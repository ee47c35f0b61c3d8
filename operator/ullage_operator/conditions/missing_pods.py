"""Diagnoses workloads whose pods were never created, for example because of a quota."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from ullage_operator.conditions.pod_problem import PodProblem, Warnings
from ullage_operator.conditions.pods import age_s, parse_time

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
    """Number of pods according to the service's last status, or None before the first one.

    It is 0 for a workload that the status does not report.
    """


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


def refused_pods(workloads: Iterable[WorkloadPods], warnings: Warnings) -> list[PodProblem]:
    """Return a problem for each workload whose pods Kubernetes refuses to create.

    The workloads are those whose number of pods the status does not report. Only an Event tells
    that their pods are refused, instead of just being replaced.
    """
    return [
        PodProblem("", "PodsNotMade", _message(each, warnings), False)
        for each in filter(_lacks, workloads)
        if str(each.live["metadata"].get("uid", "")) in warnings
    ]


def refusal_due_s(workload: WorkloadPods, now: datetime) -> float | None:
    """Return the seconds until the Events of a workload without a reported number should be read.

    The result is 0 if they should be read now, and None if the workload has all of its pods.
    """
    return max(0.0, WAIT_S - age_s(workload.live, now)) if _lacks(workload) else None


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
    desired = _desired(live)
    if live["kind"] == "Deployment" and not _failure(live):
        return False

    reported = desired if workload.reported is None else workload.reported
    seen = live.get("status", {}).get("observedGeneration", 0)
    is_newest = seen >= live["metadata"].get("generation", 0)
    is_few = max(_exist(live), workload.pods, reported) < desired
    return is_newest and (is_few or _lacks_new_pods(live))


def _lacks_new_pods(live: Mapping[str, Any]) -> bool:
    """Return whether a Deployment has all of its pods, but not with its newest template.

    It creates such a pod before it removes an older one, so a quota may stop it.
    """
    return live["kind"] == "Deployment" and _exist(live) >= _desired(live) > _updated(live)


def _desired(live: Mapping[str, Any]) -> int:
    return int(live["spec"].get("replicas", 1))


def _exist(live: Mapping[str, Any]) -> int:
    return int(live.get("status", {}).get("replicas", 0))


def _updated(live: Mapping[str, Any]) -> int:
    return int(live.get("status", {}).get("updatedReplicas", 0))


def _message(workload: WorkloadPods, warnings: Warnings) -> str:
    live = workload.live
    name = f"{live['kind']} {live['metadata']['name']}"
    has = f"{workload.pods} of {_desired(live)} pods"
    if _lacks_new_pods(live):
        has = f"{_updated(live)} of {_desired(live)} pods of its newest template"
    return f"{name} has {has}: {_failure(live) or why_missing(live, warnings)}"


def why_missing(live: Mapping[str, Any], warnings: Warnings) -> str:
    """Return why Kubernetes does not create the pods of a StatefulSet or Job, from its Event.

    Without an Event, the message says where to look.
    """
    if warning := warnings.get(str(live["metadata"].get("uid", ""))):
        return warning.message
    look = f"kubectl describe {live['kind'].lower()} {live['metadata']['name']}"
    return f"a quota or an admission policy may refuse them; {look}"


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
