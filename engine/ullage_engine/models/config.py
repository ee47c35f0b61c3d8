"""A model's config.json, each value checked when it is read."""

from pathlib import Path

from ullage_engine.weights.errors import WeightsError

Json = dict[str, object]


class ModelConfig:
    """One object of the file, or a section of it; errors name the file and the key."""

    def __init__(self, path: Path, values: Json) -> None:
        self.path = path
        self.values = values

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

    def section(self, key: str) -> "ModelConfig":
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not an object")
        return ModelConfig(self.path, value)

    def get(self, key: str, default: object = None) -> object:
        """The value; `default` where there is none or null."""
        value = self.values.get(key)
        return default if value is None else value

    def require(self, **fixed: object) -> None:
        """Refuses values other than these, which the implementation takes for granted."""
        for key, expected in fixed.items():
            value = self.get(key, expected)
            if value != expected:
                raise WeightsError(
                    f"{self.path}: {key} is {value!r}, but only {expected!r} is supported; "
                    "use another model"
                )
