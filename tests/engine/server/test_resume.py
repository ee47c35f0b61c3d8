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
from ullage_common.process.memory import OomKills
from ullage_common.wire.errors import from_rpc_error
from ullage_engine.protocol.errors import HOST_SHORT, MEMORY_SHORT, OUT_OF_MEMORY
from ullage_engine.server.app import AppError
from ullage_engine.server.journal import JournalEntry
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.server_link import EndpointError
from ullage_engine.server.supervisor import GaveUpError

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


@pytest.mark.parametrize("later", ["", "91bc"])
def test_a_worker_that_computes_otherwise_marks_what_it_goes_on_with(
    serve: Serve, fake: ModuleType, later: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02, weights="3f1a", later_weights=later) as engine:
            before = await engine.state()
            assert before.fingerprint
            assert before.fingerprint_facts["weights"] == "3f1a"
            responses: list[pb.GenerateResponse] = []
            seen: list[int] = []
            async for response in engine.inference.Generate(ask()):
                # An answer without a token yet would be the new worker's from its beginning.
                is_first = not seen and bool(response.delta.token_ids)
                responses.append(response)
                seen += response.delta.token_ids
                if is_first:
                    await engine.admin.InjectFault(KILL)
            assert seen == expected(fake)
            assert responses[0].accepted.fingerprint == before.fingerprint
            after = await engine.state()
            assert (after.fingerprint != before.fingerprint) == bool(later)
            assert responses[-1].finished.resumed_inexact == bool(later)
            described = await engine.inference.GetModel(pb.GetModelRequest())
            assert described.fingerprint == after.fingerprint
            assert dict(described.fingerprint_facts) == dict(after.fingerprint_facts)
            # All of the next answer is the new worker's.
            assert not (await engine.generate(ask(max_tokens=2))).finished.resumed_inexact

    asyncio.run(scenario())
    reasons = [record.reason for record in caplog.records if "fingerprint" in record.message]
    expected_reason = "weights differ: 3f1a (before), 91bc (now)"
    assert reasons == ([expected_reason] if later else [])


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


def test_a_worker_that_stands_by_takes_over(
    serve: Serve, fake: ModuleType, config: EngineConfig
) -> None:
    async def scenario() -> None:
        async with serve(config=standby_of(config), step_s=0.02) as engine:
            standby = await until_one_stands_by()
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            await engine.admin.InjectFault(KILL)
            assert (await answer).token_ids == expected(fake)
            assert (await answer).finished.resumes == 1
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
    policy = RestartPolicy(first_backoff_s=0.01, max_deaths=2, max_failures=20)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(fake.Script.KILLS_WORKER))
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "WORKER_LOST")
            assert (await engine.generate(ask())).token_ids == expected(fake)

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [MEMORY_SHORT, HOST_SHORT])
def test_a_request_whose_workers_lack_memory_that_others_hold_may_be_sent_again(
    serve: Serve, fake: ModuleType, status: int
) -> None:
    policy = RestartPolicy(first_backoff_s=0.01, max_deaths=2, max_failures=20)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, ends_with=status) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(fake.Script.KILLS_WORKER))
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "MEMORY_SHORT")
            assert error.retry_after_s
            assert (await engine.generate(ask())).token_ids == expected(fake)
            # Steps that lacked memory are in the worker's own reports.
            assert num_ooms(engine) == (policy.max_deaths if status == HOST_SHORT else 0)

    asyncio.run(scenario())


def test_a_step_that_ran_out_of_memory_and_ended_its_worker_is_counted_once(
    serve: Serve, fake: ModuleType
) -> None:
    policy = RestartPolicy(first_backoff_s=0.01)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, ends_with=OUT_OF_MEMORY) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(fake.Script.KILLS_WORKER))
            assert from_rpc_error(raised.value).reason == "WORKER_LOST"
            assert num_ooms(engine) == policy.max_deaths
            # Only ranks that compute together have collectives.
            assert engine._app._metrics.collective_errors._value.get() == 0

    asyncio.run(scenario())


