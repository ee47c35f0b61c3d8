"""Removes annotations from JSON Schemas that a grammar cannot follow.

An annotation forbids nothing. `format` is one by default in JSON Schema 2020-12, so a format that
the grammar does not know is left out. `uniqueItems` is one only where a list has at most one item.
Assertions stay, and the engine refuses those that it cannot keep.
"""

from collections.abc import Mapping
from typing import Any

from ullage_common.wire.limits import MAX_SCHEMA_DEPTH

KNOWN_FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    }
)
"""Formats that engines enforce (docs/reference/api.md)."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_SINGLE = frozenset({"items", "additionalProperties"})


def without_annotations(
    schema: Mapping[str, Any], path: str
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the schema without the annotations that a grammar does not know.

    Args:
        schema: The JSON Schema.
        path: Where it is in the request.

    Returns:
        The schema, and the paths of what was removed. The schema is unchanged if that is nothing.
    """
    removed: list[str] = []
    kept = _kept(schema, path, removed, MAX_SCHEMA_DEPTH)
    return (kept, tuple(removed)) if removed else (schema, ())


def _kept(schema: Any, path: str, removed: list[str], depth: int) -> Any:
    """Return a subschema without annotations, and add their paths to `removed`.

    What is nested deeper than `depth` stays as it is, and the engine refuses it.
    """
    if not depth or not isinstance(schema, Mapping):
        return schema
    kept = dict[str, Any]()
    for key, value in schema.items():
        where = f"{path}.{key}"
        if _is_annotation(key, value, schema):
            removed.append(where)
        elif key in _MAPS and isinstance(value, Mapping):
            kept[key] = {
                name: _kept(each, f"{where}.{name}", removed, depth - 1)
                for name, each in value.items()
            }
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [
                _kept(each, f"{where}[{i}]", removed, depth - 1) for i, each in enumerate(value)
            ]
        elif key in _SINGLE:
            kept[key] = _kept(value, where, removed, depth - 1)
        else:
            kept[key] = value
    return kept


def _is_annotation(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in KNOWN_FORMATS
    if key == "uniqueItems":
        most = schema.get("maxItems")
        is_short = isinstance(most, int | float) and most <= 1
        return value is False or is_short
    return key in ("minContains", "maxContains") and "contains" not in schema
