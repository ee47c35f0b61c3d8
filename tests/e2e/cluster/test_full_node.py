"""An upgrade of ten services on a node whose devices are all in use ends.

ULLAGE_E2E_TAG names another tag of the operator's and the engines' images, which the nodes have.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from ullage_cluster.client import dns_lag_s
from ullage_cluster.kubectl import Kubectl, extended_resource, until
from ullage_cluster.release import Release
from ullage_cluster.service import KIND, Service, manifest

TAG = os.environ.get("ULLAGE_E2E_TAG", "")
COUNT = 10
MAX_ROLLOUTS = 3
LONGEST_S = 2400
SLOTS = "ullage.dev/e2e-places"
QUICK = {"weightSteps": [50], "stepDuration": "10s", "minRequests": 1, "maxWait": "3m"}

pytestmark = [
    pytest.mark.timeout(2 * LONGEST_S),
    pytest.mark.skipif(not TAG, reason="no other images: ULLAGE_E2E_TAG is not set"),
]


@pytest.fixture
def services(kubectl: Kubectl, release: Release) -> Iterator[list[Service]]:
    """As many services of one engine as the node has places for engines."""
    made = [Service(kubectl, f"fleet-{number}") for number in range(COUNT)]
    with extended_resource(kubectl, SLOTS, COUNT):
        for service in made:
            kubectl.apply(small(service.name))
        for service in made:
            service.settle()
        yield made
        for service in made:
            kubectl("delete", KIND, service.name, "--wait=false")
        until(lambda: not any(service.everything("pods") for service in made), "all are gone")


def small(name: str) -> dict[str, Any]:
    made = manifest(name, rollout=QUICK)
    del made["spec"]["model"]["dtype"]
    pool = made["spec"]["pools"]["single"]
    pool["replicas"] = 1
    pool["resources"] = {
        "requests": {"cpu": "20m", "memory": "384Mi"},
        "limits": {"memory": "2Gi", SLOTS: 1},
    }
    made["spec"]["router"]["resources"] = {"requests": {"cpu": "20m", "memory": "96Mi"}}
    return made


def images(service: Service) -> set[str]:
    pods = service.pods()
    return {each["image"] for pod in pods for each in pod["spec"]["containers"]}


def test_an_upgrade_of_ten_services_on_a_full_node_ends(
    kubectl: Kubectl, release: Release, services: list[Service]
) -> None:
    old = images(services[0])
    at_once = []

    def is_over() -> bool:
        stages = [service.status()["rollout"]["stage"] for service in services]
        assert "RolledBack" not in stages, [service.status()["rollout"] for service in services]
        at_once.append(sum(stage not in ("Stable", "RolledBack") for stage in stages))
        return all(not old & images(service) and service.is_settled() for service in services)

    release.install(dns_lag_s(kubectl), f"image.tag={TAG}", f"engineImage.tag={TAG}")
    try:
        until(is_over, "all are upgraded", LONGEST_S, pause=5)
        assert 1 <= max(at_once) <= MAX_ROLLOUTS
    finally:
        release.install(dns_lag_s(kubectl))