def num_ooms(engine: Any) -> float:
    registry = engine._app._metrics.registry
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "ullage_oom_events_total"
    )


def test_requests_are_not_blamed_for_workers_that_somebody_else_kills(
    serve: Serve, fake: ModuleType, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has a token yet, and each worker gets both at once."""
    monkeypatch.setattr(OomKills, "is_counted", True)
    trace = run_dir / "trace"
    policy = RestartPolicy(first_backoff_s=0.01, max_deaths=2, max_failures=20)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, trace=str(trace)) as engine:
            silent = [asyncio.create_task(engine.generate(ask(fake.Script.SILENT))) for _ in "ab"]
            for num_deaths in range(2 * policy.max_deaths):
                await engine.until(lambda _, n=num_deaths: len(submissions(trace)) == 2 * (n + 1))
                await engine.admin.InjectFault(KILL)
            await engine.until(lambda state: state.worker_restarts == 2 * policy.max_deaths)
            assert not any(each.done() for each in silent)
            for task in silent:
                task.cancel()
            await asyncio.gather(*silent, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("script", ["KILLS_WORKER", "KILLS_AT_DECODE"])
def test_requests_beside_one_that_kills_every_worker_are_not_blamed(
    serve: Serve, fake: ModuleType, run_dir: Path, script: str
) -> None:
    """It kills before any of them is decoded, so all of them look alike until each runs alone.

    The token that a resumed prompt gives is no sign that the worker survives the request.
    """
    trace = run_dir / "trace"
    policy = RestartPolicy(first_backoff_s=0.01)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, trace=str(trace)) as engine:
            culprit = ask(fake.Script[script])
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


def submissions(trace: Path) -> list[str]:
    """The first tokens of the requests that each worker was sent, in their order."""
    if not trace.exists():  # no worker was sent any yet
        return []
    lines = [line for line in trace.read_text().splitlines() if "submit" in line]
    return [line.partition("[")[2].rstrip("]").split(",")[0] for line in lines]


@pytest.mark.parametrize("others", [0, 3])
def test_a_request_that_kills_workers_before_they_admit_it_ends_by_name(
    serve: Serve, fake: ModuleType, config: EngineConfig, run_dir: Path, others: int
) -> None:
    """The engine goes on, and nobody else is blamed, those sent behind it least of all."""
    trace = run_dir / "trace"
    limits = msgspec.structs.replace(config.limits, request_timeout=120.0)
    config = msgspec.structs.replace(config, limits=limits)
    policy = RestartPolicy(first_backoff_s=0.01)
    culprit = ask(fake.Script.KILLS_BEFORE_ADMISSION)

    async def scenario() -> None:
        async with serve(config, policy, step_s=0.02, trace=str(trace)) as engine:
            before = [asyncio.create_task(engine.generate(ask())) for _ in range(others)]
            await started(engine, others)
            failing = asyncio.create_task(engine.generate(culprit))
            after = [asyncio.create_task(engine.generate(ask())) for _ in range(others)]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await failing
            assert from_rpc_error(raised.value).reason == "WORKER_LOST"
            for answer in await asyncio.gather(*before, *after):
                assert answer.token_ids == expected(fake)
            assert (await engine.state()).worker_restarts == policy.max_deaths

    asyncio.run(scenario())
    sent = submissions(trace)
    # In its first repeat it is what the next worker gets first, and alone.
    first = sent.index("17")
    assert sent.count("17") == policy.max_deaths
    repeats = [place for place, name in enumerate(sent) if name == "17"][1:]
    assert repeats[-1] - repeats[0] == len(repeats) - 1, sent
    assert first < repeats[0]


def test_many_innocent_requests_do_not_wait_long_for_one_another(
    serve: Serve, fake: ModuleType
) -> None:
    """The worker dies with requests that never get a token: they are tried alone for a while, and
    the others are not kept for ever."""
    policy = RestartPolicy(first_backoff_s=0.01, trial_s=0.5)

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02) as engine:
            silent = [asyncio.create_task(engine.generate(ask(fake.Script.SILENT))) for _ in "ab"]
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            await engine.admin.InjectFault(KILL)
            assert (await answer).token_ids == expected(fake)
            for task in silent:
                task.cancel()
            await asyncio.gather(*silent, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["hang", "gone"])
def test_a_third_trial_in_which_nothing_happens_ends_and_others_go_on(
    serve: Serve, fake: ModuleType, run_dir: Path, end: str
) -> None:
    """A request that two workers died of runs alone until it has a token. A worker that never gives
    it one hangs, and is the last that it gets; a client that goes ends the trial, too."""
    trace = run_dir / "trace"
    is_left = end == "gone"
    policy = RestartPolicy(first_backoff_s=0.01, step_deadline_s=600.0 if is_left else 1.0)
    silent = fake.Script.LOST_TWICE_AND_SILENT

    async def scenario() -> None:
        async with serve(policy=policy, step_s=0.02, trace=str(trace)) as engine:
            failing = asyncio.create_task(engine.generate(ask(silent, 2, 3)))
            await engine.until(lambda state: state.worker_restarts == 2 and state.ready)
            later = [asyncio.create_task(engine.generate(ask())) for _ in range(2)]
            if is_left:
                await engine.until(
                    lambda _: submissions(trace).count(str(silent.value)) == policy.max_deaths
                )
                failing.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await failing
                assert from_rpc_error(raised.value).reason == "WORKER_LOST"
            for answer in await asyncio.gather(*later):
                assert answer.token_ids == expected(fake)
            assert (await engine.state()).worker_restarts == (2 if is_left else 3)

    asyncio.run(scenario())
    assert submissions(trace) == [str(silent.value)] * 3 + ["1", "1"]


def test_a_worker_that_computes_without_an_end_is_replaced_long_before_the_deadline(
    serve: Serve, fake: ModuleType, config: EngineConfig
) -> None:
    policy = RestartPolicy(step_deadline_s=600.0, min_busy_s=0.5, slow_start_steps=0)
    limits = msgspec.structs.replace(config.limits, request_timeout=120.0)

    async def scenario() -> None:
        own = msgspec.structs.replace(config, limits=limits)
        async with serve(own, policy, step_s=0.02, longest_step_s=0.02) as engine:
            whole = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            answer = await engine.generate(ask(fake.Script.SPINS_ONCE, 2, 3))
            assert answer.token_ids == expected(fake)
            assert answer.finished.resumes == 1
            assert (await whole).token_ids == expected(fake)
            assert (await engine.state()).worker_restarts == 1

    asyncio.run(scenario())


class Break(Exception):
    """An error of the server's own."""


def broken_once(real: Callable[..., Any], is_hit: Callable[..., bool]) -> Callable[..., Any]:
    """The same function, which fails the first time that its arguments are hit."""
    hits: list[bool] = []

    def call(*arguments: Any) -> Any:
        if not hits and is_hit(*arguments):
            hits.append(True)
            raise Break("a mistake in the server")
        return real(*arguments)

    return call


def test_an_error_of_the_server_over_a_token_ends_that_request_alone(
    serve: Serve, fake: ModuleType, run_dir: Path
) -> None:
    """Others keep every token of that step, and the worker lives."""
    trace = run_dir / "trace"

    async def scenario() -> None:
        async with serve(step_s=0.02, trace=str(trace)) as engine:
            metrics = engine._app._metrics
            metrics.tokens = broken_once(
                metrics.tokens,
                lambda entry, _: (len(entry.output_ids), entry.job.request.token_ids[0]) == (5, 2),
            )
            pid = (await engine.admin.InjectFault(_oom())).worker_pid
            prompts = [ask(), ask(2, 2, 3), ask(3, 2, 3)]
            answers = await asyncio.gather(
                *(engine.generate(prompt) for prompt in prompts), return_exceptions=True
            )
            failed = from_rpc_error(answers.pop(1))
            assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            for answer in answers:
                assert answer.token_ids == expected(fake)
                assert answer.finished.resumes == 0
            assert (await engine.state()).worker_restarts == 0
            assert (await engine.admin.InjectFault(_oom())).worker_pid == pid
            assert (await engine.state()).health < 1.0

    asyncio.run(scenario())
    assert sum("cancel" in line for line in trace.read_text().splitlines()) == 1


@pytest.mark.parametrize("method", ["admitted", "rejected", "request_failed"])
def test_an_error_of_the_server_over_a_request_ends_that_request(
    serve: Serve, fake: ModuleType, method: str
) -> None:
    first = {
        "admitted": 1,
        "rejected": fake.Script.FITS_NOT_NOW,
        "request_failed": fake.Script.FAILS,
    }[method]

    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            dispatcher = engine._app._supervisor._dispatcher
            whole = asyncio.create_task(engine.generate(ask(5)))
            await started(engine, 1)
            setattr(dispatcher, method, broken_once(getattr(dispatcher, method), lambda _: True))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(first, 2, 3))
            assert from_rpc_error(raised.value).reason == "INTERNAL"
            assert (await whole).finished.resumes == 0
            assert (await engine.state()).worker_restarts == 0

    asyncio.run(scenario())


