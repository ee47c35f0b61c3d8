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

UNSERVED = timedelta(seconds=60)
"""Without a ready stable engine for so long, a revision is rolled out without a canary. Readiness
falls with every worker, and a restart of one must not spare the next revision its trial."""
WAITING = "NoStableEngine"
"""Reason of a rollout that waits to learn whether stable engines come back."""
_NEWER_WAITS = "NewerWaits"
_NOTHING = "no rollout is in progress"
_BEGINNING = (WAITING, "Paused")
"""Reasons of a stable service that a newer revision waits for."""


class Stage(StrEnum):
    STABLE = "Stable"
    STARTING = "Starting"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    ROLLED_BACK = "RolledBack"


TRYING = (Stage.STARTING, Stage.CANARY)


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
    linger: timedelta
    """How long a promoted canary stays after the stable engines are ready: routers find these by
    DNS, which answers what it knew for a while."""
    restarts: int
    """Of a canary's pods, before they are ready."""
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
    is_bridged: bool = False
    """Engines of a promoted canary serve, whether or not stable ones do."""
    can_canary: bool = True
    """Pods run beside which it can be tried, and nothing changed that cannot be tried so."""
    is_canary_ready: bool = False
    restarts: int = 0
    """Of the canary's pods."""
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
    unserved_since: datetime | None = None
    """No stable engine has been ready since, as far as that matters to a rollout."""
    settled_since: datetime | None = None
    """While promoting: all stable engines have been of the revision and ready since."""
    is_asleep: bool = False
    """The pools that it is tried in have no pods; it is started when they have."""
    is_held: bool = False
    """It would have been rolled back, but that is for somebody to decide."""
    reason: str = "Stable"
    message: str = _NOTHING
    seen: str = ""
    """The annotation as it was last acted on."""


def initial(wanted: str, now: datetime) -> State:
    """Of a service that is seen for the first time: what it asks for is the stable revision."""
    return State(wanted, now, unserved_since=now)


def advance(state: State, facts: Facts, policy: Policy) -> State:
    """One step on; the same state where nothing is to be done."""
    since = _unserved_since(state, facts)
    after = _advanced(replace(state, unserved_since=since), facts, policy)
    return replace(after, unserved_since=since)


def _unserved_since(state: State, facts: Facts) -> datetime | None:
    if facts.is_serving:
        return None
    is_rolling = facts.wanted != state.stable or state.stage is Stage.PROMOTING
    return state.unserved_since or (facts.now if is_rolling else None)


def _advanced(state: State, facts: Facts, policy: Policy) -> State:
    if state.stage is Stage.PROMOTING:
        state = _promoting(state, facts, policy)
    if facts.wanted == state.stable:
        return _kept(state, facts)
    if state.stage is Stage.PROMOTING and _has_hope(state, facts, policy):
        message = f"revision {facts.wanted} waits until {state.stable} serves everything"
        return _told(state, _NEWER_WAITS, message)
    if facts.wanted == state.failed and facts.command is not Command.PROMOTE:
        return state
    is_tried = state.stage in TRYING and state.canary == facts.wanted
    if is_tried and (policy.is_canary or _is_paused(facts, policy)):
        return _trying(state, facts, policy)  # whatever becomes of the stable engines meanwhile
    return _begun(state, facts, policy)


def _promoting(state: State, facts: Facts, policy: Policy) -> State:
    """Arrives when the stable engines have been ready for as long as the canary is to stay."""
    if not facts.is_settled:
        return replace(state, settled_since=None)
    since = state.settled_since or facts.now
    if state.canary and facts.now - since < policy.linger:
        return replace(state, settled_since=since)
    message = f"revision {state.stable} serves everything"
    return State(state.stable, facts.now, reason="Promoted", message=message)


def _has_hope(state: State, facts: Facts, policy: Policy) -> bool:
    """Whether the newest revision has its turn when the engines are of one: they serve, and the
    promotion takes no longer than it may."""
    is_late = facts.now - state.since >= policy.start_deadline
    is_served = facts.is_serving or facts.is_bridged
    return is_served and (state.settled_since is not None or not is_late)


def _kept(state: State, facts: Facts) -> State:
    """The spec asks for the stable revision."""
    if state.stage is Stage.STABLE:
        return _told(state, "Stable", _NOTHING) if state.reason in _BEGINNING else state
    if state.stage is Stage.PROMOTING:
        if state.reason != _NEWER_WAITS:
            return state
        return _told(state, "Promoting", f"revision {state.stable} is being rolled out")
    message = f"the spec asks for revision {state.stable} again"
    return State(state.stable, facts.now, reason="Reverted", message=message)


def _begun(state: State, facts: Facts, policy: Policy) -> State:
    """Another revision than before is asked for: tries it, or rolls it out as it is."""
    if _is_paused(facts, policy):
        if state.stage in TRYING:
            state = State(state.stable, facts.now, failed=state.failed)
        message = f"revision {facts.wanted} waits until the rollout is no longer paused"
        return _told(state, "Paused", message)
    if not policy.is_canary:
        return _direct(facts, "the strategy is rolling")
    if not facts.can_canary:
        return _direct(facts, "it cannot be tried beside the stable engines")
    if facts.is_serving:
        return _started(state, facts)
    if state.unserved_since and facts.now - state.unserved_since < UNSERVED:
        message = (
            f"no stable engine is ready; after {_text(UNSERVED)} revision {facts.wanted} is rolled "
            "out without a canary"
        )
        return _told(state, WAITING, message)
    return _direct(facts, "no stable engine serves, so there is nothing to compare with")


def _direct(facts: Facts, why: str) -> State:
    message = f"rolling out revision {facts.wanted} without a canary: {why}"
    return State(facts.wanted, facts.now, Stage.PROMOTING, reason="RollingOut", message=message)


def _started(state: State, facts: Facts) -> State:
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
    if not facts.can_canary:
        return _asleep(state, facts)
    if state.is_asleep:
        state = _started(state, facts)
    if state.stage is Stage.STARTING:
        return _starting(state, facts, policy)
    return _judged(state, facts, policy)


def _asleep(state: State, facts: Facts) -> State:
    """Its pools have no pods left: it is tried from the start when a request has woken them."""
    message = f"the canary of {state.canary} waits until its pools have pods again"
    if not state.is_asleep:
        state = replace(_started(state, facts), is_asleep=True)
    return _told(state, "CanaryAsleep", message)


def _starting(state: State, facts: Facts, policy: Policy) -> State:
    if facts.is_canary_ready:
        return _at_step(state, facts, policy, 0)
    why = facts.trouble or "it is starting"
    if facts.restarts > policy.restarts:
        message = f"its canary's pods restarted {facts.restarts} times while they started: {why}"
        return _failed(state, facts, policy, "Restarts", message)
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
    if _is_paused(facts, policy):
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


def _is_paused(facts: Facts, policy: Policy) -> bool:
    return policy.is_paused or facts.command is Command.PAUSE


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
