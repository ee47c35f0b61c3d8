"""InferenceService of the router: the meaning of HTTP, in gRPC's words."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router import grpc as router_grpc

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000
Request = inference_pb2.GenerateRequest
Sampling = inference_pb2.SamplingParams
Stop = inference_pb2.StopConditions
Samples = inference_pb2.Samples
Beam = inference_pb2.BeamSearch


def conversation(*turns: tuple[str, str]) -> inference_pb2.Messages:
    return inference_pb2.Messages(
        messages=[inference_pb2.Message(role=role, content=text) for role, text in turns]
    )


async def generate(service: "Service", request: Request, **more: Any) -> list[Any]:
    return [response async for response in service.grpc.Generate(request, **more)]


async def refusal(service: "Service", request: Request, **more: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(service, request, **more)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (Request(token_ids=inference_pb2.TokenIds(ids=[72, 105])), 2),
        (Request(text="Hi"), 2),
        (Request(messages=conversation(("user", "Hi"))), len("<user>Hi\n<assistant>")),
    ],
    ids=["token_ids", "text", "messages"],
)
def test_every_input(start_service: "StartService", given: Request, tokens: int) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            given.output.return_token_ids = True
            first, *deltas, last = await generate(service, given)
            accepted = first.accepted
            assert (accepted.action, accepted.route, accepted.engine) == (
                "accept",
                "single",
                "single-0",
            )
            assert accepted.request_id
            assert accepted.prompt_tokens == len(accepted.prompt_token_ids) == tokens
            assert accepted.predicted_bytes % BLOCK == 0
            assert accepted.seed == 7
            assert "".join(d.delta.text for d in deltas) == "Hello big world"
            assert last.finished.usage.completion_tokens == 3

    asyncio.run(scenario())


WRONG = [
    (Request(), "input"),
    (Request(text=""), "prompt"),
    (Request(token_ids=inference_pb2.TokenIds()), "prompt"),
    (Request(token_ids=inference_pb2.TokenIds(ids=[9999])), "prompt"),
    (Request(messages=conversation()), "messages"),
    (Request(messages=conversation(("wizard", "x"))), "messages[0].role"),
    (Request(text="x", sampling=Sampling(temperature=float("nan"))), "temperature"),
    (Request(text="x", sampling=Sampling(temperature=float("inf"))), "temperature"),
    (Request(text="x", sampling=Sampling(top_p=0)), "top_p"),
    (Request(text="x", stop=Stop(max_tokens=0)), "max_tokens"),
    (Request(text="x", stop=Stop(stop_strings=["y" * 257])), "stop"),
    (Request(text="x", output=inference_pb2.OutputOptions(top_logprobs=21)), "top_logprobs"),
    (Request(text="x", samples=Samples(n=17)), "n"),
    (Request(text="x", samples=Samples(n=3, best_of=2)), "best_of"),
    (Request(text="x", samples=Samples(best_of=2, beam=Beam(width=2))), "best_of"),
    (Request(text="x", samples=Samples(beam=Beam(width=9))), "beam.width"),
    (Request(text="x", samples=Samples(n=3, beam=Beam(width=2))), "n"),
    (Request(text="x", samples=Samples(beam=Beam(width=2, length_penalty=11))), "length_penalty"),
    (Request(text="x", priority=101), "priority"),
    (Request(text="x", request_id="i" * 129), "request_id"),
    (Request(text="x", session_id="i" * 257), "session_id"),
    (Request(text="x" * 1995), "input"),
    (Request(text="x" * 8000), "prompt"),
]


def test_wrong_requests(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for request, field in WRONG:
                error = await refusal(service, request)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT
                assert error.metadata["field"] == field, error
                assert error.retry_after_s is None
            unknown = await refusal(service, Request(text="x", model="gpt-4"))
            assert (unknown.code, unknown.reason) == (
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
            )
            assert service.engine.requests == []

    asyncio.run(scenario())


def test_a_full_service_says_when(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = {"queue": {"max_requests": 0, "timeout": 1.0}}
        async with start_service(routing=routing) as service:
            releases = [headroom_pb2.Release(after_ms=4200, bytes=99 * BLOCK)]
            service.engine.push(headroom_bytes=0, releases=releases)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.headroom.headroom_bytes == 0)
            error = await refusal(service, Request(text="x"))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.reason == "QUEUE_FULL"
            assert error.retry_after_s in (5, 6)
            assert error.metadata["needed_bytes"] == str(3 * BLOCK)
            assert error.metadata["available_bytes"] == "0"
            await service.engine.stop()
            await service.until(lambda: known.state == "connecting")
            error = await refusal(service, Request(text="x"))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert error.retry_after_s

    asyncio.run(scenario())


def test_deadlines_are_the_sooner_one(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.hold = asyncio.Event()
            error = await refusal(service, Request(text="x"), timeout=2.0)
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await service.until(lambda: len(service.engine.cancelled) == 1)
            await service.until(lambda: service.router.service.pipeline.inflight == 0)

    asyncio.run(scenario())


def test_a_cancelled_call_cancels_the_engines(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            call = service.grpc.Generate(Request(text="x", request_id="gone"))
            async for response in call:
                if response.HasField("delta"):
                    break
            call.cancel()
            await service.until(lambda: service.engine.cancelled == ["gone"])
            assert service.router.service.engines.all()[0].inflight == 0

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def unread(service: "Service") -> AsyncIterator[Any]:
    """A long answer of which only the first message was read, by a client with small buffers."""
    service.engine.script.words = ("w" * 60_000,) * 40
    options = [("grpc.http2.bdp_probe", 0)]
    address = f"127.0.0.1:{service.router.grpc_port}"
    async with grpc.aio.insecure_channel(address, options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(Request(text="x", stop=Stop(max_tokens=40)))
        await call.read()
        yield call


async def ended(service: "Service") -> tuple[int, str]:
    """The status and the error of the latest request, once nothing is held for it any more."""
    pipeline = service.router.service.pipeline
    (engine,) = service.router.service.engines.all()
    await service.until(lambda: pipeline.inflight == engine.inflight == 0, 20.0)
    await service.until(lambda: service.engine.active == 0)
    latest = (await service.stats())["latest"][0]
    return latest["status"], latest["error"]


def test_an_answer_that_is_never_read_ends_soon_after_its_time(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_grpc, "SLOW_CLIENT_GRACE_S", 0.3)
    limits = {"request_timeout": 1.0, "total_timeout": 1.0}

    async def scenario() -> None:
        async with start_service(limits=limits) as service, unread(service) as call:
            assert await ended(service) == (504, "SLOW_CLIENT")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            error = from_rpc_error(caught.value)
            assert (error.code, error.reason) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "SLOW_CLIENT",
            )

    asyncio.run(scenario())


def test_a_client_that_leaves_an_answer_unread_takes_its_work_with_it(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            async with unread(service) as call:
                assert service.router.service.pipeline.inflight == 1
                call.cancel()
                assert await ended(service) == (499, "CANCELLED")
            async with unread(service):
                assert service.router.service.pipeline.inflight == 1
            assert await ended(service) == (499, "CANCELLED")

    asyncio.run(scenario())


def test_the_model_passes_through(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            model = await service.grpc.GetModel(inference_pb2.GetModelRequest())
            assert (model.model, model.max_model_len) == ("tiny", 2000)
            assert model.tokenizer_json

    asyncio.run(scenario())


def test_health_and_reflection(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stub = health_pb2_grpc.HealthStub(service.channel)
            states = [s async for s in reflected(service.channel)]
            assert "ullage.inference.v1.InferenceService" in states
            await told(stub, health_pb2.HealthCheckResponse.SERVING)
            await service.engine.stop()
            await asyncio.sleep(1.0)  # it stays: whoever asks is told when to come back
            await told(stub, health_pb2.HealthCheckResponse.SERVING)
            service.router.service.leave()
            await told(stub, health_pb2.HealthCheckResponse.NOT_SERVING)

    asyncio.run(scenario())


async def told(stub: Any, status: int) -> None:
    """Returns when readiness has the status."""
    request = health_pb2.HealthCheckRequest(service="readiness")
    async with asyncio.timeout(20):
        async for answer in stub.Watch(request):
            if answer.status == status:
                return


async def reflected(channel: grpc.aio.Channel) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([ask])):
        for service in response.list_services_response.service:
            yield service.name
