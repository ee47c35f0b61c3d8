"""A step plan as index arrays: one flat batch of tokens, decodes first.

Pure arithmetic over lists; the runner turns the arrays into tensors once a step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.memory.rungs import block_rung, decode_rows, row_rung, tile_rows

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
    """Of every padded row; shorter tables repeat their last block, padding the last row's."""
    lengths: list[int]
    """Context of each padded row, its own token included."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive tokens of one sequence: rows start to end of the flat batch."""

    start: int
    end: int
    padded_rows: int
    earlier: int
    """Tokens of the sequence before the first row's."""
    block_ids: list[int]
    """Context of the last row, and padding that repeats its last block."""


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """Rows that the taps of short convolutions read."""

    taps: list[list[int]]
    tails: list[int]
    slots: list[int]
    fresh: list[int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything the model needs to know of a step."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    decodes: list[DecodeGroup]
    prefills: list[PrefillTile]
    sampled: list[Chunk]
    """Chunks to sample, in the plan's order."""
    sampled_rows: list[int]
    """Row of the last token of each of them."""
    conv: ConvPlan | None = None


Rung = Callable[[int], int]
"""Blocks of context gathered for sequences of at most so many."""


def build_batch(
    plan: StepPlan,
    block_tokens: int,
    max_gather_tokens: int,
    rung: Rung = block_rung,
    conv_kernel: int = 0,
) -> StepBatch:
    """Orders the chunks so that every group of decodes is a run of rows."""
    decodes = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1]
    prefills = [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]
    decodes.sort(key=lambda chunk: chunk.start, reverse=True)
    ordered = decodes + prefills
    last_rows, row = {}, 0
    for chunk in ordered:
        row += len(chunk.token_ids)
        last_rows[chunk.request_id] = row - 1
    sampled = [chunk for chunk in plan.chunks if chunk.sampling is not None]
    return StepBatch(
        token_ids=[token for chunk in ordered for token in chunk.token_ids],
        positions=[position for chunk in ordered for position in _positions(chunk)],
        slots=[slot for chunk in ordered for slot in _slots(chunk, block_tokens)],
        decodes=_decode_groups(decodes, block_tokens, max_gather_tokens // block_tokens, rung),
        prefills=_prefill_tiles(prefills, len(decodes), block_tokens, rung),
        sampled=sampled,
        sampled_rows=[last_rows[chunk.request_id] for chunk in sampled],
        conv=_conv_plan(ordered, conv_kernel) if conv_kernel else None,
    )


def _conv_plan(chunks: Sequence[Chunk], kernel: int) -> ConvPlan:
    columns, total = kernel - 1, sum(len(chunk.token_ids) for chunk in chunks)
    taps: list[list[int]] = [[] for _ in range(kernel)]
    tails: list[int] = []
    row = 0
    for index, chunk in enumerate(chunks):
        state, count = total + index * columns, len(chunk.token_ids)
        rows = [*range(state, state + columns), *range(row, row + count)]
        for tap, indices in enumerate(taps):
            indices += rows[tap : tap + count]
        tails += rows[-columns:]
        row += count
    fresh = [i for i, each in enumerate(chunks) if each.start == 0 or each.num_replayed]
    return ConvPlan(taps, tails, [chunk.state_slot for chunk in chunks], fresh)


def begun_blocks(plan: StepPlan, block_tokens: int) -> Iterator[int]:
    """Blocks that the step begins to fill and leaves with room behind their last token."""
    for chunk in plan.chunks:
        end = chunk.start + len(chunk.token_ids)
        last = (end - 1) // block_tokens
        if end % block_tokens and last * block_tokens >= chunk.start:
            yield chunk.block_ids[last]


def _positions(chunk: Chunk) -> range:
    return range(chunk.start, chunk.start + len(chunk.token_ids))


def _slots(chunk: Chunk, block_tokens: int) -> list[int]:
    blocks = chunk.block_ids
    return [
        blocks[position // block_tokens] * block_tokens + position % block_tokens
        for position in _positions(chunk)
    ]


def _num_blocks(chunk: Chunk, block_tokens: int) -> int:
    return -(-(chunk.start + len(chunk.token_ids)) // block_tokens)


def _prefill_tiles(
    chunks: Sequence[Chunk], row: int, block_tokens: int, rung: Rung
) -> list[PrefillTile]:
    tiles = []
    for chunk in chunks:
        tokens = len(chunk.token_ids)
        size = tile_rows(rung(_num_blocks(chunk, block_tokens)), block_tokens)
        for first in range(0, tokens, size):
            count = min(size, tokens - first)
            blocks = -(-(chunk.start + first + count) // block_tokens)
            table = _padded(chunk.block_ids[:blocks], rung(blocks))
            start = row + first
            earlier = chunk.start + first
            tiles.append(PrefillTile(start, start + count, row_rung(count), earlier, table))
        row += tokens
    return tiles


def _decode_groups(
    chunks: Sequence[Chunk], block_tokens: int, max_blocks: int, rung: Rung
) -> list[DecodeGroup]:
    """Cuts decodes, longest first, into groups that fit the workspace and waste little."""
    groups, start = [], 0
    while start < len(chunks):
        widest = rung(_num_blocks(chunks[start], block_tokens))
        similar, waste = start, 0
        while similar < len(chunks):
            waste += (widest - _num_blocks(chunks[similar], block_tokens)) * block_tokens
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
