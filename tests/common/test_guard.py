"""Requests that cannot be read get an answer like every other bad request."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire import request_guard
from ullage_common.wire.call_limits import ReceiveRoom
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import ServiceError, abort, from_rpc_error
from ullage_common.wire.request_guard import MAX_REQUEST_BYTES, RequestGuard
from ullage_common.wire.servers import Health, new_probe_server, new_server

WAIT_S = 20.0
SERVICE = "/ullage.inference.v1.InferenceService"
BAD = {
    "garbage": (b"\xff" * 50, "MALFORMED_MESSAGE"),
    "not UTF-8": (b"\x0a\x02\xff\xfe", "MALFORMED_MESSAGE"),
    "9 MiB": (b"x" * (9 << 20), "BODY_TOO_LARGE"),
}


class Parrot(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with what it was asked."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for text in (request.request_id, request.text):
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Any
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(model=request.model)

    async def Multiplex(
        self, requests: AsyncIterator[inference_pb2.MultiplexRequest], context: Any
    ) -> AsyncIterator[inference_pb2.MultiplexResponse]:
        async for _ in requests:
            yield inference_pb2.MultiplexResponse()


@contextlib.asynccontextmanager
async def served(
    guard: RequestGuard | None = None, servicer: Parrot | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    server = new_server(guard=guard)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer or Parrot(), server)
    Health().attach(server, ())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def refused(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


class Held:
    """Something that a call holds."""


class Refuser(Parrot):
    """Refuses every call while it holds something."""

    def __init__(self) -> None:
        self.freed = asyncio.Semaphore(0)
        """Counts what has been freed."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        await self._refuse(context)
        yield inference_pb2.GenerateResponse()

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Any
    ) -> inference_pb2.GetModelResponse:
        await self._refuse(context)
        return inference_pb2.GetModelResponse()

    async def _refuse(self, context: Any) -> None:
        held = Held()
        weakref.finalize(held, self.freed.release)
        await abort(context, ServiceError(grpc.StatusCode.NOT_FOUND, "GONE", "it has gone"))


def test_what_a_refused_call_held_is_freed_without_a_search_for_garbage() -> None:
    async def scenario() -> None:
        refuser = Refuser()
        async with served(servicer=refuser) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(3):
                await refused(stub.GetModel(inference_pb2.GetModelRequest()))
                await refused(stub.Generate(inference_pb2.GenerateRequest()).read())
            async with asyncio.timeout(WAIT_S):
                for _ in range(6):
                    await refuser.freed.acquire()

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_an_invalid_argument(data: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with served() as channel:
            streamed = channel.unary_stream(f"{SERVICE}/Generate")(data)
            single = channel.unary_unary(f"{SERVICE}/GetModel")(data)
            for call, field in (
                (streamed.read(), "GenerateRequest"),
                (single, "GetModelRequest"),
            ):
                error = await refused(call)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT
                assert (error.reason, error.metadata) == (reason, {"field": field})
                assert field in error.message

    asyncio.run(scenario())


def test_what_is_far_too_long_is_not_read() -> None:
    async def scenario() -> None:
        async with served() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"{SERVICE}/GetModel")(b"x" * (17 << 20))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            model = inference_pb2.GetModelRequest(model="m")
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert (await stub.GetModel(model)).model == "m"

    asyncio.run(scenario())


def test_what_can_be_read_passes() -> None:
    async def scenario() -> None:
        async with served() as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            text = "x" * (MAX_REQUEST_BYTES - 100)
            request = inference_pb2.GenerateRequest(request_id="a", text=text)
            assert [r.delta.text async for r in stub.Generate(request)] == ["a", text]
            model = await stub.GetModel(inference_pb2.GetModelRequest(model="m"))
            assert model.model == "m"
            health = health_pb2_grpc.HealthStub(channel)
            async for answer in health.Watch(health_pb2.HealthCheckRequest(service="liveness")):
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                break
            unknown = await refused(channel.unary_unary(f"{SERVICE}/Nothing")(b""))
            assert unknown.code is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


CLOSED = ServiceError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "send a key")


def admit(method: str, metadata: Mapping[str, str]) -> str | None:
    if metadata.get("key") == "none":
        raise CLOSED
    return metadata.get("key", "")


async def begun(channel: grpc.aio.Channel, key: str) -> Any:
    """A call that sends no request yet."""
    call = channel.stream_unary(f"{SERVICE}/GetModel")(metadata=(("key", key),))
    await call.wait_for_connection()
    return call


