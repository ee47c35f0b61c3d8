"""Determines the sizes of pools, and writes them to objects and annotations.

The number of engines of a pool is set by its spec, by the operator's scaling decisions, or by KEDA.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from ullage_operator.api import naming
from ullage_operator.api.sections import AutoscalingSpec, PoolSpec, RouterSpec
from ullage_operator.api.spec import Service
from ullage_operator.policy.scaling import ScalingDecision

Object = Mapping[str, Any]

OWN = "ullage"
KEDA = "keda"
"""Values of `autoscaling.provider`: the operator (`OWN`) or `KEDA` decides the size of a pool."""


@dataclass(frozen=True, slots=True)
class ScalingDecisions:
    """The operator's scaling decisions, based on measured load."""

    pools: Mapping[str, ScalingDecision]
    """Decisions by pool. Pools that have not been measured yet are missing."""
    problem: str = ""
    """Reason why the load cannot be measured (empty while it can)."""
    changes: Mapping[str, "ScalingChange"] = field(default_factory=dict)
    """The last decision that changed a pool's number of engines, by pool."""


@dataclass(frozen=True, slots=True)
class ScalingChange:
    """A decision that changed the number of engines."""

    at: datetime
    """Time of the change, in UTC."""
    decision: ScalingDecision


NO_DECISIONS = ScalingDecisions({})


def autoscaling_of(pool: PoolSpec) -> AutoscalingSpec | None:
    """Return the autoscaling section of a pool, or None if autoscaling is off."""
    return pool.autoscaling if pool.autoscaling and pool.autoscaling.enabled else None


def provider_of(pool: PoolSpec) -> str:
    """Return the autoscaling provider that sizes a pool (empty if the spec sets the size)."""
    scaling = autoscaling_of(pool)
    return scaling.provider if scaling else ""


def may_sleep(pool: PoolSpec) -> bool:
    """Return whether a pool may scale to zero engines and sleep until a request wakes it."""
    scaling = autoscaling_of(pool)
    return scaling is not None and scaling.min_replicas == 0


def live_replicas(live: Object | None) -> int | None:
    """Return a pool's number of engines, including those that a canary replaces.

    The result is None if the pool has no StatefulSet.
    """
    return None if live is None else int(live["spec"].get("replicas", 1)) + canary_places(live)


def canary_places(live: Object) -> int:
    """Return how many of a pool's engines are currently replaced by a canary."""
    annotations = live.get("metadata", {}).get("annotations") or {}
    return int(annotations.get(naming.CANARY_PLACES, 0))


def replicas(pool: PoolSpec, decision: ScalingDecision | None, live: int | None) -> int:
    """Return the number of engines that a pool should have now.

    An operator that has just started and has no scaling decisions yet keeps the StatefulSet's
    current replicas.
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
        service: the declared service.
        objects: live objects by (kind, name).
        decided: the operator's scaling decisions.
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

    With a HorizontalPodAutoscaler, the result is the live number, clamped to the spec's bounds.
    """
    scaling = router.autoscaling
    if scaling is None:
        return router.replicas
    number = router.replicas if live is None else int(live["spec"].get("replicas", 1))
    return min(scaling.max_replicas, max(scaling.min_replicas, number))


def resized(live: Object, number: int, places: int = 0, is_stopped: bool = False) -> dict[str, Any]:
    """Return a live workload's manifest, changing only its number of pods.

    Args:
        live: the live workload.
        number: its new number of pods.
        places: the number of these pods that a canary replaces.
        is_stopped: whether the number is 0 because the service is stopped.
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
    """Return the annotation that tells `live_replicas` how many engines a canary replaces."""
    return {naming.CANARY_PLACES: str(places)} if places else {}


def stop_annotation(is_stopped: bool) -> dict[str, str]:
    """Return the annotation that tells `was_stopped` that a StatefulSet is stopped."""
    return {naming.STOPPED: "true"} if is_stopped else {}


def was_stopped(live: Object | None) -> bool:
    """Return whether a StatefulSet was scaled to zero because its service was stopped."""
    annotations = (live or {}).get("metadata", {}).get("annotations") or {}
    return naming.STOPPED in annotations


def left_to_others(pool: PoolSpec, live: Object | None, is_stopped: bool = False) -> bool:
    """Return whether another controller sets the StatefulSet's number of replicas.

    In a pool that KEDA scales, KEDA sets it as soon as the StatefulSet exists, unless the service
    is stopped or is restarting after a stop.
    """
    is_held = is_stopped or was_stopped(live)
    return provider_of(pool) == KEDA and live is not None and not is_held


def own_policies(service: Service) -> dict[str, AutoscalingSpec]:
    """Return the autoscaling policies of pools that the operator itself scales, by pool.

    The result is empty for a stopped service.
    """
    if service.spec.stop:
        return {}
    scaling = {name: autoscaling_of(pool) for name, pool in service.spec.pools.items()}
    return {name: each for name, each in scaling.items() if each and each.provider == OWN}
