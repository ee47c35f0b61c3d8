"""A router that is told no address serves IPv4 and IPv6, and uses engines of either."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ullage_testing.fake_engine import FakeEngine
from ullage_testing.ports import free_port

from ullage_common.process.addresses import joined
from ullage_common.wire.channels import open_channel

WAIT_S = 60.0
LOOPBACKS = ("127.0.0.1", "::1")
PORTS = ("http", "grpc", "metrics", "probes")


async def until(ask: Callable[[], Awaitable[bool]], what: str) -> None:
    """Ask until it is so; the router may still be starting."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError, grpc.aio.AioRpcError):
            if await ask():
                return
        await asyncio.sleep(0.05)
    pytest.fail(f"there are no {what}")


async def check(address: str, ports: dict[str, int]) -> None:
    at = {name: joined(address, port) for name, port in ports.items()}
    request = health_pb2.HealthCheckRequest(service="readiness")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}

    async def is_served(name: str) -> bool:
        async with open_channel(at[name]) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as client:

        async def has_metrics() -> bool:
            return (await client.get(f"http://{at['metrics']}/metrics")).status_code == 200

        async def completes() -> bool:
            answer = await client.post(f"http://{at['http']}/v1/completions", json=body)
            return answer.status_code == 200

        await until(completes, f"requests at {at['http']}")
        await until(has_metrics, f"metrics at {at['metrics']}")
        for name in ("grpc", "probes"):
            await until(partial(is_served, name), f"health at {at[name]}")


@pytest.mark.parametrize("engine_host", LOOPBACKS)
def test_both_families_are_served(tmp_path: Path, engine_host: str) -> None:
    async def scenario() -> None:
        engine = FakeEngine("single-0", "single", 100, 2000)
        engine.host = engine_host
        await engine.start()
        ports = {name: free_port() for name in PORTS}
        document: dict[str, Any] = {name: {"port": port} for name, port in ports.items()} | {
            "model": "tiny",
            "pools": [{"name": "single", "targets": [engine.address]}],
        }
        config = tmp_path / "router.yaml"
        config.write_text(json.dumps(document))
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ullage_router.main", "--config", str(config)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            for address in LOOPBACKS:
                await check(address, ports)
        finally:
            router.terminate()
            await router.wait()
            await engine.stop()

    asyncio.run(scenario())
