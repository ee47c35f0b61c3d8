"""Rounding to small numbers errs by no more than the formulas say."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ullage_engine.quantization.formats import (
    INT4_GROUP,
    Encoding,
    chosen_encoding,
    quantise,
    quantise_fp8,
    quantise_int4,
    quantise_symmetric,
    stacked,
)

TYPES = st.sampled_from([torch.float32, torch.bfloat16])
FEW = settings(max_examples=50, deadline=None)


def weights(seed: int, rows: int, columns: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator) * spread
    return torch.randn(rows, columns, generator=generator) * 10**-sizes


SHAPES = st.builds(
    weights,
    st.integers(0, 1 << 31),
    st.integers(1, 9),
    st.sampled_from([32, 64, 96, 256]),
    st.floats(0, 4),
)


@FEW
@given(SHAPES, TYPES)
def test_int8_errs_by_half_a_step(x: torch.Tensor, dtype: torch.dtype) -> None:
    group = 32
    rounded = quantise_symmetric(x, "int8", group, dtype)
    error = (rounded.dequantise() - x).abs()
    # 127 steps in float32 are off by some 1e-5 of a step.
    steps = rounded.scales.float().repeat_interleave(group, dim=1)
    assert (error <= steps * (0.5 + 1e-4)).all()
    assert rounded.scales.dtype == dtype
    assert rounded.values.abs().max() <= 127


@FEW
@given(SHAPES, TYPES)
def test_fp8_errs_by_half_of_its_last_bit(x: torch.Tensor, dtype: torch.dtype) -> None:
    rounded = quantise_fp8(x, dtype)
    step = rounded.scales.float() / 1024
    error = (rounded.dequantise() - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, step) * (1 + 1e-5)).all()


@FEW
@given(SHAPES, TYPES)
def test_int4_errs_by_half_a_step(x: torch.Tensor, dtype: torch.dtype) -> None:
    rounded = quantise_int4(x, INT4_GROUP, dtype)
    grouped = x.view(x.shape[0], -1, INT4_GROUP)
    span = grouped.amax(2).clamp(min=0) - grouped.amin(2).clamp(max=0)
    error = (rounded.dequantise().view_as(grouped) - grouped).abs().amax(2)
    # A step is a fifteenth of the range. bfloat16's rounding of scale and zero adds to it: 2^-9 of
    # 15 steps each.
    assert (error <= span / 15 * (0.501 if dtype == torch.float32 else 0.57)).all()
    assert rounded.values.min() >= -8
    assert rounded.values.max() <= 7


@FEW
@given(SHAPES)
def test_zero_weights_stay_zero(x: torch.Tensor) -> None:
    x[:, ::3] = 0
    for format in ("int8", "int4", "fp8", "w8a8"):
        rounded = quantise(x, chosen_encoding(format, (x.shape[0], x.shape[1])), torch.float32)
        assert torch.count_nonzero(rounded.dequantise()[:, ::3]) == 0


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "w8a8"])
def test_a_row_of_zeros_is_zero(format: str) -> None:
    encoding = chosen_encoding(format, (2, 64))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert not quantise(torch.zeros(2, 64), encoding, dtype).dequantise().any()


def test_int8_stands_in_where_int4_has_no_group() -> None:
    assert chosen_encoding("int4", (8, 80)) == Encoding(format="int8", shape=(8, 80), group=80)


def test_rows_are_rounded_by_themselves(new_weights: Callable[..., torch.Tensor]) -> None:
    x = new_weights(24, 128)
    for format in ("int8", "int4", "fp8"):
        parts = [
            quantise(part, chosen_encoding(format, (part.shape[0], 128)), torch.float32)
            for part in x.split([8, 16])
        ]
        whole = quantise(x, chosen_encoding(format, (24, 128)), torch.float32)
        assert torch.equal(stacked(parts).dequantise(), whole.dequantise())
