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
POLICY = Policy(True, (10, 30, 60), 5 * MINUTE, 30 * MINUTE, 15 * MINUTE, True, False)
PASS = Verdict(Outcome.PASS, "Healthy", "all well")
FAIL = Verdict(Outcome.FAIL, "Errors", "9 of 9 requests failed")
WAIT = Verdict(Outcome.WAIT, "LittleTraffic", "2 of 2")


def facts(now=T0, wanted="new", verdict=PASS, **more):
    made = Facts(now=now, wanted=wanted, is_serving=True, is_canary_ready=True, verdict=verdict)
    return replace(made, last_verdict=PASS if verdict is WAIT else verdict, **more)


def trying(step=0, since=T0, **more):
    return State("old", since, Stage.CANARY, "new", step, **more)


LATER = T0 + 6 * MINUTE
CASES = {
    "nothing to do": (initial("old", T0), facts(wanted="old"), Stage.STABLE, 0),
    "a new revision": (initial("old", T0), facts(), Stage.STARTING, 0),
    "nothing serves": (initial("old", T0), facts(is_serving=False), Stage.PROMOTING, 0),
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
    "arrived": (State("new", T0, Stage.PROMOTING, "new"), facts(), Stage.STABLE, 0),
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
