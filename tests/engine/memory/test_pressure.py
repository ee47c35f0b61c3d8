"""Levels from headroom, with hysteresis."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.engine import DegradeLevel, DegradeSection
from ullage_engine.memory.pressure import (
    FreeMemoryMonitor,
    PressureController,
    level_at,
    ordered_levels,
)

LEVELS = (
    DegradeLevel(below_percent=5, batch_percent=50),
    DegradeLevel(below_percent=30, max_output_tokens=2048),
    DegradeLevel(below_percent=15, batch_percent=75),
)
SECTION = DegradeSection(pressure_levels=LEVELS, hysteresis_percent=5)

bounds = st.lists(st.floats(0, 100), max_size=8, unique=True)
sections = st.builds(
    lambda belows, hysteresis: DegradeSection(
        pressure_levels=tuple(DegradeLevel(below_percent=below) for below in belows),
        hysteresis_percent=hysteresis,
    ),
    bounds,
    st.floats(0, 50),
)
shares = st.floats(0, 1)


def test_levels_are_entered_at_once_and_left_late() -> None:
    pressure = PressureController(SECTION)
    headrooms = [1.0, 0.3, 0.29, 0.34, 0.36, 0.1, 0.19, 0.2, 0.0, 0.09, 0.36]
    levels = [pressure.update(headroom) for headroom in headrooms]
    assert levels == [0, 0, 1, 1, 0, 2, 2, 1, 3, 3, 0]


def test_the_batch_shrinks_with_the_level_that_holds() -> None:
    pressure = PressureController(SECTION)
    shares = []
    for headroom in (1.0, 0.2, 0.1, 0.01, 1.0):
        pressure.update(headroom)
        shares.append(pressure.batch_share)
    assert shares == [1.0, 1.0, 0.75, 0.5, 1.0]


def test_the_smaller_of_level_and_bound_holds() -> None:
    pressure = PressureController(SECTION)
    shares = []
    for headroom, limit in ((1.0, 0.6), (0.1, 0.6), (0.01, 0.6), (0.01, 0.25), (1.0, 1.0)):
        pressure.limit_batch(limit)
        pressure.update(headroom)
        shares.append(pressure.batch_share)
    assert shares == [0.6, 0.6, 0.5, 0.25, 1.0]


def test_numbers_name_levels_in_any_order_of_configuration() -> None:
    assert [level.below for level in ordered_levels(SECTION)] == [0.3, 0.15, 0.05]
    assert level_at(SECTION, 0) is None
    assert level_at(SECTION, 3) == LEVELS[0]


@pytest.mark.parametrize("headroom", [0.0, 0.5, 1.0])
def test_without_levels_nothing_happens(headroom: float) -> None:
    pressure = PressureController(DegradeSection())
    assert (pressure.update(headroom), pressure.batch_share) == (0, 1.0)


@settings(max_examples=100, deadline=None)
@given(sections, st.lists(shares, max_size=30))
def test_a_full_pool_is_always_without_pressure(
    section: DegradeSection, history: list[float]
) -> None:
    pressure = PressureController(section)
    for headroom in history:
        assert 0 <= pressure.update(headroom) <= len(section.pressure_levels)
    assert pressure.update(1.0) == 0


@settings(max_examples=100, deadline=None)
@given(sections, st.lists(shares, max_size=10), shares, shares)
def test_less_headroom_never_means_a_milder_level(
    section: DegradeSection, history: list[float], first: float, second: float
) -> None:
    low = PressureController(section)
    high = PressureController(section)
    for headroom in history:
        low.update(headroom)
        high.update(headroom)
    assert low.update(min(first, second)) >= high.update(max(first, second))


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 90), st.floats(1, 50), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_no_flapping_inside_the_band(bound: float, band: float, places: list[float]) -> None:
    section = DegradeSection(
        pressure_levels=(DegradeLevel(below_percent=bound),), hysteresis_percent=band
    )
    below = section.pressure_levels[0].below
    top = min(1.0, below + section.hysteresis)
    inside_or_above = [below + place * (top - below) for place in places]
    for start in (0.0, 1.0):
        pressure = PressureController(section)
        level = pressure.update(start)
        inside = [headroom for headroom in inside_or_above if below <= headroom < top]
        assert {pressure.update(headroom) for headroom in inside} <= {level}


@settings(max_examples=100, deadline=None)
@given(sections, st.lists(shares, min_size=1, max_size=30))
def test_the_smallest_level_above_the_headroom_holds_or_a_stricter_one(
    section: DegradeSection, history: list[float]
) -> None:
    pressure = PressureController(section)
    for headroom in history:
        number = pressure.update(headroom)
        entered = [level for level in section.pressure_levels if headroom < level.below]
        held = level_at(section, number)
        if entered:
            assert held is not None
            assert held.below <= min(level.below for level in entered)
        elif held is not None:
            assert headroom < min(1.0, held.below + section.hysteresis)


def test_what_others_take_is_missing_and_measured_at_a_bounded_rate() -> None:
    now = [0.0]
    free = [900]
    measured = []

    def measure() -> int:
        measured.append(now[0])
        return free[0]

    monitor = FreeMemoryMonitor(measure, 200, lambda: now[0])
    free[0] = 150
    missing = []
    for _ in range(41):
        missing.append(monitor.missing_bytes())
        now[0] += 0.0625
    assert (missing[0], missing[-1]) == (0, 50)
    assert measured == [0.0, 1.0, 2.0]
    free[0] = 800
    now[0] = 4.0
    assert monitor.missing_bytes() == 0


def test_what_this_process_takes_itself_is_not_missing() -> None:
    now = [0.0]
    free = [900]
    own = [5000]
    monitor = FreeMemoryMonitor(lambda: free[0], 200, lambda: now[0], lambda: own[0])
    # The allocator has grown into the reserve.
    now[0] = 1.0
    free[0] = 50
    own[0] = 5150
    assert monitor.missing_bytes() == 0
    # Others took 60 as well.
    now[0] = 2.0
    free[0] = 0
    assert monitor.missing_bytes() == 50
    # It gave 100 back, and others took that, too.
    now[0] = 3.0
    free[0] = 0
    own[0] = 4900
    assert monitor.missing_bytes() == 200


def test_a_device_that_was_tight_from_the_beginning_stays_usable() -> None:
    now = [0.0]
    free = [120]
    monitor = FreeMemoryMonitor(lambda: free[0], 200, lambda: now[0])
    now[0] = 1.0
    assert monitor.missing_bytes() == 0
    free[0] = 100
    now[0] = 2.0
    assert monitor.missing_bytes() == 20
