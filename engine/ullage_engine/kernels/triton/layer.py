"""Triton kernels that run between a layer's matmuls: norms, rotary embedding, KV writes and gates.

Each operation is a single kernel, which computes in float32 and rounds once, to the activations'
type. Float8 KV is rounded from that type, which matches `ullage_engine.kernels.kv_pool.narrow` bit
for bit.
"""

import torch
import triton.language as tl

from ullage_engine.kernels.kv_pool import LayerCache
from ullage_engine.kernels.moe import GATE_LIMIT, GATE_SLOPE
from ullage_engine.kernels.triton.attention import scales_of
from ullage_engine.kernels.triton.launch import jit, jit_for_any, launch, power_of_two

GATED_AT_ONCE = 1024
"""Maximum number of columns per program of `gate_columns`."""

ROTATED_AT_ONCE = 1024
"""Maximum number of elements per program of `rotate_heads`, which rotates heads of one token."""


@jit
def norm_row(
    x: tl.tensor,  # [rows, columns]
    weight: tl.tensor,  # [columns]
    out: tl.tensor,  # [rows, columns], perhaps x itself
    eps: tl.tensor,
    columns: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute one row of x / sqrt(mean(x²) + eps) * weight."""
    column = tl.arange(0, COLUMNS)
    exists = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    row = tl.load(x + place, mask=exists, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / columns + eps)
    normed = row * scale * tl.load(weight + column, mask=exists, other=0).to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=exists)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Compute the RMS norm of contiguous rows, like `ullage_engine.layers.attention.rms_norm`.

    Args:
        x: [rows, columns].
        weight: [columns].
        eps: added to the mean of squares.
        out: [rows, columns]. It may be `x`.
    """
    rows, columns = x.shape
    padded = power_of_two(columns)
    launch(
        norm_row, (rows,), x, weight, out, eps, columns, COLUMNS=padded,
        num_warps=8 if padded > 2048 else 4,
    )  # fmt: skip


@jit
def gate_columns(
    gate_up: tl.tensor,  # [rows, 2 * width]
    out: tl.tensor,  # [rows, width]
    width: tl.tensor,
    LIMIT: tl.constexpr,  # 0: none, and silu
    SLOPE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute a block of columns in one row of silu(gate) * up or of gpt-oss's gated activation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    place = gate_up + row * 2 * width + column
    gate = tl.load(place, mask=exists, other=0).to(tl.float32)
    up = tl.load(place + width, mask=exists, other=0).to(tl.float32)
    if LIMIT > 0:
        # Compare, because a minimum would turn NaN into a number.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    gated = gate * tl.sigmoid(gate * SLOPE) * up
    tl.store(out + row * width + column, gated.to(out.dtype.element_ty), mask=exists)


def gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Compute silu(gate) * up for gate_up [rows, 2 * width], and write it to out [rows, width]."""
    _gate(gate_up, out, 0.0, 1.0)


def clamped_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Compute gpt-oss's gated activation, like `ullage_engine.kernels.moe.clamped_gate`."""
    _gate(gate_up, out, GATE_LIMIT, GATE_SLOPE)


def _gate(gate_up: torch.Tensor, out: torch.Tensor, limit: float, slope: float) -> None:
    rows, width = out.shape
    columns = min(GATED_AT_ONCE, power_of_two(width))
    launch(
        gate_columns, (rows, -(-width // columns)), gate_up, out, width,
        LIMIT=limit, SLOPE=slope, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


@jit
def e4m3_code(number: tl.tensor) -> tl.tensor:
    """Round float32 to the nearest float8 E4M3, ties to even, and return its byte.

    Values beyond 448 become 448, and NaN stays NaN. Normal values keep their upper bits, with the
    exponent's bias adjusted. Below 2^-6, codes are multiples of 2^-9. Adding 2^14 rounds to such a
    multiple, because the last bit of 2^14 in float32 is 2^-9.
    """
    bits = number.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    most = tl.where(size > 448.0, 448.0, size)
    normal = most.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - (120 << 3)
    steps = (most + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(most < 0.015625, steps, normal)
    code = tl.where(size != size, 0x7F, code)
    return (code | sign).to(tl.uint8)


@jit
def inverse_power(power: tl.tensor) -> tl.tensor:
    """Return exactly 1 / power for a float32 power of two. A GPU division may be approximate."""
    bits = power.to(tl.float32).to(tl.int32, bitcast=True)
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@jit
def stored(number: tl.tensor, scale: tl.tensor, TYPE: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """Convert values to the dtype of the KV pages."""
    result = number.to(TYPE)
    if FP8:
        # Round from the activations' type, as torch does, so that both give the same code.
        result = e4m3_code(result.to(tl.float32) * scale)
    return result


@jit
def load_norm(
    q_norm: tl.tensor,  # [2 * HALF]
    k_norm: tl.tensor,
    is_query: tl.tensor,  # [heads]
    dim: tl.tensor,
) -> tl.tensor:
    """Load the norm weights of each head for these dimensions, float32 [heads, dims].

    Query heads use `q_norm`, and the other heads use `k_norm`.
    """
    of_queries = tl.load(q_norm + dim).to(tl.float32)[None, :]
    of_keys = tl.load(k_norm + dim).to(tl.float32)[None, :]
    return tl.where(is_query[:, None], of_queries, of_keys)


@jit
def rotated(
    first: tl.tensor,  # [heads, HALF]
    second: tl.tensor,
    cos: tl.tensor,  # of one position, [2 * HALF]
    sin: tl.tensor,
    dim: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Apply the rotary embedding to heads: x * cos + swap_halves(x) * sin.

    The first half of `sin` is negated.
    """
    cos_first = tl.load(cos + dim).to(tl.float32)[None, :]
    cos_second = tl.load(cos + HALF + dim).to(tl.float32)[None, :]
    sin_first = tl.load(sin + dim).to(tl.float32)[None, :]
    sin_second = tl.load(sin + HALF + dim).to(tl.float32)[None, :]
    return first * cos_first + second * sin_first, second * cos_second + first * sin_second


@jit_for_any("head_stride")
def rotate_heads(
    qkv: tl.tensor,  # [rows, (HEADS + 2 * KV_HEADS) * 2 * HALF]
    q_norm: tl.tensor,  # [2 * HALF]
    k_norm: tl.tensor,
    cos: tl.tensor,  # [positions, 2 * HALF]
    sin: tl.tensor,  # the same, its first half negated
    positions: tl.tensor,  # [rows]
    slots: tl.tensor,  # [rows]; negative: padding, which is not stored
    scales: tl.tensor,  # [2 * KV_HEADS] of float8, keys' first
    queries: tl.tensor,  # [HEADS, rows, 2 * HALF], heads `head_stride` apart
    keys: tl.tensor,  # [KV_HEADS, slots, 2 * HALF], heads `cache_stride` apart
    values: tl.tensor,
    eps: tl.tensor, head_stride: tl.tensor, cache_stride: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # heads of a program
    NORMS: tl.constexpr, FP8: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise and rotate a block of one row's heads, and store its queries, keys and values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, HALF)
    exists = head < HEADS + 2 * KV_HEADS
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS

    place = (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(qkv + place, mask=exists[:, None], other=0).to(tl.float32)
    second = tl.load(qkv + place + HALF, mask=exists[:, None], other=0).to(tl.float32)
    turned_first = first
    turned_second = second
    if NORMS:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        turned_first = first * inverse * load_norm(q_norm, k_norm, is_query, dim)
        turned_second = second * inverse * load_norm(q_norm, k_norm, is_query, HALF + dim)
    angle = tl.load(positions + row).to(tl.int64) * (2 * HALF)
    turned_first, turned_second = rotated(
        turned_first, turned_second, cos + angle, sin + angle, dim, HALF
    )

    TYPE: tl.constexpr = queries.dtype.element_ty
    query = queries + head.to(tl.int64)[:, None] * head_stride + row * 2 * HALF + dim[None, :]
    tl.store(query, turned_first.to(TYPE), mask=is_query[:, None])
    tl.store(query + HALF, turned_second.to(TYPE), mask=is_query[:, None])

    slot = tl.load(slots + row).to(tl.int64)
    is_kv = exists & (head >= HEADS) & (slot >= 0)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS).to(tl.int64)
    at = kv_head[:, None] * cache_stride + slot * 2 * HALF + dim[None, :]
    scale = 1.0
    if FP8:
        scale = inverse_power(tl.load(scales + head - HEADS, mask=is_kv, other=1))[:, None]
    is_key = (is_kv & (head < HEADS + KV_HEADS))[:, None]
    tl.store(keys + at, stored(turned_first, scale, TYPE, FP8), mask=is_key)
    tl.store(keys + at + HALF, stored(turned_second, scale, TYPE, FP8), mask=is_key)
    is_value = (is_kv & is_value)[:, None]
    tl.store(values + at, stored(first, scale, TYPE, FP8), mask=is_value)
    tl.store(values + at + HALF, stored(second, scale, TYPE, FP8), mask=is_value)


def rotate_and_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    queries: torch.Tensor,
    cache: LayerCache,
) -> None:
    """Rotate queries and keys, and write keys and values to their slots in the pages.

    Args:
        qkv: [rows, (heads + 2 * kv_heads) * head_dim], contiguous.
        norms: weights [head_dim] of the query and key norms, which are applied before rotation.
            None if the model has no such norms.
        eps: added to the mean of squares in the norms.
        tables: cosine and sine [positions, head_dim], see
            `ullage_engine.layers.rotary_tables.fill_tables`.
        positions: position of each row in its sequence, int32 [rows].
        slots: KV slot of each row, int64 [rows], negative for padding.
        queries: output, [heads, rows, head_dim], each head contiguous.
        cache: pages of the layer, with the dtype of `qkv` or as float8.
    """
    heads, rows, head_dim = queries.shape
    kv_heads = cache.keys.shape[0]
    block = min(ROTATED_AT_ONCE // head_dim, power_of_two(heads + 2 * kv_heads))
    q_norm, k_norm = norms or (qkv, qkv)
    launch(
        rotate_heads, (rows, -(-(heads + 2 * kv_heads) // block)),
        qkv, q_norm, k_norm, *tables, positions, slots, scales_of(cache, qkv), queries,
        cache.keys, cache.values, eps, queries.stride(0), cache.keys.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK=block,
        NORMS=norms is not None, FP8=cache.scales is not None, num_warps=4,
    )  # fmt: skip
