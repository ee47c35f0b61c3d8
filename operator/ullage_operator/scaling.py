"""How many engines each pool has: by its spec, by what the operator decided, or by others. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from ullage_operator import autoscale, naming
from ullage_operator.autoscale import Decision, Policy
from ullage_operator.conditions import Finding, timestamp
from ullage_operator.events import Note
from ullage_operator.pools import Autoscaling, Pace, Pool
from ullage_operator.spec import Service

Object = Mapping[str, Any]

SCALING = "ScalingActive"
OWN, HPA, KEDA = "ullage", "hpa", "keda"
"""Who decides: `spec.pools.NAME.autoscaling.provider`."""

KINDS = {HPA: "HorizontalPodAutoscaler", KEDA: "ScaledObject"}
CURES = {HPA: "let it see them", KEDA: "install KEDA"}


@dataclass(frozen=True, slots=True)
class Decided:
    """What the operator decided from measures."""

    pools: Mapping[str, Decision]
    """By pool; a pool that was not measured yet is absent."""
    problem: str = ""
    """Why there are no measures; empty while there are."""
    changes: Mapping[str, "Change"] = field(default_factory=dict)
    """By pool, the last decision that changed its number."""


@dataclass(frozen=True, slots=True)
class Change:
    at: datetime
    """In UTC."""
    decision: Decision


NOTHING = Decided({})


def autoscaling_of(pool: Pool) -> Autoscaling | None:
    """The pool's autoscaling where it is on."""
    return pool.autoscaling if pool.autoscaling and pool.autoscaling.enabled else None


def provider_of(pool: Pool) -> str:
    """Who says how many engines it has; empty: its spec."""
    scaling = autoscaling_of(pool)
    return scaling.provider if scaling else ""


def may_sleep(pool: Pool) -> bool:
    """Whether the pool may have no engine and gets one when a request wants it."""
    scaling = autoscaling_of(pool)
    return scaling is not None and scaling.min_replicas == 0 and scaling.provider != HPA


def policy(scaling: Autoscaling) -> Policy:
    return Policy(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        utilization=scaling.targets.kv_utilization,
        queue_s=scaling.targets.queue_wait,
        uses_slo=scaling.targets.ttft,
        up=_pace(scaling.scale_up),
        down=_pace(scaling.scale_down),
        idle_s=scaling.idle_after,
        warm_spares=scaling.warm_spares,
    )


def _pace(pace: Pace) -> autoscale.Pace:
    return autoscale.Pace(
        window_s=pace.window, pods=pace.pods, percent=pace.percent, period_s=pace.period
    )


def live_replicas(live: Object | None) -> int | None:
    """What a StatefulSet asks for; None where there is none."""
    return None if live is None else int(live["spec"].get("replicas", 1))


def replicas(pool: Pool, decision: Decision | None, live: int | None) -> int:
    """Engines that the pool is to have now.

    Where the operator decides, the number that the StatefulSet has is where a new operator goes on.
    """
    scaling = autoscaling_of(pool)
    if scaling is None:
        return pool.replicas
    if scaling.provider != OWN and live is not None:
        return live
    wanted = decision.replicas if decision else pool.replicas if live is None else live
    return min(scaling.max_replicas, max(scaling.min_replicas, wanted))


def scaled(service: Service, objects: Mapping[Any, Object], decided: Decided) -> Service:
    """The service with every pool's number of this moment.

    Args:
        objects: live ones by (kind, name).
    """
    pools = {}
    for name, pool in service.spec.pools.items():
        live = live_replicas(objects.get(("StatefulSet", naming.pool_name(service.name, name))))
        number = replicas(pool, decided.pools.get(name), live)
        pools[name] = msgspec.structs.replace(pool, replicas=number)
    spec = msgspec.structs.replace(service.spec, pools=pools)
    return msgspec.structs.replace(service, spec=spec)


def resized(live: Object, number: int) -> dict[str, Any]:
    """What to apply to a StatefulSet of which only the number of pods is to change."""
    kept = ("name", "namespace", "labels", "annotations", "ownerReferences")
    meta = {name: live["metadata"][name] for name in kept if name in live["metadata"]}
    spec = {**live["spec"], "replicas": number}
    return {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": meta, "spec": spec}


def left_to_others(pool: Pool, live: Object | None) -> bool:
    """Whether somebody else writes the StatefulSet's replicas, once it exists."""
    return provider_of(pool) in (HPA, KEDA) and live is not None


def pool_scaling(pool: Pool, change: Change | None, before: Object) -> dict[str, Any]:
    """The part of a pool's status about its size.

    Args:
        change: the last one that this operator knows of.
        before: the pool's present status.
    """
    told: dict[str, Any] = {"desiredReplicas": pool.replicas}
    if not autoscaling_of(pool):
        return told
    if change:
        decision = change.decision
        told["scaling"] = {
            "time": timestamp(change.at),
            "reason": decision.reason,
            "message": decision.message[:1024],
        }
    elif "scaling" in before:
        told["scaling"] = before["scaling"]
    return told


def scaling_finding(service: Service, decided: Decided, serves: Collection[str]) -> list[Finding]:
    """The condition ScalingActive, of services that scale by themselves."""
    providers = {name: provider_of(pool) for name, pool in service.spec.pools.items()}
    by = {each for each in providers.values() if each}
    if not by:
        return []
    for each in sorted(by & KINDS.keys()):
        if KINDS[each] not in serves:
            message = (
                f"the operator sees no {KINDS[each]} here; set provider to ullage, or {CURES[each]}"
            )
            return [Finding(SCALING, False, "ProviderMissing", message)]
    own = [name for name, each in providers.items() if each == OWN]
    if own and decided.problem:
        return [Finding(SCALING, False, "NoMeasures", decided.problem)]
    if any(name not in decided.pools for name in own):
        message = "routers have not been asked yet; pools keep their size"
        return [Finding(SCALING, False, "Measuring", message)]
    texts = [f"pool {name} by {each}" for name, each in providers.items() if each]
    return [Finding(SCALING, True, "Scaling", ", ".join(texts))]


def scaled_here(service: Service) -> dict[str, Policy]:
    """The pools that the operator itself scales."""
    found = {name: autoscaling_of(pool) for name, pool in service.spec.pools.items()}
    return {name: policy(each) for name, each in found.items() if each and each.provider == OWN}


def scaling_notes(before: Object, after: Object) -> list[Note]:
    """What changed of the pools' sizes, by the service's status before and after."""
    known = before.get("pools", {})
    return [
        Note(f"Scaled{pool['scaling']['reason']}", "Scale", _told(name, pool))
        for name, pool in after.get("pools", {}).items()
        if "scaling" in pool and pool["scaling"] != known.get(name, {}).get("scaling")
    ]


def _told(name: str, pool: Object) -> str:
    count, why = pool["desiredReplicas"], pool["scaling"]["message"]
    return f"pool {name} is to have {count} engine{'' if count == 1 else 's'}: {why}"
