"""An upgrade of ten services on a node whose devices are all in use ends.

ULLAGE_E2E_TAG names another tag of the operator's and the engines' images, which the nodes have.
"""

import os
import time
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
LONGEST_PAUSE_S = 150.0
"""An engine's drain and its successor's start, on a busy node."""
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


def is_ready(status: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])


def test_an_upgrade_of_ten_services_on_a_full_node_ends(
    kubectl: Kubectl, release: Release, services: list[Service]
) -> None:
    old = images(services[0])
    at_once = []
    down_since: dict[str, float] = {}
    longest_down_s: dict[str, float] = {}

    def is_over() -> bool:
        # One answer for all: between two, a rollout could end and another begin.
        listed = {each["metadata"]["name"]: each["status"] for each in kubectl.listed(KIND)}
        found = [listed[service.name] for service in services]
        rollouts = [status["rollout"] for status in found]
        stages = [rollout["stage"] for rollout in rollouts]
        assert "RolledBack" not in stages, rollouts
        at_once.append(sum(stage != "Stable" for stage in stages))
        for name, status in listed.items():
            began = time.monotonic() if is_ready(status) else down_since.get(name, time.monotonic())
            down_since[name] = began
            longest_down_s[name] = max(longest_down_s.get(name, 0.0), time.monotonic() - began)
        return all(not old & images(service) and service.is_settled() for service in services)

    release.install(dns_lag_s(kubectl), f"image.tag={TAG}", f"engineImage.tag={TAG}")
    try:
        until(is_over, "all are upgraded", LONGEST_S, pause=5)
        assert 1 <= max(at_once) <= MAX_ROLLOUTS
        # A service of one engine pauses while its place changes hands, and gets it back.
        assert max(longest_down_s.values()) <= LONGEST_PAUSE_S, longest_down_s
    finally:
        release.install(dns_lag_s(kubectl))
