"""Checkpoints whose `weight` is int8 or float8 itself, beside a `weight_scale`.

compressed-tensors stores int-quantized and float-quantized models so, with a scale for the tensor
or for each row; FP8 models of other makers have a scale for each block of weights, which they call
weight_scale_inv though it is multiplied by.
"""

import torch

from ullage_engine.models.config import ModelConfig
from ullage_engine.quant.formats import Encoding, Format, Quantized
from ullage_engine.quant.schemes import read_scheme
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.safetensors import SafetensorsReader

SCALES = ("weight_scale", "weight_scale_inv")

_STORED = {"I8": "int", "F8_E4M3": "float"}
"""Types of tensors as safetensors name them, and as configurations do."""

_KNOWN = frozenset({"weight", "bias", "input_scale", "weight_zero_point", *SCALES})
"""Tensors of one matrix; FP8 activations are not rounded, so the scale of theirs is not used."""


class ScaledMatrices:
    """`quant_method: fp8`, and two formats of compressed-tensors."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        self._reader, self._path, self._scheme = reader, config.path, read_scheme(config)
        self._check_tensors()

    @property
    def formats(self) -> frozenset[Format]:
        names = self._reader.names
        found = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
        quantised = next((stem for stem in found if self.is_quantised(stem)), None)
        return frozenset() if quantised is None else frozenset({self._format(quantised)})

    def is_quantised(self, stem: str) -> bool:
        return any(f"{stem}.{scale}" in self._reader for scale in SCALES)

    def encoding(self, stem: str) -> Encoding | None:
        rows, columns = self._reader.shape(f"{stem}.weight")
        scales = self._scales(stem, rows, columns)
        if columns % scales.shape[1]:
            return None
        group, format = columns // scales.shape[1], self._format(stem)
        is_block = format == "fp8" and group == self._scheme.block[1]
        if group != columns and not is_block:
            return None
        has_zeros = not self._scheme.is_symmetric
        return Encoding(format=format, shape=(rows, columns), group=group, has_zeros=has_zeros)

    def quantized(self, stem: str) -> Quantized:
        values = self._reader.read(f"{stem}.weight")
        scales = self._scales(stem, *values.shape)
        zeros = None if self._scheme.is_symmetric else -self._points(stem) * scales
        return Quantized(self._format(stem), values, scales, zeros)

    def dequantised(self, stem: str) -> torch.Tensor:
        values = self._reader.read(f"{stem}.weight").to(torch.float32)
        rows, columns = values.shape
        scales = self._scales(stem, rows, columns)
        width = columns if scales.shape[1] == 1 else self._scheme.block[1]
        if not self._scheme.is_symmetric:
            values -= self._points(stem)
        return values * scales.repeat_interleave(width, dim=1)[:, :columns]

    def _check_tensors(self) -> None:
        """Refuses what a matrix has beside its numbers and is not computed with."""
        for name in self._reader.names:
            stem, _, kind = name.rpartition(".")
            if self.is_quantised(stem) and kind not in self._known(name):
                raise WeightsError(
                    f"{self._path}: tensor {name!r} beside a quantised matrix is not supported; "
                    "use a symmetric model of int8 or FP8 weights"
                )

    def _known(self, name: str) -> frozenset[str]:
        if not name.endswith(".weight_zero_point") or not self._scheme.is_symmetric:
            return _KNOWN
        # Of symmetric weights some write them all the same.
        return _KNOWN - ({"weight_zero_point"} if self._reader.read(name).any() else set())

    def _format(self, stem: str) -> Format:
        dtype = self._reader.dtype(f"{stem}.weight")
        if _STORED.get(dtype) not in self._scheme.types:
            raise WeightsError(
                f"{self._path}: tensor '{stem}.weight' is {dtype} beside a scale; "
                f"use a model of {' or '.join(_names(self._scheme.types))} weights"
            )
        if dtype == "I8":
            return "w8a8" if self._scheme.rounds_activations else "int8"
        return "fp8"

    def _points(self, stem: str) -> torch.Tensor:
        """Zero points, float32 [rows, 1] or [1, 1]."""
        points = self._reader.read(f"{stem}.weight_zero_point").to(torch.float32)
        if points.numel() not in (1, self._reader.shape(f"{stem}.weight")[0]):
            raise WeightsError(
                f"{self._path}: tensor '{stem}.weight_zero_point' has shape "
                f"{list(points.shape)}, neither one number nor one for each row; use another model"
            )
        return points.reshape(-1, 1)

    def _scales(self, stem: str, rows: int, columns: int) -> torch.Tensor:
        """float32 [rows, 1], or [rows, blocks of columns]."""
        name = next(f"{stem}.{each}" for each in SCALES if f"{stem}.{each}" in self._reader)
        scales = self._reader.read(name).to(torch.float32)
        if scales.numel() == 1:
            return scales.reshape(1, 1).repeat(rows, 1)
        if scales.numel() == rows:
            return scales.reshape(rows, 1)
        height, width = self._scheme.block
        if tuple(scales.shape) != (-(-rows // height), -(-columns // width)):
            raise WeightsError(
                f"{self._path}: tensor {name!r} has shape {list(scales.shape)}, which scales "
                f"neither rows nor blocks of {height} x {width}; use another model"
            )
        return scales.repeat_interleave(height, dim=0)[:rows].contiguous()


def _names(types: frozenset[str]) -> list[str]:
    return sorted(name for name, type in _STORED.items() if type in types)
