"""What routers tell of pools whose engines the operator does not hear."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from aiohttp import web
from ullage_kubeapi.trial import relist

from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage_operator.api.naming import POD, SERVICE, WATCHED, kind_of
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.conditions import timestamp
from ullage_operator.controller.apply import Applier
from ullage_operator.controller.autoscaler import Autoscaler
from ullage_operator.controller.healer import Healer
from ullage_operator.controller.reconciler import Reconciler, ReconcileTimes
from ullage_operator.controller.rollout_queue import RolloutQueue
from ullage_operator.controller.router_client import RouterClient
from ullage_operator.kube.cache import Cache, Scope, ServiceKey
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import EventRecorder
from ullage_operator.planning.observed import Observed
from ullage_operator.policy.engine_health import EngineHealth
from ullage_operator.policy.restarts import Restart

_ZERO = dict.fromkeys(
    (
        "ready",
        "capacity_bytes",
        "headroom_bytes",
        "engine_requests",
        "credit_bytes",
        "queued",
        "queue_bytes",
        "queue_s",
        "answered",
        "late",
        "held",
        "wanted",
        "idle_s",
    ),
    0,
)


def report(**ready: int) -> str:
    return json.dumps([{pool: _ZERO | {"ready": number} for pool, number in ready.items()}])


def router(port: int, ready: bool, started: datetime) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": port}]
    return {
        "metadata": {"name": "r", "labels": {"app.kubernetes.io/component": "router"}},
        "spec": {"containers": [{"ports": ports}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "containerStatuses": [{"state": {"running": {"startedAt": timestamp(started)}}}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


@contextlib.asynccontextmanager
async def routers(
    bodies: list[str], ready: Iterable[bool] = (), runs_s: float = 60.0
) -> AsyncIterator[list[dict[str, Any]]]:
    """The pods of routers with these pages, all ready unless told otherwise."""
    started = datetime.now(UTC) - timedelta(seconds=runs_s)
    runners = list[web.AppRunner]()
    pods = list[dict[str, Any]]()
    for body, is_ready in zip(bodies, [*ready] or [True] * len(bodies), strict=True):

        async def answer(_: web.Request, body: str = body) -> web.Response:
            return web.Response(text=body, status=200 if body else 503)

        app = web.Application()
        app.router.add_get("/measures", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        pods.append(router(runners[-1].addresses[0][1], is_ready, started))
    try:
        yield pods
    finally:
        for runner in runners:
            await runner.cleanup()


async def asked(bodies: list[str], ready: Iterable[bool] = (), runs_s: float = 60.0) -> set[str]:
    """Which of the pools single and large are cut off, as these routers tell."""
    async with routers(bodies, ready, runs_s) as pods:
        measures = RouterClient()
        try:
            return {*await measures.unreachable_pools(pods, {"single", "large"}, datetime.now(UTC))}
        finally:
            await measures.close()


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([report(single=1, large=0), report(single=0, large=0)], {"large"}),
        ([report(single=1, large=0), report(single=1, large=1)], set()),
        ([report(single=1, large=0), ""], set()),
        ([report(single=1, large=0), "no measures"], set()),
        ([], set()),
    ],
    ids=["none", "one reaches it", "one is mute", "one is strange", "no router"],
)
def test_a_pool_is_cut_off_when_all_ready_routers_say_so(
    bodies: list[str], expected: set[str]
) -> None:
    assert asyncio.run(asked(bodies)) == expected


@pytest.mark.parametrize(
    ("bodies", "ready", "expected"),
    [
        ([report(single=0, large=0)], [False], {"single", "large"}),
        ([report(single=1, large=0)], [False], {"large"}),
        ([report(single=1, large=0), ""], [True, False], {"large"}),
        ([report(single=1, large=0), ""], [False, True], set()),
        ([""], [False], set()),
    ],
    ids=["never had an engine", "has one", "mute beside a ready one", "ready and mute", "mute"],
)
def test_routers_that_are_not_ready_are_asked_and_need_not_answer(
    bodies: list[str], ready: list[bool], expected: set[str]
) -> None:
    """As after a restart of them all, while the only engine is silent."""
    assert asyncio.run(asked(bodies, ready)) == expected


def test_a_router_that_has_only_just_started_may_not_know_the_engines() -> None:
    assert asyncio.run(asked([report(single=0, large=0)], [False], runs_s=5)) == set()


class Quiet:
    """A cluster that takes everything."""

    async def get(self, *_: Any) -> None:
        return None

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        return obj

    async def apply(self, obj: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return obj

    async def apply_status(self, *_: Any) -> None:
        return None


class Deaf:
    """A healer that hears pool single and no longer pool large."""

    def __init__(self) -> None:
        self.cured: list[str] = []

    async def observe(self, key: ServiceKey, service: Any, observed: Observed) -> Observed:
        report = Headroom(
            ready=True,
            draining=False,
            health=1.0,
            headroom_bytes=1,
            kv_pool_bytes=1,
            kv_bytes_per_token=1,
            pressure_level=0,
        )
        health = {
            "u-single": EngineHealth(pool="single", report=report),
            "u-large": EngineHealth(pool="large", report=report, silent_s=100.0),
        }
        return dataclasses.replace(observed, engine_health=health)

    async def restart_pods(
        self, key: ServiceKey, manifest: Any, cures: Iterable[Restart], now: Any
    ) -> None:
        self.cured += [cure.pod.name for cure in cures]


def engine(pool: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": "engine", "serving.ullage.dev/pool": pool}
    return {
        "metadata": {"name": f"demo-{pool}-0", "uid": f"u-{pool}", "labels": labels},
        "spec": {},
        "status": {
            "podIP": "127.0.0.1",
            "containerStatuses": [{"name": "engine", "started": True}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def stateful_set(pool: str) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/name": "ullage",
        "app.kubernetes.io/managed-by": "ullage-operator",
        "app.kubernetes.io/instance": "demo",
        "serving.ullage.dev/pool": pool,
    }
    meta = {"name": f"demo-{pool}", "namespace": "models", "uid": f"u-demo-{pool}"}
    template = {"metadata": {}, "spec": {"containers": [], "volumes": []}}
    return {"metadata": meta | {"labels": labels}, "spec": {"replicas": 1, "template": template}}


def owner(pod: dict[str, Any]) -> dict[str, Any]:
    """The workload that made a pod."""
    pool = pod["metadata"]["labels"].get("serving.ullage.dev/pool")
    kind, name = ("StatefulSet", f"demo-{pool}") if pool else ("ReplicaSet", "demo-router-")
    return {"kind": kind, "name": name, "uid": f"u-{name}", "controller": True}


async def cured(manifest: dict[str, Any], ready: int) -> list[str]:
    """Pods that are made anew while the routers have so many ready engines of pool large."""
    key = ServiceKey("models", "demo")
    healer = Deaf()
    cluster = cast(Cluster, Quiet())
    async with routers([report(single=1, large=ready)]) as pods:
        pods += [engine("single"), engine("large")]
        for pod in pods:
            pod["metadata"]["namespace"] = "models"
            pod["metadata"]["labels"]["app.kubernetes.io/instance"] = "demo"
            pod["metadata"]["ownerReferences"] = [owner(pod)]
        sets = [stateful_set("single"), stateful_set("large")]
        given = {SERVICE: [manifest], POD: pods, kind_of("apps/v1", "StatefulSet"): sets}
        cache = Cache([Scope(kind, "") for kind in WATCHED], lambda _: None)
        for kind in WATCHED:
            relist(cache, Scope(kind, ""), given.get(kind, []), 1)
        reconciler = Reconciler(
            cluster,
            cache,
            Applier(cluster, cache, EventRecorder(cluster)),
            cast(Healer, healer),
            Autoscaler[ServiceKey](lambda _: None),
            RolloutQueue(1, lambda _: None),
            Settings(),
            ReconcileTimes(),
            "models/operator",
        )
        await reconciler.reconcile(key)
        await reconciler.close()
    return healer.cured


@pytest.mark.parametrize(("ready", "expected"), [(0, ["demo-large-0"]), (1, [])])
def test_the_only_engine_of_a_pool_is_made_anew_when_routers_do_not_hear_it_either(
    stored: Any, ready: int, expected: list[str]
) -> None:
    assert asyncio.run(cured(stored(pools={"large": {}}), ready)) == expected
