"""Judging a canary: limits relative to the stable engines, with room for chance."""

import math
import random

import pytest

from ullage_operator.api.sections import RolloutSpec, Thresholds
from ullage_operator.rollout.analysis import (
    Outcome,
    Variant,
    analyze,
    binomial_tail,
    percentile,
    sum_variants,
    wilson_upper_bound,
)

ROLLOUT = RolloutSpec(
    strategy="canary",
    weight_steps=(10,),
    step_duration=300,
    min_requests=50,
    max_wait=1800,
    start_deadline=900,
    canary_replicas=1,
    thresholds=Thresholds(error_percent=1, ttft_percent=150, e2e_percent=150, restarts=0),
    auto_rollback=True,
    paused=False,
)
ENDS = [0.01 * 2 ** (n / 2) for n in range(27)] + [math.inf]


def times(seconds):
    counts = dict.fromkeys(ENDS, 0)
    for each in seconds:
        counts[next(end for end in ENDS if each <= end)] += 1
    return counts


def side(succeeded=0, failed=0, seconds=(), **more):
    return Variant(succeeded, failed, ttft=times(seconds), e2e=times(seconds), **more)


CASES = {
    "equal": (side(100), side(1000), False, "Pass", "Healthy"),
    "too few": (side(49), side(1000), False, "Wait", "LittleTraffic"),
    "too few, no time left": (side(10), side(90), True, "Pass", "LittleTraffic"),
    "nothing, no time left": (side(), side(), True, "Pass", "NoTraffic"),
    "nothing of much, no time left": (side(), side(90), True, "Pass", "LittleTraffic"),
    "took nothing": (side(declined=50), side(500), True, "Fail", "TakesNothing"),
    "took nothing yet": (side(declined=50), side(500), False, "Wait", "LittleTraffic"),
    "all fail": (side(0, 5), side(100), False, "Fail", "Errors"),
    "one failure is chance": (side(99, 1), side(1000), False, "Pass", "Healthy"),
    "one of few is no proof": (side(3, 1), side(100), False, "Wait", "LittleTraffic"),
    "one of few at the end": (side(3, 1), side(100), True, "Fail", "Errors"),
    "many fail": (side(80, 20), side(1000), False, "Fail", "Errors"),
    "both fail alike": (side(80, 20), side(800, 200), False, "Pass", "Healthy"),
    "alone it may fail half": (side(40, 20), side(), False, "Wait", "LittleTraffic"),
    "a lost worker": (side(100, restarts=1), side(1000), False, "Fail", "Restarts"),
    "as many lost": (side(100, restarts=1), side(1000, restarts=1), False, "Pass", "Healthy"),
    "slow": (side(100, 0, [1.0] * 100), side(100, 0, [0.1] * 100), False, "Fail", "TTFT"),
    "a little slow": (
        side(100, 0, [0.11] * 100), side(100, 0, [0.1] * 100), False, "Pass", "Healthy"
    ),
    "few slow": (side(5, 0, [9.0] * 5), side(100, 0, [0.1] * 100), False, "Wait", "LittleTraffic"),
    "one slow of many": (
        side(100, 0, [0.1] * 99 + [9.0]), side(100, 0, [0.1] * 100), False, "Pass", "Healthy"
    ),
    "faster": (side(100, 0, [0.05] * 100), side(100, 0, [0.1] * 100), False, "Pass", "Healthy"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name):
    canary, stable, is_last, outcome, reason = CASES[name]
    found = analyze(canary, stable, ROLLOUT, is_last)
    assert (found.outcome, found.reason) == (outcome, reason), found.message


def test_the_message_says_what_was_measured():
    found = analyze(side(80, 20), side(999, 1), ROLLOUT)
    assert found.message == "20 of 100 requests failed, 1 of 1000 on stable engines"
    found = analyze(side(100, 0, [1.0] * 100), side(100, 0, [0.1] * 100), ROLLOUT)
    assert "TTFT p95" in found.message
    assert "E2E p95" in found.message


def test_an_equal_canary_is_rarely_failed_and_a_worse_one_is_found():
    chance = random.Random(7)

    def draw(requests, errors, scale):
        failed = sum(chance.random() < errors for _ in range(requests))
        seconds = [scale * chance.lognormvariate(0, 0.7) for _ in range(requests - failed)]
        return side(requests - failed, failed, seconds)

    def share(errors, scale, outcome=Outcome.FAIL):
        tries = 200
        verdicts = [
            analyze(draw(100, errors, scale), draw(300, 0.01, 0.3), ROLLOUT) for _ in range(tries)
        ]
        return sum(verdict.outcome is outcome for verdict in verdicts) / tries

    assert share(0.01, 0.3) <= 0.01
    assert share(0.15, 0.3) >= 0.85
    assert share(0.15, 0.3, Outcome.PASS) == 0.0
    assert share(0.01, 0.3 * 4) >= 0.9


def test_binomial_tail_and_interval():
    assert binomial_tail(0, 10, 0.1) == 1.0
    assert binomial_tail(1, 10, 0.1) == pytest.approx(1 - 0.9**10)
    assert binomial_tail(10, 10, 0.5) == pytest.approx(0.5**10)
    assert binomial_tail(3, 10, 0.0) == 0.0
    assert wilson_upper_bound(0, 100) == pytest.approx(0.0263, abs=1e-3)
    assert wilson_upper_bound(5, 5) == pytest.approx(1.0)
    assert percentile(times([0.1] * 95 + [5.0] * 5)) == pytest.approx(0.1131, abs=1e-3)


def test_routers_are_added_and_share_the_restarts_they_see():
    one = side(3, 1, [0.1], restarts=2)
    two = side(4, 0, [0.1, 5.0], restarts=2, declined=1)
    total = sum_variants([one, two])
    assert (total.succeeded, total.failed, total.declined, total.restarts) == (7, 1, 1, 2)
    assert sum(total.ttft.values()) == 3
