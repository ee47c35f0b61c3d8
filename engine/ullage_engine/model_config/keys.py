"""Rules for a model's configuration keys: honoured, ignored, or restricted to certain values.

Each family has a table that says for each key in config.json whether the engine honours, ignores or
refuses it. docs/reference/model-keys.md is generated from these tables. A key that is in no table
may change results, so the engine refuses to start unless `model.allow_unknown_config` is set.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.protocol.errors import WeightsError

log = logging.getLogger("ullage.engine.weights")


@dataclass(frozen=True, slots=True)
class Key:
    """The rule that says how the engine treats one configuration key."""

    meaning: str
    """What the key means if it is honoured, or why it does not affect results."""
    is_read: bool = False
    """Whether the engine honours the key's value."""
    values: tuple[object, ...] = ()
    """Values that have the same effect as omitting the key. The engine refuses other values."""
    same_as: str = ""
    """Name of another key that must have the same value."""


Keys = Mapping[str, Key]


def read(meaning: str, *names: str) -> dict[str, Key]:
    """Return rules for keys whose values the engine reads and follows."""
    return dict.fromkeys(names, Key(meaning, is_read=True))


def harmless(reason: str, *names: str) -> dict[str, Key]:
    """Return rules for keys that may have any value, because they never affect results."""
    return dict.fromkeys(names, Key(reason))


def fixed(meaning: str, values: tuple[object, ...], *names: str) -> dict[str, Key]:
    """Return rules for keys that must be missing, null or one of `values`."""
    return dict.fromkeys(names, Key(meaning, values=values))


def same(meaning: str, name: str, other: str) -> dict[str, Key]:
    """Return the rule for a key that is an alias of `other` and must have the same value."""
    return {name: Key(meaning, same_as=other)}


def check_keys(section: HFConfig, keys: Keys, where: str = "") -> None:
    """Raise an error if a key would change results but is not supported.

    Args:
        section: the object to check. A key whose value is null counts as missing.
        keys: rules by key.
        where: path of the section for error messages, with a trailing dot.

    Raises:
        WeightsError: if a value is not supported, or a key is unknown and unknown keys are not
            allowed.
    """
    for name, value in section.values.items():
        if value is None:
            continue

        key = keys.get(name)
        if key is None:
            refuse_unknown(section, f"{where}{name}", value)
        elif key.values and not any(_equal(value, each) for each in key.values):
            raise WeightsError(
                f"{section.path}: {where}{name} is {value!r}, but only "
                f"{_listed(key.values)} is supported; use another model"
            )
        elif key.same_as:
            other = section.values.get(key.same_as)
            if not _equal(value, other):
                raise WeightsError(
                    f"{section.path}: {where}{name} is {value!r}, but {key.same_as} is "
                    f"{other!r}; give both the value that the model was trained with"
                )


def refuse_unknown(section: HFConfig, path: str, value: object) -> None:
    """Raise an error about an unknown key, or log a warning if unknown keys are allowed.

    Raises:
        WeightsError: if unknown keys are not allowed.
    """
    shown = repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]} ..."
    if section.allows_unknown:
        log.warning(
            "%s: %s %s is not known here and is not computed with, as "
            "spec.model.allowUnknownConfig allows; answers are wrong if the model depends on it",
            section.path,
            path,
            shown,
        )
        return
    raise WeightsError(
        f"{section.path}: {path} {shown} is not known here, and may change what the numbers "
        "mean; use another model or, if the model does not depend on it, set "
        "spec.model.allowUnknownConfig: true (model.allow_unknown_config)"
    )


def _equal(value: object, other: object) -> bool:
    """Return whether two JSON values are equal. The number 1 equals 1.0 but not `true`."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _listed(values: tuple[object, ...]) -> str:
    shown = ["no value" if each is None else repr(each) for each in values]
    return " or ".join(shown)
