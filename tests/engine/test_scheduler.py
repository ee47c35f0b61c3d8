"""Admission, batching and preemption, with a runner that invents tokens."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.core.pace import Pace
from ullage_engine.core.plan import SampledToken, StepPlan
from ullage_engine.core.request import EngineRequest, SamplingParams
from ullage_engine.core.scheduler import Scheduler, SchedulerLimits
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.predictor import (
    block_bytes,
    expected_length,
    num_blocks,
    sequence_bytes,
)
from ullage_engine.messages import CacheGroupSpec, Profile, Rejected, TokenOutput

STOP = 7


def make_profile(blocks: int) -> Profile:
    return Profile(
        block_tokens=16,
        groups=[CacheGroupSpec(bytes_per_token=10)],
        state_bytes_per_sequence=0,
        activation_bytes_per_token=1,
        sampler_bytes_per_sequence=1,
        prefill_chunk_tokens=64,
        kv_pool_bytes=blocks * 160,
    )


def make_scheduler(
    *,
    blocks: int = 64,
    max_model_len: int = 512,
    max_sequences: int = 8,
    prompt_tokens: int = 64,
    is_chunked: bool = True,
    decode_tokens: int = 8192,
    expected: int = 32,
) -> Scheduler:
    limits = SchedulerLimits(max_model_len, max_sequences, prompt_tokens, is_chunked, decode_tokens)
    estimate = ExpectedOutput(max_model_len, start=expected)
    return Scheduler(make_profile(blocks), limits, Pace(), estimate)


def make_request(
    name: str,
    prompt: int,
    max_tokens: int = 16,
    priority: int = 0,
    output: Iterable[int] = (),
    stop: Iterable[int] = (),
    top_logprobs: int | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        # A name's own tokens, so that only requests of one name share a prefix.
        token_ids=[1000 + int.from_bytes(name.encode())] * prompt + list(output),
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(top_logprobs=top_logprobs),
        stop_token_ids=list(stop),
        priority=priority,
    )


def sample(plan: StepPlan, token: int = 2) -> list[SampledToken]:
    return [
        SampledToken(chunk.request_id, token, -0.5, [token], [-0.5])
        for chunk in plan.chunks
        if chunk.sampling is not None
    ]


def step(scheduler: Scheduler, token: int = 2) -> list[TokenOutput]:
    outputs = scheduler.commit(sample(scheduler.schedule(), token))
    scheduler.check_integrity()
    return outputs


def run(scheduler: Scheduler, max_steps: int = 5000) -> dict[str, list[int]]:
    """Steps until nothing is left; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            return tokens
        for output in step(scheduler):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("it never ends")


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


# batching ----------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_then_decoded() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 150, max_tokens=2))
    shapes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        shapes += shape(plan)
        scheduler.commit(sample(plan))
    assert shapes == [("a", 0, 64), ("a", 64, 64), ("a", 128, 22), ("a", 150, 1)]


def test_only_the_last_chunk_of_a_prompt_is_sampled() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 100))
    first = scheduler.schedule().chunks[0]
    scheduler.commit([])
    last = scheduler.schedule().chunks[0]
    assert first.sampling is None and last.sampling is not None
    assert (len(first.block_ids), len(last.block_ids)) == (4, 7)
    assert len(last.history) == 100


def test_a_long_prompt_never_stalls_a_decode() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("short", 8, max_tokens=50))
    step(scheduler)
    scheduler.submit(make_request("long", 200))
    for start in (0, 64, 128):
        plan = scheduler.schedule()
        assert [chunk.request_id for chunk in plan.chunks] == ["short", "long"]
        assert plan.chunks[1].start == start
        scheduler.commit(sample(plan))


def test_prompts_share_the_chunk_budget_of_a_step() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.submit(make_request(name, 30))
    assert shape(scheduler.schedule()) == [("a", 0, 30), ("b", 0, 30), ("c", 0, 4)]


def test_without_chunking_prompts_are_computed_whole() -> None:
    scheduler = make_scheduler(prompt_tokens=512, is_chunked=False)
    scheduler.submit(make_request("a", 300))
    scheduler.submit(make_request("b", 300))
    assert shape(scheduler.schedule()) == [("a", 0, 300)]
    scheduler.commit([])
    assert ("b", 0, 300) in shape(scheduler.schedule())


