"""Label and field selectors, parsed once, then asked about each object."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ullage_kubeapi.status import bad_request

Labels = Mapping[str, str]
Selector = Callable[[Mapping[str, Any]], bool]

_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_SPLIT = re.compile(r",(?![^(]*\))")


def matcher(labels: str, fields: str) -> Selector:
    """A predicate for the query's `labelSelector` and `fieldSelector`."""
    label_tests = [_label_test(part) for part in _SPLIT.split(labels) if part.strip()]
    field_tests = [_field_test(part) for part in fields.split(",") if part.strip()]

    def matches(obj: Mapping[str, Any]) -> bool:
        own = obj["metadata"].get("labels") or {}
        return all(test(own) for test in label_tests) and all(test(obj) for test in field_tests)

    return matches


def _label_test(text: str) -> Callable[[Labels], bool]:
    if match := _SET.match(text):
        key, word, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        if word == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    text = text.strip()
    if "!=" in text:
        key, value = text.split("!=")
        return lambda labels: labels.get(key) != value
    if "=" in text:
        key, value = text.replace("==", "=").split("=")
        return lambda labels: labels.get(key) == value
    if text.startswith("!"):
        return lambda labels: text[1:] not in labels
    return lambda labels: text in labels


def _field_test(text: str) -> Selector:
    negative = "!=" in text
    key, _, value = text.partition("!=" if negative else "=")
    path = key.strip().split(".")
    if path[0] not in (
        "metadata",
        "involvedObject",
        "regarding",
        "status",
        "spec",
        "type",
        "reason",
    ):
        raise bad_request(f'field label not supported: "{key}"')
    return lambda obj: (_dig(obj, path) == value.lstrip("=")) is not negative


def _dig(obj: Any, path: list[str]) -> str:
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return "" if obj is None else str(obj)
