"""Quantises a model offline: from one directory or GGUF file to another directory."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ullage_engine.config import ModelSection
from ullage_engine.models.dtypes import resolve_dtype
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.quant.directory import (
    STATISTICS,
    ModelDirectory,
    quantization_config,
    unfinished_folder,
)
from ullage_engine.quant.formats import Format, Quantized, chosen_encoding
from ullage_engine.quant.rounding import quantise
from ullage_engine.quant.smoothing import FED_BY, Maxima, calibrate, smoothing
from ullage_engine.tokenizer import load_tokenizer
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.gguf import GgufReader
from ullage_engine.weights.layout import Part, TensorPlan, plan_tensors
from ullage_engine.weights.prepared import is_matrix, open_checkpoint
from ullage_engine.weights.reader import CheckpointReader
from ullage_engine.weights.safetensors import read_config
from ullage_engine.weights.source import ModelFiles, resolve_source
from ullage_engine.weights.store import load_weights

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and of how much."""

CALIBRATION_TOKENS = 16_384
"""Of a longer text, only the first so many."""

_CPU = torch.device("cpu")
_SCALES = torch.bfloat16
"""Type of stored scales: one that every computing type represents but float16, nearly."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is asked for."""

    model: str
    """URI, as `model.source`."""
    format: Format
    output: Path
    text: Path | None = None
    """Text to calibrate w8a8 with."""
    alpha: float = 0.5
    """Share of the difficulty that moves from activations to weights."""


def convert(conversion: Conversion, progress: Progress) -> int:
    """Writes the model; bytes of its safetensors.

    Raises:
        WeightsError: the model, the text or the output folder cannot be used; one line.
    """
    files = resolve_source(conversion.model)
    reader = open_checkpoint(files)
    _check_model(conversion, reader, files)
    try:
        _check_output(conversion.output)
        with unfinished_folder(conversion.output) as folder:
            maxima = _maxima(conversion, files, folder, progress)
            _write(conversion, files, reader, maxima, folder, progress)
            _publish(folder, conversion.output)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WeightsError(
            f"--output {conversion.output}: {reason}; "
            "name a folder that can be written and has room"
        ) from error
    return sum(each.stat().st_size for each in conversion.output.glob("*.safetensors"))


def _publish(folder: Path, output: Path) -> None:
    """Moves the files to where they are asked for, readable by all."""
    output.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.chmod(0o644)
        file.replace(output / file.name)


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise WeightsError(f"--output {output}: is a file; name a folder that is new")
    if output.exists() and any(output.iterdir()):
        raise WeightsError(f"--output {output}: not empty; name a folder that is new")


def _check_model(conversion: Conversion, reader: CheckpointReader, files: ModelFiles) -> None:
    if reader.formats:
        raise WeightsError(
            f"--model {conversion.model}: quantised as {', '.join(sorted(reader.formats))} "
            "already; name the unquantised model"
        )
    if files.format == "gguf" and reader.geometry.rope_factors is not None:
        raise WeightsError(
            f"--model {conversion.model}: its rotary factors have no place in config.json; "
            "name the model's directory of safetensors"
        )
    if any(part.rearrange for plan in plan_tensors(reader.geometry) for part in plan.parts):
        raise WeightsError(
            f"--model {conversion.model}: no checkpoint format holds the experts of "
            f"{reader.geometry.architecture} in {conversion.format}; serve the unquantised model "
            f"with spec.model.quantization: {conversion.format}"
        )
    if conversion.format == "w8a8":
        _check_calibration(conversion, reader.geometry)


def _check_calibration(conversion: Conversion, geometry: ModelGeometry) -> None:
    if conversion.text is None:
        raise WeightsError("--format w8a8: needs a text to calibrate with; add --calibrate FILE")
    if geometry.experts is not None:
        raise WeightsError(
            "--format w8a8: models with experts are not supported; use int8, int4 or fp8"
        )


