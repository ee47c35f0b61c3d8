"""Defaults and checks of the built-in kinds: the part of them that operators meet."""

from collections.abc import Iterator, Mapping
from typing import Any

from ullage_kubeapi.resources import Resource
from ullage_kubeapi.status import cause

Object = dict[str, Any]

_STATEFULSET_MUTABLE = frozenset(
    {"replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit"}
    | {"persistentVolumeClaimRetentionPolicy", "minReadySeconds"}
)


def with_defaults(resource: Resource, obj: Object) -> Object:
    """`obj` as the server completes it; changes `obj` in place and returns it."""
    spec = obj.get("spec")
    if not isinstance(spec, dict):
        return obj
    if resource.kind == "Service":
        _service(spec)
    elif resource.kind in ("Deployment", "StatefulSet"):
        _workload(resource.kind, spec)
    return obj


def _service(spec: Object) -> None:
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    spec.setdefault("clusterIP", "10.96.0.10")
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    spec.setdefault("internalTrafficPolicy", "Cluster")
    for port in spec.get("ports", ()):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])


def _workload(kind: str, spec: Object) -> None:
    spec.setdefault("replicas", 1)
    spec.setdefault("revisionHistoryLimit", 10)
    rolling = {"type": "RollingUpdate"}
    if kind == "Deployment":
        limits = {"maxSurge": "25%", "maxUnavailable": "25%"}
        spec.setdefault("strategy", {**rolling, "rollingUpdate": limits})
        spec.setdefault("progressDeadlineSeconds", 600)
    else:
        spec.setdefault("updateStrategy", {**rolling, "rollingUpdate": {"partition": 0}})
        spec.setdefault("podManagementPolicy", "OrderedReady")
    _pod(spec.get("template", {}).get("spec", {}))


def _pod(spec: Object) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    for container in [*spec.get("containers", ()), *spec.get("initContainers", ())]:
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("imagePullPolicy", "IfNotPresent")
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")


def problems(
    resource: Resource, obj: Mapping[str, Any], old: Mapping[str, Any] | None
) -> Iterator[dict[str, str]]:
    """What validation finds, as causes of an Invalid status."""
    spec = obj.get("spec") or {}
    if resource.kind in ("Deployment", "StatefulSet"):
        yield from _workload_problems(spec)
    if old is None:
        return
    before = old.get("spec") or {}
    if resource.kind == "StatefulSet":
        changed = {
            k for k in {*spec, *before} - _STATEFULSET_MUTABLE if spec.get(k) != before.get(k)
        }
        if changed:
            message = (
                "Forbidden: updates to statefulset spec for fields other than 'replicas', "
                "'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', "
                "'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden"
            )
            yield cause("FieldValueForbidden", "spec", message)
    if resource.kind == "Deployment" and spec.get("selector") != before.get("selector"):
        yield cause("FieldValueInvalid", "spec.selector", "field is immutable")
    if resource.kind == "ConfigMap" and old.get("immutable") and obj.get("data") != old.get("data"):
        yield cause("FieldValueForbidden", "data", "field is immutable when `immutable` is set")


def _workload_problems(spec: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    template = spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    wanted = (spec.get("selector") or {}).get("matchLabels") or {}
    if not wanted:
        yield cause("FieldValueRequired", "spec.selector", "Required value")
    elif not wanted.items() <= labels.items():
        message = "Invalid value: `selector` does not match template `labels`"
        yield cause("FieldValueInvalid", "spec.template.metadata.labels", message)
    containers = (template.get("spec") or {}).get("containers") or []
    if not containers:
        yield cause("FieldValueRequired", "spec.template.spec.containers", "Required value")
    for index, container in enumerate(containers):
        if not container.get("image"):
            at = f"spec.template.spec.containers[{index}].image"
            yield cause("FieldValueRequired", at, "Required value")
