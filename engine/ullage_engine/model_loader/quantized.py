"""Readers of quantised safetensors checkpoints, one for each tool that writes such checkpoints.

Each tool (GPTQ, AWQ, FP8, MXFP4, compressed-tensors, `ullage quantize`) stores a matrix
`name.weight` in several tensors. If the engine supports the format, it keeps the quantised values
and only rounds the scales to the computing dtype. Otherwise, it dequantises the matrix.

GPTQ and AWQ pack integers into int32, in groups of columns that have their own scale and zero
point: weight = (q - zero point) * scale. GPTQ packs along the columns (in) of qweight [in / n, out]
and along the rows (out) of qzeros [groups, out / n], n = 32 / bits, lowest bits first, and stores
the zero point minus one. Columns may belong to groups in any order (g_idx). AWQ packs 4-bit values
along the rows of both tensors, in the order 0, 2, 4, 6, 1, 3, 5, 7, and stores zero points
unchanged.

gpt-oss (`quant_method: mxfp4`) stores experts as `name_blocks` uint8 [experts, out, groups, 16],
with two values per byte (the first in the low half), and `name_scales` uint8 [experts, out,
groups]. All other tensors are bfloat16. `ullage quantize` (`quant_method: ullage`) writes int4 as
`name.weight_packed` uint8 [out, in / 2], laid out row by row as in `quantization.formats`, with
`name.weight_scale` and `name.weight_zero` [out, groups]. Matrices that could not be divided into
groups are stored as int8 with a scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ullage_engine.model_config.hf_config import HFConfig, read_config
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.compressed_tensors import ScaledMatrices
from ullage_engine.model_loader.safetensors import SafetensorsReader
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import (
    MIN_VALUE,
    MXFP4_GROUP,
    Encoding,
    Format,
    Quantized,
    pack_nibbles,
    unpack_nibbles,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_last(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 values [..., n] to [..., n * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


class IntegerMatrices:
    """Base class for reading GPTQ and AWQ matrices."""

    def __init__(self, reader: SafetensorsReader, config: HFConfig, bits: int) -> None:
        self._reader = reader
        self._bits = bits
        self._group = config.int("group_size", 128)
        if self._group != -1 and self._group < 1:
            raise WeightsError(
                f"{config.path}: quantization_config.group_size is {self._group}; "
                "use a model with groups of at least one column, or -1"
            )

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset({self._format})

    def is_quantised(self, stem: str) -> bool:
        return f"{stem}.qweight" in self._reader

    def encoding(self, stem: str) -> Encoding | None:
        rows, columns = self._shape(stem)
        group = columns if self._group == -1 else self._group
        if columns % group or not self._is_in_order(stem, columns, group):
            return None
        return Encoding(format=self._format, shape=(rows, columns), group=group, has_zeros=True)

    def quantized(self, stem: str) -> Quantized:
        middle = 1 << self._bits - 1
        scales = self._scales(stem)
        values = (self._codes(stem) - middle).to(torch.int8)
        return Quantized(self._format, values, scales, (middle - self._points(stem)) * scales)

    def dequantised(self, stem: str) -> torch.Tensor:
        groups = self._groups(stem)
        points = self._points(stem)[:, groups]
        scales = self._scales(stem)[:, groups]
        return (self._codes(stem) - points) * scales

    @property
    def _format(self) -> Format:
        return "int4" if self._bits == 4 else "int8"

    def _scales(self, stem: str) -> torch.Tensor:
        """Return a matrix's scales as float32 [out, groups]."""
        scales = self._reader.read(f"{stem}.scales").to(torch.float32).t()
        rows, columns = self._shape(stem)
        groups = 1 if self._group == -1 else -(-columns // self._group)
        if tuple(scales.shape) != (rows, groups):
            raise WeightsError(
                f"tensor '{stem}.scales' has {list(scales.shape[::-1])} scales, but "
                f"quantization_config.group_size {self._group} needs {[groups, rows]}; "
                "download the model again"
            )
        return scales

    def _groups(self, stem: str) -> torch.Tensor:
        """Return, for each column of a matrix, the index of its quantisation group."""
        columns = self._shape(stem)[1]
        return torch.arange(columns) // (columns if self._group == -1 else self._group)

    def _is_in_order(self, stem: str, columns: int, group: int) -> bool:
        return torch.equal(self._groups(stem), torch.arange(columns) // group)

    def _shape(self, stem: str) -> tuple[int, int]:
        raise NotImplementedError

    def _codes(self, stem: str) -> torch.Tensor:
        """Return a matrix's unsigned quantised values as int32 [out, in]."""
        raise NotImplementedError

    def _points(self, stem: str) -> torch.Tensor:
        """Return a matrix's zero points as int32 [out, groups]."""
        raise NotImplementedError


class GptqMatrices(IntegerMatrices):
    """Reads matrices of checkpoints with `quant_method: gptq`."""

    def __init__(self, reader: SafetensorsReader, config: HFConfig) -> None:
        bits = config.int("bits")
        if bits not in (4, 8):
            raise WeightsError(
                f"{config.path}: quantization_config.bits is {bits}; use a model of 4 or 8 bits"
            )
        super().__init__(reader, config, bits)
        # The second version of the format stores zero points unchanged.
        formats = (config.get("checkpoint_format"), config.get("format"))
        self._less = 0 if "gptq_v2" in formats else 1
        self._path, self._desc_act = config.path, config.bool("desc_act", False)

    def _shape(self, stem: str) -> tuple[int, int]:
        packed = self._reader.shape(f"{stem}.qweight")
        return packed[1], packed[0] * 32 // self._bits

    def _codes(self, stem: str) -> torch.Tensor:
        return unpack_last(self._reader.read(f"{stem}.qweight").t(), self._bits)

    def _points(self, stem: str) -> torch.Tensor:
        stored = unpack_last(self._reader.read(f"{stem}.qzeros"), self._bits)
        # A zero point of 0 was stored as the largest code, so the sum wraps around.
        return (stored + self._less & (1 << self._bits) - 1).t()

    def _groups(self, stem: str) -> torch.Tensor:
        name = f"{stem}.g_idx"
        if name in self._reader:
            return self._reader.read(name).long()
        if self._desc_act:
            raise WeightsError(
                f"{self._path}: quantization_config.desc_act is true, but tensor {name!r} is "
                "missing; download the model again"
            )
        return super()._groups(stem)


class AwqMatrices(IntegerMatrices):
    """Reads matrices of checkpoints with `quant_method: awq`."""

    def __init__(self, reader: SafetensorsReader, config: HFConfig) -> None:
        super().__init__(reader, config, 4)

    def _shape(self, stem: str) -> tuple[int, int]:
        packed = self._reader.shape(f"{stem}.qweight")
        return packed[1] * len(AWQ_ORDER), packed[0]

    def _codes(self, stem: str) -> torch.Tensor:
        return self._unpacked(f"{stem}.qweight").t()

    def _points(self, stem: str) -> torch.Tensor:
        return self._unpacked(f"{stem}.qzeros").t()

    def _unpacked(self, name: str) -> torch.Tensor:
        codes = unpack_last(self._reader.read(name), 4)
        words = codes.view(codes.shape[0], -1, len(AWQ_ORDER))
        return torch.index_select(words, 2, torch.tensor(AWQ_ORDER).argsort()).flatten(1)


class PackedExperts:
    """Reads experts of checkpoints with `quant_method: mxfp4`, in the checkpoint's row order."""

    def __init__(self, reader: SafetensorsReader, config: HFConfig) -> None:
        self._reader = reader
        self._path = config.path

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset({"mxfp4"})

    def is_quantised(self, stem: str) -> bool:
        return f"{stem}_blocks" in self._reader

    def encoding(self, stem: str) -> Encoding:
        experts, out, groups = self._shape(stem)
        shape = (experts * out, groups * MXFP4_GROUP)
        return Encoding(format="mxfp4", shape=shape, group=MXFP4_GROUP)

    def quantized(self, stem: str) -> Quantized:
        _, _, groups = self._shape(stem)
        blocks = self._reader.read(f"{stem}_blocks").view(-1, groups * MXFP4_GROUP // 2)
        scales = self._reader.read(f"{stem}_scales").view(-1, groups)
        return Quantized("mxfp4", unpack_nibbles(blocks), scales)

    def dequantised(self, stem: str) -> torch.Tensor:
        """Return one layer's experts as float32 [experts, in, out], like an unquantised tensor."""
        experts, out, _ = self._shape(stem)
        return self.quantized(stem).dequantise().view(experts, out, -1).transpose(1, 2)

    def _shape(self, stem: str) -> tuple[int, int, int]:
        """Return the number of experts, the output rows of each, and the groups per row."""
        blocks, scales = (self._reader.shape(f"{stem}_{each}") for each in ("blocks", "scales"))
        if len(scales) != 3 or blocks != (*scales, MXFP4_GROUP // 2):
            raise WeightsError(
                f"{self._path}: tensors '{stem}_blocks' and '{stem}_scales' have shapes "
                f"{list(blocks)} and {list(scales)}, but {MXFP4_GROUP} numbers share a scale; "
                "download the model again"
            )
        experts, out, groups = scales
        return experts, out, groups


def own_tensors(stem: str, matrix: Quantized) -> dict[str, torch.Tensor]:
    """Return the tensors that store one int4 matrix, with the names that `ullage quantize` uses."""
    assert matrix.zeros is not None, "int4 has zeros"
    codes = (matrix.values - MIN_VALUE["int4"]).view(torch.uint8)
    return {
        f"{stem}.weight_packed": pack_nibbles(codes),
        f"{stem}.weight_scale": matrix.scales,
        f"{stem}.weight_zero": matrix.zeros,
    }


class OwnMatrices:
    """Reads matrices of checkpoints with `quant_method: ullage`."""

    def __init__(self, reader: SafetensorsReader, config: HFConfig) -> None:
        self._reader = reader

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset({"int4"})

    def is_quantised(self, stem: str) -> bool:
        return f"{stem}.weight_scale" in self._reader

    def encoding(self, stem: str) -> Encoding:
        scales = self._reader.shape(f"{stem}.weight_scale")
        if f"{stem}.weight_packed" not in self._reader:
            rows, columns = self._reader.shape(f"{stem}.weight")
            return Encoding(format="int8", shape=(rows, columns), group=columns)
        rows, half = self._reader.shape(f"{stem}.weight_packed")
        group = 2 * half // scales[1]
        return Encoding(format="int4", shape=(rows, 2 * half), group=group, has_zeros=True)

    def quantized(self, stem: str) -> Quantized:
        read = self._reader.read
        scales = read(f"{stem}.weight_scale")
        if self.encoding(stem).format == "int8":
            return Quantized("int8", read(f"{stem}.weight"), scales)
        codes = unpack_nibbles(read(f"{stem}.weight_packed"))
        values = codes.view(torch.int8) + MIN_VALUE["int4"]
        return Quantized("int4", values, scales, read(f"{stem}.weight_zero"))

    def dequantised(self, stem: str) -> torch.Tensor:
        return self.quantized(stem).dequantise()


class Matrices(Protocol):
    """Protocol for reading a checkpoint's quantised matrices, whichever tool wrote them.

    Matrices are named without the suffix `.weight`.
    """

    @property
    def formats(self) -> frozenset[Format]: ...

    def is_quantised(self, stem: str) -> bool: ...

    def encoding(self, stem: str) -> Encoding | None:
        """Return the encoding of a matrix's quantised values, or None if they cannot be kept."""
        ...

    def quantized(self, stem: str) -> Quantized: ...

    def dequantised(self, stem: str) -> torch.Tensor:
        """Return a matrix as float32 [out, in], or in the shape used by unquantised checkpoints."""
        ...


Make = Callable[[SafetensorsReader, HFConfig], Matrices]

KINDS: dict[str, Make] = {
    "gptq": GptqMatrices,
    "awq": AwqMatrices,
    "fp8": ScaledMatrices,
    "compressed-tensors": ScaledMatrices,
    "mxfp4": PackedExperts,
    "ullage": OwnMatrices,
}


@dataclass(frozen=True, slots=True)
class QuantizedReader:
    """Reads a model directory whose config.json has a quantization_config."""

    plain: SafetensorsReader
    matrices: Matrices

    @property
    def model_config(self) -> ModelConfig:
        return self.plain.model_config

    @property
    def formats(self) -> frozenset[Format]:
        return self.matrices.formats

    def read(self, name: str) -> torch.Tensor:
        stem = name.removesuffix(".weight")
        if self.matrices.is_quantised(stem):
            return self.matrices.dequantised(stem)
        return self.plain.read(name)

    def encoding(self, name: str, target: Format | None) -> Encoding | None:
        stem = name.removesuffix(".weight")
        return self.matrices.encoding(stem) if self.matrices.is_quantised(stem) else None

    def quantized(self, name: str) -> Quantized:
        return self.matrices.quantized(name.removesuffix(".weight"))

    def block_kind(self, name: str) -> str:
        # Quantising these again is refused, so no warning is needed.
        return ""


def open_directory(
    folder: Path, *, allows_unknown: bool = False
) -> SafetensorsReader | QuantizedReader:
    """Open a model's directory, quantised or not, with the reader for its format.

    Raises:
        WeightsError: a file is missing or broken, or its quantisation is not supported.
    """
    config = read_config(folder, allows_unknown=allows_unknown)
    reader = SafetensorsReader(folder, config)
    section = config.section("quantization_config")
    if not section.values:
        return reader
    method = section.get("quant_method")
    make = KINDS.get(method) if isinstance(method, str) else None
    if make is None:
        raise WeightsError(
            f"{section.path}: quantization_config.quant_method {method!r} is not supported; "
            f"use a model quantised by one of {', '.join(KINDS)}, or the unquantised model"
        )
    return QuantizedReader(reader, make(reader, section))
