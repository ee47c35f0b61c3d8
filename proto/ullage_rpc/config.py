"""A process's configuration: one YAML or JSON file, read once, never changed."""

from pathlib import Path
from typing import TypeVar

import msgspec
import yaml


class ConfigError(Exception):
    """The configuration cannot be used; the message names the field, the value and the remedy."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, and an unknown field is an error."""


Config = TypeVar("Config", bound=Strict)


def read_file(path: Path, kind: type[Config]) -> Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: the file is missing, is not YAML, or a field is unknown or wrong.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; pass an existing file as --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML: {message}") from error
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
