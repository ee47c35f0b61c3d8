"""An OpenAI server that can be told to misbehave in every way that `ullage verify` looks for."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CONTEXT = 600
TOKEN_S = 0.001


LARGE_TOKENS = 300
"""The threshold of the large pool that the server reports."""
KV_TOKEN_BYTES = 10


@dataclass
class Behaviour:
    """How the server answers. The defaults are those of a good server."""

    max_running: int = 10
    """Requests beyond this number are refused."""
    retry_after: str = "spread"
    """The header of refusals: empty for none, "spread" for one place after the other."""
    refusal: int = 429
    is_forgetful: bool = False
    """Whether greedy answers differ from run to run."""
    changes_words_after: int = -1
    """Requests after which the server's words are other ones."""
    drops_streams: bool = False
    """Whether streams end without a finish reason."""
    lies_about_usage: bool = False
    fails_long_prompts_with: int = 0
    """Status for prompts above a third of the context."""
    accepts_everything: bool = False
    """Whether prompts that never fit are answered."""
    dies_of_logprobs: bool = False
    keeps_vanished: bool = False
    """Whether requests of vanished clients are counted as running forever."""
    ttft_objective_s: float = 60.0
    """Objective for the time to the first token that /stats reports, in seconds."""
    e2e_objective_s: float = 120.0
    """Objective for the whole answer that /stats reports, in seconds."""
    leaked_bytes: int = 0
    """Free memory, of 1,000 bytes, that each request costs for good."""
    kv_tokens: int = 0
    """Size of the KV cache that /stats reports, or 0 for none."""
    dies_of_full_kv: bool = False
    """Whether requests that together exceed the KV cache end the streams of all clients."""
    more_metrics: tuple[str, ...] = ()
    """Further lines of /metrics."""
    large_route: str = "tp2pp2"
    has_large_pool: bool = True
    large_tokens: int = LARGE_TOKENS
    traces: str = "all"
    """The requests whose trace /stats names: "all", "none", or "some" (every second one)."""
    serves_stats: bool = True
    hides_pages: bool = False
    """Whether only the port for monitoring has /stats and /metrics."""
    states_context: bool = True
    tires_of_long_prompts: bool = False
    """Whether every token takes forty times as long after a prompt of half the context."""
    preemption_metric: str = "vllm:num_preemptions_total"
    """Name of the counter of preemptions in /metrics, or empty for none."""
    preempts_long_prompts: bool = False
    """Whether every prompt above a third of the context preempts another."""
    forgets_preemptions: bool = False
    """Whether the counter of preemptions falls with every request."""
    swaps: bool = False
    """Whether every preemption is counted as one by swapping, too."""
    grows_bytes: int = 0
    """Growth of the reported resident memory with every request."""
    has_worker: bool = False
    """Whether /metrics has the memory of an engine and of its worker, as engines of Ullage do."""
    worker_grows_bytes: int = 0
    """Growth of the worker's memory with every request."""
    has_other_plain_text: bool = False
    """Whether an answer that is not streamed has other words than a streamed one."""
    is_mute: bool = False
    """Whether answers have no text."""
    adapters: tuple[str, ...] = ()
    key: str = ""
    """API key that requests need, or empty for none."""
    health: str = "true"
    """What /health is: "true", "always 200", or "absent"."""
    names_engines: tuple[str, ...] = ()
    """Engines that take turns in answering, named as Ullage names them."""
    degrades: bool = False
    """Whether answers have other words, and are said to be degraded as Ullage says it."""
    ignores_departures: bool = False
    """Whether answers are computed to their end for clients that are gone."""


