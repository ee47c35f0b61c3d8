"""`ullage top` against a real router: frames, also across restarts, kubectl, and its errors."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ullage_cli.main import main
from ullage_common.process.addresses import listen
from ullage_common.process.api_keys import entry, new_key
from ullage_router.http.monitoring import Pages
from ullage_router.http.server import HTTPServer

if TYPE_CHECKING:
    StartService = Any

QUICK = ["--interval", "0.1"]
WAIT_S = 60.0


async def top(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["top", *QUICK, *arguments])


async def test_one_frame_of_either_port(
    start_service: "StartService", capsys: pytest.CaptureFixture[str]
) -> None:
    routing = {"queue": {"max_requests": 1, "timeout": 0.1}}
    http = {"host": "127.0.0.1", "port": 0, "public_stats": True}
    async with start_service(http=http, routing=routing) as service:
        await service.chat()
        service.engine.push(headroom_bytes=500, pressure_level=1)
        (engine,) = service.router.service.engines.all()
        await service.until(lambda: engine.headroom.headroom_bytes == 500)
        assert (await service.chat()).status_code == 429
        for port in (service.router.http_port, service.router.metrics_port):
            url = f"http://127.0.0.1:{port}"
            assert await top("--url", url, "--once") == 0
            text = capsys.readouterr().out
            for words in ("tiny", "single-0", "500 B", "QUEUE_TIMEOUT", "FITS", "429 retry"):
                assert words in text, words
            assert await top("--url", f"{url}/", "--once", "-o", "json") == 0
            frame = json.loads(capsys.readouterr().out)
            assert frame["engines"][0]["pressure_level"] == 1
            assert frame["latest"][0]["available_bytes"] == 500
            assert {(row["action"], row["total"]) for row in frame["decisions"]} == {
                ("accept", 1),
                ("reject", 1),
            }


async def test_it_goes_on_when_the_router_comes_back_and_ends_by_ctrl_c(
    start_service: "StartService",
) -> None:
    async with start_service() as service:
        stats = (await service.monitoring.get("/stats")).content
        text = (await service.monitoring.get("/metrics")).content

    async def metrics() -> tuple[str, bytes]:
        return "text/plain", text

    async def serve(port: int) -> tuple[HTTPServer, int]:
        server = HTTPServer(Pages({"/metrics": metrics}, lambda _: stats))
        listener = None
        listener = listen("127.0.0.1", port)
        await server.start(listener)
        return server, listener.getsockname()[1]

    server, port = await serve(0)
    url = f"http://127.0.0.1:{port}"
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "ullage_cli.main", "top", "--url", url, *QUICK]
    process = await asyncio.create_subprocess_exec(
        *command, "-o", "json", stdout=pipe, stderr=pipe, limit=1 << 20
    )
    assert process.stdout
    assert process.stderr
    async with asyncio.timeout(WAIT_S):
        assert json.loads(await process.stdout.readline())["model"] == "tiny"
        await server.stop(1.0)
        assert (await process.stderr.readline()).startswith(f"error: {url}/stats: ".encode())
        server, _ = await serve(port)
        while json.loads(await process.stdout.readline())["engines"][0]["id"] != "single-0":
            pass
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in said
    await server.stop(1.0)


async def test_a_service_in_a_cluster_is_reached_through_kubectl(
    start_service: "StartService",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubectl = tmp_path / "kubectl"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with start_service() as service:
        port = service.router.metrics_port
        kubectl.write_text(
            f'#!/bin/sh\necho "$$ $@" > {tmp_path}/called\n'
            f'echo "Forwarding from 127.0.0.1:{port} -> 9090"\nexec sleep 600\n'
        )
        kubectl.chmod(0o755)
        assert await top("--namespace", "prod", "--service", "chat", "--once") == 0
        assert "single-0" in capsys.readouterr().out
    pid, *arguments = (tmp_path / "called").read_text().split()
    assert arguments == ["--namespace", "prod", "port-forward", "deployment/chat-router", ":9090"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)

    kubectl.write_text('#!/bin/sh\necho "error: no such deployment" >&2\nexit 1\n')
    assert await top("--service", "chat", "--once") == 2
    assert "no such deployment" in capsys.readouterr().err


async def test_errors_name_the_remedy(
    start_service: "StartService",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = new_key()
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(entry(key))
    tenants = {"keys_dir": str(keys), "protect_stats": True, "anonymous": "allow"}
    async with start_service(tenants=tenants) as service:
        port = service.router.metrics_port
        other = service.router.http_port
        url = f"http://127.0.0.1:{port}"
        for arguments, remedy in (
            (["--url", url], "--api-key or ULLAGE_API_KEY"),
            (["--url", f"http://127.0.0.1:{other}"], "the metrics port (9090)"),
            (["--url", "http://127.0.0.1:1"], "ullage up -f examples/smollm2.yaml"),
            (["--url", "localhost"], "--url or --service"),
            (["--url", url, "--service", "x"], "give only one of them"),
        ):
            assert await top(*arguments, "--once") == 2
            assert remedy in capsys.readouterr().err
        monkeypatch.setenv("ULLAGE_API_KEY", key)
        assert await top("--url", url, "--once") == 0
