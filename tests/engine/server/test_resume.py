"""The worker dies, wedges or talks nonsense; clients see a pause and nothing else."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import msgspec
import psutil
import pytest

from ullage.admin.v1 import admin_pb2
from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.protocol.errors import MEMORY_SHORT
from ullage_engine.server.app import AppError
from ullage_engine.server.health import RestartPolicy
from ullage_engine.server.supervisor import GaveUpError
from ullage_engine.server.worker_process import EndpointError

Serve = Callable[..., AbstractAsyncContextManager[Any]]

KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
EAGER = RestartPolicy(first_backoff_s=0.05, step_deadline_s=1.0, max_failures=3)


def ask(*prompt: int, max_tokens: int = 60) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt or (1, 2, 3)),
        sampling=pb.SamplingParams(seed=9),
        stop=pb.StopConditions(max_tokens=max_tokens),
        output=pb.OutputOptions(return_token_ids=True),
    )


def expected(fake: ModuleType, num_output: int = 60, num_prompt: int = 3) -> list[int]:
    return [fake.token_at(place, 9) for place in range(num_prompt, num_prompt + num_output)]


async def started(engine: Any, count: int) -> None:
    await engine.until(lambda state: state.requests_running == count)


def test_streams_survive_a_killed_worker(serve: Serve, fake: ModuleType, run_dir: Path) -> None:
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(step_s=0.02, trace=str(trace)) as engine:
            answers = [asyncio.create_task(engine.generate(ask())) for _ in range(3)]
            await started(engine, 3)
            before = (await engine.admin.InjectFault(KILL)).worker_pid
            await engine.until(lambda state: not state.ready)
            await started(engine, 3)
            for answer in await asyncio.gather(*answers):
                assert answer.token_ids == expected(fake)
                assert answer.finished.resumes == 1
                assert answer.finished.reason == pb.FINISH_REASON_LENGTH
            after = (await engine.admin.InjectFault(KILL)).worker_pid
            assert before != after
            with pytest.raises(ProcessLookupError):
                os.kill(before, 0)

    asyncio.run(scenario())
    submits = [line.split()[2] for line in trace.read_text().splitlines() if "submit" in line]
    assert submits == ["False"] * 3 + ["True"] * 3


def test_a_stream_survives_many_deaths(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, policy=EAGER) as engine:
            seen: list[int] = []
            kills = 0
            async for response in engine.inference.Generate(ask(max_tokens=200)):
                seen += response.delta.token_ids
                if len(seen) // 12 > kills and kills < 4:
                    kills += 1
                    await engine.admin.InjectFault(KILL)
            assert seen == expected(fake, 200)
            assert response.finished.resumes == kills == 4

    asyncio.run(scenario())


def standby_of(config: EngineConfig) -> EngineConfig:
    server = msgspec.structs.replace(config.server, standby_worker=True)
    return msgspec.structs.replace(config, server=server)


async def until_one_stands_by(but: int = 0) -> int:
    """Returns the process id of a worker that waits for its turn, and is not `but`."""
    async with asyncio.timeout(60):
        while True:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if child.pid != but and "--standby" in child.cmdline():
                        return int(child.pid)
            await asyncio.sleep(0.01)


def restarted(config: EngineConfig) -> set[bool]:
    """Returns whether workers of an engine were started as those that others went before."""
    lines = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            lines.append(child.cmdline())
    own = [line for line in lines if any(config.server.run_dir in part for part in line)]
    return {"--restarted" in line for line in own}


def test_a_worker_that_stands_by_takes_over(
    serve: Serve, fake: ModuleType, config: EngineConfig
) -> None:
    async def scenario() -> None:
        async with serve(config=standby_of(config), step_s=0.02) as engine:
            standby = await until_one_stands_by()
            assert restarted(config) == {False, True}
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            await engine.admin.InjectFault(KILL)
            assert (await answer).token_ids == expected(fake)
            assert (await answer).finished.resumes == 1
            assert restarted(config) == {True}
            assert (await engine.admin.InjectFault(KILL)).worker_pid == standby

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hung"])
def test_a_worker_that_stands_by_and_is_lost_is_replaced(
    serve: Serve, fake: ModuleType, config: EngineConfig, hangs: bool
) -> None:
    policy = RestartPolicy(max_backoff_s=0.1, standby_import_s=0.1 if hangs else 60.0)

    async def scenario() -> None:
        options = {"standby_hangs": hangs, "step_s": 0.02}
        async with serve(config=standby_of(config), policy=policy, **options) as engine:
            standby = await until_one_stands_by()
            if not hangs:
                os.kill(standby, signal.SIGKILL)
            await until_one_stands_by(but=standby)
            assert not psutil.pid_exists(standby)
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            await engine.admin.InjectFault(KILL)
            assert (await answer).token_ids == expected(fake)

    asyncio.run(scenario())


def test_requests_sent_during_a_restart_wait(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(load_s=0.5) as engine:
            await engine.admin.InjectFault(KILL)
            await engine.until(lambda state: not state.ready)
            answer = await engine.generate(ask())
            assert answer.token_ids == expected(fake)
            assert answer.finished.resumes == 0

    asyncio.run(scenario())


def test_health_falls_at_a_fault_and_recovers(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            assert (await engine.state()).health == 1.0
            await engine.admin.InjectFault(KILL)
            await engine.until(lambda state: not state.ready)
            fallen = (await engine.state()).health
            assert 0.4 < fallen < 0.6
            await engine.until(lambda state: state.ready and state.health > fallen)

    asyncio.run(scenario())


@pytest.mark.parametrize("script", ["WEDGES_ONCE", "NONSENSE_ONCE"])
def test_a_stuck_or_senseless_worker_is_replaced(
    serve: Serve, fake: ModuleType, script: str
) -> None:
    async def scenario() -> None:
        async with serve(policy=EAGER) as engine:
            answer = await engine.generate(ask(fake.Script[script], 2, 3))
            assert answer.token_ids == expected(fake)
            assert answer.finished.resumes == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_stopped_worker_is_replaced(serve: Serve, fake: ModuleType, is_busy: bool) -> None:
    """With the limits of a real engine; the server and its streams stay."""

    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            pid = (await engine.admin.InjectFault(_oom())).worker_pid
            answer = asyncio.create_task(engine.generate(ask()))
            if is_busy:
                await started(engine, 1)
            else:
                await answer
            os.kill(pid, signal.SIGSTOP)
            await engine.until(lambda state: not state.ready)
            await engine.until(lambda state: state.ready)
            assert (await answer).token_ids == expected(fake)
            assert (await answer).finished.resumes == is_busy
            assert (await engine.generate(ask())).token_ids == expected(fake)

    asyncio.run(scenario())


def test_an_idle_worker_is_not_stuck(serve: Serve, fake: ModuleType) -> None:
    policy = RestartPolicy(step_deadline_s=1.0, min_suspect_s=1.0)

    async def scenario() -> None:
        async with serve(policy=policy) as engine:
            ticks = 0
            async for push in engine.headroom.WatchHeadroom(headroom_pb2.WatchHeadroomRequest()):
                ticks += 1
                assert push.headroom.ready
                if ticks == 3:  # heartbeats: two seconds of silence
                    break
            answer = await engine.generate(ask())
            assert answer.finished.resumes == 0

    asyncio.run(scenario())


def test_a_request_that_kills_every_worker_is_given_up(serve: Serve, fake: ModuleType) -> None:
    policy = RestartPolicy(first_backoff_s=0.01, max_stalled_resumes=1, max_failures=20)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(fake.Script.KILLS_WORKER))
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "WORKER_LOST")
            assert (await engine.generate(ask())).token_ids == expected(fake)

    asyncio.run(scenario())


def test_a_request_whose_workers_lack_memory_that_others_hold_may_be_sent_again(
    serve: Serve, fake: ModuleType
) -> None:
    policy = RestartPolicy(first_backoff_s=0.01, max_stalled_resumes=1, max_failures=20)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, ends_with=MEMORY_SHORT) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(fake.Script.KILLS_WORKER))
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "MEMORY_SHORT")
            assert error.retry_after_s
            assert (await engine.generate(ask())).token_ids == expected(fake)

    asyncio.run(scenario())


def test_requests_beside_one_that_kills_every_worker_are_not_blamed(
    serve: Serve, fake: ModuleType, run_dir: Path
) -> None:
    """It kills before any of them has a token, so all of them look alike until each runs alone."""
    trace = run_dir / "trace"
    policy = RestartPolicy(first_backoff_s=0.01)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, trace=str(trace)) as engine:
            culprit = ask(fake.Script.KILLS_WORKER)
            prompts = [ask(), culprit, ask(), ask()]
            answers = await asyncio.gather(
                *(engine.generate(prompt) for prompt in prompts), return_exceptions=True
            )
            failed = answers.pop(1)
            assert from_rpc_error(failed).reason == "WORKER_LOST"
            for answer in answers:
                assert answer.token_ids == expected(fake)
            assert (await engine.generate(ask())).token_ids == expected(fake)

    asyncio.run(scenario())


def test_oom_fault_reaches_the_worker(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            request = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM, after_steps=2)
            pid = (await engine.admin.InjectFault(request)).worker_pid
            os.kill(pid, 0)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.admin.InjectFault(admin_pb2.InjectFaultRequest())
            assert from_rpc_error(raised.value).metadata == {"field": "kind"}

    asyncio.run(scenario())


def test_faults_need_permission(serve: Serve, config: EngineConfig) -> None:
    server = msgspec.structs.replace(config.server, allow_fault_injection=False)

    async def scenario() -> None:
        async with serve(msgspec.structs.replace(config, server=server)) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.admin.InjectFault(KILL)
            assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_failed": "memory.device_bytes is too small"}, "memory.device_bytes is too small"),
        ({"exit_code": 2}, "the worker could not start"),
    ],
)
def test_a_worker_that_cannot_serve_ends_the_server(
    serve: Serve, options: dict[str, object], message: str
) -> None:
    async def scenario() -> None:
        async with serve(ready=False, **options) as engine:
            await engine.running

    with pytest.raises(AppError, match=message):
        asyncio.run(scenario())


def test_workers_that_keep_dying_end_the_server(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve(ready=False, policy=EAGER, exit_code=1) as engine:
            await engine.running

    with pytest.raises(GaveUpError, match="4 workers in a row"):
        asyncio.run(scenario())


def test_what_killed_workers_left_is_cleared_before_the_next(serve: Serve, run_dir: Path) -> None:
    left = [run_dir / "worker-1.ipc-1", run_dir / "worker-9.ipc.store"]

    async def scenario() -> None:
        for path in left:
            path.touch()
        async with serve(step_s=0.05) as engine:
            assert not any(path.exists() for path in left)
            left[0].touch()
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            await engine.admin.InjectFault(KILL)
            assert (await answer).finished.resumes == 1
            assert not left[0].exists()
            assert (run_dir / "worker-2.ipc").exists()

    asyncio.run(scenario())


def test_starts_that_nobody_foresaw_to_fail_are_tried_again_and_told(serve: Serve) -> None:
    said = "rank 1: RuntimeError: no kernel image"

    async def scenario() -> None:
        options = {"start_failed": said, "may_retry": True}
        async with serve(ready=False, policy=EAGER, **options) as engine:
            await engine.running

    with pytest.raises(GaveUpError, match=rf"4 workers in a row ended early \({said}\)"):
        asyncio.run(scenario())


def test_a_request_that_no_worker_took_is_sent_again_as_new(
    serve: Serve, fake: ModuleType, run_dir: Path
) -> None:
    trace = run_dir / "trace"
    policy = RestartPolicy(first_backoff_s=0.01, max_stalled_resumes=0)

    async def scenario() -> None:
        async with serve(policy=policy, trace=str(trace)) as engine:
            answer = await engine.generate(ask(fake.Script.LOST_TWICE, 2, 3))
            assert answer.token_ids == expected(fake)
            assert answer.finished.resumes == 0

    asyncio.run(scenario())
    submits = [line.split()[2] for line in trace.read_text().splitlines() if "submit" in line]
    assert submits == ["False"] * 3


def test_a_worker_that_nothing_can_be_sent_to_is_replaced(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            engine._app._supervisor._worker.link.post(object())
            assert (await answer).token_ids == expected(fake)
            assert (await answer).finished.resumes == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["no socket", "no program"])
def test_open_requests_are_answered_when_no_worker_can_be_started(
    serve: Serve, run_dir: Path, damage: str
) -> None:
    program = run_dir / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)

    async def scenario() -> None:
        async with serve(program=str(program), step_s=0.05) as engine:
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            if damage == "no socket":
                (run_dir / "worker-2.ipc").mkdir()
            else:
                program.unlink()
            await engine.admin.InjectFault(KILL)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await answer
            assert from_rpc_error(raised.value).reason == "WORKER_LOST"
            await engine.running

    error, message = {
        "no socket": (EndpointError, "server.run_dir: cannot make"),
        "no program": (GaveUpError, "no worker can be kept running: FileNotFoundError"),
    }[damage]
    with pytest.raises(error, match=message):
        asyncio.run(scenario())


def test_a_missing_model_file_ends_the_server(serve: Serve, config: EngineConfig) -> None:
    model = msgspec.structs.replace(config.model, source="file:///nowhere/model.gguf")

    async def scenario() -> None:
        async with serve(msgspec.structs.replace(config, model=model), ready=False) as engine:
            await engine.running

    with pytest.raises(AppError, match=r"model\.source 'file:///nowhere/model\.gguf'"):
        asyncio.run(scenario())


def test_a_killed_worker_from_outside_is_no_different(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            pid = (await engine.admin.InjectFault(_oom())).worker_pid
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            os.kill(pid, signal.SIGSEGV)
            assert (await answer).token_ids == expected(fake)

    asyncio.run(scenario())


def _oom() -> admin_pb2.InjectFaultRequest:
    return admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM)
