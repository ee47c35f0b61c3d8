"""The stages of a rollout, as a state machine without I/O or a clock.

    Stable ─► Starting ─► Canary, step by step ─► Promoting ─► Stable
                 └────────────┴──► RolledBack (until the spec changes)

A revision identifies a release of engines. The stable revision serves. If the spec requests another
revision, the operator first tries it on a canary. `RolloutProgress` holds all decisions and is
stored in the cluster, so the operator may stop at any point.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from ullage_operator.api.sections import RolloutSpec
from ullage_operator.rollout.analysis import NO_TRAFFIC, Analysis, Outcome
from ullage_operator.rollout.falls import FallCount

UNSERVED = timedelta(seconds=60)
"""Time without any ready stable engine after which a revision is rolled out without a canary.

A worker restart makes its engine briefly unready. This must not let the next revision skip its
trial.
"""
WAITING = "NoStableEngine"
"""Status reason while a rollout waits to see whether the stable engines recover."""
_NEWER_WAITS = "NewerWaits"
_NOTHING = "no rollout is in progress"
QUEUED = "RolloutQueued"
"""Status reason while a rollout is queued behind the rollouts of other services."""
PROMOTED = "Promoted"
ROUTERS_FIRST = "RoutersFirst"
"""Status reason while a rollout waits until routers can connect to engines of both revisions."""
MODEL_FETCHING = "ModelFetching"
"""Status reason while a rollout waits for a Job to download the model into its shared claim."""
PAUSED = "Paused"
ROLLING_OUT = "RollingOut"
_BEGINNING = (WAITING, QUEUED, PAUSED, ROUTERS_FIRST, MODEL_FETCHING)
"""Status reasons of a stable service whose next rollout has not started yet."""
_OTHER_PODS = "the operator's template of engine pods has changed"
RENEWALS = {
    ROLLING_OUT: _OTHER_PODS,
    PAUSED: f"{_OTHER_PODS}: waits until the rollout is no longer paused",
    QUEUED: f"{_OTHER_PODS}: waits until fewer services are being rolled out",
}
"""Status messages by reason, while an operator upgrade replaces the stable engines' pods."""


class RolloutStage(StrEnum):
    STABLE = "Stable"
    STARTING = "Starting"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    ROLLED_BACK = "RolledBack"


TRYING = (RolloutStage.STARTING, RolloutStage.CANARY)


