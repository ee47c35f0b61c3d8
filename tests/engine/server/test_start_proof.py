"""Starts that fail their proof: the next one is tried, and after three the engine stays out."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.continuation import BREAKAGES
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.server.health import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]

REASON = "3 starts in a row failed their proof, the last one: this start computes otherwise"
QUICK = RestartPolicy(first_backoff_s=0.01)


def ask() -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=5)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=stop)


async def health(engine: Any, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(engine.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


def test_two_failures_cost_two_starts(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serve(policy=QUICK, unproven=2) as engine:
            state = await engine.state()
            assert state.ready
            assert state.worker_restarts == 2
            assert state.not_ready_reason == ""
            assert (await engine.generate(ask())).finished.usage.completion_tokens == 5

    asyncio.run(scenario())
    failed = [each for each in caplog.records if "failed the proof" in each.message]
    assert [vars(each)["in_a_row"] for each in failed] == [1, 2]


def test_three_failures_in_a_row_leave_the_engine_out(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serve(ready=False, policy=QUICK, unproven=99) as engine:
            await engine.until(lambda state: state.not_ready_reason.startswith(REASON))
            assert not (await engine.state()).ready
            assert await health(engine, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health(engine, "liveness") == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask())
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert error.message.startswith(REASON)
            assert (await engine.state()).worker_restarts == 3
            assert not engine.running.done()

    asyncio.run(scenario())
    assert any(
        each.message.startswith("this engine stays out: 3 starts") for each in caplog.records
    )


def test_open_requests_go_to_other_engines_when_an_engine_stays_out(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(policy=QUICK, unproven_restarts=True) as engine:
            killing = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[10, 2, 3]), stop=pb.StopConditions(max_tokens=5)
            )
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(killing)
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert error.reason not in BREAKAGES
            assert error.message.startswith(REASON)
            assert not (await engine.state()).ready

    asyncio.run(scenario())
