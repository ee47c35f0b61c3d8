"""Merges service specs over the LLMServiceBases that they reference.

An LLMServiceBase is a spec that several services share.

An API server fills in a service's defaults before the operator reads the service. The operator
therefore cannot tell whether a field was omitted or explicitly set to its default. It treats both
as unset, so a base may set them. Bases get no defaults, so the last base that sets a field wins.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ullage_operator.api import schema
from ullage_operator.api.errors import InvalidManifest, Problem
from ullage_operator.api.naming import API_VERSION, BASE, KIND
from ullage_operator.api.schema import Schema

Spec = dict[str, Any]

FIELD = "baseRefs"
_SERVICE_ONLY = frozenset({FIELD, "replicas", "stop"})
"""Spec fields that an LLMServiceBase cannot set.

A base overrides every field that the service leaves at its default. For example, a base that could
set `replicas` would undo a `kubectl scale` to the default number.
"""
_RULES = "x-kubernetes-validations"
_MERGED_LISTS = ("containers", "initContainers")
"""Lists in which items with the same key are merged field by field.

In all other lists, the service's item replaces the base's item with the same key.
"""


@dataclass(frozen=True, slots=True)
class Bases:
    """The LLMServiceBases that a service may reference."""

    specs: Mapping[str, Spec] = field(default_factory=dict)
    """Specs of the bases, by base name."""
    remedy: str = "create it, or leave it out"
    """Fix to suggest in the error message about a missing base."""


NO_BASES = Bases()


def base_names(spec: Any) -> list[str]:
    """Return the names of the bases that a spec references, skipping malformed references."""
    refs = spec.get(FIELD) if isinstance(spec, Mapping) else None
    names = [ref.get("name") for ref in refs or () if isinstance(ref, Mapping)]
    return [name for name in names if isinstance(name, str)]


def with_bases(definition: Schema, name: str, spec: Spec, bases: Bases) -> Spec:
    """Return a spec merged over its bases, with all defaults filled in.

    Args:
        definition: the schema of an LLMService.
        name: the name of the service.
        spec: the service's own spec, with its defaults.

    Raises:
        InvalidManifest: a base is missing, or the merged spec is invalid.
    """
    names = base_names(spec)
    if missing := [*_missing(names, bases)]:
        raise InvalidManifest(missing)

    section = definition["properties"]["spec"]
    shared: Spec = {}
    for each in names:
        shared = merged(section, bases.specs[each], shared, has_defaults=False)
    whole: Spec = copy.deepcopy(merged(section, spec, shared, has_defaults=True))
    schema.fill(section, whole)

    # No API server has validated the merged spec, so every check of one runs here.
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": whole}
    if problems := schema.problems_of(definition, manifest):
        raise InvalidManifest([_with_origin(each, names, bases) for each in problems])
    return whole


def overruled_defaults(definition: Schema, spec: Spec, bases: Bases) -> list[str]:
    """Return the paths of fields that a manifest sets to their default but that a base overrides.

    Args:
        spec: the spec as written, before defaults are filled in.
    """
    section = definition["properties"]["spec"]
    shared: Spec = {}
    for each in base_names(spec):
        shared = merged(section, bases.specs.get(each, {}), shared, has_defaults=False)
    return [*_overruled(section, spec, shared, "spec")]


def base_schema(definition: Schema) -> Schema:
    """Return the schema of a base's spec.

    This is the schema of a service's spec without defaults, required fields or cross-field rules.
    """
    section = dict(definition["properties"]["spec"])
    fields = {
        name: each for name, each in section["properties"].items() if name not in _SERVICE_ONLY
    }
    optional = _optional(section | {"properties": fields})
    return optional | {"description": "Fields of the specs of services that name this base."}


def _optional(node: Schema, is_item: bool = False) -> dict[str, Any]:
    kept = {name: value for name, value in node.items() if name != "default"}
    if "properties" in node or node.get("type") in ("object", "array"):
        kept.pop(_RULES, None)
    if not is_item:  # list items still need the keys that distinguish them
        kept.pop("required", None)
    kept.pop("minProperties", None)
    if "properties" in node:
        kept["properties"] = {name: _optional(each) for name, each in node["properties"].items()}
    if isinstance(node.get("items"), Mapping):
        kept["items"] = _optional(node["items"], is_item=True)
    if isinstance(node.get("additionalProperties"), Mapping):
        kept["additionalProperties"] = _optional(node["additionalProperties"])
    return kept


def base_problems(definition: Schema, manifest: Any) -> list[Problem]:
    """Return the problems that would make an API server reject a base."""
    if problems := [*schema.identity(manifest, BASE.name)]:
        return problems
    whole = {
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": base_schema(definition)},
    }
    shown = {name: value for name, value in manifest.items() if name != "status"}
    unknown = [*schema.unknown_fields(whole, shown, "")]
    return unknown or [*schema.structure(whole, shown)]


def _missing(names: Sequence[str], bases: Bases) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name not in bases.specs:
            path = f"spec.{FIELD}[{index}].name"
            yield Problem(path, f"there is no {BASE.name} {name}; {bases.remedy}")


def _with_origin(problem: Problem, names: Sequence[str], bases: Bases) -> Problem:
    """Return a problem whose message also names the bases that set the affected section."""
    section = problem.path.removeprefix("spec.").partition(".")[0].partition("[")[0]
    saying = [name for name in names if section in bases.specs[name]]
    if not saying:
        return problem
    text = f"{problem.message} (spec.{section} also comes from {BASE.name} {', '.join(saying)})"
    return replace(problem, message=text)


def merged(node: Schema, over: Any, under: Any, *, has_defaults: bool) -> Any:
    """Merge `over`, a part of a base or spec, over `under`, the same part of the earlier bases.

    If they are not both objects, the result is `over`.

    Args:
        has_defaults: whether `over` may have defaults that the API server filled in. Such a default
            does not replace a value of `under`.
    """
    if isinstance(over, Mapping) and isinstance(under, Mapping):
        fields = schema.fields(node, {**under, **over})
        result = dict(over)
        for name, value in under.items():
            each = fields.get(name, {})
            if name not in over or (has_defaults and is_default(each, over[name])):
                result[name] = value
            else:
                result[name] = _merged_field(name, each, over[name], value, has_defaults)
        return result
    return over


def _merged_field(name: str, node: Schema, over: Any, under: Any, has_defaults: bool) -> Any:
    keys = node.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(over, list) or not isinstance(under, list):
        return merged(node, over, under, has_defaults=has_defaults)

    key = keys[0]
    item = node.get("items", {})
    below = {each.get(key): each for each in under}
    items = [
        merged(item, each, below[each.get(key)], has_defaults=has_defaults)
        if name in _MERGED_LISTS and each.get(key) in below
        else each
        for each in over
    ]
    taken = {each.get(key) for each in over}
    return items + [each for each in under if each.get(key) not in taken]


def is_default(node: Schema, value: Any) -> bool:
    """Return whether a value equals the default in its schema."""
    if "default" not in node:
        return False
    default = copy.deepcopy(node["default"])
    schema.fill(node, default)
    return bool(value == default)


def _overruled(node: Schema, said: Any, shared: Any, path: str) -> Iterator[str]:
    if not isinstance(said, Mapping) or not isinstance(shared, Mapping):
        return
    for name, value in said.items():
        each = schema.fields(node, said).get(name, {})
        if name not in shared or value == shared[name]:
            continue
        if isinstance(value, Mapping):
            yield from _overruled(each, value, shared[name], f"{path}.{name}")
        elif is_default(each, value):
            yield f"{path}.{name}"
