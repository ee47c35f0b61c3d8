"""Every change of an object: create, update, patch, apply, delete, and the rules they share."""

import copy
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ullage_kubeapi import builtins, checks, fields, resources, rules, schema
from ullage_kubeapi.fields import Managed, Manager
from ullage_kubeapi.listtypes import ListTypes
from ullage_kubeapi.objects import Object, Objects
from ullage_kubeapi.resources import Resource
from ullage_kubeapi.status import (
    ApiError,
    already_exists,
    apply_conflict,
    bad_request,
    cause,
    invalid,
    not_found,
    stale,
)

_SERVER_OWNED = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
                 "generation", "selfLink")  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What a write needs to know besides the body."""

    resource: Resource
    namespace: str
    name: str
    manager: str
    subresource: str = ""
    field_validation: str = "Warn"
    dry_run: bool = False
    force: bool = False


@dataclass
class Written:
    """The object after a write, whether it is new, and warnings for the client."""

    obj: Object
    created: bool
    warnings: list[str]


class Writer:
    """Applies the rules of the API to one set of objects."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def live(self, request: Request) -> Object:
        current = self._objects.find(request.resource, (request.namespace, request.name))
        if current is None:
            raise not_found(request.resource.qualified, request.name)
        return current

    def create(self, request: Request, body: Object) -> Written:
        meta = body.setdefault("metadata", {})
        if "name" not in meta and "generateName" in meta:
            meta["name"] = meta["generateName"] + secrets.token_hex(3)
        request = replace(request, name=meta.get("name", ""))
        if self._objects.find(request.resource, (request.namespace, request.name)):
            raise already_exists(request.resource.qualified, request.name)
        if meta.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        return self._commit(request, None, body, None)

    def update(self, request: Request, body: Object) -> Written:
        """PUT, and what a patch has made of the live object."""
        return self._commit(request, self.live(request), body, None)

    def apply(self, request: Request, body: Object) -> Written:
        """Server-side apply of `body` by `request.manager`."""
        live = self._objects.find(request.resource, (request.namespace, request.name))
        if live is None and request.subresource:
            raise not_found(request.resource.qualified, request.name)
        if body["metadata"].get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        manager = Manager(request.manager, "Apply", request.subresource)
        applied = self._applicable(request, body)
        base = live or {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {}}
        types = list_types(request.resource)
        managed = fields.read(base["metadata"].get("managedFields", []))
        wanted = fields.flatten(applied, types)
        managed = self._claim(managed, manager, fields.flatten(base, types), wanted, request.force)
        merged = fields.merge(base, applied, types)
        previous = managed.get(manager, frozenset())
        managed[manager] = frozenset(wanted)
        owned = frozenset().union(*managed.values())
        fields.disown(merged, previous - owned, owned)
        merged["metadata"].setdefault("name", request.name)
        return self._commit(request, live, merged, managed)

    def _applicable(self, request: Request, body: Object) -> Object:
        """The part of an applied configuration that this endpoint writes."""
        if request.subresource == "status":
            return {"status": copy.deepcopy(body.get("status", {}))}
        applied = copy.deepcopy(body)
        if "status" in request.resource.subresources:
            applied.pop("status", None)
        return applied

    @staticmethod
    def _claim(
        managed: Managed,
        manager: Manager,
        live: Mapping[fields.Path, Any],
        wanted: Mapping[fields.Path, Any],
        force: bool,
    ) -> Managed:
        conflicts = fields.conflicts(managed, manager, live, wanted)
        if conflicts and not force:
            raise apply_conflict(
                [
                    cause("FieldManagerConflict", fields.spell(p), f'conflict with "{m.name}"')
                    for p, m in conflicts
                ]
            )
        taken = {path for path, _ in conflicts}
        return {m: paths if m == manager else paths - taken for m, paths in managed.items()}

    def _commit(
        self, request: Request, live: Object | None, body: Object, managed: Managed | None
    ) -> Written:
        resource = request.resource
        self._check_identity(request, live, body)
        new = _writable(request, live, body)
        warnings = self._complete(request, new)
        self._validate(request, live, new)
        _set_generation(resource, live, new)
        new["metadata"]["managedFields"] = self._managed(request, live, new, managed)
        if live is not None and _same(live, new):
            return Written(live, False, warnings)
        if request.dry_run:
            return Written(new, live is None, warnings)
        return Written(self._store(resource, live, new), live is None, warnings)

    def _check_identity(self, request: Request, live: Object | None, body: Object) -> None:
        resource = request.resource
        meta = body.get("metadata", {})
        kind = body.get("kind", resource.kind)
        if (body.get("apiVersion", resource.api_version), kind) != (
            resource.api_version,
            resource.kind,
        ):
            raise bad_request(
                f"the API version and kind in the data ({body.get('apiVersion')}, {kind}) do not "
                f"match the expected ({resource.api_version}, {resource.kind})"
            )
        if meta.get("namespace", request.namespace) != request.namespace:
            raise bad_request("the namespace of the object does not match the request's")
        if live is None:
            self._check_namespace(request)
            return
        asked = meta.get("resourceVersion")
        if asked and asked != live["metadata"]["resourceVersion"]:
            raise stale(resource.qualified, request.name)
        if meta.get("uid", live["metadata"]["uid"]) != live["metadata"]["uid"]:
            raise stale(resource.qualified, request.name)

    def _check_namespace(self, request: Request) -> None:
        if not request.resource.namespaced:
            return
        namespaces = self._objects.resources["", "v1", "namespaces"]
        namespace = self._objects.find(namespaces, ("", request.namespace))
        if namespace is None:
            raise not_found("namespaces", request.namespace)
        if namespace["metadata"].get("deletionTimestamp"):
            text = f'namespace "{request.namespace}" is being terminated'
            raise ApiError(403, "Forbidden", text)

    def _complete(self, request: Request, new: Object) -> list[str]:
        """Prunes and defaults in place; returns a warning for each field dropped."""
        resource = request.resource
        if not resource.is_custom:
            builtins.with_defaults(resource, new)
            return []
        unknown: list[str] = []
        for part in ("spec", "status"):
            if part in new and part in resource.schema.get("properties", {}):
                below = resource.schema["properties"][part]
                new[part], lost = schema.prune(new[part], below, part)
                unknown += lost
        fields_known = {"apiVersion", "kind", "metadata", *resource.schema.get("properties", {})}
        for name in sorted(set(new) - fields_known):
            unknown.append(name)
            del new[name]
        if unknown and request.field_validation == "Strict":
            listed = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise bad_request(f"strict decoding error: {listed}")
        new.update(schema.default(new, resource.schema))
        silent = request.field_validation == "Ignore"
        return [] if silent else [f'unknown field "{path}"' for path in unknown]

    def _validate(self, request: Request, live: Object | None, new: Object) -> None:
        causes = [*checks.metadata_problems(live, new)]
        if request.resource.is_custom:
            causes += schema.validate(_body(new), request.resource.schema)
            # Rules may read any field, so they are asked where all are of the right kind.
            if all(each["reason"] == "FieldValueDuplicate" for each in causes):
                old = {} if live is None else {"old": live}
                causes += rules.violations(new, request.resource.schema, **old)
        else:
            causes += builtins.problems(request.resource, new, live)
        if request.resource.kind == "CustomResourceDefinition":
            causes += checks.crd_problems(new)
        if causes:
            kind = request.resource.kind
            group = f".{request.resource.group}" if request.resource.group else ""
            raise invalid(f"{kind}{group}", request.name, causes)

    def _managed(
        self, request: Request, live: Object | None, new: Object, managed: Managed | None
    ) -> list[dict[str, Any]]:
        before = live["metadata"].get("managedFields", []) if live else []
        if managed is None:
            if live and not request.subresource:
                before = new["metadata"].get("managedFields") or before  # a client may set them
            types = list_types(request.resource)
            old = fields.flatten(live, types) if live else {}
            manager = Manager(request.manager, "Update", request.subresource)
            new_fields = fields.flatten(new, types)
            managed = fields.after_update(fields.read(before), manager, old, new_fields)
        kept = {m: paths for m, paths in managed.items() if paths}
        if kept == fields.read(before):
            return before
        return fields.write(kept, request.resource.api_version, checks.now())

    def _store(self, resource: Resource, live: Object | None, new: Object) -> Object:
        meta = new["metadata"]
        if live is None:
            meta["uid"] = str(uuid.uuid4())
            meta["creationTimestamp"] = checks.now()
        if resource.kind == "CustomResourceDefinition":
            checks.establish(new)
            for served in resources.from_crd(new):
                self._objects.register(served)
        if meta.get("deletionTimestamp") and not meta.get("finalizers"):
            return self._objects.drop(resource, new)
        return self._objects.put(resource, new)

    def delete(self, request: Request, options: Mapping[str, Any]) -> Object:
        """Deletes, or marks for deletion where finalizers stand in the way."""
        live = self.live(request)
        meta = live["metadata"]
        for name, asked in (options.get("preconditions") or {}).items():
            if asked != meta[name]:
                raise stale(request.resource.qualified, request.name)
        doomed = copy.deepcopy(live)
        meta = doomed["metadata"]
        policy = options.get("propagationPolicy") or "Background"
        extra = {"Foreground": ["foregroundDeletion"], "Orphan": ["orphan"]}.get(policy, [])
        if request.resource.kind == "Namespace":
            extra = ["kubernetes"]
        meta["finalizers"] = list(dict.fromkeys([*meta.get("finalizers", ()), *extra]))
        if request.dry_run:
            return doomed
        if not meta["finalizers"]:
            return self._gone(request.resource, doomed)
        if "deletionTimestamp" in meta:
            return live
        meta["deletionTimestamp"] = checks.now()
        meta["deletionGracePeriodSeconds"] = 0
        if "generation" in meta:
            meta["generation"] += 1
        return self._objects.put(request.resource, doomed)

    def _gone(self, resource: Resource, doomed: Object) -> Object:
        if resource.kind == "CustomResourceDefinition":
            group = doomed["spec"]["group"]
            plural = doomed["spec"]["names"]["plural"]
            for served, obj in list(self._objects.everything()):
                if (served.group, served.plural) == (group, plural):
                    self._objects.drop(served, obj)
            self._objects.unregister(group, plural)
        return self._objects.drop(resource, doomed)

    def strip_finalizer(self, resource: Resource, obj: Object, finalizer: str) -> None:
        """What the garbage collector and the namespace controller do at the end."""
        remaining = copy.deepcopy(obj)
        remaining["metadata"]["finalizers"].remove(finalizer)
        if remaining["metadata"]["finalizers"]:
            self._objects.put(resource, remaining)
        else:
            self._gone(resource, remaining)


