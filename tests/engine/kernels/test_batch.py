"""A plan as index arrays."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_engine.kernels.arena import MAX_TILE_ROWS, StepLimits, step_arena
from ullage_engine.kernels.batch import (
    NO_SLOT,
    Ints,
    Spans,
    StepBatch,
    begun_blocks,
    build_batch,
    decode_groups,
    prefill_tiles,
)
from ullage_engine.kernels.staging import Staging
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan

BLOCK = 16
MAX_LEN = 600
GATHER = 1024


def plan_of(shapes: Sequence[tuple[int, int, bool]]) -> StepPlan:
    """Chunks of (start, tokens, sampled) in blocks of their own."""
    chunks = []
    next_block = 0
    for number, (start, tokens, sampled) in enumerate(shapes):
        blocks = -(-(start + tokens) // BLOCK)
        chunks.append(
            Chunk(
                request_id=f"r{number}",
                token_ids=[1000 * number + start + index for index in range(tokens)],
                start=start,
                block_ids=list(range(next_block, next_block + blocks))[::-1],
                sampling=SamplingParams() if sampled else None,
                history=[0] * (start + tokens),
                num_prompt_tokens=1,
            )
        )
        next_block += blocks
    return StepPlan(chunks)


shapes = st.lists(
    st.tuples(st.integers(0, 290), st.one_of(st.just(1), st.integers(1, 300)), st.booleans()),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_every_token_is_in_one_row_and_one_slot(drawn: list[tuple[int, int, bool]]) -> None:
    plan = plan_of(drawn)
    batch = build_batch(plan, BLOCK)
    slots = batch.rows.slots.tolist()
    placed = dict(
        zip(
            batch.token_ids.tolist(), zip(batch.positions.tolist(), slots, strict=True), strict=True
        )
    )
    assert len(batch.token_ids) == batch.num_tokens == plan.num_tokens
    assert len(set(slots)) == plan.num_tokens
    for chunk in plan.chunks:
        for offset, token in enumerate(chunk.token_ids):
            position, slot = placed[token]
            assert position == chunk.start + offset
            assert slot == chunk.block_ids[position // BLOCK] * BLOCK + position % BLOCK


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_every_row_is_attended_once_within_the_workspace(
    drawn: list[tuple[int, int, bool]],
) -> None:
    batch = build_batch(plan_of(drawn), BLOCK)
    groups = decode_groups(batch.rows, BLOCK, GATHER)
    tiles = prefill_tiles(batch.rows, BLOCK)
    rows = [row for part in (*groups, *tiles) for row in range(part.start, part.end)]
    assert sorted(rows) == list(range(len(batch.token_ids)))
    for group in groups:
        assert group.block_ids.shape == (group.padded_rows, group.num_blocks)
        assert group.block_ids.size * BLOCK <= GATHER
        assert len(group.lengths) == group.padded_rows
        assert max(group.lengths) <= group.num_blocks * BLOCK
    for tile in tiles:
        assert len(tile.block_ids) * BLOCK <= GATHER
        assert tile.end - tile.start <= tile.padded_rows
        assert tile.earlier + tile.end - tile.start <= len(tile.block_ids) * BLOCK


def context_of(table: Ints, length: int) -> list[int]:
    return [table.tolist()[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)]


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_a_row_attends_to_the_slots_of_its_sequence_up_to_its_own(
    drawn: list[tuple[int, int, bool]],
) -> None:
    """However attention is cut: pages read in place, or gathered in groups and tiles."""
    plan = plan_of(drawn)
    batch = build_batch(plan, BLOCK)
    rows = batch.rows
    seen = {}
    for row, (table, length) in enumerate(zip(rows.decode_tables, rows.lengths, strict=True)):
        seen[row] = context_of(table, length)
    for first, count, earlier, prompt in zip(*span_columns(rows.tiles), strict=True):
        assert count <= MAX_TILE_ROWS
        for offset in range(count):
            table = rows.prompt_tables[prompt]
            assert first + offset not in seen
            seen[first + offset] = context_of(table, earlier + offset + 1)

    gathered = {}
    for group in decode_groups(rows, BLOCK, GATHER):
        for row in range(group.start, group.end):
            number = row - group.start
            gathered[row] = context_of(group.block_ids[number], group.lengths[number])
    for tile in prefill_tiles(rows, BLOCK):
        for row in range(tile.start, tile.end):
            length = tile.earlier + row - tile.start + 1
            gathered[row] = context_of(tile.block_ids, length)

    row_of = {token: row for row, token in enumerate(batch.token_ids.tolist())}
    wanted = {
        row_of[token]: [
            chunk.block_ids[at // BLOCK] * BLOCK + at % BLOCK for at in range(position + 1)
        ]
        for chunk in plan.chunks
        for position, token in enumerate(chunk.token_ids, chunk.start)
    }
    assert seen == wanted
    assert gathered == wanted


def span_columns(spans: Spans) -> list[list[int]]:
    return [
        each.tolist() for each in (spans.first_rows, spans.counts, spans.earlier, spans.prompts)
    ]


def test_windows_have_slots_and_tables_of_their_own() -> None:
    plan = plan_of([(40, 1, True), (30, 20, False)])
    other = [[70, 71, 72], [80, 81, 82, 83]]
    chunks = [
        replace(chunk, window_block_ids=blocks)
        for chunk, blocks in zip(plan.chunks, other, strict=True)
    ]
    batch = build_batch(StepPlan(chunks), BLOCK, windowed=True)
    assert batch.windowed is not None
    assert batch.paged(0) is batch.rows
    assert batch.paged(8) is batch.windowed
    slots = [72 * BLOCK + 8, *(81 * BLOCK + at for at in (14, 15)), *range(82 * BLOCK, 83 * BLOCK)]
    assert batch.windowed.slots.tolist() == [*slots, 83 * BLOCK, 83 * BLOCK + 1]
    assert batch.windowed.decode_tables[0, :3].tolist() == other[0]
    assert batch.windowed.prompt_tables[0, :4].tolist() == other[1]


def test_a_step_of_decodes_is_padded_to_its_bucket() -> None:
    """Padding stores nothing and attends to nothing, and a bucket has one set of shapes."""
    limits = StepLimits(64, 64, 4096, 1024, 4)
    shapes = []
    for count in (33, 40, 48):
        plan = plan_of([(16 * number, 1, True) for number in range(count)])
        batch = build_batch(plan, BLOCK, padded_decodes=limits.product_rows, conv_kernel=3)
        rows = batch.rows
        conv = batch.conv
        assert conv is not None
        assert batch.num_tokens == count
        assert rows.slots[count:].tolist() == [NO_SLOT] * (48 - count)
        assert rows.lengths[count:].tolist() == [0] * (48 - count)
        assert conv.slots[count:].tolist() == [NO_SLOT] * (48 - count)
        assert conv.next_slots[count:].tolist() == [NO_SLOT] * (48 - count)
        arrays = (batch.token_ids, batch.positions, rows.slots, rows.lengths, rows.decode_tables)
        shapes.append([each.shape for each in (*arrays, conv.taps, conv.tails, conv.slots)])
    assert shapes[0] == shapes[1] == shapes[2]


def test_a_prompt_keeps_its_step_unpadded() -> None:
    plan = plan_of([(5, 1, True)] * 33 + [(0, 2, True)])
    batch = build_batch(plan, BLOCK, padded_decodes=lambda rows: 48)
    assert batch.num_tokens == len(batch.token_ids) == 35


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([0, 3]), st.booleans())
def test_every_step_fits_the_place_of_its_indices(
    drawn: list[tuple[int, int, bool]], kernel: int, windowed: bool
) -> None:
    model = ModelConfig(
        architecture="lfm2", layers=(LayerSpec(mixer="conv"), LayerSpec(window=9)), hidden=16,
        num_heads=1, num_kv_heads=1, head_dim=16, intermediate=1, vocab=1, max_position=MAX_LEN,
        rope_theta=1e4, rms_eps=1e-5, tied=True, conv_kernel=kernel, conv_channels=16,
    )  # fmt: skip
    plan = plan_of(drawn)
    if windowed:
        plan = StepPlan([replace(each, window_block_ids=each.block_ids) for each in plan.chunks])
    # No larger than this step.
    limits = StepLimits(
        max_tokens=plan.num_tokens, max_rows=len(plan.chunks), gather_tokens=1, itemsize=4,
        max_model_len=max(chunk.end for chunk in plan.chunks), fused=True, windowed=windowed,
    )  # fmt: skip
    size = {each.name: each.num_elements for each in step_arena(model, limits).buffers}["indices"]
    batch = build_batch(
        plan, BLOCK, padded_decodes=limits.product_rows, conv_kernel=kernel, windowed=windowed
    )
    staging = Staging(torch.empty(4 * size, dtype=torch.uint8))
    staging.begin()
    sampled = np.zeros(limits.product_rows(len(plan.chunks)), np.int32)
    for array in (batch.token_ids, batch.positions, sampled):
        staging.put(array)
    for rows in (batch.rows, batch.windowed):
        if rows is not None:
            tiles = rows.tiles
            for array in (rows.slots, rows.lengths, rows.decode_tables, rows.prompt_tables):
                staging.put(array)
            for array in (tiles.first_rows, tiles.counts, tiles.earlier, tiles.prompts):
                staging.put(array)
    if batch.conv is not None:
        for array in (batch.conv.taps, batch.conv.tails, batch.conv.slots, batch.conv.next_slots):
            staging.put(array)
    staging.upload()


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_sampled_rows_are_last_tokens_in_the_plans_order(
    drawn: list[tuple[int, int, bool]],
) -> None:
    plan = plan_of(drawn)
    batch: StepBatch = build_batch(plan, BLOCK)
    wanted = [chunk for chunk in plan.chunks if chunk.sampling is not None]
    assert batch.sampled == wanted
    last = [batch.token_ids[row] for row in batch.sampled_rows]
    assert last == [chunk.token_ids[-1] for chunk in wanted]


@pytest.mark.parametrize(("length", "count"), [(250, 8), (520, 8), (1040, 7), (260, 28)])
def test_equal_lengths_share_a_group(length: int, count: int) -> None:
    batch = build_batch(plan_of([(length, 1, True)] * count), BLOCK)
    groups = decode_groups(batch.rows, BLOCK, 1 << 20)
    assert [(group.start, group.end) for group in groups] == [(0, count)]


def test_far_lengths_are_in_groups_of_their_own() -> None:
    batch = build_batch(plan_of([(20, 1, True), (590, 1, True)] * 3), BLOCK)
    assert len({group.num_blocks for group in decode_groups(batch.rows, BLOCK, 8192)}) == 2


@pytest.mark.parametrize(
    ("start", "tokens", "is_begun"),
    [
        (0, 1, True),
        (0, 16, False),  # a whole block has no room behind its end
        (0, 20, True),
        (15, 1, False),  # the last of a block
        (16, 1, True),
        (17, 1, False),  # the block was begun by a step before
        (20, 30, True),
    ],
)
def test_a_last_block_is_begun_where_it_is_left_with_room(
    start: int, tokens: int, is_begun: bool
) -> None:
    plan = plan_of([(start, tokens, True)])
    last = plan.chunks[0].block_ids[-1]
    assert list(begun_blocks(plan, BLOCK)) == ([last] if is_begun else [])


def test_tokens_that_are_tried_are_sampled_each_in_its_row() -> None:
    plan = plan_of([(40, 1, True), (10, 4, True)])
    tried = replace(plan.chunks[1], num_sampled=3)
    batch = build_batch(StepPlan([plan.chunks[0], tried]), 16)
    assert batch.sampled_rows.tolist() == [0, 2, 3, 4]
    assert [part.end for part in batch.sampled] == [41, 12, 13, 14]
    assert all(part.num_sampled == 1 for part in batch.sampled)
    assert batch.sampled[-1].token_ids == tried.token_ids
