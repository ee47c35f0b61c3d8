"""Several router processes on the same ports: shared, summed up, restarted and drained."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc as rpc
from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_common.wire.channels import open_channel
from ullage_router.http.monitoring import merged
from ullage_router.server.processes import ProcessSlot, config_of, shared_folder

if TYPE_CHECKING:
    StartService = Any

WAIT_S = 60.0


def write(tmp_path: Path, targets: list[str], **more: Any) -> Path:
    host = {"host": "127.0.0.1", "port": 0}
    document = {
        "model": "tiny",
        "processes": 2,
        "http": {**host, "public_stats": True},
        "grpc": host,
        "metrics": host,
        "pools": [{"name": "single", "targets": targets}],
        **more,
    }
    path = tmp_path / "several.yaml"
    path.write_text(json.dumps(document))
    return path


class Family:
    """A parent, its children and their log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.url = ""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr
        while line := await self.process.stderr.readline():
            if line.startswith(b"{"):
                self.log.append(json.loads(line))

    def said(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["message"] == message]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - the condition belongs to others
                await asyncio.sleep(0.02)

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            await self._reading
            return await self.process.wait()

    async def get(self, path: str) -> httpx.Response:
        """Over a connection of its own, so that any process may answer."""
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, trust_env=False) as http:
            return await http.get(path)

    async def watched_requests(self) -> dict[int, float]:
        """Requests by process, as one reader of the console's events is told of all processes."""
        counts: dict[int, float] = {}
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, trust_env=False) as http,
            http.stream("GET", "/console/events") as events,
        ):
            async for line in events.aiter_lines():
                if line.startswith('data: {"model"'):
                    state = json.loads(line[6:])
                    counts[state["process"]] = sum(each["count"] for each in state["decisions"])
                    if len(counts) == state["processes"]:
                        break
        return counts

    async def complete(self) -> int:
        """0: the process that was asked died."""
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http:
                answer = await http.post(f"{self.url}/v1/completions", json={"prompt": "x"})
                return answer.status_code
        return 0

    async def stream(
        self, stack: contextlib.AsyncExitStack, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Begins an answer over a connection of its own."""
        http = httpx.AsyncClient(timeout=WAIT_S, trust_env=False)
        await stack.enter_async_context(http)
        body = {"prompt": "x", "stream": True}
        url = f"{self.url}/v1/completions"
        request = http.stream("POST", url, json=body, headers=headers)
        return await stack.enter_async_context(request)

    async def all_ready(self, http_port: int) -> None:
        """Every process has found the engine."""
        self.url = f"http://127.0.0.1:{http_port}"
        async with asyncio.timeout(WAIT_S):
            seen: set[int] = set()
            while len(seen) < 2:
                stats = (await self.get("/stats")).json()
                if stats["ready"]:
                    seen.add(stats["process"])
                await asyncio.sleep(0.02)


def words(stream: bytes) -> str:
    """The text of a streamed completion."""
    events = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


@contextlib.asynccontextmanager
async def family(config: Path) -> AsyncIterator[Family]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ullage_router.main", "--config", str(config)),
        stderr=asyncio.subprocess.PIPE,
    )
    started = Family(process)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await started.ended()


def test_requests_are_shared_counted_and_survive_a_death(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            start_service() as service,
            family(write(tmp_path, [service.engine.address], console={"local": True})) as f,
        ):
            await f.until(lambda: len(f.said("listening")) == 2)
            first, second = f.said("listening")
            assert first["http_port"] == second["http_port"]
            assert {first["process"], second["process"]} == {0, 1}
            await f.all_ready(first["http_port"])
            for _ in range(20):
                assert await f.complete() == 200
            text = (await f.get("/metrics")).text
            name = 'ullage_router_requests_total{process="%d",code="200"} '
            counts = [
                float(line.split()[-1])
                for line in text.splitlines()
                if line.startswith((name % 0, name % 1))
            ]
            assert sum(counts) == 20
            assert await f.watched_requests() == {0: counts[0], 1: counts[1]}

            async with open_channel(f"127.0.0.1:{first['grpc_port']}") as channel:
                stub = rpc.InferenceServiceStub(channel)
                told = [
                    r async for r in stub.Generate(pb.GenerateRequest(text="x"), timeout=WAIT_S)
                ]
                assert told[-1].HasField("finished")

            victim = f.said("process started")[0]
            os.kill(victim["child_pid"], signal.SIGKILL)
            await f.until(lambda: len(f.said("process started")) == 3)
            assert f.said("a process died")[0]["child"] == victim["child"]
            await f.until(lambda: len(f.said("listening")) == 3)
            await f.all_ready(first["http_port"])
            assert await f.complete() == 200

            service.engine.script.pause = asyncio.Event()
            body = {"prompt": "x", "stream": True}
            async with (
                httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http,
                http.stream("POST", f"{f.url}/v1/completions", json=body) as answer,
            ):
                lines = answer.aiter_lines()
                assert "Hello" in await anext(lines)
                f.process.send_signal(signal.SIGTERM)
                await f.until(lambda: len(f.said("draining")) == 2)
                service.engine.script.pause.set()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
            assert await f.ended() == 0

    asyncio.run(scenario())


def test_a_tenants_limits_hold_for_all_processes_together(
    start_service: "StartService", tmp_path: Path
) -> None:
    """Whichever process gets them: three at once, no more and no fewer, also after deaths."""

    async def scenario() -> None:
        (tmp_path / "keys").mkdir()
        rules = {"name": "anonymous", "concurrency": 3, "requests_per_minute": 1000}
        tenants = {"keys_dir": str(tmp_path / "keys"), "anonymous": "allow", "tenants": [rules]}
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            config = write(tmp_path, [service.engine.address], tenants=tenants)
            async with family(config) as f:
                for num_started in (2, 4):
                    await f.until(lambda n=num_started: len(f.said("listening")) == n)
                    await f.all_ready(f.said("listening")[0]["http_port"])
                    async with contextlib.AsyncExitStack() as stack:
                        streams = [await f.stream(stack) for _ in range(4)]
                        assert [s.status_code for s in streams] == [200, 200, 200, 429]
                        limit = streams[3].headers["x-ratelimit-limit-requests"]
                        assert limit == "1000", "the whole one"
                        if num_started == 2:
                            for child in f.said("process started"):
                                os.kill(child["child_pid"], signal.SIGKILL)

    asyncio.run(scenario())


def test_a_key_has_one_answer_whichever_process_gets_it(
    start_service: "StartService", tmp_path: Path
) -> None:
    """While it is generated, when it is finished, and after all processes have died."""

    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            engine.script.pause = asyncio.Event()
            routing = {"idempotency": {"enabled": True}}
            config = write(tmp_path, [engine.address], routing=routing)
            async with family(config) as f, contextlib.AsyncExitStack() as stack:
                await f.until(lambda: len(f.said("listening")) == 2)
                await f.all_ready(f.said("listening")[0]["http_port"])
                headers = {"Idempotency-Key": "k"}
                streams = [await f.stream(stack, headers) for _ in range(8)]
                assert [stream.status_code for stream in streams] == [200] * 8
                engine.script.pause.set()
                answers = {words(await stream.aread()) for stream in streams}
                assert answers == {"Hello big world"}
                engine.script.words = ("Another",)
                assert len(engine.requests) == 1
                for child in f.said("process started"):
                    os.kill(child["child_pid"], signal.SIGKILL)
                await f.until(lambda: len(f.said("listening")) == 4)
                await f.all_ready(f.said("listening")[0]["http_port"])
                for _ in range(4):
                    again = await f.stream(stack, headers)
                    assert words(await again.aread()) == "Hello big world"
                assert len(engine.requests) == 1

    asyncio.run(scenario())


def test_children_end_with_their_parent(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            start_service() as service,
            family(write(tmp_path, [service.engine.address])) as f,
        ):
            await f.until(lambda: len(f.said("listening")) == 2)
            f.process.kill()
            await f.ended()  # their ends of the log are closed

    asyncio.run(scenario())


def test_what_a_killed_router_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with shared_folder() as running:
        (Path(running) / "answer").write_text("of a router that runs")
        left = tmp_path / "ullage-router-killed"
        left.mkdir()
        (left / "answer").write_text("of a tenant")
        with shared_folder() as own:
            names = {Path(folder).name for folder in (running, own)}
            assert {path.name for path in tmp_path.iterdir()} == names
        assert (Path(running) / "answer").exists()
    assert not list(tmp_path.iterdir())


def test_mistakes_end_the_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            http = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
            async with family(write(tmp_path, ["127.0.0.1:1"], http=http)) as f:
                assert await f.ended() == 2
        tls = {"router": {"dir": "/none"}}
        async with family(write(tmp_path, ["127.0.0.1:1"], tls=tls)) as f:
            assert await f.ended() == 2

    asyncio.run(scenario())


def test_each_process_gets_its_part(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ["127.0.0.1:1"],
        processes=4,
        routing={"queue": {"max_requests": 10, "max_bytes": 400, "max_prompt_bytes": 40}},
        tenants={"keys_dir": "/keys", "share": 0.5},
    )
    place = ProcessSlot(
        index=2, http_port=1, grpc_port=2, metrics_port=3, probes_port=4, folder=str(tmp_path)
    )
    config = config_of(read_file(path, RouterConfig), place)
    assert (config.http.port, config.grpc.port, config.metrics.port) == (1, 2, 3)
    queue = config.routing.queue
    assert (queue.max_requests, queue.max_bytes, queue.max_prompt_bytes) == (3, 100, 10)
    assert config.tenants
    assert config.tenants.share == 0.5, "quotas are shared"


def test_metrics_of_several_processes_are_one_page() -> None:
    first = (
        '# HELP a A\n# TYPE a counter\na_total{code="200"} 1.0\n# HELP b B\n# TYPE b gauge\nb 2.0\n'
    )
    second = first.replace("1.0", "3.0")
    assert merged({1: second, 0: first}) == (
        '# HELP a A\n# TYPE a counter\na_total{process="0",code="200"} 1.0\n'
        'a_total{process="1",code="200"} 3.0\n'
        '# HELP b B\n# TYPE b gauge\nb{process="0"} 2.0\nb{process="1"} 2.0\n'
    )
