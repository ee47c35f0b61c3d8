"""The rollout's state machine, and a whole rollout simulated over the operator's plans."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.api.sections import RolloutSpec, Thresholds
from ullage_operator.rollout.analysis import Analysis, Outcome
from ullage_operator.rollout.facts import command_of
from ullage_operator.rollout.stages import (
    TRYING,
    WAITING,
    RolloutCommand,
    RolloutFacts,
    RolloutProgress,
    RolloutStage,
    advance,
    initial_progress,
    weight_of,
)

T0 = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
LATER = T0 + 6 * MINUTE
POLICY = RolloutSpec(
    strategy="auto",
    weight_steps=(10, 30, 60),
    step_duration=300.0,
    min_requests=20,
    max_wait=1800.0,
    start_deadline=900.0,
    canary_replicas=1,
    thresholds=Thresholds(error_percent=1, ttft_percent=150, e2e_percent=150, restarts=0),
    auto_rollback=True,
    paused=False,
)
PASS = Analysis(Outcome.PASS, "Healthy", "all well")
FAIL = Analysis(Outcome.FAIL, "Errors", "9 of 9 requests failed")
WAIT = Analysis(Outcome.WAIT, "LittleTraffic", "2 of 2")


def facts(now=T0, target="new", analysis=PASS, **more):
    made = RolloutFacts(
        now=now,
        target=target,
        is_serving=True,
        linger=MINUTE,
        is_canary_ready=True,
        analysis=analysis,
    )
    return replace(made, final_analysis=PASS if analysis is WAIT else analysis, **more)


ROLLED_BACK = RolloutProgress("old", T0, RolloutStage.ROLLED_BACK, failed="new")
PROMOTING = RolloutProgress("new", T0, RolloutStage.PROMOTING, "new")


def trying(step=0, since=T0, **more):
    return RolloutProgress("old", since, RolloutStage.CANARY, "new", step, **more)


CASES = {
    "nothing to do": (initial_progress("old", T0), facts(target="old"), RolloutStage.STABLE, 0),
    "a new revision": (initial_progress("old", T0), facts(), RolloutStage.STARTING, 0),
    "nothing serves at the moment": (
        initial_progress("old", T0), facts(is_serving=False), RolloutStage.STABLE, 0
    ),
    "nothing has served for a while": (
        initial_progress("old", T0), facts(T0 + MINUTE, is_serving=False), RolloutStage.PROMOTING, 0
    ),
    "nothing serves since it is asked for": (
        RolloutProgress("old", T0), facts(LATER, is_serving=False), RolloutStage.STABLE, 0
    ),
    "cannot be tried": (
        initial_progress("old", T0), facts(can_canary=False), RolloutStage.PROMOTING, 0
    ),
    "ready": (
        RolloutProgress("old", T0, RolloutStage.STARTING, "new"), facts(), RolloutStage.CANARY, 10
    ),
    "not ready": (
        RolloutProgress("old", T0, RolloutStage.STARTING, "new"),
        facts(LATER, is_canary_ready=False), RolloutStage.STARTING, 0,
    ),
    "never ready": (
        RolloutProgress("old", T0, RolloutStage.STARTING, "new"),
        facts(T0 + 16 * MINUTE, is_canary_ready=False), RolloutStage.ROLLED_BACK, 0,
    ),
    "restarts while it starts": (
        RolloutProgress("old", T0, RolloutStage.STARTING, "new"),
        facts(is_canary_ready=False, restarts=1), RolloutStage.ROLLED_BACK, 0,
    ),
    "stable engines are gone for a moment": (
        trying(), facts(LATER, is_serving=False), RolloutStage.CANARY, 30
    ),
    "stable engines are gone for good": (
        trying(unserved_since=T0), facts(LATER, is_serving=False), RolloutStage.CANARY, 30
    ),
    "its pools fall asleep": (trying(2), facts(LATER, can_canary=False), RolloutStage.STARTING, 0),
    "its pools sleep on": (
        RolloutProgress("old", T0, RolloutStage.STARTING, "new", is_asleep=True),
        facts(T0 + 99 * MINUTE, can_canary=False, is_canary_ready=False), RolloutStage.STARTING, 0,
    ),
    "its pools wake": (
        RolloutProgress("old", T0, RolloutStage.STARTING, "new", is_asleep=True),
        facts(T0 + 99 * MINUTE, is_canary_ready=False), RolloutStage.STARTING, 0,
    ),
    "too early": (trying(), facts(T0 + MINUTE), RolloutStage.CANARY, 10),
    "next step": (trying(), facts(LATER), RolloutStage.CANARY, 30),
    "last step": (trying(1), facts(LATER), RolloutStage.CANARY, 60),
    "promoted": (trying(2), facts(LATER), RolloutStage.PROMOTING, 0),
    "too few": (trying(), facts(LATER, analysis=WAIT), RolloutStage.CANARY, 10),
    "waited enough": (trying(), facts(T0 + 31 * MINUTE, analysis=WAIT), RolloutStage.CANARY, 30),
    "worse": (trying(2), facts(analysis=FAIL), RolloutStage.ROLLED_BACK, 0),
    "unready for a while": (trying(), facts(LATER, is_canary_ready=False), RolloutStage.CANARY, 10),
    "unready too long": (
        trying(unready_since=T0), facts(T0 + 15 * MINUTE, is_canary_ready=False),
        RolloutStage.ROLLED_BACK, 0,
    ),
    "a newer edit": (trying(2), facts(target="newer"), RolloutStage.STARTING, 0),
    "taken back": (trying(2), facts(target="old"), RolloutStage.STABLE, 0),
    "promote": (trying(), facts(command=RolloutCommand.PROMOTE), RolloutStage.PROMOTING, 0),
    "abort": (trying(2), facts(command=RolloutCommand.ABORT), RolloutStage.ROLLED_BACK, 0),
    "pause": (trying(), facts(LATER, command=RolloutCommand.PAUSE), RolloutStage.CANARY, 10),
    "worse while paused": (
        trying(), facts(LATER, analysis=FAIL, command=RolloutCommand.PAUSE),
        RolloutStage.ROLLED_BACK, 0
    ),
    "not tried again": (
        ROLLED_BACK, facts(LATER), RolloutStage.ROLLED_BACK, 0
    ),
    "another after a failure": (
        ROLLED_BACK, facts(target="newer"),
        RolloutStage.STARTING, 0,
    ),
    "forced after a failure": (
        ROLLED_BACK, facts(command=RolloutCommand.PROMOTE),
        RolloutStage.STARTING, 0,
    ),
    "arriving": (
        PROMOTING, facts(is_settled=False), RolloutStage.PROMOTING, 60
    ),
    "arrived, but not yet found": (
        PROMOTING, facts(LATER), RolloutStage.PROMOTING, 60
    ),
    "arrived": (
        replace(PROMOTING, settled_since=LATER), facts(LATER + MINUTE),
        RolloutStage.STABLE, 0,
    ),
    "arrived without a canary": (
        RolloutProgress("new", T0, RolloutStage.PROMOTING), facts(), RolloutStage.STABLE, 0
    ),
    "unsettled again": (
        RolloutProgress("new", T0, RolloutStage.PROMOTING, "new", settled_since=T0),
        facts(LATER, is_settled=False), RolloutStage.PROMOTING, 60,
    ),
    "an edit while only the canary serves waits": (
        RolloutProgress("new", T0, RolloutStage.PROMOTING, "new", unserved_since=T0),
        facts(LATER, target="newer", is_settled=False, is_serving=False, is_bridged=True),
        RolloutStage.PROMOTING, 60,
    ),
    "an edit while arriving waits": (
        RolloutProgress("new", T0, RolloutStage.PROMOTING, "new"),
        facts(LATER, target="newer", is_settled=False), RolloutStage.PROMOTING, 60,
    ),
    "but not for ever": (
        RolloutProgress("new", T0, RolloutStage.PROMOTING, "new"),
        facts(T0 + 15 * MINUTE, target="newer", is_settled=False), RolloutStage.STARTING, 0,
    ),
}  # fmt: skip


def test_transitions(subtests):
    for name, (state, seen, stage, weight) in CASES.items():
        found = advance(state, seen, POLICY)
        with subtests.test(name):
            assert found.stage is stage, found
            if found.canary:
                expected = 60 if stage is RolloutStage.PROMOTING else weight
                assert weight_of(found, POLICY.weight_steps, 1.0) == expected
            assert found.message


def test_engines_that_never_served_take_the_next_edit_at_once():
    bad = RolloutProgress("bad", T0, RolloutStage.PROMOTING, unserved_since=T0 - 5 * MINUTE)
    seen = facts(target="better", is_serving=False, is_settled=False)
    assert advance(bad, seen, POLICY).stable == "better"


def test_a_waiting_edit_is_told_of():
    arriving = RolloutProgress(
        "new", T0, RolloutStage.PROMOTING, "new", reason="Promoting", message="promoted"
    )
    seen = facts(target="newer", is_settled=False)
    waiting = advance(arriving, seen, POLICY)
    assert (waiting.stage, waiting.reason) == (RolloutStage.PROMOTING, "NewerWaits")
    assert waiting.message == "revision newer waits until new serves everything"
    assert advance(waiting, replace(seen, target="new"), POLICY).reason == "Promoting"


def test_a_service_without_engines_says_when_it_rolls():
    waiting = advance(RolloutProgress("old", T0), facts(is_serving=False), POLICY)
    assert (waiting.stage, waiting.reason) == (RolloutStage.STABLE, WAITING)
    assert "after 60 s" in waiting.message
    assert advance(waiting, facts(target="old"), POLICY).reason == "Stable"
    assert advance(waiting, facts(), POLICY).stage is RolloutStage.STARTING
    seen = facts(T0 + MINUTE, is_serving=False)
    assert advance(waiting, seen, POLICY).stable == "new"


@pytest.mark.parametrize("why", [{"is_serving": False}, {"can_canary": False}, {}])
def test_a_pause_holds_what_needs_no_canary(why):
    policy = msgspec.structs.replace(POLICY, paused=True, strategy="auto" if why else "rolling")
    seen = facts(LATER, **why)
    waiting = advance(initial_progress("old", T0), seen, policy)
    assert (waiting.stable, waiting.reason) == ("old", "Paused")
    assert advance(waiting, seen, msgspec.structs.replace(policy, paused=False)).stable == "new"


def test_a_failure_that_is_not_rolled_back_is_held_without_requests():
    policy = msgspec.structs.replace(POLICY, auto_rollback=False)
    held = advance(trying(), facts(analysis=FAIL), policy)
    assert (held.stage, held.is_held) == (RolloutStage.CANARY, True)
    assert weight_of(held, policy.weight_steps, 1.0) == 0
    assert advance(held, facts(LATER), policy) == held
    assert (
        advance(held, facts(command=RolloutCommand.PROMOTE), policy).stage is RolloutStage.PROMOTING
    )
    assert (
        advance(held, facts(command=RolloutCommand.ABORT), policy).stage is RolloutStage.ROLLED_BACK
    )


def test_a_paused_service_starts_no_canary():
    policy = msgspec.structs.replace(POLICY, paused=True)
    waiting = advance(initial_progress("old", T0), facts(), policy)
    assert (waiting.stage, waiting.reason) == (RolloutStage.STABLE, "Paused")
    assert advance(waiting, facts(), POLICY).stage is RolloutStage.STARTING


def test_rolling_needs_no_canary():
    found = advance(
        initial_progress("old", T0), facts(), msgspec.structs.replace(POLICY, strategy="rolling")
    )
    assert (found.stage, found.stable, found.canary) == (RolloutStage.PROMOTING, "new", "")


def test_a_canary_that_gets_a_place_has_its_whole_deadline_from_then():
    state = RolloutProgress("old", T0, RolloutStage.STARTING, "new")
    crowded = facts(T0 + 14 * MINUTE, is_canary_ready=False, crowded=("single",))
    placed = advance(state, crowded, POLICY)
    assert (placed.replaces, placed.since) == (("single",), crowded.now)
    assert "has the place of an engine of single" in placed.message
    later = replace(crowded, now=T0 + 28 * MINUTE)
    assert advance(placed, later, POLICY).since == crowded.now, "once"
    too_late = replace(crowded, now=T0 + 29 * MINUTE)
    assert advance(placed, too_late, POLICY).stage is RolloutStage.ROLLED_BACK
    assert advance(placed, facts(T0 + 15 * MINUTE), POLICY).replaces == ("single",)
    assert advance(placed, facts(LATER, target="old"), POLICY).replaces == ()


@given(st.integers(0, 500), st.integers(1, 100), st.integers(1, 100))
def test_what_may_be_away_is_at_least_one_and_never_more_than_the_part(size, percent, count):
    policy = msgspec.structs.replace(POLICY, max_unavailable=f"{percent}%")
    most = policy.most_unavailable(size)
    assert min(1, size) <= most <= max(min(1, size), size * percent / 100)
    assert msgspec.structs.replace(POLICY, max_unavailable=count).most_unavailable(size) == min(
        count, size
    )


def test_a_canary_never_gets_more_than_its_share():
    assert [weight_of(trying(step), POLICY.weight_steps, 0.25) for step in range(3)] == [10, 25, 25]


@pytest.mark.parametrize(
    ("annotation", "seen", "command"),
    [
        ("", "", ""), ("promote", "", "promote"), ("promote", "promote", ""),
        ("promote:new", "promote:new", "promote"), ("promote:other", "", ""),
        ("pause", "pause", "pause"), ("abort", "promote", "abort"), ("nonsense", "", ""),
    ],
)  # fmt: skip
def test_annotations(annotation, seen, command):
    assert command_of(annotation, replace(trying(), seen=seen), "new") == command


moments = st.builds(
    RolloutFacts,
    now=st.just(T0),
    target=st.sampled_from(["old", "new", "newer"]),
    is_serving=st.booleans(),
    is_bridged=st.booleans(),
    linger=st.just(MINUTE),
    can_canary=st.sampled_from([True, True, True, False]),
    is_canary_ready=st.booleans(),
    crowded=st.sampled_from([(), (), ("large",), ("large", "single")]),
    restarts=st.sampled_from([0, 0, 0, 1]),
    is_settled=st.booleans(),
    analysis=st.sampled_from([PASS, WAIT, FAIL]),
    final_analysis=st.sampled_from([PASS, FAIL]),
    command=st.sampled_from([RolloutCommand.NONE, RolloutCommand.NONE, *RolloutCommand]),
)


@given(
    st.lists(st.tuples(moments, st.sampled_from([1, 2, 20, 40])), max_size=40),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_what_nobody_judged_never_becomes_stable_while_it_is_tried(history, rolls, paused, tries):
    policy = msgspec.structs.replace(
        POLICY, auto_rollback=rolls, paused=paused, strategy="auto" if tries else "rolling"
    )
    state = initial_progress("old", T0)
    now = T0
    for seen, minutes in history:
        now += minutes * MINUTE
        seen = replace(seen, now=now)
        before = state
        state = advance(state, seen, policy)
        assert not state.replaces or state.stage in (*TRYING, RolloutStage.PROMOTING)
        if state.stable == before.stable:
            continue
        assert state.stable == seen.target
        if policy.paused:
            assert seen.command is RolloutCommand.PROMOTE
        if before.canary == seen.target and before.stage in TRYING:
            judged = (
                before.stage is RolloutStage.CANARY and before.step == 2 and seen.is_canary_ready
            )
            assert not tries or seen.command is RolloutCommand.PROMOTE or judged


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["old", "new", "newer"]),
            st.sampled_from([PASS, FAIL, WAIT]),
            st.booleans(), st.booleans(), st.booleans(),
            st.sampled_from(list(RolloutCommand)),
        ),
        max_size=40,
    ),
    st.sampled_from([PASS, FAIL, WAIT]),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_whatever_happened_it_ends(history, analysis, becomes_ready):
    state = initial_progress("old", T0)
    now = T0
    for target, seen, ready, serving, settled, command in history:
        now += MINUTE
        state = advance(state, facts(now, target, seen, is_canary_ready=ready,
                                     is_serving=serving, is_settled=settled,
                                     command=command), POLICY)  # fmt: skip
        assert bool(state.canary) == (
            state.stage in (RolloutStage.STARTING, RolloutStage.CANARY)
        ) or (state.stage is RolloutStage.PROMOTING)
    for _ in range(400):
        now += MINUTE
        known = facts(now, "final", analysis, is_canary_ready=becomes_ready)
        state = advance(state, known, POLICY)
    if becomes_ready and analysis is not FAIL:
        assert (state.stage, state.stable) == (RolloutStage.STABLE, "final")
    else:
        assert (state.stage, state.failed) == (RolloutStage.ROLLED_BACK, "final")
        assert state.stable != "final"
    assert advance(state, known, POLICY) == state
    json.dumps(state.message)
