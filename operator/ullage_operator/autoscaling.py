"""Decides the number of engines of each pool, and words the decision for a service's objects and
status. Pure.

    decide_replicas(policy, history, load, current, now) -> ScalingDecision, ScalingHistory

The need is the memory that predictions claim, in use or waited for, divided by the memory that an
engine offers at the target utilisation. Where requests wait too long, or first tokens come too
late, at a utilisation below the target, that lower utilisation is the target for a while. Spares
are added, and the bounds are applied last.

A pool is scaled up at once and down after a window: the highest number that was suggested within
the window holds, as in the HorizontalPodAutoscaler. A pool that may sleep is scaled to zero after a
time without requests and wakes with the first one, regardless of windows and steps.

Routers count the measures (`ullage_common.wire.load_report` has each number), which are added up by
pool here. A pool's number of engines comes from its spec, from these decisions, or from KEDA.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import msgspec

from ullage_common.wire.load_report import PoolReport
from ullage_operator.api import naming
from ullage_operator.api.sections import AutoscalingSpec, PoolSpec, RouterSpec
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import Condition, timestamp
from ullage_operator.conditions.events import EventNote

TOLERANCE = 0.1
"""Deviation of the load from what the present engines are for, within which their number stays."""
STRAIN_KEPT_S = 3600.0
"""Seconds without lateness after which the utilisation may be higher by `EASING`."""
EASING = 1.05
"""Factor by which a lowered utilisation is raised again: fewer engines are tried one step at a
time."""
RELIEF = 0.95
"""Share of the utilisation at which requests were late that is taken to be bearable."""
MIN_SHARE = 0.25
"""Least share of the target utilisation: below it, more engines do not help against lateness."""
LATE_WINDOW_S = 60.0
"""Seconds over which routers count first tokens."""
LATE_SHARE = 0.05
"""The objective is about the 95th percentile."""
MIN_ANSWERS = 20
"""Number of answers from which on a share of them means something."""
QUEUE_SETTLE_S = 15.0
"""What waits is not counted against engines that came just now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Load of one pool as all its routers see it."""

    ready: int = 0
    """Engines that take requests."""
    capacity: int = 0
    """KV memory of these, bytes."""
    claimed: int = 0
    """Bytes of the capacity that are in use or reserved by prediction."""
    waiting: int = 0
    """Bytes that requests wait for."""
    queue_s: float = 0.0
    """Longest that one has waited."""
    answered: int = 0
    """First tokens within the last `LATE_WINDOW_S`."""
    late: int = 0
    """Number of answers that were later than the objective."""
    active: int = 0
    """Requests running or waiting."""
    wanted: int = 0
    """Requests that found the pool asleep, held or sent elsewhere."""
    idle_s: float = 0.0
    """Since the last request."""
    is_partial: bool = False
    """Some router did not answer."""


@dataclass(frozen=True, slots=True)
class ReplicasAt:
    """A number of engines at a time."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Strain:
    """The lowest utilisation at which requests were late."""

    at: float
    share: float


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """What is remembered from one decision to the next; all times are of one clock, seconds.

    Nothing of it must outlive the operator: without it the present number counts as suggested now,
    so that nothing is taken away before a whole window was seen.
    """

    highs: tuple[ReplicasAt, ...] = ()
    """Suggestions that no later one exceeds, falling: the first in a window is its maximum."""
    lows: tuple[ReplicasAt, ...] = ()
    """Suggestions that no later one undercuts, rising: the first in a window is its minimum."""
    changes: tuple[ReplicasAt, ...] = ()
    """Recent changes of the number of engines."""
    strain: Strain | None = None
    full_since: float | None = None
    """Time since which all engines that were asked for are ready."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The decided number of engines and its reason."""

    replicas: int
    reason: str
    """Idle, Wake, Memory, Late, Bounds, Stabilizing, NotReady or Steady."""
    message: str


def decide_replicas(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, current: int, now: float
) -> tuple[ScalingDecision, ScalingHistory]:
    """The number of engines from now on.

    Args:
        current: engines that are asked for at present.
        now: seconds on any clock that never goes back.
    """
    history = _noted(policy, history, load, current, now)
    if decision := _asleep(policy, load, current) or _idle(policy, load, current):
        return decision, _changed(policy, history, decision.replicas - current, now)
    demand = _demand(policy, history, load, current)
    history = _suggested(policy, history, demand.replicas, now)
    steady = _stabilised(policy, history, demand.replicas, current, now)
    limited = _limited(policy, history, steady, current, now)
    decision = _explained(policy, demand, limited, current)
    return decision, _changed(policy, history, decision.replicas - current, now)


