"""Who is let in, and what the others are told."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.request_cost import MemoryProfile, request_blocks
from ullage_engine.kv_cache.block_pool import BlockPool
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits


def sequence_bytes(profile: MemoryProfile, num_tokens: int) -> int:
    """Of a sequence that shares nothing."""
    return request_blocks(profile, 0, num_tokens) * profile.block_bytes


def refused(scheduler: Scheduler, request: EngineRequest) -> Rejected:
    answer = scheduler.submit(request)
    assert isinstance(answer, Rejected)
    scheduler.check_integrity()
    return answer


def test_what_exceeds_the_pool_can_never_fit(bench: Any) -> None:
    answer = refused(bench.make_scheduler(blocks=8, expected=8), bench.make_request("a", 128))
    assert answer.never
    assert (answer.needed_bytes, answer.available_bytes) == (9 * 160, 8 * 160)
    assert "more than the whole pool" in answer.message


@pytest.mark.parametrize("prompt", [512, 513, 4000])
def test_a_prompt_as_long_as_the_model_can_never_fit(bench: Any, prompt: int) -> None:
    answer = refused(bench.make_scheduler(blocks=1000), bench.make_request("a", prompt))
    assert answer.never
    assert f"{prompt} tokens" in answer.message
    assert "512" in answer.message


def test_an_empty_prompt_is_refused_even_when_resumed(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    assert refused(scheduler, bench.make_request("a", 0)).never
    assert isinstance(scheduler.submit(bench.make_request("a", 0), resumed=True), Rejected)


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", 8, max_tokens=4))
    assert refused(scheduler, bench.make_request("a", 8)).never
    assert len(bench.run(scheduler)["a"]) == 4


def test_what_does_not_fit_now_gets_a_time_to_come_back(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=10)
    scheduler.submit(bench.make_request("a", 100, max_tokens=32))
    answer = refused(scheduler, bench.make_request("b", 20, max_tokens=16))
    assert not answer.never
    assert (answer.needed_bytes, answer.available_bytes) == (3 * 160, 1 * 160)
    assert 0.1 <= answer.retry_after_s <= 30
    bench.run(scheduler)
    assert scheduler.submit(bench.make_request("b", 20, max_tokens=16)) is None


def test_the_time_to_come_back_follows_the_measured_speed(bench: Any) -> None:
    waits = []
    for seconds in (0.01, 0.2):
        throughput = ThroughputEstimator()
        throughput.observe(seconds, num_decodes=1, num_prompt_tokens=0)
        limits = SchedulerLimits(512, 8, 64, True, 8192)
        scheduler = Scheduler(
            bench.make_profile(10), limits, throughput, OutputLengthEstimator(512, start=32)
        )
        scheduler.submit(bench.make_request("a", 40, max_tokens=32))
        bench.step(scheduler)
        waits.append(refused(scheduler, bench.make_request("b", 100, max_tokens=32)).retry_after_s)
    assert waits == pytest.approx([0.31, 6.2], rel=0.01)


def test_the_waiting_room_is_bounded(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=1000, max_sequences=2)
    answers = [scheduler.submit(bench.make_request(str(number), 8)) for number in range(9)]
    assert answers[:8] == [None] * 8
    assert isinstance(answers[8], Rejected)
    assert not answers[8].never


def test_promised_memory_is_committed_until_it_is_allocated(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=10)
    scheduler.submit(bench.make_request("a", 100, max_tokens=20))
    assert (scheduler.stats().kv_free_bytes, scheduler.stats().headroom_bytes) == (1600, 320)
    bench.step(scheduler)
    assert (scheduler.stats().kv_free_bytes, scheduler.stats().headroom_bytes) == (960, 320)


def test_releases_tell_what_comes_back_and_are_bounded(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=400, max_sequences=20)
    for number in range(40):
        scheduler.submit(bench.make_request(str(number), 8, max_tokens=number + 1))
    releases = scheduler.releases()
    assert len(releases) == 32
    assert [release.after_s for release in releases] == sorted(r.after_s for r in releases)
    held = 400 * 160 - scheduler.stats().headroom_bytes
    assert sum(release.num_bytes for release in releases) == held


def test_the_releases_of_a_burst_wait_for_the_prompts_of_all(bench: Any) -> None:
    """Sixteen prompts take longer than one, also for the sequence that is computed first."""
    throughput = ThroughputEstimator()
    limits = SchedulerLimits(512, 16, 512, True, 100_000)
    scheduler = Scheduler(
        bench.make_profile(16 * 14), limits, throughput, OutputLengthEstimator(512, start=64)
    )

    def run() -> float:
        """Run all to their ends, and return the seconds that the steps took."""
        total_s = 0.0
        while scheduler.has_work:
            plan = scheduler.schedule()
            decodes = sum(chunk.start >= 150 for chunk in plan.chunks)
            prompt = plan.num_tokens - decodes
            seconds = 0.005 + 0.001 * decodes + 0.001 * prompt
            scheduler.commit(bench.sample(plan))
            throughput.observe(seconds, num_decodes=decodes, num_prompt_tokens=prompt)
            total_s += seconds
        return total_s

    scheduler.submit(bench.make_request("a", 150, max_tokens=64))
    run()
    for number in range(16):
        scheduler.submit(bench.make_request(f"b{number}", 150, max_tokens=64))
    predicted_s = scheduler.releases()[-1].after_s
    assert predicted_s == pytest.approx(run(), rel=0.3)


def test_a_report_looks_at_few_of_the_blocks(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = bench.make_scheduler(blocks=400)
    for number in range(8):
        scheduler.submit(bench.make_request(str(number), 450, max_tokens=40))
    while not all(each.is_decoding for each in scheduler._sequences):
        bench.step(scheduler)
    looked_at: list[int] = []
    ref_count = BlockPool.ref_count

    def counted(pool: BlockPool, block: int) -> int:
        looked_at.append(block)
        return ref_count(pool, block)

    monkeypatch.setattr(BlockPool, "ref_count", counted)
    used = scheduler.stats().kv_pool_bytes - scheduler.stats().kv_free_bytes
    scheduler.releases()
    assert used > 8 * 28 * 160
    assert len(looked_at) <= 8 * 10


@given(
    prompt=st.integers(1, 200),
    max_tokens=st.integers(1, 300),
    expected=st.integers(1, 300),
    produced=st.integers(0, 50),
)
@settings(max_examples=100, deadline=None)
def test_what_is_priced_is_what_is_allocated(
    bench: Any, prompt: int, max_tokens: int, expected: int, produced: int
) -> None:
    profile = bench.make_profile(64)
    request = bench.make_request(
        "a", prompt, max_tokens, output=[2] * min(produced, max_tokens - 1)
    )
    scheduler = bench.make_scheduler(expected=expected)
    charged = request.charged_tokens(scheduler.stats().expected_output_tokens, 512)
    assert scheduler.submit(request) is None
    assert scheduler.stats().headroom_bytes == profile.kv_pool_bytes - sequence_bytes(
        profile, charged
    )
    while scheduler.has_work:
        plan = scheduler.schedule()
        (chunk,) = plan.chunks
        stored = chunk.start + len(chunk.token_ids)
        allocated = profile.kv_pool_bytes - scheduler.stats().kv_free_bytes
        assert allocated == sequence_bytes(profile, stored)
        scheduler.commit(bench.sample(plan))


def test_what_is_withheld_lowers_headroom_and_touches_nobody_admitted(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=10)
    scheduler.submit(bench.make_request("a", 40, max_tokens=8))
    before = scheduler.stats().headroom_bytes
    scheduler.withhold(4 * 160 - 1)
    assert scheduler.stats().headroom_bytes == before - 4 * 160
    answer = refused(scheduler, bench.make_request("b", 40, max_tokens=16))
    assert not answer.never
    assert answer.available_bytes == before - 4 * 160
    scheduler.withhold(10**9)
    assert scheduler.stats().headroom_bytes == 0
    assert len(bench.run(scheduler)["a"]) == 8
    scheduler.withhold(0)
    assert scheduler.submit(bench.make_request("b", 40, max_tokens=16)) is None
