"""Where a request's path leads: discovery, or a resource, an object, a subresource of it."""

from dataclasses import dataclass

from ullage_kubeapi.objects import Objects
from ullage_kubeapi.resources import Resource
from ullage_kubeapi.status import no_such_path


@dataclass(frozen=True)
class Target:
    """A resource path; `name` and `subresource` are empty for a collection."""

    resource: Resource
    namespace: str
    name: str
    subresource: str


def target(path: str, objects: Objects) -> Target:
    """Parses /api/V/... and /apis/G/V/...; raises NotFound for anything unknown."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"]:
        group = ""
        version = parts[1]
        rest = parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group = parts[1]
        version = parts[2]
        rest = parts[3:]
    else:
        raise no_such_path()
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace = rest[1]
        rest = rest[2:]
    if not rest or len(rest) > 3:
        raise no_such_path()
    resource = objects.resources.get((group, version, rest[0]))
    if resource is None or (namespace and not resource.namespaced):
        raise no_such_path()
    name, subresource = (*rest[1:], "", "")[:2]
    if subresource and subresource not in resource.subresources:
        raise no_such_path()
    if name and resource.namespaced and not namespace:
        raise no_such_path()
    return Target(resource, namespace, name, subresource)