def test_an_error_of_the_server_over_a_report_costs_nothing(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            metrics = engine._app._metrics
            metrics.worker_state = broken_once(metrics.worker_state, lambda _: True)
            assert (await engine.generate(ask())).token_ids == expected(fake)
            assert (await engine.state()).worker_restarts == 0
            await engine.until(lambda state: state.requests_running == 0)

    asyncio.run(scenario())


def test_an_error_of_the_server_over_a_submission_ends_that_request(
    serve: Serve, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = JournalEntry.engine_request
    is_second = lambda entry: entry.job.request.token_ids[0] == 2  # noqa: E731
    monkeypatch.setattr(JournalEntry, "engine_request", broken_once(real, is_second))

    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            whole = asyncio.create_task(engine.generate(ask()))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.generate(ask(2, 2, 3))
            assert from_rpc_error(raised.value).reason == "INTERNAL"
            assert (await whole).token_ids == expected(fake)
            assert (await engine.generate(ask(2, 2, 3))).token_ids == expected(fake)

    asyncio.run(scenario())


def test_a_worker_whose_start_the_server_fails_over_is_replaced(
    serve: Serve, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineMetrics.worker_ready
    monkeypatch.setattr(EngineMetrics, "worker_ready", broken_once(real, lambda *_: True))

    async def scenario() -> None:
        async with serve(step_s=0.02) as engine:
            assert (await engine.generate(ask())).token_ids == expected(fake)
            assert (await engine.state()).worker_restarts == 1

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


def test_a_worker_that_computes_without_end_is_replaced(serve: Serve, fake: ModuleType) -> None:
    request = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_BUSY_HANG)

    async def scenario() -> None:
        async with serve(step_s=0.02, policy=EAGER) as engine:
            answer = asyncio.create_task(engine.generate(ask()))
            await started(engine, 1)
            pid = (await engine.admin.InjectFault(request)).worker_pid
            assert (await answer).token_ids == expected(fake)
            assert (await answer).finished.resumes == 1
            assert (await engine.admin.InjectFault(KILL)).worker_pid != pid

    asyncio.run(scenario())


def test_faults_need_permission(serve: Serve, config: EngineConfig) -> None:
    server = msgspec.structs.replace(config.server, allow_fault_injection=False)

    async def scenario() -> None:
        async with serve(msgspec.structs.replace(config, server=server)) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await engine.admin.InjectFault(KILL)
            assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "spec.allowFaultInjection: true" in (raised.value.details() or "")

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
    policy = RestartPolicy(first_backoff_s=0.01)

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
        "no socket": (EndpointError, "server.run_dir: cannot create"),
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
