"""A step plan as index arrays: one flat batch of tokens, decodes first.

Pure arithmetic over whole arrays. What attends may read pages in place, or gather groups of decodes
and tiles of prompts; groups and tiles are cut here, too, from the same arrays.
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
"""Padding, in tokens of context, worth one decode group fewer: a group's fixed cost of about 60 µs
a layer gathers and scores about that many tokens."""

NO_SLOT = -1
"""Slot of what is read as zero, or written nowhere."""

Longs = npt.NDArray[np.int64]
"""Indices that torch takes as int64 alone: those of `index_copy_`."""

Bucket = Callable[[int], int]
"""A size, rounded up."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Runs of consecutive tokens, each of one prompt; an entry of each array for each run."""

    first_rows: Ints
    """Row of the first token in the flat batch."""
    counts: Ints
    """Tokens."""
    earlier: Ints
    """Tokens of the sequence before the first one."""
    prompts: Ints
    """Row of `PagedRows.prompt_tables`."""

    def cut(self, size: int) -> "Spans":
        """Return the same tokens in runs of at most `size`."""
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
    """Where the KV of a step's rows goes, and what they attend to."""

    slots: Longs
    """Slot of each row, NO_SLOT for padding."""
    lengths: Ints
    """Context of each decode, its own token included; 0 for padding. Decodes are the first rows,
    the longest first."""
    decode_tables: Ints
    """Block ids [decodes, width]; a table that ends earlier repeats its last block."""
    prompts: Spans
    """Chunks that are no decodes, whole."""
    tiles: Spans
    """The same in tiles of at most MAX_TILE_ROWS."""
    prompt_tables: Ints
    """Block ids [prompts, width], like those of decodes."""


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """The inputs of each row's convolution, as indices into `source`.

    `source` is the T rows of a layer's input columns, then for each of the C chunks, in the order
    of their rows, its state: the kernel - 1 columns before its first row, oldest first.
    """

    taps: Ints
    """Indices [kernel, T]: taps[j, i] is the column at the position of row i less kernel - 1 - j,
    of the same sequence."""
    tails: Ints
    """Indices [C, kernel - 1] of the state after each chunk."""
    slots: Ints
    """Slot of the state before each chunk; NO_SLOT: it begins from zero state."""
    next_slots: Longs
    """Slot of the state after each chunk; none that the step reads, and NO_SLOT for padding."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything the model needs to know of a step."""

    num_tokens: int
    """Rows that are tokens of the plan; those behind them are padding."""
    token_ids: Ints
    positions: Ints
    rows: PagedRows
    sampled: list[Chunk]
    """Chunks to sample, in the plan's order; what is sampled behind several of its tokens is there
    as often, each time up to one of them."""
    sampled_rows: Ints
    """Row of the last token of each sampled chunk."""
    conv: ConvPlan | None = None
    """Plan of the convolutions, for models that have them."""
    windowed: PagedRows | None = None
    """The rows' KV in layers with sliding windows, where these have blocks of their own."""

    def paged(self, window: int) -> PagedRows:
        """Return the rows' KV in a layer with such a window; 0: none."""
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
"""A decode that stores nothing and attends to nothing."""


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
    """Lay out the chunks of a step, decodes first.

    Args:
        plan: the step.
        block_tokens: tokens of a KV block.
        bucket: blocks of context attended for sequences of at most so many.
        padded_decodes: rows of a step of nothing but so many decodes. Its arrays then have the same
            shapes for all steps of a bucket. None: no rows of padding.
        conv_kernel: taps of the model's convolutions, 0 without.
        scratch_block: where the KV of replayed tokens goes, in no sequence's table; only models
            with convolutions need one.
        windowed: layers with sliding windows have blocks of their own.
        tables: block tables of the steps before; None: there were none.
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
        conv=_conv_plan(layout, conv_kernel) if conv_kernel else None,
        windowed=_windowed_rows(layout, block_tokens, bucket, scratch_block) if windowed else None,
    )


def begun_blocks(plan: StepPlan, block_tokens: int) -> Iterator[int]:
    """Yield the blocks that the step begins to fill and leaves with room behind their last
    token.
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
    """The chunks in the order of their rows, and every row's place in its chunk."""

    chunks: list[Chunk]
    num_decodes: int
    num_padding: int
    starts: Ints
    """Tokens before each chunk's first."""
    counts: Ints
    """Tokens of each chunk."""
    first_rows: Ints
    owners: Ints
    """Chunk of each row."""
    offsets: Ints
    """Place of each row in its chunk."""
    positions: Ints
    """Place of each row in its sequence."""

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
        """Return the same with the block tables of layers with sliding windows."""
        chunks = [replace(chunk, block_ids=chunk.window_block_ids) for chunk in self.chunks]
        return dataclass_replace(self, chunks=chunks)


def _flat(lists: Sequence[Sequence[int]], count: int) -> Ints:
    return np.fromiter(chain.from_iterable(lists), np.int32, count)


def _windowed_rows(
    layout: _Layout, block_tokens: int, bucket: Bucket, scratch_block: int | None
) -> PagedRows:
    # Their lists are made for each step, so no table could be kept.
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
    """Return the chunks' block ids [chunks, width]; padding repeats a sequence's last block."""
    width = bucket(int(num_blocks.max(initial=1)))
    rows = np.array(block_tables.update(chunks), np.intp)
    # Padding reads the sequence's own memory, so no other sequence's fault can reach it.
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
        """Where in `source` a chunk's column is: its state's come first, then those of its rows."""
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
    """Decodes of similar length, attended together: rows start to end of the flat batch."""

    start: int
    end: int
    padded_rows: int
    num_blocks: int
    """Blocks gathered for each row."""
    block_ids: Ints
    """Block tables [padded_rows, num_blocks]; padding repeats the last row's."""
    lengths: Ints
    """Context of each padded row, its own token included."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Rows start to end of the flat batch: consecutive tokens of one sequence."""

    start: int
    end: int
    padded_rows: int
    earlier: int
    """Tokens of the sequence before the first row's."""
    block_ids: Ints
    """Blocks of the last row's context, and padding."""


def decode_groups(
    rows: PagedRows, block_tokens: int, max_gather_tokens: int, bucket: Bucket = context_bucket
) -> list[DecodeGroup]:
    """Cut decodes, longest first, into groups that fit the workspace and waste little."""
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
    """Count the leading rows of blocks that waste little in one group, at least one."""
    waste = 0
    for index, own in enumerate(buckets):
        # Padding to the row's own bucket is there in any group.
        waste += (buckets[0] - own) * block_tokens
        if waste > GROUP_WASTE_TOKENS and index:
            return index
    return len(buckets)


def prefill_tiles(
    rows: PagedRows, block_tokens: int, bucket: Bucket = context_bucket
) -> list[PrefillTile]:
    """Cut prompts into tiles whose scores are computed at once."""
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
