"""What services share: the spec of an LLMServiceBase, laid under a service's own. Pure.

An API server has filled in a service's defaults before anybody reads it, so what a service leaves
out looks like what it sets to the default. Both count as not said: there a base decides. Bases have
no defaults, so among them the last that says a field decides, whatever it says.
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
_RULES = "x-kubernetes-validations"
_MERGED_LISTS = ("containers", "initContainers")
"""Lists whose items are merged by their keys; of others an item of the service replaces a base's of
the same key."""


@dataclass(frozen=True, slots=True)
class Bases:
    """The bases that a service may name."""

    specs: Mapping[str, Spec] = field(default_factory=dict)
    """Specs by the names of the bases."""
    remedy: str = "create it, or leave it out"
    """What to do about a base that is not among them."""


NO_BASES = Bases()


def base_names(spec: Any) -> list[str]:
    """Return the names of the bases of a spec, as far as they can be read."""
    refs = spec.get(FIELD) if isinstance(spec, Mapping) else None
    names = [ref.get("name") for ref in refs or () if isinstance(ref, Mapping)]
    return [name for name in names if isinstance(name, str)]


def with_bases(definition: Schema, name: str, spec: Spec, bases: Bases) -> Spec:
    """Return a spec over its bases, with all defaults.

    Args:
        definition: of the whole LLMService.
        name: of the service.
        spec: the service's own, with its defaults.

    Raises:
        InvalidManifest: a base is not there, or what comes of them is no valid spec.
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

    # No API server has seen what comes of them, so all is asked that one would ask.
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": whole}
    if problems := schema.problems_of(definition, manifest):
        raise InvalidManifest([_with_origin(each, names, bases) for each in problems])
    return whole


def overruled_defaults(definition: Schema, spec: Spec, bases: Bases) -> list[str]:
    """Return the fields that a manifest sets to their default though one of its bases sets them to
    something else, which decides.

    Args:
        spec: as it was written, without defaults.
    """
    section = definition["properties"]["spec"]
    shared: Spec = {}
    for each in base_names(spec):
        shared = merged(section, bases.specs.get(each, {}), shared, has_defaults=False)
    return [*_overruled(section, spec, shared, "spec")]


_ITS_OWN = frozenset({FIELD, "replicas", "stop"})
"""Fields that are a service's alone: `kubectl scale` and `stop` would be undone by a base, since a
default counts as not said."""


def base_schema(definition: Schema) -> Schema:
    """Return the schema of a base's spec: a service's without defaults, without what is required
    of a whole one, and without rules about several fields."""
    section = dict(definition["properties"]["spec"])
    fields = {name: each for name, each in section["properties"].items() if name not in _ITS_OWN}
    optional = _optional(section | {"properties": fields})
    return optional | {"description": "Fields of the specs of services that name this base."}


def _optional(node: Schema, is_item: bool = False) -> dict[str, Any]:
    kept = {name: value for name, value in node.items() if name != "default"}
    if "properties" in node or node.get("type") in ("object", "array"):
        kept.pop(_RULES, None)
    if not is_item:  # of a list's items the keys stay, by which they are told apart
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
    """Return what an API server would refuse of a base."""
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
    """Return a problem that names the base which says something of that section."""
    section = problem.path.removeprefix("spec.").partition(".")[0].partition("[")[0]
    saying = [name for name in names if section in bases.specs[name]]
    if not saying:
        return problem
    text = f"{problem.message} (spec.{section} is also of {BASE.name} {', '.join(saying)})"
    return replace(problem, message=text)


def merged(node: Schema, over: Any, under: Any, *, has_defaults: bool) -> Any:
    """Return a value laid over another.

    Args:
        has_defaults: whether `over` may have defaults that nobody has said.
    """
    if isinstance(over, Mapping) and isinstance(under, Mapping):
        known = schema.fields(node, {**under, **over})
        result = dict(over)
        for name, value in under.items():
            each = known.get(name, {})
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

    key, item = keys[0], node.get("items", {})
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
    """Whether a value is what an API server fills in where nothing is said."""
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
