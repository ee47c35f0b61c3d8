"""The rollout's state machine, and a whole rollout simulated over the operator's plans."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.canary import command_of
from ullage_operator.judgement import Outcome, Verdict
from ullage_operator.rollout import (
    TRYING,
    WAITING,
    Command,
    Facts,
    Policy,
    Stage,
    State,
    advance,
    initial,
    weight_of,
)

T0 = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
LATER = T0 + 6 * MINUTE
POLICY = Policy(
    is_canary=True,
    steps=(10, 30, 60),
    step=5 * MINUTE,
    max_wait=30 * MINUTE,
    start_deadline=15 * MINUTE,
    linger=MINUTE,
    restarts=0,
    auto_rollback=True,
    is_paused=False,
)
PASS = Verdict(Outcome.PASS, "Healthy", "all well")
FAIL = Verdict(Outcome.FAIL, "Errors", "9 of 9 requests failed")
WAIT = Verdict(Outcome.WAIT, "LittleTraffic", "2 of 2")


def facts(now=T0, wanted="new", verdict=PASS, **more):
    made = Facts(now=now, wanted=wanted, is_serving=True, is_canary_ready=True, verdict=verdict)
    return replace(made, last_verdict=PASS if verdict is WAIT else verdict, **more)


def trying(step=0, since=T0, **more):
    return State("old", since, Stage.CANARY, "new", step, **more)


CASES = {
    "nothing to do": (initial("old", T0), facts(wanted="old"), Stage.STABLE, 0),
    "a new revision": (initial("old", T0), facts(), Stage.STARTING, 0),
    "nothing serves at the moment": (
        initial("old", T0), facts(is_serving=False), Stage.STABLE, 0
    ),
    "nothing has served for a while": (
        initial("old", T0), facts(T0 + MINUTE, is_serving=False), Stage.PROMOTING, 0
    ),
    "nothing serves since it is asked for": (
        State("old", T0), facts(LATER, is_serving=False), Stage.STABLE, 0
    ),
    "cannot be tried": (initial("old", T0), facts(can_canary=False), Stage.PROMOTING, 0),
    "ready": (State("old", T0, Stage.STARTING, "new"), facts(), Stage.CANARY, 10),
    "not ready": (
        State("old", T0, Stage.STARTING, "new"),
        facts(LATER, is_canary_ready=False), Stage.STARTING, 0,
    ),
    "never ready": (
        State("old", T0, Stage.STARTING, "new"),
        facts(T0 + 16 * MINUTE, is_canary_ready=False), Stage.ROLLED_BACK, 0,
    ),
    "restarts while it starts": (
        State("old", T0, Stage.STARTING, "new"),
        facts(is_canary_ready=False, restarts=1), Stage.ROLLED_BACK, 0,
    ),
    "stable engines are gone for a moment": (
        trying(), facts(LATER, is_serving=False), Stage.CANARY, 30
    ),
    "stable engines are gone for good": (
        trying(unserved_since=T0), facts(LATER, is_serving=False), Stage.CANARY, 30
    ),
    "its pools fall asleep": (trying(2), facts(LATER, can_canary=False), Stage.STARTING, 0),
    "its pools sleep on": (
        State("old", T0, Stage.STARTING, "new", is_asleep=True),
        facts(T0 + 99 * MINUTE, can_canary=False, is_canary_ready=False), Stage.STARTING, 0,
    ),
    "its pools wake": (
        State("old", T0, Stage.STARTING, "new", is_asleep=True),
        facts(T0 + 99 * MINUTE, is_canary_ready=False), Stage.STARTING, 0,
    ),
    "too early": (trying(), facts(T0 + MINUTE), Stage.CANARY, 10),
    "next step": (trying(), facts(LATER), Stage.CANARY, 30),
    "last step": (trying(1), facts(LATER), Stage.CANARY, 60),
    "promoted": (trying(2), facts(LATER), Stage.PROMOTING, 0),
    "too few": (trying(), facts(LATER, verdict=WAIT), Stage.CANARY, 10),
    "waited enough": (trying(), facts(T0 + 31 * MINUTE, verdict=WAIT), Stage.CANARY, 30),
    "worse": (trying(2), facts(verdict=FAIL), Stage.ROLLED_BACK, 0),
    "unready for a while": (trying(), facts(LATER, is_canary_ready=False), Stage.CANARY, 10),
    "unready too long": (
        trying(unready_since=T0), facts(T0 + 15 * MINUTE, is_canary_ready=False),
        Stage.ROLLED_BACK, 0,
    ),
    "a newer edit": (trying(2), facts(wanted="newer"), Stage.STARTING, 0),
    "taken back": (trying(2), facts(wanted="old"), Stage.STABLE, 0),
    "promote": (trying(), facts(command=Command.PROMOTE), Stage.PROMOTING, 0),
    "abort": (trying(2), facts(command=Command.ABORT), Stage.ROLLED_BACK, 0),
    "pause": (trying(), facts(LATER, command=Command.PAUSE), Stage.CANARY, 10),
    "worse while paused": (
        trying(), facts(LATER, verdict=FAIL, command=Command.PAUSE), Stage.ROLLED_BACK, 0
    ),
    "not tried again": (
        State("old", T0, Stage.ROLLED_BACK, failed="new"), facts(LATER), Stage.ROLLED_BACK, 0
    ),
    "another after a failure": (
        State("old", T0, Stage.ROLLED_BACK, failed="new"), facts(wanted="newer"),
        Stage.STARTING, 0,
    ),
    "forced after a failure": (
        State("old", T0, Stage.ROLLED_BACK, failed="new"), facts(command=Command.PROMOTE),
        Stage.STARTING, 0,
    ),
    "arriving": (
        State("new", T0, Stage.PROMOTING, "new"), facts(is_settled=False), Stage.PROMOTING, 60
    ),
    "arrived, but not yet found": (
        State("new", T0, Stage.PROMOTING, "new"), facts(LATER), Stage.PROMOTING, 60
    ),
    "arrived": (
        State("new", T0, Stage.PROMOTING, "new", settled_since=LATER), facts(LATER + MINUTE),
        Stage.STABLE, 0,
    ),
    "arrived without a canary": (State("new", T0, Stage.PROMOTING), facts(), Stage.STABLE, 0),
    "unsettled again": (
        State("new", T0, Stage.PROMOTING, "new", settled_since=T0),
        facts(LATER, is_settled=False), Stage.PROMOTING, 60,
    ),
    "an edit while only the canary serves waits": (
        State("new", T0, Stage.PROMOTING, "new", unserved_since=T0),
        facts(LATER, wanted="newer", is_settled=False, is_serving=False, is_bridged=True),
        Stage.PROMOTING, 60,
    ),
    "an edit while arriving waits": (
        State("new", T0, Stage.PROMOTING, "new"),
        facts(LATER, wanted="newer", is_settled=False), Stage.PROMOTING, 60,
    ),
    "but not for ever": (
        State("new", T0, Stage.PROMOTING, "new"),
        facts(T0 + 15 * MINUTE, wanted="newer", is_settled=False), Stage.STARTING, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_transitions(name):
    state, seen, stage, weight = CASES[name]
    found = advance(state, seen, POLICY)
    assert found.stage is stage, found
    if found.canary:
        assert weight_of(found, POLICY.steps, 1.0) == (60 if stage is Stage.PROMOTING else weight)
    assert found.message


def test_engines_that_never_served_take_the_next_edit_at_once():
    bad = State("bad", T0, Stage.PROMOTING, unserved_since=T0 - 5 * MINUTE)
    seen = facts(wanted="better", is_serving=False, is_settled=False)
    assert advance(bad, seen, POLICY).stable == "better"


def test_a_waiting_edit_is_told_of():
    arriving = State("new", T0, Stage.PROMOTING, "new", reason="Promoting", message="promoted")
    seen = facts(wanted="newer", is_settled=False)
    waiting = advance(arriving, seen, POLICY)
    assert (waiting.stage, waiting.reason) == (Stage.PROMOTING, "NewerWaits")
    assert waiting.message == "revision newer waits until new serves everything"
    assert advance(waiting, replace(seen, wanted="new"), POLICY).reason == "Promoting"


def test_a_service_without_engines_says_when_it_rolls():
    waiting = advance(State("old", T0), facts(is_serving=False), POLICY)
    assert (waiting.stage, waiting.reason) == (Stage.STABLE, WAITING)
    assert "after 60 s" in waiting.message
    assert advance(waiting, facts(wanted="old"), POLICY).reason == "Stable"
    assert advance(waiting, facts(), POLICY).stage is Stage.STARTING
    seen = facts(T0 + MINUTE, is_serving=False)
    assert advance(waiting, seen, POLICY).stable == "new"


@pytest.mark.parametrize("why", [{"is_serving": False}, {"can_canary": False}, {}])
def test_a_pause_holds_what_needs_no_canary(why):
    policy = replace(POLICY, is_paused=True, is_canary=bool(why))
    seen = facts(LATER, **why)
    waiting = advance(initial("old", T0), seen, policy)
    assert (waiting.stable, waiting.reason) == ("old", "Paused")
    assert advance(waiting, seen, replace(policy, is_paused=False)).stable == "new"


def test_a_failure_that_is_not_rolled_back_is_held_without_requests():
    policy = replace(POLICY, auto_rollback=False)
    held = advance(trying(), facts(verdict=FAIL), policy)
    assert (held.stage, held.is_held) == (Stage.CANARY, True)
    assert weight_of(held, policy.steps, 1.0) == 0
    assert advance(held, facts(LATER), policy) == held
    assert advance(held, facts(command=Command.PROMOTE), policy).stage is Stage.PROMOTING
    assert advance(held, facts(command=Command.ABORT), policy).stage is Stage.ROLLED_BACK


def test_a_paused_service_starts_no_canary():
    policy = replace(POLICY, is_paused=True)
    waiting = advance(initial("old", T0), facts(), policy)
    assert (waiting.stage, waiting.reason) == (Stage.STABLE, "Paused")
    assert advance(waiting, facts(), POLICY).stage is Stage.STARTING


def test_rolling_needs_no_canary():
    found = advance(initial("old", T0), facts(), replace(POLICY, is_canary=False))
    assert (found.stage, found.stable, found.canary) == (Stage.PROMOTING, "new", "")


def test_a_canary_never_gets_more_than_its_share():
    assert [weight_of(trying(step), POLICY.steps, 0.25) for step in range(3)] == [10, 25, 25]


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
    Facts,
    now=st.just(T0),
    wanted=st.sampled_from(["old", "new", "newer"]),
    is_serving=st.booleans(),
    is_bridged=st.booleans(),
    can_canary=st.sampled_from([True, True, True, False]),
    is_canary_ready=st.booleans(),
    restarts=st.sampled_from([0, 0, 0, 1]),
    is_settled=st.booleans(),
    verdict=st.sampled_from([PASS, WAIT, FAIL]),
    last_verdict=st.sampled_from([PASS, FAIL]),
    command=st.sampled_from([Command.NONE, Command.NONE, *Command]),
)


@given(
    st.lists(st.tuples(moments, st.sampled_from([1, 2, 20, 40])), max_size=40),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_what_nobody_judged_never_becomes_stable_while_it_is_tried(history, rolls, paused, tries):
    policy = replace(POLICY, auto_rollback=rolls, is_paused=paused, is_canary=tries)
    state, now = initial("old", T0), T0
    for seen, minutes in history:
        now += minutes * MINUTE
        seen = replace(seen, now=now)
        before, state = state, advance(state, seen, policy)
        if state.stable == before.stable:
            continue
        assert state.stable == seen.wanted
        if policy.is_paused:
            assert seen.command is Command.PROMOTE
        if before.canary == seen.wanted and before.stage in TRYING:
            judged = before.stage is Stage.CANARY and before.step == 2 and seen.is_canary_ready
            assert not policy.is_canary or seen.command is Command.PROMOTE or judged


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["old", "new", "newer"]),
            st.sampled_from([PASS, FAIL, WAIT]),
            st.booleans(), st.booleans(), st.booleans(),
            st.sampled_from(list(Command)),
        ),
        max_size=40,
    ),
    st.sampled_from([PASS, FAIL, WAIT]),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_whatever_happened_it_ends(history, verdict, becomes_ready):
    state, now = initial("old", T0), T0
    for wanted, seen, ready, serving, settled, command in history:
        now += MINUTE
        state = advance(state, facts(now, wanted, seen, is_canary_ready=ready,
                                     is_serving=serving, is_settled=settled,
                                     command=command), POLICY)  # fmt: skip
        assert bool(state.canary) == (state.stage in (Stage.STARTING, Stage.CANARY)) or (
            state.stage is Stage.PROMOTING
        )
    for _ in range(400):
        now += MINUTE
        known = facts(now, "final", verdict, is_canary_ready=becomes_ready)
        state = advance(state, known, POLICY)
    if becomes_ready and verdict is not FAIL:
        assert (state.stage, state.stable) == (Stage.STABLE, "final")
    else:
        assert (state.stage, state.failed) == (Stage.ROLLED_BACK, "final")
        assert state.stable != "final"
    assert advance(state, known, POLICY) == state
    json.dumps(state.message)
