"""A whole rollout: the operator's process, an API server, a router on real ports, fake engines.

The test plays what a cluster does: workloads that become ready, and the kubelet, which hands the
router its file.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRDS, Operator, World, login, read_crd, until
from ullage_testing.ports import free_port

from ullage_router.policy.facts import Side

LABELS = {
    "app.kubernetes.io/name": "ullage",
    "app.kubernetes.io/instance": "s",
    "app.kubernetes.io/component": "router",
}
ROLLOUT = {
    "weightSteps": [30, 50],
    "stepDuration": "1s",
    "minRequests": 8,
    "thresholds": {"ttftPercent": 100000, "e2ePercent": 100000},  # the machine may be busy
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(running(bookmark_interval=1.0))
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        monkeypatch.setenv("ULLAGE_DNS_LAG", "0.5")
        client = stack.enter_context(httpx.Client(**login(), timeout=20))
        client.post("/api/v1/namespaces", json={"metadata": {"name": "live"}})
        client.post(CRDS, json=read_crd()).raise_for_status()
        made = World(client, "live", tmp_path / "kubeconfig.yaml", api)
        made.kubeconfig = api.kubeconfig(tmp_path)
        until(lambda: client.get(made.services).status_code == 200, "the definition is served")
        operator = Operator(made, tmp_path / "operator.log", False)
        stack.callback(operator.stop)
        yield made


def play_cluster(world: World, file: Path, canary: str) -> None:
    """Workloads become ready, and the router's file is as its ConfigMap says."""
    for plural in ("statefulsets", "deployments"):
        for item in world.get(world.path(plural)).get("items", ()):
            count = item["spec"]["replicas"]
            name = item["metadata"]["name"]
            status = {
                "observedGeneration": item["metadata"]["generation"],
                "replicas": count,
                "readyReplicas": count,
                "availableReplicas": count,
                "updatedReplicas": count,
            }
            if item.get("status", {}) | status != item.get("status"):
                world.patch(f"{world.path(plural)}/{name}/status", {"status": status})
    data = world.get(f"{world.path('configmaps', '')}/s-router").get("data", {})
    text = data.get("rollout.yaml", "").replace("s-single-next:9000", canary)
    if text and text != file.read_text():
        new = file.parents[1] / "rollout.new"
        new.write_text(text)
        new.replace(file)  # whole at any moment, as the kubelet's files are


def run_router_pod(world: World, port: int) -> None:
    ports = [{"name": "metrics", "containerPort": port}]
    spec = {"containers": [{"name": "router", "image": "router", "ports": ports}]}
    meta = {
        "name": "s-router-0",
        "labels": LABELS | {"pod-template-hash": "0"},
        "ownerReferences": world.router_owner("0"),
    }
    pods = world.path("pods", "")
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    world.client.post(pods, json=body).raise_for_status()
    status = {"phase": "Running", "podIP": "127.0.0.1"}
    world.patch(f"{pods}/s-router-0/status", {"status": status})


def rollout(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.service().get("status", {}).get("rollout", {})
    return found


async def go(world: World, service: Any, file: Path, canary: Any, end: str) -> set[str]:
    """Plays and sends requests until the rollout ends; answers the revisions that served."""
    revisions = set()
    deadline = time.monotonic() + 120
    while rollout(world).get("stage") != end:
        assert time.monotonic() < deadline, rollout(world)
        await asyncio.to_thread(play_cluster, world, file, canary.address)
        answers = await asyncio.gather(*(service.chat() for _ in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        revisions |= {answer.headers["x-ullage-revision"] for answer in answers}
        assert world.condition("Ready")["status"] == "True"
        await asyncio.sleep(0.2)
    return revisions


@pytest.mark.parametrize(("is_worse", "end"), [(False, "Stable"), (True, "RolledBack")])
def test_a_change_is_tried_and_promoted_or_rolled_back(
    world: World, start_service: Any, tmp_path: Path, is_worse: bool, end: str
) -> None:
    file = tmp_path / "mounted" / "rollout.yaml"
    file.parent.mkdir()
    file.write_text("{}")
    metrics = free_port()
    assert world.create(image="one", rollout=ROLLOUT, router={"replicas": 1}).status_code == 201

    async def scenario() -> None:
        sections = {"metrics": {"host": "127.0.0.1", "port": metrics}}
        async with start_service(rollout_file=str(file), **sections) as service:
            canary = type(service.engine)("canary-0", "single", 100, 2000)
            await canary.start()
            canary.script.fail_after = 0 if is_worse else None
            run_router_pod(world, metrics)
            await asyncio.to_thread(settle, world, file, canary.address)
            stable = rollout(world)["stableRevision"]
            known = service.router.service.rollout.canary
            await service.until(lambda: known.revision(Side.STABLE) == stable)
            world.patch(f"{world.services}/s", {"spec": {"image": "two"}})
            await asyncio.to_thread(
                until, lambda: rollout(world).get("stage") != "Stable", "a canary is begun"
            )
            revisions = await go(world, service, file, canary, end)
            assert len(revisions) == (1 if is_worse else 2)
            told = world.condition("RolloutHealthy")
            check(world, told, stable, is_worse)
            await canary.stop()

    asyncio.run(scenario())


def settle(world: World, file: Path, canary: str) -> None:
    def is_ready() -> bool:
        play_cluster(world, file, canary)
        return bool(world.condition("Ready").get("status") == "True")

    until(is_ready, "the service is ready", 60)


def check(world: World, told: dict[str, Any], stable: str, is_worse: bool) -> None:
    pod = world.get(f"{world.path('statefulsets')}/s-single")["spec"]["template"]["spec"]
    image = pod["containers"][0]["image"]
    if is_worse:
        assert (told["status"], told["reason"], image) == ("False", "Errors", "one")
        assert rollout(world)["stableRevision"] == stable
    else:
        assert (told["status"], told["reason"], image) == ("True", "Promoted", "two")
    names = [item["metadata"]["name"] for item in world.get(world.path("statefulsets"))["items"]]
    assert names == ["s-single"]
