"""The paged KV pool."""

from typing import NamedTuple

import torch

from ullage_engine.models.geometry import ModelGeometry


class LayerCache(NamedTuple):
    """One layer's keys and values: the same memory seen as blocks and as slots.

    Slot = block id * block tokens + position within the block.
    """

    blocks: torch.Tensor  # [2 * kv_heads, num_blocks, block_tokens * head_dim], keys first
    keys: torch.Tensor  # [kv_heads, num_slots, head_dim]
    values: torch.Tensor  # [kv_heads, num_slots, head_dim]


def kv_block_bytes(geometry: ModelGeometry, block_tokens: int, itemsize: int) -> int:
    """Bytes of one block over all layers."""
    return block_tokens * geometry.kv_bytes_per_token(itemsize)


def allocate_pool(
    geometry: ModelGeometry,
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """One allocation for all layers, every page touched.

    Heads come first so that the blocks of one head gather into a matrix; zeros so that padding
    never meets a NaN.
    """
    shape = (geometry.num_layers, 2 * geometry.num_kv_heads, num_blocks * block_tokens)
    pool = torch.empty((*shape, geometry.head_dim), dtype=dtype, device=device).zero_()
    return [
        LayerCache(
            layer.view(2 * geometry.num_kv_heads, num_blocks, block_tokens * geometry.head_dim),
            layer[: geometry.num_kv_heads],
            layer[geometry.num_kv_heads :],
        )
        for layer in pool
    ]
