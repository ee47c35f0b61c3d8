"""Caches the objects of all watched kinds, fed by watch events and periodic sweeps.

Reconciliations read from the cache instead of the API server. The cache does no I/O. It also
records which kinds the operator cannot list or watch, and why.

Events for different objects may arrive in any order. They do not reveal when all existing objects
have been delivered, nor which objects were deleted while no watch was active. A sweep reveals both,
because it lists the names and versions of all objects.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ullage_operator.api.bases import base_names
from ullage_operator.api.naming import BASE, FIELD_MANAGER, HTTP_ROUTE, JOB, POD, SERVICE, Kind
from ullage_operator.api.renames import LAST_APPLIED, dropped_fields

Object = dict[str, Any]

Name = tuple[str, str]
"""An object's namespace and name."""
_INSTANCE = "app.kubernetes.io/instance"
_POD_SPEC = ("nodeName", "priority")
_CONTAINER = ("name", "image", "resources", "ports")
_HAS_STATUS = frozenset({SERVICE.name, POD.name, "Deployment", "StatefulSet", JOB.name, HTTP_ROUTE})
"""Kinds whose status the planner reads. The cache drops the status of all other kinds."""
_CREATED = [{"manager": FIELD_MANAGER, "operation": "Update"}]
"""The managedFields to cache for an object whose fields `claim_fields` has not yet claimed."""


class ServiceKey(NamedTuple):
    """The namespace and name of an LLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Scope(NamedTuple):
    """What one watch covers: a kind in one namespace (empty for all namespaces)."""

    kind: Kind
    namespace: str


class Visibility(Enum):
    """Whether the operator can list and watch the objects of a scope."""

    UNKNOWN = "not listed yet"
    SEEN = "listed"
    ABSENT = "the API server does not serve the kind"
    DENIED = "the operator may not"
    FAILING = "not listable so far"


class Denied(NamedTuple):
    """A permission that the operator lacks."""

    verb: str
    resource: str
    """The resource, for example statefulsets.apps."""
    namespace: str
    """Namespace of the denied request (empty for all namespaces)."""

    def __str__(self) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return f"{self.verb} {self.resource} {where}"


@dataclass(slots=True)
class _Collection:
    """The cached objects of one scope, and the result of its last sweep."""

    visibility: Visibility = Visibility.UNKNOWN
    reason: str = ""
    """The verb that was denied, or the error that prevents listing the scope."""
    objects: dict[Name, Object] = field(default_factory=dict)
    swept: int = -1
    """The resourceVersion of the last sweep (-1 before the first sweep)."""
    expected: dict[Name, int] = field(default_factory=dict)
    """Versions of objects that the last sweep listed but that no event has delivered yet."""
    deleted: dict[Name, int] = field(default_factory=dict)
    """Resource versions at which objects have been deleted since the last sweep."""
    unconfirmed: set[Name] = field(default_factory=set)
    """Cached objects from before a restore of etcd. All events about them are newer."""

    def version(self, name: Name) -> int:
        """Return a cached object's version, which events must exceed to be newer."""
        return 0 if name in self.unconfirmed else version_of(self.objects[name])

    def has_newer_history(self, versions: Mapping[Name, int], revision: int) -> bool:
        """Return whether the cache has seen versions that a consistent list no longer has."""
        return revision < self.swept or any(
            version < self.version(name) <= revision
            for name, version in versions.items()
            if name in self.objects
        )

    def is_outdated(self, name: Name, version: int) -> bool:
        """Return whether the cache already has this version or a newer one, or saw it deleted."""
        if name in self.objects:
            return version <= self.version(name)
        if version <= self.deleted.get(name, -1):
            return True
        return version <= self.swept and name not in self.expected

    def on_seen(self, name: Name, version: int) -> None:
        if version >= self.expected.get(name, version + 1):
            del self.expected[name]