def test_the_batch_is_bounded_and_refilled() -> None:
    scheduler = make_scheduler(max_sequences=2)
    for name in "abc":
        scheduler.submit(make_request(name, 8, max_tokens=3))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert {name: len(tokens) for name, tokens in run(scheduler).items()} == {
        "a": 2,
        "b": 2,
        "c": 3,
    }


def test_decodes_over_the_context_cap_take_turns() -> None:
    scheduler = make_scheduler(decode_tokens=100)
    for name in "abc":
        scheduler.submit(make_request(name, 40, max_tokens=6))
    steps = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        decodes = [chunk for chunk in plan.chunks if chunk.start >= 40]
        assert sum(len(chunk.history) for chunk in decodes) <= 100
        steps.append({chunk.request_id for chunk in decodes})
        scheduler.commit(sample(plan))
    assert set.union(*steps[1:4]) == {"a", "b", "c"}


def test_one_sequence_longer_than_the_context_cap_still_decodes() -> None:
    scheduler = make_scheduler(decode_tokens=10)
    scheduler.submit(make_request("a", 60, max_tokens=4))
    assert len(run(scheduler)["a"]) == 4


def test_higher_priority_starts_first() -> None:
    scheduler = make_scheduler(max_sequences=1)
    scheduler.submit(make_request("normal", 8))
    scheduler.submit(make_request("urgent", 8, priority=5))
    assert scheduler.schedule().chunks[0].request_id == "urgent"


# endings -----------------------------------------------------------------------------------------


def test_a_stop_token_ends_it_and_is_part_of_the_output() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 8, stop=[STOP]))
    assert step(scheduler)[0].finish == ""
    (output,) = step(scheduler, token=STOP)
    assert (output.token_ids, output.finish) == ([STOP], "stop")
    assert not scheduler.has_work
    assert scheduler.free_bytes == make_profile(64).kv_pool_bytes


@pytest.mark.parametrize(("prompt", "max_tokens", "produced"), [(8, 5, 5), (500, 400, 12)])
def test_max_tokens_or_the_models_length_ends_it(
    prompt: int, max_tokens: int, produced: int
) -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", prompt, max_tokens=max_tokens))
    assert len(run(scheduler)["a"]) == produced


def test_a_full_pool_ends_the_only_sequence_like_the_models_length() -> None:
    scheduler = make_scheduler(blocks=4, expected=8)
    scheduler.submit(make_request("a", 40, max_tokens=400))
    outputs: list[TokenOutput] = []
    while scheduler.has_work:
        outputs += step(scheduler)
    assert (len(outputs), outputs[-1].finish) == (24, "length")
    assert scheduler.num_preemptions == 0


def test_a_cancelled_request_frees_its_memory_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 100))
    plan = scheduler.schedule()
    scheduler.cancel("a")
    assert scheduler.free_bytes == scheduler.available_bytes == make_profile(64).kv_pool_bytes
    assert scheduler.commit(sample(plan)) == []
    scheduler.cancel("a")
    scheduler.check_integrity()


def test_logprobs_are_reported_only_when_asked_for() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("with", 8, top_logprobs=1))
    scheduler.submit(make_request("without", 8))
    reported = {output.request_id: output.logprobs for output in step(scheduler)}
    assert reported["without"] is None
    assert reported["with"] is not None
    assert (reported["with"][0].logprob, reported["with"][0].top_ids) == (-0.5, [2])


# admission ---------------------------------------------------------------------------------------


def refused(scheduler: Scheduler, request: EngineRequest) -> Rejected:
    answer = scheduler.submit(request)
    assert isinstance(answer, Rejected)
    scheduler.check_integrity()
    return answer


def test_what_exceeds_the_pool_can_never_fit() -> None:
    answer = refused(make_scheduler(blocks=8, expected=8), make_request("a", 128))
    assert answer.never
    assert (answer.needed_bytes, answer.available_bytes) == (9 * 160, 8 * 160)
    assert "more than the whole pool" in answer.message


@pytest.mark.parametrize("prompt", [512, 513, 4000])
def test_a_prompt_as_long_as_the_model_can_never_fit(prompt: int) -> None:
    answer = refused(make_scheduler(blocks=1000), make_request("a", prompt))
    assert answer.never and f"{prompt} tokens" in answer.message and "512" in answer.message


