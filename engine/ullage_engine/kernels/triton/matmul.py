"""Products with quantised weights: they are read once, small, and never written out large."""

import torch
import triton.language as tl

from ullage_engine.kernels.triton import Format
from ullage_engine.kernels.triton.launch import jit_for_any, launch, power_of_two
from ullage_engine.kernels.triton.weighted import (
    bytes_of,
    group_of,
    multiply_weights,
    step_of,
)

MULTIPROCESSORS = 132
"""Of an H100 or H200; with fewer column tiles than that, a product of few rows leaves some idle."""


@jit_for_any("rows")
def multiply_tile(
    x: tl.tensor,  # [rows, depth]
    values: tl.tensor,  # [columns, depth], or two a byte
    scales: tl.tensor,  # [columns, groups]
    zeros: tl.tensor,  # [columns, groups]
    out: tl.tensor,  # [rows, columns]
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Writes one tile of x @ weights^T, or adds it to out."""
    # Neighbouring programs have the same columns, so that weights are read from memory once.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = row < rows, column < columns
    at = row.to(tl.int64)
    summed = multiply_weights(
        x + at * depth, values, scales, zeros, column, has_row, has_column, depth,
        STEP, GROUP, FORMAT, ZEROS,
    )  # fmt: skip
    where = out + at[:, None] * columns + column[None, :]
    mask = has_row[:, None] & has_column[None, :]
    if ADDS:
        summed += tl.load(where, mask=mask, other=0).to(tl.float32)
    tl.store(where, summed.to(out.dtype.element_ty), mask=mask)


def quantized_matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: Format,
    adds: bool = False,
) -> None:
    """Writes x @ weights^T to out, or adds it; everything contiguous.

    x [rows, depth]; out [rows, columns]; packed [columns, depth], of int4 and mxfp4 depth / 2 bytes
    a column, in any shape. scales [columns, groups], of mxfp4 biased exponents (uint8); expand a
    scale of the whole matrix. zeros [columns, groups] are added to scaled weights. Raises
    ValueError for groups that it cannot multiply.
    """
    rows, depth = x.shape
    columns = out.shape[1]
    group = group_of(format, depth, columns, scales, zeros is not None)
    block_rows, block_columns, warps = tile_of(rows, columns)
    launch(
        multiply_tile, (-(-rows // block_rows), -(-columns // block_columns)),
        x, bytes_of(packed), x if scales is None else scales, x if zeros is None else zeros, out,
        rows, columns, depth,
        ROWS=block_rows, COLUMNS=block_columns, STEP=step_of(depth, group, format, x.itemsize),
        GROUP=group, FORMAT=format, ZEROS=zeros is not None, ADDS=adds,
        num_warps=warps, num_stages=3,
    )  # fmt: skip


def tile_of(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's tile: small where weights are what is waited for, and
    rather small than leave multiprocessors idle."""
    if rows > 64:
        return 128, 64, 4
    block_rows = max(16, power_of_two(rows))
    fits = [size for size in (64, 32) if columns // size >= MULTIPROCESSORS]
    return block_rows, fits[0] if fits else 16, 4


class PackedMatrix:
    """A weight matrix in a small format, as `ullage_engine.layers.matrix.Matrix`."""

    def __init__(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor | None,
        zeros: torch.Tensor | None,
        shape: tuple[int, int],  # (in, out)
        format: Format,
    ) -> None:
        self._weights, self._shape, self._format = (packed, scales, zeros), shape, format

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        quantized_matmul(x, *self._weights, out, self._format)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        quantized_matmul(x, *self._weights, out, self._format, adds=True)
