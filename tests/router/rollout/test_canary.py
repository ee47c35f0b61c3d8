"""A canary beside stable engines: exact weights, sticky sessions, retries, counts."""

import asyncio
import contextlib
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ullage_testing.fake_engine import Script

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.policy.facts import Side
from ullage_router.rollout.canary import SideDraw
from ullage_router.rollout.outcomes import BOUNDS_S, DurationHistogram

Write = Callable[..., None]


def test_draws_are_exact_and_without_period() -> None:
    for weight in (1, 10, 33, 60, 99):
        split = SideDraw(0.123)
        drawn = [split.draw(weight, "", "r") is Side.CANARY for _ in range(10_000)]
        assert abs(sum(drawn) - 100 * weight) <= 3
        for start in range(0, 10_000, 1000):
            assert abs(sum(drawn[start : start + 1000]) - 10 * weight) <= 4
        for period in (2, 3, 5, 10):  # whoever sends every n-th request gets the same share
            every = drawn[::period]
            assert abs(sum(every) / len(every) - weight / 100) < 0.02


@pytest.mark.parametrize(("weight", "side"), [(0, Side.STABLE), (100, Side.CANARY)])
def test_nothing_and_all(weight, side):
    split = SideDraw(0.5)
    assert {split.draw(weight, session, "r") for session in ("", "a", "b") * 50} == {side}


def test_sessions_stick_and_never_leave_a_growing_canary():
    split = SideDraw(0.5)
    sessions = [f"session-{n}" for n in range(5000)]

    def canaries(weight: int, salt: str = "r") -> set[str]:
        return {s for s in sessions if split.draw(weight, s, salt) is Side.CANARY}

    assert canaries(10) == canaries(10)
    assert canaries(10) < canaries(30) < canaries(60)
    assert abs(len(canaries(30)) - 1500) < 150
    assert canaries(10, "r") != canaries(10, "other"), "not always the same people"


def test_times_fall_into_their_buckets():
    times = DurationHistogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[5], 1e9):
        times.add(seconds)
    assert times.counts[0] == 2
    assert times.counts[5] == times.counts[-1] == 1
    assert sum(times.counts) == 4


@pytest.fixture
def pair(start_service, tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Any]:
    return running(start_service, tmp_path)


@contextlib.asynccontextmanager
async def running(start_service, tmp_path: Path) -> AsyncIterator[tuple[Any, Any, Write]]:
    """A router with one stable engine, another engine, and what writes the rollout's file."""
    folder = tmp_path / "config"
    folder.mkdir()
    file = folder / "rollout.yaml"
    file.write_text(json.dumps({"revision": "old"}))
    async with start_service(rollout_file=str(file)) as service:
        canary = type(service.engine)("canary-0", "single", 100, 2000)
        canary.script.words = ("Canary",)
        await canary.start()

        def write(weight: int, revision: str = "new", step: int = 0, raw: str = "") -> None:
            pools = [{"name": "single", "targets": [canary.address]}]
            section = {"revision": revision, "weight": weight, "step": step, "pools": pools}
            file.write_text(raw or json.dumps({"revision": "old", "canary": section}))

        yield service, canary, write
        await canary.stop()


def played(test: Any) -> Any:
    """A coroutine as a test."""

    @functools.wraps(test)
    def play(pair: Any) -> None:
        asyncio.run(test(pair))

    return play


async def shift(service: Any, write: Write, weight: int, **more: Any) -> None:
    """Writes the file and waits until the router has taken it up."""
    write(weight, **more)
    trial = f"{more.get('revision', 'new')}/{more.get('step', 0)}" if weight else ""
    await service.until(
        lambda: (
            service.router.service.rollout.outcomes.trial == trial
            and service.router.service.engines.is_ready_on(Side.CANARY)
        ),
        20,
    )


async def ask(service: Any, count: int, **more: Any) -> Counter[str]:
    answers = [await service.chat(**more) for _ in range(count)]
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return Counter(answer.headers["x-ullage-revision"] for answer in answers)


async def trial(service: Any) -> dict[str, Any]:
    return (await service.stats())["rollout"]


