"""Seals and unseals specs: replaces values of environment variables with hashes and back.

Sealed specs are stored in ConfigMaps. The values may be secrets, and more people may be allowed to
read ConfigMaps than services.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from ullage_operator.rollout.release import Release

_VALUE = "value"
_VALUE_HASH = "valueHash"
_HAS_ENV = "pools"
"""Section of a release in which a list named `env` holds environment variables.

In other sections, for example in the arguments of vLLM, field names are user-defined, so a list
named `env` may be anything.
"""


def sealed(release: Mapping[str, Any]) -> Release:
    """Return a release in which hashes replace the values of environment variables."""
    return _with_pools(release, lambda pools: _with_lists(pools, _sealed_variable))


def sealed_section(section: Any) -> Any:
    """Return a section of a spec in which hashes replace the values of environment variables."""
    return _with_lists(section, _sealed_variable)


def unsealed_section(section: Any, sources: Iterable[Any]) -> Any:
    """Return a sealed section with the original values of its environment variables.

    Args:
        section: the sealed section.
        sources: objects that may still have the original values.

    Raises:
        KeyError: no source contains the value for a hash.
    """
    values = dict(hashed_values(list(sources)))
    return _with_maps(section, partial(_unsealed_variable, values))


def sealed_widely(release: Mapping[str, Any]) -> Release:
    """Seal a release as older operators did, so that it can be compared with one of theirs.

    They hashed the value of everything in the pools that looks like an environment variable, not
    only of those in lists named `env`.
    """
    return _with_pools(release, lambda pools: _with_maps(pools, _sealed_variable))


def unsealed(release: Mapping[str, Any], values: Mapping[str, str]) -> Release:
    """Return a sealed release with its original values, whichever operator version sealed it.

    Raises:
        KeyError: an original value is unknown.
    """
    change = partial(_unsealed_variable, values)
    return _with_pools(release, lambda pools: _with_maps(pools, change))


def _with_pools(release: Mapping[str, Any], change: Callable[[Any], Any]) -> Release:
    return {
        name: change(section) if name == _HAS_ENV else section for name, section in release.items()
    }


def _with_lists(section: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each environment variable in a section, and return the new section."""
    match section:
        case Mapping():
            return {
                name: [change(variable) for variable in item]
                if name == "env" and isinstance(item, list)
                else _with_lists(item, change)
                for name, item in section.items()
            }
        case list():
            return [_with_lists(item, change) for item in section]
    return section


def _with_maps(section: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a section in which `change` was applied to each map, innermost first."""
    match section:
        case Mapping():
            return change({name: _with_maps(item, change) for name, item in section.items()})
        case list():
            return [_with_maps(item, change) for item in section]
    return section


def _sealed_variable(variable: Any) -> Any:
    match variable:
        case {"name": name, "value": value}:
            kept = {key: item for key, item in variable.items() if key != _VALUE}
            return kept | {_VALUE_HASH: _value_hash(name, value)}
    return variable


def _unsealed_variable(values: Mapping[str, str], variable: Any) -> Any:
    match variable:
        case {"name": _, "valueHash": str(value_hash)}:
            kept = {key: item for key, item in variable.items() if key != _VALUE_HASH}
            return kept | {_VALUE: values[value_hash]}
    return variable


def hashed_values(section: Any) -> Iterator[tuple[str, str]]:
    """Yield the hash and value of every environment variable in a document.

    A variable without a value counts as empty, because the API server drops empty values.
    """
    match section:
        case {"name": name, "value": value}:
            yield _value_hash(name, value), value
        case {"name": name} if len(section) == 1:
            yield _value_hash(name, ""), ""
        case Mapping():
            for item in section.values():
                yield from hashed_values(item)
        case list() | tuple():
            for item in section:
                yield from hashed_values(item)


def _value_hash(name: Any, value: Any) -> str:
    return hashlib.sha256(f"{name}={value}".encode()).hexdigest()[:16]
