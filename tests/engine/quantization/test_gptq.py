"""Calibrated rounding costs products less than rounding every weight to the nearest number."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ullage_engine.quantization import gptq
from ullage_engine.quantization.formats import Quantized
from ullage_engine.quantization.gptq import (
    DAMPING,
    fit_grid,
    nearest_calibrated,
    quantise_calibrated,
)

FEW = settings(max_examples=40, deadline=None)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
GROUPS = st.sampled_from([32, 64])


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gram_of(seed: int, columns: int, inputs: int) -> torch.Tensor:
    """Of inputs that have much in common, as hidden states do, in channels of different sizes."""
    mixed = normal(seed, inputs, columns) @ normal(seed + 1, columns, columns)
    x = (mixed + 3 * mixed[:, :1]) * 10 ** normal(seed + 2, columns)
    return x.t() @ x


def errors(weights: torch.Tensor, rounded: Quantized, gram: torch.Tensor) -> torch.Tensor:
    """What rounding costs products, row by row; in float64, for the Gram matrix damped."""
    damped = gram.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    difference = rounded.dequantise().double() - weights.double()
    return ((difference @ damped) * difference).sum(dim=1)


@FEW
@given(st.integers(0, 1 << 31), st.sampled_from([(5, 64), (3, 192)]), GROUPS, TYPES)
def test_no_row_is_worse_than_rounded_to_the_nearest(
    seed: int, shape: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    """However many inputs there are: fewer than columns leave some combinations without any."""
    weights = normal(seed, *shape)
    gram = gram_of(seed, shape[1], inputs=1 + seed % 400)
    rounded = quantise_calibrated(weights, gram, group, dtype)
    nearest = nearest_calibrated(weights, gram.diagonal(), group, dtype)
    bound = errors(weights, nearest, gram) * 1.01
    assert (errors(weights, rounded, gram) <= bound).all()
    assert rounded.scales.dtype == dtype
    assert rounded.values.min() >= -8
    assert rounded.values.max() <= 7


@FEW
@given(st.integers(0, 1 << 31), GROUPS, TYPES)
def test_inputs_that_have_nothing_in_common_leave_the_nearest(
    seed: int, group: int, dtype: torch.dtype
) -> None:
    weights = normal(seed, 7, 128)
    squares = normal(seed + 1, 128).square()
    rounded = quantise_calibrated(weights, squares.diag(), group, dtype)
    nearest = nearest_calibrated(weights, squares, group, dtype)
    assert torch.equal(rounded.dequantise(), nearest.dequantise())


def test_products_lose_a_third_less(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix that is rounded some rows at a time."""
    monkeypatch.setattr(gptq, "ROW_ELEMENTS", 5 * 256)
    weights = normal(seed, 24, 256)
    gram = gram_of(seed, 256, 2_000)
    rounded = quantise_calibrated(weights, gram, 32, torch.bfloat16)
    nearest = nearest_calibrated(weights, gram.diagonal(), 32, torch.bfloat16)
    assert errors(weights, rounded, gram).sum() < 0.67 * errors(weights, nearest, gram).sum()


@FEW
@given(st.integers(0, 1 << 31), GROUPS, TYPES)
def test_groups_are_fitted_no_worse_than_to_their_range(
    seed: int, group: int, dtype: torch.dtype
) -> None:
    weights = normal(seed, 6, 128)
    importance = normal(seed + 1, 128).square()
    grid = fit_grid(weights, group, importance, dtype)
    fitted = grid.quantized(grid.round(weights)).dequantise()
    grouped = weights.view(6, -1, group)
    low = grouped.amin(dim=2)
    high = grouped.amax(dim=2)
    scales = ((high - low) / 15).to(dtype)
    by_range = gptq.Grid(scales, ((high + low) / 2 + scales / 2).to(dtype))
    ranged = by_range.quantized(by_range.round(weights)).dequantise()
    cost, cost_of_range = (
        (importance * (each - weights).square()).sum() for each in (fitted, ranged)
    )
    assert cost <= cost_of_range * 1.01


def test_a_row_of_zeros_leaves_the_others_as_they_are_in_float16(seed: int) -> None:
    weights = normal(seed, 4, 64)
    gram = gram_of(seed, 64, 500)
    weights[1] = 0.0
    rounded = quantise_calibrated(weights, gram, 32, torch.float16)
    assert (rounded.scales > 0).all()
    assert rounded.scales.isfinite().all()
    assert (rounded.dequantise()[1] == 0.0).all()
    others = quantise_calibrated(weights[[0, 2, 3]], gram, 32, torch.float16)
    assert torch.equal(rounded.dequantise()[[0, 2, 3]], others.dequantise())


def test_each_slice_of_rows_is_reported(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A matrix with many rows is no silence by which the worker would count as hung."""
    monkeypatch.setattr(gptq, "ROW_ELEMENTS", 5 * 64)
    reports: list[int] = []
    gram = gram_of(seed, 64, 500)
    quantise_calibrated(normal(seed, 24, 64), gram, 32, torch.float32, lambda: reports.append(1))
    assert len(reports) == 5


def test_weights_on_a_grid_stay(seed: int) -> None:
    values = torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(seed))
    values[:, ::32] = -8
    values[:, 1::32] = 7
    weights = values * 0.25 + 0.5
    rounded = quantise_calibrated(weights, gram_of(seed, 64, 500), 32, torch.float32)
    assert torch.allclose(rounded.dequantise(), weights, atol=1e-5)


@pytest.mark.parametrize("gram", [torch.zeros(64, 64), torch.full((64, 64), float("nan"))])
def test_a_gram_matrix_that_says_nothing_leaves_the_nearest(gram: torch.Tensor, seed: int) -> None:
    weights = normal(seed, 3, 64)
    rounded = quantise_calibrated(weights, gram, 32, torch.float32)
    assert (rounded.dequantise() - weights).abs().max() < 0.5
    assert rounded.scales.isfinite().all()
