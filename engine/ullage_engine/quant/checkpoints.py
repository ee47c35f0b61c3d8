"""Checkpoints of safetensors that are quantised already: GPTQ, AWQ, FP8, MXFP4 and
compressed-tensors.

Each kind stores a matrix `name.weight` in tensors of its own. Where its numbers are of a form that
is computed with here they are kept as they are, up to the rounding of scales to the computing type;
else they are dequantised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.quant.formats import Encoding, Format, Quantized
from ullage_engine.quant.integers import AwqMatrices, GptqMatrices
from ullage_engine.quant.own import OwnMatrices
from ullage_engine.quant.packed_experts import PackedExperts
from ullage_engine.quant.scaled import ScaledMatrices
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.safetensors import SafetensorsReader, read_config


class Matrices(Protocol):
    """How a kind of checkpoint stores matrices; names are without `.weight`."""

    @property
    def formats(self) -> frozenset[Format]: ...

    def is_quantised(self, stem: str) -> bool: ...

    def encoding(self, stem: str) -> Encoding | None:
        """The encoding of `quantized`; None if the numbers cannot be kept."""
        ...

    def quantized(self, stem: str) -> Quantized: ...

    def dequantised(self, stem: str) -> torch.Tensor:
        """float32 [out, in], or as an unquantised checkpoint has it."""
        ...


Make = Callable[[SafetensorsReader, ModelConfig], Matrices]

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
    """A directory whose config.json has a quantization_config."""

    plain: SafetensorsReader
    matrices: Matrices

    @property
    def geometry(self) -> ModelGeometry:
        return self.plain.geometry

    @property
    def formats(self) -> frozenset[Format]:
        return self.matrices.formats

    def read(self, name: str) -> torch.Tensor:
        stem = name.removesuffix(".weight")
        if self.matrices.is_quantised(stem):
            return self.matrices.dequantised(stem)
        return self.plain.read(name)

    def encoding(self, name: str, wanted: Format | None) -> Encoding | None:
        stem = name.removesuffix(".weight")
        return self.matrices.encoding(stem) if self.matrices.is_quantised(stem) else None

    def quantized(self, name: str) -> Quantized:
        return self.matrices.quantized(name.removesuffix(".weight"))


def open_directory(folder: Path) -> SafetensorsReader | QuantizedReader:
    """The reader of a model's directory, quantised or not.

    Raises:
        WeightsError: a file is missing or broken, or its quantisation is not supported.
    """
    reader = SafetensorsReader(folder)
    section = read_config(folder).section("quantization_config")
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
