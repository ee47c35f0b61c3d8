"""`Idempotency-Key`: the same request gets the same answer, another one is refused."""

import asyncio
import functools
import gc
import tracemalloc
import weakref
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import IdempotencySection
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.call import Call, deadline_of
from ullage_router.pipeline.idempotency import IdempotencyKeys
from ullage_router.policy.decision import Decision
from ullage_router.policy.quota import Quota
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import UNLIMITED, Account
from ullage_router.tenants.session import TenantSession

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


class Words:
    """An answer of many short events."""

    output_tokens = 0

    def __init__(self, request_id: str, count: int) -> None:
        self.accepted = inference_pb2.Accepted(request_id=request_id, engine="single-0")
        self._count = count

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        for i in range(self._count):
            delta = inference_pb2.Delta(text=f" word{i}", num_tokens=1, token_ids=[i])
            yield inference_pb2.GenerateResponse(delta=delta)
        usage = inference_pb2.Usage(completion_tokens=self._count)
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=usage))

    def close(self) -> None:
        pass


def call(number: int, release_body: Callable[[], None]) -> Call:
    name = f"request-{number}"
    request = inference_pb2.GenerateRequest(request_id=name, text="x" * 10_000)
    session = TenantSession(Account("alice", UNLIMITED, Quota()))
    record = RequestRecord(name)
    return Call(
        request,
        record,
        session,
        deadline_of(request, record, 30.0, 30.0),
        release_body=release_body,
        idempotency_key=f"{number:064}",
    )


def test_a_repeated_request_holds_no_memory_of_its_body() -> None:
    async def scenario() -> None:
        released: list[int] = []
        is_answered = asyncio.Event()
        first, *others = [call(0, functools.partial(released.append, i)) for i in range(3)]

        async def generate(call: Call) -> Words:
            await is_answered.wait()
            return Words(call.record.request_id, 1)

        keys = IdempotencyKeys(IdempotencySection(enabled=True))
        running = asyncio.create_task(keys.repeat(first, generate))
        joined = asyncio.create_task(keys.repeat(others[0], generate))
        await asyncio.sleep(0)
        assert released == [1], "the first prompt is still to be rendered"
        is_answered.set()
        for answer in await asyncio.gather(running, joined):
            assert len([event async for event in answer.events()]) == 2
            answer.close()
        await keys.repeat(others[1], generate)
        assert released == [1, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("words", [1, 300])
def test_finished_answers_take_the_memory_that_is_counted(words: int) -> None:
    count = 200
    calls: list[weakref.ref[Callable[[], None]]] = []

    async def generate(call: Call) -> Words:
        trail = tuple(f"step{i}={call.record.request_id}" for i in range(8))
        call.decisions.adopt(Decision(action="accept", pool="single", trail=trail))
        return Words(call.record.request_id, words)

    async def ask(keys: IdempotencyKeys, number: int) -> list[inference_pb2.GenerateResponse]:
        def release() -> None:
            pass

        calls.append(weakref.ref(release))
        answer = await keys.repeat(call(number, release), generate)
        events = [event async for event in answer.events()]
        answer.close()
        assert answer.output_tokens == words
        return events

    async def scenario() -> None:
        await ask(IdempotencyKeys(IdempotencySection(enabled=True)), 0)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        keys = IdempotencyKeys(IdempotencySection(enabled=True))
        for i in range(count):
            await ask(keys, i)
        calls.clear()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert keys.size / 1.5 < after - before < keys.size * 1.2

        assert len(await ask(keys, 0)) == words + 1
        await ask(keys, count)
        gc.collect()
        assert [ref() for ref in calls] == [None, None], "requests must not be kept"
        assert keys.repeated == 1

    asyncio.run(scenario())


def test_keys_are_not_read_by_default(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for prompt in ("a", "b"):
                assert (await ask(service, "k", prompt=prompt)).status_code == 200

    asyncio.run(scenario())
