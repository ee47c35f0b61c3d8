"""What reports of the scheduler's state cost, and that what is counted is what is there."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def serving(bench: Any, num_requests: int, clock: Clock) -> Scheduler:
    """A scheduler with so many requests, half of them running, some with a prompt half computed."""
    limits = SchedulerLimits(512, num_requests // 2, 4096, True, 1 << 20)
    scheduler = Scheduler(
        bench.make_profile(20 * num_requests),
        limits,
        ThroughputEstimator(),
        OutputLengthEstimator(512, start=32),
        clock=clock,
    )
    for number in range(num_requests):
        assert scheduler.submit(bench.make_request(f"{number}", 40 + number % 30)) is None
    bench.step(scheduler)
    return scheduler


def num_calls(action: Callable[[], object]) -> int:
    """Counts the calls of functions, and the values that generators yield, within an action."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # the collector calls finalizers of other objects when it likes
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_report_costs_the_same_however_many_requests_there_are(bench: Any) -> None:
    costs = []
    for num_requests in (100, 800):
        scheduler = serving(bench, num_requests, Clock())
        scheduler.stats(), scheduler.releases()  # looks at all, and then not again for a while
        costs.append(num_calls(lambda s=scheduler: (s.stats(), s.releases())))
    assert costs[0] == costs[1]


@pytest.mark.parametrize("num_requests", [20, 200])
def test_what_takes_a_walk_is_known_again_soon(bench: Any, num_requests: int) -> None:
    clock = Clock()
    scheduler = serving(bench, num_requests, clock)
    before = scheduler.stats()
    releases = scheduler.releases()
    for number in range(num_requests // 2, num_requests):
        scheduler.cancel(f"{number}")
    for number in range(num_requests // 4):
        scheduler.cancel(f"{number}")
    clock.now += 0.2
    after = scheduler.stats()
    assert 0 < after.kv_used_bytes < before.kv_used_bytes
    assert sum(each.num_bytes for each in scheduler.releases()) < sum(
        each.num_bytes for each in releases
    )


def test_expected_releases_come_nearer_between_two_walks(bench: Any) -> None:
    clock = Clock()
    scheduler = serving(bench, 800, clock)
    first = scheduler.releases()
    clock.now += 0.25
    second = scheduler.releases()
    assert [each.num_bytes for each in second] == [each.num_bytes for each in first]
    assert [each.after_s for each in second] == pytest.approx(
        [max(0.0, each.after_s - 0.25) for each in first]
    )


def test_the_backlog_is_counted_at_once(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=200, prompt_tokens=32)
    scheduler.submit(bench.make_request("a", 50))
    scheduler.submit(bench.make_request("b", 30))
    assert scheduler.stats().prefill_backlog_tokens == 80
    bench.step(scheduler)
    assert scheduler.stats().prefill_backlog_tokens == 48
    scheduler.cancel("b")
    assert scheduler.stats().prefill_backlog_tokens == 18
    bench.step(scheduler)
    assert scheduler.stats().prefill_backlog_tokens == 0
    scheduler.preempt_newest()
    assert scheduler.stats().prefill_backlog_tokens > 0


def test_a_peak_that_no_report_has_seen_is_remembered(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=64)
    block_bytes = scheduler.stats().kv_pool_bytes // 64
    assert scheduler.stats().kv_peak_bytes == 0
    for name in ("a", "b"):
        assert scheduler.submit(bench.make_request(name, 40, max_tokens=20)) is None
    assert scheduler.stats().kv_peak_promised_bytes == 2 * 4 * block_bytes
    bench.run(scheduler)

    assert scheduler.submit(bench.make_request("c", 10, max_tokens=2)) is None
    bench.run(scheduler)
    stats = scheduler.stats()
    assert stats.kv_held_bytes == 0
    assert stats.kv_peak_bytes == stats.kv_peak_promised_bytes == 2 * 4 * block_bytes
