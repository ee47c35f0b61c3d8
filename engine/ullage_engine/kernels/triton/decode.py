"""Decode attention over paged KV: one token each of many sequences, whatever their lengths.

A program attends the query heads of one KV head to one split of one sequence's context; splits are
merged by the logarithms of their sums. The grid depends on shapes alone: lengths and block tables
are read on the device, so a captured graph serves every length that its tables have room for.
"""

import math
from collections.abc import Sequence

import torch
import triton.language as tl

from ullage_engine.core.batch import DecodeGroup
from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.kernels.triton import PagedWorkspace
from ullage_engine.kernels.triton.launch import jit, jit_for_any, launch, power_of_two
from ullage_engine.kernels.triton.paged import add_sink, attend_range, scale_of, shift_of
from ullage_engine.memory.partials import MAX_SPLITS, num_splits

LOG2_E = math.log2(math.e)


@jit
def own_share(
    base: tl.tensor, length: tl.tensor, split: tl.tensor, splits: tl.tensor, SPAN: tl.constexpr
) -> tl.tensor:
    """(begin, end) of one split of positions base to length; begin is base and whole spans."""
    share = tl.cdiv(tl.cdiv(length - base, SPAN), splits) * SPAN
    begin = base + split * share
    return begin, tl.minimum(begin + share, length)


