"""The three classic patches: JSON merge patch, JSON patch, strategic merge patch."""

import copy
from collections.abc import Mapping
from typing import Any

from ullage_kubeapi.listtypes import ListTypes
from ullage_kubeapi.status import ApiError, bad_request

_DIRECTIVES = ("$patch", "$setElementOrder", "$retainKeys", "$deleteFromPrimitiveList")


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def json_patch(target: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902; a failing test or a missing path is 422, as at the real server."""
    document = copy.deepcopy(target)
    for operation in operations:
        document = _operate(document, operation)
    return document


def _operate(document: Any, operation: dict[str, Any]) -> Any:
    name = operation["op"]
    steps = _pointer(operation["path"])
    if name == "test":
        if _get(document, steps) != operation.get("value"):
            raise _failed(f"testing value {operation['path']} failed")
    elif name == "add":
        document = _put(document, steps, operation["value"], insert=True)
    elif name == "replace":
        _get(document, steps)
        document = _put(document, steps, operation["value"], insert=False)
    elif name == "remove":
        _cut(document, steps)
    elif name in ("move", "copy"):
        source = _pointer(operation["from"])
        value = copy.deepcopy(_get(document, source))
        if name == "move":
            _cut(document, source)
        document = _put(document, steps, value, insert=True)
    else:
        raise bad_request(f"unknown JSON patch operation {name!r}")
    return document


def _failed(why: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request due to an error: {why}")


def _pointer(path: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _get(document: Any, steps: list[str]) -> Any:
    for step in steps:
        try:
            document = document[int(step)] if isinstance(document, list) else document[step]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _failed(f"path {'/'.join(steps)} does not exist") from error
    return document


def _put(document: Any, steps: list[str], value: Any, insert: bool) -> Any:
    if not steps:
        return value
    parent = _get(document, steps[:-1])
    last = steps[-1]
    if isinstance(parent, list):
        if last == "-":
            parent.append(value)
        elif insert:
            parent.insert(int(last), value)
        else:
            parent[int(last)] = value
    else:
        parent[last] = value
    return document


def _cut(document: Any, steps: list[str]) -> None:
    _get(document, steps)
    parent = _get(document, steps[:-1])
    del parent[int(steps[-1]) if isinstance(parent, list) else steps[-1]]


def strategic_merge_patch(target: Any, patch: Mapping[str, Any], types: ListTypes) -> Any:
    """kubectl's patch for built-in kinds: like a merge patch, but known lists merge by key."""
    return _strategic(target, patch, types, ())


def _strategic(
    target: Any, patch: Mapping[str, Any], types: ListTypes, names: tuple[str, ...]
) -> Any:
    if patch.get("$patch") == "replace":
        return {k: v for k, v in patch.items() if k != "$patch"}
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if name.startswith(_DIRECTIVES):
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = _strategic(result.get(name), value, types, (*names, name))
        elif isinstance(value, list) and (keys := types.keys((*names, name), None)):
            have = result.get(name) or []
            result[name] = _strategic_list(have, value, keys[0], types, (*names, name))
        else:
            result[name] = copy.deepcopy(value)
    return {k: v for k, v in result.items() if v is not None}


def _strategic_list(
    have: list[Any], patch: list[Any], key: str, types: ListTypes, names: tuple[str, ...]
) -> list[Any]:
    if any(item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if "$patch" not in item]
    items = {item.get(key): item for item in have}
    for item in patch:
        if item.get("$patch") == "delete":
            items.pop(item.get(key), None)
        else:
            items[item.get(key)] = _strategic(items.get(item.get(key)), item, types, (*names, "[]"))
    return list(items.values())
