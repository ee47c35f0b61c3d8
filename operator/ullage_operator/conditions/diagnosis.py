"""Diagnoses why pods are not serving, and suggests remedies.

A message states what the pod requested, how Kubernetes responded, and how to fix the problem, so
that users need not look up the pod, its Events and its log.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from ullage_operator.api import naming
from ullage_operator.conditions.placement import disk_remedy, unscheduled
from ullage_operator.conditions.pod_problem import (
    CANNOT_START,
    CONFIG_REASONS,
    CRASH_LOOP,
    IMAGE_REASONS,
    PodProblem,
    Warnings,
    problem_of,
)
from ullage_operator.conditions.pods import (
    age_s,
    container_statuses,
    is_counted,
    is_ready,
    node_of,
    parse_time,
    pod_condition,
    ready_since,
    spec_section,
)

Pod = Mapping[str, Any]

MISUSE = 2
"""Exit status for errors that a restart cannot fix, such as a broken model file."""
LOOPING_RESTARTS = 2
"""Number of restarts after which a container that keeps exiting counts as crash-looping."""
RECENT_S = 600.0
"""Seconds after which a container's exit no longer counts as a current problem."""
STABLE_S = 60.0
"""Seconds of readiness after which a pod no longer counts as crash-looping."""
CREATING_S = 600.0
"""Seconds after which the status reports a slow image pull."""
MOUNTING_S = 20.0
"""Seconds after which Events are read if a pod is still waiting for its volumes or network."""
EVENTS_S = 30.0
"""Interval, in seconds, at which the Events of a pod that fails to start are read again."""
_CACHE = "cache"


def diagnose(
    pods: Iterable[Pod],
    now: datetime,
    lost_nodes: frozenset[str] = frozenset(),
    warnings: Warnings = MappingProxyType({}),
) -> list[PodProblem]:
    """Return the problems of pods. Problems that block the service come first.

    Args:
        pods: the pods of a service.
        now: the current time, in UTC.
        lost_nodes: names of nodes that do not respond.
        warnings: Events about pods that do not start.
    """
    ordered = sorted(filter(is_counted, pods), key=lambda pod: str(pod["metadata"]["name"]))
    problems = [
        _on_lost_node(pod, lost_nodes) or diagnose_pod(pod, now) or _unmounted(pod, now, warnings)
        for pod in ordered
    ]
    return sorted((each for each in problems if each), key=lambda trouble: not trouble.blocks)


def _on_lost_node(pod: Pod, lost_nodes: frozenset[str]) -> PodProblem | None:
    node = node_of(pod)
    if node not in lost_nodes:
        return None
    remedy = (
        f"bring {node} back, or delete the Node: its pods are then created elsewhere "
        "(the operator does that by itself once Kubernetes has given them up)"
    )
    return problem_of(pod, "NodeLost", f"node {node} does not answer; {remedy}")


def diagnose_pod(pod: Pod, now: datetime) -> PodProblem | None:
    """Return the problem that best explains why a pod is not serving, or None if there is none.

    A pod that is serving, starting or terminating normally has no problem.
    """
    if "deletionTimestamp" in pod["metadata"]:
        return None
    checks = (unscheduled, _refused, _container_stuck, _looping, _failed, _creating)
    return next((problem for check in checks if (problem := check(pod, now))), None)


def _container_stuck(pod: Pod, now: datetime) -> PodProblem | None:
    for container in container_statuses(pod):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        message = waiting.get("message", "").strip()
        if reason in IMAGE_REASONS:
            return problem_of(pod, reason, _image_message(container, reason, message))
        if reason in CONFIG_REASONS:
            remedy = "create the Secret or ConfigMap that it names, or correct the pool's settings"
            if "deadline exceeded" in message:  # the container runtime is late, the spec is valid
                remedy = "the node is overloaded or its container runtime hangs; it is tried again"
            return problem_of(
                pod, reason, f"{message or 'its container cannot be created'}; {remedy}"
            )
        if reason == CRASH_LOOP:
            return problem_of(pod, reason, _crash_message(pod, container), True)
    return None


def _image_message(container: Mapping[str, Any], reason: str, message: str) -> str:
    image = container.get("image", "its image")
    if reason == "InvalidImageName":
        return f"{image!r} is not an image name; correct spec.image"
    remedy = "check the name in spec.image, spec.imagePullSecrets and the registry"
    return f"image {image} cannot be pulled: {message or 'no reason given'}; {remedy}"


def _looping(pod: Pod, now: datetime) -> PodProblem | None:
    """Return the problem of a container that crash-loops, or None.

    Such a container may briefly be running, or even ready, between two crashes.
    """
    since = ready_since(pod)
    is_stable = is_ready(pod) and since and (now - since).total_seconds() >= STABLE_S
    for container in container_statuses(pod):
        often = container.get("restartCount", 0) >= LOOPING_RESTARTS
        if often and not is_stable and _crashed_lately(container, now):
            return problem_of(pod, CRASH_LOOP, _crash_message(pod, container), True)
    return None


def _refused(pod: Pod, now: datetime) -> PodProblem | None:
    """Return a problem if an engine or router failed with an error that a restart cannot fix.

    The result is None for any other pod.
    """
    if is_ready(pod):
        return None
    for container in container_statuses(pod):
        name = container.get("name", "")
        ended = _ended(container)
        is_own = name in (naming.ENGINE, naming.ROUTER)
        if is_own and ended.get("exitCode") == MISUSE and _crashed_lately(container, now):
            words = _last_words(ended) or f"see kubectl logs --previous {pod['metadata']['name']}"
            return problem_of(pod, CANNOT_START, f"{name} cannot start: {words}", True)
    return None


