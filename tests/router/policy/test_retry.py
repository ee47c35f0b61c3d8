"""Retry-After follows the predicted release of memory."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.router import RejectSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.policy.deferral import DeferralBook, Deferred
from ullage_router.policy.facts import EngineState, EngineView, Release
from ullage_router.policy.retry import JITTER, drain_s, free_s, retry_after

BOUNDS = RejectSection()


def engine(available: int = 100, *releases: tuple[float, int], **more: Any) -> EngineView:
    return EngineView(
        id="a",
        pool="single",
        standing=EngineState.USABLE,
        available=available,
        capacity=1 << 20,
        profile=MemoryProfile(16, (CacheGroup(1),)),
        expected_output=16,
        max_model_len=4096,
        releases=tuple(Release(after_s, size) for after_s, size in releases),
        **more,
    )


def whole(
    engines: list[EngineView], needed: int, ahead: int, bounds: RejectSection = BOUNDS
) -> tuple[int, int]:
    """The earliest and the latest second of a forecast."""
    seconds = free_s(engines, needed, ahead)
    told = [retry_after(seconds, {}, draw, bounds) for draw in range(60)]
    return min(told), max(told)


TABLE = {
    "fits": (engine(100), 100, 0, (1, 1)),
    "nothing is known": (engine(100), 101, 0, (5, 10)),
    "at the release": (engine(100, (2.2, 50)), 150, 0, (3, 3)),
    "at the second release": (engine(100, (9.0, 50), (2.0, 10)), 150, 0, (9, 11)),
    "those before take the first": (engine(100, (2.0, 50), (7.0, 50)), 120, 50, (7, 9)),
    "four times what is released": (engine(100, (2.0, 50)), 300, 0, (8, 10)),
    "far more than is released": (engine(100, (2.0, 50)), 1000, 0, (15, 30)),
    "longer than the bound": (engine(100, (99.0, 50)), 150, 0, (15, 30)),
    "a release now": (engine(0, (0.0, 50)), 50, 0, (1, 1)),
    "prompts before it": (
        engine(0, (1.0, 50), backlog_tokens=100, prefill_speed=10.0),
        50,
        0,
        (10, 12),
    ),
    # 100 prompt tokens take 1 s, and 16 output tokens 8 s.
    "sent after the last report": (
        engine(
            0, backlog_tokens=100, prefill_speed=100.0, decode_speed=2.0, load=2, unreported=400
        ),
        300,
        0,
        (9, 11),
    ),
    "sent after the last report, speed unknown": (engine(0, unreported=400), 300, 0, (5, 10)),
    "a report first": (
        engine(0, (2.5, 100), decode_speed=2.0, load=2, unreported=400),
        100,
        0,
        (3, 3),
    ),
    "overcommitted": (engine(-50, (1.5, 50), (3.5, 50)), 50, 0, (4, 5)),
}


@pytest.mark.parametrize(
    ("view", "needed", "ahead", "seconds"), list(TABLE.values()), ids=list(TABLE)
)
def test_whole_seconds(view: EngineView, needed: int, ahead: int, seconds: tuple[int, int]) -> None:
    assert whole([view], needed, ahead) == seconds


def test_those_before_take_memory_of_every_engine() -> None:
    engines = [engine(0, (4.0, 100)), engine(0, (2.0, 100))]
    assert free_s(engines, 100, 0) == 2.0
    assert free_s(engines, 100, 100) == 4.0


def test_the_services_own_bounds() -> None:
    bounds = RejectSection(min_retry_delay=3, max_retry_delay=8)
    assert whole([engine(100)], 1, 0, bounds) == (3, 3)
    assert whole([engine(0, (20.0, 100))], 1, 0, bounds) == (4, 8)


def test_of_seconds_that_will_do_the_emptiest_is_told() -> None:
    assert retry_after(10.0, {10: 5, 11: 3, 12: 4}, 7, BOUNDS) == 11
    assert retry_after(10.0, {10: 5, 11: 3}, 7, BOUNDS) == 12
    assert {retry_after(10.0, {11: 3}, draw, BOUNDS) for draw in range(9)} == {10, 12}


def test_what_was_refused_takes_the_time_in_which_as_much_is_released() -> None:
    engines = [engine(0, (4.0, 100), (2.0, 100)), engine(0, (1.0, 50)), engine(0)]
    assert drain_s(engines, 300) == 3.0
    assert drain_s([engine(0)], 300) == 0.0


engines = st.lists(
    st.builds(
        lambda available, releases, backlog, speed, unreported: engine(
            available,
            *releases,
            backlog_tokens=backlog,
            prefill_speed=100.0,
            decode_speed=speed,
            unreported=unreported,
        ),
        st.integers(-500, 500),
        st.lists(st.tuples(st.floats(0, 60), st.integers(0, 300)), max_size=5),
        st.integers(0, 5000),
        st.sampled_from([0.0, 0.5, 20.0]),
        st.integers(0, 300),
    ),
    min_size=1,
    max_size=4,
)
sizes = st.integers(0, 3000)


@settings(max_examples=300, deadline=None)
@given(engines, sizes, sizes, sizes, sizes)
def test_more_is_never_sooner(
    views: list[EngineView], needed: int, ahead: int, more: int, more_ahead: int
) -> None:
    seconds = free_s(views, needed, ahead)
    later_s = free_s(views, needed + more, ahead + more_ahead)
    assert later_s is None or (seconds is not None and seconds <= later_s)


returns = st.dictionaries(st.integers(0, 31), st.integers(1, 1000))


@given(st.none() | st.floats(0, 200), returns, st.integers(0, 1 << 30))
def test_nobody_is_told_to_come_before_the_forecast(
    seconds: float | None, returns: dict[int, int], draw: int
) -> None:
    told = retry_after(seconds, returns, draw, BOUNDS)
    assert 1 <= told <= 30
    if seconds is not None and seconds <= 30:
        assert seconds <= told <= max(1, math.ceil(seconds * (1 + JITTER)))


kinds = st.builds(
    Deferred, st.sampled_from(("single", "large")), st.sampled_from("abc"), st.integers(-1, 1)
)
refusals = st.lists(st.tuples(kinds, st.integers(0, 100), st.integers(1, 30)), max_size=30)


@given(refusals, st.integers(0, 40))
def test_the_book_has_what_is_not_due(
    refused: list[tuple[Deferred, int, int]], later_s: int
) -> None:
    book = DeferralBook()
    for kind, size, after_s in refused:
        book.add(kind, 1.0, size, after_s)
    book.expire(later_s)
    still = [each for each in refused if each[2] > later_s and each[1]]
    assert bool(book) is bool(still)
    for tenant in "abc":
        for pool in ("single", "large"):
            own = sum(s for k, s, _ in still if k == Deferred(pool, tenant, 0))
            before = sum(s for k, s, _ in still if k.pool == pool and k.priority > 0)
            for other in set("abc") - {tenant}:
                theirs = sum(s for k, s, _ in still if k == Deferred(pool, other, 0))
                before += min(theirs, own)
            assert book.ahead(pool, tenant, 1.0, 0) == own + before
    sizes = sum(sum(book.returns(pool, later_s).values()) for pool in ("single", "large"))
    assert sizes == sum(size for _, size, _ in still)


def test_a_tenant_waits_for_others_as_far_as_it_is_refused_itself() -> None:
    book = DeferralBook()
    book.add(Deferred("single", "flood", 0), 2.0, 1000, 30.0)
    assert book.ahead("single", "calm", 1.0, 0) == 0
    book.add(Deferred("single", "calm", 0), 1.0, 10, 30.0)
    assert book.ahead("single", "calm", 1.0, 0) == 30
    assert book.ahead("single", "calm", 1.0, 1) == 0
    assert book.ahead("single", "calm", 1.0, -1) == 1010
