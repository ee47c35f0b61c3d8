"""The library's products equal those of rounded rows and the weights that tiles stand for."""

from collections.abc import Callable, Iterator

import pytest
import torch

from ullage_engine.layers.linear import (
    PASS_ROWS,
    NativeLinear,
    TiledEmbedding,
    native_scratch_bytes,
)
from ullage_engine.native.library import Team
from ullage_engine.quantization.formats import (
    TILE_GROUPS,
    Encoding,
    Format,
    Packed,
    pack,
    quantise,
    unpack,
)

pytestmark = pytest.mark.usefixtures("isa")

NewWeights = Callable[[int, int], torch.Tensor]
ROWS = (1, 2, 3, 8, 9, 31, PASS_ROWS + 5)


def tiles(weights: torch.Tensor, format: Format, group: int) -> Packed:
    shape = (weights.shape[0], weights.shape[1])
    encoding = Encoding(format=format, shape=shape, group=group, has_zeros=True, is_tiled=True)
    return Packed(
        encoding, pack(quantise(weights, encoding, torch.float32), encoding, torch.float32)
    )


def linear(packed: Packed) -> NativeLinear:
    size = native_scratch_bytes(packed.encoding.shape)
    return NativeLinear(packed, torch.full((size,), 255, dtype=torch.uint8))


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rows in whole steps of a 127th of each group's largest number."""
    grouped = x.reshape(-1, group)
    largest = grouped.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    return ((grouped * inverse).round() * (largest / 127)).view(x.shape)


def cases(new_weights: NewWeights) -> Iterator[Packed]:
    for format in ("int4", "int8"):
        for group in TILE_GROUPS:
            yield tiles(new_weights(48, 160), format, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_rounded_rows(
    dtype: torch.dtype, new_weights: NewWeights, subtests: pytest.Subtests
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.012
    for packed in cases(new_weights):
        matrix = linear(packed)
        weights = unpack(packed).dequantise().double()
        for rows in ROWS:
            with subtests.test(encoding=packed.encoding, rows=rows):
                x = new_weights(rows, 160).to(dtype)
                wanted = rounded(x.float(), packed.encoding.group).double() @ weights.t()
                most = wanted.norm(dim=1, keepdim=True) * tolerance
                out = torch.full((rows, 48), 3.0, dtype=dtype)
                matrix.forward(x, out)
                assert ((out.double() - wanted).norm(dim=1, keepdim=True) <= most).all()
                matrix.forward_add(x, out)
                assert ((out.double() - 2 * wanted).norm(dim=1, keepdim=True) <= 2 * most).all()


def test_a_row_has_the_same_bits_in_every_product(new_weights: NewWeights) -> None:
    for packed in cases(new_weights):
        matrix = linear(packed)
        x = new_weights(PASS_ROWS + 9, 160)
        whole = torch.empty(len(x), 48)
        matrix.forward(x, whole)
        for rows in (slice(0, 1), slice(5, 7), slice(5, 40), slice(PASS_ROWS, None)):
            alone = torch.empty_like(whole[rows])
            matrix.forward(x[rows].contiguous(), alone)
            assert torch.equal(alone, whole[rows])


def test_rows_of_zeros_and_of_extremes(new_weights: NewWeights) -> None:
    """The largest codes on both sides: whole numbers are summed without overflow."""
    weights = torch.ones(16, 64)
    weights[::2] = -1
    for format in ("int4", "int8"):
        packed = tiles(weights, format, 32)
        out = torch.empty(3, 16)
        x = torch.stack([torch.zeros(64), torch.full((64,), 5.0), torch.full((64,), -7.0)])
        linear(packed).forward(x, out)
        wanted = x @ unpack(packed).dequantise().t()
        assert torch.allclose(out, wanted, rtol=1e-4)


def test_an_embedding_gives_the_rows_of_tokens(new_weights: NewWeights) -> None:
    for packed in cases(new_weights):
        token_ids = torch.tensor([*range(47, 0, -1), 0, 5, 5])
        out = torch.empty(len(token_ids), 160)
        TiledEmbedding(packed).read(token_ids, out)
        assert torch.equal(out, unpack(packed).dequantise()[token_ids])


def test_threads_share_out_regions_of_any_number_of_items(
    isa: str, new_weights: NewWeights
) -> None:
    packed = tiles(new_weights(272, 160), "int4", 32)
    x = new_weights(70, 160)
    results = []
    for num_threads in (1, 2, 5):
        matrix = linear(packed)
        matrix._team = Team(num_threads, isa)
        for rows in (1, 70):
            out = torch.empty(rows, 272)
            for _ in range(20):
                matrix.forward(x[:rows], out)
            results.append(out[0])
    for result in results[1:]:
        assert torch.equal(result, results[0])
