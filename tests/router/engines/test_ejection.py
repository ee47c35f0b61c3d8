"""Which engine gets a request, and which gets none for a while, over real sockets."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from ullage_testing.fake_engine import Script

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.policy.circuit_breaker import LEAST_PROOF_S

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000
PATIENCE_S = 60.0
LONG = "system prompt " * 10
LOST = ServiceError(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST", "lost")


def placement(**sections: Any) -> dict[str, Any]:
    return {"placement": sections}


async def where(service: "Service", prompt: str = "Hi", **more: Any) -> str:
    """The engine that answered."""
    answer = await service.complete(prompt, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-ullage-engine"])


async def told(service: "Service", name: str, **changes: Any) -> None:
    """The engine reports, and the router has heard it."""
    fake = next(e for e in service.engines if e.headroom.engine == name)
    known = next(e for e in service.router.service.engines.all() if e.id == name)
    fake.push(**changes)
    await service.until(
        lambda: all(getattr(known.headroom, key) == value for key, value in changes.items())
    )


async def engine_stats(service: "Service", name: str) -> dict[str, Any]:
    return next(e for e in (await service.stats())["engines"] if e["id"] == name)


def test_a_session_stays_where_it_is(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100)) as service:
            first = await where(service, session_id="s")
            assert {await where(service, f"turn {i}", session_id="s") for i in range(8)} == {first}
            await told(service, first, draining=True)
            second = await where(service, session_id="s")
            assert second != first
            await told(service, first, draining=False)
            assert {await where(service, session_id="s") for _ in range(8)} == {second}
            known = (await service.stats())["placement"]
            assert (known["sessions"], known["affinity"]["yielded"]) == (1, 0)

    asyncio.run(scenario())


def test_a_beginning_is_sent_where_it_was_computed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100)) as service:
            first = await where(service, LONG)
            assert {await where(service, f"{LONG}{i}") for i in range(8)} == {first}
            text = (await service.monitoring.get("/metrics")).text
            assert "ullage_router_affinity_kept_total 8.0" in text
            await told(service, first, requests_running=9)
            second = await where(service, LONG)
            assert second != first
            await told(service, second, headroom_bytes=2 * BLOCK)
            assert await where(service, LONG) != second
            assert (await service.stats())["placement"]["affinity"]["yielded"] == 2

    asyncio.run(scenario())


def test_affinity_can_be_turned_off(start_service: "StartService") -> None:
    async def scenario() -> None:
        off = placement(affinity={"max_sessions": 0, "max_prefixes": 0})
        async with start_service(single=(100, 100), routing=off) as service:
            found = {await where(service, LONG, session_id="s") for _ in range(40)}
            assert len(found) == 2
            assert (await service.stats())["placement"]["affinity"]["none"] == 40

    asyncio.run(scenario())


@pytest.mark.parametrize("ended_by", ["router", "engine"])
def test_an_engine_that_stalls_in_its_answers_is_left_alone(
    start_service: "StartService", ended_by: str
) -> None:
    async def scenario() -> None:
        routing = placement(breaker={"failures": 2})
        limits = {"request_timeout": 1.0}
        async with start_service(routing=routing, limits=limits) as service:
            if ended_by == "router":
                service.engine.script.pause = asyncio.Event()
            else:
                service.engine.script.reason = inference_pb2.FINISH_REASON_TIMEOUT
            breaker = service.router.service.engines.all()[0].breaker
            async with asyncio.timeout(PATIENCE_S):
                while not breaker.openings:
                    await service.complete()
            assert breaker.limit == 1

    asyncio.run(scenario())


def test_the_end_of_a_requests_time_says_nothing_of_its_engine(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        limits = {"request_timeout": 1.0, "total_timeout": 1.0}
        async with start_service(limits=limits) as service:
            service.engine.script.pause = asyncio.Event()
            breaker = service.router.service.engines.all()[0].breaker
            await service.complete()
            assert breaker.failures == 0

    asyncio.run(scenario())


def test_an_engine_that_fails_requests_is_left_alone_and_probed(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        breaker = {"failures": 2, "pause": 1.0, "max_pause": 8.0}
        async with start_service(single=(100, 100), routing=placement(breaker=breaker)) as service:
            bad = service.engines[0]
            bad.script.refuse = LOST
            while len(bad.requests) < 2:
                assert await where(service) == "single-1"
            state = (await engine_stats(service, "single-0"))["breaker"]
            assert (state["state"], state["openings"]) == ("open", 1)
            text = (await service.monitoring.get("/metrics")).text
            assert "ullage_router_ejections_total 1.0" in text
            assert "ullage_router_ejected_engines 1.0" in text
            assert "ullage_router_retries_total 2.0" in text
            await asks_until(service, lambda: len(bad.requests) == 3)  # a probe, which fails
            bad.script.refuse = None
            await asks_until(service, lambda: len(bad.requests) > 6)
            state = (await engine_stats(service, "single-0"))["breaker"]
            assert (state["state"], state["failures"], state["openings"]) == ("closed", 0, 2)

    asyncio.run(scenario())


async def asks_until(service: "Service", condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await where(service)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("code", "reason"),
    [("UNAUTHENTICATED", "BAD_TICKET"), ("PERMISSION_DENIED", "TICKET_BUDGET")],
)
def test_an_engine_that_refuses_the_routers_ticket_is_left_for_another(
    start_service: "StartService", code: str, reason: str
) -> None:
    async def scenario() -> None:
        breaker = {"failures": 2, "pause": 30.0}
        async with start_service(single=(100, 100), routing=placement(breaker=breaker)) as service:
            bad, good = service.engines
            bad.script.refuse = ServiceError(grpc.StatusCode[code], reason, "no")
            while len(bad.requests) < 2:
                assert await where(service) == "single-1"
            state = (await engine_stats(service, "single-0"))["breaker"]
            assert (state["state"], state["openings"]) == ("open", 1)
            good.script.refuse = bad.script.refuse
            answer = await service.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_ENGINE")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("INTERNAL", "REQUEST_FAILED"),
        ("INTERNAL", "WORKER_LOST"),
        ("INVALID_ARGUMENT", "INVALID_FIELD"),
        ("CANCELLED", "CANCELLED"),
        ("DEADLINE_EXCEEDED", "DEADLINE"),
        ("UNAVAILABLE", "DRAINING"),
    ],
)
def test_what_requests_cause_ejects_nobody(
    start_service: "StartService", code: str, reason: str
) -> None:
    async def scenario() -> None:
        breaker = {"failures": 1, "max_ejection_percent": 100}
        async with start_service(single=(100, 100), routing=placement(breaker=breaker)) as service:
            for engine in service.engines:
                engine.script.refuse = ServiceError(grpc.StatusCode[code], reason, "no")
            answers = await asyncio.gather(*(service.complete() for _ in range(6)))
            assert all(answer.status_code != 200 for answer in answers)
            stats = await service.stats()
            assert {e["breaker"]["state"] for e in stats["engines"]} == {"closed"}
            assert stats["placement"]["retries"] == 0
            for engine in service.engines:
                engine.script.refuse = None
            assert {await where(service) for _ in range(40)} == {"single-0", "single-1"}

    asyncio.run(scenario())


def test_part_of_a_pool_is_tried_though_all_fail(start_service: "StartService") -> None:
    async def scenario() -> None:
        breaker = {"failures": 1, "pause": 30.0}
        async with start_service(single=(100, 100), routing=placement(breaker=breaker)) as service:
            for engine in service.engines:
                engine.script.fail_after = 1
            for _ in range(4):
                await service.complete()
            ends = {engine["breaker"]["state"] for engine in (await service.stats())["engines"]}
            assert ends == {"open"}
            for engine in service.engines:
                engine.script.fail_after = None
            assert len({await where(service) for _ in range(8)}) == 1

    asyncio.run(scenario())


def test_a_spent_budget_tells_the_error_at_once(start_service: "StartService") -> None:
    async def scenario() -> None:
        retries = {"percent": 0, "per_second": 0.0, "burst": 1}
        async with start_service(single=(100, 100), routing=placement(retries=retries)) as service:
            service.engines[0].script.refuse = LOST
            answers = [await service.complete() for _ in range(40)]
            told = [a for a in answers if a.status_code != 200]
            assert len(service.engines[0].requests) == len(told) + 1
            assert {a.status_code for a in told} == {503}
            assert all(int(a.headers["retry-after"]) >= 1 for a in told)
            known = (await service.stats())["placement"]
            assert (known["retries"], known["retries_refused"]) == (1, len(told))

    asyncio.run(scenario())


def test_a_pool_of_one_that_fails_gets_few_requests_until_it_is_well(
    start_service: "StartService",
) -> None:
    """The others wait or are refused, and the engine is used again as it succeeds."""

    async def scenario() -> None:
        breaker = {"failures": 2, "pause": 0.2}
        queue = {"timeout": 0.5, "max_requests": 100}
        routing = placement(breaker=breaker) | {"queue": queue}
        async with start_service(routing=routing) as service:
            engine = service.engine
            engine.script.refuse = LOST
            for _ in range(2):
                assert (await service.complete()).status_code == 503
            failed = len(engine.requests)

            engine.script = Script(hold=asyncio.Event())
            answers = [asyncio.ensure_future(service.complete()) for _ in range(20)]
            await service.until(lambda: len(engine.requests) > failed)
            await asyncio.sleep(1.0)
            assert len(engine.requests) == failed + 1  # a single one tries the engine
            refused = [answer.result() for answer in answers if answer.done()]
            assert {answer.status_code for answer in refused} == {429}
            assert {answer.json()["error"]["code"] for answer in refused} == {"BREAKER_LIMIT"}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert len(refused) == 19
            shown = (await engine_stats(service, "single-0"))["breaker"]
            assert (shown["limit"], shown["trials"]) == (1, 1)
            assert await breaker_limits(service) == [1.0]

            engine.script.hold.set()
            engine.script = Script()
            assert {(await service.complete()).status_code for _ in range(8)} == {200}
            shown = (await engine_stats(service, "single-0"))["breaker"]
            assert (shown["limit"], shown["trials"]) == (None, 0)
            assert await breaker_limits(service) == [0.0]
            more = await asyncio.gather(*(service.complete() for _ in range(20)))
            assert {answer.status_code for answer in more} == {200}

    asyncio.run(scenario())


async def breaker_limits(service: "Service") -> list[float]:
    return list((await service.metrics("ullage_router_breaker_limit")).values())


async def fail_twice(service: "Service") -> None:
    """Open the breaker of the pool's only engine, which works again afterwards."""
    service.engine.script.refuse = LOST
    for _ in range(2):
        assert (await service.complete()).status_code == 503
    service.engine.script = Script()


