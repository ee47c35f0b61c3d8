"""Field ownership: which manager set which field (`metadata.managedFields`), and server-side apply.

A field is a path of steps, each spelt as in FieldsV1: `f:name` for a member, `k:{...}` for an item
of a list that merges as a map, `v:value` for an item of a set. `flatten` gives every field of an
object with its value; membership of a list item is a field of its own.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ullage_kubeapi.listtypes import ListTypes, Schema, item_key

Path = tuple[str, ...]
_MEMBER = "<member>"
# Identity and bookkeeping belong to nobody.
_UNOWNED_META = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"),
    *("deletionTimestamp", "managedFields", "selfLink", "generateName"),
)
_UNOWNED = frozenset(
    {("f:apiVersion",), ("f:kind",), *(("f:metadata", f"f:{name}") for name in _UNOWNED_META)}
)


@dataclass(frozen=True)
class Manager:
    """One entry's identity in managedFields."""

    name: str
    operation: str
    subresource: str = ""


Managed = dict[Manager, frozenset[Path]]


def flatten(obj: Mapping[str, Any], types: ListTypes) -> dict[Path, Any]:
    """Every owned field of an object and its value."""
    return {
        path: value
        for path, value in _walk(obj, types, (), (), types.root())
        if path[:1] not in _UNOWNED and path[:2] not in _UNOWNED
    }


def _walk(
    value: Any, types: ListTypes, path: Path, names: tuple[str, ...], schema: Schema | None
) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and value and not types.is_atomic_map(names, schema):
        for name, member in value.items():
            child = types.child(schema, name)
            yield from _walk(member, types, (*path, f"f:{name}"), (*names, name), child)
    elif isinstance(value, list) and (keys := types.keys(names, schema)):
        items = (schema or {}).get("items") if schema is not None else None
        for item in value:
            step = (*path, key_step(item, keys))
            yield step, _MEMBER
            yield from _walk(item, types, step, (*names, "[]"), items)
    elif isinstance(value, list) and types.is_set(names, schema):
        yield from (((*path, f"v:{json.dumps(item)}"), item) for item in value)
    else:
        yield path, value


def key_step(item: Any, keys: tuple[str, ...]) -> str:
    return "k:" + json.dumps(dict(item_key(item, keys)), sort_keys=True, separators=(",", ":"))


def read(managed: list[dict[str, Any]]) -> Managed:
    """`metadata.managedFields` as sets of paths."""
    return {
        Manager(entry["manager"], entry["operation"], entry.get("subresource", "")): frozenset(
            _paths(entry["fieldsV1"], ())
        )
        for entry in managed
    }


def _paths(tree: Mapping[str, Any], path: Path) -> Iterator[Path]:
    if not tree:
        yield path
    for step, below in tree.items():
        yield from [path] if step == "." else _paths(below, (*path, step))


def write(managed: Managed, api_version: str, now: str) -> list[dict[str, Any]]:
    """Sets of paths as `metadata.managedFields`; managers that own nothing are left out."""
    return [
        {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": api_version,
            "time": now,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(paths),
            **({"subresource": manager.subresource} if manager.subresource else {}),
        }
        for manager, paths in managed.items()
        if paths
    ]


