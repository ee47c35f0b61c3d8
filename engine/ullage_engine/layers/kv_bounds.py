"""The largest key and value that a layer can make of any input, known from its weights alone.

A normalised row has the length √hidden at most, so |w · (row * norm)| is at most √hidden |w * norm|
(Cauchy and Schwarz). What inputs really give lies below that by about the same √hidden, 5 or 6 of
the 14 powers of two between E4M3's least normal number and its largest: scales of these bounds
saturate nothing and leave the precision of floating point, with no text to calibrate on.
"""

import math

import torch

from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.float8 import HeadScales, head_scales
from ullage_engine.layers.attention import AttentionLayer
from ullage_engine.memory.arena import StepLimits
from ullage_engine.models.geometry import ModelGeometry


def kv_scales(
    layer: AttentionLayer,
    norm: torch.Tensor,
    geometry: ModelGeometry,
    limits: StepLimits,
    arena: dict[str, torch.Tensor],
) -> HeadScales:
    """Scales with which every key and value of the layer can be stored; overwrites the arena."""
    bounds = kv_bounds(layer, norm, geometry, limits, arena)
    return head_scales(bounds.tolist(), norm.dtype, norm.device)


def kv_bounds(
    layer: AttentionLayer,
    norm: torch.Tensor,
    geometry: ModelGeometry,
    limits: StepLimits,
    arena: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Bounds of each head's rotated keys, then of each head's values, float32 [2 * kv_heads]."""
    largest = math.sqrt(geometry.hidden) * _lengths(layer, norm, geometry, limits, arena)
    if layer.qkv_bias is not None:
        largest += layer.qkv_bias[geometry.query_width :].float().abs()
    by_head = largest.view(2 * geometry.num_kv_heads, geometry.head_dim).amax(1)
    keys = by_head[: geometry.num_kv_heads]
    # Rotation keeps the length of a pair, and either of it may become all of that.
    keys.mul_(math.sqrt(2))
    if layer.k_norm is not None:
        keys.copy_(math.sqrt(geometry.head_dim) * layer.k_norm.float().abs().max())
    keys.mul_(geometry.rope_scale)
    return by_head


def _lengths(
    layer: AttentionLayer,
    norm: torch.Tensor,
    geometry: ModelGeometry,
    limits: StepLimits,
    arena: dict[str, torch.Tensor],
) -> torch.Tensor:
    """|w * norm| of each row w that makes keys and values, float32 [2 * kv_heads * head_dim].

    Multiplies a diagonal of the norm's weights, since a matrix of any format multiplies.
    """
    hidden = geometry.hidden
    rows = limits.product_rows(min(limits.max_tokens, hidden))
    inputs = shaped(arena["normed"], rows, hidden)
    products = shaped(arena["qkv"], rows, geometry.qkv_width)
    made = products[:, geometry.query_width :]
    squares = torch.zeros(made.shape[1], device=norm.device)
    for start in range(0, hidden, rows):
        columns = torch.arange(start, min(start + rows, hidden), device=norm.device)
        inputs.zero_()[columns - start, columns] = norm[columns]
        layer.qkv.multiply(inputs, products)
        squares += torch.linalg.vector_norm(made, dim=0, dtype=torch.float32).square_()
    return squares.sqrt_()
