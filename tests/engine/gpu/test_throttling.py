"""Boost off: the batch follows sustained throttling, one step at a time, and comes back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.engine import ThrottlingSection
from ullage_engine.gpu.throttling import MAX_GAP_S, BoostState, advance, counted_reasons

HOT = frozenset({"hw_thermal"})
CLEAR: frozenset[str] = frozenset()
SECTION = ThrottlingSection(
    after=10.0, recover_after=30.0, batch_step_percent=25, min_batch_percent=25
)

sections = st.builds(
    ThrottlingSection,
    after=st.floats(0, 20),
    recover_after=st.floats(0, 60),
    batch_step_percent=st.floats(20, 100),
    min_batch_percent=st.floats(5, 100),
)
observations = st.sampled_from([HOT, CLEAR, frozenset({"sw_thermal", "hw_slowdown"}), None])
histories = st.lists(st.tuples(observations, st.floats(0, 5)), max_size=50)


def follow(
    section: ThrottlingSection, reasons: frozenset[str] | None, seconds: int, state: BoostState
) -> BoostState:
    for _ in range(seconds):
        state = advance(section, state, reasons, 1.0)
    return state


def test_sustained_heat_takes_a_step_at_a_time_and_a_longer_calm_gives_it_back() -> None:
    state = BoostState()
    shares = []
    for reasons, seconds in ((HOT, 9), (HOT, 1), (HOT, 10), (HOT, 100), (CLEAR, 29), (CLEAR, 1)):
        state = follow(SECTION, reasons, seconds, state)
        shares.append(state.batch_share)
    assert shares == [1.0, 0.75, 0.5, 0.25, 0.25, 0.5]
    assert state.is_off
    assert state.reasons == HOT
    assert follow(SECTION, CLEAR, 60, state) == BoostState()


def test_heat_that_comes_and_goes_adds_up_if_it_is_there_most_of_the_time() -> None:
    def shares_after(pattern: list[frozenset[str]]) -> float:
        state = BoostState()
        for _ in range(100):
            for reasons in pattern:
                state = advance(SECTION, state, reasons, 1.0)
        return state.batch_share

    assert shares_after([HOT, HOT, CLEAR]) == 0.25
    assert shares_after([HOT, CLEAR, CLEAR]) == 1.0


def test_only_what_is_configured_counts_and_of_any_gpu() -> None:
    both = [frozenset({"power_cap"}), HOT, None]
    assert counted_reasons(SECTION, both) == HOT
    assert counted_reasons(ThrottlingSection(power_cap=True), both) == {"power_cap", "hw_thermal"}
    assert counted_reasons(SECTION, [frozenset({"power_cap"})]) == CLEAR
    assert counted_reasons(SECTION, [None, None]) is None


def test_heat_that_nobody_reports_any_more_does_not_last() -> None:
    hot = follow(SECTION, HOT, 20, BoostState())
    assert hot.batch_share == 0.5
    assert follow(SECTION, None, 29, hot).batch_share == 0.5
    assert follow(SECTION, None, 60, hot) == BoostState()


@settings(max_examples=100, deadline=None)
@given(sections, histories)
def test_the_share_stays_within_its_bounds_and_changes_for_a_reason(
    section: ThrottlingSection, history: list[tuple[frozenset[str] | None, float]]
) -> None:
    state = BoostState()
    for reasons, elapsed_s in history:
        after = advance(section, state, reasons, elapsed_s)
        assert section.min_batch_share <= after.batch_share <= 1.0
        if after.batch_share < state.batch_share:
            assert reasons
            assert reasons <= after.reasons
        if after.batch_share > state.batch_share:
            assert not reasons
        assert bool(after.reasons) == after.is_off
        state = after


@settings(max_examples=100, deadline=None)
@given(sections, histories)
def test_two_steps_of_a_direction_lie_as_far_apart_as_configured(
    section: ThrottlingSection, history: list[tuple[frozenset[str] | None, float]]
) -> None:
    state = BoostState()
    seconds = {True: 0.0, False: 0.0}
    for reasons, elapsed_s in history:
        for is_hot in seconds:
            seconds[is_hot] += min(elapsed_s, MAX_GAP_S) if bool(reasons) == is_hot else 0.0
        after = advance(section, state, reasons, elapsed_s)
        if after.batch_share != state.batch_share:
            is_shrunk = after.batch_share < state.batch_share
            needed_s = section.after if is_shrunk else section.recover_after
            assert seconds[is_shrunk] >= needed_s - 1e-6
            seconds = {True: 0.0, False: 0.0}
        state = after


@settings(max_examples=25, deadline=None)
@given(sections, histories)
def test_lasting_heat_ends_at_the_least_share_and_lasting_calm_at_all_of_it(
    section: ThrottlingSection, history: list[tuple[frozenset[str] | None, float]]
) -> None:
    state = BoostState()
    for reasons, elapsed_s in history:
        state = advance(section, state, reasons, elapsed_s)
    # At most 5 steps of 0.2, of at most 20 and 60 s.
    hot = follow(section, HOT, 6 * 21, state)
    assert hot.batch_share == section.min_batch_share
    calm = follow(section, CLEAR, 6 * 61, hot)
    assert (calm.batch_share, calm.reasons, calm.throttled_s) == (1.0, CLEAR, 0.0)
