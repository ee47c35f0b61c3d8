"""CEL validation rules of a schema (`x-kubernetes-validations`), transition rules included.

Kubernetes' own CEL functions beyond the standard ones are given as far as quantities go:
`isQuantity`, `quantity`, and on it `isGreaterThan`, `isLessThan`, `compareTo`, `sign`.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import celpy
from celpy import celtypes
from ullage_kubeapi.status import cause

Schema = Mapping[str, Any]
_ABSENT = object()
_SUFFIXES = {"": 1, "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_SUFFIXES |= {s: Decimal(1000) ** (i + 1) for i, s in enumerate("kMGTPE")}
_SUFFIXES |= {f"{s}i": Decimal(1024) ** (i + 1) for i, s in enumerate("KMGTPE")}


def quantity(text: str) -> Decimal:
    """A Kubernetes quantity as a number; ValueError where it is none."""
    digits = text.rstrip("numkKMGTPEi") if not text[-1:].isdigit() else text
    suffix = text[len(digits) :]
    try:
        return Decimal(digits) * _SUFFIXES[suffix]
    except (InvalidOperation, KeyError) as error:
        raise ValueError(f"{text!r} is not a quantity") from error


class _Quantity(celtypes.DoubleType):
    """A quantity inside a CEL expression."""


def _cel_quantity(text: Any) -> celtypes.DoubleType:
    return _Quantity(float(quantity(str(text))))


def _is_quantity(text: Any) -> celtypes.BoolType:
    try:
        quantity(str(text))
    except ValueError:
        return celtypes.BoolType(False)
    return celtypes.BoolType(True)


_FUNCTIONS: dict[str, Any] = {
    "quantity": _cel_quantity,
    "isQuantity": _is_quantity,
    "isGreaterThan": lambda a, b: celtypes.BoolType(a > b),
    "isLessThan": lambda a, b: celtypes.BoolType(a < b),
    "compareTo": lambda a, b: celtypes.IntType((a > b) - (a < b)),
    "sign": lambda a: celtypes.IntType((a > 0) - (a < 0)),
}


@functools.lru_cache(maxsize=512)
def _program(expression: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions=_FUNCTIONS)


def compile_all(schema: Schema, path: str = "") -> Iterator[dict[str, str]]:
    """A cause for each rule that does not compile."""
    for rule in schema.get("x-kubernetes-validations", ()):
        try:
            _program(rule["rule"])
        except celpy.CELParseError as error:
            yield cause("FieldValueInvalid", path, f"compilation failed: {error}")
    for name, member in schema.get("properties", {}).items():
        yield from compile_all(member, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), Mapping):
            yield from compile_all(schema[keyword], f"{path}[]")


def violations(
    value: Any, schema: Schema, old: Any = _ABSENT, path: str = ""
) -> Iterator[dict[str, str]]:
    """A cause for each rule that `value` breaks; rules with `oldSelf` need an old value. What an
    update leaves as it was may break them, as far as the API server can tell."""
    if old is not _ABSENT and _is_unchanged(value, old, schema):
        return
    asked = schema.get("x-kubernetes-validations", ())
    texts = _texts(value, old, schema) if asked else ()
    for rule in asked:
        if "oldSelf" in rule["rule"] and old is _ABSENT and not rule.get("optionalOldSelf"):
            continue
        message = _broken(
            rule["rule"], rule.get("message", ""), rule.get("messageExpression", ""), texts
        )
        if message:
            at = f"{path}{rule['fieldPath']}" if "fieldPath" in rule else path
            kind = "object" if isinstance(value, Mapping) else value
            reason = rule.get("reason", "FieldValueInvalid")
            yield cause(reason, at, f'Invalid value: "{kind}": {message}')
    yield from _below(value, schema, old, path)


def _is_unchanged(value: Any, old: Any, schema: Schema) -> bool:
    """Compares field by field, as the API server does: fields that the schema leaves open count as
    changed, and so does what they stand in, except in lists that are no map."""
    if isinstance(value, Mapping):
        return (
            isinstance(old, Mapping)
            and value.keys() == old.keys()
            and all(
                (below := _schema_of(name, schema)) is not None
                and _is_unchanged(member, old[name], below)
                for name, member in value.items()
            )
        )
    if isinstance(value, list) and (keys := schema.get("x-kubernetes-list-map-keys")):
        return (
            isinstance(old, list)
            and len(value) == len(old)
            and all(
                _is_unchanged(item, _old_item(item, old, keys), schema["items"]) for item in value
            )
        )
    return bool(value == old)


def _schema_of(name: str, schema: Schema) -> Schema | None:
    """The schema of an object's field, if it has one."""
    extra = schema.get("additionalProperties")
    below = schema.get("properties", {}).get(name)
    return below or (extra if isinstance(extra, Mapping) else None)


def _texts(value: Any, old: Any, schema: Schema) -> tuple[str, ...]:
    """What the rules of one value may read, in JSON: the value, and the old one if there is one."""
    values = (value,) if old is _ABSENT else (value, old)
    return tuple(json.dumps(_typed(each, schema)) for each in values)


@functools.lru_cache(maxsize=8)
def _cel_value(text: str) -> Any:
    return celpy.json_to_cel(json.loads(text))


@functools.lru_cache(maxsize=8192)
def _broken(rule: str, message: str, expression: str, texts: tuple[str, ...]) -> str:
    """What to say of a broken rule, else nothing; kept, since most writes leave most as it was."""
    names = dict(zip(("self", "oldSelf"), map(_cel_value, texts), strict=False))
    try:
        if _program(rule).evaluate(names):
            return ""
        if expression:
            return str(_program(expression).evaluate(names))
    except celpy.CELEvalError as error:
        return f"{message or 'rule error'}: {rule}: {error.args[0]}"
    return message or f"failed rule: {rule}"


def _typed(value: Any, schema: Schema) -> Any:
    """`value` with whole numbers as floats where the schema says number: CEL tells them apart."""
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties")
        other = extra if isinstance(extra, Mapping) else {}
        return {name: _typed(member, properties.get(name, other)) for name, member in value.items()}
    if isinstance(value, list):
        return [_typed(item, schema.get("items", {})) for item in value]
    return float(value) if schema.get("type") == "number" else value


def _below(value: Any, schema: Schema, old: Any, path: str) -> Iterator[dict[str, str]]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            below = _schema_of(name, schema)
            if below is not None and member is not None:
                before = old.get(name, _ABSENT) if isinstance(old, Mapping) else _ABSENT
                yield from violations(member, below, before, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            # Items of a list have no old value unless the list is a map, as at the real server.
            before = _old_item(item, old, schema.get("x-kubernetes-list-map-keys"))
            yield from violations(item, schema["items"], before, f"{path}[{index}]")


def _old_item(item: Any, old: Any, keys: list[str] | None) -> Any:
    if not keys or not isinstance(old, list):
        return _ABSENT
    identity = [item.get(key) for key in keys]
    return next((o for o in old if [o.get(key) for key in keys] == identity), _ABSENT)
