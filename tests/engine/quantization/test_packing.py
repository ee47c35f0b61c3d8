"""Stored matrices come back as they were, in both layouts."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from ullage_engine.quantization.formats import (
    Encoding,
    Format,
    Packed,
    chosen_encoding,
    cpu_reads_tiles,
    laid_out_for,
    pack,
    pack_nibbles,
    pack_tiles,
    pieces_of,
    quantise,
    unpack,
    unpack_nibbles,
    unpack_tiles,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_as_planned_and_give_the_matrix_back(
    format: Format, dtype: torch.dtype, tiled: bool, new_weights: Callable[..., torch.Tensor]
) -> None:
    if tiled and format != "int4":
        pytest.skip("only int4 is tiled")
    plain = chosen_encoding(format, (128, 192))
    encoding = Encoding(
        format=format,
        shape=plain.shape,
        group=plain.group,
        has_zeros=plain.has_zeros,
        is_tiled=tiled,
    )
    rounded = quantise(new_weights(128, 192), plain, dtype)
    pieces = pack(rounded, encoding, dtype)
    planned = pieces_of(encoding, dtype)
    assert {piece.name: (piece.shape, piece.dtype) for piece in planned} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pieces.items()
    }
    back = unpack(Packed(encoding, pieces))
    assert torch.equal(back.dequantise(), rounded.dequantise())
    assert back.encoding == plain


def test_codes_survive_packing(seed: int) -> None:
    codes = torch.randint(
        0, 16, (192, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert torch.equal(unpack_tiles(pack_tiles(codes)), codes)
    assert pack_nibbles(codes)[0, 0] == codes[0, 0] | codes[0, 1] << 4
    assert pack_tiles(codes)[2, 5, 7] == codes[128 + 7, 5] | codes[128 + 32 + 7, 5] << 4


def test_tiles_are_those_of_torchs_kernel() -> None:
    if not cpu_reads_tiles():
        pytest.skip("this processor's int4 kernel reads other tiles; rows are used")
    codes = torch.randint(0, 16, (128, 96), dtype=torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    assert torch.equal(theirs.view(-1), pack_tiles(codes).view(-1))


def test_tiles_are_used_only_where_they_are_read() -> None:
    int4 = chosen_encoding("int4", (128, 192))
    assert laid_out_for(int4, CPU, torch.bfloat16).is_tiled == cpu_reads_tiles()
    assert not laid_out_for(int4, CPU, torch.float32).is_tiled
    assert not laid_out_for(int4, torch.device("cuda"), torch.bfloat16).is_tiled
    assert not laid_out_for(chosen_encoding("int4", (96, 192)), CPU, torch.bfloat16).is_tiled
    int8 = chosen_encoding("int8", (128, 192))
    assert laid_out_for(int8, CPU, torch.bfloat16) == int8


@pytest.mark.parametrize("tiled", [False, True])
def test_matrices_one_above_the_other_come_apart(
    tiled: bool, new_weights: Callable[..., torch.Tensor]
) -> None:
    """As the experts of a layer are stored."""
    rounded = quantise(new_weights(256, 192), chosen_encoding("int4", (256, 192)), torch.float32)
    count = 4 if tiled else 1
    encoding = msgspec.structs.replace(rounded.encoding, is_tiled=tiled, count=count)
    whole = Packed(encoding, pack(rounded, encoding, torch.float32))
    parts = whole.split(4)
    planned = {piece.name: piece.shape for piece in pieces_of(encoding, torch.float32)}
    assert planned == {name: tensor.shape for name, tensor in whole.pieces.items()}
    assert torch.equal(unpack(whole).dequantise(), rounded.dequantise())
    stored = {tensor.untyped_storage().data_ptr() for tensor in whole.pieces.values()}
    for tensor in (tensor for part in parts for tensor in part.pieces.values()):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().data_ptr() in stored, "counted once, so held once"
    found = torch.cat([unpack(part).dequantise() for part in parts])
    assert torch.equal(found, rounded.dequantise())
    assert parts[0].encoding.shape == (64, 192)
