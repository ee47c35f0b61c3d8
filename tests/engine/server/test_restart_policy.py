"""Restart decisions and health as pure functions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.server.health import HealthScore
from ullage_engine.server.restart_policy import RestartPolicy


def test_backoff_starts_at_zero_doubles_and_ends() -> None:
    policy = RestartPolicy(first_backoff_s=0.5, max_backoff_s=3.0, max_failures=6)
    found = [policy.backoff(failures) for failures in range(1, 8)]
    assert found == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_only_where_no_kernel_is_compiled_a_busy_step_counts_as_hung_early() -> None:
    limits = [
        RestartPolicy.for_engine(device, 30.0).busy_after_s(0.2, 100)
        for device in ("cpu", "auto", "cuda")
    ]
    assert limits == [2.0, 8.0, 8.0]
    cpu = RestartPolicy.for_engine("cpu", 30.0)
    assert cpu.busy_after_s(0.2, 1) == 4.0
    assert cpu.busy_after_s(5.0, 100) == 15.0
    assert cpu.busy_after_s(20.0, 100) == 30.0


def test_a_suspect_runs_alone_at_once_and_a_second_time_as_long_as_it_takes() -> None:
    policy = RestartPolicy(trial_s=5.0)
    assert [policy.runs_alone(deaths, 0.0) for deaths in range(4)] == [False, True, True, True]
    assert [policy.runs_alone(deaths, 6.0) for deaths in range(4)] == [False, False, True, True]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5))
def test_a_request_is_given_up_only_for_deaths_in_which_it_was_alone(
    deaths: int, lone_deaths: int, most: int
) -> None:
    policy = RestartPolicy(max_deaths=most)
    lone_deaths = min(deaths, lone_deaths)
    is_given_up = policy.is_given_up(deaths, lone_deaths)
    assert not is_given_up or lone_deaths >= most - 1
    assert is_given_up or deaths < most or lone_deaths < most - 1
    assert policy.is_given_up(most, most)
    assert policy.is_given_up(deaths, lone_deaths, is_short=True) == (deaths >= most)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 20)), min_size=12, max_size=12),
)
def test_no_request_keeps_killing_workers_for_ever(
    most: int, deaths: list[tuple[bool, bool, float]]
) -> None:
    """Whether it was alone or not where it need not be, and whether memory was short: the third of
    its workers is the last one, or the fourth where two died with others or without memory."""
    policy = RestartPolicy(max_deaths=most)
    num_deaths = num_lone = 0
    for is_short, is_alone_by_chance, serving_s in deaths:
        is_alone = is_alone_by_chance or policy.runs_alone(num_deaths, serving_s)
        num_deaths += 1
        num_lone += is_alone and not is_short
        if policy.is_given_up(num_deaths, num_lone, is_short=is_short):
            break
    assert num_deaths <= max(most + 1, 2 * (most - 1))


def test_the_last_chance_is_the_last_start_of_the_budget() -> None:
    policy = RestartPolicy(max_failures=3)
    for failures in range(1, 6):
        assert policy.is_last_chance(failures) == (policy.backoff(failures + 1) is None)


def test_health_halves_and_recovers() -> None:
    health = HealthScore(recovery_s=10.0)
    assert health.value(5.0) == 1.0
    health.fault(5.0)
    assert health.value(5.0) == pytest.approx(0.5)
    health.fault(5.0)
    assert health.value(5.0) == pytest.approx(0.25)
    assert health.value(15.0) == pytest.approx(1 - 0.75 / 2.718281828, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=20))
def test_health_stays_between_0_and_1(faults: list[tuple[float, float]]) -> None:
    health = HealthScore()
    now = 0.0
    for after, factor in faults:
        now += after
        before = health.value(now)
        health.fault(now, factor)
        assert 0 <= health.value(now) <= before <= 1
        assert health.value(now + 1) >= health.value(now)
