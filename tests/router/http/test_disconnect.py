"""A client that goes takes its work with it, wherever the request is."""

import asyncio
import gc
import json
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    Service = Any
    StartService = Any


async def post(service: "Service", **more: Any) -> asyncio.StreamWriter:
    """Sends a completion request over a raw socket; closing it is leaving."""
    body = json.dumps({"prompt": "x" * 100, **more}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def gone(service: "Service") -> None:
    pipeline = service.router.service.pipeline
    await service.until(lambda: pipeline.inflight == 0)
    latest = (await service.stats())["latest"][0]
    assert (latest["status"], latest["error"]) == (499, "CANCELLED")
    assert all(e["inflight"] == 0 for e in (await service.stats())["engines"])


def test_while_streaming(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            async with service.http.stream(
                "POST", "/v1/completions", json={"prompt": "x", "stream": True}
            ) as answer:
                async for _ in answer.aiter_lines():
                    break
            await service.until(lambda: len(service.engine.cancelled) == 1)
            await gone(service)

    asyncio.run(scenario())


def test_before_the_first_token_and_while_collecting(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for name in ("hold", "pause"):
                service.engine.script = type(service.engine.script)(**{name: asyncio.Event()})
                service.engine.cancelled.clear()
                asked = len(service.engine.requests)
                writer = await post(service)
                await service.until(lambda n=asked: len(service.engine.requests) > n)
                writer.close()
                await service.until(lambda: len(service.engine.cancelled) == 1)
                await gone(service)

    asyncio.run(scenario())


def test_in_the_queue(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.push(headroom_bytes=0)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.headroom.headroom_bytes == 0)
            writer = await post(service)
            room = service.router.service.queue
            await service.until(lambda: len(room) == 1)
            writer.close()
            await service.until(lambda: len(room) == 0)
            await gone(service)
            assert service.engine.requests == []

    asyncio.run(scenario())


def test_in_the_middle_of_the_body(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            _, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
            )
            await writer.drain()
            writer.close()
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_pauses_only_itself(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(limits={"request_timeout": 60.0}) as service:
            engine = service.engine
            engine.script.words = ("w" * 60_000,) * 1500
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", service.router.http_port, limit=1 << 10
            )
            body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 1500}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            assert b"200" in await reader.readline()
            engine.script = type(engine.script)()
            for _ in range(5):
                assert (await service.complete()).status_code == 200
            assert service.router.service.pipeline.inflight == 1
            writer.close()
            await service.until(lambda: service.router.service.pipeline.inflight == 0)
            await service.until(lambda: engine.active == 0)

    asyncio.run(scenario())


def test_clients_that_go_leave_no_garbage(start_service: "StartService") -> None:
    """What waits for a search for garbage has prompts in it, and a long search stops everybody."""

    async def leave(service: "Service", count: int) -> None:
        cancelled = len(service.engine.cancelled) + count
        asked = len(service.engine.requests) + count
        writers = [await post(service, stream=True) for _ in range(count)]
        await service.until(lambda: len(service.engine.requests) == asked)
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        await service.until(lambda: len(service.engine.cancelled) == cancelled)
        await service.until(lambda: service.router.service.pipeline.inflight == 0)

    async def scenario() -> None:
        async with start_service(single=(10_000,)) as service:
            service.engine.script.hold = asyncio.Event()
            await leave(service, 2)
            gc.collect()
            gc.disable()
            try:
                await leave(service, 40)
                assert gc.collect() <= 40
            finally:
                gc.enable()

    uvloop.run(scenario())
