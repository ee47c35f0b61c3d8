"""Writing KV into pages and gathering pages, whatever numbers are stored in."""

import torch

from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.float8 import narrow, widen
from ullage_engine.kernels.pool import LayerCache


def write_kv(
    cache: LayerCache,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor | None,
) -> None:
    """Stores a step's keys and values [kv_heads, tokens, head_dim], which it may overwrite.

    `codes`: a flat buffer of bytes as large as either, if KV is stored as float8.
    """
    if cache.scales is None:
        cache.keys.index_copy_(1, slots, keys)
        cache.values.index_copy_(1, slots, values)
        return
    assert codes is not None, "float8 without a buffer for it"
    stored, kv_heads = shaped(codes, *keys.shape), keys.shape[0]
    narrow(keys, cache.scales.values[:kv_heads], stored)
    cache.keys.index_copy_(1, slots, stored)
    narrow(values, cache.scales.values[kv_heads:], stored)
    cache.values.index_copy_(1, slots, stored)


def gather(
    cache: LayerCache,
    heads: slice,
    block_ids: torch.Tensor,
    codes: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Copies blocks of some of the cache's 2 * kv_heads to out [heads, blocks, width].

    `codes`: a flat buffer of as many bytes as `out` has numbers, if KV is stored as float8.
    """
    if cache.scales is None:
        torch.index_select(cache.blocks[heads], 1, block_ids, out=out)
        return
    assert codes is not None, "float8 without a buffer for it"
    gathered = shaped(codes, *out.shape)
    torch.index_select(cache.blocks[heads], 1, block_ids, out=gathered)
    widen(gathered, cache.scales.factors[heads], out)
