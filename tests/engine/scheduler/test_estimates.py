"""Output lengths as a decaying quantile, and the measured speed of steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator

LENGTHS = st.lists(st.integers(1, 4096), max_size=300)


@given(before=LENGTHS, length=st.integers(1, 4096))
@settings(max_examples=60, deadline=None)
def test_it_forgets_whatever_came_before(before: list[int], length: int) -> None:
    expected = OutputLengthEstimator(4096)
    for each in before:
        expected.observe(each)
    for _ in range(300):
        expected.observe(length)
    assert length <= expected.estimate <= max(length + 1, length * 1.125)


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_memory_is_bounded_and_the_estimate_in_range(lengths: list[int]) -> None:
    expected = OutputLengthEstimator(4096)
    buckets = expected.num_buckets
    for each in lengths:
        expected.observe(each)
        assert 1 <= expected.estimate <= 4096
    assert expected.num_buckets == buckets < 100


def test_it_starts_modest_and_within_the_models_length() -> None:
    assert 256 <= OutputLengthEstimator(8192).estimate <= 288
    assert OutputLengthEstimator(100).estimate == 100


def test_it_follows_the_distribution_down_and_up_again() -> None:
    generator = np.random.default_rng(7)
    expected = OutputLengthEstimator(4096)
    for mean in (600, 40, 900):
        lengths = generator.integers(mean // 2, mean + mean // 2, 400).tolist()
        for each in lengths:
            expected.observe(each)
        exact = float(np.quantile(lengths, 0.9))
        assert 0.85 * exact <= expected.estimate <= 1.3 * exact


def test_weights_that_double_each_time_do_not_overflow() -> None:
    expected = OutputLengthEstimator(4096, half_life=1)
    for number in range(5000):
        expected.observe(number % 50 + 1)
    assert 45 <= expected.estimate <= 57


def test_steps_are_measured_by_the_size_of_their_batch() -> None:
    throughput = ThroughputEstimator()
    assert throughput.step_seconds == []
    for num_decodes, seconds in ((1, 0.05), (5, 0.08), (6, 0.08), (9, 0.2)):
        throughput.observe(seconds, num_decodes=num_decodes, num_prompt_tokens=0)
    assert throughput.step_seconds == pytest.approx([0.05, 0.08, 0.08, 0.2])
    for _ in range(500):
        throughput.observe(0.1, num_decodes=12, num_prompt_tokens=0)
        throughput.observe(0.15, num_decodes=1, num_prompt_tokens=0)
    # Never more for a smaller batch than for a larger one.
    assert throughput.step_seconds == pytest.approx([0.08, 0.08, 0.08, 0.1])


def test_draft_tokens_make_decodes_faster_and_batches_no_larger() -> None:
    throughput = ThroughputEstimator()
    throughput.observe(0.5, num_decodes=2, num_prompt_tokens=0, num_accepted=6)
    assert throughput.decode_tokens_per_second == 8.0
    assert throughput.step_seconds == [0.5, 0.5]


def test_a_step_without_decodes_measures_no_batch() -> None:
    throughput = ThroughputEstimator()
    throughput.observe(0.5, num_decodes=0, num_prompt_tokens=100)
    assert throughput.step_seconds == []
    assert throughput.prefill_tokens_per_second == 200.0


def test_a_step_beside_a_prompt_is_no_first_measurement_of_decodes() -> None:
    estimator = ThroughputEstimator()
    estimator.observe(2.0, num_decodes=1, num_prompt_tokens=512)
    assert (estimator.decode_tokens_per_second, estimator.step_seconds) == (0.0, [])
    assert estimator.prefill_tokens_per_second == 256.0
    estimator.observe(0.02, num_decodes=1, num_prompt_tokens=0)
    assert estimator.step_seconds == [0.02]
    estimator.observe(2.0, num_decodes=1, num_prompt_tokens=512)
    assert estimator.step_seconds[0] > 0.02


def test_short_chunks_say_nothing_of_how_fast_long_prompts_are() -> None:
    throughput = ThroughputEstimator()
    for _ in range(5):
        throughput.observe(2048 / 20_000, num_decodes=0, num_prompt_tokens=2048)
    for num_decodes in (0, 4):
        for _ in range(20):
            throughput.observe(0.012, num_decodes=num_decodes, num_prompt_tokens=12)
    assert throughput.prefill_tokens_per_second == pytest.approx(20_000, rel=0.01)
    assert throughput.seconds_until(4096, 0) == pytest.approx(4096 / 20_000, rel=0.01)


def test_prompts_take_what_a_step_takes_longer_than_its_decodes() -> None:
    throughput = ThroughputEstimator()
    throughput.observe(0.25, num_decodes=4, num_prompt_tokens=100)
    assert throughput.prefill_tokens_per_second == 400.0, "as nothing is known of decodes"
    for num_decodes, seconds in ((4, 0.05), (32, 0.1)):
        throughput.observe(seconds, num_decodes=num_decodes, num_prompt_tokens=0)
    for _ in range(500):
        throughput.observe(0.25, num_decodes=4, num_prompt_tokens=100)
    # Steps with prompts do not count as the time of decodes, however many there are.
    assert throughput.prefill_tokens_per_second == pytest.approx(500.0, rel=0.01)
    for num_decodes in (9, 100):  # taken to be as slow as the nearest size that was measured
        for _ in range(500):
            throughput.observe(0.3, num_decodes=num_decodes, num_prompt_tokens=100)
        assert throughput.prefill_tokens_per_second == pytest.approx(500.0, rel=0.01)
    for _ in range(500):
        throughput.observe(0.05, num_decodes=4, num_prompt_tokens=100)
    assert throughput.prefill_tokens_per_second == pytest.approx(20_000, rel=0.01)


CHUNKS = st.tuples(st.integers(1, 8192), st.floats(1e-3, 10.0))


@given(before=st.lists(CHUNKS, max_size=50), chunk=CHUNKS)
@settings(max_examples=60, deadline=None)
def test_the_prefill_speed_is_among_those_seen_and_comes_to_the_newest(
    before: list[tuple[int, float]], chunk: tuple[int, float]
) -> None:
    throughput = ThroughputEstimator()
    for num_tokens, seconds in [*before, chunk]:
        throughput.observe(seconds, num_decodes=0, num_prompt_tokens=num_tokens)
    speeds = [num_tokens / seconds for num_tokens, seconds in [*before, chunk]]
    speed = throughput.prefill_tokens_per_second
    assert min(speeds) * 0.999 <= speed <= max(speeds) * 1.001
    num_tokens, seconds = chunk
    for _ in range(60 * 4096 // num_tokens if num_tokens > 100 else 0):
        throughput.observe(seconds, num_decodes=0, num_prompt_tokens=num_tokens)
    if num_tokens > 100:
        speed = throughput.prefill_tokens_per_second
        assert speed == pytest.approx(num_tokens / seconds, rel=0.01)