def test_a_call_without_a_key_ends_before_its_request_comes() -> None:
    async def scenario() -> None:
        async with served(RequestGuard(admit)) as channel:
            for method in ("GetModel", "Generate", "Multiplex"):
                call = channel.stream_stream(f"{SERVICE}/{method}")(metadata=(("key", "none"),))
                async with asyncio.timeout(WAIT_S):
                    error = await refused(call.read())
                assert (error.code, error.reason) == (CLOSED.code, CLOSED.reason)

    asyncio.run(scenario())


def test_a_request_that_does_not_come_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "RECEIVE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with served() as channel:
            for method in ("GetModel", "Generate"):
                call = channel.stream_stream(f"{SERVICE}/{method}")()
                async with asyncio.timeout(WAIT_S):
                    error = await refused(call.read())
                assert (error.code, error.reason) == (
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "BODY_LATE",
                )

    asyncio.run(scenario())


def test_a_call_without_a_request_is_refused() -> None:
    async def scenario() -> None:
        async with served() as channel:
            call = channel.stream_unary(f"{SERVICE}/GetModel")()
            await call.done_writing()
            assert "the call has no GetModelRequest" in (await refused(call)).message

    asyncio.run(scenario())


def test_few_requests_arrive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_RECEIVED_AT_ONCE", 4)

    async def scenario() -> None:
        async with served(RequestGuard(admit)) as channel:
            slow = [await begun(channel, "one") for _ in range(10)]
            asked = inference_pb2.GetModelRequest(model="m").SerializeToString()
            mine = await begun(channel, "two")
            await mine.write(asked)
            async with asyncio.timeout(WAIT_S):  # half of the places are not the slow ones'
                assert await mine == inference_pb2.GetModelResponse(model="m").SerializeToString()
            last = slow.pop()
            await last.write(asked)
            await asyncio.sleep(0)
            assert not last.done()
            for call in slow:
                call.cancel()
            async with asyncio.timeout(WAIT_S):
                assert await last == inference_pb2.GetModelResponse(model="m").SerializeToString()

    asyncio.run(scenario())


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def for_everybody(method: str, metadata: Mapping[str, str]) -> str | None:
    return None


def test_streams_for_everybody_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_RECEIVED_PUBLIC", 2)
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()

    async def scenario() -> None:
        async with served(RequestGuard(for_everybody)) as channel:
            streams = [channel.stream_stream(REFLECTION)() for _ in range(2)]
            for stream in streams:
                await stream.write(asked)
                assert b"ServerReflection" in await stream.read()
            error = await refused(channel.stream_stream(REFLECTION)().read())
            assert (error.code, error.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "STREAMS_FULL",
            )
            for stream in streams:
                stream.cancel()

    asyncio.run(scenario())


def test_streams_for_everybody_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "STREAM_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with served(RequestGuard(for_everybody)) as channel:
            async with asyncio.timeout(WAIT_S):
                error = await refused(channel.stream_stream(REFLECTION)().read())
            assert error.reason == "BODY_LATE"

    asyncio.run(scenario())


def test_many_parts_are_refused() -> None:
    async def scenario() -> None:
        async with served() as channel:
            data = b"\x2a\x80\x89\x7a" + b"\x0a\x00" * 1_000_000
            error = await refused(channel.unary_stream(f"{SERVICE}/Generate")(data).read())
            assert (error.code, error.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "BODY_TOO_LARGE",
            )

    asyncio.run(scenario())


HEALTH = "/grpc.health.v1.Health"
ASKED = inference_pb2.GetModelRequest(model="m").SerializeToString()
MODEL = inference_pb2.GetModelResponse(model="m").SerializeToString()
LIVENESS = health_pb2.HealthCheckRequest(service="liveness")


def health_for_everybody(method: str, metadata: Mapping[str, str]) -> str | None:
    return None if method.startswith(HEALTH) else metadata.get("key", "")


def model(channel: grpc.aio.Channel, key: str = "") -> Any:
    """A call that sends its request at once."""
    method = channel.unary_unary(f"{SERVICE}/GetModel")
    return method(ASKED, metadata=(("key", key),), timeout=WAIT_S)


