"""Starts that fail their proof: the next one is tried, and after three the engine stays out, or
ends where it never served."""

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
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.supervisor import GaveUpError

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


def test_three_failures_before_any_worker_served_end_the_engine(serve: Serve) -> None:
    """Healing leaves a pod alone that still starts, so the container ends with the reason."""

    async def scenario() -> None:
        async with serve(ready=False, policy=QUICK, unproven=99) as engine:
            await engine.running

    with pytest.raises(GaveUpError, match=f"^{REASON}"):
        asyncio.run(scenario())


def test_three_failures_in_a_row_leave_an_engine_out_that_has_served(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
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

            state = await engine.state()
            assert not state.ready
            assert state.not_ready_reason.startswith(REASON)
            assert state.worker_restarts == 4
            assert await health(engine, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health(engine, "liveness") == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as later:
                await engine.generate(ask())
            error = from_rpc_error(later.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert error.message.startswith(REASON)
            assert not engine.running.done()

    asyncio.run(scenario())
    assert any(
        each.message.startswith("this engine stays out: 3 starts") for each in caplog.records
    )
