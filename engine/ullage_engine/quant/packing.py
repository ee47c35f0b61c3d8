"""Quantised matrices as they lie in memory and in prepared files.

int4, row by row: two columns a byte, the even one in the low half; mxfp4 the same, and its scales
are a byte each. int4, tiled: for each 64 rows
and column 32 bytes, row r in the low half and row r + 32 in the high half of byte r, which is what
torch's CPU kernel reads on processors with AVX-512; scales and zeros are pairs [groups, out, 2],
of experts one expert's after another's.
"""

from functools import cache
from typing import NamedTuple

import msgspec
import torch

from ullage_engine.quant.formats import LEAST, TILE_ROWS, Encoding, Quantized

VALUES, SCALES, ZEROS = "values", "scales", "zeros"

PIECES = (VALUES, SCALES, ZEROS)

_HALF = TILE_ROWS // 2


class Piece(NamedTuple):
    """One tensor of a stored matrix."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Packed(NamedTuple):
    """A stored matrix."""

    encoding: Encoding
    pieces: dict[str, torch.Tensor]

    @property
    def values(self) -> torch.Tensor:
        return self.pieces[VALUES]

    @property
    def scales(self) -> torch.Tensor:
        """[out, groups], or [count, groups, out / count, 2] with the zeros where tiled and of more
        than one matrix; [groups, out, 2] of one."""
        return self.pieces[SCALES]

    @property
    def zeros(self) -> torch.Tensor | None:
        """[out, groups]; None where there are none, or beside the scales."""
        return self.pieces.get(ZEROS)

    def split(self, count: int) -> "list[Packed]":
        """So many matrices that lie one above the other, all of them this one's memory."""
        assert not self.encoding.is_tiled or self.encoding.count == count, "scales lie together"
        rows, columns = self.encoding.shape
        part = msgspec.structs.replace(self.encoding, shape=(rows // count, columns), count=1)
        chunks = {
            name: tensor if self._is_apart(name) else tensor.view(count, -1, *tensor.shape[1:])
            for name, tensor in self.pieces.items()
        }
        return [Packed(part, {n: each[i] for n, each in chunks.items()}) for i in range(count)]

    def _is_apart(self, name: str) -> bool:
        return self.encoding.count > 1 and name == SCALES


def pieces_of(encoding: Encoding, dtype: torch.dtype) -> list[Piece]:
    """The tensors that a matrix is stored in; `dtype` is that of the computation."""
    rows, columns = encoding.shape
    scale_type = _scale_type(encoding, dtype)
    scales = Piece(SCALES, (rows, encoding.num_groups), scale_type)
    if encoding.is_tiled:
        tiles = (rows // TILE_ROWS, columns, _HALF)
        pairs: tuple[int, ...] = (encoding.num_groups, rows, 2)
        if encoding.count > 1:
            pairs = (encoding.count, encoding.num_groups, rows // encoding.count, 2)
        return [Piece(VALUES, tiles, torch.uint8), Piece(SCALES, pairs, scale_type)]
    width = columns // 2 if encoding.format in ("int4", "mxfp4") else columns
    byte = torch.int8 if encoding.format in ("int8", "w8a8") else torch.uint8
    zeros = [scales._replace(name=ZEROS)] if encoding.has_zeros else []
    return [Piece(VALUES, (rows, width), byte), scales, *zeros]


def pack(quantized: Quantized, encoding: Encoding, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of `pieces_of`."""
    if encoding.is_tiled:
        assert quantized.zeros is not None, "tiles hold scales and zeros in pairs"
        pairs = torch.stack([quantized.scales.t(), quantized.zeros.t()], dim=2)
        if encoding.count > 1:
            pairs = pairs.view(pairs.shape[0], encoding.count, -1, 2).transpose(0, 1).contiguous()
        return {VALUES: pack_tiles(_codes(quantized.values)), SCALES: pairs.to(dtype)}
    scale_type = _scale_type(encoding, dtype)
    pieces = {VALUES: _stored_values(quantized), SCALES: quantized.scales.to(scale_type)}
    if quantized.zeros is not None:
        pieces[ZEROS] = quantized.zeros.to(scale_type)
    return pieces


def unpack(packed: Packed) -> Quantized:
    """The opposite of `pack`."""
    encoding = packed.encoding
    if encoding.is_tiled:
        pairs = packed.scales
        if encoding.count > 1:
            pairs = pairs.transpose(0, 1).flatten(1, 2)
        scales, zeros = pairs.unbind(dim=2)
        values = unpack_tiles(packed.values).view(torch.int8) + LEAST["int4"]
        return Quantized("int4", values, scales.t(), zeros.t())
    values = packed.values
    if encoding.format == "int4":
        values = unpack_nibbles(values).view(torch.int8) + LEAST["int4"]
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


def _scale_type(encoding: Encoding, dtype: torch.dtype) -> torch.dtype:
    """`dtype` is that of the computation."""
    types: dict[str, torch.dtype] = {"w8a8": torch.float32, "mxfp4": torch.uint8}
    return types.get(encoding.format, dtype)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """int4 values -8 to 7 as 0 to 15."""
    return (values - LEAST["int4"]).view(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of 0 to 15 as [rows, columns / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)


def pack_tiles(codes: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of 0 to 15 as [rows / 64, columns, 32]."""
    tiles = codes.view(-1, TILE_ROWS, codes.shape[1])
    return (tiles[:, :_HALF] | (tiles[:, _HALF:] << 4)).transpose(1, 2).contiguous()


def unpack_tiles(packed: torch.Tensor) -> torch.Tensor:
    halves = torch.cat([packed & 15, packed >> 4], dim=2)
    return halves.transpose(1, 2).reshape(-1, packed.shape[1])


def laid_out_for(
    encoding: Encoding, device: torch.device, dtype: torch.dtype, num_matrices: int = 1
) -> Encoding:
    """The same matrix, or matrices one above the other, in the layout that this device's kernels
    read."""
    rows = encoding.shape[0] // num_matrices
    fits = encoding.format == "int4" and encoding.has_zeros and rows % TILE_ROWS == 0
    is_cpu = device.type == "cpu" and dtype == torch.bfloat16
    known_group = encoding.group in (32, 64, 128)
    is_tiled = fits and is_cpu and known_group and cpu_reads_tiles()
    count = num_matrices if is_tiled else 1
    return msgspec.structs.replace(encoding, is_tiled=is_tiled, count=count)


@cache
def cpu_reads_tiles() -> bool:
    """Whether torch's int4 kernel on this processor reads the tiles packed here: it packs other
    tiles for other instruction sets."""
    codes = torch.arange(TILE_ROWS * 32, dtype=torch.int32).view(TILE_ROWS, 32) * 7 % 16
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return torch.equal(theirs.view(-1), pack_tiles(codes.to(torch.uint8)).view(-1))