@pytest.mark.parametrize("fault", ["a long pause", "a late first token"])
def test_who_cannot_be_served_in_time_is_refused_at_once(
    start_service: "StartService", fault: str
) -> None:
    async def scenario() -> None:
        breaker = {"failures": 2, "pause": 20.0 if fault == "a long pause" else 0.1}
        routing = placement(breaker=breaker) | {"queue": {"timeout": 15.0}}
        async with start_service(routing=routing) as service:
            await fail_twice(service)
            service.engine.script = Script(hold=asyncio.Event())
            trial = asyncio.ensure_future(service.complete())
            await service.until(lambda: service.engine.active == 1)
            if fault == "a late first token":
                await asyncio.sleep(LEAST_PROOF_S + 0.1)

            began = time.monotonic()
            refused = await service.complete()
            took_s = time.monotonic() - began
            assert (refused.status_code, trial.done()) == (429, False)
            assert took_s < 5.0  # and not the 15 s for which the queue would have kept it
            delays = range(15, 25) if fault == "a long pause" else range(5, 11)
            assert int(refused.headers["retry-after"]) in delays

            service.engine.script.hold.set()
            service.engine.script = Script()
            assert (await trial).status_code == 200
            answers = await asyncio.gather(*(service.complete() for _ in range(10)))
            assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scenario())


