"""Reads a directory of config.json and safetensors, as Hugging Face lays it out."""

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ullage_engine.models.config import Json, ModelConfig
from ullage_engine.models.families import read_model_config
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.reader import PlainMatrices


class SafetensorsReader(PlainMatrices):
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

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def dtype(self, name: str) -> str:
        """Of one tensor as safetensors name it (BF16, I8), without reading it."""
        return str(self._file(name).get_slice(name).get_dtype())  # type: ignore[no-untyped-call]

    def read(self, name: str) -> torch.Tensor:
        """One tensor as stored."""
        tensor: torch.Tensor = self._file(name).get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            raise WeightsError(
                f"{self._folder}: tensor {name!r} is missing; download the model again"
            )
        return self._files[name]


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
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise WeightsError(f"{index}: {name!r} is no file of this folder; check the source")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise WeightsError(f"{folder}: {missing[0]} is missing; download the model again")
    return files


def read_geometry(folder: Path) -> ModelGeometry:
    """Turns config.json (and generation_config.json's end tokens) into a geometry."""
    config = read_config(folder)
    return read_model_config(config, _eos_token_ids(folder, config))


def read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    return ModelConfig(path, _read_json(path))


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


def _eos_token_ids(folder: Path, config: ModelConfig) -> list[int]:
    generation = folder / "generation_config.json"
    values = _read_json(generation) if generation.is_file() else {}
    ids = values.get("eos_token_id", config.values.get("eos_token_id"))
    listed = ids if isinstance(ids, list) else [ids]
    return [value for value in listed if isinstance(value, int)]