class RolloutCommand(StrEnum):
    """A rollout command that a user gives by annotating the service."""

    NONE = ""
    PROMOTE = "promote"
    ABORT = "abort"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """The facts from which the state machine decides the next step of a rollout."""

    now: datetime
    target: str
    """The revision that the spec requests."""
    is_serving: bool
    """Whether a stable engine is ready. Without one, there is nothing to compare a canary with."""
    is_bridged: bool = False
    """Whether a promoted canary has ready engines, which serve until the stable ones take over."""
    linger: timedelta = timedelta(0)
    """Time for which a promoted canary is kept after the stable engines are ready.

    Routers discover the stable engines through DNS, which caches responses for a while.
    """
    may_begin: bool = True
    """Whether this rollout may start now. The rollout queue decides unless an edit caused it."""
    may_yield: bool = True
    """Whether resources freed by one of the service's pods would go to its next pod."""
    is_reachable: bool = True
    """Whether all routers can connect to the target's engines and to the engines serving now."""
    fetching: str = ""
    """Why the target waits for a Job to download its model (empty if it does not wait)."""
    can_canary: bool = True
    """Whether a canary is possible: a changed pool has engines, and the model name is unchanged."""
    needs_canary: bool = True
    """Whether the target may generate different text, or the spec requires a canary every time."""
    is_canary_ready: bool = False
    crowded: tuple[str, ...] = ()
    """Pools whose canary takes the place of stable engines, for example for lack of free nodes."""
    restarts: int = 0
    """Number of worker losses and container restarts in the canary's pods."""
    problem: str = ""
    """Reason why the canary is not ready."""
    is_stuck: bool = False
    """Whether the canary's problem will not resolve by itself, for example a missing image."""
    is_refused: bool = False
    """Whether the API server refuses a StatefulSet of the stable revision."""
    like_stable: tuple[str, ...] = ()
    """Pools whose engines request the same resources in the target and the stable revision."""
    is_outdated: bool = False
    """Whether an operator upgrade, and not an edit, changed the stable engines' pod template."""
    may_renew: bool = True
    """Whether the rollout queue lets the service replace outdated engines now."""
    is_settled: bool = True
    """Whether all stable engines have the stable revision and are ready."""
    analysis: Analysis = field(
        default_factory=lambda: Analysis(Outcome.WAIT, "LittleTraffic", "nothing was measured")
    )
    final_analysis: Analysis = field(
        default_factory=lambda: Analysis(Outcome.FAIL, "Unknown", "no router could be asked")
    )
    """The analysis that applies once the time limit for collecting requests has passed."""
    command: RolloutCommand = RolloutCommand.NONE


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """The stage of a rollout, and the decisions on which its next steps depend."""

    stable: str
    since: datetime
    """Time at which the current stage or step began."""
    stage: RolloutStage = RolloutStage.STABLE
    canary: str = ""
    """The revision that is being tried or promoted (empty otherwise)."""
    step: int = 0
    failed: str = ""
    """The revision that was rolled back."""
    unready_since: datetime | None = None
    """Time at which the canary became unready after it had been ready."""
    unserved_since: datetime | None = None
    """Time since which no stable engine has been ready, in a new service or during a rollout."""
    settled_since: datetime | None = None
    """During a promotion, time since which all stable engines have been ready and up to date."""
    is_asleep: bool = False
    """Whether the canary waits because its pools are asleep. It starts once they have engines."""
    is_held: bool = False
    """Whether a user must decide, for example after a failed canary without automatic rollback."""
    renewal: str = ""
    """Key in `RENEWALS` while stable engines are replaced after a rollback (empty otherwise)."""
    reason: str = "Stable"
    message: str = _NOTHING
    seen: str = ""
    """The rollout annotation that the operator last acted on."""
    replaces: tuple[str, ...] = ()
    """Pools in which the canary takes the place of stable engines."""
    falls: Mapping[str, FallCount] = field(default_factory=dict)
    """Crashes of the canary's and the stable engines during a trial, by pod uid."""


def initial_progress(revision: str, now: datetime) -> RolloutProgress:
    """Return the progress of a new service, whose spec is the stable revision."""
    return RolloutProgress(revision, now, unserved_since=now)


