"""An error spike of the only engine of a pool: early refusals, then normal service."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_router.main import Router

if TYPE_CHECKING:
    Engine = Any

MODEL = "smollm2-135m"
PATIENCE_S = 120.0
QUEUE_S = 60.0
"""Time for which the queue would keep a request."""
EARLY_S = 20.0
"""Time within which a refusal is early, on a machine that is busy, too."""
NUM_CLIENTS = 8
NUM_OOMS = 10
PROMPT = "The harbour keeps a ledger of every ship, its cargo and its debts. " * 20
"""Prompt that takes a while, so that clients find the engine at its limit."""


class Service:
    """A router in this process, in front of one engine."""

    def __init__(self, router: Router, http: httpx.AsyncClient, monitoring: httpx.AsyncClient):
        self._router = router
        self._http = http
        self._monitoring = monitoring

    @property
    def engine(self) -> Any:
        (engine,) = self._router.service.engines.all()
        return engine

    async def ask(self, number: int = 0) -> tuple[httpx.Response, float]:
        """Return the response to a prompt of its own, and the seconds that it took."""
        body = {"model": MODEL, "prompt": f"{number}. {PROMPT}", "max_tokens": 4, "temperature": 0}
        began = time.monotonic()
        response = await self._http.post("/v1/completions", json=body)
        return response, time.monotonic() - began

    async def burst(self, first: int) -> list[tuple[httpx.Response, float]]:
        numbers = range(first, first + NUM_CLIENTS)
        return await asyncio.gather(*(self.ask(number) for number in numbers))

    async def breaker(self) -> dict[str, Any]:
        (engine,) = (await self._monitoring.get("/stats")).json()["engines"]
        return dict(engine["breaker"])

    async def limit_metric(self) -> float:
        text = (await self._monitoring.get("/metrics")).text
        name = 'ullage_router_breaker_limit{pool="single"} '
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.removeprefix(name))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - processes have no events
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def service(folder: Path, engine: "Engine", **breaker: Any) -> AsyncIterator[Service]:
    anywhere = {"host": "127.0.0.1", "port": 0}
    config = {
        "model": MODEL,
        **dict.fromkeys(("http", "grpc", "metrics"), anywhere),
        "pools": [{"name": "single", "targets": [engine.target]}],
        "limits": {"request_timeout": PATIENCE_S},
        "slo": {"ttft_p95": 600.0, "e2e_p95": 600.0},
        "routing": {"placement": {"breaker": breaker}, "queue": {"timeout": QUEUE_S}},
    }
    path = folder / "router.yaml"
    path.write_text(json.dumps(config))
    router = Router(read_file(path, RouterConfig))
    await router.start()
    async with (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{router.http_port}", timeout=PATIENCE_S, trust_env=False
        ) as http,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{router.metrics_port}", trust_env=False
        ) as monitoring,
    ):
        running = Service(router, http, monitoring)
        try:
            await running.until(lambda: bool(running.engine.state == "ready"))
            yield running
        finally:
            await router.stop()


@pytest.fixture(scope="module")
def lone(start_engine: Callable[..., "Engine"]) -> "Engine":
    return start_engine(batching={"max_sequences": 8, "prefill_chunk_tokens": 64})


def inject_ooms(engine: "Engine", count: int) -> None:
    with grpc.insecure_channel(engine.target) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        for number in range(count):
            fault = admin_pb2.InjectFaultRequest(
                kind=admin_pb2.FAULT_KIND_OOM, after_steps=1 + 3 * number
            )
            assert admin.InjectFault(fault).worker_pid == engine.worker_pid


def test_steps_out_of_memory_are_no_error_spike(lone: "Engine", tmp_path: Path) -> None:
    """The engine repeats the steps, so that clients see no failure and no breaker opens."""

    async def scenario() -> None:
        async with service(tmp_path, lone, failures=1) as running:
            await asyncio.to_thread(inject_ooms, lone, NUM_OOMS)
            answers = await running.burst(0)
            assert {answer.status_code for answer, _ in answers} == {200}
            breaker = await running.breaker()
            assert (breaker["openings"], breaker["limit"]) == (0, None)
            assert await running.limit_metric() == 0

    asyncio.run(scenario())


def test_an_error_spike_is_followed_by_early_refusals_and_then_normal_service(
    lone: "Engine", tmp_path: Path
) -> None:
    async def scenario() -> None:
        # The pause lasts longer than the queue would keep a request.
        pause_s = 4 * QUEUE_S
        async with service(tmp_path, lone, failures=1, pause=pause_s, max_pause=pause_s) as running:
            assert (await running.ask())[0].status_code == 200

            # The engine's server dies under a request, whose client leaves.
            lost = asyncio.create_task(running.ask(1))
            await running.until(lambda: bool(running.engine.inflight))
            lone.kill()
            await running.until(lambda: bool(running.engine.breaker.openings))
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            lone.start_again()
            await running.until(lambda: bool(running.engine.state == "ready"))
            breaker = await running.breaker()
            assert (breaker["state"], breaker["limit"], breaker["trials"]) == ("open", 1, 0)
            assert await running.limit_metric() == 1

            # One request tries the engine, though a step of it runs out of memory.
            await asyncio.to_thread(inject_ooms, lone, 1)
            answers = await running.burst(100)
            served = [answer for answer, _ in answers if answer.status_code == 200]
            refused = [each for each in answers if each[0].status_code != 200]
            assert served
            assert refused
            for answer, took_s in refused:
                assert answer.status_code == 429, answer.text
                assert answer.json()["error"]["code"] == "BREAKER_LIMIT"
                assert int(answer.headers["retry-after"]) >= 1
                assert took_s < EARLY_S

            # As answers succeed, the limit grows until it ends.
            for number in range(8):
                answers = await running.burst(200 + 100 * number)
                if (await running.breaker())["limit"] is None:
                    break
            assert await running.limit_metric() == 0
            answers = await running.burst(2000)
            assert {answer.status_code for answer, _ in answers} == {200}

    asyncio.run(scenario())
