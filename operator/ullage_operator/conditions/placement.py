"""Diagnoses pods for which no node has enough free resources."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from ullage_operator.api.quantities import amount
from ullage_operator.conditions.pod_problem import PodProblem, problem_of
from ullage_operator.conditions.pods import age_s, parse_time, pod_condition, spec_section

Pod = Mapping[str, Any]

_TEMPLATE = "resourceClaimTemplateName"
_UNALLOCATED = "cannot allocate all claims"
"""Substring of the scheduler's message about a node that lacks the devices claimed by a pod."""
_SCHEDULER_ERROR = "SchedulerError"
"""Reason of a pod that the scheduler could not bind. It usually succeeds at the next try."""
_UNBOUND = "binding volumes"
"""Substring of the scheduler's message about claims for which no disk was provided in time."""
_DISK = "ephemeral-storage"
_ORDINARY = ("cpu", "memory", _DISK, "hugepages")


def unscheduled(pod: Pod, now: datetime) -> PodProblem | None:
    placed = pod_condition(pod, "PodScheduled")
    if placed.get("status") != "False":
        return None
    message = placed.get("message", "no node fits")
    reason = placed.get("reason")
    if reason == _SCHEDULER_ERROR and _UNBOUND in message:
        return problem_of(pod, reason, f"{message}; {_claims_remedy(pod)}")
    if reason != "Unschedulable":
        return None
    asked = _asks(pod)
    problem = f"asks for {asked} and fits no node" if asked else "fits no node"
    return problem_of(
        pod, "Unschedulable", f"{problem}: {message}; {_placing_remedy(pod, message)}"
    )


def roomless_s(pod: Pod, now: datetime) -> float | None:
    """Return the seconds for which no node has had enough free resources for a pod, or None.

    The result is None if the pod fits on a node or is waiting for something else.
    """
    placed = pod_condition(pod, "PodScheduled")
    if placed.get("status") != "False" or placed.get("reason") != "Unschedulable":
        return None
    message = placed.get("message", "")
    if "Insufficient" not in message and _UNALLOCATED not in message:
        return None
    since = parse_time(placed.get("lastTransitionTime"))
    return (now - since).total_seconds() if since else age_s(pod, now)


def fits_place_of(pod: Pod, other: Pod) -> bool:
    """Return whether deleting pod `other` would free enough resources for `pod`.

    Ephemeral storage is considered only if the scheduler reports it as insufficient, because
    engines created by an earlier operator do not request any.
    """
    try:
        asked = _requests(pod)
        freed = _requests(other)
    except ValueError:  # a quantity in a form that the operator never writes, such as 1e3
        return False
    if f"Insufficient {_DISK}" not in pod_condition(pod, "PodScheduled").get("message", ""):
        asked.pop(_DISK, None)
    return all(size <= freed.get(name, 0) for name, size in asked.items())


def _requests(pod: Pod) -> dict[str, Decimal]:
    """Return the total resource requests and device claims that the scheduler counts for a pod."""
    sums: dict[str, Decimal] = {}
    for container in pod.get("spec", {}).get("containers", ()):
        resources = container.get("resources", {})
        asked = {**resources.get("limits", {}), **resources.get("requests", {})}
        for name, size in asked.items():
            sums[name] = sums.get(name, Decimal(0)) + amount(size)
    for template in _claim_templates(pod):
        name = f"claims of {template}"
        sums[name] = sums.get(name, Decimal(0)) + 1
    return sums


def _claim_templates(pod: Pod) -> list[str]:
    """Return the ResourceClaimTemplates of a pod's device claims."""
    claims = pod.get("spec", {}).get("resourceClaims", ())
    return [str(each[_TEMPLATE]) for each in claims if _TEMPLATE in each]


def _asks(pod: Pod) -> str:
    """Describe the devices that a pod requests, such as `4 nvidia.com/gpu` or claim templates."""
    limits = _limits(pod)
    asked = [f"{size} {name}" for name, size in sorted(limits.items())]
    return ", ".join([*asked, *(f"a claim of {each}" for each in _claim_templates(pod))])


def _limits(pod: Pod) -> dict[str, str]:
    limits: dict[str, str] = {}
    for container in pod.get("spec", {}).get("containers", ()):
        for name, size in container.get("resources", {}).get("limits", {}).items():
            if not name.startswith(_ORDINARY):
                limits[name] = str(size)
    return limits


def _placing_remedy(pod: Pod, message: str) -> str:
    pool = spec_section(pod)
    template = f"{pool}.podTemplate.spec"
    for name in _limits(pod):
        if f"Insufficient {name}" in message:
            return f"add a node with that many free {name}, free some, or lower {pool}.gpus"
    if "Insufficient memory" in message:
        return _memory_remedy(pod, pool)

    remedies = (
        (
            _UNALLOCATED,
            f"add a node with free devices, free some, or correct {pool}.resourceClaims",
        ),
        (
            "ResourceClaim not created yet",
            f"create the ResourceClaimTemplate that {pool}.resourceClaims names in this namespace",
        ),
        ("Insufficient ephemeral-storage", disk_remedy(pool)),
        ("untolerated taint", f"add the taint to {template}.tolerations"),
        ("node affinity/selector", f"correct {template}.nodeSelector or label a node"),
        ("persistentvolumeclaim", "create the claim that the pod names"),
        ("unbound immediate PersistentVolumeClaims", _claims_remedy(pod)),
        ("Insufficient", f"lower {pool}.resources or add a node"),
    )

    return next(
        (remedy for words, remedy in remedies if words in message), f"see {pool}'s placement"
    )


def _claims_remedy(pod: Pod) -> str:
    names = " ".join(_claims(pod))
    return (
        f"kubectl describe pvc {names} says why: usually its StorageClass does not exist, or it "
        "names none and the cluster has no default"
    )


def _claims(pod: Pod) -> Iterator[str]:
    """Yield the names of a pod's claims of volumes."""
    for volume in pod.get("spec", {}).get("volumes", ()):
        if claim := volume.get("persistentVolumeClaim"):
            yield str(claim["claimName"])
        elif "ephemeral" in volume:  # Kubernetes names its claim after the pod and the volume
            yield f"{pod['metadata']['name']}-{volume['name']}"


def _memory_remedy(pod: Pod, pool: str) -> str:
    containers = pod.get("spec", {}).get("containers", ())
    requests = [each.get("resources", {}).get("requests", {}) for each in containers]
    amounts = " and ".join(str(each["memory"]) for each in requests if "memory" in each)
    return (
        f"its containers request {amounts or 'no'} memory, which is an estimate if {pool} sets "
        f"none: set {pool}.resources.requests.memory to what they need, or add a node"
    )


def disk_remedy(pool: str) -> str:
    return (
        f"set {pool}.resources.requests.ephemeral-storage to what the pod needs of its node's "
        f"disk, or give each pod a disk of its own by {pool}.modelCache.claimTemplate"
    )