class Cache:
    """Caches objects by scope, and by the service that they belong to.

    Args:
        scopes: the scopes to cache.
        wake: called for every service that a change affects, but only once each scope has been
            listed or found to be unavailable. A plan made earlier would miss existing objects.
    """

    def __init__(self, scopes: Iterable[Scope], wake: Callable[[ServiceKey], None]) -> None:
        self._collections = {scope: _Collection() for scope in scopes}
        self._by_service: dict[ServiceKey, dict[tuple[Kind, str], Object]] = {}
        self._wake = wake
        self._complete = False

    # Updates by events and sweeps.

    def changed(self, scope: Scope, obj: Object) -> None:
        """Cache an object that was created, modified or listed."""
        collection = self._collections[scope]
        name = _name_of(obj)
        if not collection.is_outdated(name, version_of(obj)):
            previous = collection.objects.get(name)
            kept = self._set(scope, obj)
            if previous is not None and key_of(scope.kind, previous) != key_of(scope.kind, obj):
                self._notify(key_of(scope.kind, previous))
            if previous is None or _is_change(previous, kept):
                self._notify_of(scope.kind, obj)
        collection.on_seen(name, version_of(obj))
        self._check_seen(scope)

    def deleted(self, scope: Scope, obj: Object) -> None:
        """Remove an object that was deleted or is no longer watched."""
        collection = self._collections[scope]
        name = _name_of(obj)
        if name in collection.objects and collection.version(name) <= version_of(obj):
            self._drop(scope, name)
        collection.deleted[name] = max(version_of(obj), collection.deleted.get(name, 0))
        collection.on_seen(name, version_of(obj))
        self._check_seen(scope)

    def swept(self, scope: Scope, versions: Mapping[Name, int], revision: int) -> bool:
        """Record a sweep, and drop older objects that the sweep did not list.

        The scope counts as fully visible once events have delivered all listed objects.

        The result is whether versions have gone back, because etcd was restored from a backup.
        Earlier and later versions cannot be compared, so events must deliver all objects again.

        Args:
            scope: the swept scope.
            versions: versions of all objects, by namespace and name.
            revision: the resourceVersion of the list.
        """
        collection = self._collections[scope]
        is_restored = collection.has_newer_history(versions, revision)
        if is_restored:
            collection.deleted = {}
            collection.unconfirmed = set(collection.objects)

        collection.swept = revision
        collection.deleted = {n: v for n, v in collection.deleted.items() if v > revision}
        collection.expected = {
            name: version
            for name, version in versions.items()
            if version > collection.deleted.get(name, -1)
            and (name not in collection.objects or version > collection.version(name))
        }
        gone = [
            name
            for name in collection.objects
            if name not in versions and collection.version(name) <= revision
        ]
        for name in gone:
            self._drop(scope, name)
        self._check_seen(scope)
        return is_restored

    def absent(self, scope: Scope) -> bool:
        """Record that the API server does not serve the kind. Return whether this is new."""
        return self._lose(scope, Visibility.ABSENT, "")

    def denied(self, scope: Scope, verb: str) -> bool:
        """Record that the operator may not list or watch a kind. Return whether this is new."""
        return self._lose(scope, Visibility.DENIED, verb)

    def failing(self, scope: Scope, reason: str) -> bool:
        """Record that a scope cannot be listed. Return whether this is new.

        A scope that was listed before is still treated as visible.
        """
        collection = self._collections[scope]
        return collection.visibility is not Visibility.SEEN and self._lose(
            scope, Visibility.FAILING, reason
        )

    def _lose(self, scope: Scope, visibility: Visibility, reason: str) -> bool:
        collection = self._collections[scope]
        is_new = collection.visibility is not visibility
        for name in list(collection.objects):
            self._drop(scope, name)
        self._collections[scope] = _Collection(visibility, reason)
        self._check_complete()
        if is_new:
            self._wake_all(scope.namespace)
        return is_new

    # Updates by the operator's own writes.

    def written(self, obj: Object) -> None:
        """Cache the object returned by a write, before its watch event arrives.

        The write does not wake a service. The object is dropped if it is older than a known
        deletion.
        """
        for scope, collection in self._collections.items():
            if (scope.kind.api_version, scope.kind.name) != (obj["apiVersion"], obj["kind"]):
                continue
            if scope.namespace not in ("", obj["metadata"]["namespace"]):
                continue
            is_seen = collection.visibility is Visibility.SEEN
            if is_seen and not collection.is_outdated(_name_of(obj), version_of(obj)):
                self._set(scope, obj)

    # Queries of reconciliations.

    @property
    def complete(self) -> bool:
        """Return whether every scope has been listed once or is known to be unavailable."""
        return self._complete

    def service(self, key: ServiceKey) -> Object | None:
        return self._by_service.get(key, {}).get((SERVICE, key.name))

    def base(self, namespace: str, name: str) -> Object | None:
        """Return an LLMServiceBase, or None if it does not exist or is not visible."""
        for collection in self._of(BASE, namespace):
            if obj := collection.objects.get((namespace, name)):
                return obj
        return None

    def services(self) -> list[ServiceKey]:
        return [key for key in self._by_service if self.service(key) is not None]

    def owned(self, key: ServiceKey) -> list[Object]:
        """Return the objects with the service's and the operator's labels, regardless of owner."""
        objects = self._by_service.get(key, {})
        return [obj for (kind, _), obj in objects.items() if kind not in (SERVICE, POD)]

    def pods(self, key: ServiceKey) -> list[Object]:
        objects = self._by_service.get(key, {})
        return [obj for (kind, _), obj in objects.items() if kind == POD]

    def sees(self, kind: Kind, namespace: str) -> bool:
        """Return whether the cache has all objects of a kind in a namespace."""
        return all(
            collection.visibility is Visibility.SEEN for collection in self._of(kind, namespace)
        )

    def serves(self, kind: Kind, namespace: str) -> bool:
        """Return whether the API server serves the kind (True until a response says otherwise)."""
        return all(c.visibility is not Visibility.ABSENT for c in self._of(kind, namespace))

    def missing(self, namespace: str) -> list[Denied]:
        """Return the permissions that the operator lacks to see a namespace's objects."""
        return [
            Denied(collection.reason, scope.kind.qualified, scope.namespace)
            for scope, collection in self._collections.items()
            if collection.visibility is Visibility.DENIED and scope.namespace in ("", namespace)
        ]

    def unlisted(self, namespace: str) -> list[str]:
        """Return the served kinds that cannot be listed in a namespace, with the reasons."""
        return [
            f"{scope.kind.qualified}: {collection.reason}"
            for scope, collection in self._collections.items()
            if collection.visibility is Visibility.FAILING and scope.namespace in ("", namespace)
        ]

    def is_behind(self, scope: Scope) -> bool:
        """Return whether events have not yet delivered all objects of the last sweep."""
        return bool(self._collections[scope].expected)

    def counts(self) -> dict[str, int]:
        """Return the number of objects by kind."""
        counts: dict[str, int] = {}
        for scope, collection in self._collections.items():
            counts[scope.kind.name] = counts.get(scope.kind.name, 0) + len(collection.objects)
        return counts

    def _of(self, kind: Kind, namespace: str) -> Iterator[_Collection]:
        for scope, collection in self._collections.items():
            if scope.kind == kind and scope.namespace in ("", namespace):
                yield collection

    # Storage.

    def _set(self, scope: Scope, obj: Object) -> Object:
        kind = scope.kind
        namespace, name = _name_of(obj)
        collection = self._collections[scope]
        if previous := collection.objects.get((namespace, name)):
            self._unindex(kind, previous)
        kept = slim(kind, obj)
        collection.objects[namespace, name] = kept
        collection.unconfirmed.discard((namespace, name))
        self._by_service.setdefault(key_of(kind, kept), {})[kind, name] = kept
        return kept

    def _drop(self, scope: Scope, name: Name) -> None:
        collection = self._collections[scope]
        obj = collection.objects.pop(name)
        collection.unconfirmed.discard(name)
        self._unindex(scope.kind, obj)
        self._notify_of(scope.kind, obj)

    def _unindex(self, kind: Kind, obj: Object) -> None:
        key = key_of(kind, obj)
        del self._by_service[key][kind, obj["metadata"]["name"]]
        if not self._by_service[key]:
            del self._by_service[key]

    def _notify_of(self, kind: Kind, obj: Object) -> None:
        """Wake the services that are affected by a change to an object."""
        keys = self._referring(*_name_of(obj)) if kind == BASE else [key_of(kind, obj)]
        for key in keys:
            self._notify(key)

    def _referring(self, namespace: str, base: str) -> list[ServiceKey]:
        """Return the LLMServices in a namespace whose baseRefs name the given LLMServiceBase."""
        in_namespace = [key for key in self.services() if key.namespace == namespace]
        specs = {key: (self.service(key) or {}).get("spec") for key in in_namespace}
        return [key for key, spec in specs.items() if base in base_names(spec)]

    def _notify(self, key: ServiceKey) -> None:
        if self._complete:
            self._wake(key)

    def _check_seen(self, scope: Scope) -> None:
        collection = self._collections[scope]
        if collection.swept < 0 or collection.expected:
            return
        previous = collection.visibility
        collection.visibility = Visibility.SEEN
        if previous is Visibility.SEEN:
            return
        self._check_complete()
        if previous is not Visibility.UNKNOWN:
            self._wake_all(scope.namespace)

    def _check_complete(self) -> None:
        if not self._complete and not any(map(self._is_awaited, self._collections)):
            self._complete = True
            self._wake_all("")

    def _is_awaited(self, scope: Scope) -> bool:
        """Return whether planning must wait until a scope has been listed.

        A scope that keeps failing to list delays planning only if it contains the services
        themselves.
        """
        visibility = self._collections[scope].visibility
        is_failing = visibility is Visibility.FAILING and scope.kind == SERVICE
        return is_failing or visibility is Visibility.UNKNOWN

    def _wake_all(self, namespace: str) -> None:
        for key in self.services():
            if namespace in ("", key.namespace):
                self._notify(key)


