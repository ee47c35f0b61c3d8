"""GPTQ: rounds matrices to int4 so as to minimise the error of matmul results, not of weights.

If a matrix W is rounded to Q, the squared error over all inputs x is Σ |(W - Q) x|². This is the
trace of (W - Q) G (W - Q)ᵀ with the Gram matrix G = Σ x xᵀ. Columns are rounded one after another,
and the columns that are not rounded yet compensate for the error (Frantar et al. 2022,
arXiv:2210.17323). Each group's scale and zero are chosen up front from all of its weights, with
each error weighted by the mean square of its input. Columns can therefore be rounded in any order,
and those with the largest inputs go first.

Rows are rounded independently of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ullage_engine.quantization.formats import (
    MAX_VALUE,
    MIN_VALUE,
    Quantized,
    stacked,
    stored_scales,
)

DAMPING = 0.01
"""Fraction of the Gram matrix's mean diagonal that is added to its diagonal.

As a result, inputs that did not occur in calibration still get a small weight.
"""

RATIOS = (1.0, 0.85)
"""Ranges to try for each group, as fractions of the range from its smallest to largest weight."""

REFITS = 2
"""Number of times that scale and zero are refitted to the rounded values."""

BLOCK_COLUMNS = 32
"""Number of columns per block. A block's errors are compensated in all later columns at once."""

ROW_ELEMENTS = 1 << 24
"""Maximum number of weights that are rounded at once, in whole rows. This caps memory use."""

_LOW = MIN_VALUE["int4"]
_HIGH = MAX_VALUE["int4"]
_LEAST = 1e-9
"""Small positive minimum for error weights, and for the spread and scale of a regression."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that weights can take after rounding: value * scale + zero, by group."""

    scales: torch.Tensor
    """Scales [out, groups] in their stored dtype."""
    zeros: torch.Tensor
    """Zeros [out, groups] in their stored dtype."""

    def round(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the grid values nearest to weights [out, in], as float32."""
        grouped = _grouped(weights, self.scales.shape[1])
        scales = self.scales.float().unsqueeze(2)
        zeros = self.zeros.float().unsqueeze(2)
        return ((grouped - zeros) / scales).round_().clamp_(_LOW, _HIGH).flatten(1)

    def quantized(self, values: torch.Tensor) -> Quantized:
        return Quantized("int4", values.to(torch.int8), self.scales, self.zeros)

    def by_column(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each weight's scale and zero point, as two float32 tensors [out, in].

        The zero point is the offset that is added to the scaled value.
        """
        scales = self.scales.float()
        zeros = self.zeros.float()
        return scales.repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)


