"""Merges pod templates the way server-side apply does: lists of objects are merged by key.

The operator merges its own pod fields, and pod fields from older specs, into a spec's pod
templates.
"""

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from ullage_operator.api.errors import Problem
from ullage_operator.api.quantities import canonical

Manifest = dict[str, Any]


def over_template(given: Mapping[str, Any], own: Manifest) -> Manifest:
    """Return the operator's pod template merged over the spec's pod template."""
    return laid_over(with_canonical_amounts(given), own)


def laid_over(given: Mapping[str, Any], own: Manifest) -> Manifest:
    """Return the pod template `given`, with the fields of `own` merged over it."""
    return cast(Manifest, _over(given, own))


def _over(given: Any, own: Any, name: str = "") -> Any:
    """Merge `own` on top of `given`.

    Containers with the same name are merged. In other lists with a key field, an item of `own`
    replaces the item with the same key. A list without a key field is replaced as a whole.
    """
    if isinstance(given, Mapping) and isinstance(own, Mapping):
        both = {key: _over(given[key], own[key], key) for key in own.keys() & given.keys()}
        return {**given, **own, **both}
    if isinstance(given, list) and isinstance(own, list) and (key := merge_key(own, given)):
        by_key = {item[key]: item for item in given}
        items = [
            _over(by_key[item[key]], item) if name == "containers" and item[key] in by_key else item
            for item in own
        ]
        taken = {item[key] for item in own}
        return items + [item for item in given if item[key] not in taken]
    return own


_ELSEWHERE = {
    "[engine].image": "spec.image",
    ".resources": "{section}.resources",
    ".serviceAccountName": "spec.serviceAccount.name",
    ".securityContext.runAsUser": "spec.securityContext",
    ".securityContext.runAsGroup": "spec.securityContext",
    ".securityContext.fsGroup": "spec.securityContext",
    ".terminationGracePeriodSeconds": "spec.limits.totalTimeout",
    ".volumes[cache]": "{section}.modelCache",
    ".env[HF_HOME]": "{section}.modelCache",
    ".volumes[kv]": "{section}.memory.tiers.file",
    ".volumes[shm]": "{section}.shmSize",
}
"""Maps the end of a pod field's path to the spec field that users should set instead."""


def conflicts(given: Any, own: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each pod template field that the operator itself sets to another value.

    Args:
        given: the template, or a nested part of it during recursion.
        own: the operator's own fields for that part.
        path: the path of that part in the manifest.
    """
    if given is None or given == own:
        return
    if isinstance(own, list) and own and isinstance(own[0], Mapping):
        yield from _list_conflicts(given, own, path)
    elif (
        isinstance(given, Mapping) and isinstance(own, Mapping) and not path.endswith(".resources")
    ):
        for key in given:
            if key in own:
                yield from conflicts(given[key], own[key], f"{path}.{key}")
            elif key in _HANDLERS and own.keys() & _HANDLERS:
                yield _own(f"{path}.{key}")
    else:
        yield _own(path)


def _list_conflicts(given: Any, own: list[Any], path: str) -> Iterator[Problem]:
    key = merge_key(own, given) if isinstance(given, list) else None
    if key is None:
        keys = [key for key in MERGE_KEYS if key in own[0]]
        yield Problem(path, f"must be a list of objects, each with a {keys[0]} of its own")
        return
    by_key = {item[key]: item for item in own}
    for item in given:
        at = f"{path}[{item[key]}]"
        if item == by_key.get(item[key]):
            continue
        overlaps = overlap(item[key], by_key) if key == "mountPath" else None
        if path.endswith(".containers") and item[key] in by_key:
            others = {field: value for field, value in item.items() if field != key}
            yield from conflicts(others, by_key[item[key]], at)
        elif overlaps:
            yield Problem(at, f"{overlaps}, which is the operator's own; mount it elsewhere")
        elif item[key] in by_key:
            yield _own(at)


def _own(path: str) -> Problem:
    section = path.partition(".podTemplate")[0]
    said = (field for end, field in _ELSEWHERE.items() if path.endswith(end))
    elsewhere = next(said, "").format(section=section)
    remedy = f"set {elsewhere} instead" if elsewhere else "leave it out"
    return Problem(path, f"is set by the operator; {remedy}")


_HANDLERS = frozenset(("exec", "grpc", "httpGet", "sleep", "tcpSocket"))
"""Handlers of a probe or lifecycle hook. Each probe or hook may have only one of them."""


def overlap(path: str, mounts: Iterable[str]) -> str | None:
    """Describe how a path in a container overlaps a mount, or return None if it does not."""
    for each in mounts:
        if lies_in(path, each):
            return f"lies in {each}"
        if lies_in(each, path):
            return f"holds {each}"
    return None


def lies_in(path: str, folder: str) -> bool:
    """Return whether a path in a container is the given folder or is inside it."""
    inner, outer = (posixpath.normpath(f"/{each}").lstrip("/") for each in (path, folder))
    return not outer or f"{inner}/".startswith(f"{outer}/")


MERGE_KEYS = ("mountPath", "containerPort", "name")


def merge_key(desired: list[Any], live: list[Any]) -> str | None:
    """Return the merge key of a list, as in server-side apply, or None if it has none.

    The merge key is the field that identifies the list's items. If another client adds an item, for
    example an injected container, the item belongs to that client.
    """
    items = [*desired, *live]
    if not desired or not all(isinstance(item, Mapping) for item in items):
        return None
    for key in MERGE_KEYS:
        names = [[item.get(key) for item in each] for each in (desired, live)]
        if all(isinstance(name, str | int) for each in names for name in each) and all(
            len(set(each)) == len(each) for each in names
        ):
            return key
    return None


def with_canonical_amounts(value: Any, name: str = "") -> Any:
    """Return a pod template with its quantities in the canonical form that the API server stores.

    Text that is not a quantity stays unchanged, so that the API server rejects it.
    """
    if isinstance(value, Mapping):
        return {key: with_canonical_amounts(item, key) for key, item in value.items()} | {
            key: {each: _canonical(amount) for each, amount in value[key].items()}
            for key in ("limits", "requests")
            if name == "resources" and isinstance(value.get(key), Mapping)
        }
    if isinstance(value, list):
        return [with_canonical_amounts(item) for item in value]
    return _canonical(value) if name == "sizeLimit" else value


def _canonical(amount: Any) -> Any:
    try:
        return canonical(amount)
    except ValueError:
        return amount
