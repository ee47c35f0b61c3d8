"""Limits how fast pods with an outdated template are replaced.

Kubernetes replaces the pods of a StatefulSet one at a time, from last to first. If maxUnavailable
allows more, the operator deletes the next pods itself, in the same order, so that both agree on
which pod is next. If the operator stops, Kubernetes continues one pod at a time.

An operator upgrade changes the router pods of every service. A Deployment gets the new template
when it is the service's turn, or earlier if the service is edited.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage_operator.api import naming
from ullage_operator.conditions.conditions import workload_of
from ullage_operator.conditions.pods import is_ready
from ullage_operator.policy.pool_sizes import live_replicas, resized
from ullage_operator.rollout.facts import template_hash

Manifest = dict[str, Any]
Pod = Mapping[str, Any]


def pods_to_replace(
    live: Mapping[str, Any] | None, pods: Iterable[Pod], most_unavailable: int
) -> list[Pod]:
    """Return the pods with an outdated template that the operator should delete now.

    The pod that Kubernetes will replace next by itself is not included.

    Args:
        live: the StatefulSet, or None if it does not exist.
        pods: the pods of the StatefulSet.
        most_unavailable: the maximum number of pods that may be unavailable at once.
    """
    if live is None or most_unavailable < 2:
        return []
    status = live.get("status", {})
    revision = status.get("updateRevision", "")
    is_seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    if not revision or not is_seen:
        return []

    serving = [pod for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
    missing = int(live["spec"].get("replicas", 1)) - len(serving)
    outdated = [pod for pod in serving if _pod_revision(pod) not in ("", revision)]
    outdated.sort(key=_ordinal, reverse=True)
    return outdated[: max(0, most_unavailable - missing)]


def _pod_revision(pod: Pod) -> str:
    return str((pod["metadata"].get("labels") or {}).get(naming.STATEFUL_SET_REVISION, ""))


def _ordinal(pod: Pod) -> int:
    index = str(pod["metadata"]["name"]).rpartition("-")[2]
    return int(index) if index.isdecimal() else -1


@dataclass(frozen=True, slots=True)
class RouterRoll:
    """The decision on whether to apply a new pod template to a service's routers."""

    objects: tuple[Manifest, ...]
    """The router's objects to apply."""
    held: tuple[Manifest, ...] = ()
    """Live router objects that must stay unchanged for now."""
    is_waiting: bool = False
    """Whether the new template waits until fewer services are being rolled out."""
    is_rolling: bool = False
    """Whether pods with the new template are replacing older ones."""


def roll_routers(
    desired: Sequence[Manifest],
    live: Mapping[Any, Mapping[str, Any]],
    is_edited: bool,
    may_roll: bool,
) -> RouterRoll:
    """Decide whether to apply this operator's pod template to a service's routers now.

    Args:
        desired: the router's objects.
        live: the objects of the service by kind and name.
        is_edited: whether the service has been edited since its status was last written.
        may_roll: whether the rollout queue allows the service to start a rollout that was not
            triggered by an edit.
    """
    [deployment] = [item for item in desired if item["kind"] == "Deployment"]
    name = deployment["metadata"]["name"]
    wanted_hash = template_hash(deployment)
    hashes = {naming.TEMPLATE_HASH: wanted_hash}
    objects = [_annotated(item, hashes) if item is deployment else item for item in desired]

    present = live.get(("Deployment", name))
    if present is None:
        return RouterRoll(tuple(objects))

    annotations = present["metadata"].get("annotations") or {}
    is_other = annotations.get(naming.TEMPLATE_HASH) != wanted_hash
    size = int(deployment["spec"]["replicas"])
    routers = workload_of(name, size, present)
    if not is_other:
        is_full = routers.settled or live_replicas(present) != size
        return RouterRoll(tuple(objects), is_rolling=not is_full)

    # A Deployment of an older operator, without the hash, looks the same as an edited one.
    is_edited = is_edited or naming.TEMPLATE_HASH not in annotations
    if may_roll or is_edited or not routers.ready:
        return RouterRoll(tuple(objects), is_rolling=True)

    kept = [_kept(item, live) for item in objects]
    resizes = live_replicas(present) != size
    applied = [resized(present, size)] if resizes else []
    applied += [item for item in kept if item["kind"] != "Deployment"]
    return RouterRoll(tuple(applied), (dict(present),), is_waiting=True)


def _annotated(item: Manifest, more: Mapping[str, str]) -> Manifest:
    annotations = item["metadata"].get("annotations", {}) | dict(more)
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}}


def _kept(item: Manifest, live: Mapping[Any, Mapping[str, Any]]) -> Manifest:
    """Return an object of the routers, with the live configuration if it is their ConfigMap.

    The rollout file in that ConfigMap is still replaced, because running routers reload it whenever
    it changes.
    """
    config = live.get((item["kind"], item["metadata"]["name"]), {}).get("data", {})
    if item["kind"] != "ConfigMap" or naming.ROUTER_CONFIG not in config:
        return item
    return {**item, "data": {**item["data"], naming.ROUTER_CONFIG: config[naming.ROUTER_CONFIG]}}