def advance(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    """Advance a rollout by one step.

    Args:
        state: the progress so far.
        facts: the observed facts.
        policy: the service's `rollout`.

    Returns:
        The progress after the step, which equals `state` if there is nothing to do.
    """
    since = _unserved_since(state, facts)
    after = _advanced(replace(state, unserved_since=since), facts, policy)
    return replace(after, unserved_since=since, renewal=_renewal(after, facts, policy))


def _unserved_since(state: RolloutProgress, facts: RolloutFacts) -> datetime | None:
    if facts.is_serving:
        return None
    is_rolling = facts.target != state.stable or state.stage is RolloutStage.PROMOTING
    return state.unserved_since or (facts.now if is_rolling else None)


def _advanced(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    if state.stage is RolloutStage.PROMOTING:
        state = _promoting(state, facts)
    if facts.target == state.stable:
        return _keep_stable(state, facts, policy)

    if state.stage is RolloutStage.PROMOTING and _has_hope(state, facts, policy):
        message = f"revision {facts.target} waits until {state.stable} serves everything"
        return _with_reason(state, _NEWER_WAITS, message)
    if facts.target == state.failed and facts.command is not RolloutCommand.PROMOTE:
        return state

    is_tried = state.stage in TRYING and state.canary == facts.target
    if is_tried and (policy.strategy != "rolling" or _is_paused(facts, policy)):
        # The trial goes on even if stable engines fail meanwhile.
        return _advance_canary(state, facts, policy)
    return _begin(state, facts, policy)


def _promoting(state: RolloutProgress, facts: RolloutFacts) -> RolloutProgress:
    """Complete a promotion once the stable engines have been ready for `facts.linger`."""
    if not facts.is_settled:
        return replace(state, settled_since=None)

    since = state.settled_since or facts.now
    if state.canary and facts.now - since < facts.linger:
        return replace(state, settled_since=since)
    if state.replaces and not facts.may_yield:
        message = (
            f"revision {state.stable} keeps its canary, because engines of other services wait for "
            "room and could take its place"
        )
        return replace(state, settled_since=since, message=message)

    message = f"revision {state.stable} serves everything"
    return RolloutProgress(state.stable, facts.now, reason=PROMOTED, message=message)


def _has_hope(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> bool:
    """Return whether a newer revision should wait until the current promotion completes.

    The newer revision waits as long as engines are serving and the promotion meets its deadline,
    unless the API server refuses the engines of the promoted revision.
    """
    if facts.is_refused:
        return False
    is_late = _elapsed_s(state.since, facts) >= policy.start_deadline
    is_served = facts.is_serving or facts.is_bridged
    return is_served and (state.settled_since is not None or not is_late)


def _keep_stable(
    state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec
) -> RolloutProgress:
    """Return the progress if the spec requests the stable revision, so that none must be tried.

    A trial of another revision, or an earlier rollback, ends. Outdated engines are replaced.
    """
    if state.stage is RolloutStage.STABLE and facts.is_outdated:
        return _renew(state, facts, policy)
    if state.stage is RolloutStage.STABLE:
        return _with_reason(state, "Stable", _NOTHING) if state.reason in _BEGINNING else state
    if state.stage is RolloutStage.PROMOTING:
        if state.reason != _NEWER_WAITS:
            return state
        return _with_reason(state, "Promoting", f"revision {state.stable} is being rolled out")

    message = f"the spec asks for revision {state.stable} again"
    return RolloutProgress(state.stable, facts.now, reason="Reverted", message=message)


def _renew(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    """Start replacing the stable engines, because the operator's pod template has changed.

    If the rollout is paused or must wait in the rollout queue, only record that as the reason.
    """
    reason = _renewal_reason(facts, policy)
    if reason == ROLLING_OUT:
        state = RolloutProgress(state.stable, facts.now, RolloutStage.PROMOTING)
    return _with_reason(state, reason, RENEWALS[reason])


def _renewal(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> str:
    """Return the state of replacing outdated stable engines after a rollback.

    The result is a key in `RENEWALS`: the engines are being replaced, or their replacement is
    paused or waits in the rollout queue. It is empty if they need not be replaced.

    The stage remains RolledBack. The replacement is complete when all stable engines are ready.
    """
    if state.stage is not RolloutStage.ROLLED_BACK:
        return ""
    if state.renewal == ROLLING_OUT and not facts.is_settled:
        return ROLLING_OUT
    return _renewal_reason(facts, policy) if facts.is_outdated else ""


def _renewal_reason(facts: RolloutFacts, policy: RolloutSpec) -> str:
    if _is_paused(facts, policy):
        return PAUSED
    return ROLLING_OUT if facts.may_renew else QUEUED


def _begin(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    """Start rolling out another revision, either with a canary or directly."""
    if _is_paused(facts, policy):
        if state.stage in TRYING:
            state = RolloutProgress(state.stable, facts.now, failed=state.failed)
        message = f"revision {facts.target} waits until the rollout is no longer paused"
        return _with_reason(state, PAUSED, message)

    if not facts.may_begin and facts.command is not RolloutCommand.PROMOTE:
        message = (
            f"revision {facts.target}, which has the operator's new image, waits until fewer "
            "services are being rolled out"
        )
        return _with_reason(state, QUEUED, message)

    if not facts.is_reachable:
        if state.stage in TRYING:
            state = RolloutProgress(state.stable, facts.now, failed=state.failed)
        message = (
            f"revision {facts.target} waits until all routers are ready that speak both TLS and "
            "plaintext to engines"
        )
        return _with_reason(state, ROUTERS_FIRST, message)

    if facts.fetching and facts.command is not RolloutCommand.PROMOTE:
        if state.stage in TRYING:
            state = RolloutProgress(state.stable, facts.now, failed=state.failed)
        return _with_reason(state, MODEL_FETCHING, f"revision {facts.target} {facts.fetching}")

    if policy.strategy == "rolling":
        return _direct(facts, "the strategy is rolling")
    if not facts.can_canary:
        return _direct(facts, "it cannot be tried next to the stable engines")
    if not facts.needs_canary:
        return _direct(facts, "it changes nothing that answers depend on")

    kept = tuple(name for name in state.replaces if name in facts.like_stable)
    if facts.is_serving or kept:
        # If only an older canary serves, the stable engines wait for its place, not for its trial.
        return replace(_start(state, facts), replaces=kept)

    if state.unserved_since and facts.now - state.unserved_since < UNSERVED:
        message = (
            f"no stable engine is ready; after {UNSERVED.total_seconds():g} s revision "
            f"{facts.target} is rolled out without a canary"
        )
        return _with_reason(state, WAITING, message)
    return _direct(facts, "no stable engine serves, so there is nothing to compare with")


def _direct(facts: RolloutFacts, why: str) -> RolloutProgress:
    message = f"rolling out revision {facts.target} without a canary: {why}"
    return RolloutProgress(
        facts.target, facts.now, RolloutStage.PROMOTING, reason=ROLLING_OUT, message=message
    )


def _start(state: RolloutProgress, facts: RolloutFacts) -> RolloutProgress:
    message = f"starting a canary of revision {facts.target}"
    return RolloutProgress(
        state.stable,
        facts.now,
        RolloutStage.STARTING,
        facts.target,
        reason="CanaryStarting",
        message=message,
    )


def _advance_canary(
    state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec
) -> RolloutProgress:
    match facts.command:
        case RolloutCommand.PROMOTE:
            return _promoted(state, facts, "the rollout annotation asks for it")
        case RolloutCommand.ABORT:
            return _rolled_back(state, facts, "Aborted", "it was aborted")

    if state.is_held:
        return state
    if not facts.can_canary:
        return _wait_for_pods(state, facts)

    if state.is_asleep:
        state = _start(state, facts)
    state = _with_places(state, facts)
    if state.stage is RolloutStage.STARTING:
        return _starting(state, facts, policy)
    return _analyze(state, facts, policy)


def _with_places(state: RolloutProgress, facts: RolloutFacts) -> RolloutProgress:
    """Let the canary take the place of stable engines in pools that lack nodes for more engines.

    A canary that cannot start for another reason takes no further place.
    """
    if facts.is_stuck:
        return state
    pools = tuple(sorted({*state.replaces, *facts.crowded}))
    if pools == state.replaces:
        return state
    # The canary's pods can start only now, so the whole deadline begins here.
    since = facts.now if state.stage is RolloutStage.STARTING else state.since
    return replace(state, replaces=pools, since=since)


def _wait_for_pods(state: RolloutProgress, facts: RolloutFacts) -> RolloutProgress:
    """Wait while the canary's pools are asleep. The trial restarts when a request wakes them."""
    message = f"the canary of {state.canary} waits until its pools have pods again"
    if not state.is_asleep:
        state = replace(_start(state, facts), is_asleep=True)
    return _with_reason(state, "CanaryAsleep", message)


def _starting(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    if facts.is_canary_ready:
        return _at_step(state, facts, policy, 0)

    why = facts.problem or "it is starting"
    if facts.restarts > policy.thresholds.restarts:
        message = f"its canary's pods restarted {facts.restarts} times while they started: {why}"
        return _failed(state, facts, policy, "Restarts", message)
    if state.replaces and not facts.is_serving and facts.is_stuck:
        message = f"its canary has the place of the last engine and cannot start: {why}"
        return _failed(state, facts, policy, "CanaryNotReady", message)
    if _elapsed_s(state.since, facts) >= policy.start_deadline:
        message = f"its canary was not ready within {policy.start_deadline:g} s: {why}"
        return _failed(state, facts, policy, "CanaryNotReady", message)

    until = _clock(state.since, policy.start_deadline)
    message = f"waiting for the canary of {state.canary} until {until} at the latest: {why}"
    if state.replaces:
        message += f"; it has the place of an engine of {' and '.join(state.replaces)}"
    return _with_reason(state, "CanaryStarting", message)


def _analyze(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    waited_s = _elapsed_s(state.since, facts)
    is_last = waited_s >= policy.max_wait
    analysis = facts.final_analysis if is_last else facts.analysis
    if analysis.outcome is Outcome.FAIL:
        return _failed(state, facts, policy, analysis.reason, analysis.message)
    if not facts.is_canary_ready:
        return _unready(state, facts, policy)

    state = replace(state, unready_since=None)
    name = f"canary of {state.canary}, step {state.step + 1} of {len(policy.weight_steps)}"
    if _is_paused(facts, policy):
        return _with_reason(state, PAUSED, f"{name}: paused; {analysis.message}")
    if analysis.outcome is Outcome.PASS and waited_s >= policy.step_duration:
        if state.step + 1 < len(policy.weight_steps) and analysis.reason != NO_TRAFFIC:
            return _at_step(state, facts, policy, state.step + 1)
        return _promoted(state, facts, analysis.message)

    message = f"{name}: {_waiting(state, policy, analysis)}; {analysis.message}"
    return _with_reason(state, f"CanaryStep{state.step + 1}", message)


def _waiting(state: RolloutProgress, policy: RolloutSpec, analysis: Analysis) -> str:
    """Return a message that explains what a rollout step is waiting for, and until when."""
    if analysis.outcome is Outcome.PASS:
        until = _clock(state.since, policy.step_duration)
        return f"good so far, waits for its minimum time until {until}"
    until = _clock(state.since, policy.max_wait)
    return f"waits for {analysis.waits_for} until {until}, when the counts so far decide"


def _unready(state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec) -> RolloutProgress:
    since = state.unready_since or facts.now
    why = facts.problem or "it is not ready"
    if _elapsed_s(since, facts) >= policy.start_deadline:
        message = f"its canary was not ready for {policy.start_deadline:g} s: {why}"
        return _failed(state, facts, policy, "CanaryNotReady", message)
    waiting = replace(state, unready_since=since)
    message = (
        f"canary of {state.canary}, which has until {_clock(since, policy.start_deadline)} to be "
        f"ready: {why}"
    )
    return _with_reason(waiting, "CanaryNotReady", message)


def _at_step(
    state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec, step: int
) -> RolloutProgress:
    message = (
        f"canary of {state.canary}, step {step + 1} of {len(policy.weight_steps)}: waits for "
        f"routers to take up its weight until {_clock(facts.now, policy.max_wait)} at the latest"
    )
    return replace(
        state,
        since=facts.now,
        stage=RolloutStage.CANARY,
        step=step,
        unready_since=None,
        reason=f"CanaryStep{step + 1}",
        message=message,
    )


def _promoted(state: RolloutProgress, facts: RolloutFacts, why: str) -> RolloutProgress:
    message = f"revision {state.canary} is promoted: {why}"
    return RolloutProgress(
        facts.target,
        facts.now,
        RolloutStage.PROMOTING,
        facts.target,
        replaces=state.replaces,
        reason="Promoting",
        message=message,
    )


def _failed(
    state: RolloutProgress, facts: RolloutFacts, policy: RolloutSpec, reason: str, why: str
) -> RolloutProgress:
    if policy.auto_rollback:
        return _rolled_back(state, facts, reason, why)
    message = f"revision {state.canary} gets no requests until it is promoted or aborted: {why}"
    return replace(state, is_held=True, reason=reason, message=message)


def _rolled_back(
    state: RolloutProgress, facts: RolloutFacts, reason: str, why: str
) -> RolloutProgress:
    message = (
        f"revision {state.canary} was rolled back to {state.stable}: {why}; change the spec to try "
        "again"
    )
    return RolloutProgress(
        state.stable,
        facts.now,
        RolloutStage.ROLLED_BACK,
        failed=state.canary,
        reason=reason,
        message=message,
    )


def _with_reason(state: RolloutProgress, reason: str, message: str) -> RolloutProgress:
    return replace(state, reason=reason, message=message)


def _is_paused(facts: RolloutFacts, policy: RolloutSpec) -> bool:
    return policy.paused or facts.command is RolloutCommand.PAUSE


def _elapsed_s(since: datetime, facts: RolloutFacts) -> float:
    return (facts.now - since).total_seconds()


def _clock(since: datetime, wait_s: float) -> str:
    """Format the UTC time of day at which a wait ends."""
    return f"{since + timedelta(seconds=wait_s):%H:%M:%S} UTC"


def weight_of(state: RolloutProgress, steps: tuple[int, ...], share: float) -> int:
    """Return the percentage of requests that the canary gets.

    Args:
        state: the progress of the rollout.
        steps: the percentages of the steps.
        share: the canary's fraction of all engine pods. It caps the percentage, so that the
            canary's engines are not loaded more heavily than the stable ones.
    """
    if (
        state.is_held
        or not state.canary
        or state.stage not in (RolloutStage.CANARY, RolloutStage.PROMOTING)
    ):
        return 0
    step = (
        steps[-1]
        if state.stage is RolloutStage.PROMOTING
        else steps[min(state.step, len(steps) - 1)]
    )
    return max(1, min(step, int(100 * share)))
