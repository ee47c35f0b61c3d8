"""Structural schemas of custom resources: pruning, defaulting, validation with paths."""

import base64
import binascii
import copy
import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ullage_kubeapi.status import cause

Schema = Mapping[str, Any]
Cause = dict[str, str]
_QUANTITY_OR_INT = "x-kubernetes-int-or-string"
_OPEN = "x-kubernetes-preserve-unknown-fields"


def prune(value: Any, schema: Schema, path: str = "") -> tuple[Any, list[str]]:
    """`value` without the fields its schema does not know, and the paths of those."""
    unknown: list[str] = []
    return _prune(value, schema, path, unknown), unknown


def _prune(value: Any, schema: Schema, path: str, unknown: list[str]) -> Any:
    if isinstance(value, Mapping):
        return _prune_map(value, schema, path, unknown)
    if isinstance(value, list) and "items" in schema:
        return [
            _prune(item, schema["items"], f"{path}[{i}]", unknown) for i, item in enumerate(value)
        ]
    return value


def _prune_map(value: Schema, schema: Schema, path: str, unknown: list[str]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    kept: dict[str, Any] = {}
    for name, member in value.items():
        at = f"{path}.{name}" if path else name
        if name in properties:
            kept[name] = _prune(member, properties[name], at, unknown)
        elif isinstance(extra, Mapping):
            kept[name] = _prune(member, extra, at, unknown)
        elif extra or schema.get(_OPEN):
            kept[name] = member
        else:
            unknown.append(at)
    return kept


def default(value: Any, schema: Schema) -> Any:
    """`value` with the schema's defaults filled in; null for a non-nullable field is unset."""
    if isinstance(value, Mapping):
        filled = dict(value)
        for name, member in schema.get("properties", {}).items():
            unset = filled.get(name) is None and not (name in filled and member.get("nullable"))
            if unset and "default" in member:
                filled[name] = copy.deepcopy(member["default"])
            elif unset:
                filled.pop(name, None)
            if name in filled:
                filled[name] = default(filled[name], member)
        extra = schema.get("additionalProperties")
        if isinstance(extra, Mapping):
            filled = {name: default(member, extra) for name, member in filled.items()}
        return filled
    if isinstance(value, list) and "items" in schema:
        return [default(item, schema["items"]) for item in value]
    return value


def validate(value: Any, schema: Schema, path: str = "") -> Iterator[Cause]:
    """Every violation of the schema, as causes of an Invalid status."""
    if value is None:
        if not schema.get("nullable"):
            yield cause("FieldValueInvalid", path, "Invalid value: null: must not be null")
        return
    wrong = _wrong_type(value, schema)
    if wrong:
        yield cause("FieldValueTypeInvalid", path, wrong)
        return
    yield from _limits(value, schema, path)
    if isinstance(value, Mapping):
        yield from _validate_map(value, schema, path)
    elif isinstance(value, list):
        yield from _validate_list(value, schema, path)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, Mapping),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}


def _name_of(value: Any) -> str:
    type_name = next((name for name, is_type in _TYPES.items() if is_type(value)), "null")
    return "number" if type_name == "integer" and isinstance(value, float) else type_name


