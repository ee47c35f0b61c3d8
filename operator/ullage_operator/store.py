"""What the cluster holds of the watched kinds, as the watches tell it. No I/O.

A reconciliation reads from here and asks the API server for nothing. The store also knows which
kinds cannot be seen, and why.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ullage_operator.kinds import POD, SERVICE, Kind

Object = dict[str, Any]
_INSTANCE = "app.kubernetes.io/instance"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_SPEC = ("nodeName", "priority")
_CONTAINER = ("name", "image", "resources", "ports")


class ServiceKey(NamedTuple):
    """Which LLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Scope(NamedTuple):
    """What one watch sees: a kind in a namespace, or in all for ""."""

    kind: Kind
    namespace: str


class Sight(Enum):
    """Whether a scope is seen."""

    UNKNOWN = "not listed yet"
    SEEN = "listed"
    ABSENT = "the API server does not serve the kind"
    DENIED = "the operator may not"


class Denied(NamedTuple):
    """A right that the operator lacks."""

    verb: str
    resource: str
    """Such as statefulsets.apps."""
    namespace: str
    """Empty for all namespaces."""

    def __str__(self) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return f"{self.verb} {self.resource} {where}"


@dataclass(slots=True)
class _Collection:
    """The objects of one scope."""

    sight: Sight = Sight.UNKNOWN
    revision: int = 0
    """Up to which resourceVersion the watch has told everything."""
    denied_verb: str = ""
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)


class Store:
    """Objects by scope, and by the service that they belong to.

    `wake` is called for every service that a change concerns, once all scopes have been listed
    or found missing: whoever plans before that would miss what exists.
    """

    def __init__(self, scopes: Iterable[Scope], wake: Callable[[ServiceKey], None]) -> None:
        self._collections = {scope: _Collection() for scope in scopes}
        self._by_service: dict[ServiceKey, dict[tuple[Kind, str], Object]] = {}
        self._wake = wake
        self._complete = False

    # What watches tell.

    def listed(self, scope: Scope, objects: Iterable[Object], revision: str) -> None:
        """Everything that exists in the scope; what is not named is gone."""
        collection = self._collections[scope]
        found = {_name_of(obj): obj for obj in objects}
        for name in [name for name in collection.objects if name not in found]:
            self._drop(scope, name)
        for obj in found.values():
            self._keep(scope, obj)
        was, collection.sight = collection.sight, Sight.SEEN
        collection.revision = _number(revision)
        self._check_complete()
        if was in (Sight.ABSENT, Sight.DENIED):
            self._wake_all(scope.namespace)

    def changed(self, scope: Scope, obj: Object) -> None:
        """An object was made or changed."""
        self._keep(scope, obj)
        self.reached(scope, obj["metadata"]["resourceVersion"])

    def deleted(self, scope: Scope, obj: Object) -> None:
        """An object is gone, or is no longer one of those that are watched."""
        known = self._collections[scope].objects.get(_name_of(obj))
        if known is not None and version_of(known) <= version_of(obj):
            self._drop(scope, _name_of(obj))
        self.reached(scope, obj["metadata"]["resourceVersion"])

    def reached(self, scope: Scope, revision: str) -> None:
        """All up to this resourceVersion has been told."""
        collection = self._collections[scope]
        collection.revision = max(collection.revision, _number(revision))

    def absent(self, scope: Scope) -> bool:
        """The API server does not serve the kind; answers whether that is new."""
        return self._lose(scope, Sight.ABSENT)

    def denied(self, scope: Scope, verb: str) -> bool:
        """The operator may not list or watch the kind; answers whether that is new."""
        self._collections[scope].denied_verb = verb
        return self._lose(scope, Sight.DENIED)

    def _lose(self, scope: Scope, sight: Sight) -> bool:
        collection = self._collections[scope]
        is_new = collection.sight is not sight
        collection.sight = sight
        for name in list(collection.objects):
            self._drop(scope, name)
        self._check_complete()
        if is_new:
            self._wake_all(scope.namespace)
        return is_new

    # What the operator itself has just written.

    def written(self, obj: Object) -> None:
        """The API server's answer to a write, which the watch will tell only later.

        Nothing is woken. An answer that the watch has overtaken is dropped: what it names may be
        gone by now.
        """
        for scope in self._collections:
            if (scope.kind.api_version, scope.kind.name) != (obj["apiVersion"], obj["kind"]):
                continue
            if scope.namespace not in ("", obj["metadata"]["namespace"]):
                continue
            collection = self._collections[scope]
            if collection.sight is Sight.SEEN and version_of(obj) > collection.revision:
                self._set(scope, obj)

    # What reconciliations ask.

    @property
    def complete(self) -> bool:
        """Whether every scope has been listed once, or found missing."""
        return self._complete

    def service(self, key: ServiceKey) -> Object | None:
        return self._by_service.get(key, {}).get((SERVICE, key.name))

    def services(self) -> list[ServiceKey]:
        return [key for key in self._by_service if self.service(key) is not None]

    def owned(self, key: ServiceKey) -> list[Object]:
        """Objects that carry the service's labels and the operator's, whoever owns them."""
        found = self._by_service.get(key, {})
        return [obj for (kind, _), obj in found.items() if kind not in (SERVICE, POD)]

    def pods(self, key: ServiceKey) -> list[Object]:
        found = self._by_service.get(key, {})
        return [obj for (kind, _), obj in found.items() if kind == POD]

    def sees(self, kind: Kind, namespace: str) -> bool:
        """Whether a namespace's objects of a kind are known."""
        return all(collection.sight is Sight.SEEN for collection in self._of(kind, namespace))

    def serves(self, kind: Kind, namespace: str) -> bool:
        """Whether the API server knows the kind, as far as the operator can tell."""
        return all(c.sight is not Sight.ABSENT for c in self._of(kind, namespace))

    def missing(self, namespace: str) -> list[Denied]:
        """Rights that the operator lacks to see a namespace's objects."""
        return [
            Denied(collection.denied_verb, scope.kind.qualified, scope.namespace)
            for scope, collection in self._collections.items()
            if collection.sight is Sight.DENIED and scope.namespace in ("", namespace)
        ]

    def counts(self) -> dict[str, int]:
        """Objects by kind."""
        counts: dict[str, int] = {}
        for scope, collection in self._collections.items():
            counts[scope.kind.name] = counts.get(scope.kind.name, 0) + len(collection.objects)
        return counts

    def revision(self, scope: Scope) -> int:
        return self._collections[scope].revision

    def _of(self, kind: Kind, namespace: str) -> Iterator[_Collection]:
        for scope, collection in self._collections.items():
            if scope.kind == kind and scope.namespace in ("", namespace):
                yield collection

    # How it is kept.

    def _keep(self, scope: Scope, obj: Object) -> None:
        known = self._collections[scope].objects.get(_name_of(obj))
        if known is not None and version_of(obj) <= version_of(known):
            return  # known from the operator's own write
        self._set(scope, obj)
        if known is not None and key_of(scope.kind, known) != key_of(scope.kind, obj):
            self._tell(key_of(scope.kind, known))
        self._tell(key_of(scope.kind, obj))

    def _set(self, scope: Scope, obj: Object) -> None:
        kind, (namespace, name) = scope.kind, _name_of(obj)
        collection = self._collections[scope]
        if known := collection.objects.get((namespace, name)):
            self._unindex(kind, known)
        kept = slim(kind, obj)
        collection.objects[namespace, name] = kept
        self._by_service.setdefault(key_of(kind, kept), {})[kind, name] = kept

    def _drop(self, scope: Scope, name: tuple[str, str]) -> None:
        gone = self._collections[scope].objects.pop(name)
        self._unindex(scope.kind, gone)
        self._tell(key_of(scope.kind, gone))

    def _unindex(self, kind: Kind, obj: Object) -> None:
        key = key_of(kind, obj)
        del self._by_service[key][kind, obj["metadata"]["name"]]
        if not self._by_service[key]:
            del self._by_service[key]

    def _tell(self, key: ServiceKey) -> None:
        if self._complete:
            self._wake(key)

    def _check_complete(self) -> None:
        sights = (collection.sight for collection in self._collections.values())
        if not self._complete and all(sight is not Sight.UNKNOWN for sight in sights):
            self._complete = True
            self._wake_all("")

    def _wake_all(self, namespace: str) -> None:
        for key in self.services():
            if namespace in ("", key.namespace):
                self._tell(key)


