"""Token buckets: what they let through in any stretch of time, and what they say of the next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_router.policy.quota import MINUTE_S, Quota, Shortage, TokenBucket

pauses = st.floats(0, 90)
amounts = st.floats(0.5, 40)
capacities = st.floats(1, 100)


@given(capacity=capacities, steps=st.lists(st.tuples(pauses, amounts), max_size=40))
def test_no_stretch_of_time_lets_more_through(
    capacity: float, steps: list[tuple[float, float]]
) -> None:
    """In t seconds at most capacity * (1 + t / 60), whichever request they begin with."""
    bucket = TokenBucket.full(capacity, 0.0)
    now = 0.0
    passed = []
    for pause, amount in steps:
        now += pause
        wanted = min(amount, capacity)
        if not bucket.wait_s(wanted, now):
            bucket = bucket.take(wanted, now)
            passed.append((now, wanted))
    for i, (start, _) in enumerate(passed):
        for j, (end, _) in enumerate(passed[i:], i):
            total = sum(amount for _, amount in passed[i : j + 1])
            assert total <= capacity * (1 + (end - start) / MINUTE_S) + 1e-4


@given(capacity=capacities, spent=st.floats(0, 500), amount=amounts)
def test_after_the_wait_there_is_room(capacity: float, spent: float, amount: float) -> None:
    bucket = TokenBucket.full(capacity, 0.0).take(spent, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    assert bucket.wait_s(amount, wait_s + 1e-6) == 0
    if wait_s > 0.1:
        assert bucket.wait_s(amount, wait_s - 0.05) > 0


@given(capacity=capacities, takes=st.lists(st.tuples(pauses, st.floats(-50, 50)), max_size=30))
def test_a_bucket_never_holds_more_than_it_can(
    capacity: float, takes: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket.full(capacity, 0.0)
    now = 0.0
    for pause, amount in takes:
        now += pause
        bucket = bucket.take(amount, now)
        assert bucket.level <= capacity
        assert bucket.refilled(now + 1e9).level == capacity


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    empty = TokenBucket.full(60, 100.0).take(60, 100.0)
    assert empty.refilled(100.0).level == empty.refilled(50.0).level == 0
    assert empty.refilled(50.0).refilled(101.0).level == pytest.approx(1.0)


def entered(quota: Quota, now: float) -> Quota:
    result = quota.enter(now)
    assert isinstance(result, Quota)
    return result


def test_requests_by_the_minute() -> None:
    quota = Quota(requests=TokenBucket.full(2, 0.0))
    quota = entered(entered(quota, 0.0), 0.0)
    refused = quota.enter(0.0)
    assert refused == Shortage("requests_per_minute", 2, 30.0)
    assert entered(quota, 30.0).active == 3


def test_a_refusal_takes_nothing() -> None:
    quota = Quota(requests=TokenBucket.full(5, 0.0), concurrency=1)
    quota = entered(quota, 0.0)
    assert quota.enter(0.0) == Shortage("concurrency", 1, None)
    assert entered(quota.leave(0, 0, 0.0), 0.0).requests == TokenBucket(5, 3, 0.0)


def test_tokens_are_corrected_at_the_end() -> None:
    quota = entered(Quota(tokens=TokenBucket.full(100, 0.0)), 0.0)
    charged = quota.charge(60, 0.0)
    assert isinstance(charged, Quota)
    assert charged.charge(60, 0.0) == Shortage("tokens_per_minute", 100, pytest.approx(12.0))
    assert charged.leave(60, 10, 0.0).tokens == TokenBucket(100, 90, 0.0)
    owing = charged.leave(60, 130, 0.0)
    assert owing.tokens == TokenBucket(100, -30, 0.0)
    assert owing.charge(1, 0.0) == Shortage("tokens_per_minute", 100, pytest.approx(18.6))


def test_more_than_a_bucket_holds_needs_a_full_one() -> None:
    quota = Quota(tokens=TokenBucket.full(100, 0.0))
    charged = quota.charge(150, 0.0)
    assert isinstance(charged, Quota)
    assert charged.tokens == TokenBucket(100, -50, 0.0)
    assert isinstance(Quota(tokens=TokenBucket(100, 99, 0.0)).charge(150, 0.0), Shortage)


@given(
    tokens=st.integers(1, 40),
    levels=st.tuples(st.integers(0, 20), st.integers(-50, 100)),
    most=st.none() | st.integers(0, 12),
    wanted=st.integers(1, 30),
)
def test_there_is_room_for_as_many_as_enter_one_after_another(
    tokens: int, levels: tuple[int, int], most: int | None, wanted: int
) -> None:
    requests = TokenBucket(20, levels[0], 0.0)
    budget = TokenBucket(100, levels[1], 0.0)
    before = quota = Quota(requests, budget, most)
    count = 0
    for _ in range(wanted):
        inside = quota.enter(0.0)
        charged = inside.charge(tokens, 0.0) if isinstance(inside, Quota) else inside
        if isinstance(charged, Shortage):
            break
        quota = charged
        count = count + 1
    room = before.room(wanted, tokens, 0.0)
    assert room == count
    if room:
        together = before.enter(0.0, room)
        assert isinstance(together, Quota)
        assert together.charge(room * tokens, 0.0) == quota
        left = quota.leave(room * tokens, 0, 0.0, room)
        assert (left.active, left.tokens) == (0, budget)


@given(
    st.lists(st.tuples(st.sampled_from(["enter", "leave"]), st.floats(0, 30)), max_size=60),
    st.integers(1, 5),
)
def test_no_more_at_once_than_allowed(steps: list[tuple[str, float]], most: int) -> None:
    quota = Quota(requests=TokenBucket.full(20, 0.0), concurrency=most)
    now = 0.0
    for step, pause in steps:
        now += pause
        if step == "leave" and quota.active:
            quota = quota.leave(0, 0, now)
        elif step == "enter":
            result = quota.enter(now)
            quota = result if isinstance(result, Quota) else quota
        assert 0 <= quota.active <= most
