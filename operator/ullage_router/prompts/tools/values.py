"""Converts the values that some formats write as plain text to JSON, guided by a schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_REFERENCES = 16
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's names of values, which models write now and then."""


def json_value(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """Return the JSON of an argument's value.

    The text is the value itself if the schema wants a text, and JSON if it wants something else. A
    text that is not of the wanted type stays a text, which the client can refuse.

    Args:
        text: the value as the model wrote it.
        parameters: the JSON Schema of the function's arguments.
        key: name of the argument.
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    wanted = _types(schema, parameters) if schema is not None else {"string"}
    if wanted != {"string"}:
        stripped = text.strip()
        value = _parsed(_WORDS.get(stripped, stripped))
        kind = _TYPES.get(type(value[0])) if value else None
        if kind and kind != "string" and _is_wanted(kind, wanted):
            return json.dumps(value[0], ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _is_wanted(kind: str, wanted: set[str]) -> bool:
    return not wanted or kind in wanted or (kind == "integer" and "number" in wanted)


def _parsed(text: str) -> Sequence[Any]:
    """Return a list with the value of a JSON text, or an empty list if it is not JSON."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return []
    return [value]


def _types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows, or an empty set if it allows any."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if "const" in schema:
        return {_TYPES.get(type(schema["const"]), "string")}
    if isinstance(values := schema.get("enum"), list):
        return {_TYPES.get(type(value), "string") for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(name), list):
            allowed = [_types(branch, root) for branch in branches]
            return set().union(*allowed) if all(allowed) else set()
    return set()


def _resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Follow references within the document."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        found: object = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = found
    return None
