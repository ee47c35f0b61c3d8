"""How many engines a pool should have: a pure function of what is measured and was decided before.

    decide(policy, history, load, current, now) -> Decision, History

The need is the memory that predictions claim, in use or waited for, over what an engine offers at
the wanted utilisation. Where requests wait too long, or first tokens come too late, at a lower
utilisation than that, the lower one counts for a while. Spares come on top, then the bounds.

What the need suggests is done at once upwards and after a window downwards: the highest number that
was suggested within the window holds, as the HorizontalPodAutoscaler does it. A pool that may sleep
does so after a time without requests and wakes with the first one, past windows and steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

TOLERANCE = 0.1
"""How far the load may be from what the present engines are for before their number changes."""
STRAIN_KEPT_S = 3600.0
"""After so long without lateness the utilisation may be higher, ..."""
EASING = 1.05
"""... by this factor: fewer engines are tried one step at a time."""
RELIEF = 0.95
"""Of the utilisation at which requests were late, what is thought bearable."""
LOWEST_SHARE = 0.25
"""Of the wanted utilisation: below it, more engines are not the cure of lateness."""
LATE_WINDOW_S = 60.0
"""Over which routers count first tokens."""
LATE_SHARE = 0.05
"""The objective is about the 95th percentile."""
LEAST_ANSWERS = 20
"""From which on a share of them means something."""
QUEUE_SETTLE_S = 15.0
"""What waits is not counted against engines that came just now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the number may change in one direction."""

    window_s: float
    """Over which suggestions must agree."""
    pods: int
    percent: int
    """Most engines, and most in percent of the present ones, whichever is more, ..."""
    period_s: float
    """... within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the service's author wants of one pool."""

    min_replicas: int
    max_replicas: int
    utilization: float
    """Share of the KV memory that claims should have."""
    queue_s: float
    """Longest wait for memory that is fine."""
    uses_slo: bool
    """Late first tokens count."""
    up: Pace
    down: Pace
    idle_s: float
    """Without a request for so long, a pool that may have no engine gets none."""
    warm_spares: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One pool as all its routers see it."""

    ready: int = 0
    """Engines that take requests."""
    capacity: int = 0
    """KV memory of these, bytes."""
    claimed: int = 0
    """Of it, in use or promised by prediction."""
    waiting: int = 0
    """Bytes that requests wait for."""
    queue_s: float = 0.0
    """Longest that one has waited."""
    answered: int = 0
    """First tokens within the last `LATE_WINDOW_S`."""
    late: int = 0
    """Of these, later than the objective."""
    active: int = 0
    """Requests running or waiting."""
    wanted: int = 0
    """Requests that found the pool asleep, held or sent elsewhere."""
    idle_s: float = 0.0
    """Since the last request."""
    is_partial: bool = False
    """Some router did not answer."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A number of engines at a time."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Strain:
    """The lowest utilisation at which requests were late."""

    at: float
    share: float


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered from one decision to the next; all times are of one clock, seconds.

    Nothing of it must outlive the operator: without it the present number counts as suggested now,
    so that nothing is taken away before a whole window was seen.
    """

    highs: tuple[Moment, ...] = ()
    """Suggestions that no later one exceeds, falling: the first in a window is its maximum."""
    lows: tuple[Moment, ...] = ()
    """The same for minima, rising."""
    changes: tuple[Moment, ...] = ()
    """By how much the number was changed lately."""
    strain: Strain | None = None
    full_since: float | None = None
    """Since when all engines that were asked for are ready."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many engines, and why."""

    replicas: int
    reason: str
    """Idle, Wake, Memory, Late, Bounds, Stabilizing, NotReady or Steady."""
    message: str


def decide(
    policy: Policy, history: History, load: Load, current: int, now: float
) -> tuple[Decision, History]:
    """The number of engines from now on.

    Args:
        current: engines that are asked for at present.
        now: seconds on any clock that never goes back.
    """
    history = _noted(policy, history, load, current, now)
    if decision := _asleep(policy, load, current) or _idle(policy, load, current):
        return decision, _changed(policy, history, decision.replicas - current, now)
    wish = _wish(policy, history, load, current)
    history = _suggested(policy, history, wish.replicas, now)
    steady = _stabilised(policy, history, wish.replicas, current, now)
    limited = _limited(policy, history, steady, current, now)
    decision = _explained(policy, wish, limited, current)
    return decision, _changed(policy, history, decision.replicas - current, now)


def _asleep(policy: Policy, load: Load, current: int) -> Decision | None:
    """What becomes of a pool without engines."""
    least = max(policy.min_replicas, min(policy.warm_spares, policy.max_replicas))
    if current or least or policy.max_replicas == 0:
        return None
    if load.wanted:
        return Decision(1, "Wake", f"{load.wanted} requests want an engine")
    return Decision(0, "Idle", "the pool sleeps until a request comes")


def _idle(policy: Policy, load: Load, current: int) -> Decision | None:
    """The end of a pool that nobody uses."""
    may_sleep = not policy.min_replicas and not policy.warm_spares
    is_used = load.active or load.waiting or load.wanted or load.is_partial
    if not (current and may_sleep) or is_used or load.idle_s < policy.idle_s:
        return None
    return Decision(0, "Idle", f"no request for {load.idle_s:.0f} s")


