"""Workers that a fork server forks from itself, and a fork server that is lost."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any

import psutil
import pytest
from ullage_testing import fake_fork_server

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb

Serve = Callable[..., AbstractAsyncContextManager[Any]]

KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
ASK = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=(1, 2, 3)),
    sampling=pb.SamplingParams(seed=9),
    stop=pb.StopConditions(max_tokens=60),
    output=pb.OutputOptions(return_token_ids=True),
)


def fork_server(import_s: float = 0.0) -> list[str]:
    return [sys.executable, fake_fork_server.__file__, str(import_s)]


def expected(fake: ModuleType) -> list[int]:
    return [fake.token_at(place, 9) for place in range(3, 63)]


def child() -> psutil.Process:
    """The fork server, a child of this process."""
    (found,) = [each for each in psutil.Process().children() if is_fork_server(each)]
    return found


def is_fork_server(process: psutil.Process) -> bool:
    return fake_fork_server.__file__ in process.cmdline()


async def until_child() -> psutil.Process:
    async with asyncio.timeout(60):
        while True:
            if any(is_fork_server(each) for each in psutil.Process().children()):
                return child()
            await asyncio.sleep(0.01)


def test_workers_are_forked_from_one_process(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(fork_server=fork_server(), step_s=0.02) as engine:
            server = child()
            for resumed in range(2):
                (worker,) = server.children()
                assert [fake.__file__ in part for part in worker.cmdline()][1]
                answer = asyncio.create_task(engine.generate(ASK))
                await engine.until(lambda state: state.requests_running == 1)
                killed = (await engine.admin.InjectFault(KILL)).worker_pid
                assert killed == worker.pid
                assert (await answer).token_ids == expected(fake), resumed
                assert (await answer).finished.resumes == 1
                assert not psutil.pid_exists(killed)
            assert child() == server

    asyncio.run(scenario())


@pytest.mark.parametrize("has_fork_server", [False, True])
def test_an_engine_reports_how_long_its_next_worker_needs(
    serve: Serve, has_fork_server: bool
) -> None:
    async def scenario() -> None:
        async with serve(fork_server=fork_server() if has_fork_server else ()) as engine:
            # The first worker of a fork server waits for imports that later ones inherit.
            assert ((await engine.state()).worker_start_s == 0.0) == has_fork_server
            await engine.admin.InjectFault(KILL)
            await engine.until(lambda state: state.worker_restarts == 1 and state.ready)
            assert 0.0 < (await engine.state()).worker_start_s < 60.0

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_fork_server_that_is_lost_is_started_again(
    serve: Serve, fake: ModuleType, number: signal.Signals
) -> None:
    """A stopped one is lost when the next worker is wanted of it."""

    async def scenario() -> None:
        async with serve(fork_server=fork_server(), step_s=0.02) as engine:
            server = child()
            answer = asyncio.create_task(engine.generate(ASK))
            await engine.until(lambda state: state.requests_running == 1)
            os.kill(server.pid, number)
            if number == signal.SIGSTOP:
                await engine.admin.InjectFault(KILL)
            assert (await answer).token_ids == expected(fake)
            assert (await answer).finished.resumes == 1
            assert child() != server

    asyncio.run(scenario())


def test_a_fork_server_killed_while_it_imports_is_started_again(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(fork_server=fork_server(0.5), ready=False) as engine:
            server = await until_child()
            # In the place of the worker, which does not exist yet.
            assert (await engine.admin.InjectFault(KILL)).worker_pid == server.pid
            await engine.until(lambda state: state.ready)
            assert child() != server
            assert (await engine.generate(ASK)).finished.reason == pb.FINISH_REASON_LENGTH

    asyncio.run(scenario())


def test_an_engine_ends_while_its_fork_server_imports(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(fork_server=fork_server(60.0), ready=False):
            server = await until_child()
        assert not server.is_running()

    asyncio.run(scenario())


def test_the_status_of_a_forked_worker_arrives(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serve(fork_server=fork_server(), ready=False, exit_code=7) as engine:
            await engine.until(lambda state: state.worker_restarts > 1)

    asyncio.run(scenario())
    assert {each.status for each in caplog.records if each.message == "worker ended"} == {7}


def test_the_fork_server_builds_the_vocabulary_after_the_first_grammar(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once for each fork server, and for none without a grammar."""
    request = pb.GenerateRequest()
    request.CopyFrom(ASK)
    request.grammar.regex = "a+"
    errors: list[str] = []

    async def until_built(count: int) -> None:
        async with asyncio.timeout(60):
            while "".join(errors).count("vocabulary of pkg://") < count:
                errors.append(capfd.readouterr().err)
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with serve(fork_server=fork_server()) as engine:
            await engine.generate(ASK)
            await engine.generate(request)
            await until_built(1)
            await engine.generate(request)

            server = child()
            server.kill()
            await engine.until(lambda state: state.worker_restarts == 1 and state.ready)
            await until_built(2)

    asyncio.run(scenario())
    built = [line for line in "".join(errors).splitlines() if line.startswith("vocabulary")]
    assert len(built) == 2
    assert built[0].endswith("tokens")
