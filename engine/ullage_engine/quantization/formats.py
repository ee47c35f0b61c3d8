"""Formats of quantised matrices: how weights are rounded, and how they are laid out in memory.

weight[row, column] = value[row, column] * scale[row, column // group] + zero[row, column // group]

In MXFP4, values and scales are stored as codes. A value's code stands for one of 16 floating-point
numbers, and a scale's code for a power of two. A block of 32 values consists of one byte for the
scale and 16 bytes for the values. The low halves of these 16 bytes are the codes of the first 16
values.

Matrices have the same layout in memory and in prepared files.

* int4 stored by rows has two columns per byte, with the even column in the low half. mxfp4 has the
  same layout, and each of its scales takes one byte.
* int8 and int4 in tiles, the layout that `ullage_engine.native` reads, have one tile for every 16
  rows of a group of columns. A tile contains the codes, followed by 16 scales and 16 offsets in
  float16. A code is the difference between a value and the smallest value of the format. The offset
  is the weight that code 0 stands for in int4, and the weight that value 0 stands for in int8. The
  codes are stored in runs of four columns: the first run of every row, then the second run of every
  row, and so on. In int4, the upper halves of the bytes hold the second half of the group.

Scales are rounded to their stored dtype before values are rounded, so the rounding error of a value
is at most half a step for every dtype.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.native.library import TILE_ROWS, instruction_set

Format = Literal["int8", "int4", "fp8", "w8a8", "mxfp4"]
"""Name of a number format.

* int8 and int4 are integers. Activations are not rounded, except in matmuls with tiled weights,
  which round activations to int8 by group.
* fp8 is E4M3.
* w8a8 is int8 with activations that are also rounded to int8, row by row.
* mxfp4 is for checkpoints that already store their experts in this format. No weights are rounded
  to mxfp4.
"""

INT4_GROUP = 32
"""Number of columns that share a scale and zero in matrices that this engine rounds to int4."""

TILE_GROUPS = (16, 32)
"""Possible group sizes of tiles (numbers of columns that share a scale)."""

MIN_VALUE: dict[Format, int] = {"int8": -128, "int4": -8, "w8a8": -127}
MAX_VALUE: dict[Format, int] = {"int8": 127, "int4": 7, "w8a8": 127}

E4M3_MOST = 448.0

MXFP4_GROUP = 32

MXFP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7. Codes 8 to 15 are their negatives."""

MXFP4_BIAS = 127
"""Amount by which a scale byte exceeds the exponent that it stands for."""


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix is stored: its number format, shape and layout."""

    format: Format
    shape: tuple[int, int]
    """Shape (out, in)."""
    group: int
    """Number of columns that share a scale. If this is all columns, each row has a single scale."""
    has_zeros: bool = False
    is_tiled: bool = False
    """Whether int8 or int4 values are stored in tiles instead of rows."""

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group

    @property
    def is_scaled_by_row(self) -> bool:
        """Whether each row has a single scale.

        This is always False for MXFP4 and tiled matrices, whose group sizes are restricted, even if
        a row happens to be a single group.
        """
        is_any_group = self.format != "mxfp4" and not self.is_tiled
        return is_any_group and self.num_groups == 1


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised matrix in unpacked form, with one value per element."""

    format: Format
    values: torch.Tensor
    """Values [out, in], int8 or float8_e4m3fn. int4 ranges from -8 to 7. mxfp4 is uint8 from 0 to
    15."""
    scales: torch.Tensor
    """Scales [out, groups]. For mxfp4, scales are uint8 exponents with a bias of 127."""
    zeros: torch.Tensor | None = None
    """Offsets [out, groups] that are added to the scaled values."""

    @property
    def encoding(self) -> Encoding:
        rows, columns = self.values.shape
        return Encoding(
            format=self.format,
            shape=(rows, columns),
            group=columns // self.scales.shape[1],
            has_zeros=self.zeros is not None,
        )

    def dequantise(self) -> torch.Tensor:
        """Return the weights, float32 [out, in]."""
        rows, columns = self.values.shape
        values = self.values
        scales = self.scales
        if self.format == "mxfp4":
            values = mxfp4_numbers()[values.int()]
            scales = mxfp4_powers()[scales.int()]
        grouped = values.to(torch.float32).view(rows, scales.shape[1], -1)
        weights = grouped * scales.unsqueeze(2).to(torch.float32)
        if self.zeros is not None:
            weights += self.zeros.unsqueeze(2).to(torch.float32)
        return weights.view(rows, columns)