@played
async def test_without_a_canary_answers_name_the_stable_revision(pair):
    async with pair as (service, canary, _):
        assert await ask(service, 3) == {"old": 3}
        assert not canary.requests
        metrics = (await service.monitoring.get("/metrics")).text
        assert 'revision_requests_total{code="200",side="stable"} 3.0' in metrics
        assert "ullage_router_trial{" not in metrics


@played
async def test_the_canary_gets_its_share_and_everything_is_counted(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 30)
        found = await ask(service, 60)
        assert abs(found["new"] - 18) <= 1
        assert len(canary.requests) == found["new"]
        told = await trial(service)
        assert (told["stable_revision"], told["canary_revision"], told["weight"]) == (
            "old",
            "new",
            30,
        )
        for side, revision in (("stable", "old"), ("canary", "new")):
            counts = told[side]
            assert counts["succeeded"] == found[revision]
            assert sum(counts["ttft_counts"]) == sum(counts["e2e_counts"]) == found[revision]
            assert counts["failed"] == counts["restarts"] == 0
        metrics = (await service.monitoring.get("/metrics")).text
        assert f'side="canary",trial="new/0",what="succeeded"}} {found["new"]}.0' in metrics
        assert f'side="canary"}} {found["new"]}.0' in metrics


@played
async def test_counts_begin_anew_with_every_step(pair):
    async with pair as (service, _, write):
        await shift(service, write, 100)
        await ask(service, 2)
        assert (await trial(service))["canary"]["succeeded"] == 2
        write(99)
        await service.until(lambda: service.router.service.rollout.canary.weight == 99, 20)
        assert (await trial(service))["canary"]["succeeded"] == 2, "the pool may have scaled"
        await shift(service, write, 100, step=1)
        assert (await trial(service))["canary"]["succeeded"] == 0


@played
async def test_a_session_stays_on_its_side(pair):
    async with pair as (service, _, write):
        await shift(service, write, 50)
        for name in range(12):
            found = await ask(service, 3, session_id=f"s{name}")
            assert len(found) == 1, f"s{name} moved"


@played
async def test_what_fails_on_the_canary_is_served_by_stable_engines(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 100)
        canary.script.fail_after = 0
        assert await ask(service, 8) == {"old": 8}
        told = await trial(service)
        assert told["canary"]["failed"] == len(canary.requests) > 0
        assert told["stable"]["succeeded"] == 8


@played
async def test_refusals_that_stable_engines_do_not_share_count_as_failures(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 100)
        code = grpc.StatusCode.INVALID_ARGUMENT
        canary.script.refuse = ServiceError(code, "INVALID_FIELD", "no")
        assert await ask(service, 2) == {"old": 2}
        assert (await trial(service))["canary"]["failed"] == 2
        service.engine.script.refuse = ServiceError(code, "INVALID_FIELD", "no")
        assert (await service.chat()).status_code == 400
        assert (await trial(service))["canary"]["failed"] == 2, "the request's own fault"


@played
async def test_an_answer_that_stalls_is_a_failure(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 100)
        canary.script.reason = inference_pb2.FINISH_REASON_TIMEOUT
        assert (await service.chat()).status_code == 200
        counts = (await trial(service))["canary"]
        assert (counts["succeeded"], counts["failed"]) == (0, 1)


@played
async def test_a_failure_after_the_first_token_counts(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 100)
        canary.script = Script(words=service.engine.script.words, fail_after=1)
        answer = await service.chat(stream=True)
        assert "error" not in answer.text
        sides = await trial(service)
        assert (sides["canary"]["failed"], sides["stable"]["succeeded"]) == (1, 1)


@played
async def test_a_canary_that_is_not_ready_gets_nothing(pair):
    async with pair as (service, canary, write):
        canary.push(ready=False)
        write(100)
        await service.until(lambda: len(service.router.service.engines.all()) == 2, 20)
        assert await ask(service, 5) == {"old": 5}
        assert not canary.requests


