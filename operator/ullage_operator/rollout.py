"""The stages of a rollout: a pure state machine.

    Stable ─► Starting ─► Canary, step by step ─► Promoting ─► Stable
                 └────────────┴──► RolledBack (until the spec changes)

A revision names what the engines run. The stable one serves; another that the spec asks for is
tried on a canary first. Whatever is decided is in `State`, which is kept in the cluster: the
operator may end at any point.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from ullage_operator.judgement import Outcome, Verdict


class Stage(StrEnum):
    STABLE = "Stable"
    STARTING = "Starting"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    ROLLED_BACK = "RolledBack"


class Command(StrEnum):
    """What somebody annotated the service with."""

    NONE = ""
    PROMOTE = "promote"
    ABORT = "abort"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Policy:
    """How to roll out."""

    is_canary: bool
    steps: tuple[int, ...]
    """Requests of a hundred, rising."""
    step: timedelta
    max_wait: timedelta
    """For enough requests, in each step."""
    start_deadline: timedelta
    auto_rollback: bool
    is_paused: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What is seen."""

    now: datetime
    wanted: str
    """The revision that the spec asks for."""
    is_serving: bool
    """A stable engine is ready, so there is something to protect and to compare with."""
    can_canary: bool = True
    """Nothing else changed that cannot be tried beside the stable engines."""
    is_canary_ready: bool = False
    trouble: str = ""
    """Why the canary is not ready."""
    is_settled: bool = True
    """All stable engines are of the stable revision and ready."""
    verdict: Verdict = field(
        default_factory=lambda: Verdict(Outcome.WAIT, "LittleTraffic", "nothing was measured")
    )
    last_verdict: Verdict = field(
        default_factory=lambda: Verdict(Outcome.FAIL, "Unknown", "no router could be asked")
    )
    """The same, if it has to be given now."""
    command: Command = Command.NONE


@dataclass(frozen=True, slots=True)
class State:
    """What was decided so far."""

    stable: str
    since: datetime
    """When the stage or its step began."""
    stage: Stage = Stage.STABLE
    canary: str = ""
    """The revision tried, also while it is promoted."""
    step: int = 0
    failed: str = ""
    """The revision that was rolled back."""
    unready_since: datetime | None = None
    """The canary was ready and is not."""
    is_held: bool = False
    """It would have been rolled back, but that is for somebody to decide."""
    reason: str = "Stable"
    message: str = "no rollout is in progress"
    seen: str = ""
    """The annotation as it was last acted on."""


def initial(wanted: str, now: datetime) -> State:
    """Of a service that is seen for the first time: what it asks for is the stable revision."""
    return State(wanted, now)


def advance(state: State, facts: Facts, policy: Policy) -> State:
    """One step on; the same state where nothing is to be done."""
    if facts.wanted == state.stable:
        return _arriving(state, facts)
    if (
        state.stage is Stage.PROMOTING
        and not facts.is_settled
        and not _is_late(state, facts, policy)
    ):
        return state  # the newest revision has its turn when the engines are of one
    if facts.wanted == state.failed and facts.command is not Command.PROMOTE:
        return state
    if not (policy.is_canary and facts.can_canary and facts.is_serving):
        return _direct(state, facts, policy)
    if state.stage not in (Stage.STARTING, Stage.CANARY) or state.canary != facts.wanted:
        return _started(state, facts, policy)
    return _trying(state, facts, policy)


def _arriving(state: State, facts: Facts) -> State:
    """The spec asks for the stable revision: its engines come, or all are there."""
    if state.stage is Stage.PROMOTING:
        if not facts.is_settled:
            return state
        message = f"revision {state.stable} serves everything"
        return State(state.stable, facts.now, reason="Promoted", message=message)
    if state.stage is Stage.STABLE:
        return state
    message = f"the spec asks for revision {state.stable} again"
    return State(state.stable, facts.now, reason="Reverted", message=message)


def _direct(state: State, facts: Facts, policy: Policy) -> State:
    if policy.is_canary and facts.can_canary:
        why = "no stable engine serves, so there is nothing to compare with"
    elif policy.is_canary:
        why = "it cannot be tried beside the stable engines"
    else:
        why = "the strategy is rolling"
    message = f"rolling out revision {facts.wanted} without a canary: {why}"
    return State(facts.wanted, facts.now, Stage.PROMOTING, reason="RollingOut", message=message)


def _started(state: State, facts: Facts, policy: Policy) -> State:
    if policy.is_paused or facts.command is Command.PAUSE:
        if state.stage in (Stage.STARTING, Stage.CANARY):
            state = State(state.stable, facts.now, failed=state.failed)
        message = f"revision {facts.wanted} waits until the rollout is no longer paused"
        return _told(state, "Paused", message)
    message = f"starting a canary of revision {facts.wanted}"
    return State(
        state.stable,
        facts.now,
        Stage.STARTING,
        facts.wanted,
        reason="CanaryStarting",
        message=message,
    )