def mxfp4_numbers() -> torch.Tensor:
    """Return the number that each MXFP4 code stands for, float32 [16]."""
    magnitudes = torch.tensor(MXFP4_MAGNITUDES)
    return torch.cat([magnitudes, -magnitudes])


def mxfp4_powers() -> torch.Tensor:
    """Return the factor for each scale byte, float32 [256]: 2^(byte - 127), and NaN for 255."""
    powers = [math.ldexp(1.0, code - MXFP4_BIAS) for code in range(255)]
    return torch.tensor([*powers, math.nan])


def stacked(parts: list[Quantized]) -> Quantized:
    """Stack matrices along their rows. Their encodings may differ only in the number of rows."""
    first = parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Quantized(
        first.format,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def rows_of(matrix: Quantized, start: int, count: int) -> Quantized:
    """Return `count` rows of a matrix, starting at row `start`. The inverse of `stacked`."""
    rows = slice(start, start + count)
    zeros = None if matrix.zeros is None else matrix.zeros[rows]
    return Quantized(matrix.format, matrix.values[rows], matrix.scales[rows], zeros)


def widened(quantized: Quantized, encoding: Encoding) -> Quantized:
    """Convert a matrix to an encoding with wider values, smaller groups or added zeros.

    The conversion is lossless.
    """
    scales = quantized.scales
    zeros = quantized.zeros
    if encoding.has_zeros and zeros is None:
        zeros = torch.zeros_like(scales)
    times = quantized.encoding.group // encoding.group
    if times > 1:
        scales = scales.repeat_interleave(times, dim=1)
        zeros = None if zeros is None else zeros.repeat_interleave(times, dim=1)
    return Quantized(encoding.format, quantized.values, scales, zeros)


def chosen_encoding(format: Format, shape: tuple[int, int]) -> Encoding:
    """Return the encoding for weights of this shape in a number format.

    If int4 is requested but its group size does not divide the number of columns, the encoding is
    int8.
    """
    columns = shape[1]
    if format != "int4":
        return Encoding(format=format, shape=shape, group=columns)
    if columns % INT4_GROUP:
        return Encoding(format="int8", shape=shape, group=columns)
    return Encoding(format="int4", shape=shape, group=INT4_GROUP, has_zeros=True)


BLOCK = 32


def read_mxfp4(data: npt.NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack MXFP4 bytes [..., bytes] to codes 0 to 15 [..., in] and scales [..., groups]."""
    blocks = torch.from_numpy(np.array(data)).view(*data.shape[:-1], -1, 17)
    codes = blocks[..., 1:]
    return torch.cat([codes & 15, codes >> 4], dim=-1).flatten(-2), blocks[..., 0]


VALUES = "values"
SCALES = "scales"
ZEROS = "zeros"

PIECES = (VALUES, SCALES, ZEROS)

_FACTOR_BYTES = 2 * 2 * TILE_ROWS
"""Size in bytes of a tile's float16 scales and offsets."""


class Axis(NamedTuple):
    """The dimension of a stored tensor that corresponds to a matrix's rows or columns."""

    dim: int
    unit: int = 1
    """Number of matrix rows or columns that one element of the tensor covers."""


class Piece(NamedTuple):
    """The layout of one of the tensors that store a matrix, such as its values or scales."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Axis = Axis(0)
    columns: Axis | None = Axis(1)
    """Axis along the columns, or None if each element applies to all columns."""

    def axis(self, is_of_rows: bool) -> Axis | None:
        return self.rows if is_of_rows else self.columns


class Packed(NamedTuple):
    """A matrix in its stored form, as one or more packed tensors."""

    encoding: Encoding
    pieces: dict[str, torch.Tensor]

    @property
    def values(self) -> torch.Tensor:
        return self.pieces[VALUES]

    @property
    def scales(self) -> torch.Tensor:
        """Scales [out, groups]. Unavailable for tiled matrices, whose tiles contain the scales."""
        return self.pieces[SCALES]

    @property
    def zeros(self) -> torch.Tensor | None:
        """Offsets [out, groups]. None if the matrix has no offsets or if its tiles contain them."""
        return self.pieces.get(ZEROS)

    def split(self, count: int) -> "list[Packed]":
        """Return views of the `count` matrices that are stacked in this one."""
        part = encoding_of_one(self.encoding, count)
        chunks = {
            name: tensor.view(count, -1, *tensor.shape[1:]) for name, tensor in self.pieces.items()
        }
        return [Packed(part, {n: each[i] for n, each in chunks.items()}) for i in range(count)]


def pieces_of(encoding: Encoding, dtype: torch.dtype) -> list[Piece]:
    """Describe the tensors that store a matrix.

    Args:
        encoding: encoding of the matrix.
        dtype: dtype in which the model computes.
    """
    rows, columns = encoding.shape
    stored = scale_type(encoding, dtype)
    per_group = None if encoding.is_scaled_by_row else Axis(1, encoding.group)
    scales = Piece(SCALES, (rows, encoding.num_groups), stored, columns=per_group)
    if encoding.is_tiled:
        tiles = (rows // TILE_ROWS, encoding.num_groups, code_bytes(encoding) + _FACTOR_BYTES)
        axes = {"rows": Axis(0, TILE_ROWS), "columns": Axis(1, encoding.group)}
        return [Piece(VALUES, tiles, torch.uint8, **axes)]
    per_byte = 2 if encoding.format in ("int4", "mxfp4") else 1
    byte = torch.int8 if encoding.format in ("int8", "w8a8") else torch.uint8
    zeros = [scales._replace(name=ZEROS)] if encoding.has_zeros else []
    values = Piece(VALUES, (rows, columns // per_byte), byte, columns=Axis(1, per_byte))
    return [values, scales, *zeros]


def piece_of(encoding: Encoding, name: str) -> Piece:
    """Return the `Piece` with this name from `pieces_of`.

    Ignore its dtype, because it depends on the computing dtype, which is unknown here.
    """
    return next(each for each in pieces_of(encoding, torch.float32) if each.name == name)


def encoding_of_one(encoding: Encoding, count: int) -> Encoding:
    """Return the encoding of a single matrix in a stack of `count` matrices of equal shape.

    `encoding` is the encoding of the whole stack.
    """
    rows, columns = encoding.shape
    return msgspec.structs.replace(encoding, shape=(rows // count, columns))


def code_bytes(encoding: Encoding) -> int:
    """Return the number of bytes that the codes of one tile take."""
    return encoding.group * TILE_ROWS // (2 if encoding.format == "int4" else 1)


def pack(quantized: Quantized, encoding: Encoding, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Pack a matrix into the tensors that store it, named as in `pieces_of`."""
    if encoding.is_tiled:
        return {VALUES: pack_tiles(widened(quantized, encoding), encoding)}
    stored = scale_type(encoding, dtype)
    pieces = {VALUES: _stored_values(quantized), SCALES: quantized.scales.to(stored)}
    if quantized.zeros is not None:
        pieces[ZEROS] = quantized.zeros.to(stored)
    return pieces


def unpack(packed: Packed) -> Quantized:
    """Rebuild a matrix from the packed tensors that store it. This is the inverse of `pack`."""
    encoding = packed.encoding
    if encoding.is_tiled:
        return unpack_tiles(packed.values, encoding)
    values = packed.values
    if encoding.format == "int4":
        values = unpack_nibbles(values).view(torch.int8) + MIN_VALUE["int4"]
    elif encoding.format == "mxfp4":
        values = unpack_nibbles(values)
    elif encoding.format == "fp8":
        values = values.view(torch.float8_e4m3fn)
    return Quantized(encoding.format, values, packed.scales, packed.zeros)


def _stored_values(quantized: Quantized) -> torch.Tensor:
    match quantized.format:
        case "int4":
            return pack_nibbles(_codes(quantized.values))
        case "mxfp4":
            return pack_nibbles(quantized.values)
        case "fp8":
            return quantized.values.view(torch.uint8)
        case _:
            return quantized.values


def scale_type(encoding: Encoding, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scales and zeros are stored for the computing dtype `dtype`."""
    if encoding.is_tiled:
        return torch.float16
    types: dict[str, torch.dtype] = {"w8a8": torch.float32, "mxfp4": torch.uint8}
    return types.get(encoding.format, dtype)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """Convert int4 values -8 to 7 to codes 0 to 15."""
    return (values - MIN_VALUE["int4"]).view(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack values from 0 to 15, [rows, columns], into bytes [rows, columns / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)


def pack_tiles(matrix: Quantized, encoding: Encoding) -> torch.Tensor:
    """Pack a matrix into tiles [rows / 16, groups, bytes per tile], grouped as in `encoding`."""
    least = MIN_VALUE[encoding.format]
    group = encoding.group
    tiles = encoding.shape[0] // TILE_ROWS
    groups = encoding.num_groups
    codes = (matrix.values.to(torch.int16) - least).to(torch.uint8)
    if encoding.format == "int4":
        halves = codes.view(tiles, TILE_ROWS, groups, 2, group // 8, 4)
        codes = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    else:
        codes = codes.view(tiles, TILE_ROWS, groups, group // 4, 4)
    scales = matrix.scales.to(torch.float16)
    offsets = _code_shift(encoding) * scales.to(torch.float32)
    if matrix.zeros is not None:
        offsets += matrix.zeros.to(torch.float32)
    factors = torch.stack([scales, offsets.to(torch.float16)])
    factors = factors.view(2, tiles, TILE_ROWS, groups).permute(1, 3, 0, 2).contiguous()
    by_group = codes.permute(0, 2, 3, 1, 4).reshape(tiles, groups, -1)
    return torch.cat([by_group, factors.flatten(2).view(torch.uint8)], dim=2)


def unpack_tiles(packed: torch.Tensor, encoding: Encoding) -> Quantized:
    """Unpack tiles, or some rows of tiles. This is the inverse of `pack_tiles`."""
    least = MIN_VALUE[encoding.format]
    size = code_bytes(encoding)
    group = encoding.group
    tiles, groups, _ = packed.shape
    codes = packed[..., :size].view(tiles, groups, -1, TILE_ROWS, 4)
    if encoding.format == "int4":
        codes = torch.cat([codes & 15, codes >> 4], dim=2)
    codes = codes.permute(0, 3, 1, 2, 4).reshape(tiles * TILE_ROWS, groups * group)
    values = (codes.to(torch.int16) + least).to(torch.int8)
    factors = packed[..., size:].contiguous().view(torch.float16).to(torch.float32)
    factors = factors.view(tiles, groups, 2, TILE_ROWS).permute(2, 0, 3, 1)
    scales, offsets = factors.reshape(2, tiles * TILE_ROWS, groups)
    return Quantized(encoding.format, values, scales, offsets - _code_shift(encoding) * scales)


def _code_shift(encoding: Encoding) -> int:
    """Return the quantised value whose weight a tile stores as its offset.

    For int4, this is the smallest value, as in Q4_1. For int8, it is 0, because the weight of the
    smallest int8 value is so large that rounding it to float16 would cause a noticeable error.
    """
    return MIN_VALUE["int4"] if encoding.format == "int4" else 0


def laid_out_for(encoding: Encoding, device: torch.device, num_matrices: int = 1) -> Encoding:
    """Return the same encoding, but in the layout that the device's kernels read.

    Args:
        encoding: encoding of a matrix, or of several stacked ones.
        device: the device to compute on.
        num_matrices: number of stacked matrices.
    """
    rows, columns = encoding.shape
    is_whole = encoding.format in ("int8", "int4") and rows // num_matrices % TILE_ROWS == 0
    group = next((g for g in reversed(TILE_GROUPS) if encoding.group % g == 0), 0)
    if not is_whole or not group or device.type != "cpu" or instruction_set() is None:
        return encoding
    assert columns % group == 0, "groups divide the columns"
    return msgspec.structs.replace(encoding, group=group, has_zeros=True, is_tiled=True)


_TINY = 1e-12
"""Minimum scale for all dtypes except float16, which cannot represent such a small value."""

_LEAST_FLOAT16 = 2.0**-24


def quantise(weights: torch.Tensor, encoding: Encoding, dtype: torch.dtype) -> Quantized:
    """Round weights [out, in] to an encoding, for the computing dtype `dtype`."""
    weights = weights.to(torch.float32)
    dtype = scale_type(encoding, dtype)
    match encoding.format:
        case "int4":
            return quantise_int4(weights, encoding.group, dtype)
        case "fp8":
            return quantise_fp8(weights, dtype)
        case "w8a8":
            return quantise_symmetric(weights, "w8a8", encoding.group, dtype)
        case _:
            return quantise_symmetric(weights, "int8", encoding.group, dtype)


def quantise_symmetric(
    weights: torch.Tensor, format: Format, group: int, dtype: torch.dtype
) -> Quantized:
    """Round to 127 steps on each side of zero, with one scale per group of a row.

    |weight - dequantised| <= scale / 2, where scale = max|group| / 127.
    """
    limit = MAX_VALUE[format]
    rows = weights.shape[0]
    grouped = weights.reshape(-1, group)
    scales = stored_scales(grouped.abs().amax(dim=1, keepdim=True) / limit, dtype)
    values = (grouped / scales.to(torch.float32)).round_().clamp_(-limit, limit)
    return Quantized(format, values.to(torch.int8).view(rows, -1), scales.view(rows, -1))


def quantise_fp8(weights: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """Round to E4M3, with one scale per row.

    |weight - dequantised| <= max(|weight| / 16, scale / 1024). The first bound is half a unit
    in the last place of a 3-bit mantissa. The second is half of the smallest subnormal step, 2^-9.
    If a scale was rounded down, weights beyond 448 times the scale are clamped.
    """
    scales = stored_scales(weights.abs().amax(dim=1, keepdim=True) / E4M3_MOST, dtype)
    values = (weights / scales.to(torch.float32)).clamp_(-E4M3_MOST, E4M3_MOST)
    return Quantized("fp8", values.to(torch.float8_e4m3fn), scales)


def quantise_int4(weights: torch.Tensor, group: int, dtype: torch.dtype) -> Quantized:
    """Round to 16 steps that span each group's smallest weight, largest weight and zero.

    The zero point is a whole number of steps, as in GPTQ and AWQ, so that zero weights stay zero.
    Narrower ranges have a smaller squared error but performed worse in measurements
    (docs/guide/quantization.md). |weight - dequantised| <= scale / 2, apart from the rounding of
    scale and zero to `dtype`. Rounding the zero point shortens the range by at most half a step.
    """
    rows, columns = weights.shape
    grouped = weights.view(rows, columns // group, group)
    low = grouped.amin(dim=2).clamp_(max=0.0)
    high = grouped.amax(dim=2).clamp_(min=0.0)
    scales = stored_scales((high - low) / 15, dtype)
    steps = scales.to(torch.float32)
    point = (-low / steps).round_().clamp_(0, 15) + MIN_VALUE["int4"]
    values = (grouped / steps.unsqueeze(2)).round_() + point.unsqueeze(2)
    values = values.clamp_(MIN_VALUE["int4"], MAX_VALUE["int4"]).to(torch.int8)
    return Quantized("int4", values.flatten(1), scales, (-point * steps).to(dtype))


def stored_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert scales to the dtype in which they are stored.

    They are first clamped to a small positive minimum, so that none of them becomes zero.
    """
    smallest = _LEAST_FLOAT16 if dtype == torch.float16 else _TINY
    return scales.clamp(min=smallest).to(dtype)
