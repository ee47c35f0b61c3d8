"""The inner loop of products with weights in any format, turned into numbers as they are read.

weight[column, k] = value[column, k] * scale[column, k // group] + zero[column, k // group], so
x . weight = sum over groups of scale * (x . value) + zero * sum(x): values enter the tensor cores
as they are, which is exact in bfloat16, and scales are applied in float32.
"""

import torch
import triton.language as tl

from ullage_engine.kernels.triton import LEAST_GROUP, Format, takes_groups
from ullage_engine.kernels.triton.formats import e2m1, e4m3, e8m0
from ullage_engine.kernels.triton.launch import jit


@jit
def decoded(code: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Values as float32."""
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
    """scale * (x . value) + zero * sum(x)."""
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
    """Two values a byte: even and odd columns of x are multiplied apart, because taking x apart
    costs less than putting weights together."""
    for start in range(0, depth, STEP):
        pairs = start // 2 + tl.arange(0, STEP // 2)
        inside = pairs < depth // 2
        mask = has_column[:, None] & inside[None, :]
        code = tl.load(values[:, None] + pairs[None, :], mask=mask, other=0)
        low, high = decoded(code, FORMAT), decoded(code >> 4, FORMAT)
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
            low, high = low * wide, high * wide
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
    """A value an element; one scale for all of a column waits until the end."""
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
    """x @ weights^T of some rows and columns, float32 [ROWS, COLUMNS]."""
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
    """Weights of a column that share a scale; 0 where all do and it can wait until the end.

    Raises ValueError for weights that the kernels cannot multiply.
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
            f"{'' if format == 'mxfp4' else 'a multiple of '}{LEAST_GROUP} weights"
        )
    return depth // groups


def step_of(depth: int, group: int, format: Format, itemsize: int) -> int:
    """How much of the depth is multiplied at once: within a group, without a remainder if
    possible."""
    most = 64 if itemsize == 4 else 128
    within = depth if format == "mxfp4" or not group else group
    return next((step for step in (128, 64, 32) if step <= most and within % step == 0), 64)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Weights as kernels read them: float8 as bytes."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
