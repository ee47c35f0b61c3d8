"""The inner loop of attention: blocks of queries against a run of one sequence's paged KV.

A running softmax in base 2 (Milakov and Gimelshein, 2018): the state is each row's peak score, the
sum of its weights and the weighted sum of values, all relative to the peak.
"""

import triton.language as tl

from ullage_engine.kernels.triton.formats import e4m3
from ullage_engine.kernels.triton.launch import jit


@jit
def shift_of(peak: tl.tensor) -> tl.tensor:
    """The peak, or zero where nothing has been seen: minus infinity less itself is not a number."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@jit
def scale_of(place: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """A head's scale, by which queries or sums are multiplied in place of all that is stored."""
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
    """Goes on with positions begin to end."""
    dims = tl.arange(0, HEAD_DIM)
    for start in range(begin, end, SPAN):
        positions = start + tl.arange(0, SPAN)
        inside = positions < end
        # Block ids and memory beyond the end are somebody else's: never read.
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
    middle: tl.tensor,  # up to here every row sees all; with a window nothing
    end: tl.tensor,
    scale: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
) -> tl.tensor:
    """The running softmax of positions begin to end: peak, total and sum; see `attend`."""
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
    """Gives the sink of each row's head its share of the softmax."""
    if SINKS:
        sink = tl.load(sinks, mask=exists, other=0).to(tl.float32) * 1.4426950408889634
        shift = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.exp2(sink - shift)
        summed = summed * shrink[:, None]
        peak = shift
    return peak, total, summed
