"""Checks of metadata and of resource definitions, and what the server adds to the latter."""

import datetime
import re
from collections.abc import Iterator
from typing import Any

from ullage_kubeapi import rules
from ullage_kubeapi.status import cause

Object = dict[str, Any]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def metadata_problems(live: Object | None, new: Object) -> Iterator[dict[str, str]]:
    meta = new["metadata"]
    if not meta.get("name"):
        yield cause("FieldValueRequired", "metadata.name", "name or generateName is required")
    elif not _NAME.fullmatch(meta["name"]) or len(meta["name"]) > 253:
        message = f'Invalid value: "{meta["name"]}": a lowercase RFC 1123 subdomain is needed'
        yield cause("FieldValueInvalid", "metadata.name", message)
    for key, value in (meta.get("labels") or {}).items():
        if not isinstance(value, str) or not _LABEL.fullmatch(value):
            message = f'Invalid value: "{value}" (label {key}): a label is at most 63 characters'
            yield cause("FieldValueInvalid", "metadata.labels", message)
    for owner in meta.get("ownerReferences") or ():
        missing = [k for k in ("apiVersion", "kind", "name", "uid") if not owner.get(k)]
        for name in missing:
            yield cause("FieldValueRequired", f"metadata.ownerReferences.{name}", "Required value")
    if live is not None and meta.get("deletionTimestamp"):
        before = set(live["metadata"].get("finalizers") or ())
        if added := set(meta.get("finalizers") or ()) - before:
            message = f"Forbidden: no new finalizers can be added if the object is being deleted, \
found new finalizers {sorted(added)}"
            yield cause("FieldValueForbidden", "metadata.finalizers", message)


def crd_problems(crd: Object) -> Iterator[dict[str, str]]:
    spec = crd["spec"]
    expected = f"{spec['names']['plural']}.{spec['group']}"
    if crd["metadata"]["name"] != expected:
        yield cause(
            "FieldValueInvalid", "metadata.name", f"must be spec.names.plural+'.'+group: {expected}"
        )
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        yield cause("FieldValueInvalid", "spec.versions", "must have exactly one storage version")
    for version in spec["versions"]:
        root = version.get("schema", {}).get("openAPIV3Schema")
        if root is None:
            yield cause("FieldValueRequired", "spec.versions[].schema", "schemas are required")
        else:
            yield from rules.compile_all(root)


def establish(crd: Object) -> None:
    names = crd["spec"]["names"]
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": "",
            "lastTransitionTime": now(),
        }
        for kind, reason in (
            ("NamesAccepted", "NoConflicts"),
            ("Established", "InitialNamesAccepted"),
        )
    ]
    stored = [version["name"] for version in crd["spec"]["versions"] if version.get("storage")]
    crd.setdefault(
        "status", {"conditions": conditions, "acceptedNames": names, "storedVersions": stored}
    )
