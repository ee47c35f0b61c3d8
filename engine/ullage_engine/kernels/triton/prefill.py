"""Prefill attention over paged KV: tiles of consecutive tokens after any number of earlier ones.

A program takes some tokens of a tile with all query heads of one KV head, so that the pages are
read once for all of them. All tiles of a step are one launch.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from ullage_engine.core.batch import PrefillTile
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.kernels.triton import PagedWorkspace
from ullage_engine.kernels.triton.decode import (
    LOG2_E,
    padded_table,
    scales_of,
    span_tokens,
)
from ullage_engine.kernels.triton.launch import jit_for_any, launch, power_of_two
from ullage_engine.kernels.triton.paged import add_sink, attend_range, scale_of
from ullage_engine.memory.rungs import MAX_TILE_ROWS


@jit_for_any("width")
def attend_tile(
    queries: tl.tensor,  # [heads, tokens, HEAD_DIM], heads `head_stride` apart
    keys: tl.tensor,  # [kv_heads, slots, HEAD_DIM], heads `cache_stride` apart
    values: tl.tensor,
    tables: tl.tensor,  # [tiles, width] block ids
    starts: tl.tensor,  # [tiles] first row of the flat batch
    counts: tl.tensor,  # [tiles] rows; 0 for padding
    earlier: tl.tensor,  # [tiles] tokens of the sequence before the tile's first
    sinks: tl.tensor,  # [heads]
    scales: tl.tensor,  # [2 * kv_heads] of float8, keys' first
    out: tl.tensor,  # [tokens, heads * HEAD_DIM]
    scale: tl.tensor, head_stride: tl.tensor, cache_stride: tl.tensor, width: tl.tensor,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, TOKENS: tl.constexpr,
    PIECES: tl.constexpr,  # programs for each tile
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SPAN: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the result of TOKENS tokens of one tile for the heads of one KV head."""
    # The last tiles of a prompt see most: they begin first, lest all wait for them in the end.
    tile = tl.num_programs(0) // PIECES - 1 - tl.program_id(0) // PIECES
    begun = tl.program_id(0) % PIECES * TOKENS
    kv_head = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + tile)
    if begun >= count:
        return
    row = tl.arange(0, TOKENS * PADDED_GROUP)
    token, member = begun + row // PADDED_GROUP, row % PADDED_GROUP
    exists = (token < count) & (member < GROUP)
    heads = kv_head * GROUP + member
    tokens = (tl.load(starts + tile) + token).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    places = heads[:, None] * head_stride + tokens[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + places, mask=exists[:, None], other=0)

    before = tl.load(earlier + tile)
    last = before + token
    end = before + tl.minimum(begun + TOKENS, count)
    # What every token sees comes first, without masks; a window has no such part.
    middle = (before + begun + 1) // SPAN * SPAN
    first = tl.zeros_like(last)
    if WINDOW > 0:
        middle = tl.maximum(before + begun - WINDOW + 1, 0) // SPAN * SPAN
        first = last - WINDOW + 1
    key, value = keys + kv_head * cache_stride, values + kv_head * cache_stride
    peak, total, summed = attend_range(
        query, key, value, tables + tile.to(tl.int64) * width, first, last, 0,
        middle, end, scale * scale_of(scales + kv_head, FP8), BLOCK_TOKENS, HEAD_DIM, SPAN, WINDOW,
        FP8,
    )  # fmt: skip
    summed = summed * scale_of(scales + tl.num_programs(1) + kv_head, FP8)
    peak, total, summed = add_sink(peak, total, summed, sinks + heads, exists, SINKS)
    result = summed / tl.where(total == 0, 1.0, total)[:, None]
    where = out + (tokens * tl.num_programs(1) * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=exists[:, None])


def attend_tiles(
    queries: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    earlier: torch.Tensor,
    out: torch.Tensor,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attends tiles of at most MAX_TILE_ROWS consecutive tokens to their sequences' pages.

    queries [heads, tokens, head_dim], each head contiguous; tables [tiles, width], starts, counts
    and earlier [tiles], all int32; out [tokens, heads * head_dim]. A token sees itself and what
    comes before, the last `window` of them or all. Nothing is read on the host nor allocated.
    """
    heads, _, head_dim = queries.shape
    kv_heads, num_blocks = cache.keys.shape[0], cache.blocks.shape[1]
    group = heads // kv_heads
    padded = power_of_two(group)
    tokens = max(1, _rows(head_dim, queries.element_size()) // padded)
    pieces = -(-MAX_TILE_ROWS // tokens)
    launch(
        attend_tile, (tables.shape[0] * pieces, kv_heads),
        queries, cache.keys, cache.values, tables, starts, counts, earlier,
        queries if sinks is None else sinks, scales_of(cache, queries), out,
        head_dim**-0.5 * LOG2_E, queries.stride(0), cache.keys.stride(0), tables.shape[1],
        GROUP=group, PADDED_GROUP=padded, TOKENS=tokens, PIECES=pieces, HEAD_DIM=head_dim,
        BLOCK_TOKENS=cache.keys.shape[1] // num_blocks,
        SPAN=span_tokens(head_dim, queries.element_size()), WINDOW=window,
        SINKS=sinks is not None, FP8=cache.scales is not None,
        num_warps=8 if tokens * padded >= 128 else 4, num_stages=3,
    )  # fmt: skip


class PagedPrefill:
    """All tiles of a step, in one launch."""

    def __init__(
        self,
        tiles: Sequence[PrefillTile],
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
        attended: torch.Tensor,  # [tokens, heads * head_dim]
        workspace: PagedWorkspace,
        window: int = 0,
    ) -> None:
        self._queries = rotated[: workspace.geometry.num_heads]
        self._out, self._window = attended, window
        width = max(len(tile.block_ids) for tile in tiles)
        tables = [padded_table(tile.block_ids, width) for tile in tiles]
        rows = [[tile.start, tile.end - tile.start, tile.earlier] for tile in tiles]
        columns = torch.tensor(rows, dtype=torch.int32, device=rotated.device).t().contiguous()
        self._tables = torch.tensor(tables, dtype=torch.int32, device=rotated.device)
        self._starts, self._counts, self._earlier = columns.unbind()

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Attends in one layer; the tokens' own KV is in the cache already."""
        attend_tiles(
            self._queries,
            cache,
            self._tables,
            self._starts,
            self._counts,
            self._earlier,
            self._out,
            self._window,
            sinks,
        )


def _rows(head_dim: int, itemsize: int) -> int:
    """Rows of queries a program has, heads times tokens; float32 is not for tensor cores."""
    if itemsize == 4:
        return 32
    return 128 if head_dim <= 64 else 64
