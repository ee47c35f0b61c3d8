"""Runs one router as a process."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import psutil

START_S = 60.0
TTFT_S = 7.0
E2E_S = 20.0
OBJECTIVES = MappingProxyType({"ttft_p95": TTFT_S, "e2e_p95": E2E_S})


@contextlib.asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process until the block ends."""
    with log.open("wb") as errors:
        started = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            await started.wait()


async def start_router(
    stack: contextlib.AsyncExitStack,
    model: str,
    addresses: list[str],
    to: Path,
    slo: Mapping[str, float] = OBJECTIVES,
    **sections: Mapping[str, Any],
) -> tuple[str, psutil.Process]:
    """Start a router, and return the router's URL and process.

    `sections` are further sections of the router's configuration.
    """
    anywhere = {"host": "127.0.0.1", "port": 0}
    config: dict[str, Any] = {
        "model": model,
        "http": {**anywhere, "public_stats": True},
        "grpc": anywhere,
        "metrics": anywhere,
        "pools": [{"name": "single", "targets": addresses}],
        "slo": dict(slo),
        **sections,
    }

    path = to / "router.yaml"
    log = to / "router.log"
    path.write_text(json.dumps(config))
    command = (sys.executable, "-m", "ullage_router.main", "--config", str(path))

    router = await stack.enter_async_context(process(*command, log=log))
    port = (await listening(log))["http_port"]
    return f"http://127.0.0.1:{port}", psutil.Process(router.pid)


async def listening(log: Path) -> dict[str, Any]:
    """Wait until a router's log names the listening ports, and return them."""
    async with asyncio.timeout(START_S):
        while True:
            if line := first_line(log, '"listening"'):
                return dict(json.loads(line))
            await asyncio.sleep(0.05)


def first_line(log: Path, word: str) -> str:
    """Return the first log line that contains the word (empty if there is no such line yet)."""
    return next((line for line in log.read_text().splitlines() if word in line), "")


async def ready(session: aiohttp.ClientSession, url: str, engines: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(f"{url}/stats") as response:
                states = (await response.json())["engines"]
            if [engine["state"] for engine in states] == ["ready"] * engines:
                return
            await asyncio.sleep(0.05)
