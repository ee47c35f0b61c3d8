"""Triton matmuls with quantised weights, for a single matrix or for one matrix per expert.

Weights are decoded as they are read:

    weight[column, k] = value[column, k] * scale[column, k // group] + zero[column, k // group]
    x . weight = sum over groups of (scale * (x . value) + zero * sum(x))

Tensor cores multiply the bare values, which are exact in bfloat16. Scales are applied in float32.

The number of rows per expert is known only on the device. The grid therefore has enough programs
for the maximum number of tiles that the rows could need, and programs without a tile exit
immediately. The host never waits, so CUDA graphs can capture these matmuls.
"""

import torch
import triton.language as tl

from ullage_engine.kernels.triton import MIN_GROUP, Format, takes_groups
from ullage_engine.kernels.triton.launch import (
    e2m1,
    e4m3,
    e8m0,
    jit,
    jit_for_any,
    launch,
    power_of_two,
)


@jit
def decoded(code: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Decode weights to float32 without applying their scales."""
    if FORMAT == "fp8":
        value = e4m3(code)
    elif FORMAT == "mxfp4":
        value = e2m1(code & 15)
    elif FORMAT == "int4":
        value = (code & 15).to(tl.float32) - 8.0
    else:
        value = code.to(tl.float32)
    return value


@jit
def scaled(
    part: tl.tensor,  # [ROWS, COLUMNS] of one group
    row: tl.tensor,  # [ROWS, STEP]
    scales: tl.tensor,  # [COLUMNS]
    zeros: tl.tensor,
    has_column: tl.tensor,
    ZEROS: tl.constexpr,
) -> tl.tensor:
    """Apply the scale and the zero of one group: scale * (x . value) + zero * sum(x)."""
    part = part * tl.load(scales, mask=has_column, other=0).to(tl.float32)[None, :]
    if ZEROS:
        zero = tl.load(zeros, mask=has_column, other=0).to(tl.float32)
        part += tl.sum(row.to(tl.float32), 1)[:, None] * zero[None, :]
    return part


@jit
def multiply_packed(
    x: tl.tensor,  # [ROWS] first of each row
    values: tl.tensor,  # [COLUMNS] first byte of each column
    scales: tl.tensor,  # [COLUMNS] first scale of each column
    zeros: tl.tensor,
    has_row: tl.tensor,
    has_column: tl.tensor,
    summed: tl.tensor,  # [ROWS, COLUMNS]
    depth: tl.tensor,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
) -> tl.tensor:
    """Return `summed` plus the product of x and weights that are packed two per byte.

    Even and odd columns of x are multiplied separately, because splitting x is cheaper than
    interleaving the weights.
    """
    for start in range(0, depth, STEP):
        pairs = start // 2 + tl.arange(0, STEP // 2)
        inside = pairs < depth // 2
        mask = has_column[:, None] & inside[None, :]
        code = tl.load(values[:, None] + pairs[None, :], mask=mask, other=0)
        low = decoded(code, FORMAT)
        high = decoded(code >> 4, FORMAT)
        ks = start + tl.arange(0, STEP)
        given = has_row[:, None] & (ks < depth)[None, :]
        row = tl.load(x[:, None] + ks[None, :], mask=given, other=0)
        even, odd = tl.split(tl.reshape(row, [x.shape[0], STEP // 2, 2]))
        if FORMAT == "mxfp4":
            groups = start // GROUP + tl.arange(0, STEP // GROUP)
            there = has_column[:, None] & (groups[None, :] < depth // GROUP)
            scale = e8m0(tl.load(scales[:, None] + groups[None, :], mask=there, other=0))
            shape: tl.constexpr = [code.shape[0], STEP // GROUP, GROUP // 2]
            wide = tl.reshape(tl.broadcast_to(scale[:, :, None], shape), code.shape)
            low = low * wide
            high = high * wide
            summed = tl.dot(even, tl.trans(low.to(even.dtype)), summed, input_precision="ieee")
            summed = tl.dot(odd, tl.trans(high.to(even.dtype)), summed, input_precision="ieee")
        else:
            part = tl.dot(even, tl.trans(low.to(even.dtype)), input_precision="ieee")
            part = tl.dot(odd, tl.trans(high.to(even.dtype)), part, input_precision="ieee")
            group = start // GROUP
            summed += scaled(part, row, scales + group, zeros + group, has_column, ZEROS)
    return summed


@jit
def multiply_bytes(
    x: tl.tensor,  # [ROWS] first of each row
    values: tl.tensor,  # [COLUMNS] first value of each column
    scales: tl.tensor,  # [COLUMNS] first scale of each column
    zeros: tl.tensor,
    has_row: tl.tensor,
    has_column: tl.tensor,
    summed: tl.tensor,  # [ROWS, COLUMNS]
    depth: tl.tensor,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
) -> tl.tensor:
    """Return `summed` plus the product of x and weights that are stored one per element.

    If a column has a single scale, it is applied once at the end.
    """
    for start in range(0, depth, STEP):
        ks = start + tl.arange(0, STEP)
        inside = ks < depth
        mask = has_column[:, None] & inside[None, :]
        weight = tl.load(values[:, None] + ks[None, :], mask=mask, other=0)
        given = has_row[:, None] & inside[None, :]
        row = tl.load(x[:, None] + ks[None, :], mask=given, other=0)
        if FORMAT != "plain":
            weight = decoded(weight, FORMAT).to(row.dtype)
        if GROUP > 0:
            part = tl.dot(row, tl.trans(weight), input_precision="ieee")
            group = start // GROUP
            summed += scaled(part, row, scales + group, zeros + group, has_column, ZEROS)
        else:
            summed = tl.dot(row, tl.trans(weight), summed, input_precision="ieee")
    if FORMAT != "plain" and GROUP == 0:
        scale = tl.load(scales, mask=has_column, other=0).to(tl.float32)
        summed = summed * scale[None, :]
    return summed


@jit
def multiply_weights(
    x: tl.tensor,  # [ROWS] first of each row
    values: tl.tensor,  # of one matrix [columns, depth]
    scales: tl.tensor,
    zeros: tl.tensor,
    columns: tl.tensor,  # [COLUMNS]
    has_row: tl.tensor,
    has_column: tl.tensor,
    depth: tl.tensor,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,  # weights of a column that share a scale; 0: all, and no zeros
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
) -> tl.tensor:
    """Compute one block of x @ weights^T, float32 [ROWS, COLUMNS]."""
    at = columns.to(tl.int64)
    groups = at
    if GROUP > 0:
        groups = at * tl.cdiv(depth, GROUP)
    summed = tl.zeros([x.shape[0], columns.shape[0]], tl.float32)
    if FORMAT == "int4" or FORMAT == "mxfp4":
        summed = multiply_packed(
            x, values + at * (depth // 2), scales + groups, zeros + groups, has_row, has_column,
            summed, depth, STEP, GROUP, FORMAT, ZEROS,
        )  # fmt: skip
    else:
        summed = multiply_bytes(
            x, values + at * depth, scales + groups, zeros + groups, has_row, has_column,
            summed, depth, STEP, GROUP, FORMAT, ZEROS,
        )  # fmt: skip
    return summed


def group_of(
    format: Format, depth: int, columns: int, scales: torch.Tensor | None, has_zeros: bool
) -> int:
    """Return how many weights of a column share a scale.

    Return 0 if the weights have no scales, or if each column has a single scale that the kernel
    applies at the end.

    Raises:
        ValueError: the kernels cannot multiply weights with these scales.
    """
    if format == "plain":
        return 0
    if scales is None:
        raise ValueError(f"scales are missing: {format} weights need them")
    groups = scales.numel() // columns
    if groups == 1 and format in ("int8", "fp8") and not has_zeros:
        return 0
    if not takes_groups(format, depth, groups):
        raise ValueError(
            f"{groups} groups of scales for {depth} {format} weights a column: a group has to have "
            f"{'' if format == 'mxfp4' else 'a multiple of '}{MIN_GROUP} weights"
        )
    return depth // groups


def step_of(depth: int, group: int, format: Format, itemsize: int, rows: int) -> int:
    """Return how many weights per column a tile of `rows` rows processes in each loop iteration.

    This number divides the group size if possible, so that an iteration stays within one group. It
    is capped by the available registers.
    """
    # Float8 is unpacked in registers, and a group needs a partial sum in addition to the total.
    most_rows = 16 if format == "fp8" and group else 32
    is_wide = itemsize == 4 or rows > most_rows or format == "mxfp4"
    largest = 64 if is_wide else 128
    within = depth if format == "mxfp4" or not group else group
    return next((step for step in (128, 64, 32) if step <= largest and within % step == 0), 64)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return weights in the dtype that kernels read: float8 as bytes, other types unchanged."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


MULTIPROCESSORS = 132
"""Number of SMs of an H100 or H200.

A matmul with few rows keeps every SM busy if it has at least this many tiles.
"""


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
    """Compute one tile of x @ weights^T, and write it to out or add it to out."""
    # Neighbouring programs have the same columns, so weights are read from memory only once.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row = row < rows
    has_column = column < columns
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
    """Compute x @ weights^T, and write or add it to `out`. All tensors must be contiguous.

    Args:
        x: [rows, depth].
        packed: weights [columns, depth]. int4 and mxfp4 have depth / 2 bytes per column, in any
            shape.
        scales: [columns, groups]. For mxfp4, they are biased exponents (uint8). If the whole matrix
            has a single scale, expand it to all columns.
        zeros: [columns, groups], added to the scaled weights, or None.
        out: [rows, columns].
        format: format of the weights.
        adds: whether to add the product to `out`.

    Raises:
        ValueError: the kernels cannot multiply groups of this size.
    """
    rows, depth = x.shape
    columns = out.shape[1]
    group = group_of(format, depth, columns, scales, zeros is not None)
    block_rows, block_columns, warps = tile_of(rows, columns)
    launch(
        multiply_tile, (-(-rows // block_rows), -(-columns // block_columns)),
        x, bytes_of(packed), x if scales is None else scales, x if zeros is None else zeros, out,
        rows, columns, depth,
        ROWS=block_rows, COLUMNS=block_columns,
        STEP=step_of(depth, group, format, x.itemsize, block_rows),
        GROUP=group, FORMAT=format, ZEROS=zeros is not None, ADDS=adds,
        num_warps=warps, num_stages=3,
    )  # fmt: skip


def tile_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Return how many rows, columns and warps a program uses for its tile.

    Tiles are small if the matmul is memory-bound, or if larger tiles would leave an SM idle.
    """
    if rows > 64:
        return 128, 64, warps_of(128)
    block_rows = max(16, power_of_two(rows))
    fits = [size for size in (64, 32) if columns // size >= MULTIPROCESSORS]
    return block_rows, fits[0] if fits else 16, warps_of(block_rows)


def warps_of(rows: int) -> int:
    """Return the number of warps for a program whose tile has this many rows.

    The accumulators of a large tile do not fit in the registers of four warps.
    """
    return 8 if rows >= 128 else 4


@jit
def find_tile(
    ends: tl.tensor,  # [experts] the row after each expert's last
    tile: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return a tile's expert, the tile's first row and the end of the expert's rows.

    If the tile does not exist, the expert is EXPERTS, which is not a valid expert.
    """
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
    # Without a tile, padding counts as finished experts, too, so the number is limited.
    return tl.minimum(expert, EXPERTS), first, tl.sum(tl.where(own, end, 0), 0)


@jit
def multiply_expert(
    x: tl.tensor,  # [*, depth]
    values: tl.tensor,  # [experts, columns, depth], or two a byte
    scales: tl.tensor,  # [experts, columns, groups]
    zeros: tl.tensor,
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
) -> None:
    """Compute a block of columns for a tile of rows that share an expert, or for a single row."""
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
    has_row = row < end
    has_column = column < columns
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
) -> None:
    """Multiply each row by its expert's weights, for rows sorted by expert.

    The weights have the layout of `quantized_matmul`, plus a leading dimension for the experts.

    Args:
        x: [rows, depth], sorted by expert.
        ends: int32 [experts], the row after each expert's last row. Rows after the last expert's
            rows are not written.
        packed: [experts, columns, ...].
        scales: [experts, columns, groups].
        zeros: [experts, columns, groups].
        out: [rows, columns].
        format: format of the weights.
    """
    rows = x.shape[0]
    experts = ends.shape[0]
    tile = min(128, max(16, power_of_two(-(-rows // experts))))
    # The last tile of every expert may be partly empty.
    tiles = min(rows, rows // tile + experts)
    _multiply((tiles, tile), x, ends, packed, scales, zeros, out, format, 0)


def picked_matmul(
    x: torch.Tensor,
    chosen: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: Format,
) -> None:
    """Multiply each row by its expert's weights, for a few rows in any order.

    Each row reads all weights of its expert. Use this function if there are so few rows that two of
    them rarely share an expert.

    Args:
        x: [rows, depth], or one row per token if the rows of a token are consecutive in `out`.
        chosen: expert of each row of `out`, [rows].
        packed: weights as in `grouped_matmul`.
        scales: as in `grouped_matmul`.
        zeros: as in `grouped_matmul`.
        out: [rows, columns].
        format: format of the weights.
    """
    rows = out.shape[0]
    _multiply((rows, 16), x, chosen, packed, scales, zeros, out, format, rows // x.shape[0])


def _multiply(
    tiles: tuple[int, int],  # how many, rows of each
    x: torch.Tensor,
    picks: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: Format,
    share: int,  # 0: rows are sorted
) -> None:
    experts = packed.shape[0]
    columns = out.shape[1]
    depth = x.shape[1]
    group = group_of(format, depth, experts * columns, scales, zeros is not None)
    count, rows = tiles
    block_columns = 64 if rows > 16 else 32
    launch(
        multiply_expert, (count, -(-columns // block_columns)),
        x, bytes_of(packed), x if scales is None else scales, x if zeros is None else zeros,
        picks, out, columns, depth,
        SORTED=not share, SHARE=max(1, share), EXPERTS=experts, PADDED=power_of_two(experts),
        ROWS=rows, COLUMNS=block_columns, STEP=step_of(depth, group, format, x.itemsize, rows),
        GROUP=group, FORMAT=format, ZEROS=zeros is not None,
        num_warps=warps_of(rows), num_stages=3,
    )  # fmt: skip


FEW_PAIRS = 16
"""Maximum number of (token, expert) pairs for which `picked_matmul` is used, which avoids sorting.

This limit has not been measured yet.
"""


class TritonExperts:
    """One weight matrix per expert, with the interface `ullage_engine.layers.moe.ExpertLinears`.

    These kernels also multiply plain weights in cases where torch's `grouped_mm` would wait for the
    device: before compute capability 9.0, and in float32.
    """

    few_pairs = FEW_PAIRS
    reads_ends = False

    def __init__(
        self,
        packed: torch.Tensor,  # [experts, ...]
        scales: torch.Tensor | None,  # [experts, out, groups]
        zeros: torch.Tensor | None,
        format: Format,
    ) -> None:
        self._weights = (packed, scales, zeros)
        self._format = format
        groups = 0 if scales is None else scales.numel()
        self.encoding = (format, packed.shape, groups, zeros is not None)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        """Multiply each row by its expert's matrix, for rows sorted by expert.

        Args:
            x: [pairs and padding, in], sorted by expert.
            ends: int32 [experts], the row after each expert's last row.
            pairs: number of rows without padding.
            out: [pairs and padding, out]. Padding rows are not written.
        """
        grouped_matmul(x[:pairs], ends, *self._weights, out[:pairs], self._format)

    def forward_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply each row by its expert's matrix, for a few rows in any order.

        Args:
            x: [pairs, in], or [tokens, in] if the pairs of a token are consecutive.
            chosen: expert of each pair, [pairs].
            out: [pairs, out].
        """
        picked_matmul(x, chosen, *self._weights, out, self._format)
