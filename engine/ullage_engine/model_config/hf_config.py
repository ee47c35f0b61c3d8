"""Reads a Hugging Face config.json: every value checked when it is read, and rotary scaling."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ullage_engine.protocol.errors import WeightsError

Json = dict[str, object]


class HFConfig:
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

    def section(self, key: str) -> "HFConfig":
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not an object")
        return HFConfig(self.path, value)

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


def read_config(folder: Path) -> HFConfig:
    """Reads a model's config.json.

    Raises:
        WeightsError: it is absent, or no JSON object.
    """
    path = folder / "config.json"
    return HFConfig(path, read_json(path))


def read_json(path: Path) -> Json:
    """Reads a file that holds a JSON object.

    Raises:
        WeightsError: it is absent, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}; download the model again") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object; download the model again")
    return value


@dataclass(frozen=True, slots=True)
class Rope:
    """Constants of `ModelConfig`."""

    theta: float
    factors: list[float] | None = None
    """Divisors of the frequencies."""
    scale: float = 1.0
    """Times cosine and sine."""


def read_rope(config: HFConfig, head_dim: int, theta: float = 10000.0) -> Rope:
    """Reads `rope_parameters`, or `rope_theta` (or `theta`) and `rope_scaling`."""
    config.require(partial_rotary_factor=1.0)
    modern = config.section("rope_parameters")
    modern.require(partial_rotary_factor=1.0)
    scaling = modern if modern.values else config.section("rope_scaling")
    theta = modern.float("rope_theta", config.float("rope_theta", config.float("theta", theta)))
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(theta, _llama3_factors(scaling, theta, head_dim))
    if kind == "yarn":
        return _yarn(scaling, theta, head_dim)
    raise WeightsError(
        f"{config.path}: rope type {kind!r} is not supported; use default, llama3 or yarn"
    )


def _llama3_factors(scaling: HFConfig, theta: float, head_dim: int) -> list[float]:
    """Llama 3.1's rescaling: long wavelengths are divided by `factor`, short ones kept, those
    between blended, as its reference implementation does."""
    factor = scaling.float("factor")
    low, high = scaling.float("low_freq_factor"), scaling.float("high_freq_factor")
    original = scaling.int("original_max_position_embeddings")
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def _yarn(scaling: HFConfig, theta: float, head_dim: int) -> Rope:
    """YaRN (Peng et al., 2023): frequencies that turn often within the original context are kept,
    those that turn seldom divided by `factor`, those between blended along a ramp of dimensions;
    cosine and sine are multiplied by 0.1 ln(factor) + 1."""
    scaling.require(mscale=None, mscale_all_dim=None)
    factor = scaling.float("factor")
    original = scaling.int("original_max_position_embeddings")
    fast, slow = scaling.float("beta_fast", 32.0), scaling.float("beta_slow", 1.0)

    def dimension(turns: float) -> float:
        """Index of the frequency that turns so often within the original context."""
        wavelength = original / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if scaling.bool("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    ramp = [min(1.0, max(0.0, (index - low) / width)) for index in range(head_dim // 2)]
    scale = scaling.float("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return Rope(theta, [1.0 / (share / factor + 1.0 - share) for share in ramp], scale)
