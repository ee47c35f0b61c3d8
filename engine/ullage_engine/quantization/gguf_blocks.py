"""Converts GGUF's quantised blocks to int4 or int8 with the same groups.

weight = value * scale + zero, with a scale and a zero for each group of a row. Four-bit block types
become int4, and wider ones int8. The conversion is exact, apart from rounding scales and zeros to
their stored type.

Blocks of 32 values:

* Q4_0 has a float16 scale, and Q4_1 also has a float16 minimum. Four-bit codes follow, as in
  `formats`.
* Q5_0 and Q5_1 also store each code's fifth bit, in four bytes before the four-bit halves.
* Q8_0 has a float16 scale and signed bytes.

Blocks of 256 values:

* Q4_K and Q5_K have two float16 factors: one for eight 6-bit scales and one for eight 6-bit
  minimums.
* Q6_K has sixteen scales, which are signed bytes, followed by one float16 factor for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.quantization.formats import Encoding, Format, Quantized


class _Kind(NamedTuple):
    format: Format
    group: int
    num_bytes: int
    """Size of a block in bytes."""
    read: Callable[[torch.Tensor], "_Groups"]


class _Groups(NamedTuple):
    """The values of a matrix, int8 [out, groups, group], and its scales and zeros [out, groups]."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack the bytes of the last dimension into nibbles: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _split(packed: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Reshape the last dimension into several dimensions of these sizes."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., n] into bits [..., 8 n], the lowest bit of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Read the float16 value at byte `start` of each block, as float32."""
    stored = blocks[..., start : start + 2].contiguous()
    return stored.view(torch.float16).squeeze(-1).to(torch.float32)


def _centred(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Subtract `middle` from unsigned codes, so that they are centred on 0.

    The groups' zeros are then small, and so are the errors from rounding these zeros.
    """
    return codes.to(torch.int16).sub_(middle).to(torch.int8)


def _q4_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    return _Groups(_centred(_nibbles(blocks[..., 2:]), 8), scales, torch.zeros_like(scales))


def _q4_1(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    values = _centred(_nibbles(blocks[..., 4:]), 8)
    return _Groups(values, scales, _half(blocks, 2) + 8 * scales)


def _q5_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    codes = _nibbles(blocks[..., 6:]) | (_bits(blocks[..., 2:6]) << 4)
    return _Groups(_centred(codes, 16), scales, torch.zeros_like(scales))


def _q5_1(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    codes = _nibbles(blocks[..., 8:]) | (_bits(blocks[..., 4:8]) << 4)
    return _Groups(_centred(codes, 16), scales, _half(blocks, 2) + 16 * scales)


def _q8_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    values = blocks[..., 2:].contiguous().view(torch.int8)
    return _Groups(values, scales, torch.zeros_like(scales))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack eight 6-bit scales and eight 6-bit minimums from twelve bytes, as float32."""
    low, middle, high = _split(packed, 3, 4).unbind(-2)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=-1)
    minimums = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=-1)
    return scales.float(), minimums.float()


def _large(blocks: torch.Tensor, codes: torch.Tensor, middle: int) -> _Groups:
    """Decode a Q4_K or Q5_K matrix, given its unpacked codes [out, blocks, 8, 32]."""
    scales, minimums = _six_bits(blocks[..., 4:16])
    scales *= _half(blocks, 0).unsqueeze(-1)
    zeros = middle * scales - _half(blocks, 2).unsqueeze(-1) * minimums
    return _Groups(_centred(codes, middle).flatten(1, 2), scales.flatten(1), zeros.flatten(1))


def _large_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Split 128 bytes into eight groups of 32 codes.

    Each 32 bytes hold two groups: one in their low halves, and the next in their high halves.
    """
    return _split(_nibbles(_split(packed, 4, 32)).flatten(-2), 8, 32)


def _q4_k(blocks: torch.Tensor) -> _Groups:
    return _large(blocks, _large_nibbles(blocks[..., 16:]), 8)


def _q5_k(blocks: torch.Tensor) -> _Groups:
    # Bit g of byte i is the fifth bit of number i of run g.
    runs = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = (blocks[..., 16:48].unsqueeze(-2) >> runs) & 1
    return _large(blocks, _large_nibbles(blocks[..., 48:]) | (high << 4), 16)


def _q6_k(blocks: torch.Tensor) -> _Groups:
    # Each half of a block has 64 bytes of four-bit halves and 32 bytes of pairs of upper bits.
    low = _split(blocks[..., :128], 2, 64)
    low = torch.cat([low & 15, low >> 4], dim=-1)
    pairs = _split(blocks[..., 128:192], 2, 32)
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    values = _split(_centred(low | (high << 4), 32), 8, 16).flatten(1, 3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (scales * _half(blocks, 208).unsqueeze(-1)).flatten(1)
    return _Groups(values, scales, torch.zeros_like(scales))


_KINDS = {
    "Q4_0": _Kind("int4", 32, 18, _q4_0),
    "Q4_1": _Kind("int4", 32, 20, _q4_1),
    "Q4_K": _Kind("int4", 32, 144, _q4_k),
    "Q5_0": _Kind("int8", 32, 22, _q5_0),
    "Q5_1": _Kind("int8", 32, 24, _q5_1),
    "Q5_K": _Kind("int8", 32, 176, _q5_k),
    "Q6_K": _Kind("int8", 16, 210, _q6_k),
    "Q8_0": _Kind("int8", 32, 34, _q8_0),
}


def block_encoding(kind: str, shape: tuple[int, int]) -> Encoding | None:
    """Return the encoding for a matrix of blocks of type `kind`, or None if it is unsupported."""
    layout = _KINDS.get(kind)
    if layout is None:
        return None
    return Encoding(format=layout.format, shape=shape, group=layout.group, has_zeros=True)


def read_blocks(data: npt.NDArray[np.uint8], kind: str) -> Quantized:
    """Convert a matrix from GGUF blocks of one type, bytes [out, bytes], to int4 or int8."""
    layout = _KINDS[kind]
    blocks = torch.from_numpy(np.array(data)).view(data.shape[0], -1, layout.num_bytes)
    groups = layout.read(blocks)
    return Quantized(layout.format, groups.values.flatten(1), groups.scales, groups.zeros)