async def first_refused(calls: Iterable[Any]) -> ServiceError:
    """The error of the call that ends first."""
    waiting = [asyncio.create_task(refused(call)) for call in calls]
    done, others = await asyncio.wait(waiting, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    return await done.pop()


def cancel(calls: Iterable[Any]) -> None:
    for call in calls:
        call.cancel()


def test_watches_leave_room_for_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_CALLS", 64)

    async def scenario() -> None:
        async with served(RequestGuard(health_for_everybody)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watches = []
            # One at a time: a server receives only a few public requests at once.
            for _ in range(200):
                watches.append(health.Watch(LIVENESS))
                answer = await watches[-1].read()
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert await model(channel) == MODEL
            answer = await health.Check(LIVENESS, timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            cancel(watches)

    asyncio.run(scenario())


def test_the_oldest_watch_makes_way_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_PUBLIC_CALLS", 4)

    async def scenario() -> None:
        async with served(RequestGuard(health_for_everybody)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watches = []
            for _ in range(5):
                watches.append(health.Watch(LIVENESS))
                await watches[-1].read()
            async with asyncio.timeout(WAIT_S):
                error = await refused(watches.pop(0).read())
            assert (error.reason, error.retry_after_s) == ("CALLS_FULL", 1)
            assert not any(watch.done() for watch in watches)
            cancel(watches)

    asyncio.run(scenario())


def test_calls_of_one_tenant_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_CALLS", 8)

    async def scenario() -> None:
        async with served(RequestGuard(admit)) as channel:
            stream = channel.stream_stream(f"{SERVICE}/Multiplex")
            open_streams = [stream(metadata=(("key", "one"),)) for _ in range(4)]
            for call in open_streams:
                await call.write(b"")
                assert await call.read() == b""
            error = await refused(model(channel, "one"))
            assert (error.code, error.reason, error.retry_after_s) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "CALLS_FULL",
                1,
            )
            assert await model(channel, "two") == MODEL
            cancel(open_streams)

    asyncio.run(scenario())


def test_idle_checks_do_not_delay_probes() -> None:
    async def scenario() -> None:
        async with served(RequestGuard(health_for_everybody)) as channel:
            idle = [channel.stream_unary(f"{HEALTH}/Check")() for _ in range(100)]
            await asyncio.gather(*(call.wait_for_connection() for call in idle))
            for _ in range(10):
                answer = await health_pb2_grpc.HealthStub(channel).Check(LIVENESS, timeout=WAIT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            error = await first_refused(idle)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "BODIES_FULL")
            cancel(idle)

    asyncio.run(scenario())


def test_requests_for_everybody_are_small() -> None:
    async def scenario() -> None:
        async with served(RequestGuard(for_everybody)) as channel:
            error = await refused(channel.unary_unary(f"{HEALTH}/Check")(b"x" * (17 << 10)))
            assert error.reason == "BODY_TOO_LARGE"

    asyncio.run(scenario())


def test_a_request_that_finds_no_place_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_RECEIVED_AT_ONCE", 4)
    monkeypatch.setattr(request_guard, "PLACE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with served(RequestGuard(admit)) as channel:
            idle = [await begun(channel, "one") for _ in range(2)]
            error = await refused(model(channel, "one"))
            assert (error.code, error.reason, error.retry_after_s) == (
                grpc.StatusCode.UNAVAILABLE,
                "BODIES_FULL",
                1,
            )
            cancel(idle)

    asyncio.run(scenario())


def test_nobody_loses_a_place_to_a_request_that_has_gone() -> None:
    async def wait(room: ReceiveRoom, owner: str) -> None:
        async with room.place(owner):
            raise AssertionError("all places are taken")

    async def scenario() -> None:
        room = ReceiveRoom(4, grace_s=0.05, wait_s=WAIT_S)
        async with contextlib.AsyncExitStack() as stack:
            for owner in ("one", "one", "two", "two"):
                await stack.enter_async_context(room.place(owner))
            async with asyncio.timeout(None) as timeout:
                with room.arriving("one", timeout) as place:
                    waiting = asyncio.create_task(wait(room, "three"))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    await asyncio.wait([waiting])
                    await asyncio.sleep(0.2)
            assert not place.is_lost

    asyncio.run(scenario())


def test_idle_calls_lose_their_places_to_those_who_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_guard, "MAX_RECEIVED_AT_ONCE", 6)
    monkeypatch.setattr(request_guard, "PLACE_GRACE_S", 0.05)

    async def scenario() -> None:
        async with served(RequestGuard(admit)) as channel:
            slow = await begun(channel, "slow")
            idle = [await begun(channel, "one") for _ in range(3)]
            idle += [await begun(channel, "two") for _ in range(2)]
            assert await model(channel, "three") == MODEL
            error = await first_refused(idle)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "BODIES_FULL")
            await slow.write(ASKED)
            assert await slow == MODEL
            cancel(idle)

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_server_for_probes_answers_whatever_is_idle(method: str) -> None:
    async def scenario() -> None:
        server = new_probe_server()
        health = Health()
        health.attach_alone(server)
        health.set_live(True)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            idle = [channel.stream_stream(f"{HEALTH}/{method}")() for _ in range(600)]
            await asyncio.gather(*(call.wait_for_connection() for call in idle))
            answer = await health_pb2_grpc.HealthStub(channel).Check(LIVENESS, timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            cancel(idle)
        await server.stop(None)

    asyncio.run(scenario())
