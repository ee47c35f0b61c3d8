"""Diagnoses of pods that do not serve or were never created, each with its remedy. Pure: they
depend on the pod, and on its StatefulSet or Deployment.

A message names the request, the answer of Kubernetes, and the remedy, so that users need not look
up the pod, its events and its log one after another. Missing pods, such as those that a quota
refuses, are problems too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple

from ullage_operator.api import naming
from ullage_operator.api.sections import amount

Pod = Mapping[str, Any]

PROGRESSING = "Progressing"
"""The type of the condition that says whether a change is being rolled out."""

MISUSE = 2
"""Exit status of an engine or a router that can never work with what it is given, such as a broken
model file."""
LOOPING_RESTARTS = 2
"""A container that ended so often and does not stay up crash-loops, also while it just runs."""
RECENT_S = 600.0
"""An end that is longer ago has nothing to do with what a container does now."""
STABLE_S = 60.0
"""A pod that has been ready for this long does not crash-loop any more."""
CREATING_S = 600.0
"""Time to pull an image, after which it is worth a word."""
MOUNTING_S = 20.0
"""Time to mount a pod's volumes and to set up its network, which usually takes seconds."""
EVENTS_S = 30.0
"""Time after which the Events of a pod that still does not start are read again."""
_CACHE = "cache"
_TEMPLATE = "resourceClaimTemplateName"
_UNALLOCATED = "cannot allocate all claims"
"""The scheduler's words for a node without the devices that a pod claims."""
_DISK = "ephemeral-storage"
_ORDINARY = ("cpu", "memory", _DISK, "hugepages")
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_CRASH_LOOP = "CrashLoopBackOff"
_CANNOT_START = "CannotStart"
_STUCK = _IMAGE | _CONFIG | {_CRASH_LOOP, _CANNOT_START}


@dataclass(frozen=True, slots=True)
class PodProblem:
    """A problem of one pod."""

    pod: str
    """Name of the pod; empty for a problem without a pod."""
    reason: str
    message: str
    """The problem and its remedy."""
    blocks: bool
    """It crash-loops: the service is not Ready, even if other pods serve. What else is wrong with
    one pod is no reason to call a service that serves not Ready."""

    @property
    def is_stuck(self) -> bool:
        """Return whether only a change of the spec, or of an object that it names, can help."""
        return self.reason in _STUCK

    def __str__(self) -> str:
        return f"pod {self.pod}: {self.message}" if self.pod else self.message


@dataclass(frozen=True, slots=True)
class ObjectWarning:
    """The newest Event of type Warning about a pod or a workload."""

    reason: str
    """Reason in CamelCase, such as FailedMount."""
    message: str


Warnings = Mapping[str, ObjectWarning]
"""By uid of the pod or workload."""


def diagnose(
    pods: Iterable[Pod],
    now: datetime,
    lost_nodes: frozenset[str] = frozenset(),
    warnings: Warnings = MappingProxyType({}),
) -> list[PodProblem]:
    """Return the problems of pods, those that block the service first, then by pod name.

    Args:
        now: the present time in UTC.
        lost_nodes: names of nodes that do not answer.
        warnings: Events about pods that do not start.
    """
    ordered = sorted(filter(is_counted, pods), key=lambda pod: str(pod["metadata"]["name"]))
    problems = [
        _on_lost_node(pod, lost_nodes) or diagnose_pod(pod, now) or _unmounted(pod, now, warnings)
        for pod in ordered
    ]
    return sorted((each for each in problems if each), key=lambda trouble: not trouble.blocks)


def is_counted(pod: Pod) -> bool:
    """Whether the pod counts: all do but routers that ended for good, which a ReplicaSet replaces
    and keeps."""
    has_ended = pod.get("status", {}).get("phase") in ("Failed", "Succeeded")
    return not (is_router(pod) and has_ended)


def is_router(pod: Pod) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/component") == naming.ROUTER)