def test_who_waits_for_a_trial_is_refused_when_its_first_token_is_late(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        routing = placement(breaker={"failures": 2, "pause": 0.1}) | {"queue": {"timeout": 60.0}}
        async with start_service(routing=routing) as service:
            await fail_twice(service)
            await asyncio.sleep(0.2)
            service.engine.script = Script(hold=asyncio.Event())
            trial = asyncio.ensure_future(service.complete())
            await service.until(lambda: service.engine.active == 1)
            began = time.monotonic()
            refused = await service.complete()
            took_s = time.monotonic() - began
            assert (refused.status_code, trial.done()) == (429, False)
            assert "queue=BREAKER_LIMIT, reject=BREAKER_LIMIT" in refused.headers["x-ullage-trail"]
            assert 1.0 < took_s < 15.0
            trial.cancel()

    asyncio.run(scenario())


def test_a_second_spike_within_the_pause_is_limited_too(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = placement(breaker={"failures": 2, "pause": 60.0})
        async with start_service(routing=routing) as service:
            for openings in (1, 2):
                await fail_twice(service)
                shown = (await engine_stats(service, "single-0"))["breaker"]
                assert (shown["state"], shown["limit"], shown["openings"]) == ("open", 1, openings)
                assert {(await service.complete()).status_code for _ in range(8)} == {200}
                shown = (await engine_stats(service, "single-0"))["breaker"]
                assert (shown["state"], shown["limit"]) == ("closed", None)

    asyncio.run(scenario())


def test_answers_from_before_the_failures_keep_no_place(start_service: "StartService") -> None:
    """A pool of one serves the next request, though earlier answers still run."""

    async def scenario() -> None:
        routing = placement(breaker={"failures": 2, "pause": 0.1}) | {"queue": {"timeout": 60.0}}
        async with start_service(routing=routing) as service:
            engine = service.engine
            engine.script = Script(pause=asyncio.Event())
            long = [asyncio.ensure_future(service.complete()) for _ in range(3)]
            await service.until(lambda: engine.active == 3)
            await service.until(lambda: service.router.service.engines.all()[0].load == 3)
            await fail_twice(service)
            answers = [await service.complete() for _ in range(3)]
            assert {answer.status_code for answer in answers} == {200}
            assert not any(each.done() for each in long)
            for each in long:
                each.cancel()

    asyncio.run(scenario())


def test_a_long_answer_does_not_hold_up_the_others(start_service: "StartService") -> None:
    """The first token of an engine on trial is proof enough for the next request."""

    async def scenario() -> None:
        breaker = {"failures": 2, "pause": 0.1}
        async with start_service(routing=placement(breaker=breaker)) as service:
            engine = service.engine
            engine.script.refuse = LOST
            for _ in range(2):
                assert (await service.complete()).status_code == 503

            engine.script = Script(pause=asyncio.Event())
            long = asyncio.ensure_future(service.complete())
            await service.until(lambda: engine.active == 1)
            engine.script = Script()
            answers = await asyncio.gather(*(service.complete() for _ in range(10)))
            assert {answer.status_code for answer in answers} == {200}
            assert not long.done()
            long.cancel()

    asyncio.run(scenario())
