"""How each list of an object merges: as a map by keys, as a set, or whole.

Custom resources say it in their schema (`x-kubernetes-list-type`); for built-in kinds the table
below repeats what Kubernetes' own types declare, by the name of the field that holds the list.
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAP_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "readinessGates": ("conditionType",),
}
_SETS = frozenset({"finalizers"})
_ATOMIC_MAPS = frozenset(
    {"selector", "nodeSelector", "podSelector", "namespaceSelector", "labelSelector"}
    | {"fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef"}
)
_KEY_DEFAULTS = {"protocol": "TCP"}


class ListTypes:
    """Answers for one kind: `schema` of a custom resource, or nothing for a built-in one."""

    def __init__(self, schema: Schema | None) -> None:
        self._schema = schema

    def child(self, schema: Schema | None, name: str) -> Schema | None:
        """The schema of field `name`, where one is known."""
        if schema is None:
            return None
        if name in schema.get("properties", {}):
            return schema["properties"][name]
        extra = schema.get("additionalProperties")
        return extra if isinstance(extra, Mapping) else {}

    def root(self) -> Schema | None:
        return self._schema

    def keys(self, path: tuple[str, ...], schema: Schema | None) -> tuple[str, ...]:
        """The keys of a list that merges as a map; empty for every other list."""
        if path[:1] != ("metadata",) and self._schema is not None:
            if (schema or {}).get("x-kubernetes-list-type") == "map":
                return tuple((schema or {})["x-kubernetes-list-map-keys"])
            return ()
        if path == ("spec", "ports"):
            return ("port", "protocol")
        if path[-1] == "ports":
            return ("containerPort", "protocol")
        return _MAP_KEYS.get(path[-1], ())

    def is_set(self, path: tuple[str, ...], schema: Schema | None) -> bool:
        if path[:1] != ("metadata",) and self._schema is not None:
            return (schema or {}).get("x-kubernetes-list-type") == "set"
        return path[-1] in _SETS

    def is_atomic_map(self, path: tuple[str, ...], schema: Schema | None) -> bool:
        if self._schema is not None:
            return (schema or {}).get("x-kubernetes-map-type") == "atomic"
        return bool(path) and path[-1] in _ATOMIC_MAPS


def item_key(item: Any, keys: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """What identifies one item of a list that merges as a map."""
    return tuple((key, item.get(key, _KEY_DEFAULTS.get(key))) for key in keys)
