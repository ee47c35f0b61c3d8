"""MXFP4, in which gpt-oss stores its experts: 4 bits a number and 8 for the scale of each 32.

A number is 1 sign bit, 2 of exponent and 1 of mantissa; a scale is the power of two 2^(byte - 127),
and 255 is not a number (OCP Microscaling Formats 1.0). Weights stay packed: a panel of rows at a
time is decoded into scratch memory and multiplied from there. In float32 and bfloat16 the decoded
numbers are exact.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage_engine.kernels import triton
from ullage_engine.layers.expert_matrices import (
    ExpertMatrices,
    LoopedExperts,
    PickedExperts,
    column_panels,
    packed_experts,
)
from ullage_engine.memory.experts import INT32_BYTES, mxfp4_panel
from ullage_engine.quant.formats import MXFP4_GROUP as GROUP
from ullage_engine.quant.formats import mxfp4_numbers, mxfp4_powers

_WORDS = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
"""Integers of the size of two numbers."""


def decodes(device: torch.device) -> bool:
    """Whether weights are decoded before they are multiplied: not where Triton's kernels do it."""
    return not triton.runs_on(device)


class Decoder:
    """Decodes into scratch memory, the same for every panel and every layer."""

    def __init__(self, dtype: torch.dtype, scratch: torch.Tensor) -> None:
        """`scratch` is uint8 of `mxfp4_scratch_bytes`.

        Raises:
            ValueError: numbers of this type cannot hold every scale.
        """
        if dtype not in _WORDS:
            raise ValueError(
                f"model.dtype {str(dtype).removeprefix('torch.')} cannot hold the scales of MXFP4 "
                "weights; use bfloat16 or float32"
            )
        device = scratch.device
        self.elements = mxfp4_panel(device.type)
        numbers = mxfp4_numbers().to(dtype)
        # Of every byte both numbers, the one in the low bits first.
        pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)
        self._pairs = pairs.view(_WORDS[dtype]).view(-1).to(device)
        self._powers = mxfp4_powers().to(dtype).to(device)
        end = self.elements * dtype.itemsize
        self._values = scratch[:end].view(dtype)
        self._codes = scratch[end : end + self.elements // 2 * INT32_BYTES].view(torch.int32)

    def decode(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """[..., groups * 32] of blocks uint8 [..., groups, 16] and scales uint8 [..., groups].

        The result lives until the next call.
        """
        codes = self._codes[: blocks.numel()]
        values = self._values[: 2 * blocks.numel()]
        codes.view(blocks.shape).copy_(blocks)
        torch.index_select(self._pairs, 0, codes, out=values.view(self._pairs.dtype))
        powers = self._powers.index_select(0, scales.reshape(-1).int())
        values.view(-1, GROUP).mul_(powers[:, None])
        return values.view(*scales.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """One expert's packed matrix; see `ullage_engine.layers.matrix.Matrix`."""

    blocks: torch.Tensor
    """uint8 [out, groups, 16]: of each row the numbers along `in`."""
    scales: torch.Tensor
    """uint8 [out, groups]."""
    decoder: Decoder

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1] * GROUP, self.scales.shape[0]

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for columns in self._panels():
            torch.mm(x, self._decode(columns), out=out[:, columns])

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for columns in self._panels():
            out[:, columns].addmm_(x, self._decode(columns))

    def _panels(self) -> list[slice]:
        return column_panels(self.shape[1], self.decoder.elements // self.shape[0])

    def _decode(self, columns: slice) -> torch.Tensor:
        return self.decoder.decode(self.blocks[columns], self.scales[columns]).t()


class Mxfp4Experts(LoopedExperts):
    """All experts of a layer, packed; see `ullage_engine.layers.expert_matrices.ExpertMatrices`.

    On a device a panel of every expert is decoded and multiplied in one grouped product, so that
    the extents stay there; on a CPU one expert's is, and experts without rows are not decoded.
    """

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, decoder: Decoder) -> None:
        """Blocks are uint8 [experts, out, groups, 16], scales uint8 [experts, out, groups]."""
        pairs = zip(blocks, scales, strict=True)
        super().__init__([Mxfp4Matrix(*each, decoder) for each in pairs])
        self._blocks, self._scales, self._decoder = blocks, scales, decoder

    @property
    def few_pairs(self) -> int:
        return 0 if self._blocks.is_cuda else super().few_pairs

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        if x.is_cuda:
            self.multiply_grouped(x, ends, pairs, out)
        else:
            super().multiply(x, ends, pairs, out)

    def multiply_grouped(
        self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor
    ) -> None:
        """`multiply` without learning on the host where an expert's rows end."""
        experts, columns, groups = self._scales.shape
        for panel in column_panels(columns, self._decoder.elements // (experts * groups * GROUP)):
            weights = self._decoder.decode(self._blocks[:, panel], self._scales[:, panel])
            product = F.grouped_mm(x[:pairs], weights.transpose(1, 2), offs=ends)
            out[:pairs, panel].copy_(product)


def mxfp4_experts(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, scratch: torch.Tensor
) -> ExpertMatrices:
    """The fastest way: with Triton weights are decoded inside the products.

    Where this `decodes`, scratch is uint8 of `mxfp4_scratch_bytes`.
    """
    if not decodes(blocks.device):
        packed = packed_experts(blocks.flatten(2), scales, "mxfp4")
        return PickedExperts(packed, packed)
    return Mxfp4Experts(blocks, scales, Decoder(dtype, scratch))
