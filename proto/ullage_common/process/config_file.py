"""Reads and checks a process's configuration file, which is YAML or JSON."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
SomePercent = Annotated[float, msgspec.Meta(gt=0, le=100)]
LogLevel = Literal["debug", "info", "warning", "error"]
Bytes = Annotated[int, msgspec.Meta(extra={"unit": "bytes"})]
"""Number of bytes. The Kubernetes API uses a quantity such as 2Gi instead."""
Seconds = Annotated[float, msgspec.Meta(extra={"unit": "seconds"})]
"""Number of seconds. The Kubernetes API uses a duration such as 10s instead."""
SomeBytes = Annotated[Bytes, msgspec.Meta(ge=0)]
SomeSeconds = Annotated[Seconds, msgspec.Meta(gt=0)]

log = logging.getLogger(__name__)


class ConfigError(Exception):
    """Raised for an unusable configuration. The message names the field, its value and a remedy."""


class Strict(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all configuration sections: immutable, with checked types and bounds.

    Unknown fields are ignored, because a newer operator may write files for older images. Misspelt
    fields are refused earlier, when a user applies the LLMService.
    """


Config = TypeVar("Config", bound=Strict)


def read_file(path: Path, kind: type[Config]) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: the file is missing or is not YAML, or a field is missing or invalid.
    """
    data = _load(path)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def warn_unknown(path: Path, config: Strict) -> None:
    """Log a warning that lists a configuration file's unknown fields, which were ignored."""
    if fields := list(_beyond(_load(path), msgspec.to_builtins(config), "$")):
        log.warning(
            "fields of the configuration that this version does not know",
            extra={"path": str(path), "fields": fields},
        )


def _beyond(given: Any, parsed: Any, at: str) -> Iterator[str]:
    """Yield the paths of unknown fields, which are in the file but not in the parsed values.

    Args:
        given: the content of the file.
        parsed: the same content after parsing, which drops unknown fields.
        at: path of the content within the file.
    """
    match given, parsed:
        case dict(), dict():
            for name, value in given.items():
                if name in parsed:
                    yield from _beyond(value, parsed[name], f"{at}.{name}")
                else:
                    yield f"{at}.{name}"
        case list(), list() | tuple():
            for index, (one, other) in enumerate(zip(given, parsed, strict=False)):
                yield from _beyond(one, other, f"{at}[{index}]")


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; pass an existing file as --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML: {message}") from error
