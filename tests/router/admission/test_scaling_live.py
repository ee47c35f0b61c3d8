"""From a request to an engine and back to sleep: a real operator, API server, router, fake engine.

The test plays what a cluster would do: it tells where the router's pod is, and starts an engine
when the StatefulSet asks for one.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRDS, Operator, World, read_crd

ROUTER = {
    "app.kubernetes.io/name": "ullage",
    "app.kubernetes.io/instance": "s",
    "app.kubernetes.io/component": "router",
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(running(bookmark_interval=1.0))
        kubeconfig = api.kubeconfig(tmp_path)
        base = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        client = stack.enter_context(
            httpx.Client(base_url=base, timeout=20, trust_env=False, verify=False)
        )
        client.post("/api/v1/namespaces", json={"metadata": {"name": "models"}})
        made = client.post(CRDS, json=read_crd())
        assert made.status_code == 201, made.text
        yield World(client, "models", kubeconfig, api)


@pytest.fixture
def operator(world: World, tmp_path: Path) -> Iterator[Operator]:
    made = Operator(world, tmp_path / "operator.log", False)
    yield made
    made.stop()


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(40):
        while not (found := await asyncio.to_thread(condition)):  # noqa: ASYNC110 - the API is polled
            await asyncio.sleep(0.05)
        return found


def place_router(world: World, metrics_port: int) -> None:
    """The router's pod, as a kubelet would report it."""
    container = {
        "name": "router",
        "image": "router",
        "ports": [{"name": "metrics", "containerPort": metrics_port}],
    }
    meta = {
        "name": "s-router-0",
        "labels": ROUTER | {"pod-template-hash": "0"},
        "ownerReferences": world.router_owner("0"),
    }
    pod = {"metadata": meta, "spec": {"containers": [container]}}
    pods = f"/api/v1/namespaces/{world.namespace}/pods"
    assert world.client.post(pods, json=pod).status_code == 201
    status = {"status": {"phase": "Running", "podIP": "127.0.0.1"}}
    assert world.patch(f"{pods}/s-router-0/status", status).status_code == 200


def reason(world: World) -> str:
    """Why pool single was given another size."""
    pool = world.service().get("status", {}).get("pools", {}).get("single", {})
    return str(pool.get("scaling", {}).get("reason", ""))


async def test_a_request_wakes_a_pool_which_sleeps_again_when_idle(world, operator, start_service):
    scaling = {"minReplicas": 0, "maxReplicas": 2, "idleAfter": "2s"}
    pools = {"single": {"replicas": 0, "autoscaling": scaling}}
    assert world.create(pools=pools).status_code == 201
    stateful_set = f"{world.path('statefulsets')}/s-single"

    def asks_for(count: int) -> bool:
        return world.get(stateful_set).get("spec", {}).get("replicas") == count

    await until(lambda: asks_for(0))
    async with start_service(sleepy=("single",), wait=False) as service:
        place_router(world, service.router.metrics_port)
        await until(lambda: world.condition("ScalingActive").get("status") == "True")
        asked = asyncio.create_task(service.chat())
        await until(lambda: asks_for(1))
        assert not asked.done()
        engine = service.engine
        await engine.start(int(engine.address.rpartition(":")[2]))
        answer = await asked
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        await until(lambda: asks_for(0))
        await engine.stop()
        await until(lambda: reason(world) == "Idle")
        size = world.service()["status"]["pools"]["single"]
        assert size["desiredReplicas"] == 0
        assert "no request for" in size["scaling"]["message"]


async def test_load_adds_engines_and_silent_routers_change_nothing(world, operator, start_service):
    scaling = {"maxReplicas": 4, "targets": {"kvUtilizationPercent": 50}}
    assert world.create(pools={"single": {"autoscaling": scaling}}).status_code == 201
    stateful_set = f"{world.path('statefulsets')}/s-single"
    async with start_service() as service:
        free = service.engine.headroom.headroom_bytes
        service.engine.push(headroom_bytes=free // 10, requests_running=5)
        place_router(world, service.router.metrics_port)
        await until(lambda: world.get(stateful_set).get("spec", {}).get("replicas") == 2)
        await until(lambda: reason(world) == "Memory")
    await until(lambda: world.condition("ScalingActive").get("reason") == "NoMeasures")
    assert world.get(stateful_set)["spec"]["replicas"] == 2
