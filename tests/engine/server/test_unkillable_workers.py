"""Workers whose processes outlive their SIGKILL, as in a GPU driver that hangs."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2
from ullage_testing.health import becomes

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.continuation import BREAKAGES
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_engine.server import supervisor
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.worker_process import ChildProcess

Serve = Callable[..., AbstractAsyncContextManager[Any]]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REASON = "the killed worker does not end"
KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)


class Unkillable(ChildProcess):
    """A process that SIGKILL only stops, until it is released."""

    started: ClassVar[list["Unkillable"]] = []
    is_released = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.started.append(self)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL if Unkillable.is_released else signal.SIGSTOP)

    @classmethod
    def release(cls) -> None:
        """Let SIGKILL end all processes, also those that have got it already."""
        cls.is_released = True
        for process in cls.started:
            process.kill()


@contextlib.asynccontextmanager
async def released_at_the_end() -> AsyncIterator[None]:
    """Without this, a test that fails would wait for processes that never end."""
    try:
        yield
    finally:
        Unkillable.release()


@pytest.fixture(autouse=True)
def _unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ChildProcess", Unkillable)
    monkeypatch.setattr(Unkillable, "started", [])
    monkeypatch.setattr(Unkillable, "is_released", False)


def ask(first: int = 1, max_tokens: int = 400) -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=max_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[first, 2, 3]), stop=stop)


async def refusal(answer: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    return from_rpc_error(raised.value)


def test_an_engine_is_not_ready_from_the_moment_of_the_kill(serve: Serve) -> None:
    """The default time for the process to end is half a minute. Routers do not wait for it."""

    async def scenario() -> None:
        async with serve(step_s=0.01) as engine, released_at_the_end():
            await engine.admin.InjectFault(KILL)
            state = await engine.state()
            assert not state.ready
            assert state.headroom_bytes == 0
            assert 0.4 < state.health < 0.6
            await becomes(engine, "readiness", NOT_SERVING)
            Unkillable.release()
            await engine.until(lambda state: state.ready)

    asyncio.run(scenario())


def test_a_worker_that_hangs_and_cannot_be_killed_takes_its_engine_out(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RestartPolicy(kill_grace_s=0.3, step_deadline_s=0.5)

    async def scenario() -> None:
        async with serve(policy=policy) as engine, released_at_the_end():
            answer = asyncio.create_task(engine.generate(ask(first=12)))  # WEDGES_ONCE
            await becomes(engine, "readiness", NOT_SERVING)
            await becomes(engine, "liveness", NOT_SERVING)

            error = await refusal(answer)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert error.message == REASON
            assert error.reason not in BREAKAGES
            assert (await engine.state()).not_ready_reason == REASON
            error = await refusal(engine.generate(ask()))
            assert (error.reason, error.message) == ("NO_ENGINE", REASON)

            Unkillable.release()
            await becomes(engine, "readiness", SERVING)
            await becomes(engine, "liveness", SERVING)
            state = await engine.state()
            assert state.ready
            assert state.not_ready_reason == ""
            assert state.worker_restarts == 1
            answered = await engine.generate(ask(max_tokens=5))
            assert answered.finished.usage.completion_tokens == 5

    asyncio.run(scenario())
    messages = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert f"{REASON}; this engine stays out" in messages


def test_an_engine_says_why_it_does_not_stop(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RestartPolicy(kill_grace_s=0.1, stop_grace_s=0.1)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.01) as engine, released_at_the_end():
            await engine.admin.InjectFault(KILL)
            engine.stop.set()
            engine.hurry.set()
            async with asyncio.timeout(20):
                while REASON not in caplog.text:  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.01)
            assert not engine.running.done()
            Unkillable.release()
            async with asyncio.timeout(20):
                await engine.running

    asyncio.run(scenario())
