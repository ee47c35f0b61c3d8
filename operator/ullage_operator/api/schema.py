"""Applies the CRD as an API server would, for `ullage plan` and `ullage up`.

Both commands run without an API server. The CRD is the single source of truth for the API. The
steps run in this order: reject unknown fields (as `kubectl apply` does), drop nulls, fill in
defaults, check the structural schema, and then check the CEL rules.
"""

import copy
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import ullage_operator
from ullage_operator.api.errors import Problem
from ullage_operator.api.naming import API_VERSION, KIND
from ullage_operator.api.renames import remedy
from ullage_operator.api.section_reader import api_word

if TYPE_CHECKING:
    import celpy
    import jsonschema

Schema = Mapping[str, Any]
CRD_FILE = "llmservices.serving.ullage.dev.yaml"

# `metadata` belongs to Kubernetes. The CRD restricts only the name in it.
_TOP_LEVEL = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_LISTED = 6
_DECIMALS = {
    r"^[0-9]{1,9}(\.[0-9]{1,6})?$": "a number",
    r"^(100(\.0{1,6})?|[1-9][0-9]?(\.[0-9]{1,6})?|0\.0[1-9][0-9]{0,4}|0\.[1-9][0-9]{0,5})$": (
        "a number from 0.01 to 100"
    ),
    r"^([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.[1-9][0-9]{0,5})$": "a number of at least 0.1",
    r"^([0-9]{1,5}(\.[0-9]{1,6})?|100000(\.0{1,6})?)$": "a number of at most 100000",
}
"""Descriptions, for error messages, of the decimal numbers that each pattern accepts.

Some of these fields may still hold a number that 0.1.0 stored under the same field name. For them,
the pattern also enforces the minimum and maximum. A CEL rule would fail on the stored number, and
the API server would then reject every write to the object.
"""
_OPEN = "x-kubernetes-preserve-unknown-fields"


def crd_path() -> Path:
    """Return the path of the CRD, either in the installed package or in the source tree."""
    package = Path(ullage_operator.__file__).parent
    installed = package / "crds" / CRD_FILE
    return installed if installed.exists() else package.parents[1] / "crds" / CRD_FILE


@functools.cache
def load_schema() -> Schema:
    """Return the openAPIV3Schema of the CRD's storage version.

    The schema is cached, so callers must not modify it.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    crd = yaml.load(crd_path().read_text(encoding="utf-8"), Loader=loader)
    schema: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def complete(schema: Schema, manifest: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Return the manifest as the API server would store it, and all problems with it."""
    problems = [*identity(manifest)]
    if problems:
        return {}, problems
    stored = copy.deepcopy(dict(manifest))
    problems += unknown_fields(schema, stored, "")
    fill(schema, stored)
    return stored, problems + problems_of(schema, stored)


def problems_of(schema: Schema, stored: Any) -> list[Problem]:
    """Return a manifest's violations of the schema or, if there are none, of its CEL rules.

    The defaults of the manifest must already be filled in.
    """
    broken = [*structure(schema, stored)]
    # Rules may read any field, so they only hold for values that the structure allows.
    return broken or [*rules(schema, stored, "")]


def identity(manifest: Any, kind: str = KIND) -> Iterator[Problem]:
    """Yield problems with the apiVersion, kind and name of an object."""
    if not isinstance(manifest, dict):
        yield Problem("", f"is not an object but {type(manifest).__name__}; write an {kind}")
        return
    for field, expected in (("apiVersion", API_VERSION), ("kind", kind)):
        if manifest.get(field) != expected:
            yield Problem(field, f"must be {expected}, not {manifest.get(field)!r}")
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        yield Problem("metadata.name", "required field is missing; name the service")


