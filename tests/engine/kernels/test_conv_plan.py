"""Which columns a step's convolutions read, and where replayed tokens store their KV."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.batch import NO_SLOT, StepBatch, begun_blocks, build_batch
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan

BLOCK = 16
SCRATCH = 900


class Shape(NamedTuple):
    start: int
    tokens: int
    replayed: int


def make_shape(start: int, tokens: int, replayed: int) -> Shape:
    return Shape(start, tokens, replayed % (tokens + 1))


def plan_of(shapes: Sequence[Shape]) -> StepPlan:
    """Chunks in blocks of their own; token ids are 1000 * chunk + position."""
    chunks = []
    next_block = 0
    for number, (start, tokens, replayed) in enumerate(shapes):
        blocks = -(-(start + tokens) // BLOCK)
        chunks.append(
            Chunk(
                request_id=f"r{number}",
                token_ids=[1000 * number + start + index for index in range(tokens)],
                start=start,
                block_ids=list(range(next_block, next_block + blocks)),
                sampling=None if replayed == tokens else SamplingParams(),
                history=[],
                num_prompt_tokens=1,
                num_replayed=replayed,
                state_slot=None if replayed or not start else 3 * number,
                next_state_slot=3 * number + 1,
            )
        )
        next_block += blocks
    return StepPlan(chunks)


shapes = st.lists(
    st.builds(
        make_shape,
        st.integers(0, 50),
        st.one_of(st.just(1), st.integers(1, 60)),
        st.one_of(st.just(0), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=8,
)
kernels = st.integers(2, 5)


def build(plan: StepPlan, kernel: int) -> StepBatch:
    return build_batch(plan, BLOCK, conv_kernel=kernel, scratch_block=SCRATCH)


@settings(max_examples=50, deadline=None)
@given(shapes, kernels)
def test_taps_and_tails_are_the_columns_of_the_sequence_itself(
    drawn: list[Shape], kernel: int
) -> None:
    plan = plan_of(drawn)
    batch = build(plan, kernel)
    assert batch.conv is not None
    token_ids = batch.token_ids.tolist()
    in_row_order = sorted(plan.chunks, key=lambda each: token_ids.index(each.token_ids[0]))
    source = list(token_ids)
    for chunk in in_row_order:
        source += [chunk.token_ids[0] - back for back in range(kernel - 1, 0, -1)]
    for tap, rows in enumerate(batch.conv.taps):
        behind = kernel - 1 - tap
        assert [source[row] for row in rows] == [token - behind for token in token_ids]
    tails = [
        chunk.token_ids[-1] - back for chunk in in_row_order for back in range(kernel - 2, -1, -1)
    ]
    assert [source[row] for row in batch.conv.tails.ravel()] == tails
    assert batch.conv.next_slots.tolist() == [chunk.next_state_slot for chunk in in_row_order]
    slots = [NO_SLOT if chunk.state_slot is None else chunk.state_slot for chunk in in_row_order]
    assert batch.conv.slots.tolist() == slots


@settings(max_examples=50, deadline=None)
@given(shapes)
def test_replayed_tokens_store_nothing_in_a_block_of_a_sequence(drawn: list[Shape]) -> None:
    plan = plan_of(drawn)
    batch = build(plan, 3)
    slot_of = dict(zip(batch.token_ids.tolist(), batch.rows.slots.tolist(), strict=True))
    begun = list(begun_blocks(plan, BLOCK))
    for chunk in plan.chunks:
        for at, token in enumerate(chunk.token_ids, chunk.start):
            if at < chunk.first_stored:
                assert slot_of[token] // BLOCK == SCRATCH
            else:
                assert slot_of[token] == chunk.block_ids[at // BLOCK] * BLOCK + at % BLOCK
        # A block that holds tokens already is never cleared.
        holding = chunk.block_ids[: -(-chunk.first_stored // BLOCK)]
        assert not set(begun) & set(holding)


def test_a_replayed_token_is_never_a_decode() -> None:
    batch = build(plan_of([Shape(20, 1, 1), Shape(20, 1, 0), Shape(9, 2, 1)]), 3)
    assert batch.rows.lengths.tolist() == [21]
    assert batch.rows.prompts.first_rows.tolist() == [1, 2]
    assert batch.token_ids.tolist() == [1020, 20, 2009, 2010]


def test_a_model_without_convolutions_has_no_plan_for_them() -> None:
    assert build_batch(plan_of([Shape(0, 4, 0)]), BLOCK).conv is None