def is_follower(pod: Pod) -> bool:
    """Whether the pod is of an engine that spans several, and has no server of its own."""
    labels = pod["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/component") == naming.FOLLOWER)


def node_of(pod: Pod) -> str:
    return str(pod.get("spec", {}).get("nodeName", ""))


def _on_lost_node(pod: Pod, lost_nodes: frozenset[str]) -> PodProblem | None:
    node = node_of(pod)
    if node not in lost_nodes:
        return None
    remedy = (
        f"bring {node} back, or delete the Node: its pods are then made elsewhere "
        "(the operator does that by itself once Kubernetes has given them up)"
    )
    return _problem(pod, "NodeLost", f"node {node} does not answer; {remedy}")


def diagnose_pod(pod: Pod, now: datetime) -> PodProblem | None:
    """The reason that helps most, or None for a pod that serves, starts or ends as it should."""
    if "deletionTimestamp" in pod["metadata"]:
        return None
    looks = (_unscheduled, _refused, _container_stuck, _looping, _failed, _creating)
    return next((trouble for look in looks if (trouble := look(pod, now))), None)


def is_ready(pod: Pod) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def ready_since(pod: Pod) -> datetime | None:
    """Return when the pod's readiness last changed, in UTC."""
    return parse_time(_condition(pod, "Ready").get("lastTransitionTime"))


def has_started(pod: Pod) -> bool:
    """Its containers run and passed their startup probes."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return bool(statuses) and all(each.get("started") for each in statuses)


def restart_count(pod: Pod) -> int:
    """Return how often the pod's containers were restarted."""
    return sum(each.get("restartCount", 0) for each in _containers(pod))


def parse_time(text: str | None) -> datetime | None:
    """A Kubernetes time, in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC) if text else None


def age_s(pod: Pod, now: datetime) -> float:
    """Seconds since the pod was made; 0 where the API does not say."""
    created = parse_time(pod["metadata"].get("creationTimestamp"))
    return max(0.0, (now - created).total_seconds()) if created else 0.0


def _condition(pod: Pod, kind: str) -> Mapping[str, Any]:
    listed = pod.get("status", {}).get("conditions", ())
    return next((each for each in listed if each["type"] == kind), {})


def _containers(pod: Pod) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _problem(pod: Pod, reason: str, message: str, blocks: bool = False) -> PodProblem:
    return PodProblem(str(pod["metadata"]["name"]), reason, message, blocks)


def _unscheduled(pod: Pod, now: datetime) -> PodProblem | None:
    placed = _condition(pod, "PodScheduled")
    if placed.get("status") != "False" or placed.get("reason") != "Unschedulable":
        return None
    message = placed.get("message", "no node fits")
    asked = _asks(pod)
    problem = f"asks for {asked} and fits no node" if asked else "fits no node"
    return _problem(pod, "Unschedulable", f"{problem}: {message}; {_placing_remedy(pod, message)}")


def is_placed(pod: Pod) -> bool:
    """Return whether a pod is on a node."""
    return bool(pod.get("spec", {}).get("nodeName"))


def roomless_s(pod: Pod, now: datetime) -> float | None:
    """Return the seconds for which no node has had room for a pod.

    Return None once a node has, or while something other than room is missing.
    """
    placed = _condition(pod, "PodScheduled")
    if placed.get("status") != "False" or placed.get("reason") != "Unschedulable":
        return None
    message = placed.get("message", "")
    if "Insufficient" not in message and _UNALLOCATED not in message:
        return None
    since = parse_time(placed.get("lastTransitionTime"))
    return (now - since).total_seconds() if since else age_s(pod, now)


def fits_place_of(pod: Pod, other: Pod) -> bool:
    """Return whether the resources that another pod frees when it ends are enough for a pod.

    Ephemeral storage counts only where the scheduler reports it as insufficient: engines of an
    earlier operator do not request any.
    """
    try:
        asked = _requests(pod)
        freed = _requests(other)
    except ValueError:  # a quantity in a form that the operator never writes, such as 1e3
        return False
    if f"Insufficient {_DISK}" not in _condition(pod, "PodScheduled").get("message", ""):
        asked.pop(_DISK, None)
    return all(size <= freed.get(name, 0) for name, size in asked.items())


def _requests(pod: Pod) -> dict[str, Decimal]:
    """Return the sums of resources and device claims by which the scheduler picks a node."""
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
    """Return a pod's extended resources, as `4 nvidia.com/gpu`, or the templates of its claims."""
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
    pool = _section(pod)
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
            f"make the ResourceClaimTemplate that {pool}.resourceClaims names in this namespace",
        ),
        ("Insufficient ephemeral-storage", _disk_remedy(pool)),
        ("untolerated taint", f"add the taint to {template}.tolerations"),
        ("node affinity/selector", f"correct {template}.nodeSelector or label a node"),
        ("persistentvolumeclaim", "make the claim that the pod names"),
        ("unbound immediate PersistentVolumeClaims", "bind the claim that the pod names"),
        ("Insufficient", f"lower {pool}.resources or add a node"),
    )

    return next(
        (remedy for words, remedy in remedies if words in message), f"see {pool}'s placement"
    )


