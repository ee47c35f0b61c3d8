"""Who waits in a router: until when, in which order, and what clients are told."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000
LONG = "x" * 300  # 21 blocks with the output expected
PATIENCE_S = 20.0


async def free(service: "Service", blocks: int, **more: Any) -> None:
    """The engine has so many blocks free, and the router has heard it."""
    service.engine.push(headroom_bytes=blocks * BLOCK, **more)
    known = service.router.service.engines.all()[0]
    await service.until(lambda: known.headroom.headroom_bytes == blocks * BLOCK, PATIENCE_S)


async def waiting(service: "Service", count: int) -> None:
    await service.until(lambda: len(service.router.service.queue) == count, PATIENCE_S)


def error(answer: Any) -> tuple[int, str, str]:
    code = answer.json()["error"]["code"]
    return answer.status_code, code, answer.headers["x-ullage-trail"]


@pytest.mark.parametrize("timeout_s", [2.0, 8.5], ids=["in vain", "after a while"])
def test_who_cannot_be_in_time_any_more_leaves(
    start_service: "StartService", timeout_s: float
) -> None:
    """The prompt takes 300 / 50 s, and that should be at most 0.8 of the time: 7.5 s are needed."""

    async def scenario() -> None:
        async with start_service(limits={"request_timeout": timeout_s}) as service:
            await free(service, 2, prefill_tokens_per_second=50.0)
            answer = await service.complete(LONG)
            assert error(answer) == (429, "DEADLINE", "queue=KV_HEADROOM, reject=DEADLINE")
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert len(service.router.service.queue) == 0

    asyncio.run(scenario())


def test_what_would_be_late_is_refused_at_once_and_waits_where_that_helps(
    start_service: "StartService",
) -> None:
    """The engine's batch of eight is full: a place comes in 12 s, or in one."""

    async def scenario() -> None:
        async with start_service(slo={"ttft_p95": 7.0, "e2e_p95": 20.0}) as service:
            busy = {"requests_running": 8, "max_sequences": 8, "step_seconds": [0.1] * 4}
            later = [headroom_pb2.Release(after_ms=12_000, bytes=BLOCK)]
            await free(service, 80, **busy, releases=later)
            answer = await service.complete("Hi")
            assert error(answer) == (429, "DEADLINE", "reject=DEADLINE")
            assert 12 <= int(answer.headers["retry-after"]) <= 15
            soon = [headroom_pb2.Release(after_ms=1_000, bytes=BLOCK)]
            await free(service, 79, releases=soon)
            waits = asyncio.ensure_future(service.complete("Hi", max_tokens=16))
            await free(service, 78, requests_running=7)
            assert (await waits).status_code == 200
            await free(service, 77, requests_running=8, step_seconds=[0.1, 0.3, 0.6, 1.2])
            answer = await service.complete("Hi", max_tokens=30)  # 36 s beside the others
            assert error(answer) == (429, "DEADLINE", "reject=DEADLINE")

    asyncio.run(scenario())


async def ask(service: "Service", name: str, timeout_s: float, **more: Any) -> str:
    """The request's status."""
    request = inference_pb2.GenerateRequest(text=LONG, request_id=name, **more)
    try:
        async for _ in service.grpc.Generate(request, timeout=timeout_s):
            pass
    except grpc.aio.AioRpcError as failure:
        return failure.code().name
    return "OK"


async def served(service: "Service", *calls: tuple[str, float, int]) -> list[str]:
    """The order in which waiting requests (name, time limit, priority) reach the engine, one at a
    time, having come in the given order."""
    service.engine.heartbeat_s = 0.02
    await free(service, 2)
    tasks = []
    for i, (name, timeout_s, priority) in enumerate(calls, 1):
        tasks.append(asyncio.ensure_future(ask(service, name, timeout_s, priority=priority)))
        await waiting(service, i)
    service.engine.push(headroom_bytes=30 * BLOCK)
    assert await asyncio.gather(*tasks) == ["OK"] * len(tasks)
    return [request.request_id for request in service.engine.requests]


