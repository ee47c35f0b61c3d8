"""An engine that is told to stop amid streams: none is lost, and the others take what is new."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    Engine = Any

LONG_S = 120


@contextlib.asynccontextmanager
async def routed(tmp_path: Path, engines: list["Engine"]) -> AsyncIterator[httpx.AsyncClient]:
    """A router process in front of engines."""
    host = {"host": "127.0.0.1", "port": 0}
    document = {
        "model": "smollm2-135m",
        "http": {**host, "public_stats": True},
        "grpc": host,
        "metrics": host,
        "pools": [{"name": "single", "targets": [engine.target for engine in engines]}],
        "limits": {"request_timeout": 180.0},
        "slo": {"ttft_p95": 600.0, "e2e_p95": 600.0},
    }
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps(document))
    command = [sys.executable, "-m", "ullage_router.main", "--config", str(path)]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    assert process.stderr
    try:
        line: dict[str, Any] = {}
        async with asyncio.timeout(LONG_S):
            while line.get("message") != "listening":
                line = json.loads(await process.stderr.readline())
        reading = asyncio.create_task(process.stderr.read())
        url = f"http://127.0.0.1:{line['http_port']}"
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S, trust_env=False) as http:
            await until_ready(http, len(engines))
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await reading


async def until_ready(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            engines = (await http.get("/stats")).json()["engines"]
            if sum(engine["state"] == "ready" for engine in engines) == count:
                return
            await asyncio.sleep(0.1)


async def stream(
    http: httpx.AsyncClient, word: str, begun: Callable[[str], None]
) -> tuple[str, str, str]:
    """(engine, text, reason of the end) of one streamed completion."""
    body = {"prompt": f"A story about {word}:", "max_tokens": 20, "stream": True, "temperature": 0}
    text, reason = "", ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        engine = answer.headers["x-ullage-engine"]
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                begun(engine)
    return engine, text, reason


def test_no_stream_is_lost_when_an_engine_ends(
    start_engine: Callable[..., "Engine"], engine: "Engine", tmp_path: Path
) -> None:
    engines = {"engine-0": start_engine(batching={"prefill_chunk_tokens": 48}), "engine-1": engine}

    async def scenario() -> None:
        async with routed(tmp_path, list(engines.values())) as http:
            words = ["tea", "iron", "snow", "jazz", "moss", "clay"]
            alone = [await stream(http, word, lambda _: None) for word in words[:2]]
            at_work = asyncio.Event()
            seen: set[str] = set()

            def begun(engine: str) -> None:
                seen.add(engine)
                if len(seen) == len(engines):
                    at_work.set()

            streams = [asyncio.create_task(stream(http, word, begun)) for word in words]
            async with asyncio.timeout(LONG_S):
                await at_work.wait()
            ending = engines["engine-0"].process
            ending.send_signal(signal.SIGTERM)
            later = [asyncio.create_task(stream(http, word, begun)) for word in words]
            answers = await asyncio.gather(*streams)
            assert {engine for engine, _, _ in answers} == set(engines)
            for _, text, reason in [*answers, *await asyncio.gather(*later)]:
                assert text and reason in ("length", "stop")
            assert [text for _, text, _ in answers[:2]] == [text for _, text, _ in alone]
            assert await asyncio.to_thread(ending.wait, LONG_S) == 0
            engine, text, _ = await stream(http, "wind", lambda _: None)
            assert engine == "engine-1" and text

    asyncio.run(scenario())
