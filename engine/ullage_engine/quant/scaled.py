"""Checkpoints whose `weight` is int8 or float8 itself, beside a `weight_scale`.

compressed-tensors stores int-quantized and float-quantized models so, with a scale for the tensor
or for each row; FP8 models of other makers have a scale for each block of weights, which they call
weight_scale_inv though it is multiplied by.
"""

import torch

from ullage_engine.models.config import ModelConfig
from ullage_engine.quant.formats import Encoding, Format, Quantized
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.safetensors import SafetensorsReader

SCALES = ("weight_scale", "weight_scale_inv")

_STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}

_COMPRESSED = ("int-quantized", "float-quantized", "naive-quantized")


class ScaledMatrices:
    """`quant_method: fp8`, and two formats of compressed-tensors."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        compression = config.get("format")
        if config.get("quant_method") == "compressed-tensors" and compression not in _COMPRESSED:
            raise WeightsError(
                f"{config.path}: quantization_config.format is {compression!r}; "
                f"use a model with one of {', '.join(_COMPRESSED)}"
            )
        self._reader, self._path = reader, config.path
        self._block = _block(config)
        self._rounds_activations = _rounds_activations(config)

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
        is_block = format == "fp8" and group == self._block[1]
        if group != columns and not is_block:
            return None
        return Encoding(format=format, shape=(rows, columns), group=group)

    def quantized(self, stem: str) -> Quantized:
        values = self._reader.read(f"{stem}.weight")
        return Quantized(self._format(stem), values, self._scales(stem, *values.shape))

    def dequantised(self, stem: str) -> torch.Tensor:
        values = self._reader.read(f"{stem}.weight").to(torch.float32)
        rows, columns = values.shape
        scales = self._scales(stem, rows, columns)
        width = columns if scales.shape[1] == 1 else self._block[1]
        return values * scales.repeat_interleave(width, dim=1)[:, :columns]

    def _format(self, stem: str) -> Format:
        dtype = self._reader.read(f"{stem}.weight").dtype
        if dtype not in _STORED:
            raise WeightsError(
                f"{self._path}: tensor '{stem}.weight' is {dtype} beside a scale; "
                "use a model of int8 or float8_e4m3fn weights"
            )
        if dtype == torch.int8:
            return "w8a8" if self._rounds_activations else "int8"
        return "fp8"

    def _scales(self, stem: str, rows: int, columns: int) -> torch.Tensor:
        """float32 [rows, 1], or [rows, blocks of columns]."""
        name = next(f"{stem}.{each}" for each in SCALES if f"{stem}.{each}" in self._reader)
        scales = self._reader.read(name).to(torch.float32)
        if scales.numel() == 1:
            return scales.reshape(1, 1).repeat(rows, 1)
        if scales.numel() == rows:
            return scales.reshape(rows, 1)
        height, width = self._block
        if tuple(scales.shape) != (-(-rows // height), -(-columns // width)):
            raise WeightsError(
                f"{self._path}: tensor {name!r} has shape {list(scales.shape)}, which scales "
                f"neither rows nor blocks of {height} x {width}; use another model"
            )
        return scales.repeat_interleave(height, dim=0)[:rows].contiguous()


def _block(config: ModelConfig) -> tuple[int, int]:
    sizes = config.list("weight_block_size") or [128, 128]
    if len(sizes) != 2 or not all(isinstance(each, int) and each > 0 for each in sizes):
        raise WeightsError(
            f"{config.path}: quantization_config.weight_block_size is {sizes!r}, "
            "not two whole numbers"
        )
    height, width = (each for each in sizes if isinstance(each, int))
    return height, width


def _rounds_activations(config: ModelConfig) -> bool:
    groups = config.section("config_groups").values.values()
    return any(isinstance(each, dict) and each.get("input_activations") for each in groups)
