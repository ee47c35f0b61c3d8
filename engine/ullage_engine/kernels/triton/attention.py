"""Attention over paged KV in Triton: decodes, prefill tiles and their shared inner loop.

For decodes, each program handles the query heads of one KV head over one split of one sequence's
context. Splits are merged using the logarithms of their softmax sums. The grid depends only on
shapes. Lengths and block tables are read on the device, so a captured CUDA graph works for every
context length that fits in its block tables.

For prefill, each program handles a subset of a tile's tokens for all query heads of one KV head, so
that pages are read once for all of these heads. One launch computes all tiles of a step.

The inner loop runs a block of queries over consecutive pages of one sequence, with an online
softmax in base 2 (Milakov and Gimelshein, 2018). The state of a row has three parts: the highest
score (`peak`), the sum of the weights (`total`) and the weighted sum of the values (`summed`). Both
sums are relative to the peak.
"""

import math

import torch
import triton.language as tl

from ullage_engine.kernels.arena import MAX_SPLITS, MAX_TILE_ROWS, num_splits
from ullage_engine.kernels.batch import PagedRows
from ullage_engine.kernels.kv_pool import LayerCache, shaped
from ullage_engine.kernels.triton import PagedWorkspace, Put
from ullage_engine.kernels.triton.launch import e4m3, jit, jit_for_any, launch, power_of_two


@jit
def shift_of(peak: tl.tensor) -> tl.tensor:
    """Return the value to subtract from a row's scores before exponentiation.

    This is the row's peak, or zero if the row has no scores yet, because -inf - -inf would be
    NaN.
    """
    return tl.where(peak == float("-inf"), 0.0, peak)