def _section(pod: Pod) -> str:
    """Return the part of the spec that the pod is made of."""
    pool = naming.stable_pool(pool_of(pod))
    return f"spec.pools.{pool}" if pool else "spec.router"


def _memory_remedy(pod: Pod, pool: str) -> str:
    containers = pod.get("spec", {}).get("containers", ())
    requests = [each.get("resources", {}).get("requests", {}) for each in containers]
    amounts = " and ".join(str(each["memory"]) for each in requests if "memory" in each)
    return (
        f"its containers request {amounts or 'no'} memory, which is an estimate where {pool} says "
        f"nothing: set {pool}.resources.requests.memory to what they need, or add a node"
    )


def _disk_remedy(pool: str) -> str:
    return (
        f"set {pool}.resources.requests.ephemeral-storage to what the pod needs of its node's "
        f"disk, or give each pod a disk of its own by {pool}.modelCache.claimTemplate"
    )


def pool_of(pod: Pod) -> str:
    """The pool of an engine's pod; nothing for a router's."""
    return str(pod["metadata"].get("labels", {}).get(naming.POOL_LABEL, ""))


def _container_stuck(pod: Pod, now: datetime) -> PodProblem | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        message = waiting.get("message", "").strip()
        if reason in _IMAGE:
            return _problem(pod, reason, _image_message(container, reason, message))
        if reason in _CONFIG:
            remedy = "make the Secret or ConfigMap that it names, or correct the pool's settings"
            if "deadline exceeded" in message:  # the container runtime's answer, and not the spec's
                remedy = "the node is overloaded or its container runtime hangs; it is tried again"
            return _problem(pod, reason, f"{message or 'its container cannot be made'}; {remedy}")
        if reason == _CRASH_LOOP:
            return _problem(pod, reason, _crash_message(pod, container), True)
    return None


def _image_message(container: Mapping[str, Any], reason: str, message: str) -> str:
    image = container.get("image", "its image")
    if reason == "InvalidImageName":
        return f"{image!r} is no image name; correct spec.image"
    remedy = "check the name in spec.image, spec.imagePullSecrets and the registry"
    return f"image {image} cannot be pulled: {message or 'no reason given'}; {remedy}"


def _looping(pod: Pod, now: datetime) -> PodProblem | None:
    """Return the crash loop of a container, also between two crashes, when it runs and may be
    ready."""
    since = ready_since(pod)
    is_stable = is_ready(pod) and since and (now - since).total_seconds() >= STABLE_S
    for container in _containers(pod):
        often = container.get("restartCount", 0) >= LOOPING_RESTARTS
        if often and not is_stable and _crashed_lately(container, now):
            return _problem(pod, _CRASH_LOOP, _crash_message(pod, container), True)
    return None