@jit_for_any("width", "splits")
def attend_split(
    queries: tl.tensor,  # [heads, rows, HEAD_DIM], heads `head_stride` apart
    keys: tl.tensor,  # [kv_heads, slots, HEAD_DIM], heads `cache_stride` apart
    values: tl.tensor,
    tables: tl.tensor,  # [rows, width] block ids
    lengths: tl.tensor,  # [rows] context, the token itself included; 0 for a row of padding
    sinks: tl.tensor,  # [heads]
    scales: tl.tensor,  # [2 * kv_heads] of float8, keys' first
    out: tl.tensor,  # [rows, heads * HEAD_DIM], or [rows, heads, splits, HEAD_DIM] of float32
    sums: tl.tensor,  # [rows, heads, splits] log2 of the sum of the weights
    scale: tl.tensor, head_stride: tl.tensor, cache_stride: tl.tensor,
    width: tl.tensor, splits: tl.tensor,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    WHOLE: tl.constexpr,  # there is one split
    WINDOW: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the result of one split; with one split, the result."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    seen = 0
    if WINDOW > 0:
        seen = tl.maximum(length - WINDOW, 0)
    begin, end = own_share(seen // SPAN * SPAN, length, split, splits, SPAN)
    members = tl.arange(0, ROWS)
    heads = kv_head * GROUP + members
    exists = members < GROUP
    dims = tl.arange(0, HEAD_DIM)
    places = heads[:, None] * head_stride + row * HEAD_DIM + dims[None, :]
    query = tl.load(queries + places, mask=exists[:, None], other=0)
    first = seen + tl.zeros([ROWS], tl.int32)
    last = length - 1 + tl.zeros([ROWS], tl.int32)
    key, value = keys + kv_head * cache_stride, values + kv_head * cache_stride
    middle = begin
    if WINDOW == 0:
        middle = tl.maximum(begin, end // SPAN * SPAN)
    peak, total, summed = attend_range(
        query, key, value, tables + row * width, first, last, begin, middle, end,
        scale * scale_of(scales + kv_head, FP8), BLOCK_TOKENS, HEAD_DIM, SPAN, WINDOW, FP8,
    )  # fmt: skip
    summed = summed * scale_of(scales + tl.num_programs(1) + kv_head, FP8)
    if WHOLE:
        peak, total, summed = add_sink(peak, total, summed, sinks + heads, exists, SINKS)
    # An empty split weighs nothing, log2(0), and its result is zero.
    weight = tl.where(total == 0, 1.0, total)
    result = summed / weight[:, None]
    place = (row * tl.num_programs(1) * GROUP + heads) * splits + split
    where = out + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=exists[:, None])
    if not WHOLE:
        level = tl.where(total == 0, float("-inf"), peak + tl.log2(weight))
        tl.store(sums + place, level, mask=exists)


@jit_for_any("splits")
def merge_splits(
    partials: tl.tensor,  # [rows, heads, splits, HEAD_DIM]
    sums: tl.tensor,  # [rows, heads, splits]
    sinks: tl.tensor,  # [heads]
    out: tl.tensor,  # [rows, heads * HEAD_DIM]
    num_heads: tl.tensor,
    splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    MOST: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Merges one head of one row."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * num_heads + head
    split, dims = tl.arange(0, MOST), tl.arange(0, HEAD_DIM)
    exists = split < splits
    levels = tl.load(sums + place * splits + split, mask=exists, other=float("-inf"))
    peak = tl.max(levels, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    shift = shift_of(peak)
    weights = tl.exp2(levels - shift)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - shift)
    pieces = partials + (place * splits + split)[:, None] * HEAD_DIM + dims[None, :]
    results = tl.load(pieces, mask=exists[:, None], other=0)
    summed = tl.sum(weights[:, None] * results, 0)
    result = summed / tl.where(total == 0, 1.0, total)
    tl.store(out + place * HEAD_DIM + dims, result.to(out.dtype.element_ty))


def attend_decodes(
    queries: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attends one token of each row to its sequence's pages.

    queries [heads, rows, head_dim], each head contiguous; tables [rows, width] and lengths [rows]
    int32; out [rows, heads * head_dim]; partials flat float32 (`memory.partials`). The last
    `window` tokens are seen, 0 for all. Neither reads anything on the host nor allocates.
    """
    heads, rows, head_dim = queries.shape
    kv_heads, num_blocks = cache.keys.shape[0], cache.blocks.shape[1]
    block_tokens, width = cache.keys.shape[1] // num_blocks, tables.shape[1]
    span = span_tokens(head_dim, queries.element_size())
    room = width * block_tokens
    splits = num_splits(rows, kv_heads, min(window + span, room) if window else room)
    pieces, sums = out, out
    if splits > 1:
        pieces = shaped(partials, rows, heads, splits, head_dim)
        sums = shaped(partials[pieces.numel() :], rows, heads, splits)
    group, has_sinks = heads // kv_heads, sinks is not None
    launch(
        attend_split, (rows, kv_heads, splits),
        queries, cache.keys, cache.values, tables, lengths,
        queries if sinks is None else sinks, scales_of(cache, queries), pieces, sums,
        head_dim**-0.5 * LOG2_E, queries.stride(0), cache.keys.stride(0), width, splits,
        GROUP=group, ROWS=max(16, power_of_two(group)), HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens, SPAN=span, WHOLE=splits == 1, WINDOW=window, SINKS=has_sinks,
        FP8=cache.scales is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        launch(
            merge_splits, (rows, heads),
            pieces, sums, queries if sinks is None else sinks, out, heads, splits,
            HEAD_DIM=head_dim, MOST=MAX_SPLITS, SINKS=has_sinks, num_warps=4,
        )  # fmt: skip


class PagedDecode:
    """All decodes of a step, in one launch and one to merge them."""

    def __init__(
        self,
        groups: Sequence[DecodeGroup],
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
        attended: torch.Tensor,  # [tokens, heads * head_dim]
        workspace: PagedWorkspace,
        window: int = 0,
    ) -> None:
        rows = groups[-1].end
        self._queries = rotated[: workspace.geometry.num_heads, :rows]
        self._out, self._window = attended[:rows], window
        self._partials = workspace.partials
        tables, lengths = _tables(groups)
        self._tables = torch.tensor(tables, dtype=torch.int32, device=rotated.device)
        self._lengths = torch.tensor(lengths, dtype=torch.int32, device=rotated.device)

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Attends in one layer; the tokens' own KV is in the cache already."""
        attend_decodes(
            self._queries,
            cache,
            self._tables,
            self._lengths,
            self._out,
            self._partials,
            self._window,
            sinks,
        )


def _tables(groups: Sequence[DecodeGroup]) -> tuple[list[list[int]], list[int]]:
    """Block tables of all rows, as wide as the widest, and their lengths; groups' padding left."""
    width = max(group.num_blocks for group in groups)
    tables, lengths = [], []
    for group in groups:
        for row in range(group.end - group.start):
            start = row * group.num_blocks
            table = group.block_ids[start : start + group.num_blocks]
            tables.append(padded_table(table, width))
            lengths.append(group.lengths[row])
    return tables, lengths


def padded_table(block_ids: list[int], width: int) -> list[int]:
    """Repeats a sequence's last block; what lies there is never read."""
    return block_ids + block_ids[-1:] * (width - len(block_ids))


def scales_of(cache: LayerCache, unused: torch.Tensor) -> torch.Tensor:
    """Scales of float8, [2 * kv_heads]; of other numbers something that is not read."""
    return unused if cache.scales is None else cache.scales.values


def span_tokens(head_dim: int, itemsize: int) -> int:
    """Tokens of KV a program has at once: with three stages at most 96 KiB of shared memory."""
    return 64 if head_dim * itemsize <= 256 else 32 if head_dim * itemsize <= 512 else 16