def unknown_fields(schema: Schema, value: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each unknown field, and suggest the most similar known name."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(schema.get("items", {}), item, f"{path}[{index}]")
    allowed = fields(schema, value)
    if not isinstance(value, dict) or not (allowed or "properties" in schema):
        return
    for name in value:
        where = join(path, str(name))
        if not path and name == "metadata":
            continue  # it belongs to Kubernetes, and the CRD has only the name
        if name in allowed:
            yield from unknown_fields(allowed[name], value[name], where)
        elif (path or name not in _TOP_LEVEL) and not schema.get(_OPEN):
            advice = remedy(where, value[name]) or suggestion(str(name), allowed)
            yield Problem(where, f"unknown field; {advice}")


def fields(schema: Schema, value: Any) -> Mapping[str, Schema]:
    """Return the schemas of an object's fields, or of a map's values, by name."""
    if isinstance(schema.get("additionalProperties"), dict) and isinstance(value, dict):
        every: Schema = schema["additionalProperties"]
        return dict.fromkeys(map(str, value), every)
    properties: Mapping[str, Schema] = schema.get("properties", {})
    return properties


def suggestion(word: str, allowed: Mapping[str, Any]) -> str:
    """Return a suggestion for an unknown name: the most similar known name, or all known names."""
    lower = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    if near:
        return f"did you mean {lower[near[0]]}?"
    listed = sorted(allowed) if len(allowed) <= _LISTED else [*sorted(allowed)[:_LISTED], "..."]
    return f"the fields here are {', '.join(listed)}"


def fill(schema: Schema, value: Any, path: str = "") -> list[str]:
    """Drop nulls and fill in defaults, in place.

    Returns:
        The paths of the fields that were missing and whose defaults were filled in.
    """
    filled = []
    if isinstance(value, list):
        for index, item in enumerate(value):
            filled += fill(schema.get("items", {}), item, f"{path}[{index}]")
    if not isinstance(value, dict):
        return filled
    for name, field in fields(schema, value).items():
        where = join(path, name)
        if name in value and value[name] is None:
            del value[name]
        if name in value:
            filled += fill(field, value[name], where)
        elif "default" in field:
            value[name] = copy.deepcopy(field["default"])
            fill(field, value[name])
            filled.append(where)
    return filled


_TYPES: Mapping[str, type] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "object": dict,
    "string": str,
}


def misfits(schema: Schema, value: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each value that has a wrong type or exceeds the schema's bounds.

    The operator performs only some of an API server's checks, because values that an older CRD
    accepted may be invalid now. Such values must not prevent the operator from applying the rest of
    the spec.
    """
    kind = schema.get("type", "")
    is_amount = bool(schema.get("x-kubernetes-int-or-string"))
    wanted = (int, str) if is_amount else _TYPES.get(kind, object)
    is_bool = isinstance(value, bool) and kind != "boolean"  # a bool is an int in Python

    if kind or is_amount:
        if is_bool or not isinstance(value, wanted):
            form = expected_form(schema) or f"of type {kind}"
            yield Problem(path, f"must be {form}, not {_short(value)}")
            return
        if isinstance(value, int | float) and not is_decimal(schema):
            yield from _out_of_bounds(schema, value, path)

        pattern = schema.get("pattern", "")
        if isinstance(value, str) and not re.search(pattern, value):
            form = expected_form(schema) or f"like {pattern}"
            yield Problem(path, f"must be {form}, not {_short(value)}")

    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from misfits(schema.get("items", {}), item, f"{path}[{index}]")

    if isinstance(value, dict):
        for name, field in fields(schema, value).items():
            if name in value:
                yield from misfits(field, value[name], join(path, name))
            elif name in schema.get("required", ()):
                yield Problem(join(path, name), "required field is missing")


def _out_of_bounds(schema: Schema, value: float, path: str) -> Iterator[Problem]:
    if value < schema.get("minimum", value):
        yield Problem(path, f"must be at least {schema['minimum']}, not {_short(value)}")
    if value > schema.get("maximum", value):
        yield Problem(path, f"must be at most {schema['maximum']}, not {_short(value)}")


_SHOWN = 80
"""Number of characters after which a message truncates a value."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def structure(schema: Schema, value: Any) -> Iterator[Problem]:
    """Yield a problem for each violation of the structural schema."""
    import jsonschema  # only for the command line: an API server checks the operator's objects

    validator = jsonschema.Draft4Validator(standard(schema))
    for error in validator.iter_errors(value):
        path = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
        ).lstrip(".")
        yield explain(error, path)