def _refused(pod: Pod, now: datetime) -> PodProblem | None:
    """Return an engine's or router's own error that a restart cannot fix, from its first exit
    on."""
    if is_ready(pod):
        return None
    for container in _containers(pod):
        name = container.get("name", "")
        ended = _ended(container)
        is_own = name in (naming.ENGINE, naming.ROUTER)
        if is_own and ended.get("exitCode") == MISUSE and _crashed_lately(container, now):
            words = _last_words(ended) or f"see kubectl logs --previous {pod['metadata']['name']}"
            return _problem(pod, _CANNOT_START, f"{name} cannot start: {words}", True)
    return None


def stable_in_s(pod: Pod, now: datetime) -> float | None:
    """Seconds until a pod that is ready after crashes counts as stable."""
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
    """The last end of a container that is started again and again."""
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
    what = f"{name} has been restarted {times} times, last after it ended{code}"
    if ended.get("reason") == "OOMKilled":
        pool = _section(pod)
        return f"{what}: out of host memory; raise {pool}.resources.limits.memory"
    if message:
        return f"{what}: {message}"
    return f"{what}; see kubectl logs --previous {pod['metadata']['name']}"


def _last_words(ended: Mapping[str, Any]) -> str:
    """Return the line that says why a container ended, else the end of its log."""
    message = (ended.get("message") or "").strip()
    errors = [line for line in message.splitlines() if line.startswith("error: ")]
    return str(errors[-1] if errors else message)[-1024:]


def _failed(pod: Pod, now: datetime) -> PodProblem | None:
    """Return the failure of a pod that was evicted or that the kubelet refused.

    The StatefulSet creates its replacement.
    """
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    reason = status.get("reason") or "PodFailed"
    message = status.get("message", "").strip() or "no reason given"
    remedy = "it is being replaced"
    if f'EmptyDir volume "{_CACHE}"' in message:
        cache = f"{_section(pod)}.modelCache"
        remedy = f"raise {cache}.sizeLimit, or give each pod a disk by {cache}.claimTemplate"
    elif "ephemeral-storage" in message or "ephemeral local storage" in message:
        remedy = _disk_remedy(_section(pod))
    return _problem(pod, reason, f"{message}; {remedy}")


def _creating(pod: Pod, now: datetime) -> PodProblem | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting", {}).get("reason")
        age = age_s(pod, now)
        if waiting in ("ContainerCreating", "PodInitializing") and age >= CREATING_S:
            what = f"its containers are not made after {age / 60:.0f} min"
            remedy = "a large image may still be pulled, or a volume cannot be mounted"
            name = pod["metadata"]["name"]
            return _problem(
                pod, "ContainerCreating", f"{what}: {remedy}; kubectl describe pod {name}"
            )
    return None


def is_unmounted(pod: Pod, now: datetime) -> bool:
    """Whether a pod lacks its volumes or its network for longer than usual, so that its Events
    are worth reading."""
    return _is_mounting(pod) and age_s(pod, now) >= MOUNTING_S


def unmounted_recheck_s(pod: Pod, now: datetime) -> float | None:
    """Seconds until a pod that is being created should be looked at again; None for any other."""
    if not _is_mounting(pod):
        return None
    return max(0.0, MOUNTING_S - age_s(pod, now)) or EVENTS_S


def _is_mounting(pod: Pod) -> bool:
    """Whether a pod has a node, and neither volumes nor a network there: its images are pulled only
    then."""
    if "deletionTimestamp" in pod["metadata"] or not node_of(pod):
        return False
    if _condition(pod, "PodReadyToStartContainers").get("status") != "False":
        return False
    reasons = [each.get("state", {}).get("waiting", {}).get("reason") for each in _containers(pod)]
    return any(reason in ("ContainerCreating", "PodInitializing") for reason in reasons)


