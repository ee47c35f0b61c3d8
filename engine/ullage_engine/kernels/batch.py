"""A step plan as index arrays: one flat batch of tokens, decodes first.

Pure arithmetic over lists; the runner turns the arrays into tensors once a step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ullage_engine.kernels.arena import context_bucket, decode_rows, tile_bucket, tile_rows
from ullage_engine.protocol.step_plan import Chunk, StepPlan

GROUP_WASTE_TOKENS = 1024
"""Padding, in tokens of context, worth one decode group fewer: a group's fixed cost of about 60 µs
a layer gathers and scores about that many tokens."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length, attended together: rows start to end of the flat batch."""

    start: int
    end: int
    padded_rows: int
    num_blocks: int
    """Blocks gathered for each row."""
    block_ids: list[int]
    """Block tables of all padded rows; shorter tables repeat their last block, padding the last
    row's."""
    lengths: list[int]
    """Context of each padded row, its own token included."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Rows start to end of the flat batch: consecutive tokens of one sequence."""

    start: int
    end: int
    padded_rows: int
    earlier: int
    """Tokens of the sequence before the first row's."""
    block_ids: list[int]
    """Blocks of the last row's context, and padding that repeats its last block."""


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """The inputs of each row's convolution, as indices into `source`.

    `source` is the T rows of a layer's input columns, then for each of the C chunks, in the order
    of their rows, its state: the kernel - 1 columns before its first row, oldest first.
    """

    taps: list[list[int]]
    """`kernel` lists of T indices: taps[j][i] is the column at the position of row i less
    kernel - 1 - j, of the same sequence."""
    tails: list[int]
    """Indices, C * (kernel - 1), of the state after each chunk."""
    slots: list[int]
    """Slot of the state before each chunk; any slot for those in `fresh`."""
    next_slots: list[int]
    """Slot of the state after each chunk; no slot that the step reads."""
    fresh: list[int]
    """Chunks, by index, that begin from zero state."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the KV of a step's rows goes, and what they attend to."""

    slots: list[int]
    decodes: list[DecodeGroup]
    prefills: list[PrefillTile]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything the model needs to know of a step."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    decodes: list[DecodeGroup]
    prefills: list[PrefillTile]
    sampled: list[Chunk]
    """Chunks to sample, in the plan's order; what is sampled behind several of its tokens is there
    as often, each time up to one of them."""
    sampled_rows: list[int]
    """Row of the last token of each sampled chunk."""
    conv: ConvPlan | None = None
    """Plan of the convolutions, for models that have them."""
    windowed: PagedRows | None = None
    """The rows' KV in layers with sliding windows, where these have blocks of their own."""

    def paged(self, window: int) -> PagedRows:
        """Returns the rows' KV in a layer with such a window; 0: none."""
        if window and self.windowed is not None:
            return self.windowed
        return PagedRows(self.slots, self.decodes, self.prefills)


Bucket = Callable[[int], int]
"""Blocks of context gathered for sequences of at most so many."""


def build_batch(
    plan: StepPlan,
    block_tokens: int,
    max_gather_tokens: int,
    bucket: Bucket = context_bucket,
    conv_kernel: int = 0,
    scratch_block: int | None = None,
    windowed: bool = False,
) -> StepBatch:
    """Orders the chunks so that every group of decodes is a run of rows.

    `conv_kernel`: taps of the model's convolutions, 0 without. `scratch_block`: where the KV of
    replayed tokens goes, in no sequence's table; only models with convolutions need one.
    `windowed`: layers with sliding windows have blocks of their own.
    """
    decodes = [chunk for chunk in plan.chunks if _is_decode(chunk)]
    prefills = [chunk for chunk in plan.chunks if not _is_decode(chunk)]
    decodes.sort(key=lambda chunk: chunk.start, reverse=True)
    ordered = decodes + prefills
    first_rows, row = {}, 0
    for chunk in ordered:
        first_rows[chunk.request_id] = row
        row += len(chunk.token_ids)
    sampled = plan.sampled_parts()

    def paged(decodes: list[Chunk], prefills: list[Chunk]) -> PagedRows:
        max_blocks = max_gather_tokens // block_tokens
        chunks = decodes + prefills
        return PagedRows(
            slots=[slot for each in chunks for slot in _slots(each, block_tokens, scratch_block)],
            decodes=_decode_groups(decodes, block_tokens, max_blocks, bucket),
            prefills=_prefill_tiles(prefills, len(decodes), block_tokens, bucket),
        )

    rows = paged(decodes, prefills)
    return StepBatch(
        token_ids=[token for chunk in ordered for token in chunk.token_ids],
        positions=[at for chunk in ordered for at in range(chunk.start, chunk.end)],
        slots=rows.slots,
        decodes=rows.decodes,
        prefills=rows.prefills,
        sampled=sampled,
        sampled_rows=[first_rows[each.request_id] + len(each.token_ids) - 1 for each in sampled],
        conv=_conv_plan(ordered, conv_kernel) if conv_kernel else None,
        windowed=paged(_windowed(decodes), _windowed(prefills)) if windowed else None,
    )


