"""Engines that fall silent, reports that get lost, and names that stop resolving."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ullage_router.engines import discovery, engines, flow_control
from ullage_router.engines.engine import MOVE_AFTER_S
from ullage_router.engines.flow_control import CHECK_INTERVAL_S
from ullage_router.errors import recovering_engine

if TYPE_CHECKING:
    Service = Any
    StartService = Any

NAMED_POOL = {"single": ["engines.example:9000"]}
PATIENCE_S = 30.0


def engine_of(service: "Service", name: str) -> Any:
    return next(e for e in service.router.service.engines.all() if e.id == name)


def test_a_request_moves_on_from_a_silent_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.script.hold = asyncio.Event()
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: any(engine.requests for engine in service.engines))
            silent, other = sorted(service.engines, key=lambda e: not e.requests)
            other.script.hold = None
            silent.is_mute = True
            answer = await asyncio.wait_for(task, PATIENCE_S)
            assert answer.status_code == 200
            assert answer.headers["x-ullage-engine"] == other.headroom.engine
            await service.until(lambda: len(silent.cancelled) == 1, PATIENCE_S)
            assert (await service.stats())["placement"]["retries"] == 1

    asyncio.run(scenario())


def test_a_silent_engine_is_waited_for_when_it_is_the_only_one(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            engine.script.hold = asyncio.Event()
            early = asyncio.ensure_future(service.complete())
            await service.until(lambda: len(engine.requests) == 1)
            engine.is_mute = True
            await service.until(lambda: service.engine_state("single-0") == "stale", PATIENCE_S)
            late = asyncio.ensure_future(service.complete())
            await service.until(lambda: len(service.router.service.queue) == 1, PATIENCE_S)
            engine.is_mute = False
            engine.script.hold.set()
            engine.push()
            for task in (early, late):
                assert (await asyncio.wait_for(task, PATIENCE_S)).status_code == 200

    asyncio.run(scenario())


def test_silence_after_the_first_token_ends_the_answer_at_the_deadline(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(limits={"request_timeout": 6.0}) as service:
            service.engine.script.pause = asyncio.Event()
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: len(service.engine.requests) == 1)
            service.engine.is_mute = True
            answer = await asyncio.wait_for(task, PATIENCE_S)
            assert answer.status_code == 200
            choice = answer.json()["choices"][0]
            assert choice["text"] == service.engine.script.words[0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "ENGINE_SILENT")

    asyncio.run(scenario())


def test_an_answer_leaves_an_engine_whose_worker_stays_away(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.set_facts(dtype="float32")
                engine.script.pause = asyncio.Event()
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: any(engine.requests for engine in service.engines))
            lost, other = sorted(service.engines, key=lambda e: not e.requests)
            other.script.pause = None
            lost.push(ready=False)

            answer = await asyncio.wait_for(task, PATIENCE_S)
            assert answer.json()["choices"][0]["text"] == "".join(lost.script.words)
            assert answer.headers["x-ullage-resumed-on"] == other.headroom.engine
            assert "x-ullage-resumed-inexact" not in answer.headers
            await service.until(lambda: len(lost.cancelled) == 1, PATIENCE_S)
            text = (await service.monitoring.get("/metrics")).text
            assert 'resumptions_total{cause="recovering",outcome="resumed"} 1.0' in text

            # Its breaker does not hold the death of a worker against the engine.
            lost.push(ready=True)
            breakers = [each["breaker"] for each in (await service.stats())["engines"]]
            assert {each["state"] for each in breakers} == {"closed"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prefill_speed", "backlog_tokens", "moves"),
    [(1000.0, 0, True), (0.1, 0, False), (1000.0, 2000, False)],
)
def test_an_answer_moves_at_once_if_another_engine_is_sooner_than_the_next_worker(
    start_service: "StartService",
    monkeypatch: pytest.MonkeyPatch,
    prefill_speed: float,
    backlog_tokens: int,
    moves: bool,
) -> None:
    monkeypatch.setattr(flow_control, "CHECK_INTERVAL_S", 60.0)
    start_s = 1.0

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.set_facts(dtype="float32")
                engine.script.pause = asyncio.Event()
                engine.push(
                    prefill_tokens_per_second=prefill_speed,
                    prefill_backlog_tokens=backlog_tokens,
                    worker_start_s=start_s,
                )
            known = service.router.service.engines.all
            digest = service.engine.headroom.fingerprint
            await service.until(
                lambda: all(e.numerics.digest == digest and e.prefill_s(1) for e in known())
            )

            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: any(engine.requests for engine in service.engines))
            lost, other = sorted(service.engines, key=lambda e: not e.requests)
            other.script.pause = None
            lost.push(ready=False)
            if not moves:
                await asyncio.sleep(start_s)
                lost.push(ready=True)
                lost.script.pause.set()

            answer = await asyncio.wait_for(task, PATIENCE_S)
            assert answer.json()["choices"][0]["text"] == "".join(lost.script.words)
            resumed_on = answer.headers.get("x-ullage-resumed-on")
            assert resumed_on == (other.headroom.engine if moves else None)

    asyncio.run(scenario())


def test_an_answer_waits_for_a_slow_worker_if_another_engine_is_even_slower(
    start_service: "StartService",
) -> None:
    start_s = MOVE_AFTER_S + 2 * CHECK_INTERVAL_S

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.set_facts(dtype="float32")
                engine.script.pause = asyncio.Event()
                engine.push(prefill_tokens_per_second=0.01, worker_start_s=start_s)
            known = service.router.service.engines.all
            await service.until(lambda: all(e.prefill_s(1) for e in known()))

            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: any(engine.requests for engine in service.engines))
            lost, other = sorted(service.engines, key=lambda e: not e.requests)
            lost.push(ready=False)
            await asyncio.sleep(MOVE_AFTER_S + CHECK_INTERVAL_S)
            assert not other.requests
            lost.push(ready=True)
            lost.script.pause.set()
            answer = await asyncio.wait_for(task, PATIENCE_S)
            assert "x-ullage-resumed-on" not in answer.headers

    asyncio.run(scenario())


class Stream:
    """A stream of responses that records the error with which it was ended."""

    error: Any = None

    async def read(self) -> None:
        return None

    def end(self, error: Any) -> None:
        self.error = error

    def cancel(self) -> None:
        pass


def test_streams_that_move_together_wait_for_each_other() -> None:
    """Each prefill on the other engine begins after those of the streams that moved before."""
    most = 25

    def delay(tokens: int, adapter: str) -> Any:
        return recovering_engine("a", 0.0) if tokens <= most and not adapter else None

    async def scenario() -> None:
        watchdog = flow_control.StreamWatchdog(lambda: None, delay)
        streams = [Stream() for _ in range(5)]
        for stream, size in zip(streams, [10, 100, 10, 10], strict=False):
            watchdog.watch(stream, partial(int, size))
        watchdog.watch(streams[-1])
        watchdog.check()
        assert [stream.error is not None for stream in streams] == [True, False, True, False, False]
        assert len({id(stream.error) for stream in streams if stream.error}) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("has_token", [False, True])
def test_an_answer_leaves_one_engine_without_a_worker_and_no_second_one(
    start_service: "StartService", has_token: bool
) -> None:
    """It may be the reason why workers die, so it must not go round the engines."""

    def stop_at(engine: Any) -> asyncio.Event:
        event = asyncio.Event()
        if has_token:
            engine.script.pause = event
        else:
            engine.script.hold = event
        return event

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.set_facts(dtype="float32")
            stops = {engine: stop_at(engine) for engine in service.engines}
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: any(engine.requests for engine in service.engines))
            first, second = sorted(service.engines, key=lambda e: not e.requests)
            first.push(ready=False)
            await service.until(lambda: len(second.requests) == 1, PATIENCE_S)

            first.push(ready=True)
            second.push(ready=False)
            await service.until(lambda: service.engine_state(second.headroom.engine) == "loading")
            await asyncio.sleep(MOVE_AFTER_S + 2 * CHECK_INTERVAL_S)
            second.push(ready=True)
            stops[second].set()
            answer = await asyncio.wait_for(task, PATIENCE_S)
            assert answer.json()["choices"][0]["text"] == "".join(first.script.words)
            assert (len(first.requests), len(second.requests)) == (1, 1)

    asyncio.run(scenario())


def test_an_answer_waits_for_its_worker_if_no_engine_would_give_the_same_words(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for number, engine in enumerate(service.engines):
                engine.set_facts(threads=str(number))
                engine.script.pause = asyncio.Event()
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: any(engine.requests for engine in service.engines))
            lost, other = sorted(service.engines, key=lambda e: not e.requests)
            lost.push(ready=False)
            await service.until(lambda: service.engine_state(lost.headroom.engine) == "loading")

            # Two checks of the watchdog after the time at which the answer might have moved.
            await asyncio.sleep(MOVE_AFTER_S + 2 * CHECK_INTERVAL_S)
            lost.push(ready=True)
            lost.script.pause.set()
            assert (await asyncio.wait_for(task, PATIENCE_S)).status_code == 200
            assert not other.requests

    asyncio.run(scenario())


def test_lost_and_old_reports(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            known = engine_of(service, "single-0")
            service.engine.lost_reports = 1000
            await service.until(lambda: known.order.missed == 1000, PATIENCE_S)
            text = (await service.monitoring.get("/metrics")).text
            assert "ullage_router_reports_missed_total 1000.0" in text
            service.engine.lost_reports = 0
            service.engine.push(headroom_bytes=1)
            await service.until(lambda: known.order.old > 0, PATIENCE_S)
            assert known.headroom.headroom_bytes > 1
            await service.until(lambda: known.state == "stale", PATIENCE_S)  # no sign of life

    asyncio.run(scenario())


def test_a_new_life_has_no_caches(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.complete("Hi", session_id="s")
            assert (await service.stats())["placement"]["sessions"] == 1
            await service.engine.restart()
            known = engine_of(service, "single-0")
            await service.until(lambda: known.order.restarts == 1, PATIENCE_S)
            assert (await service.stats())["placement"]["sessions"] == 0

    asyncio.run(scenario())


def test_a_name_that_is_gone_costs_no_engine(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    async def resolve(_: str) -> set[str]:
        return set(found)

    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as two:
            monkeypatch.setattr(discovery, "resolve", resolve)
            old, new = two.engines
            found.add(old.address)
            async with start_service(single=(), wait=False, pools=NAMED_POOL) as service:
                known = service.router.service.engines
                await service.until(lambda: known.is_ready, PATIENCE_S)
                found.clear()
                await service.until(lambda: not known.all()[0].is_listed, PATIENCE_S)
                assert (await service.complete()).headers["x-ullage-engine"] == "single-0"
                await old.stop()
                await service.until(lambda: not known.all(), PATIENCE_S)
                assert (await service.complete()).status_code == 503
                found.add(new.address)
                await service.until(lambda: known.is_ready, PATIENCE_S)
                assert (await service.complete()).headers["x-ullage-engine"] == "single-1"

    asyncio.run(scenario())


def test_a_silent_name_server_does_not_hold_up_the_start(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = asyncio.Event()

    async def scenario() -> None:
        async with start_service() as one:

            async def resolve(_: str) -> set[str]:
                await answered.wait()
                return {one.engine.address}

            monkeypatch.setattr(discovery, "resolve", resolve)
            async with start_service(single=(), wait=False, pools=NAMED_POOL) as service:
                assert (await service.complete()).status_code == 503
                assert (await service.http.get("/readyz")).status_code == 503
                answered.set()
                await service.until(lambda: service.router.service.is_ready, PATIENCE_S)
                assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


def test_a_loss_makes_the_router_look_for_engines(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    async def resolve(_: str) -> set[str]:
        return set(found)

    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 1000.0)

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as two:
            monkeypatch.setattr(discovery, "resolve", resolve)
            old, new = two.engines
            found.add(old.address)
            async with start_service(single=(), wait=False, pools=NAMED_POOL) as service:
                await service.until(lambda: service.router.service.is_ready, PATIENCE_S)
                found.symmetric_difference_update((old.address, new.address))
                await old.stop()
                names = service.router.service.engines.all
                await service.until(lambda: [e.id for e in names()] == ["single-1"], PATIENCE_S)
                assert (await service.complete()).status_code == 200

    asyncio.run(scenario())
