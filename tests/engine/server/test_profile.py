"""AdminService.Profile: a look at the coming steps of a worker, bounded and one at a time."""

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig, ProfilingSection
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.server.restart_policy import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]
TIMELINE = admin_pb2.PROFILE_KIND_TIMELINE
KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)


def ask(max_tokens: int = 200) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=pb.StopConditions(max_tokens=max_tokens)
    )


def look(steps: int = 5, **fields: Any) -> admin_pb2.ProfileRequest:
    return admin_pb2.ProfileRequest(kind=TIMELINE, steps=steps, **fields)


@pytest.fixture
def allowing(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, profiling=ProfilingSection(enabled=True))


async def received(call: Any) -> bytes:
    return b"".join([response.chunk async for response in call])


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await received(call)
    return from_rpc_error(caught.value)


def left(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("profile-*"))


def test_a_file_of_the_asked_steps_comes_and_nothing_stays(
    serve: Serve, allowing: EngineConfig, run_dir: Path
) -> None:
    async def scenario() -> None:
        async with serve(config=allowing, step_s=0.02) as engine:
            answer = asyncio.create_task(engine.generate(ask()))
            responses = [each async for each in engine.admin.Profile(look())]
            assert [r.progress.steps for r in responses if r.HasField("progress")][-1] >= 5
            trace = json.loads(gzip.decompress(b"".join(r.chunk for r in responses)))
            assert sum(event["name"] == "step" for event in trace["traceEvents"]) >= 5
            assert not left(run_dir)
            answer.cancel()

    asyncio.run(scenario())


def test_without_traffic_it_ends_by_itself(serve: Serve, allowing: EngineConfig) -> None:
    async def scenario() -> None:
        async with serve(config=allowing) as engine:
            trace = await received(engine.admin.Profile(look(timeout_ms=50)))
            assert json.loads(gzip.decompress(trace))["traceEvents"]

    asyncio.run(scenario())


def test_there_is_one_at_a_time_and_a_client_that_leaves_ends_it(
    serve: Serve, allowing: EngineConfig, run_dir: Path
) -> None:
    async def scenario() -> None:
        async with serve(config=allowing) as engine:
            first = engine.admin.Profile(look())
            assert (await first.read()).HasField("progress")
            second = await refused(engine.admin.Profile(look()))
            assert (second.code, second.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "PROFILE_RUNNING",
            )
            first.cancel()
            async with asyncio.timeout(20):
                while True:
                    call = engine.admin.Profile(look(timeout_ms=1))
                    try:
                        await received(call)
                        break
                    except grpc.aio.AioRpcError as error:
                        assert from_rpc_error(error).reason == "PROFILE_RUNNING"
                        await asyncio.sleep(0.02)
            assert not left(run_dir)

    asyncio.run(scenario())


def test_a_worker_that_dies_ends_it_with_an_error(serve: Serve, allowing: EngineConfig) -> None:
    async def scenario() -> None:
        async with serve(config=allowing, policy=RestartPolicy(first_backoff_s=0.05)) as engine:
            call = engine.admin.Profile(look())
            assert (await call.read()).HasField("progress")
            await engine.admin.InjectFault(KILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read():
                    pass
            error = from_rpc_error(caught.value)
            assert (error.reason, "during the profile" in error.message) == ("WORKER_LOST", True)

    asyncio.run(scenario())


def test_it_is_refused_where_it_is_off_or_asked_for_too_much(
    serve: Serve, config: EngineConfig, allowing: EngineConfig
) -> None:
    async def scenario() -> None:
        async with serve(config=config) as engine:
            error = await refused(engine.admin.Profile(look()))
            assert error.code is grpc.StatusCode.PERMISSION_DENIED
            assert "observability.profiling.enabled" in error.message
        async with serve(config=allowing) as engine:
            wrong = [
                (look(steps=1001), "at most 1000"),
                (look(timeout_ms=300_001), "at most 300000"),
                (admin_pb2.ProfileRequest(kind=9), "kind is 9"),
            ]
            for request, words in wrong:
                error = await refused(engine.admin.Profile(request))
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT
                assert words in error.message

    asyncio.run(scenario())
