"""Figures, knee, engines and cost from answers, without a server."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_bench.levels import (
    Level,
    Objectives,
    cost_of,
    engines_for,
    knee,
    measure,
    regressions,
)
from ullage_verify.client import ChatAnswer
from ullage_verify.quantiles import quantile


def level(load: float = 1, **fields: Any) -> Level:
    times = dict.fromkeys(("ttft_p50", "ttft_p95", "token_p50", "e2e_p50", "e2e_p95"), 1.0)
    counts = {"requests": 10, "refused": 0, "failed": 0}
    return Level(
        **({"load": load, "requests_per_s": 1.0, "tokens_per_s": 10.0} | times | counts | fields)
    )


def answer(seconds: float = 2.0, tokens: int = 5, **fields: Any) -> ChatAnswer:
    whole = {"status": 200, "first_at": 100.5, "ended_at": 100.0 + seconds}
    return ChatAnswer(100.0, output_tokens=tokens, **(whole | fields))


def test_figures_of_a_level() -> None:
    refused = answer(status=429)
    broken = answer(error="broken off: x")
    found = measure(4, [answer(2.0), answer(4.5, tokens=1), refused, broken], 110.0)
    assert (found.requests, found.refused, found.failed) == (2, 1, 1)
    assert found.requests_per_s == pytest.approx(2 / 4.5)
    assert found.tokens_per_s == pytest.approx(6 / 4.5)
    assert found.token_p50 == pytest.approx((2.0 - 0.5) / 4)
    assert (found.e2e_p50, found.e2e_p95, found.ttft_p95) == (2.0, 4.5, 0.5)


@given(st.floats(0.5, 20.0), st.integers(10, 200))
def test_a_rate_does_not_depend_on_the_latency(latency: float, rate: int) -> None:
    """A server that answers everything after a fixed time keeps up with the load."""
    seconds = 60
    answers = [
        ChatAnswer(
            100.0 + number / rate,
            status=200,
            output_tokens=10,
            first_at=100.0 + number / rate + latency,
            ended_at=100.0 + number / rate + latency,
        )
        for number in range(seconds * rate)
    ]
    found = measure(rate, answers, 100.0 + seconds)
    assert found.requests_per_s == pytest.approx(rate, rel=0.01)
    assert found.tokens_per_s == pytest.approx(10 * rate, rel=0.01)


def test_one_wave_of_answers_is_no_rate() -> None:
    """All 64 clients begin together, and their answers end within the last eight seconds."""
    answers = [answer(6.0 + number / 8) for number in range(64)]
    found = measure(64, answers, 115.0)
    assert found.requests_per_s == pytest.approx(64 / 13.875)


def test_a_level_without_answers_has_no_figures() -> None:
    found = measure(1, [answer(status=503)], 105.0)
    assert (found.requests, found.e2e_p95, found.power) == (0, 0.0, 0.0)
    assert knee([found], Objectives(max_refused_share=1.0)) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_that_enough_values_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


# A server that computes 8 requests at once, one second each: then they only wait.
SWEEP = [
    level(
        n,
        requests_per_s=min(n, 8),
        e2e_p50=max(1.0, n / 8),
        e2e_p95=max(1.0, n / 8),
        ttft_p95=n / 8,
    )
    for n in (1, 2, 4, 8, 16, 32)
]


def test_the_knee_is_where_latency_begins_to_grow() -> None:
    best = knee(SWEEP, Objectives())
    assert best
    assert best.load == 8


def test_objectives_allow_all_load_below_them() -> None:
    faster = [
        msgspec.structs.replace(each, requests_per_s=each.requests_per_s + each.load / 100)
        for each in SWEEP
    ]
    best = knee(faster, Objectives(e2e_p95=2.0))
    assert best
    assert best.load == 16
    assert knee(faster, Objectives(ttft_p95=0.01)) is None


def test_refusals_are_not_below_the_knee() -> None:
    levels = [level(1), level(2, requests_per_s=9.0, refused=5)]
    best = knee(levels, Objectives())
    assert best
    assert best.load == 1


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3), st.integers(1, 64), st.integers(1, 20))
def test_engines_carry_the_rate_and_one_fewer_do_not(
    rate: float, speed: float, num_engines: int, factor: int
) -> None:
    figures = level(requests_per_s=speed)
    found = engines_for(rate, figures, num_engines)
    per_engine = speed / num_engines
    assert found * per_engine >= rate * (1 - 1e-6)
    assert found == 1 or (found - 1) * per_engine < rate
    assert engines_for(factor * per_engine, figures, num_engines) == factor


def test_cost() -> None:
    found = cost_of(level(requests_per_s=2.0, tokens_per_s=100.0), 3.6, 2)
    assert found.per_request == pytest.approx(0.001)
    assert found.per_million_tokens == pytest.approx(20.0)
    assert cost_of(level(tokens_per_s=0.0), 1.0, 1).per_million_tokens == math.inf


def test_regressions_name_figure_and_values() -> None:
    before = level(requests_per_s=10.0, tokens_per_s=100.0)
    assert not regressions(level(requests_per_s=9.1, tokens_per_s=91.0, ttft_p95=1.09), before, 0.1)
    worse = regressions(level(requests_per_s=8.0, tokens_per_s=100.0, e2e_p95=1.2), before, 0.1)
    assert worse == ["requests_per_s fell from 10 to 8", "e2e_p95 rose from 1 s to 1.2 s"]
