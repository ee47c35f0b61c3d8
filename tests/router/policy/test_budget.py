"""The retry budget: a share of requests, a flow, a bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.router import RetrySection
from ullage_router.policy.retry import RetryBudget


def test_a_spent_budget_refuses() -> None:
    budget = RetryBudget(RetrySection(percent=20, per_second=0.0, burst=2), now=0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(5):
        budget.on_request()
    assert [budget.take(0.0) for _ in range(2)] == [True, False]
    assert (budget.spent, budget.refused) == (3, 2)


def test_time_fills_it_up_to_the_burst() -> None:
    budget = RetryBudget(RetrySection(percent=0, per_second=2.0, burst=4), now=0.0)
    assert sum(budget.take(0.0) for _ in range(9)) == 4
    assert sum(budget.take(1.0) for _ in range(9)) == 2
    assert sum(budget.take(100.0) for _ in range(9)) == 4


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0, 100),
    st.floats(0, 20),
    st.integers(1, 50),
    st.lists(st.one_of(st.none(), st.just("take"), st.floats(0, 5)), max_size=200),
)
def test_retries_never_exceed_what_was_put_in(
    percent: float, per_second: float, burst: int, events: list[float | str | None]
) -> None:
    budget = RetryBudget(RetrySection(percent=percent, per_second=per_second, burst=burst), now=0.0)
    now = 0.0
    requests = 0
    taken = 0
    for event in events:
        match event:
            case None:
                budget.on_request()
                requests += 1
            case "take":
                taken += budget.take(now)
            case float():
                now += event
        assert 0 <= budget.tokens <= burst
    assert taken == budget.spent
    assert taken <= burst + percent / 100 * requests + per_second * now + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = RetryBudget(RetrySection(percent=0, per_second=1.0, burst=1), now=10.0)
    assert budget.take(10.0)
    assert not budget.take(5.0)
    assert not budget.take(10.5)
    assert budget.take(11.0)
    assert budget.tokens == pytest.approx(0.0)
