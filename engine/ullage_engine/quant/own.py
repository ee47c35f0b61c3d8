"""Directories of int4 matrices that `ullage quantize` wrote (`quant_method: ullage`).

`name.weight_packed` uint8 [out, in / 2] as `packing` has it row by row, `name.weight_scale` and
`name.weight_zero` [out, groups]. Matrices that could not be grouped are int8 with a scale.
"""

import torch

from ullage_engine.models.config import ModelConfig
from ullage_engine.quant.formats import LEAST, Encoding, Format, Quantized
from ullage_engine.quant.packing import pack_nibbles, unpack_nibbles
from ullage_engine.weights.safetensors import SafetensorsReader


def own_tensors(stem: str, matrix: Quantized) -> dict[str, torch.Tensor]:
    """The tensors of one int4 matrix."""
    assert matrix.zeros is not None, "int4 has zeros"
    codes = (matrix.values - LEAST["int4"]).view(torch.uint8)
    return {
        f"{stem}.weight_packed": pack_nibbles(codes),
        f"{stem}.weight_scale": matrix.scales,
        f"{stem}.weight_zero": matrix.zeros,
    }


class OwnMatrices:
    """See the module."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        config.require(format="int4")
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
        values = codes.view(torch.int8) + LEAST["int4"]
        return Quantized("int4", values, scales, read(f"{stem}.weight_zero"))

    def dequantised(self, stem: str) -> torch.Tensor:
        return self.quantized(stem).dequantise()