def _asleep(policy: AutoscalingSpec, load: PoolLoad, current: int) -> ScalingDecision | None:
    """Decide about a pool that has no engine."""
    least = max(policy.min_replicas, min(policy.warm_spares, policy.max_replicas))
    if current or least or policy.max_replicas == 0:
        return None
    if load.wanted:
        return ScalingDecision(1, "Wake", f"{load.wanted} requests want an engine")
    return ScalingDecision(0, "Idle", "the pool sleeps until a request comes")


def _idle(policy: AutoscalingSpec, load: PoolLoad, current: int) -> ScalingDecision | None:
    """The end of a pool that nobody uses."""
    may_sleep = not policy.min_replicas and not policy.warm_spares
    is_used = load.active or load.waiting or load.wanted or load.is_partial
    if not (current and may_sleep) or is_used or load.idle_s < policy.idle_after:
        return None
    return ScalingDecision(0, "Idle", f"no request for {load.idle_s:.0f} s")


def _demand(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, current: int
) -> ScalingDecision:
    """Return the number of engines that the load asks for, without the history."""
    if not load.ready or not load.capacity:
        least = max(current, 1 if load.wanted else 0)
        return ScalingDecision(least, "NotReady", "no engine is ready that could be measured")
    target = policy.targets.kv_utilization
    why = "Memory"
    if history.strain and history.strain.share < target:
        target = history.strain.share
        why = "Late"
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
    return ScalingDecision(need + policy.warm_spares, why, message)


def is_strained(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, now: float
) -> bool:
    """Requests are late although all engines that were asked for are there."""
    if history.full_since is None or not load.capacity:
        return False
    settled_s = now - history.full_since
    waits = load.queue_s > policy.targets.queue_wait and settled_s >= QUEUE_SETTLE_S
    is_shared = load.active > load.ready
    """An engine with one request has no quicker one beside it."""
    is_late = load.answered >= MIN_ANSWERS and load.late > LATE_SHARE * load.answered
    return waits or (policy.targets.ttft and is_late and is_shared and settled_s >= LATE_WINDOW_S)


def _noted(
    policy: AutoscalingSpec, history: ScalingHistory, load: PoolLoad, current: int, now: float
) -> ScalingHistory:
    """Return the history with what the measures say for later decisions."""
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
    """Return the history with one more suggestion and without those that no window can need."""
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
    """Return the desired number, limited to the change on which the whole window agrees."""
    if desired > current:
        return max(current, min(m.replicas for m in history.lows))
    return min(current, max(m.replicas for m in history.highs))


def _limited(
    policy: AutoscalingSpec, history: ScalingHistory, desired: int, current: int, now: float
) -> int:
    """Return the desired number, limited to one step from that at the start of the period."""
    pace = policy.scale_up if desired > current else policy.scale_down
    sign = 1 if desired > current else -1
    done = sum(m.replicas for m in history.changes if m.at > now - pace.period)
    before = current - (done if done * sign > 0 else 0)
    step = max(pace.pods, math.ceil(before * pace.percent / 100))
    if desired > current:
        return max(current, min(desired, before + step))
    return min(current, max(desired, before - step))


def _bounded(policy: AutoscalingSpec, replicas: int) -> int:
    """Return the number within the bounds of the pool; only an idle pool has no engine."""
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
    """The number within the bounds, and why it is this one."""
    allowed = _bounded(policy, limited)
    if allowed != limited:
        limits = f"{policy.min_replicas} to {policy.max_replicas} engines are allowed"
        return ScalingDecision(allowed, "Bounds", f"{demand.message}; {limits}")
    if allowed != demand.replicas:
        more = f"{demand.replicas} engines would do for that"
        return ScalingDecision(allowed, "Stabilizing", f"{demand.message}; {more}")
    is_steady = allowed == current and demand.reason != "NotReady"
    return ScalingDecision(allowed, "Steady" if is_steady else demand.reason, demand.message)


RouterReport = Mapping[str, PoolReport]
"""A router's reports by pool."""


def parse_reports(body: bytes) -> list[RouterReport]:
    """Return the reports of a router: one, or several of a router of 0.1.0 with several processes.

    Raises:
        ValueError: the body is something else.
    """
    reports: list[RouterReport] = msgspec.json.decode(body, type=list[dict[str, PoolReport]])
    return reports


def is_wanted(reports: Iterable[RouterReport]) -> bool:
    """Whether a pool that sleeps should wake."""
    return any(pool.wanted for report in reports for pool in report.values())


