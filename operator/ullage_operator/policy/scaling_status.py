"""Reports scaling decisions in the status, conditions and Events of a service."""

from collections.abc import Collection, Mapping
from typing import Any

from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import Condition, timestamp
from ullage_operator.conditions.events import EventNote
from ullage_operator.policy.pool_sizes import (
    KEDA,
    OWN,
    ScalingChange,
    ScalingDecisions,
    autoscaling_of,
    provider_of,
)

Object = Mapping[str, Any]

SCALING = "ScalingActive"
SCALED_OBJECT = "ScaledObject"


def pool_scaling(pool: PoolSpec, change: ScalingChange | None, before: Object) -> dict[str, Any]:
    """Return the fields of a pool's status that describe its scaling.

    Args:
        pool: the pool.
        change: the last change that this operator decided, or None if it has not decided any.
        before: the current status of the pool.
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
    """Return the ScalingActive condition, or an empty list for a service that is not autoscaled."""
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


def scaling_notes(before: Object, after: Object) -> list[EventNote]:
    """Return an Event for each pool whose size changed between two statuses of the service."""
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
