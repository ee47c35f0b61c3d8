"""The operator process and an API server: pods that a rollout ends, and a canary without room.

Pods and the status of workloads are made by hand, as their controllers would.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from ullage_kubeapi.trial import World, converged, until

from ullage_operator.api.naming import CANARY_PLACES, POOL_LABEL, STATEFUL_SET_REVISION
from ullage_operator.conditions.conditions import timestamp

LONG_S = 60
READY = {"type": "Ready", "status": "True"}


def make_pod(
    world: World, workload: str, index: int, revision: str, *conditions: dict[str, Any]
) -> None:
    template = world.get(f"{world.path('statefulsets')}/{workload}")["spec"]["template"]
    name = f"{workload}-{index}"
    labels = template["metadata"]["labels"] | {STATEFUL_SET_REVISION: revision}
    meta = {"name": name, "labels": labels, "ownerReferences": world.pod_owner(workload)}
    body = {"metadata": meta, "spec": template["spec"]}
    made = world.client.post(world.path("pods", ""), json=body)
    assert made.status_code == 201, made.text
    status = {"phase": "Running", "conditions": [*conditions]}
    world.patch(f"{world.path('pods', '')}/{name}/status", {"status": status})


def play(world: World, workload: str, ready: int, revision: str = "new") -> None:
    item = world.get(f"{world.path('statefulsets')}/{workload}")
    count = item["spec"]["replicas"]
    status = {
        "observedGeneration": item["metadata"]["generation"],
        "updateRevision": revision,
        "replicas": count,
        "updatedReplicas": count,
        "readyReplicas": ready,
    }
    world.patch(f"{world.path('statefulsets')}/{workload}/status", {"status": status})


def names(world: World) -> list[str]:
    pods = world.get(world.path("pods", ""))["items"]
    return sorted(
        pod["metadata"]["name"] for pod in pods if POOL_LABEL in pod["metadata"]["labels"]
    )


def test_a_quarter_of_the_outdated_engines_end_at_once(world, played, operator) -> None:
    pools = {"single": {"replicas": 8}}
    assert world.create(pools=pools, rollout={"strategy": "Rolling"}).status_code == 201
    converged(world)
    for index in range(8):
        make_pod(world, "s-single", index, "new" if index == 7 else "old", READY)
    play(world, "s-single", 8)
    until(lambda: names(world) == [f"s-single-{n}" for n in (0, 1, 2, 3, 4, 7)], "two end", LONG_S)
    # Both are not back yet, so nothing else ends.
    world.patch(f"{world.services}/s", {"spec": {"slo": {"errorPercent": 10}}})
    until(lambda: world.service()["status"]["observedGeneration"] == 2, "it is seen", LONG_S)
    assert len(names(world)) == 6


def test_a_canary_without_room_takes_the_place_of_an_engine(world, played, operator) -> None:
    gpu = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}, "replicas": 2}
    assert world.create(image="one", device="CUDA", pools={"single": gpu}).status_code == 201
    converged(world)
    for index in range(2):
        make_pod(world, "s-single", index, "new", READY)
    play(world, "s-single", 2)
    until(lambda: world.condition("Available").get("status"), "it serves", LONG_S)
    world.patch(f"{world.services}/s", {"spec": {"image": "two"}})
    canary = f"{world.path('statefulsets')}/s-single-next"
    until(lambda: world.get(canary), "a canary is made", LONG_S)

    lacking = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        "lastTransitionTime": timestamp(datetime.now(UTC) - timedelta(minutes=2)),
    }
    make_pod(world, "s-single-next", 0, "new", lacking)

    def stable() -> dict[str, Any]:
        return world.get(f"{world.path('statefulsets')}/s-single")

    until(lambda: stable()["spec"]["replicas"] == 1, "an engine makes room", LONG_S)
    assert stable()["metadata"]["annotations"][CANARY_PLACES] == "1"
    told = "has the place of an engine of single"
    until(lambda: told in world.service()["status"]["rollout"]["message"], "it is told", LONG_S)
    world.patch(f"{world.services}/s", {"spec": {"image": "one"}})
    until(lambda: stable()["spec"]["replicas"] == 2, "it gives the place back", LONG_S)
    assert CANARY_PLACES not in stable()["metadata"]["annotations"]
