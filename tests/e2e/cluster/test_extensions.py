"""Kinds of others that the operator writes: HTTPRoute of Gateway API, ScaledObject of KEDA.

Each test needs its definition in the cluster; no controller for it has to run.
"""

from collections.abc import Callable
from typing import Any

import pytest
from ullage_cluster.kubectl import Kubectl, until
from ullage_cluster.service import Service

NO_IMAGE = "ullage/no-such-image:0"
"""Of engines that need not run."""
ROUTES = "httproutes.gateway.networking.k8s.io"
SCALERS = "scaledobjects.keda.sh"
HOST = "llm.example.com"


def need(kubectl: Kubectl, definition: str) -> None:
    if not kubectl.get("customresourcedefinition", definition):
        pytest.skip(f"the cluster has no {definition}")


def test_a_route_to_a_gateway_is_made_and_removed(
    kubectl: Kubectl, make_service: Callable[..., Service]
) -> None:
    need(kubectl, ROUTES)
    name = "routed"
    gateway = {"parentRefs": [{"name": "nobody-has-it"}], "hostnames": [HOST]}
    service = make_service(name, image=NO_IMAGE, router={"gateway": gateway})

    route = until(lambda: kubectl.get(ROUTES, f"{name}-router"), "the route is there", 60)
    assert route["spec"]["hostnames"] == [HOST]
    [rule] = route["spec"]["rules"]
    assert [each["name"] for each in rule["backendRefs"]] == [f"{name}-router"]
    accepted = until(lambda: service.condition("RouteAccepted"), "the status tells of it", 120)
    assert accepted["status"] == "False", accepted

    service.edit(router={"gateway": None})
    until(lambda: not kubectl.get(ROUTES, f"{name}-router"), "the route is gone", 60)


def test_keda_is_told_the_triggers_and_paused_by_a_stop(
    kubectl: Kubectl, make_service: Callable[..., Service]
) -> None:
    need(kubectl, SCALERS)
    name = "scaled"
    hours = {"timezone": "Europe/Berlin", "start": "0 8 * * *", "end": "0 18 * * *"}
    office = {"type": "cron", "metadata": {**hours, "desiredReplicas": "2"}}
    autoscaling = {
        "provider": "KEDA",
        "prometheusURL": "http://prometheus.monitoring:9090",
        "minReplicas": 1,
        "maxReplicas": 3,
        "keda": {"triggers": [office]},
    }
    pool = {"gpus": 1, "autoscaling": autoscaling}
    service = make_service(name, image=NO_IMAGE, replicas=None, pools={"single": pool})

    def scaler() -> dict[str, Any]:
        return next(iter(service.owned(SCALERS)), {})

    made = until(scaler, "the scaler is there", 60)
    assert made["spec"]["scaleTargetRef"]["name"] == f"{name}-single"
    assert made["spec"]["maxReplicaCount"] == 3
    kinds = [trigger["type"] for trigger in made["spec"]["triggers"]]
    assert kinds[0] == "prometheus"
    assert kinds[-1] == "cron"

    service.edit(stop=True)
    paused = "autoscaling.keda.sh/paused-replicas"
    until(lambda: scaler()["metadata"].get("annotations", {}).get(paused) == "0", "paused", 60)

    service.edit(pools={"single": {"autoscaling": None}})
    until(lambda: not scaler(), "the scaler is gone", 60)
