"""Which resources the server knows, and how discovery describes them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Resource:
    """One plural under one group and version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: frozenset[str] = frozenset()
    short_names: tuple[str, ...] = ()
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    columns: tuple[Mapping[str, str], ...] = field(default=(), hash=False, compare=False)
    scale_paths: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    has_generation: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The name as it stands in messages: `deployments.apps`, `services`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def is_custom(self) -> bool:
        return bool(self.schema)


_STATUS = frozenset({"status"})
_SCALABLE = frozenset({"status", "scale"})
_SCALE_PATHS = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
}

BUILTINS = (
    Resource("", "v1", "namespaces", "Namespace", False, _STATUS, ("ns",), has_generation=False),
    Resource("", "v1", "configmaps", "ConfigMap", short_names=("cm",), has_generation=False),
    Resource("", "v1", "secrets", "Secret", has_generation=False),
    Resource("", "v1", "services", "Service", True, _STATUS, ("svc",), has_generation=False),
    Resource("", "v1", "serviceaccounts", "ServiceAccount", True, has_generation=False),
    Resource("", "v1", "events", "Event", short_names=("ev",), has_generation=False),
    Resource("", "v1", "pods", "Pod", True, _STATUS, ("po",), has_generation=False),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True, _STATUS, ("pvc",)),
    Resource("apps", "v1", "deployments", "Deployment", True, _SCALABLE, scale_paths=_SCALE_PATHS),
    Resource(
        "apps", "v1", "statefulsets", "StatefulSet", True, _SCALABLE, scale_paths=_SCALE_PATHS
    ),
    Resource("batch", "v1", "jobs", "Job", True, _STATUS),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True, _STATUS),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("coordination.k8s.io", "v1", "leases", "Lease", has_generation=False),
    Resource("events.k8s.io", "v1", "events", "Event", has_generation=False),
    Resource(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        False,
        _STATUS,
        ("crd", "crds"),
    ),
)


def from_crd(crd: Mapping[str, Any]) -> list[Resource]:
    """The resources that a CustomResourceDefinition serves, one a version."""
    spec = crd["spec"]
    return [_version(spec, version) for version in spec["versions"] if version.get("served")]


def _version(spec: Mapping[str, Any], version: Mapping[str, Any]) -> Resource:
    names = spec["names"]
    subresources = version.get("subresources", {})
    return Resource(
        group=spec["group"],
        version=version["name"],
        plural=names["plural"],
        kind=names["kind"],
        namespaced=spec["scope"] == "Namespaced",
        subresources=frozenset(subresources),
        short_names=tuple(names.get("shortNames", ())),
        schema=version["schema"]["openAPIV3Schema"],
        columns=tuple(version.get("additionalPrinterColumns", ())),
        scale_paths=subresources.get("scale", {}),
    )


def group_list(resources: Iterable[Resource]) -> dict[str, Any]:
    """The body of GET /apis."""
    groups: dict[str, list[str]] = {}
    for resource in resources:
        versions = groups.setdefault(resource.group, []) if resource.group else []
        if resource.version not in versions:
            versions.append(resource.version)
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(name, versions) for name, versions in groups.items()],
    }


def _group(name: str, versions: list[str]) -> dict[str, Any]:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def resource_list(group_version: str, resources: Iterable[Resource]) -> dict[str, Any]:
    """The body of GET /api/v1 and /apis/GROUP/VERSION."""
    entries = [entry for resource in resources for entry in _entries(resource)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": entries,
    }


def _entries(resource: Resource) -> list[dict[str, Any]]:
    main = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": VERBS,
        "shortNames": list(resource.short_names),
    }
    subs = [
        {
            "name": f"{resource.plural}/{sub}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": "Scale" if sub == "scale" else resource.kind,
            "verbs": ["get", "patch", "update"],
        }
        for sub in sorted(resource.subresources)
    ]
    return [main, *subs]


def openapi_index(resources: Iterable[Resource]) -> dict[str, Any]:
    """The body of GET /openapi/v3."""
    prefixes = {_prefix(resource) for resource in resources}
    return {"paths": {p: {"serverRelativeURL": f"/openapi/v3/{p}"} for p in sorted(prefixes)}}


def openapi_document(prefix: str, resources: Iterable[Resource]) -> dict[str, Any]:
    """What clients look for in OpenAPI: that PATCH takes `fieldValidation`."""
    paths = {
        _item_path(resource): {"patch": _patch_operation(resource)}
        for resource in resources
        if _prefix(resource) == prefix
    }
    return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}


def _prefix(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"


def _item_path(resource: Resource) -> str:
    scope = "namespaces/{namespace}/" if resource.namespaced else ""
    return f"/{_prefix(resource)}/{scope}{resource.plural}/{{name}}"


def _patch_operation(resource: Resource) -> dict[str, Any]:
    gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string"}}
        for name in ("dryRun", "fieldManager", "fieldValidation")
    ]
    return {
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": gvk,
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}},
    }