@played
async def test_nobody_waits_for_a_full_canary(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 100)
        canary.push(headroom_bytes=0)
        engines = service.router.service.engines
        await service.until(lambda: any(e.available == 0 for e in engines.all()))
        assert await ask(service, 3) == {"old": 3}
        assert (await trial(service))["canary"]["declined"] == 3


@played
async def test_the_canary_serves_all_while_no_stable_engine_does(pair):
    async with pair as (service, _, write):
        await shift(service, write, 1)
        service.engine.push(ready=False)
        await service.until(lambda: not service.router.service.engines.is_ready_on(Side.STABLE))
        assert await ask(service, 5) == {"new": 5}


@played
async def test_the_canary_of_another_model_gets_its_own_tokens(pair):
    async with pair as (service, canary, write):
        canary.template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        await shift(service, write, 100)
        assert await ask(service, 1) == {"new": 1}
        assert bytes(canary.requests[0].token_ids.ids) != b""
        asked = len(canary.requests[0].token_ids.ids)
        canary.script.fail_after = 0
        assert await ask(service, 1) == {"old": 1}
        assert len(service.engine.requests[0].token_ids.ids) > asked == len("[Hi]")


@played
async def test_a_lost_worker_of_the_canary_is_counted(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 10)
        canary.push(worker_restarts=2)
        rollout = service.router.service.rollout
        await service.until(lambda: rollout.outcomes.falls(Side.CANARY) == 2)
        await canary.restart()
        await service.until(lambda: rollout.outcomes.falls(Side.CANARY) > 2, 20)
        assert rollout.outcomes.falls(Side.STABLE) == 0


@played
async def test_what_fell_before_the_first_step_counts_in_every_step(pair):
    """The router hears of the step only when the canary has fallen and serves again."""
    async with pair as (service, canary, write):
        write(0)
        service_ = service.router.service
        await service.until(lambda: service_.engines.is_ready_on(Side.CANARY), 20)
        canary.push(worker_restarts=1)
        await service.until(lambda: service_.engines.workers_lost(Side.CANARY) == 1)
        for step in (0, 1):
            await shift(service, write, 10, step=step)
            assert (await trial(service))["canary"]["restarts"] == 1
        await shift(service, write, 10, revision="newer")
        told = (await trial(service))["canary"]["restarts"]
        assert told == 1, "the name led to the newer canary's engine before the file said so"
        write(0, raw='{"revision": "old"}')
        await service.until(lambda: len(service_.engines.all()) == 1, 20)
        canary.push(worker_restarts=0)
        await shift(service, write, 10, revision="newest")
        assert (await trial(service))["canary"]["restarts"] == 0


@played
async def test_what_fell_of_a_canary_that_drains_is_not_the_next_ones(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 10)
        outcomes = service.router.service.rollout.outcomes
        canary.push(worker_restarts=1, draining=True)
        await service.until(lambda: outcomes.falls(Side.CANARY) == 1, 20)
        write(10, revision="newer")
        await service.until(lambda: outcomes.falls(Side.CANARY) == 0, 20)


@played
async def test_a_removed_canary_is_forgotten_when_its_requests_have_ended(pair):
    async with pair as (service, canary, write):
        await shift(service, write, 100)
        canary.script.pause = asyncio.Event()
        engines = service.router.service.engines
        running = asyncio.create_task(service.chat())
        await service.until(lambda: canary.active == 1)
        write(0, raw='{"revision": "old"}')
        await service.until(lambda: service.router.service.rollout.canary.weight == 0, 20)
        assert await ask(service, 2) == {"old": 2}
        canary.script.pause.set()
        answer: httpx.Response = await running
        assert answer.status_code == 200
        assert answer.headers["x-ullage-revision"] == "new"
        await service.until(lambda: len(engines.all()) == 1, 20)


@played
async def test_a_broken_file_changes_nothing_and_is_told(pair):
    async with pair as (service, _, write):
        await shift(service, write, 100)
        write(0, raw="canary: {weight: 200}")
        rollout = service.router.service.rollout
        await service.until(lambda: bool(rollout.canary.problem), 20)
        assert await ask(service, 2) == {"new": 2}
        assert "rollout.yaml" in (await trial(service))["problem"]