def stable_in_s(pod: Pod, now: datetime) -> float | None:
    """Return the seconds until a pod that became ready again after crashing counts as stable.

    The result is None for any other pod.
    """
    since = ready_since(pod)
    trouble = _looping(pod, now)
    if trouble is None or since is None or not is_ready(pod):
        return None
    return max(0.0, STABLE_S - (now - since).total_seconds())


def _crashed_lately(container: Mapping[str, Any], now: datetime) -> bool:
    ended = _ended(container)
    at = parse_time(ended.get("finishedAt")) or now
    return bool(ended.get("exitCode", 0) != 0 and (now - at).total_seconds() < RECENT_S)


def _ended(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the most recent terminated state of a container (empty if it never exited)."""
    for state in (container.get("state", {}), container.get("lastState", {})):
        if ended := state.get("terminated"):
            return dict(ended)
    return {}


def _crash_message(pod: Pod, container: Mapping[str, Any]) -> str:
    ended = _ended(container)
    name = container.get("name", "its container")
    message = _last_words(ended)
    code = f" with exit code {ended['exitCode']}" if "exitCode" in ended else ""
    times = container.get("restartCount", 0)
    crash = f"{name} has been restarted {times} times, last after it ended{code}"

    if ended.get("reason") == "OOMKilled":
        pool = spec_section(pod)
        return f"{crash}: out of host memory; raise {pool}.resources.limits.memory"
    if message:
        return f"{crash}: {message}"
    return f"{crash}; see kubectl logs --previous {pod['metadata']['name']}"


def _last_words(ended: Mapping[str, Any]) -> str:
    """Return the last error line of a termination message, or the message's tail if it has none."""
    message = (ended.get("message") or "").strip()
    errors = [line for line in message.splitlines() if line.startswith("error: ")]
    return str(errors[-1] if errors else message)[-1024:]


def _failed(pod: Pod, now: datetime) -> PodProblem | None:
    """Return the failure of a pod that was evicted or rejected by the kubelet, or None.

    The StatefulSet creates a replacement for such a pod.
    """
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    reason = status.get("reason") or "PodFailed"
    message = status.get("message", "").strip() or "no reason given"
    remedy = "it is being replaced"
    if f'EmptyDir volume "{_CACHE}"' in message:
        cache = f"{spec_section(pod)}.modelCache"
        remedy = f"raise {cache}.sizeLimit, or give each pod a disk by {cache}.claimTemplate"
    elif "ephemeral-storage" in message or "ephemeral local storage" in message:
        remedy = disk_remedy(spec_section(pod))
    return problem_of(pod, reason, f"{message}; {remedy}")


def _creating(pod: Pod, now: datetime) -> PodProblem | None:
    for container in container_statuses(pod):
        waiting = container.get("state", {}).get("waiting", {}).get("reason")
        age = age_s(pod, now)
        if waiting in ("ContainerCreating", "PodInitializing") and age >= CREATING_S:
            name = pod["metadata"]["name"]
            message = (
                f"its containers are not created after {age / 60:.0f} min: a large image may still "
                f"be pulled, or a volume cannot be mounted; kubectl describe pod {name}"
            )
            return problem_of(pod, "ContainerCreating", message)
    return None


def is_unmounted(pod: Pod, now: datetime) -> bool:
    """Return whether a pod has waited at least `MOUNTING_S` for its volumes or its network.

    Its Events are then needed to explain the delay.
    """
    return _is_mounting(pod) and age_s(pod, now) >= MOUNTING_S


def unmounted_recheck_s(pod: Pod, now: datetime) -> float | None:
    """Return the seconds until a pod's Events should be read.

    The result is None for a pod that is not waiting for its volumes or its network.
    """
    if not _is_mounting(pod):
        return None
    return max(0.0, MOUNTING_S - age_s(pod, now)) or EVENTS_S


def _is_mounting(pod: Pod) -> bool:
    """Return whether a scheduled pod is still waiting for its volumes or network.

    Kubernetes pulls images only after the volumes and the network are ready.
    """
    if "deletionTimestamp" in pod["metadata"] or not node_of(pod):
        return False
    if pod_condition(pod, "PodReadyToStartContainers").get("status") != "False":
        return False
    reasons = [
        each.get("state", {}).get("waiting", {}).get("reason") for each in container_statuses(pod)
    ]
    return any(reason in ("ContainerCreating", "PodInitializing") for reason in reasons)


def _unmounted(pod: Pod, now: datetime, warnings: Warnings) -> PodProblem | None:
    if not is_unmounted(pod, now):
        return None
    name = pod["metadata"]["name"]
    if warning := warnings.get(str(pod["metadata"].get("uid", ""))):
        remedy = "create the missing object in this namespace, or correct its name in the spec"
        if warning.reason not in ("FailedMount", "FailedAttachVolume"):
            remedy = f"kubectl describe pod {name}"
        return problem_of(pod, warning.reason, f"{warning.message}; {remedy}")

    listed = ", ".join(_mounted_objects(pod)) or "no Secret, ConfigMap or claim"
    message = (
        f"has neither its volumes nor its network after {age_s(pod, now):.0f} s; it mounts {listed}"
        f"; kubectl describe pod {name}"
    )
    return problem_of(pod, "ContainerCreating", message)


def _mounted_objects(pod: Pod) -> list[str]:
    """Return the kinds and names of the objects that a pod mounts, such as `Secret NAME`."""
    sources = (
        ("Secret", "secret", "secretName"),
        ("ConfigMap", "configMap", "name"),
        ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
    )
    return [
        f"{kind} {volume[source][key]}"
        for volume in pod.get("spec", {}).get("volumes", ())
        for kind, source, key in sources
        if key in volume.get(source, {})
    ]