def fit_grid(
    weights: torch.Tensor, group: int, importance: torch.Tensor, dtype: torch.dtype
) -> Grid:
    """Choose the scales and zeros that minimise the squared error of the rounded weights.

    Several ranges are tried for each group. For each range, a weighted regression refits scale and
    zero to the rounded values, and the weights are rounded again.

    Args:
        weights: float32 [out, in].
        group: number of columns per group.
        importance: weight of each column's squared error, float32 [in].
        dtype: stored dtype of scales and zeros.
    """
    grouped = _grouped(weights, weights.shape[1] // group)
    least = max(1e-3 * float(importance.mean()), _LEAST)
    weight = importance.clamp(min=least).view(1, -1, group)
    low = grouped.amin(dim=2)
    high = grouped.amax(dim=2)
    fit = _Fit(grouped, weight)
    best = torch.full_like(low, float("inf"))
    scales = torch.zeros_like(low, dtype=dtype)
    zeros = torch.zeros_like(low, dtype=dtype)
    for ratio in RATIOS:
        scale = (high - low) * (ratio / (_HIGH - _LOW))
        zero = (high + low) / 2 - scale * ((_HIGH + _LOW) / 2)
        for refit in range(REFITS + 1):
            stored = Grid(stored_scales(scale, dtype), zero.to(dtype))
            values = stored.round(weights).view_as(grouped)
            error = fit.error(values, stored)
            is_better = error < best
            best = torch.where(is_better, error, best)
            scales = torch.where(is_better, stored.scales, scales)
            zeros = torch.where(is_better, stored.zeros, zeros)
            if refit < REFITS:
                scale, zero = fit.regression(values)
    return Grid(scales, zeros)


class _Fit:
    """Fits scales and zeros to groups of weights, and measures the errors of rounded values.

    Squared errors are weighted by column.
    """

    def __init__(self, grouped: torch.Tensor, weight: torch.Tensor) -> None:
        """Create the fit for one matrix.

        Args:
            grouped: weights of the matrix, [out, groups, group].
            weight: weight of each column's squared error, [1, groups, group].
        """
        self._grouped = grouped
        self._weight = weight
        self._total = weight.sum(dim=2)
        self._sum = (weight * grouped).sum(dim=2)

    def error(self, values: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the weighted squared error of each group, [out, groups]."""
        rounded = values * grid.scales.float().unsqueeze(2) + grid.zeros.float().unsqueeze(2)
        return (rounded.sub_(self._grouped).square_() * self._weight).sum(dim=2)

    def regression(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and zero with which `values` best approximate each group's weights."""
        weighted = self._weight * values
        first = weighted.sum(dim=2)
        second = (weighted * values).sum(dim=2)
        product = (weighted * self._grouped).sum(dim=2)
        spread = (self._total * second - first.square()).clamp_(min=_LEAST)
        scale = ((self._total * product - first * self._sum) / spread).clamp_(min=_LEAST)
        return scale, (self._sum - scale * first) / self._total


def rounding_operations(rows: int, columns: int) -> float:
    """Estimate the number of floating-point operations in `quantise_calibrated`.

    The columns that are not rounded yet compensate for each column's error. On average, these are
    half of all columns. The estimate also includes the comparison with rounding to nearest and the
    factorisation of three matrices.
    """
    return columns**2 * (3.0 * rows + 2.0 * columns)


def rounding_bytes(rows: int, columns: int) -> int:
    """Estimate the peak memory of `quantise_calibrated` in bytes.

    The peak is either at the start, when the function needs five matrices the size of the Gram
    matrix, or later, when it needs three of these and a dozen tensors the size of a slice of
    weights. All of these tensors are float32.
    """
    return 4 * max(5 * columns**2, 3 * columns**2 + 12 * min(ROW_ELEMENTS, rows * columns))


def quantise_calibrated(
    weights: torch.Tensor,
    gram: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    report: Callable[[], None] = lambda: None,
) -> Quantized:
    """Round weights to int4 so that matmul errors are small for inputs with this Gram matrix.

    No row has a larger error, measured with the damped Gram matrix, than if every weight were
    rounded to the nearest value. With a diagonal Gram matrix, all weights are rounded to the
    nearest value. If inputs are infinite or NaN, all columns are weighted equally.

    Args:
        weights: [out, in].
        gram: Σ x xᵀ over inputs, or any multiple of it, float32 [in, in].
        group: number of columns per group.
        dtype: stored dtype of scales and zeros.
        report: called after each slice of rows. A slice takes seconds.
    """
    if not gram.isfinite().all():
        gram = torch.eye(len(gram), device=gram.device)
    importance = gram.diagonal().clone()
    damped = gram.clone()
    damped.diagonal().add_(max(DAMPING * float(importance.mean()), torch.finfo(gram.dtype).tiny))
    order = importance.argsort(descending=True, stable=True)
    factor = _inverse_factor(damped[order][:, order])
    parts = []
    num_rows = max(1, ROW_ELEMENTS // weights.shape[1])
    for start in range(0, len(weights), num_rows):
        rows = weights[start : start + num_rows].to(torch.float32)
        grid = fit_grid(rows, group, importance, dtype)
        rounded = grid.round(rows)
        if factor is not None:
            values = _compensated(rows, grid, group, order, factor)
            is_better = _excess(rows, grid, values, rounded, damped) <= 0
            rounded = torch.where(is_better.unsqueeze(1), values, rounded)
        parts.append(grid.quantized(rounded))
        report()
    return stacked(parts)


def nearest_calibrated(
    weights: torch.Tensor, squares: torch.Tensor, group: int, dtype: torch.dtype
) -> Quantized:
    """Round each weight to the nearest grid value, on a grid fitted to the inputs' mean squares.

    Args:
        weights: [out, in].
        squares: sums of squares of the inputs, or any multiple, float32 [in].
        group: number of columns per group.
        dtype: stored dtype of scales and zeros.
    """
    grid = fit_grid(weights.to(torch.float32), group, squares, dtype)
    return grid.quantized(grid.round(weights.to(torch.float32)))


def _inverse_factor(gram: torch.Tensor) -> torch.Tensor | None:
    """Return the upper triangular U with UᵀU = G⁻¹, or None if it cannot be computed."""
    lower, failed = torch.linalg.cholesky_ex(gram)
    if failed:
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed or not upper.isfinite().all() else upper


def _compensated(
    weights: torch.Tensor, grid: Grid, group: int, order: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """Round columns one by one in `order`, adjusting later columns to compensate for each error.

    Args:
        weights: float32 [out, in].
        grid: scales and zeros.
        group: number of columns per group.
        order: order of the columns.
        factor: factor of the Gram matrix's inverse, in the same order.

    Returns:
        The rounded values (-8 to 7), float32 [out, in], with columns in their original order.
    """
    scales, zeros = (each[:, order].t().contiguous() for each in grid.by_column(group))
    columns = weights[:, order].t().contiguous()
    values = torch.empty_like(columns)
    for start in range(0, len(columns), BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, len(columns))
        errors = torch.empty_like(columns[start:end])
        for index in range(start, end):
            column = columns[index]
            scale = scales[index]
            zero = zeros[index]
            value = values[index]
            torch.sub(column, zero, out=value).div_(scale).round_().clamp_(_LOW, _HIGH)
            error = errors[index - start]
            torch.addcmul(zero, value, scale, out=error).sub_(column).div_(factor[index, index])
            columns[index + 1 : end].addr_(factor[index, index + 1 : end], error)
        columns[end:].addmm_(factor[start:end, end:].t(), errors)
    result = torch.empty_like(weights)
    result[:, order] = values.t()
    return result


def _excess(
    weights: torch.Tensor,
    grid: Grid,
    values: torch.Tensor,
    others: torch.Tensor,
    gram: torch.Tensor,
) -> torch.Tensor:
    """Return, for each row, the squared matmul error of `values` minus that of `others`.

    Both are rounded values of the same weights on the same grid. A negative result means that
    `values` are the better choice.
    """
    first, second = (grid.quantized(each).dequantise() for each in (values, others))
    products = (second - first) @ gram
    return products.mul_(2 * weights - first - second).sum(dim=1)


def _grouped(weights: torch.Tensor, groups: int) -> torch.Tensor:
    return weights.view(weights.shape[0], groups, -1)
