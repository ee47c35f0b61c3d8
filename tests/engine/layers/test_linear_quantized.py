"""Products with quantised matrices equal those with their dequantised weights."""

from collections.abc import Callable

import pytest
import torch

from ullage_engine.kernels.deterministic import RowProducts
from ullage_engine.layers.linear import (
    PASS_ROWS,
    FusedQuantizedLinear,
    Linear,
    PlainLinear,
    emulated_int_product,
    int_product,
    quantized_linear,
    row_invariant_linear,
    scratch_bytes,
)
from ullage_engine.quantization.formats import (
    Encoding,
    Format,
    Packed,
    Quantized,
    chosen_encoding,
    pack,
    quantise,
    unpack,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.012, torch.float16: 0.002}
FORMATS: list[Format] = ["int8", "int4", "fp8"]


def packed_for(x: torch.Tensor, format: Format, dtype: torch.dtype) -> Packed:
    """A matrix row by row, as it is where nothing reads tiles."""
    rounded = quantise(x, chosen_encoding(format, (x.shape[0], x.shape[1])), dtype)
    return Packed(rounded.encoding, pack(rounded, rounded.encoding, dtype))


def scratch_for(packed: Packed, dtype: torch.dtype, deterministic: bool = False) -> torch.Tensor:
    size = scratch_bytes([packed.encoding], dtype.itemsize, deterministic=deterministic)
    return torch.full((size,), 255, dtype=torch.uint8)


def check(matrix: Linear, weights: torch.Tensor, x: torch.Tensor, tolerance: float) -> None:
    """Both operations against float64, relative to the size of each row's result."""
    wanted = x.double() @ weights.double().t()
    out = torch.full(wanted.shape, 3.0, dtype=x.dtype)
    matrix.forward(x, out)
    most = wanted.norm(dim=1, keepdim=True) * tolerance
    assert ((out.double() - wanted).norm(dim=1, keepdim=True) <= most).all()
    matrix.forward_add(x, out)
    assert ((out.double() - 2 * wanted).norm(dim=1, keepdim=True) <= 2 * most).all()
    assert matrix.shape == (weights.shape[1], weights.shape[0])


