"""Decides how many engines each pool should have.

    decide_replicas(policy, history, load, current, now) -> ScalingDecision, ScalingHistory

The demand is the KV memory that is in use, reserved by predictions or requested by waiting
requests. Dividing it by the KV memory that one engine provides at the target utilisation gives the
number of engines. If requests wait too long or the TTFT is too high at a utilisation below the
target, the target is lowered for a while. Warm spares are then added, and the result is finally
clamped to the pool's bounds.

Scaling down waits for a stabilisation window: as in the HorizontalPodAutoscaler, the highest number
suggested within the window is used. Scaling up is immediate by default. A pool that may sleep is
scaled to zero after `idleAfter` without requests. The first request wakes it, regardless of windows
and rate limits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.policy.pool_load import LATE_WINDOW_S, PoolLoad

TOLERANCE = 0.1
"""Relative deviation from the target load within which the number of engines stays unchanged."""
STRAIN_KEPT_S = 3600.0
"""Seconds without late requests after which a lowered target utilisation is raised by `EASING`."""
EASING = 1.05
"""Factor by which a lowered target utilisation is raised, so that engines are removed gradually."""
RELIEF = 0.95
"""New target utilisation as a fraction of the utilisation at which requests were late."""
MIN_SHARE = 0.25
"""Lower bound of a lowered target utilisation, as a fraction of the configured target.

At an even lower utilisation, adding engines does not make requests faster.
"""
LATE_SHARE = 0.05
"""Fraction of late responses that the objective allows, because it is a 95th percentile."""
MIN_ANSWERS = 20
"""Minimum number of responses for which the fraction of late responses is meaningful."""
QUEUE_SETTLE_S = 15.0
"""Seconds for which the queue time is ignored after engines have become ready."""
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplicasAt:
    """A number of engines that was suggested or set, and the time when that happened."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Strain:
    """A temporarily lowered target utilisation, and the time at which it last changed.

    The target is lowered when requests miss their latency objectives even though all desired
    engines are ready. The pool then gets more engines for the same load.
    """

    at: float
    share: float


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """Earlier decisions about a pool. Times are in seconds on a monotonic clock.

    An operator that has just started has no history. It treats the current number of engines as a
    suggestion made just now, so that no engine is removed before a full window has passed.
    """

    highs: tuple[ReplicasAt, ...] = ()
    """Suggestions in the window higher than all later ones. The first is the window's maximum."""
    lows: tuple[ReplicasAt, ...] = ()
    """Suggestions in the window lower than all later ones. The first is the window's minimum."""
    changes: tuple[ReplicasAt, ...] = ()
    """Recent changes to the number of engines, as differences."""
    strain: Strain | None = None
    full_since: float | None = None
    """Time at which all requested engines became ready, or None while some are not."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The chosen number of engines, and the reason for it."""

    replicas: int
    reason: str
    """One of Idle, Wake, Memory, Late, Bounds, Stabilizing, NotReady and Steady."""
    message: str


def decide_replicas(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, current: int, now: float
) -> tuple[ScalingDecision, ScalingHistory]:
    """Decide how many engines a pool should have.

    Args:
        policy: the pool's autoscaling.
        history: the history returned with the previous decision.
        load: the load of the pool.
        current: the number of engines that is currently requested.
        now: the time in seconds, on a monotonic clock.

    Returns:
        The decision, and the history for the next one.
    """
    history = _with_strain(policy, history, load, current, now)
    if decision := _asleep(policy, load, current) or _idle(policy, load, current):
        return decision, _changed(policy, history, decision.replicas - current, now)

    demand = _demand(policy, history, load, current)
    history = _suggested(policy, history, demand.replicas, now)
    steady = _stabilised(policy, history, demand.replicas, current, now)
    limited = _limited(policy, history, steady, current, now)

    decision = _explained(policy, demand, limited, current)
    return decision, _changed(policy, history, decision.replicas - current, now)


def _asleep(policy: AutoscalingSpec, load: PoolLoad, current: int) -> ScalingDecision | None:
    """Decide whether a sleeping pool should wake up, or return None if the pool is not asleep."""
    least = max(policy.min_replicas, min(policy.warm_spares, policy.max_replicas))
    if current or least or policy.max_replicas == 0:
        return None
    if load.wanted:
        return ScalingDecision(1, "Wake", f"{load.wanted} requests want an engine")
    return ScalingDecision(0, "Idle", "the pool sleeps until a request comes")


def _idle(policy: AutoscalingSpec, load: PoolLoad, current: int) -> ScalingDecision | None:
    """Decide to put a pool without requests to sleep, or return None if it must stay awake."""
    may_sleep = not policy.min_replicas and not policy.warm_spares
    is_used = load.active or load.waiting or load.wanted or load.is_partial
    if not (current and may_sleep) or is_used or load.idle_s < policy.idle_after:
        return None
    return ScalingDecision(0, "Idle", f"no request for {load.idle_s:.0f} s")


