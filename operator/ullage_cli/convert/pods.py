"""Converts the parts of pods that several formats share: resources, environment and placement."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ullage_cli.convert.source import SourceDocument, set_if_valid
from ullage_cli.manifest_draft import Draft
from ullage_cli.vllm_arguments import POOL

_SECRET = re.compile("TOKEN(?!S|IZ)|KEY|SECRET|PASSWORD", re.IGNORECASE)
"""Matches names of variables whose values are secret."""

TEMPLATE = f"{POOL}.podTemplate"
GPU_SUFFIXES = (".com/gpu", "/gpu", ".com/tpu")
"""Ends of the names of resources that are accelerators."""

_GPU_PARTS = ("nvidia.com/mig-", "nvidia.com/gpu.shared")
"""Names of parts of NVIDIA's GPUs begin with one of these."""

_ORDINARY = ("cpu", "memory", "ephemeral-storage", "hugepages-")
"""Names of Kubernetes' own resources begin with one of these."""

_DEFAULT_GPU = "nvidia.com/gpu"
POD_FIELDS = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "nodeName",
    "volumes",
    "initContainers",
    "terminationGracePeriodSeconds",
    "hostNetwork",
    "dnsPolicy",
    "dnsConfig",
    "hostAliases",
    "preemptionPolicy",
)
"""Fields of pods that `podTemplate` may have, too."""


def set_resources(
    draft: Draft, resources: Mapping[str, Any], name: str, gpu: str = _DEFAULT_GPU
) -> None:
    """Set a pool's resources and its number of GPUs.

    Args:
        draft: the manifest under construction.
        resources: `requests` and `limits`, by resource name.
        name: path of the resources, for messages.
        gpu: name of a resource that the source declares as its GPUs.
    """
    kept: dict[str, dict[str, Any]] = {}
    for kind, amounts in resources.items():
        if kind not in ("requests", "limits") or not isinstance(amounts, dict):
            draft.lose(f"{name}.{kind}", "the pool's resources are requests and limits only")
            continue
        for resource, amount in amounts.items():
            own = f"{name}.{kind}.{resource}"
            if resource == gpu or _is_gpu(resource):
                _set_gpus(draft, resource, float(str(amount)), own)
            elif not resource.startswith(_ORDINARY):
                _lose_device(draft, own, float(str(amount)))
            else:
                kept.setdefault(kind, {})[resource] = amount
    if kept:
        set_if_valid(draft, name, f"{POOL}.resources", kept)


def _is_gpu(resource: str) -> bool:
    return resource.endswith(GPU_SUFFIXES) or resource.startswith(_GPU_PARTS)


def _lose_device(draft: Draft, name: str, count: float) -> None:
    """Record an extended resource as lost, and keep the service off the CPU."""
    draft.lose(
        name,
        "not known as a GPU; if it is one, name it in gpuResourceName, and otherwise add it to "
        "resources of the pool if the engines need it",
    )
    if count and draft.get(f"{POOL}.gpus") is None:
        reason = "the source asks for a device that may be no GPU; check this"
        draft.set(f"{POOL}.gpus", 1, reason)


def _set_gpus(draft: Draft, resource: str, count: float, name: str) -> None:
    """Set the GPUs of an engine, which are those of its ranks."""
    if count == 0:
        return
    ranks = draft.get(f"{POOL}.parallelism") or {"tensor": 1, "pipeline": 1}
    needed = ranks["tensor"] * ranks["pipeline"]
    draft.set(f"{POOL}.gpus", needed)
    draft.reasons.pop(f"{POOL}.gpus", None)
    if count < 1:
        draft.lose(name, f"{count:g} of a GPU; an engine takes whole GPUs, or MIG slices")
    elif count != needed:
        draft.lose(
            name,
            f"{count:g} GPUs for {needed} ranks; an engine has a GPU for each rank, so raise gpus "
            "and parallelism together to use more",
        )
    if resource != _DEFAULT_GPU:
        draft.set(f"{POOL}.gpuResourceName", resource)


def set_device(draft: Draft) -> None:
    """Set the device to the CPU if the source asked for no accelerator."""
    if draft.get(f"{POOL}.gpus") is None and draft.get(f"{POOL}.parallelism") is None:
        draft.set("spec.device", "CPU", "the source asks for no GPU; write CUDA to use one")
        draft.set(f"{POOL}.gpus", 1)


def set_pod_fields(draft: Draft, pod: SourceDocument) -> None:
    """Set the fields of the engines' pods that a source's pod has, too."""
    for field in POD_FIELDS:
        value = pod.take(field)
        if value not in (None, [], {}, ""):
            set_if_valid(draft, pod.name_of(field), f"{TEMPLATE}.spec.{field}", value)

    if account := pod.take("serviceAccountName"):
        draft.set("spec.serviceAccount.name", account)
    if secrets := pod.take("imagePullSecrets"):
        draft.set("spec.imagePullSecrets", [{"name": each["name"]} for each in secrets])


def set_metadata(draft: Draft, metadata: Mapping[str, Any], name: str) -> None:
    """Set labels and annotations of the engines' pods."""
    for field in ("labels", "annotations"):
        if values := metadata.get(field):
            set_if_valid(draft, f"{name}.{field}", f"{TEMPLATE}.metadata.{field}", values)


def set_env(draft: Draft, variables: Sequence[Mapping[str, Any]], name: str) -> None:
    """Set environment variables of the engine's container."""
    for variable in variables:
        own = f"{name}[{variable.get('name')}]"
        if str(variable.get("name", "")).startswith(("VLLM_", "LMCACHE_")):
            engine = "vLLM's own server and LMCache read it"
            draft.lose(own, f"{engine}; set fields of the manifest, or podTemplate's env")
            continue
        if variable.get("value") and _SECRET.search(str(variable.get("name", ""))):
            remedy = "its name says that it is secret; put it into a Secret"
            draft.lose(own, f"{remedy}, and name that in podTemplate's env (secretKeyRef)")
            continue
        _add_to_container(draft, own, "env", dict(variable))


def set_mounts(draft: Draft, mounts: Sequence[Mapping[str, Any]], name: str) -> None:
    """Set volume mounts of the engine's container."""
    for mount in mounts:
        _add_to_container(draft, f"{name}[{mount.get('name')}]", "volumeMounts", dict(mount))


def _add_to_container(draft: Draft, name: str, field: str, value: dict[str, Any]) -> None:
    path = f"{TEMPLATE}.spec.containers"
    containers = draft.get(path) or [{"name": "engine"}]
    [engine] = containers
    changed = engine | {field: [*engine.get(field, ()), value]}
    set_if_valid(draft, name, path, [changed])
