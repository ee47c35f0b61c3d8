"""Restart decisions and health as pure functions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.server.health import HealthScore, RestartPolicy


def test_backoff_starts_at_zero_doubles_and_ends() -> None:
    policy = RestartPolicy(first_backoff_s=0.5, max_backoff_s=3.0, max_failures=6)
    found = [policy.backoff(failures) for failures in range(1, 8)]
    assert found == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_a_request_is_suspected_before_it_is_given_up() -> None:
    policy = RestartPolicy(max_stalled_resumes=3)
    assert [policy.is_suspect(stalls) for stalls in range(5)] == [False, False, True, True, True]
    strict = RestartPolicy(max_stalled_resumes=0)
    assert [strict.is_suspect(stalls) for stalls in range(2)] == [False, True]


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
    health, now = HealthScore(), 0.0
    for after, factor in faults:
        now += after
        before = health.value(now)
        health.fault(now, factor)
        assert 0 <= health.value(now) <= before <= 1
        assert health.value(now + 1) >= health.value(now)