def _wrong_type(value: Any, schema: Schema) -> str:
    if schema.get(_QUANTITY_OR_INT):
        fits = _TYPES["integer"](value) or isinstance(value, str)
        wanted = "integer,string"
    else:
        wanted = schema.get("type", "")
        fits = not wanted or _TYPES[wanted](value)
    shown = f'"{_name_of(value)}"'
    return "" if fits else f"Invalid value: {shown}: must be of type {wanted}: {shown}"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _limits(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(_shown(option) for option in schema["enum"])
        text = f"Unsupported value: {_shown(value)}: supported values: {allowed}"
        yield cause("FieldValueNotSupported", path, text)
    for keyword, breaks, text in _KEYWORDS:
        if keyword in schema and breaks(value, schema[keyword], schema):
            shown = _shown(value) if isinstance(value, str | int | float) else _name_of(value)
            message = text.format(limit=schema[keyword])
            detail = f"Invalid value: {shown}: in body {message}"
            yield cause("FieldValueInvalid", path, f"{path} {detail}" if not path else detail)


def _is_number(value: Any) -> bool:
    return _TYPES["number"](value)


def _below(value: Any, limit: float, schema: Schema) -> bool:
    return _is_number(value) and (
        value <= limit if schema.get("exclusiveMinimum") else value < limit
    )


def _above(value: Any, limit: float, schema: Schema) -> bool:
    return _is_number(value) and (
        value >= limit if schema.get("exclusiveMaximum") else value > limit
    )


def _bad_format(value: Any, wanted: str, schema: Schema) -> bool:
    check = _FORMATS.get(wanted)
    if check is None or not isinstance(value, str):
        return False
    try:
        return not check(value)
    except (ValueError, binascii.Error):
        return True


_DURATION = re.compile(r"^[-+]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+$|^0$")
_FORMATS: dict[str, Callable[[str], object]] = {
    "date-time": lambda v: datetime.datetime.fromisoformat(v),
    "duration": lambda v: _DURATION.match(v),
    "byte": lambda v: base64.b64decode(v, validate=True) is not None,
}

_Check = Callable[[Any, Any, Schema], bool]
_KEYWORDS: tuple[tuple[str, _Check, str], ...] = (
    ("minimum", _below, "should be greater than or equal to {limit}"),
    ("maximum", _above, "should be less than or equal to {limit}"),
    (
        "multipleOf",
        lambda v, n, _: _is_number(v) and not math.isclose(v / n, round(v / n)),
        "should be a multiple of {limit}",
    ),
    (
        "pattern",
        lambda v, p, _: isinstance(v, str) and not re.search(p, v),
        "should match '{limit}'",
    ),
    (
        "minLength",
        lambda v, n, _: isinstance(v, str) and len(v) < n,
        "should be at least {limit} chars long",
    ),
    (
        "maxLength",
        lambda v, n, _: isinstance(v, str) and len(v) > n,
        "should be at most {limit} chars long",
    ),
    (
        "minItems",
        lambda v, n, _: isinstance(v, list) and len(v) < n,
        "should have at least {limit} items",
    ),
    (
        "maxItems",
        lambda v, n, _: isinstance(v, list) and len(v) > n,
        "should have at most {limit} items",
    ),
    (
        "minProperties",
        lambda v, n, _: isinstance(v, Mapping) and len(v) < n,
        "should have at least {limit} properties",
    ),
    (
        "maxProperties",
        lambda v, n, _: isinstance(v, Mapping) and len(v) > n,
        "should have at most {limit} properties",
    ),
    ("format", _bad_format, "must be of type {limit}"),
)


def _validate_map(value: Schema, schema: Schema, path: str) -> Iterator[Cause]:
    for name in schema.get("required", ()):
        if name not in value:
            at = f"{path}.{name}" if path else name
            yield cause("FieldValueRequired", at, "Required value")
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    for name, member in value.items():
        below = properties.get(name) or (extra if isinstance(extra, Mapping) else None)
        if below is not None:
            yield from validate(member, below, f"{path}.{name}" if path else name)


def _validate_list(value: list[Any], schema: Schema, path: str) -> Iterator[Cause]:
    keys = schema.get("x-kubernetes-list-map-keys")
    seen: list[Any] = []
    for index, item in enumerate(value):
        at = f"{path}[{index}]"
        if "items" in schema:
            yield from validate(item, schema["items"], at)
        if schema.get("x-kubernetes-list-type") in ("set", "map"):
            identity = [item.get(key) for key in keys] if keys else item
            if identity in seen:
                yield cause("FieldValueDuplicate", at, f"Duplicate value: {_shown(identity)}")
            seen.append(identity)