def _unmounted(pod: Pod, now: datetime, warnings: Warnings) -> PodProblem | None:
    if not is_unmounted(pod, now):
        return None
    name = pod["metadata"]["name"]
    if warning := warnings.get(str(pod["metadata"].get("uid", ""))):
        remedy = "make what it names in this namespace, or correct its name in the spec"
        if warning.reason not in ("FailedMount", "FailedAttachVolume"):
            remedy = f"kubectl describe pod {name}"
        return _problem(pod, warning.reason, f"{warning.message}; {remedy}")
    listed = ", ".join(_mounted_objects(pod)) or "no Secret, ConfigMap or claim"
    message = (
        f"has neither its volumes nor its network after {age_s(pod, now):.0f} s; it mounts {listed}"
        f"; kubectl describe pod {name}"
    )
    return _problem(pod, "ContainerCreating", message)


def _mounted_objects(pod: Pod) -> list[str]:
    """Return the objects that a pod's volumes are made of, as `Secret NAME`."""
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


WAIT_S = 30.0
"""Controllers need a moment, and a webhook that restarts is back by then."""


class WorkloadPods(NamedTuple):
    """A live Deployment or StatefulSet and how many pods it has."""

    live: Mapping[str, Any]
    pods: int
    """Pods that exist, terminating ones included."""
    reported: int | None
    """Pods that the service's status last reported; None before the first report."""


def missing_pods(
    workloads: Iterable[WorkloadPods],
    status: Mapping[str, Any],
    now: datetime,
    warnings: Warnings = MappingProxyType({}),
) -> list[PodProblem]:
    """Workloads that have lacked pods for too long.

    Args:
        status: of the service, as it is.
        warnings: Events about such workloads.
    """
    return [
        PodProblem("", "PodsNotMade", _message(each, warnings), False)
        for each in lacking_workloads(workloads, status, now)
    ]


def lacking_workloads(
    workloads: Iterable[WorkloadPods], status: Mapping[str, Any], now: datetime
) -> list[WorkloadPods]:
    """Return those that have lacked pods for too long."""
    return [*filter(_lacks, workloads)] if _progressing_s(status, now) >= WAIT_S else []


def missing_pods_due_s(
    workloads: Iterable[WorkloadPods], status: Mapping[str, Any], now: datetime
) -> float | None:
    """Seconds until missing pods become a problem; None where none are missing or they are one."""
    left_s = WAIT_S - _progressing_s(status, now)
    return left_s if left_s > 0 and any(map(_lacks, workloads)) else None


def _lacks(workload: WorkloadPods) -> bool:
    """Lacks pods now and in the last report: a pod that is being replaced is away for a moment.

    A Deployment's controller says that it failed, and may have seen a spec before it makes pods.
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
    """Words the problem with the API server's message, which a Deployment hands on and a
    StatefulSet tells in an Event."""
    kind = workload.live["kind"]
    name = workload.live["metadata"]["name"]
    look = f"kubectl describe {kind.lower()} {name}"
    warning = warnings.get(str(workload.live["metadata"].get("uid", "")))
    why = _failure(workload.live) or (warning.message if warning else "")
    why = why or f"a quota or an admission policy may refuse them; {look}"
    return f"{kind} {name} has {workload.pods} of {_desired(workload.live)} pods: {why}"


def _failure(live: Mapping[str, Any]) -> str:
    """Return why a Deployment's controller could not create a pod; empty where it could."""
    listed = live.get("status", {}).get("conditions", ())
    failed = (each for each in listed if each["type"] == "ReplicaFailure")
    return next((each.get("message", "") for each in failed if each["status"] == "True"), "")


def _progressing_s(status: Mapping[str, Any], now: datetime) -> float:
    """Seconds since the service began to progress; 0 where it does not."""
    progressing = (each for each in status.get("conditions", ()) if each["type"] == PROGRESSING)
    condition = next(progressing, {"status": "False"})
    since = parse_time(condition.get("lastTransitionTime"))
    return (now - since).total_seconds() if since and condition["status"] == "True" else 0.0
