"""Engines are killed whole, server and worker, or told to stop, in the middle of streams: every
stream ends as it would have ended undisturbed, and says nothing twice.
"""

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
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

    engine: str = field(default="", compare=False)
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
            delta = choice.get("delta", {})
            index = choice["index"]
            calls = delta.get("tool_calls") or []
            pieces = [choice.get("text"), delta.get("content")]
            pieces += [call["function"].get("arguments") for call in calls]
            self.texts[index] = self.texts.get(index, "") + "".join(p for p in pieces if p)
            if choice.get("finish_reason"):
                self.ends[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprob_tokens += choice["logprobs"]["tokens"]


class Service:
    """A router in this process."""

    def __init__(self, http: httpx.AsyncClient, router: Router) -> None:
        self.http = http
        self.router = router

    async def answer(
        self, request: tuple[str, dict[str, Any]], on_token: Callable[[], None] = lambda: None
    ) -> Answer:
        path, body = request
        answer = Answer()
        is_done = False
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            answer.engine = response.headers["x-ullage-engine"]
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line[6:]))
                    on_token()
                is_done = is_done or line == "data: [DONE]"
        assert is_done
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - processes have no events
                await asyncio.sleep(0.02)

    def engines(self) -> dict[str, Any]:
        return {engine.address: engine for engine in self.router.service.engines.all()}

    async def ready(self, count: int = 2) -> None:
        await self.until(lambda: sum(e.state == "ready" for e in self.engines().values()) >= count)

    def busiest(self, engines: list["Engine"]) -> "Engine":
        inflight = {address: seen.inflight for address, seen in self.engines().items()}
        return max(engines, key=lambda engine: inflight[engine.target])

    def num_resumed(self) -> float:
        labels = {"cause": "connection", "outcome": "resumed"}
        registry = self.router.service.metrics.registry
        return registry.get_sample_value("ullage_router_resumptions_total", labels) or 0.0


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
    running = Service(http, router)
    try:
        await running.ready()
        yield running
    finally:
        await http.aclose()
        await router.stop()


@pytest.fixture(scope="module")
def whole(pair: list["Engine"], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The undisturbed answers."""

    async def scenario() -> list[Answer]:
        async with service(tmp_path_factory.mktemp("router"), pair) as running:
            return await asyncio.gather(*(running.answer(request) for request in REQUESTS))

    return asyncio.run(scenario())


@pytest.fixture
def two_engines(pair: list["Engine"]) -> list["Engine"]:
    """Both, started again where an earlier test has ended them."""
    for engine in pair:
        if engine.process.poll() is not None:
            engine.start_again()
            engine.wait_serving()
    return pair


async def middle(service: Service, counts: list[int], least: int) -> None:
    """Waits until every stream is so far."""
    await service.until(lambda: min(counts) >= least)


class Streams:
    """All requests at once, and how far each answer is."""

    def __init__(self, running: Service) -> None:
        self.counts = [0] * len(REQUESTS)
        self._answers = [
            asyncio.ensure_future(running.answer(request, partial(self._count, number)))
            for number, request in enumerate(REQUESTS)
        ]

    def _count(self, number: int) -> None:
        self.counts[number] += 1

    async def end(self) -> list[Answer]:
        return await asyncio.gather(*self._answers)


def test_no_stream_is_lost_with_its_engine(
    two_engines: list["Engine"], whole: list[Answer], tmp_path: Path
) -> None:
    """One engine is killed, and then the other while the first one loads: streams go on with the
    other engine, and are held until there is one."""

    async def scenario() -> None:
        async with service(tmp_path, two_engines) as running:
            streams = Streams(running)
            await middle(running, streams.counts, 1)
            first = running.busiest(two_engines)
            first.kill()
            [second] = [engine for engine in two_engines if engine is not first]
            seen = running.engines()[second.target]
            await running.until(lambda: seen.inflight and not seen.backlog_tokens)
            second.kill()
            first.start_again()
            for request, answer, reference in zip(
                REQUESTS, await streams.end(), whole, strict=True
            ):
                assert answer == reference, request
            assert running.num_resumed() >= 3

    asyncio.run(scenario())


def test_no_stream_is_lost_when_an_engine_is_told_to_stop(
    pair: list["Engine"], engine: "Engine", whole: list[Answer], tmp_path: Path
) -> None:
    """Its streams end there as they would have ended, and the other engine takes what is new."""
    ending = next(each for each in pair if each.process.poll() is None)
    name = f"pair-{pair.index(ending)}"

    async def scenario() -> None:
        async with service(tmp_path, [ending, engine]) as running:
            streams = Streams(running)
            await running.until(lambda: all(seen.inflight for seen in running.engines().values()))
            await middle(running, streams.counts, 1)
            ending.process.send_signal(signal.SIGTERM)
            later = Streams(running)
            answers = await streams.end()
            assert {answer.engine for answer in answers} == {name, "engine-1"}
            for answer, reference in zip(answers, whole, strict=True):
                assert answer.ends.keys() == reference.ends.keys()
                assert answer.engine != name or answer == reference
            for answer in await later.end():
                assert all(answer.texts.values())
            assert await asyncio.to_thread(ending.process.wait, PATIENCE_S) == 0
            assert (await running.answer(REQUESTS[0])).engine == "engine-1"

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_streams_live_through_twenty_kills(
    two_engines: list["Engine"], whole: list[Answer], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with service(tmp_path, two_engines) as running:
            is_over = asyncio.Event()
            counts = [0] * len(REQUESTS)
            ended = [0]

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
                    victim = running.busiest(two_engines)
                    victim.kill()
                    seen = running.engines()[victim.target]
                    await running.until(lambda seen=seen: seen.state != "ready")
                    victim.start_again()
                is_over.set()
            print(f"{ended[0]} answers, {running.num_resumed():.0f} resumptions")
            assert running.num_resumed() >= 20

    asyncio.run(scenario())