def _trying(state: State, facts: Facts, policy: Policy) -> State:
    match facts.command:
        case Command.PROMOTE:
            return _promoted(state, facts, "as it was asked to be")
        case Command.ABORT:
            return _rolled_back(state, facts, "Aborted", "it was aborted")
    if state.is_held:
        return state
    if state.stage is Stage.STARTING:
        return _starting(state, facts, policy)
    return _judged(state, facts, policy)


def _starting(state: State, facts: Facts, policy: Policy) -> State:
    if facts.is_canary_ready:
        return _at_step(state, facts, policy, 0)
    why = facts.trouble or "it is starting"
    if facts.now - state.since >= policy.start_deadline:
        message = f"its canary was not ready within {_text(policy.start_deadline)}: {why}"
        return _failed(state, facts, policy, "CanaryNotReady", message)
    return _told(state, "CanaryStarting", f"waiting for the canary of {state.canary}: {why}")


def _judged(state: State, facts: Facts, policy: Policy) -> State:
    waited = facts.now - state.since
    is_last = waited >= policy.max_wait
    verdict = facts.last_verdict if is_last else facts.verdict
    if verdict.outcome is Outcome.FAIL:
        return _failed(state, facts, policy, verdict.reason, verdict.message)
    if not facts.is_canary_ready:
        return _unready(state, facts, policy)
    state = replace(state, unready_since=None)
    name = f"canary of {state.canary}, step {state.step + 1} of {len(policy.steps)}"
    if policy.is_paused or facts.command is Command.PAUSE:
        return _told(state, "Paused", f"{name}: paused; {verdict.message}")
    if verdict.outcome is Outcome.PASS and waited >= policy.step:
        if state.step + 1 < len(policy.steps):
            return _at_step(state, facts, policy, state.step + 1)
        return _promoted(state, facts, verdict.message)
    return _told(state, f"CanaryStep{state.step + 1}", f"{name}: {verdict.message}")


def _unready(state: State, facts: Facts, policy: Policy) -> State:
    since = state.unready_since or facts.now
    why = facts.trouble or "it is not ready"
    if facts.now - since >= policy.start_deadline:
        message = f"its canary was not ready for {_text(policy.start_deadline)}: {why}"
        return _failed(state, facts, policy, "CanaryNotReady", message)
    waiting = replace(state, unready_since=since)
    return _told(waiting, "CanaryNotReady", f"canary of {state.canary}: {why}")


def _at_step(state: State, facts: Facts, policy: Policy, step: int) -> State:
    message = f"canary of {state.canary}, step {step + 1} of {len(policy.steps)}"
    return replace(
        state,
        since=facts.now,
        stage=Stage.CANARY,
        step=step,
        unready_since=None,
        reason=f"CanaryStep{step + 1}",
        message=message,
    )


def _promoted(state: State, facts: Facts, why: str) -> State:
    message = f"revision {state.canary} is promoted: {why}"
    return State(
        facts.wanted, facts.now, Stage.PROMOTING, facts.wanted, reason="Promoting", message=message
    )


def _failed(state: State, facts: Facts, policy: Policy, reason: str, why: str) -> State:
    if policy.auto_rollback:
        return _rolled_back(state, facts, reason, why)
    message = f"revision {state.canary} gets no requests until it is promoted or aborted: {why}"
    return replace(state, is_held=True, reason=reason, message=message)


def _rolled_back(state: State, facts: Facts, reason: str, why: str) -> State:
    message = (
        f"revision {state.canary} was rolled back to {state.stable}: {why}; change the spec to try "
        "again"
    )
    return State(
        state.stable,
        facts.now,
        Stage.ROLLED_BACK,
        failed=state.canary,
        reason=reason,
        message=message,
    )


def _told(state: State, reason: str, message: str) -> State:
    return replace(state, reason=reason, message=message)


def _is_late(state: State, facts: Facts, policy: Policy) -> bool:
    return facts.now - state.since >= policy.start_deadline


def _text(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"


def weight_of(state: State, steps: tuple[int, ...], share: float) -> int:
    """Requests of a hundred that the canary gets.

    Args:
        share: the canary's part of all engine pods. It never gets more than that of the requests,
            lest it be judged by a load that stable engines do not have.
    """
    if state.is_held or not state.canary or state.stage not in (Stage.CANARY, Stage.PROMOTING):
        return 0
    step = steps[-1] if state.stage is Stage.PROMOTING else steps[min(state.step, len(steps) - 1)]
    return max(1, min(step, int(100 * share)))
