"""The program: help, mistakes, and a stop that loses no request."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from ullage_testing.ports import free_port

if TYPE_CHECKING:
    StartService = Any

CLIENTS = 8
COMMAND = [sys.executable, "-m", "ullage_router.main"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def write(tmp_path: Path, targets: list[str], http_port: int = 0) -> Path:
    host = {"host": "127.0.0.1", "port": 0}
    document = {
        "model": "tiny",
        "http": {**host, "port": http_port},
        "grpc": host,
        "metrics": host,
        "pools": [{"name": "single", "targets": targets}],
    }
    path = tmp_path / "router-under-test.yaml"
    path.write_text(json.dumps(document))
    return path


def test_help_and_version() -> None:
    helped = run("--help")
    assert helped.returncode == 0
    assert "examples:" in helped.stdout
    assert run("--version").stdout.startswith("ullage-router ")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    missing = run("--config", str(tmp_path / "none.yaml"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        occupied = run("--config", str(write(tmp_path, ["127.0.0.1:1"], port)))
    for result in (missing, occupied):
        assert result.returncode == 2
        lines = [line for line in result.stderr.splitlines() if not line.startswith("{")]
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
    assert str(port) in occupied.stderr


def test_a_stop_waits_for_answers(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                "--config",
                str(write(tmp_path, [engine.address])),
                stderr=subprocess.PIPE,
            )
            assert process.stderr
            url = f"http://127.0.0.1:{(await listening(process.stderr))['http_port']}"
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                await ready(http)
                engine.script.pause = asyncio.Event()
                body = {"prompt": "x", "stream": True}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    assert "Hello" in await anext(lines)
                    process.send_signal(signal.SIGTERM)
                    await no_longer_listening(url)
                    engine.script.pause.set()
                    rest = [line async for line in lines if line]
                    assert rest[-1] == "data: [DONE]"
            _, log = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, log.decode()
            told = [json.loads(line) for line in log.splitlines() if b'"answered"' in line]
            assert told[-1]["admission_action"] == "accept"
            assert told[-1]["route"] == "single"
            assert told[-1]["pred_kv_mb"] > 0
            assert told[-1]["request_id"]

    asyncio.run(scenario())


async def listening(stream: asyncio.StreamReader) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            line = json.loads(await stream.readline())
            if line["message"] == "listening":
                return dict(line)


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            if (await http.get("/readyz")).status_code == 200:
                return
            await asyncio.sleep(0.02)


async def no_longer_listening(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                await http.get(f"{url}/healthz")
            except httpx.TransportError:  # refused, or reset in the backlog of a closed listener
                return
            await asyncio.sleep(0.02)


async def load(http: httpx.AsyncClient, statuses: list[int], busy: asyncio.Event) -> None:
    """Asks again and again on a kept connection, until an answer says to take another."""
    while True:
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        statuses.append(answer.status_code)
        if len(statuses) >= 4 * CLIENTS:
            busy.set()
        if answer.headers.get("connection") == "close":
            return


def test_a_stop_under_load_loses_no_request(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                "--config",
                str(write(tmp_path, [service.engine.address])),
                stderr=subprocess.PIPE,
            )
            assert process.stderr
            url = f"http://127.0.0.1:{(await listening(process.stderr))['http_port']}"
            logging = asyncio.create_task(process.stderr.read())
            statuses: list[int] = []
            busy = asyncio.Event()
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                await ready(http)
                loads = [asyncio.create_task(load(http, statuses, busy)) for _ in range(CLIENTS)]
                async with asyncio.timeout(60):
                    await busy.wait()
                    assert not any(each.done() for each in loads)
                    process.send_signal(signal.SIGTERM)
                    await asyncio.gather(*loads)
                    assert await process.wait() == 0
            assert set(statuses) == {200}
            await logging

    asyncio.run(scenario())


def test_a_log_that_nobody_reads_stops_no_request(tmp_path: Path) -> None:
    """A pipe takes 64 KiB; each refused request is a line."""
    port = free_port()
    config = str(write(tmp_path, ["127.0.0.1:1"], port))
    with subprocess.Popen([*COMMAND, "--config", config], stderr=subprocess.PIPE) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as http:
            for _ in range(1000):
                with contextlib.suppress(httpx.ConnectError):
                    http.get("/healthz")
                    break
                time.sleep(0.05)
            for _ in range(400):
                assert http.post("/v1/completions", json={}).status_code == 400
        assert process.stderr
        process.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in process.stderr]
    assert sum(line["message"] == "answered" for line in lines) == 400
    assert process.returncode == 0


def test_a_router_that_leaves_is_not_ready_and_still_answers(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.until(lambda: service.router.service.is_ready)
            service.router.service.leave()
            told = await service.http.get("/readyz")
            assert (told.status_code, told.json()) == (503, {"status": "draining"})
            body = {"prompt": "x", "max_tokens": 2}
            assert (await service.http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(scenario())