def test_an_empty_prompt_is_refused_even_when_resumed() -> None:
    scheduler = make_scheduler()
    assert refused(scheduler, make_request("a", 0)).never
    assert isinstance(scheduler.submit(make_request("a", 0), resumed=True), Rejected)


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 8, max_tokens=4))
    assert refused(scheduler, make_request("a", 8)).never
    assert len(run(scheduler)["a"]) == 4


def test_what_does_not_fit_now_gets_a_time_to_come_back() -> None:
    scheduler = make_scheduler(blocks=10)
    scheduler.submit(make_request("a", 100, max_tokens=32))
    answer = refused(scheduler, make_request("b", 20, max_tokens=16))
    assert not answer.never
    assert (answer.needed_bytes, answer.available_bytes) == (3 * 160, 1 * 160)
    assert 0.1 <= answer.retry_after_s <= 30
    run(scheduler)
    assert scheduler.submit(make_request("b", 20, max_tokens=16)) is None


def test_the_time_to_come_back_follows_the_measured_speed() -> None:
    waits = []
    for seconds in (0.01, 0.2):
        pace = Pace()
        pace.observe(seconds, num_decodes=1, num_prompt_tokens=0)
        limits = SchedulerLimits(512, 8, 64, True, 8192)
        scheduler = Scheduler(make_profile(10), limits, pace, ExpectedOutput(512, start=32))
        scheduler.submit(make_request("a", 40, max_tokens=32))
        step(scheduler)
        waits.append(refused(scheduler, make_request("b", 100, max_tokens=32)).retry_after_s)
    assert waits == pytest.approx([0.31, 6.2], rel=0.01)


def test_the_waiting_room_is_bounded() -> None:
    scheduler = make_scheduler(blocks=1000, max_sequences=2)
    answers = [scheduler.submit(make_request(str(number), 8)) for number in range(9)]
    assert answers[:8] == [None] * 8
    assert isinstance(answers[8], Rejected) and not answers[8].never


def test_promised_memory_is_committed_until_it_is_allocated() -> None:
    scheduler = make_scheduler(blocks=10)
    scheduler.submit(make_request("a", 100, max_tokens=20))
    assert (scheduler.free_bytes, scheduler.available_bytes) == (1600, 320)
    step(scheduler)
    assert (scheduler.free_bytes, scheduler.available_bytes) == (960, 320)


def test_releases_tell_what_comes_back_and_are_bounded() -> None:
    scheduler = make_scheduler(blocks=400, max_sequences=20)
    for number in range(40):
        scheduler.submit(make_request(str(number), 8, max_tokens=number + 1))
    releases = scheduler.releases()
    assert len(releases) == 32
    assert [release.after_s for release in releases] == sorted(r.after_s for r in releases)
    held = 400 * 160 - scheduler.available_bytes
    assert sum(release.num_bytes for release in releases) == held


@given(
    prompt=st.integers(1, 200),
    max_tokens=st.integers(1, 300),
    expected=st.integers(1, 300),
    produced=st.integers(0, 50),
)
@settings(max_examples=100, deadline=None)
def test_what_is_priced_is_what_is_allocated(
    prompt: int, max_tokens: int, expected: int, produced: int
) -> None:
    profile = make_profile(64)
    request = make_request("a", prompt, max_tokens, output=[2] * min(produced, max_tokens - 1))
    length = expected_length(request, expected, 512)
    assert num_blocks(profile, length) * block_bytes(profile) == sequence_bytes(profile, length)
    scheduler = make_scheduler(expected=expected)
    charged = expected_length(request, scheduler.expected_output_tokens, 512)
    assert scheduler.submit(request) is None
    assert scheduler.available_bytes == profile.kv_pool_bytes - sequence_bytes(profile, charged)
    while scheduler.has_work:
        plan = scheduler.schedule()
        (chunk,) = plan.chunks
        stored = chunk.start + len(chunk.token_ids)
        allocated = profile.kv_pool_bytes - scheduler.free_bytes
        assert allocated == sequence_bytes(profile, stored)
        scheduler.commit(sample(plan))


# preemption and resumption -----------------------------------------------------------------------


