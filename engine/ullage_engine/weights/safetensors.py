"""Reads a directory of config.json and safetensors, as Hugging Face lays it out."""

import json
import math
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ullage_engine.models.geometry import LayerSpec, ModelGeometry
from ullage_engine.weights.errors import WeightsError

Json = dict[str, object]

ARCHITECTURES = ("llama",)

FIXED: dict[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What this implementation of the family takes for granted."""


class SafetensorsReader:
    """One open model directory."""

    def __init__(self, folder: Path) -> None:
        """Reads the configuration and maps the tensors.

        Raises:
            WeightsError: a file is missing, cut short, or the architecture is not supported.
        """
        self._folder = folder
        self.geometry = read_geometry(folder)
        self._stack = ExitStack()
        self._files: dict[str, safe_open] = {}
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise WeightsError(
                    f"{path}: not a whole safetensors file ({reason}); download it again"
                ) from error
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str) -> torch.Tensor:
        """One tensor as stored."""
        if name not in self._files:
            raise WeightsError(
                f"{self._folder}: tensor {name!r} is missing; download the model again"
            )
        tensor: torch.Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, those of its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{folder}: no .safetensors file; download the model again")
        return files
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise WeightsError(f"{index}: no 'weight_map'; download the model again")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise WeightsError(f"{folder}: {missing[0]} is missing; download the model again")
    return files


def read_geometry(folder: Path) -> ModelGeometry:
    """Turns config.json (and generation_config.json's end tokens) into a geometry."""
    path = folder / "config.json"
    config = _Config(path, _read_json(path))
    _check_supported(config)
    hidden, heads = config.int("hidden_size"), config.int("num_attention_heads")
    head_dim = config.int("head_dim", hidden // heads)
    theta, factors = _rope(config, head_dim)
    return ModelGeometry(
        architecture="llama",
        layers=(LayerSpec(),) * config.int("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.int("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=config.int("intermediate_size"),
        vocab=config.int("vocab_size"),
        max_position=config.int("max_position_embeddings"),
        rope_theta=theta,
        rope_factors=factors,
        rms_eps=config.float("rms_norm_eps"),
        tied=bool(config.values.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(folder, config),
    )


class _Config:
    """A JSON object whose values are checked when they are read."""

    def __init__(self, path: Path, values: Json) -> None:
        self.path = path
        self.values = values

    def int(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not a whole number")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not a number")
        return value

    def section(self, key: str) -> "_Config":
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not an object")
        return _Config(self.path, value)


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}; download the model again") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object; download the model again")
    return value


def _check_supported(config: _Config) -> None:
    family = config.values.get("model_type")
    if family not in ARCHITECTURES:
        raise WeightsError(
            f"{config.path}: model_type {family!r} is not supported; "
            f"use a model of {', '.join(ARCHITECTURES)}"
        )
    for key, expected in FIXED.items():
        value = config.values.get(key, expected)
        if value != expected:
            raise WeightsError(
                f"{config.path}: {key} is {value!r}, but only {expected!r} is supported; "
                "use another model"
            )
    if config.values.get("quantization_config") is not None:
        raise WeightsError(
            f"{config.path}: quantization_config is not supported; use the unquantised model"
        )


def _rope(config: _Config, head_dim: int) -> tuple[float, list[float] | None]:
    """Base and divisors of the rotary frequencies, from either spelling of the configuration."""
    modern = config.section("rope_parameters")
    scaling = modern if modern.values else config.section("rope_scaling")
    theta = modern.float("rope_theta", config.float("rope_theta", 10000.0))
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise WeightsError(
            f"{config.path}: rope type {kind!r} is not supported; use default or llama3"
        )
    return theta, _llama3_factors(scaling, theta, head_dim)


def _llama3_factors(scaling: _Config, theta: float, head_dim: int) -> list[float]:
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


def _eos_token_ids(folder: Path, config: _Config) -> list[int]:
    generation = folder / "generation_config.json"
    values = _read_json(generation) if generation.is_file() else {}
    ids = values.get("eos_token_id", config.values.get("eos_token_id"))
    listed = ids if isinstance(ids, list) else [ids]
    return [value for value in listed if isinstance(value, int)]
