"""Requests whose grammar is still checked when the engine begins to refuse new ones."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any

import grpc
import pytest

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_engine.server import service
from ullage_engine.server.grammar import GrammarCheck, Verdict
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.supervisor import GaveUpError

Serve = Callable[..., AbstractAsyncContextManager[Any]]

QUICK = RestartPolicy(first_backoff_s=0.01)


class Compiler:
    """Compiles grammars when it is allowed to."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def compiled(self, text: str) -> Verdict:
        self.has_begun.set()
        await self.may_end.wait()
        return Verdict()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    slow = Compiler()
    monkeypatch.setattr(service, "GrammarCheck", lambda: GrammarCheck(slow.compiled))
    return slow


def ask(first: int = 1, **fields: Any) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=5)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[first, 2, 3]), stop=stop, **fields)


async def refusal(answer: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(30):
            await answer
    return from_rpc_error(raised.value)


def test_an_engine_that_drains_meanwhile_refuses(serve: Serve, compiler: Compiler) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            late = asyncio.ensure_future(engine.generate(ask(grammar=pb.Grammar(regex="a"))))
            await compiler.has_begun.wait()
            drained = await engine.admin.Drain(admin_pb2.DrainRequest(timeout_ms=5000))
            assert drained.unfinished == 0
            compiler.may_end.set()
            error = await refusal(late)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")

    asyncio.run(scenario())


def test_an_engine_that_stays_out_meanwhile_refuses(
    serve: Serve, compiler: Compiler, fake: ModuleType
) -> None:
    """No later worker would answer."""

    async def scenario() -> None:
        async with serve(policy=QUICK, unproven_restarts=True) as engine:
            late = asyncio.ensure_future(engine.generate(ask(grammar=pb.Grammar(regex="a"))))
            await compiler.has_begun.wait()
            killing = engine.generate(ask(fake.Script.KILLS_WORKER))
            with pytest.raises(grpc.aio.AioRpcError):
                await killing
            compiler.may_end.set()
            error = await refusal(late)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")

    asyncio.run(scenario())


def test_an_engine_that_gives_up_meanwhile_refuses(
    serve: Serve, compiler: Compiler, fake: ModuleType
) -> None:
    policy = RestartPolicy(first_backoff_s=0.01, max_failures=1)

    async def scenario() -> None:
        async with serve(policy=policy) as engine:
            late = asyncio.ensure_future(engine.generate(ask(grammar=pb.Grammar(regex="a"))))
            await compiler.has_begun.wait()
            killing = engine.generate(ask(fake.Script.KILLS_WORKER))
            with pytest.raises(grpc.aio.AioRpcError):
                await killing
            compiler.may_end.set()
            refusals.append(await refusal(late))

    refusals: list[ServiceError] = []
    with pytest.raises(GaveUpError):
        asyncio.run(scenario())
    [error] = refusals
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
    assert error.message.startswith("2 workers in a row ended early")
