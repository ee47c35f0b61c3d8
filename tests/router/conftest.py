"""A router on free ports, in front of scriptable engines."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest
from ullage_testing.fake_engine import MODEL, TEMPLATE, FakeEngine
from ullage_testing.ports import hold, port_of

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_common.wire.channels import open_channel
from ullage_router.main import Router

NO_KV = {"kv_pool_bytes": 0, "kv_free_bytes": 0, "headroom_bytes": 0}


@dataclass
class Service:
    """A running router and its engines."""

    router: Router
    engines: list[FakeEngine]
    http: httpx.AsyncClient
    monitoring: httpx.AsyncClient
    """Of the metrics' port."""
    openai: openai.AsyncOpenAI
    grpc: inference_pb2_grpc.InferenceServiceStub
    channel: grpc.aio.Channel

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    async def chat(self, text: str = "Hi", **more: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "Hi", **more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, **more}
        return await self.http.post("/v1/completions", json=body)

    async def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self.monitoring.get("/stats")).json()
        return stats

    async def metrics(self, *names: str) -> dict[str, float]:
        """The samples of these metrics, by name and labels as Prometheus writes them."""
        text = (await self.monitoring.get("/metrics")).text
        samples = [line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"]
        return {
            series: float(value)
            for series, _, value in samples
            if series.partition("{")[0] in names
        }

    async def states(self) -> dict[str, str]:
        return {e["id"]: e["state"] for e in (await self.stats())["engines"]}

    async def become_embedding_model(self, has_kv: bool = False) -> None:
        """Makes all engines' model one for embeddings, as after a restart."""
        for engine in self.engines:
            engine.task = inference_pb2.TASK_EMBED
            engine.has_kv = has_kv
            engine.push(epoch=engine.headroom.epoch + 1, **({} if has_kv else NO_KV))
        known = self.router.service.engines
        task = inference_pb2.TASK_EMBED
        await self.until(
            lambda: all(e.description and e.description.task == task for e in known.all())
        )
        await self.until(lambda: known.model is not None and known.model.description.task == task)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Waits for something the router learns over the wire."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - the condition belongs to others
                await asyncio.sleep(0.01)

    def engine_state(self, name: str) -> str:
        return next(e.state for e in self.router.service.engines.all() if e.id == name)


def router_config(
    tmp_path: Any, pools: dict[str, list[str]], sleepy: tuple[str, ...] = (), **sections: Any
) -> RouterConfig:
    """Read from a file, as the program does."""
    document = {
        "model": MODEL,
        "http": {"host": "127.0.0.1", "port": 0},
        "grpc": {"host": "127.0.0.1", "port": 0},
        "metrics": {"host": "127.0.0.1", "port": 0},
        "pools": [
            {
                "name": name,
                "role": "large" if name == "large" else "standard",
                "targets": targets,
                "sleeps": name in sleepy,
            }
            for name, targets in pools.items()
        ],
        "streaming": {"coalesce_tokens": 1},  # so that tests see each word as the engine sent it
        **sections,
    }
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps(document))
    return read_file(path, RouterConfig)


StartService = Callable[..., contextlib.AbstractAsyncContextManager[Service]]


@pytest.fixture
def start_service(tmp_path: Any) -> Iterator[StartService]:
    """async with start_service(single=[blocks, ...], large=[blocks], routing={...}) as service.

    Engines of pools that are `sleepy` have an address and do not run yet. `prepare` changes each
    engine before it starts.
    """

    @contextlib.asynccontextmanager
    async def start(
        single: tuple[int, ...] = (100,),
        large: tuple[int, ...] = (),
        max_model_len: int = 2000,
        model: str = MODEL,
        wait: bool = True,
        template: str = TEMPLATE,
        tool_template: str = "",
        special_tokens: dict[str, str] | None = None,
        sampling_defaults: inference_pb2.SamplingParams | None = None,
        credentials: grpc.ServerCredentials | None = None,
        sleepy: tuple[str, ...] = (),
        prepare: Callable[[FakeEngine], None] = lambda engine: None,
        **sections: Any,
    ) -> AsyncIterator[Service]:
        async with contextlib.AsyncExitStack() as stack:
            engines = []
            pools = {}
            for pool, sizes in (("single", single), ("large", large)):
                for i, blocks in enumerate(sizes):
                    engine = FakeEngine(f"{pool}-{i}", pool, blocks, max_model_len)
                    engine.headroom.model = model
                    engine.template = template
                    engine.tool_template = tool_template
                    engine.special_tokens = special_tokens or {}
                    if sampling_defaults:
                        engine.sampling_defaults = sampling_defaults
                    engine.credentials = credentials
                    prepare(engine)
                    held = stack.enter_context(hold())  # it may start there once more
                    await engine.start(port_of(held))
                    stack.push_async_callback(engine.stop)
                    if pool in sleepy:
                        await engine.stop()
                    engines.append(engine)
                    pools.setdefault(pool, []).append(engine.address)
            pools = sections.pop("pools", pools)
            router = Router(router_config(tmp_path, pools, sleepy, model=model, **sections))
            await router.start()
            stack.push_async_callback(router.stop)
            yield await _connect(stack, router, engines, wait)

    return start


def new_client(url: str) -> httpx.AsyncClient:
    """Without TLS, whose certificates would be read from the disk for every client."""
    return httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False)


async def _connect(
    stack: contextlib.AsyncExitStack, router: Router, engines: list[FakeEngine], wait: bool
) -> Service:
    url = f"http://127.0.0.1:{router.http_port}"
    http = await stack.enter_async_context(new_client(url))
    monitoring = await stack.enter_async_context(
        new_client(f"http://127.0.0.1:{router.metrics_port}")
    )
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0
    )
    channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{router.grpc_port}"))
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    service = Service(router, engines, http, monitoring, client, stub, channel)
    if wait:
        roster = router.service.engines
        await service.until(
            lambda: (
                len(roster.all()) == len(engines)
                and all(engine.state == "ready" for engine in roster.all())
            )
        )
    return service