def key_of(kind: Kind, obj: Object) -> ServiceKey:
    """The service that an object concerns: the one that it is, or whose label it carries."""
    meta = obj["metadata"]
    labels = meta.get("labels") or {}
    name = meta["name"] if kind == SERVICE else labels.get(_INSTANCE, "")
    return ServiceKey(meta["namespace"], name)


def slim(kind: Kind, obj: Object) -> Object:
    """What is worth keeping of an object: field managers and most of a pod's spec are not."""
    meta = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    if _LAST_APPLIED in (meta.get("annotations") or {}):
        notes = meta["annotations"].items()
        meta["annotations"] = {name: value for name, value in notes if name != _LAST_APPLIED}
    kept = {**obj, "apiVersion": kind.api_version, "kind": kind.name, "metadata": meta}
    if kind == POD:
        kept["spec"] = _slim_pod(obj.get("spec") or {})
    return kept


def _slim_pod(spec: Object) -> Object:
    containers = [
        {name: container[name] for name in _CONTAINER if name in container}
        for container in spec.get("containers", ())
    ]
    return {name: spec[name] for name in _POD_SPEC if name in spec} | {"containers": containers}


def version_of(obj: Object) -> int:
    """An object's resourceVersion; Kubernetes lets those of one kind be compared as numbers."""
    return _number(obj["metadata"].get("resourceVersion", "0"))


def _number(revision: str) -> int:
    return int(revision) if revision.isdecimal() else 0


def _name_of(obj: Object) -> tuple[str, str]:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
