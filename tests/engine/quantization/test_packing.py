"""Stored matrices come back as they were, in both layouts."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from ullage_engine.native.library import instruction_set
from ullage_engine.quantization.formats import (
    TILE_GROUPS,
    Encoding,
    Format,
    Packed,
    chosen_encoding,
    laid_out_for,
    pack,
    pack_nibbles,
    pieces_of,
    quantise,
    unpack,
    unpack_nibbles,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_as_planned_and_give_the_matrix_back(
    format: Format, dtype: torch.dtype, new_weights: Callable[..., torch.Tensor]
) -> None:
    encoding = chosen_encoding(format, (128, 192))
    rounded = quantise(new_weights(128, 192), encoding, dtype)
    pieces = pack(rounded, encoding, dtype)
    assert planned(encoding, dtype) == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pieces.items()
    }
    back = unpack(Packed(encoding, pieces))
    assert torch.equal(back.dequantise(), rounded.dequantise())
    assert back.encoding == encoding


@pytest.mark.parametrize("group", TILE_GROUPS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_tiles_give_the_matrix_back(
    format: Format, group: int, new_weights: Callable[..., torch.Tensor]
) -> None:
    """Scales are rounded to float16 before the values are, so that nothing is lost but the rounding
    of minimums."""
    encoding = Encoding(format=format, shape=(48, 192), group=group, has_zeros=True, is_tiled=True)
    rounded = quantise(new_weights(48, 192), encoding, torch.float32)
    pieces = pack(rounded, encoding, torch.float32)
    assert planned(encoding, torch.float32) == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pieces.items()
    }
    back = unpack(Packed(encoding, pieces))
    assert torch.equal(back.values, rounded.values)
    assert torch.equal(back.scales, rounded.scales.float())
    weights = rounded.dequantise()
    assert (back.dequantise() - weights).abs().max() <= weights.abs().max() * 2**-10


def planned(encoding: Encoding, dtype: torch.dtype) -> dict[str, tuple[object, torch.dtype]]:
    return {piece.name: (piece.shape, piece.dtype) for piece in pieces_of(encoding, dtype)}


def test_codes_survive_packing(seed: int) -> None:
    codes = torch.randint(
        0, 16, (192, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert pack_nibbles(codes)[0, 0] == codes[0, 0] | codes[0, 1] << 4


def test_tiles_are_used_only_where_they_are_read() -> None:
    """Groups of a tile divide those of the matrix."""
    if instruction_set() is None:
        pytest.skip("the library cannot be used here; its log says why")
    for format, group in (("int4", 32), ("int8", 192)):
        encoding = chosen_encoding(format, (128, 192))
        assert encoding.group == group
        tiled = laid_out_for(encoding, CPU)
        assert tiled.is_tiled
        assert tiled.group == 32
        assert laid_out_for(encoding, torch.device("cuda")) == encoding
    for other in (chosen_encoding("int4", (40, 192)), chosen_encoding("fp8", (128, 192))):
        assert laid_out_for(other, CPU) == other
    experts = chosen_encoding("int4", (80, 192))
    assert laid_out_for(experts, CPU, 5).is_tiled
    assert not laid_out_for(experts, CPU, 2).is_tiled


@pytest.mark.parametrize("tiled", [False, True])
def test_matrices_one_above_the_other_come_apart(
    tiled: bool, new_weights: Callable[..., torch.Tensor]
) -> None:
    """As the experts of a layer are stored."""
    rounded = quantise(new_weights(256, 192), chosen_encoding("int4", (256, 192)), torch.float32)
    encoding = msgspec.structs.replace(rounded.encoding, is_tiled=tiled)
    whole = Packed(encoding, pack(rounded, encoding, torch.float32))
    parts = whole.split(4)
    weights = unpack(whole).dequantise()
    stored = {tensor.untyped_storage().data_ptr() for tensor in whole.pieces.values()}
    for tensor in (tensor for part in parts for tensor in part.pieces.values()):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().data_ptr() in stored, "counted once, so held once"
    found = torch.cat([unpack(part).dequantise() for part in parts])
    assert torch.equal(found, weights)
    assert parts[0].encoding.shape == (64, 192)