SHAPES = [(192, 576), (128, 96), (80, 1536), (1664, 1024)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("format", FORMATS)
def test_products_equal_those_of_the_weights(
    format: Format,
    dtype: torch.dtype,
    new_weights: Callable[..., torch.Tensor],
    subtests: pytest.Subtests,
) -> None:
    """Two panels at the least, one that is not full, few rows and many."""
    for shape in SHAPES:
        packed = packed_for(new_weights(*shape), format, dtype)
        matrix = quantized_linear(packed, dtype, scratch_for(packed, dtype))
        weights = unpack(packed).dequantise()
        for rows in (1, 41):
            with subtests.test(shape=shape, rows=rows):
                check(matrix, weights, new_weights(rows, shape[1]).to(dtype), TOLERANCE[dtype])


def test_int8_in_groups_with_zeros(new_weights: Callable[..., torch.Tensor]) -> None:
    """As GPTQ checkpoints of 8 bits have it."""
    int4 = quantise(new_weights(64, 256), chosen_encoding("int4", (64, 256)), torch.float32)
    rounded = Quantized("int8", int4.values, int4.scales, int4.zeros)
    packed = Packed(rounded.encoding, pack(rounded, rounded.encoding, torch.float32))
    matrix = quantized_linear(packed, torch.float32, scratch_for(packed, torch.float32))
    check(matrix, int4.dequantise(), new_weights(3, 256), 1e-5)


def test_one_scratch_serves_matrices_of_all_shapes(
    new_weights: Callable[..., torch.Tensor],
) -> None:
    packed = [
        packed_for(new_weights(*shape), format, torch.float32)
        for shape in ((64, 2048), (2048, 64))
        for format in ("int8", "int4", "fp8", "w8a8")
    ]
    size = scratch_bytes([each.encoding for each in packed], 4)
    scratch = torch.empty(size, dtype=torch.uint8)
    matrices = [quantized_linear(each, torch.float32, scratch) for each in packed]
    for each, matrix in zip(packed, matrices, strict=True):
        tolerance = 0.1 if each.encoding.format == "w8a8" else 1e-5
        check(matrix, unpack(each).dequantise(), new_weights(70, each.encoding.shape[1]), tolerance)


@pytest.mark.parametrize("format", FORMATS)
def test_row_products_of_the_dequantised_matrix(
    format: Format, new_weights: Callable[..., torch.Tensor]
) -> None:
    packed = packed_for(new_weights(128, 256), format, torch.float32)
    shapes = []

    def plain(rows: torch.Tensor) -> Linear:
        assert torch.equal(rows, unpack(packed).dequantise())
        shapes.append(rows.shape)
        return PlainLinear(rows)

    matrix = row_invariant_linear(
        packed, torch.float32, scratch_for(packed, torch.float32, True), plain
    )
    check(matrix, unpack(packed).dequantise(), new_weights(5, 256), 1e-5)
    assert shapes == [(128, 256)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_w8a8_rows_do_not_depend_on_one_another(
    dtype: torch.dtype, new_weights: Callable[..., torch.Tensor]
) -> None:
    packed = packed_for(new_weights(192, 576), "w8a8", dtype)
    matrix = quantized_linear(packed, dtype, scratch_for(packed, dtype))
    x = new_weights(PASS_ROWS + 9, 576).to(dtype)
    whole = torch.empty(x.shape[0], 192, dtype=dtype)
    matrix.forward(x, whole)
    for rows in (slice(0, 1), slice(5, 40), slice(PASS_ROWS, None)):
        alone = torch.empty_like(whole[rows])
        matrix.forward(x[rows].contiguous(), alone)
        assert torch.equal(alone, whole[rows])


def test_w8a8_is_the_product_of_rounded_rows(new_weights: Callable[..., torch.Tensor]) -> None:
    packed = packed_for(new_weights(64, 96), "w8a8", torch.float32)
    x = new_weights(7, 96)
    scales = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / scales).round() * scales
    matrix = quantized_linear(packed, torch.float32, scratch_for(packed, torch.float32))
    weight = unpack(packed).dequantise()
    check(matrix, weight, rounded, 1e-5)
    out = torch.empty(7, 64)
    matrix.forward(x, out)
    # Every number of a row is off by at most half its scale.
    assert ((out - x @ weight.t()).abs() <= 0.51 * scales * weight.abs().sum(1)).all()


def test_whole_numbers_are_summed_exactly(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (33, 4096), dtype=torch.int8, generator=generator)
    weight = torch.randint(-127, 128, (40, 4096), dtype=torch.int8, generator=generator)
    x[0] = 127
    weight[0] = 127
    wanted = (x.long() @ weight.t().long()).int()
    for product in (int_product, emulated_int_product):
        out = torch.empty(33, 40, dtype=torch.int32)
        product(x, weight.t(), out)
        assert torch.equal(out, wanted)


def test_a_fused_kernel_gets_the_stored_numbers(new_weights: Callable[..., torch.Tensor]) -> None:
    packed = packed_for(new_weights(64, 256), "int4", torch.float32)

    def product(
        x: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        out: torch.Tensor,
        format: str,
        adds: bool = False,
    ) -> None:
        assert zeros is not None
        assert format == "int4"
        encoding = Encoding(format="int4", shape=(64, 256), group=128, has_zeros=True)
        pieces = {"values": values, "scales": scales, "zeros": zeros}
        product = x @ unpack(Packed(encoding, pieces)).dequantise().t()
        out.copy_(out + product if adds else product)

    check(
        FusedQuantizedLinear(packed, product),
        unpack(packed).dequantise(),
        new_weights(4, 256),
        1e-5,
    )


def test_groups_that_no_kernel_takes(new_weights: Callable[..., torch.Tensor]) -> None:
    """A GPTQ checkpoint may have groups of 16, which tensor cores do not multiply."""
    fine = quantise(
        new_weights(64 * 16, 16), Encoding(format="int8", shape=(64 * 16, 16), group=16),
        torch.float32,
    )  # fmt: skip
    rounded = Quantized("int8", fine.values.view(64, 256), fine.scales.view(64, 16))
    packed = Packed(rounded.encoding, pack(rounded, rounded.encoding, torch.float32))

    def refuse(
        x: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        out: torch.Tensor,
        format: str,
        adds: bool = False,
    ) -> None:
        raise ValueError("16 groups of scales for 256 int8 weights a column")

    matrix = quantized_linear(packed, torch.float32, scratch_for(packed, torch.float32), refuse)
    check(matrix, rounded.dequantise(), new_weights(3, 256), 1e-5)


def test_deterministic_products_take_room_for_the_largest_matrix() -> None:
    encodings = [chosen_encoding("int8", (4096, 1024)), chosen_encoding("int8", (64, 64))]
    assert scratch_bytes(encodings, 2) < scratch_bytes(encodings, 2, deterministic=True)
    assert scratch_bytes(encodings, 2, deterministic=True) >= 4096 * 1024 * 2
    assert scratch_bytes([], 2) == 0


def test_row_products_are_independent_of_their_neighbours(
    new_weights: Callable[..., torch.Tensor],
) -> None:
    products = RowProducts()

    class Rows:
        """Row products of one matrix."""

        def __init__(self, rows: torch.Tensor) -> None:
            self._weight = rows.t()
            self.shape = (self._weight.shape[0], self._weight.shape[1])
            assert products.verify_row_invariance(self._weight, {16, 32})

        def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
            products.multiply(x, self._weight, out)

        def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
            products.add(x, self._weight, out)

    packed = packed_for(new_weights(128, 256), "int8", torch.float32)
    matrix = row_invariant_linear(
        packed, torch.float32, scratch_for(packed, torch.float32, True), Rows
    )
    x = new_weights(32, 256)
    whole = torch.empty(32, 128)
    part = torch.empty(16, 128)
    matrix.forward(x, whole)
    matrix.forward(x[16:], part)
    assert torch.equal(whole[16:], part)
