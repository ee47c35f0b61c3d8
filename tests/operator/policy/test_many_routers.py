"""More routers at once than an HTTP client has connections by default."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from ullage_common.wire.load_report import PoolReport
from ullage_operator.api.parsing import parse
from ullage_operator.controller import autoscaler, router_client
from ullage_operator.controller.autoscaler import Autoscaler, ScaledService
from ullage_operator.controller.router_client import RouterClient
from ullage_operator.kube.cache import ServiceKey

SERVICES = 60
ROUTERS = 2
COUNT = SERVICES * ROUTERS
ASLEEP = dict.fromkeys(PoolReport.__struct_fields__, 0)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are late on a busy machine are not taken for failures."""
    for module, name in (
        (router_client, "CONNECT_S"),
        (router_client, "TIMEOUT_S"),
        (autoscaler, "TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, 60.0)


class Routers:
    """All of them on one port. Each holds a long question until its service is wanted."""

    def __init__(self) -> None:
        self.held = 0
        self.port = 0
        self.wanted = {f"s{number}": asyncio.Event() for number in range(SERVICES)}
        self.all_ask = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "Routers":
        app = web.Application()
        app.router.add_get("/{service}/{router}/measures", self._measures)
        app.router.add_get("/{service}/{router}/measures/wait", self._wait)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2 * COUNT).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner
        for event in (self.all_ask, *self.wanted.values()):
            event.set()
        await self._runner.cleanup()

    def urls(self, service: str) -> tuple[str, ...]:
        base = f"http://127.0.0.1:{self.port}/{service}"
        return tuple(f"{base}/{number}" for number in range(ROUTERS))

    async def _measures(self, request: web.Request) -> web.Response:
        is_wanted = self.wanted[request.match_info["service"]].is_set()
        told = PoolReport(**(ASLEEP | {"wanted": int(is_wanted)}))
        return web.Response(body=msgspec.json.encode([{"single": told}]))

    async def _wait(self, request: web.Request) -> web.Response:
        self._count()
        try:
            await self.wanted[request.match_info["service"]].wait()
        finally:
            self.held -= 1
        return await self._measures(request)

    async def _metrics(self, _: web.Request) -> web.Response:
        self._count()
        await self.all_ask.wait()
        line = 'ullage_router_trial{trial="r/0",side="canary",what="failed",le=""} 1\n'
        return web.Response(text=line)

    def _count(self) -> None:
        self.held += 1
        if self.held == COUNT:
            self.all_ask.set()


def test_every_router_of_sleeping_services_can_be_asked_at_once(manifest: Callable[..., Any]):
    scaling = {"maxReplicas": 2, "minReplicas": 0, "idleAfter": "1s"}
    pools = {"single": {"replicas": 0, "autoscaling": scaling}}
    autoscaling = parse(manifest(pools=pools)).spec.pools["single"].autoscaling
    assert autoscaling is not None
    policies = {"single": autoscaling}

    async def sizes_once_wanted() -> dict[str, int]:
        async with Routers() as routers:
            woken = asyncio.Event()
            scaler: Autoscaler[str] = Autoscaler(
                lambda key: woken.set() if key == "s59" else None, 0.05
            )

            def follow(key: str) -> dict[str, int]:
                decided = scaler.follow(
                    key, ScaledService(policies, routers.urls(key)), {"single": 0}
                )
                assert not decided.problem
                return {pool: each.replicas for pool, each in decided.pools.items()}

            try:
                for key in routers.wanted:
                    follow(key)
                await asyncio.wait_for(routers.all_ask.wait(), 30)
                assert {*map(str, map(follow, routers.wanted))} == {"{'single': 0}"}
                woken.clear()
                routers.wanted["s59"].set()
                await asyncio.wait_for(woken.wait(), 30)
                return follow("s59")
            finally:
                await scaler.close()

    assert asyncio.run(sizes_once_wanted()) == {"single": 1}


def test_every_router_that_runs_is_asked_what_it_counts_of_a_canary():
    async def told() -> int:
        async with Routers() as routers:
            measures = RouterClient()
            ports = [{"name": "metrics", "containerPort": routers.port}]
            pod = {
                "metadata": {"labels": {"app.kubernetes.io/component": "router"}},
                "spec": {"containers": [{"ports": ports}]},
                "status": {"phase": "Running", "podIP": "127.0.0.1"},
            }
            evicted = pod | {"status": {"phase": "Failed", "podIP": "127.0.0.1"}}
            pods = [pod] * COUNT + [evicted]
            try:
                answers = await measures.canary_samples(ServiceKey("models", "s"), pods)
                return len(answers.samples)
            finally:
                await measures.close()

    assert asyncio.run(told()) == COUNT