def key_of(kind: Kind, obj: Object) -> ServiceKey:
    """Return a service's own key, or the key of the service that another object's label names.

    For an LLMServiceBase, the name in the key is empty.
    """
    meta = obj["metadata"]
    labels = {} if kind == BASE else meta.get("labels") or {}
    name = meta["name"] if kind == SERVICE else labels.get(_INSTANCE, "")
    return ServiceKey(meta["namespace"], name)


def slim(kind: Kind, obj: Object) -> Object:
    """Return a copy of an object with only the fields that the operator uses.

    managedFields, most of a pod's spec and unused statuses are dropped to save memory.
    """
    meta = obj["metadata"]
    # Fields declared in a form of 0.1.0 explain why the spec is not carried out.
    if kind != SERVICE or not dropped_fields(obj):
        meta = _slim_metadata(meta)
    kept = {**obj, "apiVersion": kind.api_version, "kind": kind.name, "metadata": meta}
    if kind == POD:
        kept["spec"] = _slim_pod(obj.get("spec") or {})
        # A volume may keep the pod from starting.
        if (obj.get("status") or {}).get("phase") == "Pending":
            kept["spec"]["volumes"] = (obj.get("spec") or {}).get("volumes") or []
    if kind.name not in _HAS_STATUS:
        kept.pop("status", None)
    return kept