@dataclass
class FakeServer:
    """The server's state."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    url: str = ""
    monitoring_url: str = ""
    """URL of a second port."""
    running: int = 0
    running_tokens: int = 0
    """Tokens of the running requests' prompts and answers."""
    requests: int = 0
    refusals: int = 0
    lost: int = 0
    preemptions: int = 0
    is_dead: bool = False
    is_tired: bool = False
    is_hurt: bool = False
    """Whether every stream breaks off, as after the death of a worker."""
    latest: list[dict[str, Any]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def receives(self, count: int) -> None:
        """Wait until `count` requests have arrived."""
        while self.requests < count:
            self.arrived.clear()
            await self.arrived.wait()

    def die(self) -> None:
        self.is_dead = True

    async def models(self, request: web.Request) -> web.Response:
        if self.behaviour.key and self.behaviour.key not in request.headers.get(
            "authorization", ""
        ):
            return web.Response(status=401)
        size = {"max_model_len": CONTEXT} if self.behaviour.states_context else {}
        cards: list[dict[str, Any]] = [{"id": "fake", **size}]
        cards += [{"id": name, "parent": "fake"} for name in self.behaviour.adapters]
        return web.json_response({"data": cards})

    def _hides(self, request: web.Request) -> bool:
        assert request.transport
        _, port, *_ = request.transport.get_extra_info("sockname")
        return self.behaviour.hides_pages and self.url.endswith(f":{port}")

    async def stats(self, request: web.Request) -> web.Response:
        if not self.behaviour.serves_stats or self._hides(request):
            return web.Response(status=404)
        lost = self.behaviour.leaked_bytes * self.requests
        engine = {
            "id": "chat-single-0",
            "state": "ready",
            "pool": "single",
            "route": "single",
            "headroom_bytes": 1000 - lost,
            "total_bytes": 2000,
            "ledger": [{"allocated_bytes": 1000}, {"allocated_bytes": lost}],
            "requests_running": self.running + self.lost,
        }
        if total := self.behaviour.kv_tokens:
            engine["kv_pool_bytes"] = total * KV_TOKEN_BYTES
            engine["headroom_bytes"] = max(0, total - self.running_tokens) * KV_TOKEN_BYTES
        engines = [engine]
        if self.behaviour.has_large_pool:
            large = {"id": "chat-large-0", "pool": "large", "route": "tp2pp2"}
            engines.append(engine | large | {"requests_running": 0})
        objectives = {
            "ttft_p95_s": self.behaviour.ttft_objective_s,
            "e2e_p95_s": self.behaviour.e2e_objective_s,
        }
        return web.json_response(
            {
                "engines": engines,
                "objectives": objectives,
                "large_requests": {"prompt_tokens": LARGE_TOKENS},
                "latest": self.latest[::-1],
            }
        )

    async def health(self, _: web.Request) -> web.Response:
        if self.behaviour.health == "absent":
            return web.Response(status=404)
        is_sick = self.is_dead and self.behaviour.health == "true"
        return web.Response(status=503 if is_sick else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        if self._hides(request):
            return web.Response(status=404)
        size = (100 << 20) + self.behaviour.grows_bytes * self.requests
        lines = [f"process_resident_memory_bytes {size}"]
        if name := self.behaviour.preemption_metric:
            lost = self.requests if self.behaviour.forgets_preemptions else 0
            lines.append(f'{name}{{engine="0"}} {1000 + self.preemptions - lost}')
        if self.behaviour.swaps:
            lines.append(f"ullage_swaps_total {self.preemptions}")
        if self.behaviour.has_worker:
            worker = (100 << 20) + self.behaviour.worker_grows_bytes * self.requests
            lines.append("ullage_server_resident_bytes 1000")
            lines.append(f"ullage_worker_resident_bytes {worker}")
        lines += self.behaviour.more_metrics
        return web.Response(text="\n".join(["# TYPE x gauge", *lines, ""]))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.behaviour.dies_of_logprobs and "prompt_logprobs" in body:
            self.die()
        return await self._answer(request, body, body["prompt"])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        parts = [message["content"] for message in body["messages"]]
        if any(isinstance(part, list) for part in parts):
            return web.Response(status=400, text="no images")
        return await self._answer(request, body, " ".join(parts))

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str
    ) -> web.StreamResponse:
        behaviour = self.behaviour
        if self.is_dead:
            assert request.transport
            request.transport.abort()
            return web.Response()

        size = len(prompt.split()) + 4
        self.requests += 1
        self.arrived.set()
        if behaviour.tires_of_long_prompts and size > CONTEXT // 2:
            self.is_tired = True
        if behaviour.preempts_long_prompts and size > CONTEXT // 3:
            self.preemptions += 1
        if size > CONTEXT and not behaviour.accepts_everything:
            return web.Response(status=400, text="too long")
        if behaviour.fails_long_prompts_with and size > CONTEXT // 3:
            return web.Response(status=behaviour.fails_long_prompts_with, text="out of memory")
        if self.running >= behaviour.max_running:
            self.refusals += 1
            retry_after = behaviour.retry_after
            if retry_after == "spread":
                retry_after = str(1 + self.refusals // max(1, behaviour.max_running))
            headers = {"retry-after": retry_after} if retry_after else {}
            return web.Response(status=behaviour.refusal, headers=headers)

        self.running += 1
        tokens = size + body["max_tokens"]
        self.running_tokens += tokens
        if behaviour.dies_of_full_kv and self.running_tokens > behaviour.kv_tokens:
            self.is_hurt = True
        try:
            return await self._tell(request, body, prompt, size)
        except (ConnectionError, asyncio.CancelledError):
            self.lost += behaviour.keeps_vanished or behaviour.ignores_departures
            if behaviour.ignores_departures:
                rest_s = body["max_tokens"] * TOKEN_S
                asyncio.get_running_loop().call_later(rest_s, self._finish_lost)
            raise
        finally:
            self.running -= 1
            self.running_tokens -= tokens

    def _trace_id(self, request: web.Request) -> str:
        traces = self.behaviour.traces
        is_traced = traces == "all" or (traces == "some" and self.requests % 2 == 0)
        parent = request.headers.get("traceparent", "")
        return parent.split("-")[1] if parent and is_traced else ""

    def _finish_lost(self) -> None:
        self.lost -= 1

    async def _tell(
        self, request: web.Request, body: dict[str, Any], prompt: str, size: int
    ) -> web.StreamResponse:
        behaviour = self.behaviour
        salt = str(self.requests) if behaviour.is_forgetful else ""
        if 0 <= behaviour.changes_words_after < self.requests:
            salt = "other words"
        if behaviour.degrades:
            salt = "degraded"
        if behaviour.has_other_plain_text and not body.get("stream"):
            salt = "plain"
        name = hashlib.sha256((salt + prompt).encode()).hexdigest()[:6]
        count = body["max_tokens"]
        words = [] if behaviour.is_mute else [f"{name}-{number} " for number in range(count)]
        usage = {
            "prompt_tokens": size,
            "completion_tokens": count - behaviour.lies_about_usage,
        }
        is_large = size >= behaviour.large_tokens and behaviour.has_large_pool
        record = {
            "prompt_tokens": size,
            "output_tokens": count,
            "trace_id": self._trace_id(request),
            "route": behaviour.large_route if is_large else "single",
            "action": "accept",
            "status": 200,
            "predicted_bytes": KV_TOKEN_BYTES * (size + count),
            "timeline": [{"event": "decided"}],
        }
        headers = {"x-ullage-degraded": "top_p=0.9"} if behaviour.degrades else {}
        if not body.get("stream"):
            self.latest.append(record)
            choice = {
                "message": {"content": "".join(words)},
                "text": "".join(words),
                "finish_reason": "length",
            }
            return web.json_response({"choices": [choice], "usage": usage}, headers=headers)

        headers["content-type"] = "text/event-stream"
        if names := behaviour.names_engines:
            headers["x-ullage-engine"] = names[self.requests % len(names)]
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for word in words:
            if self.is_dead or self.is_hurt:
                assert request.transport
                request.transport.abort()
                return response
            await response.write(_event({"choices": [{"delta": {"content": word}}]}))
            await asyncio.sleep(40 * TOKEN_S if self.is_tired else TOKEN_S)
        if not behaviour.drops_streams:
            end = {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": usage}
            await response.write(_event(end) + b"data: [DONE]\n\n")
        self.latest.append(record)
        return response


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def _listen(runner: web.AppRunner) -> str:
    """Serve an application on a free port, and return its URL."""
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    return f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[FakeServer]:
    server = FakeServer(behaviour)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/stats", server.stats)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/health", server.health)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    server.url, server.monitoring_url = [await _listen(runner) for _ in range(2)]
    try:
        yield server
    finally:
        await runner.cleanup()