def pool_load(name: str, reports: Iterable[RouterReport], is_partial: bool) -> PoolLoad:
    """One pool as all routers see it.

    What engines report to every router alike is taken from the router that sees most of them; what
    each router has by itself is added up.
    """
    pools = [report[name] for report in reports if name in report]
    if not pools:
        return PoolLoad(is_partial=True)
    best = max(pools, key=lambda each: (each.ready, -each.headroom_bytes))
    credit = sum(each.credit_bytes for each in pools)
    claimed = best.capacity_bytes - best.headroom_bytes + credit
    return PoolLoad(
        ready=best.ready,
        capacity=best.capacity_bytes,
        claimed=max(0, min(best.capacity_bytes, claimed)),
        waiting=sum(each.queue_bytes for each in pools),
        queue_s=max(each.queue_s for each in pools),
        answered=sum(each.answered for each in pools),
        late=sum(each.late for each in pools),
        active=max(each.engine_requests for each in pools)
        + sum(each.queued + each.held for each in pools),
        wanted=sum(each.wanted for each in pools),
        idle_s=min(each.idle_s for each in pools),
        is_partial=is_partial,
    )


Object = Mapping[str, Any]

SCALING = "ScalingActive"
OWN = "ullage"
KEDA = "keda"
"""Who decides: `spec.pools.NAME.autoscaling.provider`."""

SCALED_OBJECT = "ScaledObject"


@dataclass(frozen=True, slots=True)
class ScalingDecisions:
    """Decisions that the operator made from measures."""

    pools: Mapping[str, ScalingDecision]
    """Decisions by pool; a pool that was not measured yet is absent."""
    problem: str = ""
    """Why there are no measures; empty while there are."""
    changes: Mapping[str, "ScalingChange"] = field(default_factory=dict)
    """The last decision that changed a pool's number of engines, by pool."""


@dataclass(frozen=True, slots=True)
class ScalingChange:
    at: datetime
    """Time of the change, in UTC."""
    decision: ScalingDecision


NO_DECISIONS = ScalingDecisions({})


def autoscaling_of(pool: PoolSpec) -> AutoscalingSpec | None:
    """The pool's autoscaling where it is on."""
    return pool.autoscaling if pool.autoscaling and pool.autoscaling.enabled else None


def provider_of(pool: PoolSpec) -> str:
    """Return who decides a pool's number of engines; empty when its spec does."""
    scaling = autoscaling_of(pool)
    return scaling.provider if scaling else ""


def may_sleep(pool: PoolSpec) -> bool:
    """Whether the pool may have no engine and gets one when a request wants it."""
    scaling = autoscaling_of(pool)
    return scaling is not None and scaling.min_replicas == 0


def live_replicas(live: Object | None) -> int | None:
    """Return a pool's number of engines, including those that a canary replaces; None without a
    StatefulSet."""
    return None if live is None else int(live["spec"].get("replicas", 1)) + canary_places(live)


def canary_places(live: Object) -> int:
    """Return the number of a pool's engines that a canary replaces."""
    annotations = live.get("metadata", {}).get("annotations") or {}
    return int(annotations.get(naming.CANARY_PLACES, 0))


def replicas(pool: PoolSpec, decision: ScalingDecision | None, live: int | None) -> int:
    """Engines that the pool is to have now.

    Where the operator decides, the number that the StatefulSet has is where a new operator goes on.
    """
    scaling = autoscaling_of(pool)
    if scaling is None:
        return pool.replicas
    if scaling.provider != OWN and live is not None:
        return live
    desired = decision.replicas if decision else pool.replicas if live is None else live
    return min(scaling.max_replicas, max(scaling.min_replicas, desired))


def with_replicas(
    service: Service, objects: Mapping[Any, Object], decided: ScalingDecisions
) -> Service:
    """Return the service with the current numbers of engines and routers.

    Args:
        objects: live objects by (kind, name).
    """
    pools = {}
    for name, pool in service.spec.pools.items():
        present = objects.get(("StatefulSet", naming.pool_name(service.name, name)))
        # A pool that starts again after a stop is sized like a new one.
        live = None if was_stopped(present) else live_replicas(present)
        number = 0 if service.spec.stop else replicas(pool, decided.pools.get(name), live)
        pools[name] = msgspec.structs.replace(pool, replicas=number)
    deployment = objects.get(("Deployment", naming.router_name(service.name)))
    routers = msgspec.structs.replace(
        service.spec.router, replicas=router_replicas(service.spec.router, deployment)
    )
    spec = msgspec.structs.replace(service.spec, pools=pools, router=routers)
    return msgspec.structs.replace(service, spec=spec)


def router_replicas(router: RouterSpec, live: Object | None) -> int:
    """Return the desired number of routers.

    Under a HorizontalPodAutoscaler it is the live number, within the bounds.
    """
    scaling = router.autoscaling
    if scaling is None:
        return router.replicas
    number = router.replicas if live is None else int(live["spec"].get("replicas", 1))
    return min(scaling.max_replicas, max(scaling.min_replicas, number))


