"""Builds the ScaledObject that tells KEDA how to scale a pool.

KEDA scales the pool's StatefulSet by the fraction of each engine's KV memory that is in use.
Engines report it as the metric ullage_kv_used_ratio, which KEDA queries from Prometheus.
"""

from collections.abc import Collection
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.sections import AutoscalingSpec, PoolSpec, ScalingPace
from ullage_operator.api.spec import Service
from ullage_operator.manifests.builder import Builder, as_asked
from ullage_operator.policy.pool_sizes import KEDA, autoscaling_of
from ullage_operator.policy.scaling_status import SCALED_OBJECT

Manifest = dict[str, Any]

KEDA_API = "keda.sh/v1alpha1"
KEDA_PAUSED = "autoscaling.keda.sh/paused-replicas"
"""Annotation that makes KEDA scale to the annotated number of replicas and then pause."""
METRIC = "ullage_kv_used_ratio"
POLL_S = 10
_NEVER = "1000000"
"""A threshold that no metric reaches, for triggers that must not scale by their metric's value."""


def scaler_objects(
    service: Service, pool_name: str, pool: PoolSpec, serves: Collection[str]
) -> list[Manifest]:
    """Return the ScaledObject of a pool (empty unless KEDA scales the pool)."""
    scaling = autoscaling_of(pool)
    if scaling is None:
        return []
    if scaling.provider != KEDA or SCALED_OBJECT not in serves:
        return []

    name = naming.pool_name(service.name, pool_name)
    spec = scaled_object(service, pool_name, scaling)
    build = Builder(service, naming.ENGINE, pool_name)
    scaler = build.object(KEDA_API, SCALED_OBJECT, name, spec)
    if service.spec.stop:
        scaler["metadata"] |= {"annotations": {KEDA_PAUSED: "0"}}
    return [scaler]


def with_pause(live: Manifest, is_stopped: bool) -> Manifest:
    """Return a live ScaledObject with its pause annotation set or removed."""
    kept = ("name", "namespace", "labels", "annotations", "ownerReferences")
    meta = {name: live["metadata"][name] for name in kept if name in live["metadata"]}
    annotations = dict(meta.get("annotations") or {})
    annotations.pop(KEDA_PAUSED, None)
    if is_stopped:
        annotations[KEDA_PAUSED] = "0"
    return {**live, "metadata": meta | {"annotations": annotations}}


def rules(pace: ScalingPace) -> Manifest:
    """Return the rules that limit how fast KEDA may scale a pool in one direction, up or down.

    If both a number and a percentage of pods are set, the one that allows the larger change
    applies, as in the operator's own autoscaling.
    """
    period = max(1, round(pace.period))
    policies = [{"type": "Pods", "value": pace.pods, "periodSeconds": period}]
    if pace.percent:
        policies.append({"type": "Percent", "value": pace.percent, "periodSeconds": period})
    window = round(pace.window)
    return {"stabilizationWindowSeconds": window, "selectPolicy": "Max", "policies": policies}


def scaled_object(service: Service, pool_name: str, scaling: AutoscalingSpec) -> Manifest:
    name = naming.pool_name(service.name, pool_name)
    pods = f'namespace="{service.namespace}",pod=~"{name}-[0-9]+"'
    routers = f'namespace="{service.namespace}",pod=~"{naming.router_name(service.name)}-.+"'
    cold_starts = f'ullage_router_wanted_requests{{{routers},pool="{pool_name}"}}'

    running = f"ullage_requests_running{{{pods}}} + ullage_requests_waiting{{{pods}}}"
    activity = f"(sum({running}) or vector(0)) + (sum({cold_starts}) or vector(0))"
    threshold = f"{scaling.targets.kv_utilization:g}"
    behavior = {"scaleUp": rules(scaling.scale_up), "scaleDown": rules(scaling.scale_down)}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
        "pollingInterval": POLL_S,
        "cooldownPeriod": round(scaling.idle_after),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [
            # Memory decides the number of engines, and requests decide whether there are any.
            # Cached prefixes take memory even without requests.
            trigger(scaling, f"sum({METRIC}{{{pods}}}) or vector(0)", threshold, _NEVER),
            trigger(scaling, activity, _NEVER, "0"),
            *own_triggers(scaling),
        ],
    }


def own_triggers(scaling: AutoscalingSpec) -> list[Manifest]:
    """Return a spec's additional triggers in the format of a ScaledObject."""
    return [as_asked(each) for each in scaling.keda.triggers] if scaling.keda else []


def trigger(scaling: AutoscalingSpec, query: str, threshold: str, activation: str) -> Manifest:
    login = scaling.keda.authentication_ref if scaling.keda else None
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": scaling.prometheus_url,
            "query": query,
            "threshold": threshold,
            "activationThreshold": activation,
        },
        **({"authenticationRef": to_api(login)} if login else {}),
    }
