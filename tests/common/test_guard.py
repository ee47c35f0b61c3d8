"""Requests that cannot be read get an answer like every other bad request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.channels import MAX_REQUEST_BYTES, Health, new_server, open_channel
from ullage_common.wire.errors import ServiceError, from_rpc_error

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


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[grpc.aio.Channel]:
    server = new_server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Parrot(), server)
    await Health().attach(server, ())
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