def resized(live: Object, number: int, places: int = 0, is_stopped: bool = False) -> dict[str, Any]:
    """Return the manifest that changes only the number of pods of a live workload.

    Args:
        places: how many of these pods a canary replaces.
        is_stopped: whether the number is 0 because its service is stopped.
    """
    kept = ("name", "namespace", "labels", "annotations", "ownerReferences")
    meta = {name: live["metadata"][name] for name in kept if name in live["metadata"]}
    spec = {**live["spec"], "replicas": number - places}
    annotations = dict(meta.get("annotations") or {})
    for name in (naming.CANARY_PLACES, naming.STOPPED):
        annotations.pop(name, None)
    meta["annotations"] = annotations | places_annotation(places) | stop_annotation(is_stopped)
    return {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": meta, "spec": spec}


def places_annotation(places: int) -> dict[str, str]:
    """Return the annotation from which `live_replicas` reads how many engines a canary replaces."""
    return {naming.CANARY_PLACES: str(places)} if places else {}


def stop_annotation(is_stopped: bool) -> dict[str, str]:
    """Return the annotation by which `was_stopped` recognises a StatefulSet."""
    return {naming.STOPPED: "true"} if is_stopped else {}


def was_stopped(live: Object | None) -> bool:
    """Return whether a StatefulSet was scaled to zero because its service was stopped."""
    annotations = (live or {}).get("metadata", {}).get("annotations") or {}
    return naming.STOPPED in annotations


def left_to_others(pool: PoolSpec, live: Object | None, is_stopped: bool = False) -> bool:
    """Return whether another controller sets the StatefulSet's replicas.

    KEDA does once the StatefulSet exists, unless the service is stopped or was until now.
    """
    is_held = is_stopped or was_stopped(live)
    return provider_of(pool) == KEDA and live is not None and not is_held


def pool_scaling(pool: PoolSpec, change: ScalingChange | None, before: Object) -> dict[str, Any]:
    """The part of a pool's status about its size.

    Args:
        change: the last one that this operator knows of.
        before: the pool's present status.
    """
    status: dict[str, Any] = {"desiredReplicas": pool.replicas}
    if not autoscaling_of(pool):
        return status
    if change:
        decision = change.decision
        status["scaling"] = {
            "time": timestamp(change.at),
            "reason": decision.reason,
            "message": decision.message[:1024],
        }
    elif "scaling" in before:
        status["scaling"] = before["scaling"]
    return status


def scaling_condition(
    service: Service, decided: ScalingDecisions, serves: Collection[str]
) -> list[Condition]:
    """Return the condition ScalingActive; none for a service that does not scale itself."""
    providers = {name: provider_of(pool) for name, pool in service.spec.pools.items()}
    by = {each for each in providers.values() if each}
    if not by or service.spec.stop:
        return []
    if KEDA in by and SCALED_OBJECT not in serves:
        message = (
            f"the operator sees no {SCALED_OBJECT} here; set provider to Ullage, or install KEDA"
        )
        return [Condition(SCALING, False, "ProviderMissing", message)]
    if unknown := sorted(by - {OWN, KEDA}):
        message = f"there is no provider {unknown[0]}; set it to Ullage or KEDA"
        return [Condition(SCALING, False, "ProviderMissing", message)]
    own = [name for name, each in providers.items() if each == OWN]
    if own and decided.problem:
        return [Condition(SCALING, False, "NoMeasures", decided.problem)]
    if any(name not in decided.pools for name in own):
        message = "routers have not been asked yet; pools keep their size"
        return [Condition(SCALING, False, "Measuring", message)]
    texts = [f"pool {name} by {each}" for name, each in providers.items() if each]
    return [Condition(SCALING, True, "Scaling", ", ".join(texts))]


def own_policies(service: Service) -> dict[str, AutoscalingSpec]:
    """Return the policies of pools that the operator itself scales; none of a stopped service."""
    if service.spec.stop:
        return {}
    scaling = {name: autoscaling_of(pool) for name, pool in service.spec.pools.items()}
    return {name: each for name, each in scaling.items() if each and each.provider == OWN}


def scaling_notes(before: Object, after: Object) -> list[EventNote]:
    """Return Events for changed sizes, from the service's status before and after."""
    previous = before.get("pools", {})
    return [
        EventNote(f"Scaled{pool['scaling']['reason']}", "Scale", _scaling_message(name, pool))
        for name, pool in after.get("pools", {}).items()
        if "scaling" in pool and pool["scaling"] != previous.get(name, {}).get("scaling")
    ]


def _scaling_message(name: str, pool: Object) -> str:
    count = pool["desiredReplicas"]
    why = pool["scaling"]["message"]
    return f"pool {name} is to have {count} engine{'' if count == 1 else 's'}: {why}"