def _wish(policy: Policy, history: History, load: Load, current: int) -> Decision:
    """What the load asks for, whatever was asked for before."""
    if not load.ready or not load.capacity:
        least = max(current, 1 if load.wanted else 0)
        return Decision(least, "NotReady", "no engine is ready that could be measured")
    target, why = policy.utilization, "Memory"
    if history.strain and history.strain.share < target:
        target, why = history.strain.share, "Late"
    engine = load.capacity / load.ready
    ratio = (load.claimed + load.waiting) / (engine * target)
    present = max(0, current - policy.warm_spares)
    need = max(1, math.ceil(ratio - 1e-9))
    # Under strain one engine less or more is tried; otherwise small differences are noise.
    if present and why == "Memory" and abs(ratio / present - 1) <= TOLERANCE:
        need = present
    if load.is_partial:
        need = max(need, present)
    share = (load.claimed + load.waiting) / load.capacity
    message = f"predictions claim {share:.0%} of {load.ready} engines, {target:.0%} is wanted"
    return Decision(need + policy.warm_spares, why, message)


def is_strained(policy: Policy, history: History, load: Load, now: float) -> bool:
    """Requests are late although all engines that were asked for are there."""
    if history.full_since is None or not load.capacity:
        return False
    settled_s = now - history.full_since
    waits = load.queue_s > policy.queue_s and settled_s >= QUEUE_SETTLE_S
    is_shared = load.active > load.ready
    """An engine with one request has no quicker one beside it."""
    is_late = load.answered >= LEAST_ANSWERS and load.late > LATE_SHARE * load.answered
    return waits or (policy.uses_slo and is_late and is_shared and settled_s >= LATE_WINDOW_S)


def _noted(policy: Policy, history: History, load: Load, current: int, now: float) -> History:
    """With what the measures say for later."""
    if not history.highs:
        history = replace(history, highs=(Moment(now, current),))
    since = history.full_since if history.full_since is not None else now
    history = replace(history, full_since=since if load.ready >= current else None)
    strain = history.strain
    if strain and now - strain.at > STRAIN_KEPT_S:
        strain = Strain(now, EASING * strain.share)
    if is_strained(policy, history, load, now):
        share = RELIEF * (load.claimed + load.waiting) / load.capacity
        known = strain.share if strain else policy.utilization
        lowest = LOWEST_SHARE * policy.utilization
        strain = Strain(now, max(lowest, min(known, share)))
    return replace(history, strain=strain)


def _suggested(policy: Policy, history: History, replicas: int, now: float) -> History:
    """With one more suggestion; those that no window can need are dropped."""
    moment = Moment(now, replicas)
    return replace(
        history,
        highs=_window(history.highs, moment, now - policy.down.window_s, lambda r: r <= replicas),
        lows=_window(history.lows, moment, now - policy.up.window_s, lambda r: r >= replicas),
    )


def _window(
    kept: tuple[Moment, ...], new: Moment, since: float, is_beaten: Callable[[int], bool]
) -> tuple[Moment, ...]:
    return (*(m for m in kept if m.at >= since and not is_beaten(m.replicas)), new)


def _stabilised(policy: Policy, history: History, wish: int, current: int, now: float) -> int:
    """The suggestion as far as the whole window agrees with its direction."""
    if wish > current:
        return max(current, min(m.replicas for m in history.lows))
    return min(current, max(m.replicas for m in history.highs))


def _limited(policy: Policy, history: History, wish: int, current: int, now: float) -> int:
    """At most a step away from what was there at the beginning of the period."""
    pace = policy.up if wish > current else policy.down
    sign = 1 if wish > current else -1
    done = sum(m.replicas for m in history.changes if m.at > now - pace.period_s)
    before = current - (done if done * sign > 0 else 0)
    step = max(pace.pods, math.ceil(before * pace.percent / 100))
    if wish > current:
        return max(current, min(wish, before + step))
    return min(current, max(wish, before - step))


def _bounded(policy: Policy, replicas: int) -> int:
    """Within the bounds, which hold whatever else does; only an idle pool has no engine."""
    least = max(policy.min_replicas, min(policy.warm_spares, policy.max_replicas), 1)
    return min(policy.max_replicas, max(least, replicas))


def _changed(policy: Policy, history: History, delta: int, now: float) -> History:
    if not delta:
        return history
    kept = now - max(policy.up.period_s, policy.down.period_s)
    changes = (*(m for m in history.changes if m.at > kept), Moment(now, delta))
    return replace(history, changes=changes, full_since=None)


def _explained(policy: Policy, wish: Decision, limited: int, current: int) -> Decision:
    """The number within the bounds, and why it is this one."""
    allowed = _bounded(policy, limited)
    if allowed != limited:
        limits = f"{policy.min_replicas} to {policy.max_replicas} engines are allowed"
        return Decision(allowed, "Bounds", f"{wish.message}; {limits}")
    if allowed != wish.replicas:
        more = f"{wish.replicas} engines would do for that"
        return Decision(allowed, "Stabilizing", f"{wish.message}; {more}")
    is_steady = allowed == current and wish.reason != "NotReady"
    return Decision(allowed, "Steady" if is_steady else wish.reason, wish.message)
