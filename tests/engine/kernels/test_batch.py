"""A plan as index arrays."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_engine.kernels.batch import StepBatch, begun_blocks, build_batch
from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan

BLOCK = 16
MAX_LEN = 600
GATHER = 1024


def plan_of(shapes: Sequence[tuple[int, int, bool]]) -> StepPlan:
    """Chunks of (start, tokens, sampled) in blocks of their own."""
    chunks, next_block = [], 0
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
    batch = build_batch(plan, BLOCK, GATHER)
    placed = dict(zip(batch.token_ids, zip(batch.positions, batch.slots, strict=True), strict=True))
    assert len(batch.token_ids) == plan.num_tokens
    assert len(set(batch.slots)) == plan.num_tokens
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
    batch = build_batch(plan_of(drawn), BLOCK, GATHER)
    rows = [
        row for part in (*batch.decodes, *batch.prefills) for row in range(part.start, part.end)
    ]
    assert sorted(rows) == list(range(len(batch.token_ids)))
    for group in batch.decodes:
        assert len(group.block_ids) == group.padded_rows * group.num_blocks
        assert len(group.block_ids) * BLOCK <= GATHER
        assert len(group.lengths) == group.padded_rows
        assert max(group.lengths) <= group.num_blocks * BLOCK
    for tile in batch.prefills:
        assert len(tile.block_ids) * BLOCK <= GATHER
        assert tile.end - tile.start <= tile.padded_rows
        assert tile.earlier + tile.end - tile.start <= len(tile.block_ids) * BLOCK


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_sampled_rows_are_last_tokens_in_the_plans_order(
    drawn: list[tuple[int, int, bool]],
) -> None:
    plan = plan_of(drawn)
    batch: StepBatch = build_batch(plan, BLOCK, GATHER)
    wanted = [chunk for chunk in plan.chunks if chunk.sampling is not None]
    assert batch.sampled == wanted
    last = [batch.token_ids[row] for row in batch.sampled_rows]
    assert last == [chunk.token_ids[-1] for chunk in wanted]


@pytest.mark.parametrize(("length", "count"), [(250, 8), (520, 8), (1040, 7), (260, 28)])
def test_equal_lengths_share_a_group(length: int, count: int) -> None:
    batch = build_batch(plan_of([(length, 1, True)] * count), BLOCK, 1 << 20)
    assert [(group.start, group.end) for group in batch.decodes] == [(0, count)]


def test_far_lengths_are_in_groups_of_their_own() -> None:
    batch = build_batch(plan_of([(20, 1, True), (590, 1, True)] * 3), BLOCK, 8192)
    assert len({group.num_blocks for group in batch.decodes}) == 2


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
    batch = build_batch(StepPlan([plan.chunks[0], tried]), 16, 1024)
    assert batch.sampled_rows == [0, 2, 3, 4]
    assert [part.end for part in batch.sampled] == [41, 12, 13, 14]
    assert all(part.num_sampled == 1 for part in batch.sampled)
    assert batch.sampled[-1].token_ids == tried.token_ids
