"""Converts sections of an LLMService to immutable values, and back to the API's field names."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import inspect

from ullage_common.config.engine import MemoryLimits
from ullage_common.config.router import TenantRules
from ullage_common.process.config_file import Strict
from ullage_operator.api.quantities import parse_bytes, parse_decimal, parse_seconds

_WORDS = {"kv": "KV", "e2e": "E2E", "ca": "CA", "url": "URL", "cpu": "CPU"}
_COMPLETED = {MemoryLimits.__module__, TenantRules.__module__}
"""Modules with section classes whose defaults are in the CRD and not in the classes."""
_UNITS: Mapping[str, Callable[[Any], Any]] = {"bytes": parse_bytes, "seconds": parse_seconds}
_API_WORDS = {
    "bfloat16": "BFloat16",
    "cpu": "CPU",
    "cuda": "CUDA",
    "fp8": "FP8",
    "grpc": "grpc",
    "http": "http",
    "keda": "KEDA",
    "off": "None",
    "vllm": "VLLM",
    "w8a8": "W8A8",
}
Reader = Callable[[Any, str], Any]
"""A function that takes an API value and its path, and returns the value to pass to msgspec."""


def camel(name: str) -> str:
    """Return a field's name in the API, for example `sessionKVLimit` for `session_kv_limit`."""
    first, *rest = name.split("_")
    return first + "".join(_WORDS.get(word, word.capitalize()) for word in rest)


def api_word(word: str) -> str:
    """Return the API's CamelCase spelling of an enum value from a configuration file."""
    return _API_WORDS.get(word, word[:1].upper() + word[1:])


def section_reader(section: type[Strict]) -> Reader:
    """Return a function that converts a section of an API object to its section class.

    The reader renames fields to snake case, and converts quantities to bytes and seconds. It raises
    msgspec.ValidationError for a quantity that cannot be read, and for a missing field that has a
    default in the CRD.
    """
    kind = inspect.type_info(section)
    assert isinstance(kind, inspect.StructType)
    return _section_reader(kind)


def _reader(kind: inspect.Type) -> Reader | None:
    """Return a function that converts API values to the type `kind`.

    The result is None if values of this type need no conversion.
    """
    match kind:
        case inspect.Metadata(extra={"unit": unit}):
            return partial(_read_quantity, _UNITS[unit])
        case inspect.FloatType():
            return partial(_read_quantity, parse_decimal)
        case inspect.Metadata(type=inner) | inspect.UnionType(types=(inner, *_)):
            return _reader(inner)
        case inspect.StructType():
            return _section_reader(kind)
        case inspect.LiteralType(values=values):
            return partial(_read_word, {api_word(str(value)): value for value in values})
        case inspect.VarTupleType(item_type=inner) if read := _reader(inner):
            return partial(_read_list, read)
        case inspect.DictType(value_type=inner) if read := _reader(inner):
            return partial(_read_map, read)
        case _:
            return None


def _read_quantity(parse: Callable[[Any], Any], value: Any, path: str) -> Any:
    if value is None or isinstance(value, float):  # `to_api` wrote it
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise msgspec.ValidationError(f"{error} - at `${path}`") from error


def _read_word(words: Mapping[str, Any], value: Any, path: str) -> Any:
    """Convert an enum value from the API's spelling to that of configuration files.

    A value that already has the latter spelling is returned unchanged, because releases and the
    specs that the operator saves use it.
    """
    return words.get(value, value) if isinstance(value, str) else value


def _read_list(read: Reader, values: Any, path: str) -> Any:
    return [read(value, f"{path}[{i}]") for i, value in enumerate(values)]


def _read_map(read: Reader, values: Any, path: str) -> Any:
    return {name: read(value, f"{path}.{name}") for name, value in values.items()}


def _section_reader(kind: inspect.StructType) -> Reader:
    # Defaults of sections are for files that people write. In the API, the definition has the
    # defaults.
    is_complete = _is_complete(kind.cls)
    fields = [
        (
            each.name,
            camel(each.name),
            _reader(each.type),
            each.required or (is_complete and each.default is not None),
        )
        for each in kind.fields
    ]

    def read_section(section: Any, path: str) -> Any:
        if not isinstance(section, dict):
            return section
        values = {}
        for field_name, name, read, is_required in fields:
            if name in section:
                value = section[name]
                values[field_name] = read(value, f"{path}.{name}") if read else value
            elif is_required:
                raise msgspec.ValidationError(f"missing required field `{name}` - at `${path}`")
        return values

    return read_section


def field_names(section: type[Strict]) -> set[str]:
    """Return the names of all fields in a section, including those of nested sections."""
    return set(_field_names(inspect.type_info(section)))


def _field_names(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.Metadata(type=inner) | inspect.VarTupleType(item_type=inner):
            yield from _field_names(inner)
        case inspect.DictType(value_type=inner):
            yield from _field_names(inner)
        case inspect.UnionType(types=types):
            for member in types:
                yield from _field_names(member)
        case inspect.StructType(fields=fields):
            for each in fields:
                yield each.name
                yield from _field_names(each.type)


def _is_complete(kind: type) -> bool:
    """Return whether the CRD has defaults for all required fields of a section class."""
    modules = {base.__module__ for base in kind.__mro__}
    return not modules.isdisjoint(_COMPLETED) and not issubclass(kind, TenantRules)


def to_api(value: Any) -> Any:
    """Convert a section to JSON with the API's field names. Bytes and seconds become numbers."""
    match value:
        case msgspec.Struct():
            return {camel(n): to_api(getattr(value, n)) for n in value.__struct_fields__}
        case dict():
            return {name: to_api(each) for name, each in value.items()}
        case tuple() | list():
            return [to_api(each) for each in value]
        case _:
            return value
