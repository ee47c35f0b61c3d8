"""What makes others scale a pool: a HorizontalPodAutoscaler, or KEDA's ScaledObject.

Both scale the pool's StatefulSet by the KV memory that is used of each engine, of which these tell
the metric ullage_kv_used_ratio: the first through an adapter of the custom metrics API, the second
by asking Prometheus.
"""

from collections.abc import Collection, Iterable
from typing import Any

from ullage_operator import naming
from ullage_operator.manifests import Builder
from ullage_operator.pools import Autoscaling, Pace, Pool
from ullage_operator.scaling import HPA, KEDA, autoscaling_of
from ullage_operator.spec import Service

Manifest = dict[str, Any]

HPA_API = "autoscaling/v2"
KEDA_API = "keda.sh/v1alpha1"
METRIC = "ullage_kv_used_ratio"
POLL_S = 10
_NEVER = "1000000"
"""Requests from which on activity alone would ask for another engine."""


def scaler_objects(
    service: Service, pool_name: str, pool: Pool, serves: Collection[str]
) -> list[Manifest]:
    """None where the operator scales the pool, or its spec does."""
    scaling = autoscaling_of(pool)
    if scaling is None:
        return []
    name = naming.pool_name(service.name, pool_name)
    build = Builder(service, naming.ENGINE, pool_name)
    if scaling.provider == HPA and "HorizontalPodAutoscaler" in serves:
        spec = horizontal(name, scaling)
        return [build.object(HPA_API, "HorizontalPodAutoscaler", name, spec)]
    if scaling.provider == KEDA and "ScaledObject" in serves:
        spec = scaled_object(service, pool_name, scaling)
        return [build.object(KEDA_API, "ScaledObject", name, spec)]
    return []


def without_replicas(objects: Iterable[Manifest]) -> list[Manifest]:
    """The same, the number of pods left to whoever else sets it."""
    return [
        {**item, "spec": {k: v for k, v in item["spec"].items() if k != "replicas"}}
        if item["kind"] == "StatefulSet"
        else item
        for item in objects
    ]


def target(name: str) -> Manifest:
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}


def horizontal(name: str, scaling: Autoscaling) -> Manifest:
    value = f"{round(1000 * scaling.targets.kv_utilization)}m"
    metric = {
        "metric": {"name": METRIC},
        "target": {"type": "AverageValue", "averageValue": value},
    }
    return {
        "scaleTargetRef": target(name),
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [{"type": "Pods", "pods": metric}],
        "behavior": behavior(scaling),
    }


def behavior(scaling: Autoscaling) -> Manifest:
    return {"scaleUp": rules(scaling.scale_up), "scaleDown": rules(scaling.scale_down)}


def rules(pace: Pace) -> Manifest:
    """Whichever policy lets more pods change, as with the operator's own."""
    period = max(1, round(pace.period))
    policies = [{"type": "Pods", "value": pace.pods, "periodSeconds": period}]
    if pace.percent:
        policies.append({"type": "Percent", "value": pace.percent, "periodSeconds": period})
    window = round(pace.window)
    return {"stabilizationWindowSeconds": window, "selectPolicy": "Max", "policies": policies}


def scaled_object(service: Service, pool_name: str, scaling: Autoscaling) -> Manifest:
    name = naming.pool_name(service.name, pool_name)
    pods = f'namespace="{service.namespace}",pod=~"{name}-[0-9]+"'
    routers = f'namespace="{service.namespace}",pod=~"{naming.router_name(service.name)}-.+"'
    wanted = f'ullage_router_wanted_requests{{{routers},pool="{pool_name}"}}'
    running = f"ullage_requests_running{{{pods}}} + ullage_requests_waiting{{{pods}}}"
    activity = f"(sum({running}) or vector(0)) + (sum({wanted}) or vector(0))"
    threshold = f"{scaling.targets.kv_utilization:g}"
    return {
        "scaleTargetRef": target(name),
        "pollingInterval": POLL_S,
        "cooldownPeriod": round(scaling.idle_after),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(scaling)}},
        "triggers": [
            # Memory says how many; whether any, requests do, for cached prefixes take memory too.
            trigger(scaling, f"sum({METRIC}{{{pods}}}) or vector(0)", threshold, _NEVER),
            trigger(scaling, activity, _NEVER, "0"),
        ],
    }


def trigger(scaling: Autoscaling, query: str, threshold: str, activation: str) -> Manifest:
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": scaling.prometheus_url,
            "query": query,
            "threshold": threshold,
            "activationThreshold": activation,
        },
    }
