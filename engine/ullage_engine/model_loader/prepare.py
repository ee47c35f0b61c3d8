"""Converts checkpoint tensors to the tensors of a prepared file, one at a time."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol

import torch

from ullage_engine.model_config.dtypes import dtype_name
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.safetensors import CheckpointReader
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.model_loader.tensor_plan import Part, TensorPlan, plan_tensors
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import (
    TILE_GROUPS,
    Encoding,
    Format,
    Piece,
    Quantized,
    chosen_encoding,
    laid_out_for,
    pack,
    pieces_of,
    quantise,
    stacked,
    widened,
)

MATRICES = frozenset(
    {"qkv", "output", "gate_up", "down", "conv_in", "conv_out", "experts_gate_up", "experts_down"}
)
"""Kinds of tensors to quantise. Norms, routers and convolution taps keep the computing dtype."""

VOCABULARY = frozenset({"embedding", "head"})
"""Kinds of tensors that may be quantised to int8 if there is a kernel that reads them in tiles.
Otherwise, these tensors keep the computing dtype."""

_NUMBERS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Dtypes of unquantised tensors, whose elements need no scale."""

FLOAT32 = frozenset({"router_bias"})
"""Kinds of tensors that are always float32, because rounding could change which experts a token is
routed to."""


@dataclass(frozen=True, slots=True)
class PreparedTensor:
    """One tensor of the prepared file, and how to compute it from the checkpoint."""

    source: Path
    reader: CheckpointReader
    plan: TensorPlan
    dtype: torch.dtype
    """Dtype of plain tensors and of scales."""
    encoding: Encoding | None
    """Encoding of a quantised matrix, or None for a tensor in the computing dtype."""
    is_kept: bool
    """Whether the prepared file stores the checkpoint's own quantised values."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pieces(self) -> list[Piece]:
        """The stored arrays of the tensor, such as values and scales, in file order."""
        if self.encoding is None:
            return [Piece(self.name, self.plan.shape, self.dtype)]
        named = pieces_of(self.encoding, self.dtype)
        return [each._replace(name=f"{self.name}.{each.name}") for each in named]

    @property
    def rounded_kinds(self) -> set[str]:
        """GGUF block types (such as Q4_K) whose values are quantised a second time.

        The set is empty if the tensor keeps the checkpoint's values or is stored unquantised.
        """
        if self.encoding is None or self.is_kept:
            return set()
        return {kind for part in self.plan.parts if (kind := self.reader.block_kind(part.source))}

    @property
    def is_calibrated(self) -> bool:
        """Whether the matrix's rounding can be calibrated.

        It can if the matrix is quantised to int4 here, rather than keeping the checkpoint's
        quantised values.
        """
        return self.encoding is not None and self.encoding.format == "int4" and not self.is_kept

    def weights(self) -> torch.Tensor:
        """Read the checkpoint's weights in the computing dtype."""
        parts = [
            widened(self._kept(part), self.encoding).dequantise()
            if self.is_kept and self.encoding is not None
            else self._read(part)
            for part in self.plan.parts
        ]
        flat = torch.cat([part.to(self.dtype).flatten() for part in parts])
        return flat.view(self.plan.shape)

    def chunks(self, rounded: Quantized | None = None) -> Iterator[Iterable[torch.Tensor]]:
        """Yield each stored array in file order, as an iterable of the tensors that make it up.

        Args:
            rounded: the calibrated matrix. If None, the checkpoint's quantised values are kept if
                possible, and other values are rounded to nearest.
        """
        if self.encoding is None:
            yield (self._read(part).to(self.dtype) for part in self.plan.parts)
            return
        if rounded is None:
            parts = [self._quantized(part, self.encoding) for part in self.plan.parts]
            rounded = stacked(parts)
        pieces = pack(rounded, self.encoding, self.dtype)
        for piece in pieces_of(self.encoding, self.dtype):
            yield [pieces[piece.name]]

    def _quantized(self, part: Part, encoding: Encoding) -> Quantized:
        if self.is_kept:
            return widened(self._kept(part), encoding)
        return quantise(self._read(part).flatten(0, -2), encoding, self.dtype)

    def _kept(self, part: Part) -> Quantized:
        kept = self.reader.quantized(part.source)
        columns = self.plan.shape[-1]
        shape = (math.prod(part.shape) // columns, columns)
        self._check_shape(part, tuple(kept.values.shape), shape)
        if kept.scales.is_floating_point() and not kept.scales.isfinite().all():
            raise self._no_numbers(part, "scales that are NaN or infinite")
        if part.rearrange_rows is None:
            return kept
        rearrange = part.rearrange_rows
        count = part.shape[0]
        values, scales = (
            rearrange(each.view(count, -1, each.shape[1])).flatten(0, 1)
            for each in (kept.values, kept.scales)
        )
        return Quantized(kept.format, values, scales)

    def _check_shape(self, part: Part, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
        if shape != needed:
            raise WeightsError(
                f"{self.source}: tensor {part.source!r} has shape {list(shape)}, but the "
                f"model's configuration needs {list(needed)}; download the model again"
            )

    def _read(self, part: Part) -> torch.Tensor:
        tensor = self.reader.read(part.source)
        self._check_shape(part, tuple(tensor.shape), part.shape)
        if tensor.dtype not in _NUMBERS:
            raise WeightsError(
                f"{self.source}: tensor {part.source!r} is {tensor.dtype} without a known scale; "
                "use a model of another quantisation, or the unquantised one"
            )
        self._check_numbers(part, tensor)
        return tensor if part.rearrange is None else part.rearrange(tensor)

    def _check_numbers(self, part: Part, tensor: torch.Tensor) -> None:
        """Refuse values that indicate a damaged or incomplete file, such as NaN or all zeros."""
        if not tensor.numel():
            return
        least, most = (float(each) for each in tensor.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            raise self._no_numbers(part, "numbers that are NaN or infinite")
        kind = _kind(self.plan)
        if least == most == 0.0 and (kind == "embedding" or kind.endswith("norm")):
            raise self._no_numbers(part, "only zeros, like an unfinished download")

    def _no_numbers(self, part: Part, found: str) -> WeightsError:
        return WeightsError(
            f"{self.source}: tensor {part.source!r} has {found}; download the model again"
        )


RoundLayer = Callable[[Sequence[PreparedTensor]], Mapping[str, Quantized]]
"""Function that takes all tensors of a layer and returns its rounded matrices by name.

It is called once per layer, in layer order.
"""


class CalibrationError(Exception):
    """Raised if a model or layer cannot be calibrated. The message is a single line."""

    def __init__(self, message: str, remedy: str) -> None:
        """Create the error.

        Args:
            message: the cause, in one line.
            remedy: what rounding to nearest means for the user, and how to avoid it.
        """
        super().__init__(message)
        self.remedy = remedy


class Calibration(Protocol):
    """Protocol for methods that take typical inputs into account when rounding to int4."""

    @property
    def name(self) -> str:
        """Name of this rounding method, which is part of the prepared file's key.

        Weights that are rounded by different methods are therefore stored in different files.
        """
        ...

    def begin(
        self,
        files: ModelFiles,
        prepared: Sequence[PreparedTensor],
        model_config: ModelConfig,
        device: torch.device,
        report: Callable[[], None],
    ) -> RoundLayer | None:
        """Begin calibrating a model at its first layer.

        Args:
            files: the model's files.
            prepared: all tensors of the model.
            model_config: the model's configuration.
            device: the device to compute on.
            report: called after each matrix has been rounded.

        Returns:
            The function that rounds a layer, or None if no matrix needs calibration. The function
            may also raise CalibrationError.

        Raises:
            CalibrationError: calibration failed.
        """
        ...


def rounded_tensors(
    prepared: Iterable[PreparedTensor], round_layer: RoundLayer | None
) -> Iterator[tuple[PreparedTensor, Quantized | None]]:
    """Calibrate a model layer by layer. Yield each tensor with its rounded matrix, or None.

    `round_layer` rounds the matrices of one layer. The result is None for tensors that it does not
    round, and for all tensors if `round_layer` is None.
    """
    for prefix, group in groupby(prepared, lambda each: each.name.rpartition(".")[0]):
        layer = list(group)
        rounded = round_layer(layer) if round_layer and prefix else {}
        for each in layer:
            yield each, rounded.get(each.name)


@dataclass(frozen=True, slots=True)
class PreparedForm:
    """How weights are prepared: computing dtype, quantisation and device."""

    dtype: torch.dtype
    quantization: Literal["auto", "none", "int8", "int4", "fp8", "w8a8"]
    device: torch.device

    @property
    def name(self) -> str:
        """Summary of these settings, which is part of the prepared file's key.

        Weights that are prepared with different settings are therefore stored in different files.
        """
        layout = "tiles" if self._reads_tiles else "rows"
        return f"{dtype_name(self.dtype)} {self.quantization} {layout}"

    @property
    def _reads_tiles(self) -> bool:
        sample = Encoding(format="int4", shape=(64, 128), group=128, has_zeros=True)
        return laid_out_for(sample, self.device).is_tiled

    def prepare(self, source: Path, reader: CheckpointReader, plan: TensorPlan) -> PreparedTensor:
        """Decide how one tensor is stored.

        Raises:
            WeightsError: the requested format conflicts with the checkpoint's format.
        """
        self._check(source, reader)
        encoding = None
        is_kept = False
        is_vocabulary = _kind(plan) in VOCABULARY
        if is_matrix(plan) or (is_vocabulary and self._reads_tiles):
            encoding, is_kept = self._encoding(reader, plan)
        if encoding is not None:
            self._check_dtype(encoding)
            count = plan.shape[0] if len(plan.shape) == 3 else 1
            encoding = laid_out_for(encoding, self.device, count)
            if is_vocabulary and not encoding.is_tiled:
                encoding = None
                is_kept = False
        dtype = torch.float32 if _kind(plan) in FLOAT32 else self.dtype
        return PreparedTensor(source, reader, plan, dtype, encoding, is_kept)

    def _encoding(self, reader: CheckpointReader, plan: TensorPlan) -> tuple[Encoding | None, bool]:
        """Return a matrix's encoding, and whether it keeps the checkpoint's quantised values.

        The encoding is None if the matrix is stored in the computing dtype.
        """
        asked = self.quantization
        *rows, columns = plan.shape
        shape = (math.prod(rows), columns)
        kept = _common([reader.encoding(part.source, self._kept) for part in plan.parts], shape)
        if kept is not None:
            return kept, True
        if _kind(plan) in VOCABULARY:
            is_small = asked in ("int8", "int4") or self._keeps_integers(reader)
            is_whole = columns % TILE_GROUPS[-1] == 0
            return (chosen_encoding("int8", shape) if is_small and is_whole else None), False
        if asked == "auto" or asked == "none":  # two comparisons, which narrow the type
            return None, False
        return chosen_encoding(asked, shape), False

    def _keeps_integers(self, reader: CheckpointReader) -> bool:
        """Return whether any layer matrix keeps the checkpoint's int4 or int8 values."""
        plans = filter(is_matrix, plan_tensors(reader.model_config))
        names = (part.source for plan in plans for part in plan.parts)
        kept = (reader.encoding(name, self._kept) for name in names)
        return any(each is not None and each.format in ("int8", "int4") for each in kept)

    @property
    def _kept(self) -> Format | None:
        """Format to request from `CheckpointReader.encoding`, or None to request no format.

        No format is requested if `quantization` is `none`, or if `quantization` is `auto` and the
        device's kernels do not read tiles.
        """
        if self.quantization == "auto":
            return "int4" if self._reads_tiles else None
        return None if self.quantization == "none" else self.quantization

    def _check_dtype(self, encoding: Encoding) -> None:
        if encoding.format == "mxfp4" and self.dtype == torch.float16:
            raise WeightsError(
                "model.dtype float16: cannot hold the scales of MXFP4 weights; "
                "use bfloat16 or float32"
            )

    def _check(self, source: Path, reader: CheckpointReader) -> None:
        formats = reader.formats
        if self.quantization == "w8a8" and "w8a8" not in formats:
            raise WeightsError(
                f"model.quantization w8a8: {source} is not calibrated; calibrate it with "
                "ullage quantize --format w8a8 --calibrate FILE and name the result in model.source"
            )
        asked = self.quantization
        if asked not in ("auto", "none") and formats and asked not in formats:
            raise WeightsError(
                f"model.quantization {asked}: {source} is quantised as "
                f"{', '.join(sorted(formats))} already; set none, or use the unquantised model"
            )


def _common(parts: list[Encoding | None], shape: tuple[int, int]) -> Encoding | None:
    """Choose one encoding for several stacked matrices that keeps their quantised values.

    For example, GGUF may use integers of different widths or group sizes for the three matrices
    that are fused into one. In this case, the integers are kept as int8 with the smallest group
    size. Return None if no encoding can keep the values of all matrices.
    """
    kept = [each for each in parts if each is not None]
    if not kept or len(kept) < len(parts):
        return None
    formats = {each.format for each in kept}
    groups = {each.group for each in kept}
    if len(formats) == len(groups) == 1:
        format = kept[0].format
    elif formats <= {"int4", "int8"} and all(each % min(groups) == 0 for each in groups):
        format = "int8"
    else:
        return None
    has_zeros = any(each.has_zeros for each in kept)
    return Encoding(format=format, shape=shape, group=min(groups), has_zeros=has_zeros)


def is_matrix(plan: TensorPlan) -> bool:
    """Return whether this tensor is a quantisable weight matrix, or a stack of expert matrices."""
    return _kind(plan) in MATRICES


def _kind(plan: TensorPlan) -> str:
    """Return the last component of a tensor's name, such as `qkv`, which all layers share."""
    return plan.name.rpartition(".")[2]


def open_checkpoint(files: ModelFiles) -> CheckpointReader:
    """Open a checkpoint with the reader for its format.

    Raises:
        WeightsError: a file is missing or broken, or its format is not supported.
    """
    # Readers are imported when needed. A worker that starts again maps the prepared file only.
    if files.format == "gguf":
        from ullage_engine.model_loader.gguf import GgufReader

        return GgufReader(files.path, allows_unknown=files.allows_unknown)
    from ullage_engine.model_loader.quantized import open_directory

    return open_directory(files.path, allows_unknown=files.allows_unknown)
