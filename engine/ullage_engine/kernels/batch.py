"""Converts a step plan to the index arrays of one flat batch of tokens, decodes first.

All computations are vectorised over whole arrays. The module also divides a batch into groups of
decodes and tiles of prompts, because some attention code gathers KV by group or tile instead of
reading KV pages in place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from itertools import chain

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ullage_engine.kernels.arena import (
    MAX_TILE_ROWS,
    context_bucket,
    decode_rows,
    tile_bucket,
    tile_rows,
)
from ullage_engine.kernels.block_tables import BlockTables, Ints
from ullage_engine.protocol.step_plan import Chunk, StepPlan

GROUP_WASTE_TOKENS = 1024
"""Maximum number of padding tokens in a decode group.

Every group has a fixed cost of about 60 µs per layer, which is roughly the time it takes to gather
and score this many tokens of context.
"""

NO_SLOT = -1
"""Sentinel slot id for "no slot". Reads return zeros, and writes are dropped."""

Longs = npt.NDArray[np.int64]
"""Indices for `index_copy_`, for which torch accepts only int64."""

Bucket = Callable[[int], int]
"""A function that rounds a size up to a bucket."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Runs of consecutive tokens, each from a single prompt. Every array has one entry per run."""

    first_rows: Ints
    """Row of each run's first token in the flat batch."""
    counts: Ints
    """Number of tokens in each run."""
    earlier: Ints
    """Number of tokens that precede each run in its sequence."""
    prompts: Ints
    """Row of each run's block table in `PagedRows.prompt_tables`."""

    def cut(self, size: int) -> "Spans":
        """Return these runs, split further so that none has more than `size` tokens."""
        if len(self.counts) == 0:
            return self
        pieces = -(-self.counts // size)
        before = np.cumsum(pieces) - pieces
        span = np.repeat(np.arange(len(pieces)), pieces)
        begun = ((np.arange(len(span)) - before[span]) * size).astype(np.int32)

        return Spans(
            first_rows=self.first_rows[span] + begun,
            counts=np.minimum(self.counts[span] - begun, size).astype(np.int32),
            earlier=self.earlier[span] + begun,
            prompts=self.prompts[span],
        )


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The KV slots that a step writes to, and the blocks that its rows attend to."""

    slots: Longs
    """KV slot of each row, or NO_SLOT for a padding row."""
    lengths: Ints
    """Context length of each decode, including the decode's own token, or 0 for a padding row.

    Decodes are the first rows of the batch, sorted from longest to shortest."""
    decode_tables: Ints
    """Block ids [decodes, width]. Shorter tables are padded by repeating their last block."""
    prompts: Spans
    """The prompts' chunks, one run per chunk."""
    tiles: Spans
    """The tokens of `prompts`, split into runs of at most MAX_TILE_ROWS tokens."""
    prompt_tables: Ints
    """Block ids [prompts, width], padded like `decode_tables`."""


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """Indices that tell each row where to find the inputs of its convolution.

    The indices select columns of a source matrix. The first T columns are a layer's inputs, one for
    each row of the step. They are followed by the states of the step's C chunks, in chunk order.
    The state of a chunk consists of the kernel - 1 input columns before its first row, oldest
    first.
    """

    taps: Ints
    """Indices [kernel, T]. If row i is at position p of its sequence, taps[j, i] is the sequence's
    column at position p - (kernel - 1 - j)."""
    tails: Ints
    """Indices [C, kernel - 1] of the columns that become the state after each chunk."""
    slots: Ints
    """Slot that holds the state before each chunk, or NO_SLOT if the chunk starts from zeros."""
    next_slots: Longs
    """Slot that receives the state after each chunk, or NO_SLOT for padding.

    The step never reads these slots.
    """


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step in the form that the model consumes: one flat batch of token rows."""

    num_tokens: int
    """Number of rows that hold tokens of the plan. All later rows are padding."""
    token_ids: Ints
    positions: Ints
    rows: PagedRows
    sampled: list[Chunk]
    """Chunks to sample from, in the plan's order.

    If a chunk is sampled at several of its tokens, it appears once per sampled token, truncated
    after that token."""
    sampled_rows: Ints
    """Row of the last token of each sampled chunk."""
    first_rows: dict[str, int]
    """Row of each chunk's first token, by request id."""
    conv: ConvPlan | None = None
    """Plan of the convolutions, or None if the model has no convolutions."""
    windowed: PagedRows | None = None
    """KV slots and blocks for sliding-window layers, or None if they are the same as in `rows`."""

    def paged(self, window: int) -> PagedRows:
        """Return the KV slots and blocks for layers with this window size (0 means no window)."""
        return self.rows if self.windowed is None or not window else self.windowed


PADDING = Chunk(
    request_id="",
    token_ids=[0],
    start=0,
    block_ids=[0],
    window_block_ids=[0],
    sampling=None,
    history=[],
    num_prompt_tokens=0,
    next_state_slot=NO_SLOT,
)
"""Decode that is added to pad a step to a fixed shape. It stores no KV and attends to no tokens."""


def build_batch(
    plan: StepPlan,
    block_tokens: int,
    bucket: Bucket = context_bucket,
    *,
    padded_decodes: Bucket | None = None,
    conv_kernel: int = 0,
    scratch_block: int | None = None,
    windowed: bool = False,
    tables: BlockTables | None = None,
) -> StepBatch:
    """Lay out the chunks of a step as one flat batch, decodes first.

    Args:
        plan: the step.
        block_tokens: tokens per KV block.
        bucket: rounds a number of blocks up to the width of a block table.
        padded_decodes: rounds up the number of decodes in a step without prompts, so that all steps
            in the same bucket have arrays of the same shapes. If None, no rows are added.
        conv_kernel: number of taps in the model's convolutions, or 0 if it has no convolutions.
        scratch_block: block for the KV of recomputed tokens, which is not in any sequence's block
            table. Only models with convolutions need this block.
        windowed: whether layers with sliding windows have separate blocks.
        tables: block tables from earlier steps, or None if there are none yet.
    """
    decodes = [chunk for chunk in plan.chunks if _is_decode(chunk)]
    prompts = [chunk for chunk in plan.chunks if not _is_decode(chunk)]
    decodes.sort(key=lambda chunk: chunk.start, reverse=True)

    num_padding = 0
    if padded_decodes is not None and not prompts:
        num_padding = padded_decodes(len(decodes)) - len(decodes)
    decodes += [PADDING] * num_padding
    layout = _Layout.of(decodes + prompts, len(decodes), num_padding)

    first_rows = {
        chunk.request_id: row
        for chunk, row in zip(layout.chunks, layout.first_rows.tolist(), strict=True)
    }
    sampled = plan.sampled_parts()
    last_rows = [first_rows[part.request_id] + len(part.token_ids) - 1 for part in sampled]
    tables = tables or BlockTables(len(layout.chunks))
    rows = _paged_rows(layout, block_tokens, bucket, scratch_block, tables)

    return StepBatch(
        num_tokens=len(layout.owners) - num_padding,
        token_ids=_flat([chunk.token_ids for chunk in layout.chunks], len(layout.owners)),
        positions=layout.positions,
        rows=rows,
        sampled=sampled,
        sampled_rows=np.array(last_rows, np.int32),
        first_rows=first_rows,
        conv=_conv_plan(layout, conv_kernel) if conv_kernel else None,
        windowed=_windowed_rows(layout, block_tokens, bucket, scratch_block) if windowed else None,
    )


def begun_blocks(plan: StepPlan, block_tokens: int) -> Iterator[int]:
    """Yield the ids of the blocks that the step starts to fill but leaves partly empty.

    The caller zeroes these blocks before the step, because attention also reads their unused slots.
    """
    for chunk in plan.chunks:
        last = (chunk.end - 1) // block_tokens
        if chunk.end % block_tokens and last * block_tokens >= chunk.first_stored:
            yield chunk.block_ids[last]
            if chunk.window_block_ids:
                yield chunk.window_block_ids[last]


def _is_decode(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 and not chunk.num_replayed


@dataclass(frozen=True, slots=True)
class _Layout:
    """The order of a step's chunks in its flat batch, and the chunk and position of each row."""

    chunks: list[Chunk]
    num_decodes: int
    num_padding: int
    starts: Ints
    """Number of tokens that precede each chunk in its sequence."""
    counts: Ints
    """Number of tokens in each chunk."""
    first_rows: Ints
    owners: Ints
    """Index of each row's chunk."""
    offsets: Ints
    """Position of each row in its chunk."""
    positions: Ints
    """Position of each row in its sequence."""

    @classmethod
    def of(cls, chunks: list[Chunk], num_decodes: int, num_padding: int) -> "_Layout":
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
        first_rows = np.cumsum(counts, dtype=np.int32) - counts
        owners = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
        offsets = np.arange(len(owners), dtype=np.int32) - first_rows[owners]
        positions = starts[owners] + offsets
        places = (starts, counts, first_rows, owners, offsets, positions)
        return cls(chunks, num_decodes, num_padding, *places)

    def windowed(self) -> "_Layout":
        """Return a copy of the layout with the block tables of the sliding-window layers."""
        chunks = [replace(chunk, block_ids=chunk.window_block_ids) for chunk in self.chunks]
        return dataclass_replace(self, chunks=chunks)


def _flat(lists: Sequence[Sequence[int]], count: int) -> Ints:
    return np.fromiter(chain.from_iterable(lists), np.int32, count)


def _windowed_rows(
    layout: _Layout, block_tokens: int, bucket: Bucket, scratch_block: int | None
) -> PagedRows:
    # These block lists are new objects in every step, so tables cannot be reused.
    tables = BlockTables(len(layout.chunks))
    return _paged_rows(layout.windowed(), block_tokens, bucket, scratch_block, tables)


def _paged_rows(
    layout: _Layout,
    block_tokens: int,
    bucket: Bucket,
    scratch_block: int | None,
    block_tables: BlockTables,
) -> PagedRows:
    decodes = layout.num_decodes
    num_blocks = -(-(layout.starts + layout.counts) // block_tokens)
    tables = _padded_tables(layout.chunks, num_blocks, bucket, block_tables)
    width = bucket(int(num_blocks[:decodes].max(initial=1)))

    lengths = layout.starts[:decodes] + 1
    lengths[decodes - layout.num_padding :] = 0
    prompts = Spans(
        first_rows=layout.first_rows[decodes:],
        counts=layout.counts[decodes:],
        earlier=layout.starts[decodes:],
        prompts=np.arange(len(layout.chunks) - decodes, dtype=np.int32),
    )
    return PagedRows(
        slots=_slots(layout, tables, block_tokens, scratch_block),
        lengths=lengths,
        decode_tables=np.ascontiguousarray(tables[:decodes, :width]),
        prompts=prompts,
        tiles=prompts.cut(MAX_TILE_ROWS),
        prompt_tables=tables[decodes:],
    )


def _padded_tables(
    chunks: Sequence[Chunk], num_blocks: Ints, bucket: Bucket, block_tables: BlockTables
) -> Ints:
    """Return the chunks' block ids [chunks, width], each table padded with its last block."""
    width = bucket(int(num_blocks.max(initial=1)))
    rows = np.array(block_tables.update(chunks), np.intp)
    # Padding reads the sequence's own blocks, so NaN of another sequence cannot reach it.
    columns = np.minimum(np.arange(width), num_blocks[:, None] - 1)
    tables: Ints = block_tables.table[rows[:, None], columns]
    return tables


def _slots(layout: _Layout, tables: Ints, block_tokens: int, scratch_block: int | None) -> Longs:
    blocks = tables[layout.owners, layout.positions // block_tokens].astype(np.int64)
    slots = blocks * block_tokens + layout.positions % block_tokens

    num_replayed = np.array([chunk.num_replayed for chunk in layout.chunks], np.int32)
    if num_replayed.any():
        assert scratch_block is not None, "no block for replayed tokens"
        replayed = layout.offsets < num_replayed[layout.owners]
        slots[replayed] = scratch_block * block_tokens + layout.offsets[replayed] % block_tokens

    slots[len(slots) - layout.num_padding :] = NO_SLOT
    return slots


def _conv_plan(layout: _Layout, kernel: int) -> ConvPlan:
    columns = kernel - 1
    num_rows = len(layout.owners)

    def index(chunk: Ints, place: Ints) -> Ints:
        """Return where the source matrix of `ConvPlan` holds columns of a chunk and its state.

        Columns are numbered from the first column of the state before the chunk. The chunk's own
        first row is therefore column kernel - 1.
        """
        in_state = num_rows + chunk * columns + place
        in_rows = layout.first_rows[chunk] + place - columns
        source: Ints = np.where(place < columns, in_state, in_rows)
        return source

    chunks = np.arange(len(layout.chunks), dtype=np.int32)[:, None]
    taps = np.arange(kernel, dtype=np.int32)[:, None]
    before = np.arange(columns, dtype=np.int32)
    slots = [NO_SLOT if chunk.state_slot is None else chunk.state_slot for chunk in layout.chunks]
    return ConvPlan(
        taps=index(layout.owners, layout.offsets + taps),
        tails=index(chunks, layout.counts[:, None] + before),
        slots=np.array(slots, np.int32),
        next_slots=np.array([chunk.next_state_slot for chunk in layout.chunks], np.int64),
    )


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length that are computed together, rows `start` to `end`."""

    start: int
    end: int
    padded_rows: int
    num_blocks: int
    """Number of blocks to gather for each row."""
    block_ids: Ints
    """Block tables [padded_rows, num_blocks]. Padding rows repeat the last row's table."""
    lengths: Ints
    """Context length of each row (padding rows too), including the row's own token."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive tokens of one prompt, rows `start` to `end` of the flat batch."""

    start: int
    end: int
    padded_rows: int
    earlier: int
    """Number of tokens that precede the tile in its sequence."""
    block_ids: Ints
    """Block ids of the context up to the tile's last row, with padding."""


def decode_groups(
    rows: PagedRows, block_tokens: int, max_gather_tokens: int, bucket: Bucket = context_bucket
) -> list[DecodeGroup]:
    """Split decodes, longest first, into groups that fit the workspace and need little padding."""
    buckets = [bucket(-(-length // block_tokens)) for length in rows.lengths.tolist()]
    max_blocks = max_gather_tokens // block_tokens
    groups = []
    start = 0
    while start < len(buckets):
        widest = buckets[start]
        most = max(1, max_blocks // widest)
        similar = start + _num_similar(buckets[start : start + most], block_tokens)
        attended, padded_rows = decode_rows(similar - start, most)
        end = start + attended
        row = np.minimum(np.arange(start, start + padded_rows), end - 1)
        tables = rows.decode_tables[row, :widest]
        groups.append(DecodeGroup(start, end, padded_rows, widest, tables, rows.lengths[row]))
        start = end
    return groups


def _num_similar(buckets: Sequence[int], block_tokens: int) -> int:
    """Return how many of the first rows can share a group without much padding.

    The first row always qualifies.
    """
    waste = 0
    for index, own in enumerate(buckets):
        # Padding to the row's own bucket is needed in any group, so it does not count.
        waste += (buckets[0] - own) * block_tokens
        if waste > GROUP_WASTE_TOKENS and index:
            return index
    return len(buckets)


def prefill_tiles(
    rows: PagedRows, block_tokens: int, bucket: Bucket = context_bucket
) -> list[PrefillTile]:
    """Split prompts into tiles small enough that all scores of a tile are computed at once."""
    spans = rows.prompts
    tiles = []
    columns = (spans.first_rows, spans.counts, spans.earlier)
    prompts = zip(rows.prompt_tables, *(each.tolist() for each in columns), strict=True)
    for table, row, tokens, start in prompts:
        size = tile_rows(bucket(-(-(start + tokens) // block_tokens)), block_tokens)
        for first in range(0, tokens, size):
            count = min(size, tokens - first)
            earlier = start + first
            num_blocks = bucket(-(-(earlier + count) // block_tokens))
            tiles.append(
                PrefillTile(
                    start=row + first,
                    end=row + first + count,
                    padded_rows=tile_bucket(count),
                    earlier=earlier,
                    block_ids=table[:num_blocks],
                )
            )
    return tiles
