"""Experts that gpt-oss's checkpoints store in MXFP4 (`quant_method: mxfp4`).

`name_blocks` uint8 [experts, out, groups, 16], two numbers a byte, the first in the low half, and
`name_scales` uint8 [experts, out, groups]. Everything else of such a checkpoint is bfloat16.
"""

import torch

from ullage_engine.models.config import ModelConfig
from ullage_engine.quant.formats import MXFP4_GROUP, Encoding, Format, Quantized
from ullage_engine.quant.packing import unpack_nibbles
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.safetensors import SafetensorsReader


class PackedExperts:
    """See the module; rows are those of all experts, one after another, in the checkpoint's
    order."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        self._reader, self._path = reader, config.path

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
        """float32 [experts, in, out], as unquantised checkpoints have it."""
        experts, out, _ = self._shape(stem)
        return self.quantized(stem).dequantise().view(experts, out, -1).transpose(1, 2)

    def _shape(self, stem: str) -> tuple[int, int, int]:
        """Experts, out and groups."""
        blocks, scales = (self._reader.shape(f"{stem}_{each}") for each in ("blocks", "scales"))
        if len(scales) != 3 or blocks != (*scales, MXFP4_GROUP // 2):
            raise WeightsError(
                f"{self._path}: tensors '{stem}_blocks' and '{stem}_scales' have shapes "
                f"{list(blocks)} and {list(scales)}, but {MXFP4_GROUP} numbers share a scale; "
                "download the model again"
            )
        experts, out, groups = scales
        return experts, out, groups