def list_types(resource: Resource) -> ListTypes:
    return ListTypes(resource.schema if resource.is_custom else None)


def _body(obj: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in obj.items() if name != "metadata"}


def _writable(request: Request, live: Object | None, body: Object) -> Object:
    """`body` with everything put back that this endpoint does not write."""
    new = copy.deepcopy(body)
    meta = new.setdefault("metadata", {})
    has_status = "status" in request.resource.subresources
    if live is None:
        for name in (*_SERVER_OWNED, "managedFields"):
            meta.pop(name, None)
        if has_status:
            new.pop("status", None)
        new["apiVersion"], new["kind"] = request.resource.api_version, request.resource.kind
        meta["name"] = request.name
        if request.resource.namespaced:
            meta["namespace"] = request.namespace
        return new
    if request.subresource == "status":
        status = new.get("status")
        new = copy.deepcopy(live)
        new.pop("status", None)
        return new if status is None else {**new, "status": status}
    for name in (*_SERVER_OWNED, "name", "namespace", "resourceVersion"):
        meta.pop(name, None)
        if name in live["metadata"]:
            meta[name] = live["metadata"][name]
    if has_status:
        new.pop("status", None)
        if "status" in live:
            new["status"] = copy.deepcopy(live["status"])
    new["apiVersion"], new["kind"] = request.resource.api_version, request.resource.kind
    return new


def _set_generation(resource: Resource, live: Object | None, new: Object) -> None:
    if not resource.has_generation:
        return
    if live is None:
        new["metadata"]["generation"] = 1
        return
    ignored = {"metadata", "apiVersion", "kind"} | (resource.subresources & {"status"})
    changed = {k: v for k, v in new.items() if k not in ignored} != {
        k: v for k, v in live.items() if k not in ignored
    }
    new["metadata"]["generation"] = live["metadata"].get("generation", 0) + changed


def _same(live: Object, new: Object) -> bool:
    def content(obj: Object) -> Object:
        meta = {k: v for k, v in obj["metadata"].items() if k not in ("resourceVersion",)}
        return {**obj, "metadata": meta}

    return content(live) == content(new)
