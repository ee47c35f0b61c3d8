"""Engines are killed whole, server and worker, in the middle of streams: every stream ends as it
would have ended undisturbed, and says nothing twice.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_router.main import Router

if TYPE_CHECKING:
    Engine = Any

MODEL = "smollm2-135m"
PATIENCE_S = 120.0
LENGTH = 32
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


def completion(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    common = {"model": MODEL, "max_tokens": LENGTH, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return "/v1/completions", {**common, **usage, "prompt": prompt, **fields}


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    _, body = completion("", **fields)
    del body["prompt"]
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


REQUESTS = (
    completion("The harbour at dawn", temperature=0),
    completion("A letter from the mountains:", temperature=1, seed=5, top_p=0.95),
    completion("A list of towns: Paris,", temperature=0.8, seed=6, presence_penalty=1, min_p=0.02),
    completion("Once upon a time", temperature=0, stop=[", and", "\n\n"], frequency_penalty=0.5),
    completion("Rivers and their names:", temperature=0, logprobs=2),
    completion("My favourite song is", temperature=1, seed=7, n=2),
    chat(
        "Describe a person.",
        temperature=1,
        seed=8,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    ),
    chat(
        "Look up somebody.",
        temperature=0,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "look_up"}},
    ),
)


@dataclass
class Answer:
    """What a client has of one stream."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    logprob_tokens: list[str] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the answers."""

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        if chunk.get("usage"):
            self.usage = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            delta, index = choice.get("delta", {}), choice["index"]
            calls = delta.get("tool_calls") or []
            pieces = [choice.get("text"), delta.get("content")]
            pieces += [call["function"].get("arguments") for call in calls]
            self.texts[index] = self.texts.get(index, "") + "".join(p for p in pieces if p)
            if choice.get("finish_reason"):
                self.ends[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprob_tokens += choice["logprobs"]["tokens"]


class Service:
    """Two engines behind a router in this process."""

    def __init__(self, engines: list["Engine"], http: httpx.AsyncClient, router: Router) -> None:
        self.http = http
        self.router = router
        self._processes = {engine.target: engine.process for engine in engines}
        self._started: list[subprocess.Popen[bytes]] = []

    async def answer(
        self, request: tuple[str, dict[str, Any]], on_token: Callable[[], None] = lambda: None
    ) -> Answer:
        path, body = request
        answer, is_done = Answer(), False
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line[6:]))
                    on_token()
                is_done = is_done or line == "data: [DONE]"
        assert is_done
        return answer

    def kill(self, address: str) -> None:
        """SIGKILL to an engine's server and its worker."""
        server = psutil.Process(self._processes[address].pid)
        for process in [server, *server.children(recursive=True)]:
            process.kill()
        self._processes[address].wait()

    def start_again(self, address: str) -> None:
        args = self._processes[address].args
        process = subprocess.Popen(args, stderr=subprocess.DEVNULL)
        self._processes[address] = process
        self._started.append(process)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - processes have no events
                await asyncio.sleep(0.02)

    def engines(self) -> dict[str, Any]:
        return {engine.address: engine for engine in self.router.service.engines.all()}

    async def ready(self, count: int = 2) -> None:
        await self.until(lambda: sum(e.state == "ready" for e in self.engines().values()) >= count)

    def busiest(self) -> str:
        return max(self.engines().values(), key=lambda engine: engine.inflight).address

    def num_resumed(self) -> float:
        labels = {"cause": "connection", "outcome": "resumed"}
        registry = self.router.service.metrics.registry
        return registry.get_sample_value("ullage_router_resumptions_total", labels) or 0.0

    def end(self) -> None:
        for process in self._started:
            process.terminate()
            process.wait()


@contextlib.asynccontextmanager
async def service(folder: Path, engines: list["Engine"]) -> AsyncIterator[Service]:
    anywhere = {"host": "127.0.0.1", "port": 0}
    config = {
        "model": MODEL,
        **dict.fromkeys(("http", "grpc", "metrics"), anywhere),
        "pools": [{"name": "single", "targets": [engine.target for engine in engines]}],
        "limits": {"request_timeout": PATIENCE_S},
        "slo": {"ttft_p95": 600.0, "e2e_p95": 600.0},
    }
    path = folder / "router.yaml"
    path.write_text(json.dumps(config))
    router = Router(read_file(path, RouterConfig))
    await router.start()
    url = f"http://127.0.0.1:{router.http_port}"
    http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False)
    running = Service(engines, http, router)
    try:
        await running.ready()
        yield running
    finally:
        await http.aclose()
        await router.stop()
        running.end()


@pytest.fixture
def two_engines(start_engine: Callable[..., "Engine"]) -> list["Engine"]:
    sections = {
        "model": {"deterministic": True},
        "batching": {"max_sequences": 20, "prefill_chunk_tokens": 64},
    }
    return [start_engine(**sections, server={"engine_id": f"engine-{n}"}) for n in range(2)]


async def middle(service: Service, counts: list[int], least: int) -> None:
    """Waits until every stream is so far."""
    await service.until(lambda: min(counts) >= least)


def test_no_stream_is_lost_with_its_engine(two_engines: list["Engine"], tmp_path: Path) -> None:
    """One engine is killed, and then the other while the first one loads: streams go on with the
    other engine, and are held until there is one."""

    async def scenario() -> None:
        async with service(tmp_path, two_engines) as running:
            whole = await asyncio.gather(*(running.answer(request) for request in REQUESTS))
            counts = [0] * len(REQUESTS)

            def counter(number: int) -> Callable[[], None]:
                def count() -> None:
                    counts[number] += 1

                return count

            tasks = [
                asyncio.ensure_future(running.answer(request, counter(number)))
                for number, request in enumerate(REQUESTS)
            ]
            await middle(running, counts, 1)
            first = running.busiest()
            running.kill(first)
            (second,) = running.engines().keys() - {first}
            known = running.engines()[second]
            await running.until(lambda: known.inflight and not known.backlog_tokens)
            running.kill(second)
            running.start_again(first)
            answers = await asyncio.gather(*tasks)
            for request, answer, reference in zip(REQUESTS, answers, whole, strict=True):
                assert answer == reference, request
            assert running.num_resumed() >= 3

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_streams_live_through_twenty_kills(
    two_engines: list["Engine"], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with service(tmp_path, two_engines) as running:
            whole = await asyncio.gather(*(running.answer(request) for request in REQUESTS))
            is_over = asyncio.Event()
            counts, ended = [0] * len(REQUESTS), [0]

            async def keep_asking(number: int) -> None:
                for turn in itertools.count():
                    if is_over.is_set():
                        return
                    which = (number + turn) % len(REQUESTS)
                    counts[number] = 0

                    def count() -> None:
                        counts[number] += 1

                    assert await running.answer(REQUESTS[which], count) == whole[which]
                    ended[0] += 1

            async with asyncio.TaskGroup() as streams:
                for number in range(len(REQUESTS)):
                    streams.create_task(keep_asking(number))
                for _ in range(20):
                    await running.ready()
                    await middle(running, counts, 1)
                    victim = running.busiest()
                    running.kill(victim)
                    known = running.engines()[victim]
                    await running.until(lambda known=known: known.state != "ready")
                    running.start_again(victim)
                is_over.set()
            print(f"{ended[0]} answers, {running.num_resumed():.0f} resumptions")
            assert running.num_resumed() >= 20

    asyncio.run(scenario())
