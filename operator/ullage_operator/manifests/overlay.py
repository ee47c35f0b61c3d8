"""Lays what the operator sets of a pod over the pod template that a spec gives, by the keys that
server-side apply merges lists by.
"""

from collections.abc import Mapping
from typing import Any, cast

from ullage_operator.api.sections import canonical

Manifest = dict[str, Any]


def over_template(given: Mapping[str, Any], own: Manifest) -> Manifest:
    """Returns the operator's pod template with what else a spec gives to the pods."""
    return cast(Manifest, _over(with_canonical_amounts(given), own)) if given else own


def _over(given: Any, own: Any, name: str = "") -> Any:
    """Lays `own` over `given`. Containers are merged by name; of other lists' items that have a key
    the operator's take the place of those of the same key, and lists without one are replaced."""
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


MERGE_KEYS = ("mountPath", "containerPort", "name")


def merge_key(desired: list[Any], live: list[Any]) -> str | None:
    """Returns the field that identifies a list's items, as in server-side apply; None for other
    lists.

    What others add to such a list, such as an injected container, is theirs.
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
    """Returns a pod template with its quantities as the API server stores them; what is no quantity
    is left for it to refuse."""
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
