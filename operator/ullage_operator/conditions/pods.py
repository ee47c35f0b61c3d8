"""Reads facts about a pod, such as its age and pool, from its Pod object."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ullage_operator.api import naming

Pod = Mapping[str, Any]


def is_counted(pod: Pod) -> bool:
    """Return whether a pod is included in its workload's pod count.

    All pods are included except router pods that have exited permanently. A ReplicaSet replaces
    such pods but keeps their objects.
    """
    has_ended = pod.get("status", {}).get("phase") in ("Failed", "Succeeded")
    return not (is_router(pod) and has_ended)


def is_router(pod: Pod) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/component") == naming.ROUTER)


def is_follower(pod: Pod) -> bool:
    """Return whether a pod is a follower, one of the non-leader pods of a multi-pod engine."""
    labels = pod["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/component") == naming.FOLLOWER)


def node_of(pod: Pod) -> str:
    return str(pod.get("spec", {}).get("nodeName", ""))


def is_ready(pod: Pod) -> bool:
    return pod_condition(pod, "Ready").get("status") == "True"


def ready_since(pod: Pod) -> datetime | None:
    """Return the UTC time at which a pod's readiness last changed, or None if it is unknown."""
    return parse_time(pod_condition(pod, "Ready").get("lastTransitionTime"))


def has_started(pod: Pod) -> bool:
    """Return whether all containers of a pod are running and have passed their startup probes."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return bool(statuses) and all(each.get("started") for each in statuses)


def restart_count(pod: Pod) -> int:
    """Return how many times the pod's containers have been restarted."""
    return sum(each.get("restartCount", 0) for each in container_statuses(pod))


def parse_time(text: str | None) -> datetime | None:
    """Parse a timestamp from a Kubernetes object, and return it in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC) if text else None


def age_s(pod: Pod, now: datetime) -> float:
    """Return the seconds since a pod was created (0 if its creation time is unknown)."""
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    return max(0.0, (now - created).total_seconds()) if created else 0.0


def pod_condition(pod: Pod, kind: str) -> Mapping[str, Any]:
    listed = pod.get("status", {}).get("conditions", ())
    return next((each for each in listed if each["type"] == kind), {})


def container_statuses(pod: Pod) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def is_placed(pod: Pod) -> bool:
    """Return whether a pod is assigned to a node."""
    return bool(pod.get("spec", {}).get("nodeName"))


def spec_section(pod: Pod) -> str:
    """Return the path of the spec section that configures a pod."""
    pool = naming.stable_pool(pool_of(pod))
    return f"spec.pools.{pool}" if pool else "spec.router"


def pool_of(pod: Pod) -> str:
    """Return the name of an engine pod's pool (empty for a router pod)."""
    return str(pod["metadata"].get("labels", {}).get(naming.POOL_LABEL, ""))
