"""A change of the engines is tried on a canary: promoted if it is good, rolled back if it is not.

Clients notice neither: no request fails, and the service stays Ready.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ullage_cluster.client import Client
from ullage_cluster.faults import kill_worker
from ullage_cluster.kubectl import Kubectl, extended_resource, is_ready, names, until
from ullage_cluster.service import Service, manifest

# Generous with times: engines that share two cores are slower and faster by chance.
QUICK = {
    "strategy": "Canary",
    "weightSteps": [50],
    "stepDuration": "10s",
    "minRequests": 4,
    "maxWait": "5m",
    "startDeadline": "10m",
    "thresholds": {"ttftPercent": 10000, "e2ePercent": 10000},
}
SLOTS = "ullage.dev/e2e-slots"
"""An extended resource that a node gets for a test: room for as many engines."""
PROMPTS = tuple(f"Say something about {thing}." for thing in ("tea", "jazz", "clay", "wind"))
LONGEST_S = 900


@pytest.fixture
def rolled(kubectl: Kubectl, service: Service) -> Iterator[Service]:
    """The shared service with quick steps; afterwards without what was rolled back."""
    before = service.get()["spec"]
    service.edit(rollout=QUICK)
    service.settle()
    yield service
    if rollout(service).get("stage") == "RolledBack":
        service.edit(**{name: before.get(name) for name in ("image", "batching")})
        wait_for(service, "Stable")
    service.settle()


def rollout(service: Service) -> dict[str, Any]:
    """Where the rollout is; Ready must be true all along."""
    status = service.status()
    ready = {c["type"]: c["status"] for c in status["conditions"]}["Ready"]
    assert ready == "True", status
    return dict(status.get("rollout", {}))


def canaries(service: Service) -> list[dict[str, Any]]:
    """Ready canary pods."""
    pods = [p for p in service.pods() if "-next-" in p["metadata"]["name"]]
    return [pod for pod in pods if is_ready(pod)]


def wait_for(service: Service, stage: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        now = rollout(service)
        return now if now.get("stage") == stage else None

    found: dict[str, Any] = until(reached, f"stage {stage}; it has {service.status()}", LONGEST_S)
    return found


@pytest.fixture
def busy(rolled: Service, client: Client) -> Callable[[], Any]:
    return lambda: client.streams(rolled, PROMPTS, max_tokens=16, seconds=LONGEST_S, stop=True)


def test_a_good_change_is_promoted(rolled: Service, busy: Callable[[], Any]) -> None:
    old = rolled.status()["rollout"]["stableRevision"]
    with busy() as streams:
        streams.started(1)
        rolled.edit(batching={"maxSequences": 15})
        tried = wait_for(rolled, "Canary")
        assert "%" in tried["step"]
        assert "step 1 of 1" in tried["message"], tried
        assert "until" in tried["message"], tried
        now = wait_for(rolled, "Stable")
        answers = streams.stop()
    assert now["stableRevision"] != old
    assert [a for a in answers if not a.is_whole] == []
    assert {a.headers["x-ullage-revision"] for a in answers} == {old, now["stableRevision"]}
    rolled.settle()
    assert rolled.condition("RolloutHealthy")["status"] == "True"
    assert not [name for name in names(rolled.pods()) if "-next-" in name]


def test_a_canary_that_breaks_is_rolled_back(
    kubectl: Kubectl, rolled: Service, busy: Callable[[], Any]
) -> None:
    stable = {kubectl.uid("pod", name) for name in names(rolled.pods())}
    with busy() as streams:
        rolled.edit(batching={"maxSequences": 14})
        wait_for(rolled, "Canary")
        kill_worker(kubectl, names(canaries(rolled))[0])
        now = wait_for(rolled, "RolledBack")
        answers = streams.stop()
    assert [a for a in answers if not a.is_whole] == []
    assert now["failedRevision"]
    assert now["failedRevision"] != now["stableRevision"]
    told = rolled.condition("RolloutHealthy")
    assert told["status"] == "False", told
    assert "restart" in told["message"], told
    until(lambda: {p["metadata"]["uid"] for p in rolled.pods()} == stable, "only the stable stay")


def test_a_canary_that_never_starts_is_rolled_back(
    kubectl: Kubectl, rolled: Service, open_nodes: None
) -> None:
    stable = {kubectl.uid("pod", name) for name in names(rolled.pods())}
    rolled.edit(image="ullage/no-such-image:0", rollout={"startDeadline": "30s"})
    wait_for(rolled, "RolledBack")
    told = rolled.condition("RolloutHealthy")
    assert told["status"] == "False", told
    assert "no-such-image" in told["message"], told
    until(lambda: {p["metadata"]["uid"] for p in rolled.pods()} == stable, "only the stable stay")


@pytest.fixture
def two_slots(kubectl: Kubectl) -> Iterator[None]:
    """One node has room for two engines that ask for a slot, and for no third."""
    with extended_resource(kubectl, SLOTS, 2):
        yield


def test_a_canary_without_room_takes_the_place_of_an_engine(
    make_service: Callable[..., Service], client: Client, two_slots: None, open_nodes: None
) -> None:
    pool = manifest("full")["spec"]["pools"]["single"]
    limits = {**pool["resources"]["limits"], SLOTS: 1}
    pool["resources"] = {**pool["resources"], "limits": limits}
    full = make_service("full", pools={"single": pool}, rollout=QUICK)
    full.settle()
    old = rollout(full)["stableRevision"]

    with client.streams(full, PROMPTS[:2], max_tokens=16, seconds=LONGEST_S, stop=True) as streams:
        streams.started(1)
        full.edit(batching={"maxSequences": 13})
        until(lambda: len(full.pods()) == 2 and canaries(full), "a canary in an engine's place")
        now = wait_for(full, "Stable")
        answers = streams.stop()
    assert now["stableRevision"] != old
    assert [answer for answer in answers if not answer.is_whole] == []
    full.settle()


def test_a_restart_by_kubectl_loses_no_request(
    kubectl: Kubectl, service: Service, client: Client
) -> None:
    before = {kubectl.uid("pod", name) for name in names(service.pods())}
    with client.streams(
        service, PROMPTS[:2], max_tokens=24, seconds=LONGEST_S, stop=True
    ) as streams:
        streams.started(2)
        for workload in service.owned("statefulsets,deployments"):
            kubectl("rollout", "restart", f"{workload['kind']}/{workload['metadata']['name']}")
        until(
            lambda: not before & {pod["metadata"]["uid"] for pod in service.pods()},
            "every engine is made anew",
            LONGEST_S,
        )
        answers = streams.stop()
    assert [answer for answer in answers if not answer.is_whole] == []
    service.settle()
