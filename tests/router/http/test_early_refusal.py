"""What is refused at a request's head, before its body: over raw sockets, on both event loops."""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import uvloop
from ullage_testing.ports import free_port

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WAIT_S = 60.0
KEY = "sk-alice-0123456789abcdef"
LARGEST = 8 << 20
FLOOD_S = 4.0
ABOVE_IDLE_BYTES = 32 << 20


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    return asyncio.run if request.param == "asyncio" else uvloop.run  # type: ignore[return-value]


@pytest.fixture
def tenants(tmp_path: Path) -> dict[str, Any]:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(KEY)
    return {"keys_dir": str(keys)}


async def head_only(service: "Service", line: str, *headers: str) -> bytes:
    """What is said to a request of which only the head is sent, until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
    writer.write("\r\n".join((f"{line} HTTP/1.1", "Host: x", *headers, "", "")).encode())
    try:
        async with asyncio.timeout(WAIT_S):
            return await reader.read()
    finally:
        writer.close()


def test_refused_at_the_head(
    start_service: "StartService", tenants: dict[str, Any], run: Callable[[Any], None]
) -> None:
    """None of these waits for a body of 8 MiB, or takes room for it."""
    large = f"Content-Length: {LARGEST}"
    chat = "POST /v1/chat/completions"
    key = f"Authorization: Bearer {KEY}"
    rogue = "Authorization: Bearer sk-rogue-0123456789abcdef"
    cases = {
        404: [("POST /nowhere", large, key), ("POST /v1/nowhere", large), ("PUT /", large)],
        401: [(chat, large), (chat, large, rogue), (chat, "Transfer-Encoding: chunked", rogue)],
        405: [("PUT /v1/chat/completions", large, key), ("POST /v1/models", large, key)],
        413: [(chat, f"Content-Length: {LARGEST + 1}", key)],
        417: [(chat, large, key, "Expect: a miracle")],
        501: [(chat, "Transfer-Encoding: gzip, chunked", key)],
    }

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            heads = [(status, head) for status, heads in cases.items() for head in heads]
            replies = await asyncio.gather(*(head_only(service, *head) for _, head in heads))
            for (status, head), reply in zip(heads, replies, strict=True):
                assert reply.startswith(b"HTTP/1.1 %d " % status), (head, reply)
                assert b"connection: close\r\n" in reply
                assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]
            answer = await service.http.post(
                "/v1/completions", json={"prompt": "Hi"}, headers={"authorization": f"Bearer {KEY}"}
            )
            assert answer.status_code == 200

    run(scenario())


def test_bodies_without_a_key_fill_no_room(
    start_service: "StartService", tenants: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            head = f"Host: x\r\nContent-Length: {LARGEST}\r\n\r\n"
            writers = []
            for i in range(60):
                path = "/v1/completions" if i % 2 else "/nowhere"
                _, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
                writer.write(f"POST {path} HTTP/1.1\r\n{head}".encode() + b"x" * (1 << 20))
                writers.append(writer)
            await asyncio.sleep(0.2)
            body = json.dumps({"prompt": "x" * 1000}).encode()
            reader, own = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            own.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\n"
                b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
                % (KEY.encode(), len(body))
                + body[:10]
            )
            await asyncio.sleep(0.1)  # so that room is taken for it
            own.write(body[10:])
            async with asyncio.timeout(WAIT_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            for writer in (*writers, own):
                writer.close()

    asyncio.run(scenario())


def test_stats_and_metrics_are_on_the_public_port_where_that_is_wanted(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        for is_public in (False, True):
            http = {"host": "127.0.0.1", "port": 0, "public_stats": is_public}
            async with start_service(http=http) as service:
                for path in ("/stats", "/metrics"):
                    status = (await service.http.get(path)).status_code
                    assert status == (200 if is_public else 404)
                    assert (await service.monitoring.get(path)).status_code == 200

    asyncio.run(scenario())


PIPELINED = {
    "requests": b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n",
    "bodies": b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,
    "upgrades": b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
}


def test_pipelines_that_nobody_reads_are_bounded(tmp_path: Path) -> None:
    """Memory of a router process under a client that sends and never reads."""
    path = tmp_path / "router.json"
    port = free_port()
    anywhere = {"host": "127.0.0.1", "port": 0}
    document = {
        "model": "tiny",
        "http": {**anywhere, "port": port},
        "grpc": anywhere,
        "metrics": anywhere,
        "pools": [{"name": "single", "targets": ["127.0.0.1:1"]}],
        "log_level": "warning",
    }
    path.write_text(json.dumps(document))
    command = [sys.executable, "-m", "ullage_router.main", "--config", str(path)]
    router = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        connect(port).close()
        process = psutil.Process(router.pid)
        assert process.rlimit(psutil.RLIMIT_NOFILE)[0] == process.rlimit(psutil.RLIMIT_NOFILE)[1]
        idle = process.memory_info().rss
        for name, data in PIPELINED.items():
            with connect(port) as client:
                flood(client, data)
                assert process.memory_info().rss - idle < ABOVE_IDLE_BYTES, name
        with connect(port) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b"alive" in b"".join(iter(lambda: client.recv(1 << 16), b""))
    finally:
        router.terminate()
        router.wait(WAIT_S)


def connect(port: int) -> socket.socket:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), WAIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def flood(client: socket.socket, data: bytes) -> None:
    client.setblocking(False)
    until = time.monotonic() + FLOOD_S
    many = data * (os.cpu_count() or 1) * 1000
    sent = 0
    while time.monotonic() < until:
        try:
            sent = (sent + client.send(many[sent:])) % len(many)
        except BlockingIOError:
            select.select([], [client], [], 0.1)