def test_an_estimate_too_short_preempts_the_newest_and_all_finish() -> None:
    scheduler = make_scheduler(blocks=12, expected=4)
    for name in "abc":
        assert scheduler.submit(make_request(name, 40, max_tokens=90)) is None
    lengths = {name: len(tokens) for name, tokens in run(scheduler).items()}
    assert lengths == {"a": 90, "b": 90, "c": 90}
    assert scheduler.num_preemptions > 0


def test_the_oldest_is_never_preempted() -> None:
    scheduler = make_scheduler(blocks=12, expected=4)
    for name in "abc":
        scheduler.submit(make_request(name, 40, max_tokens=90))
    preemptions = {}
    while scheduler.has_work:
        for output in step(scheduler):
            preemptions[output.request_id] = output.num_preemptions
    assert preemptions["a"] == 0
    assert sum(preemptions.values()) == scheduler.num_preemptions


def test_a_preempted_sequence_is_recomputed_with_its_output() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", 8))
    for token in (3, 4, 5):
        step(scheduler, token)
    assert scheduler.preempt_newest()
    scheduler.check_integrity()
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.start, chunk.token_ids) == (0, [1000 + ord("a")] * 8 + [3, 4, 5])
    assert (chunk.num_prompt_tokens, chunk.sampling is None) == (8, False)


def test_nothing_new_is_admitted_before_what_a_preempted_sequence_is_owed() -> None:
    scheduler = make_scheduler(blocks=12, expected=4)
    for name in "abc":
        scheduler.submit(make_request(name, 40, max_tokens=90))
    while not scheduler.num_preemptions:
        step(scheduler)
    assert not refused(scheduler, make_request("d", 40, max_tokens=90)).never


def test_a_resumed_request_goes_on_where_it_was() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 20, max_tokens=6, output=[3, 4])
    assert scheduler.submit(request) is None
    (chunk,) = scheduler.schedule().chunks
    assert (len(chunk.token_ids), chunk.num_prompt_tokens) == (22, 20)
    assert len(run(scheduler)["a"]) == 4


def test_a_resumed_request_with_nothing_left_is_answered_at_once() -> None:
    scheduler = make_scheduler()
    answer = scheduler.submit(make_request("a", 8, max_tokens=2, output=[3, 4]))
    assert answer == TokenOutput(request_id="a", token_ids=[], finish="length")
    assert not scheduler.has_work


def test_resumed_requests_are_never_refused_and_wait_for_memory() -> None:
    scheduler = make_scheduler(blocks=10)
    for number in range(12):
        request = make_request(str(number), 60, max_tokens=20)
        assert scheduler.submit(request, resumed=True) is None
        scheduler.check_integrity()
    assert {len(tokens) for tokens in run(scheduler).values()} == {20}


def test_answers_that_a_stop_string_ended_teach_the_estimate() -> None:
    scheduler = make_scheduler(expected=256)
    before = scheduler.expected_output_tokens
    for number in range(200):
        assert scheduler.submit(make_request(f"r{number}", 4, max_tokens=100)) is None
        scheduler.commit(sample(scheduler.schedule()))
        scheduler.cancel(f"r{number}", is_answered=number >= 100)
        if number == 99:
            assert scheduler.expected_output_tokens == before
    assert scheduler.expected_output_tokens < before


def test_long_answers_do_not_teach_an_engine_to_refuse_short_prompts_for_good() -> None:
    scheduler = make_scheduler(blocks=16, max_model_len=4096, expected=32)
    for number in range(20):
        request = make_request(f"r{number}", 30, max_tokens=2000)
        assert scheduler.submit(request) is None, number
        while scheduler.has_work:
            scheduler.commit(sample(scheduler.schedule()))
    assert scheduler.expected_output_tokens > 200
    assert scheduler.submit_group([make_request("a", 30, 900), make_request("b", 30, 900)]) == []
    while scheduler.has_work:
        scheduler.commit(sample(scheduler.schedule()))
    scheduler.check_integrity()


def test_more_samples_than_the_waiting_room_has_places_are_served_alone() -> None:
    scheduler = make_scheduler(max_sequences=1)
    requests = [
        msgspec.structs.replace(make_request("a", 20, 4), request_id=f"a{i}") for i in range(9)
    ]
    assert scheduler.submit_group(requests) == []
    late = scheduler.submit_group([make_request("b", 20, 4)])
    assert isinstance(late, Rejected) and not late.never
    while scheduler.has_work:
        scheduler.commit(sample(scheduler.schedule()))
