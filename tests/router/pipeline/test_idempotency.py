"""`Idempotency-Key`: the same request gets the same answer, another one is refused."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, from_rpc_error

if TYPE_CHECKING:
    Service = Any
    StartService = Any

ON = {"idempotency": {"enabled": True}}
SAMPLED = {"prompt": "Hi", "temperature": 1.0}


async def ask(service: "Service", key: str | None, **more: Any) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await service.http.post("/v1/completions", json=SAMPLED | more, headers=headers)


async def leave(service: "Service", asked: "asyncio.Future[Any]") -> None:
    """As a client that goes while it waits for its answer."""
    pipeline = service.router.service.pipeline
    await service.until(lambda: pipeline.inflight)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await service.until(lambda: not pipeline.inflight)


def text(answer: Any) -> str:
    return str(answer.json()["choices"][0]["text"])


def test_the_same_answer_running_and_finished(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=ON) as service:
            engine = service.engine
            engine.script.hold = asyncio.Event()
            asked = [asyncio.ensure_future(ask(service, "k")) for _ in range(3)]
            keys = service.router.service.idempotency
            await service.until(lambda: keys.repeated == 2 and len(engine.requests) == 1)
            engine.script.hold.set()
            assert [text(await each) for each in asked] == ["Hello big world"] * 3
            engine.script.words = ("another", " answer")
            again = await ask(service, "k")
            assert (again.status_code, text(again)) == (200, "Hello big world")
            assert again.json()["usage"] == asked[0].result().json()["usage"]
            assert len(engine.requests) == 1
            assert keys.size > 0
            for other in ("other", None):
                assert text(await ask(service, other)) == "another answer"
            refused = await ask(service, "k", prompt="Ho")
            assert refused.status_code == 422
            error = refused.json()["error"]
            assert error["code"] == "IDEMPOTENCY_KEY_REUSED"
            assert error["type"] == "invalid_request_error"
            assert (await ask(service, "k", stream=True)).status_code == 422
            assert (await ask(service, "k" * 257)).status_code == 400
            stats = (await service.stats())["coalescing"]
            assert stats["repeated"] == 3

    asyncio.run(scenario())


def test_over_grpc_from_its_beginning(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=ON) as service:

            async def generate(words: str = "Hi") -> str:
                request = inference_pb2.GenerateRequest(text=words)
                key = (("idempotency-key", "k"),)
                events = [e async for e in service.grpc.Generate(request, metadata=key)]
                assert events[-1].HasField("finished")
                return "".join(e.delta.text for e in events)

            assert await generate() == await generate() != ""
            assert len(service.engine.requests) == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate("Ho")
            assert from_rpc_error(caught.value).reason == "IDEMPOTENCY_KEY_REUSED"

    asyncio.run(scenario())


def test_what_was_left_runs_anew(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=ON) as service:
            engine = service.engine
            engine.script.hold = asyncio.Event()
            left = asyncio.ensure_future(ask(service, "k"))
            await service.until(lambda: len(engine.requests) == 1)
            await leave(service, left)
            engine.script.hold.set()
            assert (await ask(service, "k", prompt="x")).status_code == 200
            assert len(engine.requests) == 2

    asyncio.run(scenario())


def test_what_failed_runs_anew(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=ON) as service:
            script = service.engine.script
            script.refuse = ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "BAD", "no")
            assert (await ask(service, "k")).status_code == 400
            script.refuse = None
            assert text(await ask(service, "k")) == "Hello big world"

    asyncio.run(scenario())


def test_each_tenant_has_keys_of_its_own(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = tmp_path / "keys"
        folder.mkdir()
        for name in ("alice", "bob"):
            (folder / name).write_text(f"sk-{name}-0123456789")
        tenants = {"keys_dir": str(folder)}
        async with start_service(routing=ON, tenants=tenants) as service:
            for name in ("alice", "bob"):
                headers = {"Authorization": f"Bearer sk-{name}-0123456789", "Idempotency-Key": "k"}
                body = SAMPLED | {"prompt": name}
                answer = await service.http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
            assert len(service.engine.requests) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("bound", [{"max_bytes": 0}, {"ttl": 0.0001}])
def test_what_is_kept_is_bounded(start_service: "StartService", bound: dict[str, float]) -> None:
    async def scenario() -> None:
        routing = {"idempotency": {"enabled": True, **bound}}
        async with start_service(routing=routing) as service:
            for prompt in ("a", "b"):
                assert (await ask(service, "k", prompt=prompt)).status_code == 200
            assert len(service.engine.requests) == 2

    asyncio.run(scenario())


def test_keys_are_not_read_by_default(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for prompt in ("a", "b"):
                assert (await ask(service, "k", prompt=prompt)).status_code == 200

    asyncio.run(scenario())