def _maxima(conversion: Conversion, files: ModelFiles, folder: Path, progress: Progress) -> Maxima:
    if conversion.text is None or conversion.format != "w8a8":
        return {}
    try:
        text = conversion.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(
            f"--calibrate {conversion.text}: {error}; name a text in UTF-8"
        ) from error
    tokens = load_tokenizer(files.path).encode_text(text)[:CALIBRATION_TOKENS]
    if not tokens:
        raise WeightsError(f"--calibrate {conversion.text}: no text in it; name another file")
    dtype = resolve_dtype("auto", _CPU)
    with tempfile.TemporaryDirectory(dir=folder) as prepared:
        section = ModelSection(source=conversion.model, name="calibration")
        loaded = load_weights(section, _CPU, dtype, Path(prepared), lambda done, total: None)
        return calibrate(loaded, dtype, tokens, lambda *counts: progress("calibrated", *counts))


def _write(
    conversion: Conversion,
    files: ModelFiles,
    reader: CheckpointReader,
    maxima: Maxima,
    folder: Path,
    progress: Progress,
) -> None:
    directory, plans = ModelDirectory(folder), plan_tensors(reader.geometry)
    smoothed = _Smoothed(reader, plans, maxima, conversion.alpha)
    for index, plan in enumerate(plans):
        progress("quantised", index, len(plans))
        for part in plan.parts:
            if is_matrix(plan):
                matrix = _matrix(conversion.format, reader, smoothed, plan, part)
                directory.add_matrix(part.source, matrix)
            else:
                directory.add(part.source, _plain(smoothed.read(plan, part)))
    config = _config(files, reader)
    config["quantization_config"] = quantization_config(conversion.format, directory.plain_linears)
    directory.finish(config, files.path)
    if maxima:
        save_file(maxima, folder / STATISTICS)


def _matrix(
    format: Format, reader: CheckpointReader, smoothed: "_Smoothed", plan: TensorPlan, part: Part
) -> Quantized:
    if reader.encoding(part.source, format) is not None:
        kept = reader.quantized(part.source)
        zeros = None if kept.zeros is None else kept.zeros.to(_SCALES)
        return Quantized(kept.format, kept.values, kept.scales.to(_SCALES), zeros)
    weights = smoothed.read(plan, part)
    return quantise(weights, chosen_encoding(format, (part.shape[0], part.shape[1])), _SCALES)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Large tensors of float32, which are dequantised ones, in bfloat16."""
    return tensor.bfloat16() if tensor.dim() > 1 and tensor.dtype == torch.float32 else tensor


def _config(files: ModelFiles, reader: CheckpointReader) -> dict[str, object]:
    if isinstance(reader, GgufReader):
        return dict(reader.config.values) | {"eos_token_id": reader.geometry.eos_token_ids}
    return dict(read_config(files.path).values)


class _Smoothed:
    """A checkpoint's tensors, those that a norm and a matrix share smoothed."""

    def __init__(
        self, reader: CheckpointReader, plans: list[TensorPlan], maxima: Maxima, alpha: float
    ) -> None:
        self._reader = reader
        self._norms: dict[str, torch.Tensor] = {}
        self._columns: dict[str, torch.Tensor] = {}
        by_name = {plan.name: plan for plan in plans}
        for name, largest in maxima.items():
            prefix, _, kind = name.rpartition(".")
            if kind not in FED_BY:
                continue
            norm = by_name[f"{prefix}.{FED_BY[kind]}"]
            weights = torch.cat([reader.read(part.source) for part in by_name[name].parts])
            old = reader.read(norm.parts[0].source)
            new, columns = smoothing(largest, weights, old, alpha)
            self._norms[norm.name], self._columns[name] = new, columns

    def read(self, plan: TensorPlan, part: Part) -> torch.Tensor:
        if plan.name in self._norms:
            return self._norms[plan.name]
        tensor = self._reader.read(part.source)
        columns = self._columns.get(plan.name)
        return tensor if columns is None else tensor.float() * columns
