"""Breakers: what opens and closes them, and how many engines of a pool they may hold back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.router import BreakerSection
from ullage_router.policy.circuit_breaker import (
    LEAST_PROOF_S,
    PROOF_STRETCH,
    WINDOW,
    CircuitBreaker,
    held_back,
)
from ullage_router.policy.facts import BreakerLimit

POLICY = BreakerSection(failures=3, pause=1.0, max_pause=4.0)


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(POLICY)
    open_again(breaker, now)
    return breaker


def sent(breaker: CircuitBreaker, now: float = 2.0) -> object:
    request = object()
    breaker.on_sent(request, now)
    return request


def fails(breaker: CircuitBreaker, now: float = 2.0) -> bool:
    """Send a request that fails, and return whether it opened the breaker."""
    request = sent(breaker, now)
    has_opened = breaker.on_failure(request, now)
    breaker.on_end(request)
    return has_opened


def succeeds(breaker: CircuitBreaker, now: float = 2.0) -> None:
    request = sent(breaker, now)
    breaker.on_first_token(request)
    breaker.on_success(request)
    breaker.on_end(request)


def open_again(breaker: CircuitBreaker, now: float = 2.0) -> None:
    assert [fails(breaker, now) for _ in range(3)] == [False, False, True]


def probe(breaker: CircuitBreaker, now: float) -> object:
    assert breaker.state(now) == "half-open"
    assert breaker.admits(now)
    request = sent(breaker, now)
    assert not breaker.admits(now)
    return request


def test_only_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(POLICY)
    for _ in range(5):
        assert not fails(breaker)
        assert not fails(breaker)
        succeeds(breaker)
    assert breaker.state(0.0) == "closed"


def test_a_pause_ends_with_one_probe() -> None:
    breaker = opened()
    assert breaker.state(0.9) == "open"
    assert not breaker.admits(0.9)
    request = probe(breaker, 1.0)
    breaker.on_first_token(request)
    assert breaker.state(1.0) == "closed"
    breaker.on_success(request)
    breaker.on_end(request)
    assert breaker.failures == 0


def test_failed_probes_double_the_pause_up_to_a_limit() -> None:
    breaker = opened()
    now = 0.0
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        now = breaker.until
        request = probe(breaker, now)
        assert breaker.on_failure(request, now)
        breaker.on_end(request)
        expected = min(2 * pause_s, 4.0)
        assert breaker.until == now + expected
    request = probe(breaker, breaker.until)
    breaker.on_success(request)
    assert opened().until == 1.0


def test_a_failure_right_after_the_probes_first_token_opens_it_again() -> None:
    breaker = opened()
    request = probe(breaker, 1.0)
    breaker.on_first_token(request)
    assert breaker.on_failure(request, 1.5)
    assert breaker.until == 3.5


def test_a_probe_that_proves_nothing_makes_room_for_the_next() -> None:
    breaker = opened()
    first = probe(breaker, 1.0)
    assert not breaker.admits(1.0)
    breaker.on_end(first)
    assert breaker.admits(1.0)


def test_requests_under_way_change_nothing_while_it_is_open() -> None:
    breaker = CircuitBreaker(POLICY)
    old = sent(breaker, 0.0)
    open_again(breaker, 0.0)
    breaker.on_first_token(old)
    breaker.on_success(old)
    assert not breaker.on_failure(old, 0.5)
    assert (breaker.state(0.5), breaker.until, breaker.openings) == ("open", 1.0, 1)


def test_part_of_a_pool_stays_in_use() -> None:
    pool = [(name, opened(float(opened_at))) for opened_at, name in enumerate("abcd")]
    assert held_back(pool, 2, 0.5) == {"c", "d"}
    assert held_back(pool, 0, 0.5) == frozenset()
    assert held_back(pool, 4, 0.5) == set("abcd")
    assert held_back([("e", CircuitBreaker(POLICY)), *pool], 2, 2.5) == {"c", "d"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(("send", "crowd", "begin", "succeed", "fail", "cancel", "wait"))))
def test_any_order_of_events(events: list[str]) -> None:
    breaker = CircuitBreaker(POLICY)
    now = 0.0
    live = list[object]()
    for event in events:
        match event:
            case "send" if breaker.admits(now):
                live.append(object())
                breaker.on_sent(live[-1], now)
            case "begin" if live:
                breaker.on_first_token(live[-1])
            case "crowd":  # the only engine of a pool gets requests whatever its breaker admits
                live.append(sent(breaker, now))
                breaker.on_first_token(live[-1])
            case "succeed" if live:
                breaker.on_success(live[0])
                breaker.on_end(live.pop(0))
            case "fail" if live:
                breaker.on_failure(live[0], now)
                breaker.on_end(live.pop(0))
            case "cancel" if live:
                breaker.on_end(live.pop(0))
            case "wait":
                now += 0.7
        breaker.check_integrity(now)
    for request in live:
        breaker.on_end(request)
    assert breaker.admits(now + POLICY.max_pause)  # it never stays shut


def test_a_spike_opens_it_though_successes_lie_between() -> None:
    breaker = CircuitBreaker(POLICY)
    openings = []
    for number in range(2 * WINDOW):
        if number % 2:
            openings.append(fails(breaker, 0.0))
        else:
            succeeds(breaker, 0.0)
    assert openings.index(True) == WINDOW // 2 - 1
    assert breaker.openings == 1


def test_few_failures_among_many_answers_open_nothing() -> None:
    breaker = CircuitBreaker(POLICY)
    for number in range(20 * WINDOW):
        if number % 3 == 0:
            assert not fails(breaker)
        else:
            succeeds(breaker)
    assert breaker.limit is None


def test_the_limit_grows_with_each_success_and_falls_to_one_with_a_new_opening() -> None:
    breaker = opened()
    assert breaker.limit == 1
    request = probe(breaker, 1.0)
    limits = []
    while breaker.limit is not None:
        limits.append(breaker.limit)
        breaker.on_first_token(request)
        breaker.on_success(request)  # an answer raises the limit once
        breaker.on_end(request)
        request = sent(breaker)
    assert limits == [1, 2, 4, 8, 16, 32, 64]
    for _ in range(3):
        fails(breaker)
    assert breaker.limit == 1


def test_without_ejections_there_is_no_limit() -> None:
    breaker = CircuitBreaker(BreakerSection(failures=1, max_ejection_percent=0))
    assert fails(breaker)
    assert breaker.limit is None


def test_requests_from_before_the_opening_do_not_raise_the_limit() -> None:
    breaker = CircuitBreaker(POLICY)
    old_requests = [sent(breaker, 0.0) for _ in range(10)]
    open_again(breaker, 0.0)
    for old in old_requests:
        breaker.on_first_token(old)
        breaker.on_success(old)
    assert breaker.limit == 1


def test_the_limit_stays_low_while_half_of_the_trials_fail() -> None:
    breaker = opened()
    limits = []
    for _ in range(40):  # the only engine of a pool gets requests during the pause, too
        good = sent(breaker, 0.5)
        breaker.on_first_token(good)
        limits.append(breaker.limit)
        bad = sent(breaker, 0.5)
        breaker.on_failure(bad, 0.5)
        breaker.on_end(bad)
        breaker.on_success(good)
        breaker.on_end(good)
    assert set(limits) == {2}


def test_only_requests_since_the_opening_count_against_the_limit() -> None:
    breaker = CircuitBreaker(POLICY)
    for _ in range(5):
        sent(breaker, 0.0)
    open_again(breaker, 0.0)
    assert (breaker.limit, breaker.num_trials, breaker.is_at_limit) == (1, 0, False)
    assert breaker.limit_facts(0.0) is None
    trial = sent(breaker, 0.5)
    assert (breaker.num_trials, breaker.is_at_limit) == (1, True)
    breaker.on_end(trial)
    assert not breaker.is_at_limit


def test_a_first_token_is_late_after_a_multiple_of_its_forecast() -> None:
    breaker = opened()
    trial = object()
    breaker.on_sent(trial, 0.5, 4.0)
    due_s = LEAST_PROOF_S + PROOF_STRETCH * 4.0
    assert breaker.limit_facts(0.5) == BreakerLimit(1, 1, 1, due_s, 0.5)
    assert breaker.limit_facts(2.5) == BreakerLimit(1, 1, 1, due_s - 2.0, 0.0)
    breaker.on_first_token(trial)
    assert breaker.limit_facts(2.5) is None
    sent(breaker, 2.5)
    assert breaker.limit_facts(2.5) == BreakerLimit(2, 2, 1, LEAST_PROOF_S, 0.0)


def test_a_second_spike_opens_it_after_a_recovery_within_the_pause() -> None:
    """The only engine of a pool recovers before its pause is over, and then fails again."""
    breaker = opened()
    for _ in range(7):
        succeeds(breaker, 0.5)
    assert (breaker.limit, breaker.state(0.5), breaker.failures) == (None, "closed", 0)
    assert [fails(breaker, 0.6) for _ in range(3)] == [False, False, True]
    assert (breaker.limit, breaker.state(0.6), breaker.openings) == (1, "open", 2)


def test_an_end_of_the_limit_closes_it_like_a_probes_first_token() -> None:
    breaker = opened()
    trials = [sent(breaker, 0.5) for _ in range(7)]
    for trial in trials:
        breaker.on_first_token(trial)
    assert (breaker.limit, breaker.state(0.5)) == (None, "closed")
    assert breaker.on_failure(trials[0], 0.6)  # one more failure is enough
    assert breaker.until == 0.6 + 2.0  # and the pause is twice the last one


def test_a_probe_that_begins_after_the_end_of_the_limit_changes_nothing() -> None:
    breaker = opened()
    request = probe(breaker, 1.0)
    for _ in range(7):
        succeeds(breaker, 1.0)
    assert (breaker.state(1.0), breaker.failures) == ("closed", 0)
    breaker.on_first_token(request)
    assert breaker.failures == 0


@pytest.mark.parametrize("recovery", ["begun", "succeeded", "complete"])
@pytest.mark.parametrize("limited", [True, False])
def test_outcomes_from_before_the_opening_change_nothing(recovery: str, limited: bool) -> None:
    policy = BreakerSection(failures=3, max_ejection_percent=50 if limited else 0)
    breaker = CircuitBreaker(policy)
    old = [sent(breaker, 0.0) for _ in range(30)]
    open_again(breaker, 0.0)
    now = breaker.until
    if recovery == "begun":
        breaker.on_first_token(probe(breaker, now))
    for _ in range({"begun": 0, "succeeded": 1, "complete": 7}[recovery]):
        succeeds(breaker, now)
    assert breaker.state(now) == "closed"

    failures = breaker.failures
    limit = breaker.limit
    breaker.on_success(old[0])
    assert not any(breaker.on_failure(request, now) for request in old[1:])
    assert (breaker.failures, breaker.limit, breaker.openings) == (failures, limit, 1)


def test_answers_that_have_begun_do_not_block_the_limit_after_a_failure() -> None:
    breaker = opened()
    streams = [probe(breaker, 1.0), *(sent(breaker) for _ in range(4))]
    for stream in streams:
        breaker.on_first_token(stream)
    waiting = [sent(breaker) for _ in range(2)]
    succeeds(breaker, 1.0)
    assert (breaker.limit, breaker.num_trials) == (64, 7)

    fails(breaker)
    assert (breaker.limit, breaker.num_trials) == (1, 2)
    for request in waiting:
        breaker.on_end(request)
    assert not breaker.is_at_limit
    succeeds(breaker)
    assert breaker.limit == 2


def test_answers_that_had_begun_before_a_failure_still_count_when_they_fail() -> None:
    breaker = opened()
    streams = [probe(breaker, 1.0), *(sent(breaker) for _ in range(3))]
    for stream in streams:
        breaker.on_first_token(stream)
    succeeds(breaker)
    assert not fails(breaker)
    succeeds(breaker)
    assert (breaker.limit, breaker.failures, breaker.num_trials) == (2, 0, 0)
    assert [breaker.on_failure(stream, 2.0) for stream in streams[:3]] == [False, False, True]
    assert (breaker.limit, breaker.openings) == (1, 2)