def _windowed(chunks: list[Chunk]) -> list[Chunk]:
    """Returns the chunks with the block tables of layers with sliding windows."""
    return [replace(chunk, block_ids=chunk.window_block_ids) for chunk in chunks]


def begun_blocks(plan: StepPlan, block_tokens: int) -> Iterator[int]:
    """Yields the blocks that the step begins to fill and leaves with room behind their last
    token."""
    for chunk in plan.chunks:
        last = (chunk.end - 1) // block_tokens
        if chunk.end % block_tokens and last * block_tokens >= chunk.first_stored:
            yield chunk.block_ids[last]
            if chunk.window_block_ids:
                yield chunk.window_block_ids[last]


def _is_decode(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 and not chunk.num_replayed


def _slots(chunk: Chunk, block_tokens: int, scratch_block: int | None) -> list[int]:
    assert scratch_block is not None or not chunk.num_replayed, "no block for replayed tokens"
    scratch, blocks = (scratch_block or 0) * block_tokens, chunk.block_ids
    replayed = [scratch + number % block_tokens for number in range(chunk.num_replayed)]
    stored = range(chunk.first_stored, chunk.end)
    return replayed + [
        blocks[at // block_tokens] * block_tokens + at % block_tokens for at in stored
    ]


def _conv_plan(chunks: Sequence[Chunk], kernel: int) -> ConvPlan:
    columns = kernel - 1
    taps: list[list[int]] = [[] for _ in range(kernel)]
    tails: list[int] = []
    row, state = 0, sum(len(chunk.token_ids) for chunk in chunks)
    for chunk in chunks:
        end = row + len(chunk.token_ids)
        # The columns that the chunk and its state are together, from the oldest on.
        column = [*range(state, state + columns), *range(row, end)]
        for tap, rows in enumerate(taps):
            rows += column[tap : tap + end - row]
        tails += column[len(column) - columns :]
        row, state = end, state + columns
    return ConvPlan(
        taps=taps,
        tails=tails,
        slots=[chunk.state_slot or 0 for chunk in chunks],
        next_slots=[chunk.next_state_slot for chunk in chunks],
        fresh=[index for index, chunk in enumerate(chunks) if chunk.state_slot is None],
    )


def _num_blocks(chunk: Chunk, block_tokens: int) -> int:
    return -(-chunk.end // block_tokens)


def _prefill_tiles(
    chunks: Sequence[Chunk], row: int, block_tokens: int, bucket: Bucket
) -> list[PrefillTile]:
    tiles = []
    for chunk in chunks:
        tokens = len(chunk.token_ids)
        size = tile_rows(bucket(_num_blocks(chunk, block_tokens)), block_tokens)
        for first in range(0, tokens, size):
            count = min(size, tokens - first)
            blocks = -(-(chunk.start + first + count) // block_tokens)
            table = _padded(chunk.block_ids[:blocks], bucket(blocks))
            start = row + first
            earlier = chunk.start + first
            tiles.append(PrefillTile(start, start + count, tile_bucket(count), earlier, table))
        row += tokens
    return tiles


def _decode_groups(
    chunks: Sequence[Chunk], block_tokens: int, max_blocks: int, bucket: Bucket
) -> list[DecodeGroup]:
    """Cuts decodes, longest first, into groups that fit the workspace and waste little."""
    groups, start = [], 0
    while start < len(chunks):
        widest = bucket(_num_blocks(chunks[start], block_tokens))
        similar, waste = start, 0
        while similar < len(chunks):
            # Padding to the row's own bucket is there in any group.
            own = bucket(_num_blocks(chunks[similar], block_tokens))
            waste += (widest - own) * block_tokens
            if waste > GROUP_WASTE_TOKENS and similar > start:
                break
            similar += 1
        rows, padded_rows = decode_rows(similar - start, max(1, max_blocks // widest))
        groups.append(
            _decode_group(chunks[start : start + rows], start, padded_rows, widest, block_tokens)
        )
        start += rows
    return groups


def _decode_group(
    chunks: Sequence[Chunk], start: int, padded_rows: int, num_blocks: int, block_tokens: int
) -> DecodeGroup:
    rows = [*chunks, *[chunks[-1]] * (padded_rows - len(chunks))]
    block_ids: list[int] = []
    for chunk in rows:
        own = chunk.block_ids[: _num_blocks(chunk, block_tokens)]
        block_ids += _padded(own, num_blocks)
    lengths = [chunk.start + 1 for chunk in rows]
    return DecodeGroup(start, start + len(chunks), padded_rows, num_blocks, block_ids, lengths)


def _padded(block_ids: list[int], num_blocks: int) -> list[int]:
    # Padding reads the sequence's own memory, so no other sequence's fault can reach it.
    return block_ids + block_ids[-1:] * (num_blocks - len(block_ids))
