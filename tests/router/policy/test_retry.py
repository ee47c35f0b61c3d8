"""Retry-After follows the predicted release of memory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.router import RejectSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.policy.decision import EngineState, EngineView, Release
from ullage_router.policy.retry import retry_after

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


TABLE = {
    "fits": (engine(100), 100, 0, 1),
    "nothing is known": (engine(100), 101, 0, 5),
    "at the release": (engine(100, (2.2, 50)), 150, 0, 3),
    "at the second release": (engine(100, (9.0, 50), (2.0, 10)), 150, 0, 9),
    "those before take the first": (engine(100, (2.0, 50), (7.0, 50)), 120, 50, 7),
    "more than is released": (engine(100, (2.0, 50)), 1000, 0, 30),
    "longer than the bound": (engine(100, (99.0, 50)), 150, 0, 30),
    "a release now": (engine(0, (0.0, 50)), 50, 0, 1),
    "prompts before it": (engine(0, backlog_tokens=100, prefill_speed=10.0), 50, 0, 10),
    "overcommitted": (engine(-50, (1.5, 50), (3.5, 50)), 50, 0, 4),
}


@pytest.mark.parametrize(
    ("view", "needed", "ahead", "seconds"), list(TABLE.values()), ids=list(TABLE)
)
def test_whole_seconds(view: EngineView, needed: int, ahead: int, seconds: int) -> None:
    assert retry_after([view], needed, ahead, BOUNDS) == seconds


def test_those_before_take_memory_of_every_engine() -> None:
    engines = [engine(0, (4.0, 100)), engine(0, (2.0, 100))]
    assert retry_after(engines, 100, 0, BOUNDS) == 2
    assert retry_after(engines, 100, 100, BOUNDS) == 4


def test_the_services_own_bounds() -> None:
    bounds = RejectSection(min_retry_after=3, max_retry_after=8)
    assert retry_after([engine(100)], 1, 0, bounds) == 3
    assert retry_after([engine(0, (20.0, 100))], 1, 0, bounds) == 8


engines = st.lists(
    st.builds(
        lambda available, releases, backlog: engine(
            available, *releases, backlog_tokens=backlog, prefill_speed=100.0
        ),
        st.integers(-500, 500),
        st.lists(st.tuples(st.floats(0, 60), st.integers(0, 300)), max_size=5),
        st.integers(0, 5000),
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
    seconds = retry_after(views, needed, ahead, BOUNDS)
    assert 1 <= seconds <= 30
    assert seconds <= retry_after(views, needed + more, ahead + more_ahead, BOUNDS)
