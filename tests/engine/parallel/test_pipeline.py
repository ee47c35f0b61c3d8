"""Micro-batches: every chunk once, about equally many tokens, the same on every rank."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.parallel.pipeline import MIN_BATCH_TOKENS, in_plan_order, micro_batches
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, Moves, SampledToken, StepPlan


def plan_of(sizes: list[int]) -> StepPlan:
    chunks = [
        Chunk(
            request_id=str(index),
            token_ids=[7] * size,
            start=0,
            block_ids=[0],
            sampling=SamplingParams() if size < 5 else None,
            history=[],
            num_prompt_tokens=0,
        )
        for index, size in enumerate(sizes)
    ]
    return StepPlan(chunks, Moves(copy=[(1, 2)]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 20))
def test_every_chunk_is_in_one_micro_batch(sizes: list[int], most: int, least: int) -> None:
    plan = plan_of(sizes)
    parts = micro_batches(plan, most, least)
    assert parts == micro_batches(plan, most, least)
    ids = [chunk.request_id for part in parts for chunk in part.chunks]
    assert sorted(ids) == sorted(chunk.request_id for chunk in plan.chunks)
    assert 1 <= len(parts) <= most
    assert all(part.chunks and not part.moves for part in parts)
    # Each goes to the emptiest, so no two differ by more than the largest chunk.
    loads = [part.num_tokens for part in parts]
    assert max(loads) - min(loads) <= max(sizes)
    assert len(parts) == 1 or sum(sizes) // len(parts) >= least


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 20))
def test_split_chunks_come_whole_and_in_order_to_even_micro_batches(
    sizes: list[int], most: int, least: int
) -> None:
    plan = plan_of(sizes)
    parts = micro_batches(plan, most, least, splits_chunks=True)
    assert parts == micro_batches(plan, most, least, splits_chunks=True)
    pieces = [chunk for part in parts for chunk in part.chunks]
    for chunk in plan.chunks:
        own = [piece for piece in pieces if piece.request_id == chunk.request_id]
        assert [token for piece in own for token in piece.token_ids] == chunk.token_ids
        ends = [piece.end for piece in own]
        assert [piece.start for piece in own] == [chunk.start, *ends[:-1]]
        assert [piece.sampling for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].sampling == chunk.sampling
    for part in parts:
        ids = [chunk.request_id for chunk in part.chunks]
        assert len(set(ids)) == len(ids), "a sequence twice in one micro-batch"
    assert len(parts) == max(1, min(most, sum(sizes), sum(sizes) // least))
    loads = [part.num_tokens for part in parts]
    assert max(loads) - min(loads) <= 1 or sizes.count(1) > min(loads)


def test_a_lone_prompt_chunk_fills_the_pipeline() -> None:
    """512 tokens, the default chunk, are as many micro-batches as there may be on a processor, and
    four on a GPU; with them go 64 decodes."""
    for sizes in ([512], [1] * 64 + [512], [1] * 8 + [256, 256]):
        plan = plan_of(sizes)
        counts = {
            device: len(micro_batches(plan, 6, least, splits_chunks=True))
            for device, least in MIN_BATCH_TOKENS.items()
        }
        assert counts == {"cpu": 6, "cuda": 4}
    assert len(micro_batches(plan_of([512]), 6, 8)) == 1


def test_few_tokens_are_not_cut_up() -> None:
    assert len(micro_batches(plan_of([1] * 15), 6, 8)) == 1
    assert len(micro_batches(plan_of([1] * 16), 6, 8)) == 2
    assert len(micro_batches(plan_of([1] * 64), 6, 8)) == 6


def test_tokens_come_back_in_the_order_of_the_plan() -> None:
    plan = plan_of([1, 9, 2, 4])
    tokens = [SampledToken(name, int(name), 0.0, [], []) for name in ("3", "0", "2")]
    assert [token.token_id for token in in_plan_order(plan, tokens)] == [0, 2, 3]
