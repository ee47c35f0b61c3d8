"""The operator process, an API server and engines' headroom services: heard, told and healed.

Pods are made by hand; each has a loopback address of its own, where a real gRPC server reports.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from ullage_kubeapi.trial import converged, until

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage_operator.api.naming import PROBE_PORT

if TYPE_CHECKING:
    World = Any

LONG_S = 60
QUICK = {"notReadyAfter": "2s", "backoff": {"first": "1h", "max": "1h"}}


class Headrooms(headroom_pb2_grpc.HeadroomServiceServicer):
    """Reports at once whenever its state changes."""

    def __init__(self) -> None:
        self.state = headroom_pb2.Headroom(
            ready=True,
            health=1.0,
            kv_pool_bytes=1000,
            headroom_bytes=800,
            kv_bytes_per_token=10,
        )
        self.changed = asyncio.Event()

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, context: Any
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        while True:
            self.changed.clear()
            yield headroom_pb2.WatchHeadroomResponse(headroom=self.state)
            await self.changed.wait()


class Engines:
    """Headroom services on loopback addresses, in an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: list[grpc.aio.Server] = []
        self.by_ip: dict[str, Headrooms] = {}

    def add(self) -> str:
        """The address of a new one."""
        return asyncio.run_coroutine_threadsafe(self._add(), self._loop).result(20)

    async def _add(self) -> str:
        ip = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"
        server = grpc.aio.server()
        service = Headrooms()
        headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(service, server)
        server.add_insecure_port(f"{ip}:{PROBE_PORT}")
        await server.start()
        self._servers.append(server)
        self.by_ip[ip] = service
        return ip

    def change(self, ip: str, **fields: Any) -> None:
        async def push() -> None:
            self.by_ip[ip].state.MergeFrom(headroom_pb2.Headroom(**fields))
            self.by_ip[ip].changed.set()

        asyncio.run_coroutine_threadsafe(push(), self._loop).result(20)

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.gather(*(server.stop(0) for server in self._servers))

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    with contextlib.closing(Engines()) as made:
        yield made


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_pod(
    world: "World", name: str, ip: str, ready: bool = True, *, is_ours: bool = True
) -> str:
    labels = {
        "app.kubernetes.io/name": "ullage",
        "app.kubernetes.io/instance": "s",
        "app.kubernetes.io/component": "engine",
        "serving.ullage.dev/pool": "single",
    }
    container = {"name": "engine", "image": "i"}
    meta: dict[str, Any] = {"name": name, "labels": labels}
    if is_ours:
        meta["ownerReferences"] = world.pod_owner("s-single")
    body = {"metadata": meta, "spec": {"containers": [container]}}
    made = world.client.post(world.path("pods", ""), json=body)
    assert made.status_code == 201, made.text
    set_ready(world, name, ready, {"podIP": ip})
    return str(made.json()["metadata"]["uid"])


def set_ready(world: "World", name: str, ready: bool, more: dict[str, Any] | None = None) -> None:
    told = {"name": "engine", "image": "i", "imageID": "", "ready": ready, "restartCount": 1}
    since = {"lastTransitionTime": ago(60)}
    status = {
        "phase": "Running",
        "containerStatuses": [told | {"started": True, "state": {"running": {}}}],
        "conditions": [{"type": "Ready", "status": str(ready), **since}],
        **(more or {}),
    }
    path = f"{world.path('pods', '')}/{name}/status"
    assert world.patch(path, {"status": status}).status_code == 200


def pod(world: "World", name: str) -> dict[str, Any]:
    return dict(world.get(f"{world.path('pods', '')}/{name}"))


def pool_status(world: "World") -> dict[str, Any]:
    pools = world.service().get("status", {}).get("pools", {})
    return dict(pools.get("single", {}))


def pressure(world: "World") -> int | None:
    return pool_status(world).get("pressureLevel")


def events(world: "World") -> dict[str, str]:
    """Reason -> note."""
    path = f"/apis/events.k8s.io/v1/namespaces/{world.namespace}/events"
    return {event["reason"]: event["note"] for event in world.get(path)["items"]}


def test_the_engines_pressure_is_in_the_status(world, played, operator, engines) -> None:
    world.create(pools={"single": {"replicas": 2}})
    converged(world)
    first = engines.add()
    second = engines.add()
    make_pod(world, "s-single-0", first)
    make_pod(world, "s-single-1", second)
    heard = {"pressureLevel": 0, "restarts": 2}
    until(lambda: heard.items() <= pool_status(world).items(), "both are heard", LONG_S)
    engines.change(first, pressure_level=2)
    until(lambda: pressure(world) == 2, "one is short of memory", LONG_S)
    assert "Created" not in events(world), "which goes without saying of a new service"
    world.client.delete(f"{world.path('services', '')}/s-router")
    until(lambda: "Created" in events(world), "an Event tells of the object", LONG_S)


