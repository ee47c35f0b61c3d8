"""Reads a Hugging Face config.json and validates each value on access."""

import json
from pathlib import Path

from ullage_engine.protocol.errors import WeightsError

Json = dict[str, object]


class HFConfig:
    """A config.json or one of its sections. Errors name the file and the key."""

    def __init__(self, path: Path, values: Json, *, allows_unknown: bool = False) -> None:
        """Wrap a parsed JSON object.

        Args:
            path: the file, for error messages.
            values: the JSON object.
            allows_unknown: whether unknown keys are logged instead of refused.
        """
        self.path = path
        self.values = values
        self.allows_unknown = allows_unknown

    def int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not a whole number")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not a number")
        return value

    def bool(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not true or false")
        return value

    def list(self, key: str) -> list[object] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not a list")
        return value

    def section(self, key: str) -> "HFConfig":
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not an object")
        return HFConfig(self.path, value, allows_unknown=self.allows_unknown)

    def get(self, key: str, default: object = None) -> object:
        """Return the value of a key, or `default` if the value is missing or null."""
        value = self.values.get(key)
        return default if value is None else value


def read_config(folder: Path, *, allows_unknown: bool = False) -> HFConfig:
    """Read the config.json in a model's folder.

    Raises:
        WeightsError: if the file is missing or is not a JSON object.
    """
    path = folder / "config.json"
    return HFConfig(path, read_json(path), allows_unknown=allows_unknown)


def read_json(path: Path) -> Json:
    """Read a file that contains a JSON object.

    Raises:
        WeightsError: if the file is missing or does not contain a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}; download the model again") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not JSON: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object; download the model again")
    return value