def test_a_deadline_far_away_lets_nobody_overtake(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = {"queue": {"timeout": 60.0}}
        async with start_service(routing=routing, limits={"request_timeout": 90.0}) as service:
            calls = (("first", 80.0, 0), ("second", 85.0, 0), ("third", 60.0, 0))
            assert await served(service, *calls) == ["first", "second", "third"]

    asyncio.run(scenario())


def test_priority_is_served_first_and_waiting_makes_up_for_it(
    start_service: "StartService",
) -> None:
    async def scenario(aging: float, expected: list[str]) -> None:
        routing = {"queue": {"timeout": 60.0, "aging": aging}}
        async with start_service(routing=routing, limits={"request_timeout": 90.0}) as service:
            calls = (("low", 80.0, -1), ("normal", 80.0, 0), ("high", 80.0, 1))
            assert await served(service, *calls) == expected

    asyncio.run(scenario(60.0, ["high", "normal", "low"]))
    asyncio.run(scenario(0.0001, ["low", "normal", "high"]))


def test_a_displaced_request_is_429(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing={"queue": {"max_requests": 1}}) as service:
            await free(service, 2)
            low = asyncio.ensure_future(ask(service, "low", 60.0, priority=-1))
            await waiting(service, 1)
            high = asyncio.ensure_future(ask(service, "high", 60.0, priority=1))
            assert await low == "RESOURCE_EXHAUSTED"
            await free(service, 90)
            assert await high == "OK"
            latest = {e["request_id"]: e for e in (await service.stats())["latest"]}
            assert latest["low"]["trail"] == ["queue=KV_HEADROOM", "reject=QUEUE_FULL"]

    asyncio.run(scenario())


def test_bytes_that_wait_are_bounded(start_service: "StartService") -> None:
    async def scenario() -> None:
        bounds = {"max_bytes": 30 * BLOCK, "timeout": 60.0}
        async with start_service(
            routing={"queue": bounds}, limits={"request_timeout": 90.0}
        ) as service:
            await free(service, 2)
            first = asyncio.ensure_future(service.complete(LONG))
            await waiting(service, 1)
            answer = await service.complete(LONG)
            assert error(answer) == (429, "QUEUE_FULL", "reject=QUEUE_FULL")
            queue = (await service.stats())["queue"]
            assert (queue["bytes"], queue["max_bytes"]) == (21 * BLOCK, 30 * BLOCK)
            assert queue["prompt_bytes"] > 300
            metrics = (await service.monitoring.get("/metrics")).text
            assert f"ullage_router_queue_bytes {21 * BLOCK}.0" in metrics
            assert 'ullage_router_refusals_total{reason="QUEUE_FULL"} 1.0' in metrics
            await free(service, 90)
            assert (await first).status_code == 200
            metrics = (await service.monitoring.get("/metrics")).text
            name = 'ullage_router_queue_wait_seconds_count{priority="normal",tenant=""} 1.0'
            assert name in metrics

    asyncio.run(scenario())


def test_tenants_share_by_weight(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        keys = tmp_path / "keys"
        keys.mkdir()
        for name in ("gold", "flood"):
            (keys / name).write_text(f"sk-{name}-0123456789")
        tenants = {
            "keys_dir": str(keys),
            "tenants": [{"name": "gold", "weight": 2.0}, {"name": "flood"}],
        }
        async with start_service(
            tenants=tenants,
            routing={"queue": {"timeout": 60.0, "max_requests": 9}},
            limits={"request_timeout": 90.0},
        ) as service:
            service.engine.heartbeat_s = 0.02
            await free(service, 2)

            async def post(name: str) -> int:
                headers = {"authorization": f"Bearer sk-{name}-0123456789", "x-request-id": name}
                body = {"prompt": LONG}
                return int(
                    (
                        await service.http.post("/v1/completions", json=body, headers=headers)
                    ).status_code
                )

            flood = [asyncio.ensure_future(post("flood")) for _ in range(9)]
            await waiting(service, 9)
            gold = [asyncio.ensure_future(post("gold")) for _ in range(6)]
            service_room = service.router.service.queue
            await service.until(
                lambda: service_room.sizes().get("gold") == 6 * 21 * BLOCK, PATIENCE_S
            )
            service.engine.push(headroom_bytes=30 * BLOCK)
            assert await asyncio.gather(*gold) == [200] * 6
            assert sorted(await asyncio.gather(*flood)) == [200] * 3 + [429] * 6
            order = [request.request_id for request in service.engine.requests]
            assert order[:3].count("gold") == order[3:6].count("gold") == 2

    asyncio.run(scenario())


def test_an_overload_ends_in_answers_and_gives_all_memory_back(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        queue = {"max_requests": 12, "timeout": 2.0, "aging": 0.001}
        limits = {"request_timeout": 60.0}
        async with start_service(
            single=(40, 40), routing={"queue": queue}, limits=limits
        ) as service:
            for engine in service.engines:
                engine.heartbeat_s = 0.02

            async def one(number: int) -> str:
                more = {"priority": number % 3 - 1}
                return await ask(service, f"r{number}", 20.0 + number % 7, **more)

            ends = await asyncio.gather(*(one(number) for number in range(80)))
            assert set(ends) == {"OK", "RESOURCE_EXHAUSTED"}
            room = service.router.service.queue
            room.check_integrity()
            assert (len(room), room.size, room.prompt_bytes) == (0, 0, 0)
            engines = service.router.service.engines.all()
            await service.until(lambda: not any(e.inflight for e in engines), PATIENCE_S)
            assert [e.credit_bytes for e in engines] == [0, 0]

    asyncio.run(scenario())
