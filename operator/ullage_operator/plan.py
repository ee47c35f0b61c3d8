"""The decision: from what is wanted and what exists to what must be done. Pure.

`plan` serves the operator, which applies it to the cluster, and `ullage up`, which runs the same
pods as processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from ullage_operator import naming
from ullage_operator.conditions import Workload, findings, observe, refusal, render
from ullage_operator.errors import InvalidManifest
from ullage_operator.manifests import (
    PODMONITOR_API,
    engine_objects,
    pod_monitors,
    pool_objects,
    router_objects,
)
from ullage_operator.settings import Settings
from ullage_operator.spec import Service

Manifest = dict[str, Any]
LiveObject = dict[str, Any]


class ObjectKey(NamedTuple):
    """Identity of an object within a namespace."""

    group: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What exists, as far as one service is concerned."""

    now: datetime
    """In UTC."""
    objects: Sequence[LiveObject] = ()
    """Live objects that the service owns."""
    pods: Sequence[LiveObject] = ()
    """Pods of the service, for the reasons why they are stuck."""
    apis: frozenset[str] = frozenset()
    """Optional API group/versions that the cluster serves, such as monitoring.coreos.com/v1."""
    headroom: Mapping[str, int] = field(default_factory=dict)
    """KV bytes that a pool's engines can still promise, by pool, where known."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """The service's present status."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in order: apply, delete, write the status."""

    apply: tuple[Manifest, ...]
    delete: tuple[LiveObject, ...]
    status: Manifest


def plan(service: Service, observed: Observed, settings: Settings) -> Plan:
    """Everything that should exist, what should no longer, and what to report."""
    wanted = wanted_objects(service, observed, settings)
    keys = {key_of(item) for item in wanted}
    unwanted = [item for item in observed.objects if key_of(item) not in keys]
    return Plan(tuple(wanted), tuple(unwanted), status_of(service, observed))


def wanted_objects(service: Service, observed: Observed, settings: Settings) -> list[Manifest]:
    """Engines first, so that a router finds its targets' names when it starts."""
    objects = engine_objects(service, settings)
    for name, pool in service.spec.pools.items():
        objects += pool_objects(service, name, pool, settings)
    objects += router_objects(service, settings)
    return objects + (pod_monitors(service) if PODMONITOR_API in observed.apis else [])


def key_of(item: LiveObject) -> ObjectKey:
    """The same for every version of the API that an object is read with."""
    group, slash, _ = item["apiVersion"].rpartition("/")
    return ObjectKey(group if slash else "", item["kind"], item["metadata"]["name"])


def status_of(service: Service, observed: Observed) -> Manifest:
    live = {key_of(item): item for item in observed.objects}
    name = naming.router_name(service.name)
    router_live = live.get(ObjectKey("apps", "Deployment", name))
    router = observe("router", service.spec.router.replicas, router_live)
    pools = {}
    for pool_name, pool in service.spec.pools.items():
        key = ObjectKey("apps", "StatefulSet", naming.pool_name(service.name, pool_name))
        pools[pool_name] = observe(pool_name, pool.replicas, live.get(key))
    found = findings(router, list(pools.values()), observed.pods)
    host = f"{name}.{service.namespace}.svc"
    return {
        "observedGeneration": service.generation,
        "endpoint": f"http://{host}:{naming.HTTP_PORT}",
        "grpcEndpoint": f"{host}:{naming.GRPC_PORT}",
        "router": {"replicas": router.exist, "readyReplicas": router.ready},
        "pools": {
            pool_name: pool_status(service, pool_name, workload, observed)
            for pool_name, workload in pools.items()
        },
        "conditions": render(
            found, observed.status.get("conditions", ()), service.generation, observed.now
        ),
    }


def pool_status(service: Service, pool: str, workload: Workload, observed: Observed) -> Manifest:
    match = naming.selector(service.name, naming.ENGINE, pool)
    status: Manifest = {
        "replicas": workload.exist,
        "readyReplicas": workload.ready,
        "selector": naming.selector_text(match),
    }
    if pool in observed.headroom:
        status["headroomBytes"] = observed.headroom[pool]
    return status


def refused_status(error: InvalidManifest, generation: int, observed: Observed) -> Manifest:
    """Status of a service that cannot be parsed: all else stays as it was."""
    message = "; ".join(map(str, error.problems))
    previous = observed.status.get("conditions", ())
    found = render(refusal("InvalidSpec", message), previous, generation, observed.now)
    types = {condition["type"] for condition in found}
    kept = [dict(condition) for condition in previous if condition["type"] not in types]
    return {**observed.status, "observedGeneration": generation, "conditions": [*found, *kept]}
