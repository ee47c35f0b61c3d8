"""Products of rows with the weights of the experts that they chose, in any format.

Which rows an expert has is read on the device: the grid is as large as the rows could need, and
programs that find nothing to do end. Nothing waits for the device, so graphs can capture it.
"""

import torch
import triton.language as tl

from ullage_engine.kernels.triton import Format
from ullage_engine.kernels.triton.launch import jit, launch, power_of_two
from ullage_engine.kernels.triton.matmul import PackedMatrix
from ullage_engine.kernels.triton.weighted import (
    bytes_of,
    group_of,
    multiply_weights,
    step_of,
)


@jit
def find_tile(
    ends: tl.tensor,  # [experts] the row after each expert's last
    tile: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """(expert, first row, row after the expert's last) of a tile; expert EXPERTS: there is none."""
    experts = tl.arange(0, PADDED)
    end = tl.load(ends + experts, mask=experts < EXPERTS, other=0)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    tiles = tl.where(experts < EXPERTS, tiles, 0)
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    own = experts == expert
    before = tl.sum(tl.where(own, behind - tiles, 0), 0)
    first = tl.sum(tl.where(own, start, 0), 0) + (tile - before) * ROWS
    # Padding counts as finished experts where no tile is left.
    return tl.minimum(expert, EXPERTS), first, tl.sum(tl.where(own, end, 0), 0)


@jit
def multiply_expert(
    x: tl.tensor,  # [*, depth]
    values: tl.tensor,  # [experts, columns, depth], or two a byte
    scales: tl.tensor,  # [experts, columns, groups]
    zeros: tl.tensor,
    biases: tl.tensor,  # [experts, columns]
    picks: tl.tensor,  # SORTED: ends [experts]; else the expert of each row
    out: tl.tensor,  # [rows, columns]
    columns: tl.tensor,
    depth: tl.tensor,
    SORTED: tl.constexpr,
    SHARE: tl.constexpr,  # rows of out that have one row of x
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASES: tl.constexpr,
) -> None:
    """Writes some columns of one tile of rows that chose the same expert, or of a single row."""
    if SORTED:
        expert, first, end = find_tile(picks, tl.program_id(0), EXPERTS, PADDED, ROWS)
    else:
        first = tl.program_id(0)
        end = first + 1
        expert = tl.load(picks + first).to(tl.int32)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = row < end, column < columns
    at = expert.to(tl.int64) * columns
    width = depth
    if FORMAT == "int4" or FORMAT == "mxfp4":
        width = depth // 2
    groups = at
    if GROUP > 0:
        groups = at * tl.cdiv(depth, GROUP)
    summed = multiply_weights(
        x + (row // SHARE).to(tl.int64) * depth, values + at * width, scales + groups,
        zeros + groups, column, has_row, has_column, depth, STEP, GROUP, FORMAT, ZEROS,
    )  # fmt: skip
    if BIASES:
        bias = tl.load(biases + at + column, mask=has_column, other=0).to(tl.float32)
        summed += bias[None, :]
    where = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = has_row[:, None] & has_column[None, :]
    tl.store(where, summed.to(out.dtype.element_ty), mask=mask)


def grouped_matmul(
    x: torch.Tensor,
    ends: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: Format,
    biases: torch.Tensor | None = None,
) -> None:
    """Writes each row's product with its expert's weights; rows are sorted by expert.

    x [rows, depth]; ends int32 [experts], the row after each expert's last: rows beyond the last
    are left alone; out [rows, columns]. Weights are those of `quantized_matmul`, one matrix behind
    the other: packed [experts, columns, ...]. biases [experts, columns] are added.
    """
    rows, experts = x.shape[0], ends.shape[0]
    tile = min(128, max(16, power_of_two(-(-rows // experts))))
    # Every expert may end in a tile that is not full.
    tiles = min(rows, rows // tile + experts)
    _multiply((tiles, tile), x, ends, packed, scales, zeros, out, format, biases, 0)


def picked_matmul(
    x: torch.Tensor,
    chosen: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: Format,
    biases: torch.Tensor | None = None,
) -> None:
    """Writes each row's product with the weights of its expert, for few rows in any order.

    chosen [rows of out]; several rows of out in a row share a row of x: with tokens' hidden states
    as x, a row for each expert that a token chose. Each row reads all of its expert's weights, so
    this is for so few rows that seldom two choose the same. Weights as in `grouped_matmul`.
    """
    rows = out.shape[0]
    _multiply((rows, 16), x, chosen, packed, scales, zeros, out, format, biases, rows // x.shape[0])


def _multiply(
    tiles: tuple[int, int],  # how many, rows of each
    x: torch.Tensor,
    picks: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: Format,
    biases: torch.Tensor | None,
    share: int,  # 0: rows are sorted
) -> None:
    experts, columns, depth = packed.shape[0], out.shape[1], x.shape[1]
    group = group_of(format, depth, experts * columns, scales, zeros is not None)
    count, rows = tiles
    block_columns = 64 if rows > 16 else 32
    launch(
        multiply_expert, (count, -(-columns // block_columns)),
        x, bytes_of(packed), x if scales is None else scales, x if zeros is None else zeros,
        x if biases is None else biases, picks, out, columns, depth,
        SORTED=not share, SHARE=max(1, share), EXPERTS=experts, PADDED=power_of_two(experts),
        ROWS=rows, COLUMNS=block_columns, STEP=step_of(depth, group, format, x.itemsize),
        GROUP=group, FORMAT=format, ZEROS=zeros is not None, BIASES=biases is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip


class PackedExperts:
    """One weight matrix of every expert, as `ullage_engine.layers.expert_matrices.ExpertMatrices`.

    With plain weights it stands in for `grouped_mm` where that waits for the device: before compute
    capability 9.0, and in float32.
    """

    def __init__(
        self,
        packed: torch.Tensor,  # [experts, ...]
        scales: torch.Tensor | None,  # [experts, out, groups]
        zeros: torch.Tensor | None,
        shape: tuple[int, int],  # (in, out)
        format: Format,
    ) -> None:
        self._weights, self._shape, self._format = (packed, scales, zeros), shape, format

    def one(self, expert: int) -> PackedMatrix:
        """One expert's."""
        packed, scales, zeros = (None if part is None else part[expert] for part in self._weights)
        assert packed is not None
        return PackedMatrix(packed, scales, zeros, self._shape, self._format)

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        """Writes each row's product with its expert's matrix: x [pairs and more, in] sorted by
        expert, ends int32 [experts] the row after each one's last, out [pairs and more, out]."""
        grouped_matmul(x[:pairs], ends, *self._weights, out[:pairs], self._format)

    def multiply_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """The same for few rows in any order: out [pairs, out], of expert `chosen` [pairs]; x has
        a row for each of them or for each token."""
        picked_matmul(x, chosen, *self._weights, out, self._format)