@jit
def scale_of(place: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """Load the float8 scale of a head. Return 1 if KV is not stored as float8.

    The scale is applied to queries and sums, which is cheaper than scaling all stored values.
    """
    if FP8:
        return tl.load(place).to(tl.float32)
    return 1.0


@jit
def attend(
    queries: tl.tensor,  # [rows, HEAD_DIM]
    peak: tl.tensor,  # [rows]
    total: tl.tensor,  # [rows]
    summed: tl.tensor,  # [rows, HEAD_DIM]
    keys: tl.tensor,  # of one KV head
    values: tl.tensor,
    table: tl.tensor,  # block ids of the sequence
    first: tl.tensor,  # [rows] first position that a row sees
    last: tl.tensor,  # [rows] last one
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,  # times log2(e)
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPAN: tl.constexpr,
    MASKED: tl.constexpr,  # else every row sees all of begin to end, a multiple of SPAN
    FP8: tl.constexpr,
) -> tl.tensor:
    """Extend the online softmax state with positions `begin` to `end`."""
    dims = tl.arange(0, HEAD_DIM)
    for start in range(begin, end, SPAN):
        positions = start + tl.arange(0, SPAN)
        inside = positions < end
        # Never read block ids and memory beyond the end, which belong to other sequences.
        if MASKED:
            blocks = tl.load(table + positions // BLOCK_TOKENS, mask=inside, other=0)
        else:
            blocks = tl.load(table + positions // BLOCK_TOKENS)
        slots = blocks.to(tl.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
        places = slots[:, None] * HEAD_DIM + dims[None, :]
        if MASKED:
            key = tl.load(keys + places, mask=inside[:, None], other=0)
            value = tl.load(values + places, mask=inside[:, None], other=0)
        else:
            key = tl.load(keys + places)
            value = tl.load(values + places)
        if FP8:
            key = e4m3(key).to(queries.dtype)
            value = e4m3(value).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            seen = (positions[None, :] >= first[:, None]) & (positions[None, :] <= last[:, None])
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        risen = tl.maximum(peak, tl.max(scores, 1))
        shift = shift_of(risen)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None]
        summed = tl.dot(weights.to(value.dtype), value, summed, input_precision="ieee")
        peak = risen
    return peak, total, summed


@jit
def attend_range(
    queries: tl.tensor,  # [rows, HEAD_DIM]
    keys: tl.tensor,  # of one KV head
    values: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    begin: tl.tensor,
    middle: tl.tensor,  # up to here every row sees all positions; with a window the first position
    end: tl.tensor,
    scale: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
) -> tl.tensor:
    """Return the online softmax state of positions `begin` to `end`: peak, total and summed."""
    peak = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    summed = tl.zeros([queries.shape[0], HEAD_DIM], tl.float32)
    if WINDOW == 0:
        peak, total, summed = attend(
            queries, peak, total, summed, keys, values, table, first, last, begin, middle, scale,
            BLOCK_TOKENS, HEAD_DIM, SPAN, False, FP8,
        )  # fmt: skip
    return attend(
        queries, peak, total, summed, keys, values, table, first, last, middle, end, scale,
        BLOCK_TOKENS, HEAD_DIM, SPAN, True, FP8,
    )  # fmt: skip


@jit
def add_sink(
    peak: tl.tensor,  # [rows]
    total: tl.tensor,  # [rows]
    summed: tl.tensor,  # [rows, head_dim]
    sinks: tl.tensor,  # [rows] places of the heads' logits
    exists: tl.tensor,  # [rows]
    SINKS: tl.constexpr,  # else nothing is done
) -> tl.tensor:
    """Add each head's attention sink to its rows' softmax, as a score that has no value vector."""
    if SINKS:
        sink = tl.load(sinks, mask=exists, other=0).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.exp2(sink - shift)
        summed = summed * shrink[:, None]
        peak = shift
    return peak, total, summed


LOG2_E = math.log2(math.e)


@jit
def own_share(
    base: tl.tensor, length: tl.tensor, split: tl.tensor, splits: tl.tensor, SPAN: tl.constexpr
) -> tl.tensor:
    """Return the range (begin, end) of positions that one split of a context covers.

    The context consists of positions `base` to `length` - 1. Each split begins at a multiple of
    SPAN positions after `base`.
    """
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
    """Compute attention for one decode and one KV head over one split of the context.

    If there is only one split, the result is final. Otherwise `merge_splits` merges the results.
    """
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
    key = keys + kv_head * cache_stride
    value = values + kv_head * cache_stride
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
    # An empty split has the weight 0, whose log2 is -inf, and its result is zero.
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
    """Merge the results of all splits for one head of one decode."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * num_heads + head
    split = tl.arange(0, MOST)
    dims = tl.arange(0, HEAD_DIM)
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
    """Compute attention for decodes over their sequences' pages.

    This function reads no tensor on the host and allocates no memory.

    Args:
        queries: [heads, rows, head_dim], each head contiguous.
        cache: pages of the layer.
        tables: block ids, int32 [rows, width].
        lengths: context length of each row, including the row's own token, int32 [rows].
        out: output, [rows, heads * head_dim].
        partials: flat float32 buffer for the results of splits.
        window: number of most recent tokens that a row sees, or 0 for all.
        sinks: logit of each head's attention sink, [heads].
    """
    heads, rows, head_dim = queries.shape
    kv_heads = cache.keys.shape[0]
    num_blocks = cache.blocks.shape[1]
    block_tokens = cache.keys.shape[1] // num_blocks
    width = tables.shape[1]
    span = span_tokens(head_dim, queries.element_size())
    room = width * block_tokens
    splits = num_splits(rows, kv_heads, min(window + span, room) if window else room)
    pieces = out
    sums = out
    if splits > 1:
        pieces = shaped(partials, rows, heads, splits, head_dim)
        sums = shaped(partials[pieces.numel() :], rows, heads, splits)
    group = heads // kv_heads
    has_sinks = sinks is not None
    # Float8 is unpacked in registers, and four warps have too few of them.
    warps = 4 if cache.scales is None or head_dim <= 64 else 8
    launch(
        attend_split, (rows, kv_heads, splits),
        queries, cache.keys, cache.values, tables, lengths,
        queries if sinks is None else sinks, scales_of(cache, queries), pieces, sums,
        head_dim**-0.5 * LOG2_E, queries.stride(0), cache.keys.stride(0), width, splits,
        GROUP=group, ROWS=max(16, power_of_two(group)), HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens, SPAN=span, WHOLE=splits == 1, WINDOW=window, SINKS=has_sinks,
        FP8=cache.scales is not None, num_warps=warps, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        launch(
            merge_splits, (rows, heads),
            pieces, sums, queries if sinks is None else sinks, out, heads, splits,
            HEAD_DIM=head_dim, MOST=MAX_SPLITS, SINKS=has_sinks, num_warps=4,
        )  # fmt: skip


class PagedDecode:
    """Attention for all decodes of a step: one launch, plus another if splits must be merged."""

    def __init__(
        self,
        rows: PagedRows,
        put: Put,
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
        attended: torch.Tensor,  # [tokens, heads * head_dim]
        workspace: PagedWorkspace,
        window: int = 0,
    ) -> None:
        decodes = len(rows.lengths)
        self._queries = rotated[: workspace.model_config.num_heads, :decodes]
        self._out = attended[:decodes]
        self._window = window
        self._partials = workspace.partials
        self._tables, self._lengths = put(rows.decode_tables), put(rows.lengths)

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Compute attention for one layer. The cache must already hold the KV of these tokens."""
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


def scales_of(cache: LayerCache, unused: torch.Tensor) -> torch.Tensor:
    """Return the float8 scales, [2 * kv_heads], or the placeholder `unused` if KV is not float8."""
    return unused if cache.scales is None else cache.scales.values


def span_tokens(head_dim: int, itemsize: int) -> int:
    """Return how many tokens of KV a program loads at once.

    With three pipeline stages, these tokens take at most 96 KiB of shared memory.
    """
    return 64 if head_dim * itemsize <= 256 else 32 if head_dim * itemsize <= 512 else 16


@jit_for_any("width")
def attend_tile(
    queries: tl.tensor,  # [heads, tokens, HEAD_DIM], heads `head_stride` apart
    keys: tl.tensor,  # [kv_heads, slots, HEAD_DIM], heads `cache_stride` apart
    values: tl.tensor,
    tables: tl.tensor,  # [prompts, width] block ids
    prompts: tl.tensor,  # [tiles] row of `tables`
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
    """Compute attention for TOKENS tokens of a tile and the query heads of one KV head."""
    # A prompt's last tiles have the longest context, so they start first. Otherwise the launch
    # would end with a few long programs.
    tile = tl.num_programs(0) // PIECES - 1 - tl.program_id(0) // PIECES
    begun = tl.program_id(0) % PIECES * TOKENS
    kv_head = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + tile)
    if begun >= count:
        return
    row = tl.arange(0, TOKENS * PADDED_GROUP)
    token = begun + row // PADDED_GROUP
    member = row % PADDED_GROUP
    exists = (token < count) & (member < GROUP)
    heads = kv_head * GROUP + member
    tokens = (tl.load(starts + tile) + token).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    places = heads[:, None] * head_stride + tokens[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + places, mask=exists[:, None], other=0)

    before = tl.load(earlier + tile)
    last = before + token
    end = before + tl.minimum(begun + TOKENS, count)
    # Positions that every token sees come first, without masks. A window has no such part.
    middle = (before + begun + 1) // SPAN * SPAN
    first = tl.zeros_like(last)
    if WINDOW > 0:
        middle = tl.maximum(before + begun - WINDOW + 1, 0) // SPAN * SPAN
        first = last - WINDOW + 1
    key = keys + kv_head * cache_stride
    value = values + kv_head * cache_stride
    table = tables + tl.load(prompts + tile).to(tl.int64) * width
    peak, total, summed = attend_range(
        query, key, value, table, first, last, 0,
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
    prompts: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    earlier: torch.Tensor,
    out: torch.Tensor,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute causal attention for tiles of prompts over their sequences' pages.

    A tile has at most MAX_TILE_ROWS consecutive tokens. This function reads no tensor on the host
    and allocates no memory.

    Args:
        queries: [heads, tokens, head_dim], each head contiguous.
        cache: pages of the layer.
        tables: block ids, int32 [prompts, width].
        prompts: row of each tile in `tables`, int32 [tiles].
        starts: first row of each tile in the flat batch, int32 [tiles].
        counts: number of rows in each tile, int32 [tiles].
        earlier: number of the sequence's tokens before each tile, int32 [tiles].
        out: output, [tokens, heads * head_dim].
        window: number of most recent tokens that a token sees, including itself, or 0 for all.
        sinks: logit of each head's attention sink, [heads].
    """
    heads, _, head_dim = queries.shape
    kv_heads = cache.keys.shape[0]
    num_blocks = cache.blocks.shape[1]
    group = heads // kv_heads
    padded = power_of_two(group)
    is_plain = cache.scales is None and sinks is None
    tokens = max(1, _rows(head_dim, queries.element_size(), is_plain) // padded)
    pieces = -(-MAX_TILE_ROWS // tokens)
    launch(
        attend_tile, (starts.shape[0] * pieces, kv_heads),
        queries, cache.keys, cache.values, tables, prompts, starts, counts, earlier,
        queries if sinks is None else sinks, scales_of(cache, queries), out,
        head_dim**-0.5 * LOG2_E, queries.stride(0), cache.keys.stride(0), tables.shape[1],
        GROUP=group, PADDED_GROUP=padded, TOKENS=tokens, PIECES=pieces, HEAD_DIM=head_dim,
        BLOCK_TOKENS=cache.keys.shape[1] // num_blocks,
        SPAN=span_tokens(head_dim, queries.element_size()), WINDOW=window,
        SINKS=sinks is not None, FP8=cache.scales is not None,
        num_warps=4 if queries.element_size() == 4 else 8, num_stages=3,
    )  # fmt: skip


class PagedPrefill:
    """Attention for all prefill tiles of a step, in one launch."""

    def __init__(
        self,
        rows: PagedRows,
        put: Put,
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
        attended: torch.Tensor,  # [tokens, heads * head_dim]
        workspace: PagedWorkspace,
        window: int = 0,
    ) -> None:
        self._queries = rotated[: workspace.model_config.num_heads]
        self._out = attended
        self._window = window
        self._tables, self._prompts = put(rows.prompt_tables), put(rows.tiles.prompts)
        self._starts, self._counts = put(rows.tiles.first_rows), put(rows.tiles.counts)
        self._earlier = put(rows.tiles.earlier)

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Compute attention for one layer. The cache must already hold the KV of these tokens."""
        attend_tiles(
            self._queries,
            cache,
            self._tables,
            self._prompts,
            self._starts,
            self._counts,
            self._earlier,
            self._out,
            self._window,
            sinks,
        )


def _rows(head_dim: int, itemsize: int, is_plain: bool) -> int:
    """Return the number of query rows (heads times tokens) per program.

    A program takes as many rows as fit in registers. Float8 KV and sinks need additional registers.
    Float32 matmuls do not use tensor cores, so their programs take fewer rows.
    """
    if itemsize == 4:
        return 32
    return 128 if head_dim <= (128 if is_plain else 64) else 64