def _demand(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, current: int
) -> ScalingDecision:
    """Return the number of engines that the current load needs, ignoring earlier decisions."""
    if not load.ready or not load.capacity:
        least = max(current, 1 if load.wanted else 0)
        return ScalingDecision(least, "NotReady", "no engine is ready to be measured")

    target = policy.targets.kv_utilization
    why = "Memory"
    if history.strain and history.strain.share < target:
        target = history.strain.share
        why = "Late"

    engine = load.capacity / load.ready
    ratio = (load.claimed + load.waiting) / (engine * target)
    present = max(0, current - policy.warm_spares)
    need = max(1, math.ceil(ratio - 1e-9))
    # Under strain, one engine less or more is tried. Otherwise small differences are noise.
    if present and why == "Memory" and abs(ratio / present - 1) <= TOLERANCE:
        need = present
    if load.is_partial:
        need = max(need, present)

    share = (load.claimed + load.waiting) / load.capacity
    message = f"predictions claim {share:.0%} of {load.ready} engines, {target:.0%} is wanted"
    return ScalingDecision(need + policy.warm_spares, why, message)


def is_strained(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, now: float
) -> bool:
    """Return whether requests are late although all requested engines are ready."""
    if history.full_since is None or not load.capacity:
        return False

    settled_s = now - history.full_since
    waits = load.queue_s > policy.targets.queue_wait and settled_s >= QUEUE_SETTLE_S
    # More engines do not help if each has at most one request.
    is_shared = load.active > load.ready
    is_late = load.answered >= MIN_ANSWERS and load.late > LATE_SHARE * load.answered
    return waits or (policy.targets.ttft and is_late and is_shared and settled_s >= LATE_WINDOW_S)


def _with_strain(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, current: int, now: float
) -> ScalingHistory:
    """Return the history with `full_since` and `strain` updated from the current load.

    `strain` contains the target utilisation while it is lowered because requests are late.
    """
    if not history.highs:
        history = replace(history, highs=(ReplicasAt(now, current),))
    since = history.full_since if history.full_since is not None else now
    history = replace(history, full_since=since if load.ready >= current else None)

    strain = history.strain
    if strain and now - strain.at > STRAIN_KEPT_S:
        strain = Strain(now, EASING * strain.share)
    if is_strained(policy, history, load, now):
        share = RELIEF * (load.claimed + load.waiting) / load.capacity
        last_share = strain.share if strain else policy.targets.kv_utilization
        lowest = MIN_SHARE * policy.targets.kv_utilization
        strain = Strain(now, max(lowest, min(last_share, share)))

    return replace(history, strain=strain)


def _suggested(
    policy: AutoscalingSpec, history: ScalingHistory, replicas: int, now: float
) -> ScalingHistory:
    """Add a new suggestion to the history, and drop suggestions that are no longer needed."""
    moment = ReplicasAt(now, replicas)
    return replace(
        history,
        highs=_window(
            history.highs, moment, now - policy.scale_down.window, lambda r: r <= replicas
        ),
        lows=_window(history.lows, moment, now - policy.scale_up.window, lambda r: r >= replicas),
    )


def _window(
    kept: tuple[ReplicasAt, ...], new: ReplicasAt, since: float, is_beaten: Callable[[int], bool]
) -> tuple[ReplicasAt, ...]:
    return (*(m for m in kept if m.at >= since and not is_beaten(m.replicas)), new)


def _stabilised(
    policy: AutoscalingSpec, history: ScalingHistory, desired: int, current: int, now: float
) -> int:
    """Return the number of engines, limited by earlier suggestions in the stabilisation windows.

    The pool grows at most to the lowest of the recent suggestions, and shrinks at most to the
    highest. Peaks and dips that are shorter than the window therefore have no effect.
    """
    if desired > current:
        return max(current, min(m.replicas for m in history.lows))
    return min(current, max(m.replicas for m in history.highs))


def _limited(
    policy: AutoscalingSpec, history: ScalingHistory, desired: int, current: int, now: float
) -> int:
    """Clamp a change in pool size to what may be added or removed per scaling period."""
    pace = policy.scale_up if desired > current else policy.scale_down
    sign = 1 if desired > current else -1
    done = sum(m.replicas for m in history.changes if m.at > now - pace.period)
    before = current - (done if done * sign > 0 else 0)
    step = max(pace.pods, math.ceil(before * pace.percent / 100))
    if desired > current:
        return max(current, min(desired, before + step))
    return min(current, max(desired, before - step))


def _bounded(policy: AutoscalingSpec, replicas: int) -> int:
    """Clamp a number of engines to the pool's bounds. The result is at least one engine."""
    least = max(policy.min_replicas, min(policy.warm_spares, policy.max_replicas), 1)
    return min(policy.max_replicas, max(least, replicas))


def _changed(
    policy: AutoscalingSpec, history: ScalingHistory, delta: int, now: float
) -> ScalingHistory:
    if not delta:
        return history
    kept = now - max(policy.scale_up.period, policy.scale_down.period)
    changes = (*(m for m in history.changes if m.at > kept), ReplicasAt(now, delta))
    return replace(history, changes=changes, full_since=None)


def _explained(
    policy: AutoscalingSpec, demand: ScalingDecision, limited: int, current: int
) -> ScalingDecision:
    """Clamp the number of engines to the pool's bounds, and return the decision with its reason."""
    allowed = _bounded(policy, limited)
    if allowed != limited:
        limits = f"{policy.min_replicas} to {policy.max_replicas} engines are allowed"
        return ScalingDecision(allowed, "Bounds", f"{demand.message}; {limits}")

    if allowed != demand.replicas:
        more = f"{demand.replicas} engines would suffice"
        return ScalingDecision(allowed, "Stabilizing", f"{demand.message}; {more}")

    is_steady = allowed == current and demand.reason != "NotReady"
    return ScalingDecision(allowed, "Steady" if is_steady else demand.reason, demand.message)