def standard(schema: Schema) -> dict[str, Any]:
    """Convert the schema to standard JSON Schema, which lacks Kubernetes' int-or-string type."""
    result = dict(schema)
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    if "properties" in schema:
        result["properties"] = {k: standard(v) for k, v in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = standard(schema[key])
    return result


def explain(error: "jsonschema.ValidationError", path: str) -> Problem:
    """Explain a violation in one sentence: the field, its value and the remedy."""
    schema = error.schema if isinstance(error.schema, dict) else {}
    value: Any = error.instance
    limit: Any = error.validator_value
    match error.validator:
        case "required":
            missing = next(name for name in limit if name not in value)
            meaning = schema["properties"][missing].get("description", "")
            return Problem(join(path, missing), f"required field is missing. {meaning}".strip())
        case "enum":
            text = f"must be one of {', '.join(map(str, limit))}, not {value!r}"
            if (word := api_word(str(value))) in limit:
                text += f"; write {word}"
        case "minimum" | "maximum" if is_decimal(schema):
            text = f"must be {expected_form(schema)}, not {value!r}"
        case "type" | "pattern" if form := expected_form(schema):
            text = f"must be {form}, not {value!r}"
        case "type":
            text = f"must be of type {limit}, not {value!r}"
            if limit == "integer" and isinstance(value, float):
                text = f"must be a whole number, not {value!r}"
        case "pattern":
            text = f"must match {limit}, not {value!r}"
        case "minimum":
            text = f"must be at least {limit}, not {value!r}"
        case "maximum":
            text = f"must be at most {limit}, not {value!r}"
        case _:
            text = error.message
    return Problem(path, text)


def expected_form(schema: Schema) -> str:
    """Describe the notation that a schema for percentages, quantities or durations expects."""
    if schema.get("pattern", "").endswith("%$"):
        return "a number such as 2 or a percentage such as 25%"
    if is_decimal(schema):
        return f'{_DECIMALS[schema["pattern"]]} such as 2 or, in quotes, "0.5"'
    if schema.get("x-kubernetes-int-or-string"):
        return (
            "a quantity above 0 such as 512Mi or 2Gi"
            if is_positive(schema)
            else ("a quantity such as 512Mi, 2Gi or 0")
        )
    return "a duration such as 10s, 6ms or 1m30s" if "(h|m|s" in schema.get("pattern", "") else ""


def is_decimal(schema: Schema) -> bool:
    """Return whether a field takes decimal fractions, which the API writes as text."""
    return schema.get("pattern") in _DECIMALS


def is_positive(schema: Schema) -> bool:
    return bool(schema.get("minimum", 0) > 0)


def rules(schema: Schema, value: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each violated CEL rule."""
    # Only an API server can check a rule about changes.
    checked = [r for r in schema.get("x-kubernetes-validations", ()) if "oldSelf" not in r["rule"]]
    text = json.dumps(value) if checked else ""
    for rule in checked:
        where = f"{path}{rule.get('fieldPath', '')}".lstrip(".")
        try:
            is_kept = holds(rule["rule"], text)
        except Exception as error:  # an API server also refuses a value if a rule fails
            yield Problem(where, f"{rule['message']} (the rule cannot be evaluated: {error!r})")
            continue
        if not is_kept:
            yield Problem(where, str(rule["message"]))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from rules(schema.get("items", {}), item, f"{path}[{index}]")
    if isinstance(value, dict):
        for name, field in fields(schema, value).items():
            if name in value:
                yield from rules(field, value[name], join(path, name))


@functools.lru_cache(maxsize=2048)
def holds(rule: str, text: str) -> bool:
    """Return whether a JSON value satisfies a CEL rule.

    Results are cached, because most services have many identical sections.
    """
    return bool(compiled(rule).evaluate({"self": cel_value(text)}))


@functools.lru_cache(maxsize=1)
def cel_value(text: str) -> Any:
    """Convert a JSON value to a CEL value, cached so that all rules of a section share it."""
    from celpy.adapter import json_to_cel

    return json_to_cel(json.loads(text))


@functools.cache
def compiled(rule: str) -> "celpy.Runner":
    """Return the compiled program of a CEL rule. Programs are stateless and therefore cached."""
    import celpy

    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
