"""What runs together, in which chunks, and how it ends."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ullage_testing.scheduler_bench import Bench

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.requests import TokenOutput
from ullage_engine.scheduler.batch_plan import MIN_DECODES, PromptCost, postponed_decodes

STOP = 7


def test_a_prompt_is_computed_in_chunks_then_decoded(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", 150, max_tokens=2))
    shapes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        shapes += bench.shape(plan)
        scheduler.commit(bench.sample(plan))
    assert shapes == [("a", 0, 64), ("a", 64, 64), ("a", 128, 22), ("a", 150, 1)]


def test_only_the_last_chunk_of_a_prompt_is_sampled(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", 100))
    first = scheduler.schedule().chunks[0]
    assert first.sampling is None
    assert len(first.block_ids) == 4
    scheduler.commit([])
    last = scheduler.schedule().chunks[0]
    assert last.sampling is not None
    assert len(last.block_ids) == 7
    assert len(last.history) == 100


def test_a_long_prompt_never_stalls_a_decode(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("short", 8, max_tokens=50))
    bench.step(scheduler)
    scheduler.submit(bench.make_request("long", 200))
    for start in (0, 64, 128):
        plan = scheduler.schedule()
        assert [chunk.request_id for chunk in plan.chunks] == ["short", "long"]
        assert plan.chunks[1].start == start
        scheduler.commit(bench.sample(plan))


def test_prompts_share_the_chunk_budget_of_a_step(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    for name in "abc":
        scheduler.submit(bench.make_request(name, 30))
    assert bench.shape(scheduler.schedule()) == [("a", 0, 30), ("b", 0, 30), ("c", 0, 4)]


def test_prompts_share_the_cost_of_a_step(bench: Any) -> None:
    """Behind 64 tokens one costs twice as much as the first."""
    scheduler = bench.make_scheduler(blocks=99, prompt_cost=PromptCost(64.0, step_budget=96.0))
    scheduler.submit(bench.make_request("a", 200))
    scheduler.submit(bench.make_request("b", 10))
    shapes = []
    for _ in range(4):
        plan = scheduler.schedule()
        shapes.append(bench.shape(plan))
        scheduler.commit(bench.sample(plan))
    # Sizes fall with depth, and what remains of the cost is the next prompt's.
    assert shapes[:3] == [[("a", 0, 64)], [("a", 64, 41)], [("a", 105, 33)]]
    assert shapes[3] == [("a", 138, 28), ("b", 0, 1)]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    even_context=st.floats(1.0, 1e4),
    step_budget=st.floats(0.5, 300.0),
    prompt_tokens=st.integers(1, 64),
)
def test_no_step_costs_more_than_it_may_and_every_prompt_ends(
    prompts: list[int], even_context: float, step_budget: float, prompt_tokens: int
) -> None:
    cost = PromptCost(even_context, step_budget)
    scheduler = Bench.make_scheduler(blocks=64, prompt_tokens=prompt_tokens, prompt_cost=cost)
    for number, length in enumerate(prompts):
        scheduler.submit(Bench.make_request(chr(97 + number), length, max_tokens=2))

    tokens: dict[str, int] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        # A prompt's last token by itself is computed like a decode.
        taken = [
            (chunk.start, len(chunk.token_ids))
            for chunk in plan.chunks
            if chunk.start < prompts[ord(chunk.request_id) - 97] - 1
        ]
        num_computed = sum(count for _, count in taken)
        assert num_computed <= prompt_tokens
        assert (
            sum(cost.of(*each) for each in taken) <= step_budget * (1 + 1e-9) or num_computed == 1
        )
        for output in scheduler.commit(Bench.sample(plan)):
            tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.token_ids)
        scheduler.check_integrity()
    assert list(tokens.values()) == [2] * len(prompts)


@given(
    start=st.integers(0, 10**6),
    most=st.integers(1, 4096),
    even_context=st.one_of(st.just(float("inf")), st.floats(0.5, 1e6)),
    budget=st.floats(0.0, 1e5),
)
def test_as_many_tokens_fit_as_cost_no_more(
    start: int, most: int, even_context: float, budget: float
) -> None:
    cost = PromptCost(even_context)
    count = cost.tokens_within(budget, start, most)
    assert 0 <= count <= most
    assert count == 0 or cost.of(start, count) <= budget * (1 + 1e-9)
    assert count == most or cost.of(start, count + 1) > budget * (1 - 1e-9)


def test_without_chunking_prompts_are_computed_whole(bench: Any) -> None:
    scheduler = bench.make_scheduler(prompt_tokens=512, is_chunked=False)
    scheduler.submit(bench.make_request("a", 300))
    scheduler.submit(bench.make_request("b", 300))
    assert bench.shape(scheduler.schedule()) == [("a", 0, 300)]
    scheduler.commit([])
    assert ("b", 0, 300) in bench.shape(scheduler.schedule())


def test_the_batch_is_bounded_and_refilled(bench: Any) -> None:
    scheduler = bench.make_scheduler(max_sequences=2)
    for name in "abc":
        scheduler.submit(bench.make_request(name, 8, max_tokens=3))
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (0, 3)
    bench.step(scheduler)
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (2, 1)
    assert {name: len(tokens) for name, tokens in bench.run(scheduler).items()} == {
        "a": 2,
        "b": 2,
        "c": 3,
    }


class Running(NamedTuple):
    """The part of a sequence that the cap of decodes reads."""

    request_id: str
    token_ids: range
    last_step: int


def picked(lengths: list[int], max_tokens: int, max_decodes: int = 64, window: int = 0) -> set[str]:
    profile = MemoryProfile(block_tokens=16, groups=(CacheGroup(10, window_tokens=window),))
    running = [Running(str(at), range(length), at) for at, length in enumerate(lengths)]
    read_bytes = profile.decode_read_bytes
    postponed = postponed_decodes(running, max_decodes, 10 * max_tokens, read_bytes)
    return {each.request_id for each in running} - postponed


def test_decodes_read_no_more_context_together_than_their_budget() -> None:
    assert len(picked([100] * 20, max_tokens=1200)) == 12
    assert picked([100] * 20, max_tokens=1200) == {str(at) for at in range(12)}
    assert len(picked([100] * 20, max_tokens=2000)) == 20


def test_a_step_never_decodes_few_of_many_sequences() -> None:
    # Reading the weights for one of them costs about as much as for eight.
    assert len(picked([8192] * 32, max_tokens=8192)) == MIN_DECODES
    assert len(picked([8190] + [200] * 15, max_tokens=8192)) == MIN_DECODES
    assert len(picked([8190], max_tokens=10)) == 1


def test_decodes_are_charged_for_the_window_that_they_read() -> None:
    assert len(picked([5000] * 20, max_tokens=2560, window=128)) == 20


def test_a_step_decodes_no_more_sequences_than_it_may() -> None:
    assert len(picked([10] * 20, max_tokens=10_000, max_decodes=5)) == 5


def test_decodes_over_the_cap_take_turns(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=400, max_sequences=12, decode_tokens=10)
    names = [str(number) for number in range(12)]
    for name in names:
        scheduler.submit(bench.make_request(name, 40, max_tokens=30))
    steps = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        decodes = {chunk.request_id for chunk in plan.chunks if chunk.start >= 40}
        steps.append(decodes)
        scheduler.commit(bench.sample(plan))
    # By then all prompts are computed.
    assert {len(step) for step in steps[12:16]} == {MIN_DECODES}
    assert set.union(*steps[12:16]) == set(names)


def test_higher_priority_starts_first(bench: Any) -> None:
    scheduler = bench.make_scheduler(max_sequences=1)
    scheduler.submit(bench.make_request("normal", 8))
    scheduler.submit(bench.make_request("urgent", 8, priority=5))
    assert scheduler.schedule().chunks[0].request_id == "urgent"


def test_a_stop_token_ends_it_and_is_part_of_the_output(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", 8, stop=[STOP]))
    assert bench.step(scheduler)[0].finish == ""
    (output,) = bench.step(scheduler, token=STOP)
    assert (output.token_ids, output.finish) == ([STOP], "stop")
    assert not scheduler.has_work
    assert scheduler.stats().kv_free_bytes == bench.make_profile(64).kv_pool_bytes


@pytest.mark.parametrize(("prompt", "max_tokens", "produced"), [(8, 5, 5), (500, 400, 12)])
def test_max_tokens_or_the_models_length_ends_it(
    bench: Any, prompt: int, max_tokens: int, produced: int
) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", prompt, max_tokens=max_tokens))
    assert len(bench.run(scheduler)["a"]) == produced


def test_a_full_pool_ends_the_only_sequence_like_the_models_length(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=4, expected=8)
    scheduler.submit(bench.make_request("a", 40, max_tokens=400))
    outputs: list[TokenOutput] = []
    while scheduler.has_work:
        outputs += bench.step(scheduler)
    assert (len(outputs), outputs[-1].finish) == (24, "length")
    assert scheduler.stats().num_preemptions == 0


def test_a_cancelled_request_frees_its_memory_at_once(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", 100))
    plan = scheduler.schedule()
    scheduler.cancel("a")
    assert (
        scheduler.stats().kv_free_bytes
        == scheduler.stats().headroom_bytes
        == bench.make_profile(64).kv_pool_bytes
    )
    assert scheduler.commit(bench.sample(plan)) == []
    scheduler.cancel("a")
    scheduler.check_integrity()


def test_logprobs_are_reported_only_when_asked_for(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("with", 8, top_logprobs=1))
    scheduler.submit(bench.make_request("without", 8))
    reported = {output.request_id: output.logprobs for output in bench.step(scheduler)}
    assert reported["without"] is None
    assert reported["with"] is not None
    assert (reported["with"][0].logprob, reported["with"][0].top_ids) == (-0.5, [2])