def _slim_metadata(metadata: Object) -> Object:
    meta = {name: value for name, value in metadata.items() if name != "managedFields"}
    if is_created(metadata.get("managedFields") or ()):
        meta["managedFields"] = _CREATED
    if LAST_APPLIED in (meta.get("annotations") or {}):
        notes = meta["annotations"].items()
        meta["annotations"] = {name: value for name, value in notes if name != LAST_APPLIED}
    return meta


def is_created(managed_fields: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether `Cluster.claim_fields` must still be called for an object.

    This is the case if the operator created the object and still owns fields under the Update
    operation, so that a server-side apply could not remove them.
    """
    return any(map(is_own_update, managed_fields))


def is_own_update(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of managedFields stems from the operator creating the object.

    Such an entry has the operation Update. The operator's later writes have the operation Apply.
    """
    is_update = entry.get("operation") == "Update" and not entry.get("subresource")
    return is_update and bool(entry.get("manager") == FIELD_MANAGER)


def _is_change(previous: Object, kept: Object) -> bool:
    """Return whether two versions of an object differ in more than their resourceVersion."""
    if previous.keys() != kept.keys():
        return True
    before = previous["metadata"]
    after = kept["metadata"]
    if before | {"resourceVersion": ""} != after | {"resourceVersion": ""}:
        return True
    return any(previous[name] != kept[name] for name in kept if name != "metadata")


def _slim_pod(spec: Object) -> Object:
    containers = [
        {name: container[name] for name in _CONTAINER if name in container}
        for container in spec.get("containers", ())
    ]
    return {name: spec[name] for name in _POD_SPEC if name in spec} | {"containers": containers}


def version_of(obj: Object) -> int:
    """Return an object's resourceVersion as a number, for comparing objects of the same kind."""
    return revision_of(obj["metadata"].get("resourceVersion", "0"))


def revision_of(revision: str) -> int:
    """Return a resourceVersion as a number (0 if it is not numeric)."""
    return int(revision) if revision.isdecimal() else 0


def _name_of(obj: Object) -> Name:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