def test_what_engines_report_is_in_the_status_and_an_event(world, played, start, engines) -> None:
    first = start()
    world.create(pools={"single": {"replicas": 1}})
    converged(world)
    engine = engines.add()
    make_pod(world, "s-single-0", engine)

    def restarts() -> int | None:
        pools = world.service().get("status", {}).get("pools", {})
        return pools.get("single", {}).get("workerRestarts")

    until(lambda: pressure(world) == 0 and restarts() == 0, "it is heard", LONG_S)
    engines.change(engine, worker_restarts=1)
    until(lambda: restarts() == 1, "its status tells", LONG_S)
    note = until(lambda: events(world).get("WorkerRestarted"), "an Event tells", LONG_S)
    assert note.startswith("pool single: a worker of its engines ended unexpectedly and restarted")
    engines.change(engine, throttle_reasons=["hw_thermal"])
    note = until(lambda: events(world).get("BoostOff"), "an Event tells of hot GPUs", LONG_S)
    assert note.startswith("pool single: an engine runs smaller batches")
    assert world.service()["status"]["pools"]["single"]["boostOff"] == 1
    assert first.stop() == 0
    engines.change(engine, worker_restarts=3)
    start()
    until(lambda: restarts() == 3, "what happened meanwhile is told", LONG_S)

    def is_an_event() -> bool:
        path = f"/apis/events.k8s.io/v1/namespaces/{world.namespace}/events"
        return any(
            "2 workers of its engines" in event["note"] for event in world.get(path)["items"]
        )

    until(is_an_event, "and is an Event", LONG_S)


def test_a_pod_that_stays_not_ready_is_made_anew_once(world, played, operator, engines) -> None:
    world.create(pools={"single": {"replicas": 2}}, healing=QUICK)
    converged(world)
    make_pod(world, "s-single-0", engines.add())
    make_pod(world, "s-single-1", engines.add())
    until(lambda: pressure(world) == 0, "they are heard", LONG_S)
    for name in ("s-single-0", "s-single-1"):
        set_ready(world, name, False)
    until(lambda: not pod(world, "s-single-0"), "the first is deleted", LONG_S)

    def waits() -> bool:
        return bool(world.condition("Degraded").get("reason") == "RestartBackoff")

    until(waits, "the second waits for the backoff", LONG_S)
    assert pod(world, "s-single-1")
    [restart] = world.service()["status"]["healing"]["restarts"]
    assert (restart["pod"], restart["reason"]) == ("s-single-0", "NotReady")
    note = until(lambda: events(world).get("PodRestarted"), "an Event tells", LONG_S)
    assert note == ("pod s-single-0: NotReady: not ready for more than 2 s; it is recreated")


def test_a_restarted_operator_remembers_what_it_made_anew(world, played, start, engines) -> None:
    first = start()
    world.create(pools={"single": {"replicas": 2}}, healing=QUICK)
    converged(world)
    make_pod(world, "s-single-0", engines.add(), ready=False)
    until(lambda: not pod(world, "s-single-0"), "it is deleted", LONG_S)
    assert first.stop() == 0
    make_pod(world, "s-single-1", engines.add(), ready=False)
    start()

    def waits() -> bool:
        return bool(world.condition("Degraded").get("reason") == "RestartBackoff")

    until(waits, "the backoff goes on", LONG_S)
    assert pod(world, "s-single-1")


def test_pods_of_others_are_left_alone(world, played, operator, engines) -> None:
    """Nobody's copy of an engine's pod, with all of its labels."""
    world.create(pools={"single": {"replicas": 1}}, healing=QUICK)
    converged(world)
    strangers = engines.add()
    engines.change(strangers, pressure_level=2)
    make_pod(world, "copy-of-s-single-0", strangers, ready=False, is_ours=False)
    make_pod(world, "s-single-0", engines.add())
    heard = {"pressureLevel": 0, "restarts": 1}
    until(lambda: heard.items() <= pool_status(world).items(), "ours alone is heard", LONG_S)
    set_ready(world, "s-single-0", False)
    until(lambda: not pod(world, "s-single-0"), "ours is deleted", LONG_S)
    assert pod(world, "copy-of-s-single-0")
    [restart] = world.service()["status"]["healing"]["restarts"]
    assert restart["pod"] == "s-single-0"