def _tree(paths: frozenset[Path]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path in sorted(paths):
        node = root
        for step in path:
            node = node.setdefault(step, {})
        if any(other != path and other[: len(path)] == path for other in paths):
            node["."] = {}
    return root


def after_update(
    managed: Managed, manager: Manager, old: Mapping[Path, Any], new: Mapping[Path, Any]
) -> Managed:
    """Ownership after a plain write: what it changed is its own, and nobody else's."""
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    kept = {m: frozenset(p for p in paths if p in new and p not in changed)
            for m, paths in managed.items()}  # fmt: skip
    kept[manager] = kept.get(manager, frozenset()) | changed
    return kept


def conflicts(
    managed: Managed, manager: Manager, live: Mapping[Path, Any], applied: Mapping[Path, Any]
) -> list[tuple[Path, Manager]]:
    """Fields that an apply would change although another manager owns them."""
    return [
        (path, other)
        for path, value in applied.items()
        for other, paths in managed.items()
        if other != manager and path in paths and live.get(path, value) != value
    ]


def merge(live: Any, applied: Any, types: ListTypes) -> Any:
    """What server-side apply makes of `live`: applied fields set, all others kept."""
    return _merge(live, applied, types, (), types.root())


def _merge(
    live: Any, applied: Any, types: ListTypes, names: tuple[str, ...], schema: Schema | None
) -> Any:
    if isinstance(applied, Mapping) and isinstance(live, Mapping):
        if types.is_atomic_map(names, schema):
            return copy.deepcopy(applied)
        merged = dict(live)
        for name, value in applied.items():
            child = types.child(schema, name)
            merged[name] = _merge(live.get(name), value, types, (*names, name), child)
        return merged
    if isinstance(applied, list) and isinstance(live, list):
        return _merge_lists(live, applied, types, names, schema)
    return copy.deepcopy(applied)


def _merge_lists(
    live: list[Any],
    applied: list[Any],
    types: ListTypes,
    names: tuple[str, ...],
    schema: Schema | None,
) -> list[Any]:
    keys = types.keys(names, schema)
    if keys:
        items = (schema or {}).get("items") if schema is not None else None
        have = {item_key(item, keys): item for item in live}
        for item in applied:
            key = item_key(item, keys)
            have[key] = _merge(have.get(key), item, types, (*names, "[]"), items)
        return list(have.values())
    if types.is_set(names, schema):
        return live + [item for item in applied if item not in live]
    return copy.deepcopy(applied)


def disown(obj: Any, remaining: frozenset[Path], owned: frozenset[Path]) -> None:
    """Removes the fields in `left`; an item of a list goes whole once nobody owns a part of it."""
    for path in sorted(remaining, key=len):
        if not any(other[: len(path)] == path for other in owned) and not _is_key(path):
            remove(obj, path, owned)


def _is_key(path: Path) -> bool:
    """Whether the field is what identifies its list item, which must keep it to exist."""
    item = path[-2] if len(path) > 1 else ""
    return item.startswith("k:") and path[-1][2:] in json.loads(item[2:])


def remove(obj: Any, path: Path, owned: frozenset[Path]) -> None:
    """Takes the field at `path` out of `obj`, with parents left empty that nobody owns."""
    parents: list[tuple[Any, Path]] = []
    for depth, step in enumerate(path[:-1]):
        parents.append((obj, path[: depth + 1]))
        obj = _child(obj, step)
        if obj is None:
            return
    _drop(obj, path[-1])
    for parent, prefix in reversed(parents):
        child = _child(parent, prefix[-1])
        if child or prefix in owned or prefix[-1].startswith("k:"):
            return
        _drop(parent, prefix[-1])


def _child(obj: Any, step: str) -> Any:
    if step.startswith("f:"):
        return obj.get(step[2:]) if isinstance(obj, dict) else None
    index = _index(obj, step)
    return None if index is None else obj[index]


def _drop(obj: Any, step: str) -> None:
    if step.startswith("f:"):
        obj.pop(step[2:], None)
    elif (index := _index(obj, step)) is not None:
        del obj[index]


def _index(items: Any, step: str) -> int | None:
    if not isinstance(items, list):
        return None
    wanted = json.loads(step[2:])
    for index, item in enumerate(items):
        if step.startswith("v:"):
            if item == wanted:
                return index
        elif key_step(item, tuple(sorted(wanted))) == step:
            return index
    return None


def spell(path: Path) -> str:
    """A path as kubectl prints it: .spec.containers[name="a"].image"""
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += f".{step[2:]}"
        elif step.startswith("k:"):
            pairs = json.loads(step[2:]).items()
            text += "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in pairs) + "]"
        else:
            text += f"[={step[2:]}]"
    return text
