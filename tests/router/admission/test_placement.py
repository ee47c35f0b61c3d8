"""Where requests go, and what clients are told, over real sockets."""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000
LONG = "x" * 300
FAR = {
    "shrink_context": {"max_dropped_percent": 100, "keep_turns": 1},
    "shrink_output": {"min_percent": 25, "below_expected": True},
}
"""Bounds of shrinking that let it go far."""
ROUTING = {"large_request_tokens": 500, "queue": {"max_requests": 2, "timeout": 5.0}}


def busy(retry_after_s: float | None = None) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=retry_after_s
    )


def decided(answer: Any, action: str, route: str) -> None:
    assert answer.headers["x-ullage-action"] == action, (answer.text, dict(answer.headers))
    assert answer.headers["x-ullage-route"] == route


async def refreshed(service: "Service", engine: Any, **changes: Any) -> None:
    """The engine reports, and the router has heard it."""
    engine.push(**changes)
    wanted = engine.headroom.headroom_bytes
    name = engine.headroom.engine
    known = next(e for e in service.router.service.engines.all() if e.id == name)
    await service.until(lambda: known.headroom.headroom_bytes == wanted)


def test_headers_of_an_accepted_request(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.complete("x" * 30)
            decided(answer, "accept", "single")
            assert int(answer.headers["x-ullage-predicted-kv-bytes"]) == 4 * BLOCK
            assert answer.headers["x-ullage-engine"] == "single-0"
            assert answer.headers["x-ullage-degraded"] == ""
            latest = (await service.stats())["latest"][0]
            assert latest["request_id"] == answer.headers["x-request-id"]
            assert latest["predicted_bytes"] == 4 * BLOCK
            assert (latest["action"], latest["status"]) == ("accept", 200)
            assert latest["ttft_s"] > 0
            assert latest["output_tokens"] == 3

    asyncio.run(scenario())


def test_large_prompts_take_the_large_pool(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(large=(200,), routing=ROUTING) as service:
            answer = await service.complete("x" * 501, stream=True)
            assert answer.status_code == 200
            decided(answer, "route4", "tp2pp2")
            assert answer.headers["x-ullage-engine"] == "large-0"
            counts = (await service.stats())["decisions"]
            assert counts == [
                {"action": "route4", "route": "tp2pp2", "reason": "LARGE_REQUEST", "count": 1}
            ]

    asyncio.run(scenario())


def test_what_never_fits_is_400(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(10,), routing=ROUTING) as service:
            answer = await service.complete("x" * 1999)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            answer = await service.complete("x" * 200)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "KV_NEVER_FITS"
            assert "retry-after" not in answer.headers
            decided(answer, "reject", "")

    asyncio.run(scenario())


def test_output_is_shrunk_and_said(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing={"rungs": FAR}) as service:
            await refreshed(service, service.engine, headroom_bytes=20 * BLOCK)
            answer = await service.complete(LONG, max_tokens=32)
            decided(answer, "shrink", "single")
            assert answer.headers["x-ullage-degraded"] == "max_tokens=20"
            assert service.engine.requests[0].stop.max_tokens == 20
            assert answer.json()["choices"][0]["stop_reason"] is None
            service.engine.script.reason = inference_pb2.FINISH_REASON_LENGTH
            choice = (await service.complete(LONG, max_tokens=32)).json()["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "max_tokens=20")
            choice = (await service.complete("x", max_tokens=3)).json()["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)

    asyncio.run(scenario())


def test_context_is_shrunk_and_said(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = {"ladder": ["shrinkContext", "queue"], "rungs": FAR}
        async with start_service(routing=routing) as service:
            await refreshed(service, service.engine, headroom_bytes=20 * BLOCK)
            turns = [{"role": "system", "content": "Be brief."}]
            for i in range(4):
                turns.append({"role": "user", "content": f"{i}" + "q" * 60})
                turns.append({"role": "assistant", "content": "a" * 60})
            turns.append({"role": "user", "content": "last?"})
            answer = await service.http.post(
                "/v1/chat/completions", json={"messages": turns, "max_tokens": 32}
            )
            decided(answer, "shrink", "single")
            assert answer.headers["x-ullage-degraded"] == "dropped_messages=6"
            text = bytes_of(service, service.engine.requests[0].token_ids.ids)
            assert text.startswith("<system>Be brief.\n<user>3")
            assert text.endswith("<user>last?\n<assistant>")

    asyncio.run(scenario())


def bytes_of(service: "Service", ids: Any) -> str:
    return str(service.router.service.engines.model.decode(ids))


def test_queued_then_served(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await refreshed(service, service.engine, headroom_bytes=2 * BLOCK)
            first = asyncio.ensure_future(service.complete(LONG))
            room = service.router.service.queue
            await service.until(lambda: len(room) == 1)
            second = asyncio.ensure_future(service.complete("short"))
            await service.until(lambda: len(room) == 2)  # nobody overtakes
            assert (await service.stats())["queue"]["waiting"] == 2
            service.engine.push(headroom_bytes=100 * BLOCK)
            for answer in (await first, await second):
                assert answer.status_code == 200
                decided(answer, "queue", "single")
            # Sent one after the other, but on streams of their own.
            assert sorted(len(r.token_ids.ids) for r in service.engine.requests) == [5, 300]

    asyncio.run(scenario())


def test_small_ones_pass_one_that_waits_for_much_memory(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            releases = [headroom_pb2.Release(after_ms=3000, bytes=90 * BLOCK)]
            busy = {"releases": releases, "decode_tokens_per_second": 100.0}
            busy |= {"prefill_tokens_per_second": 1e5, "requests_running": 1}
            busy |= {"expected_output_tokens": 16, "max_sequences": 64}
            await refreshed(service, service.engine, headroom_bytes=0, **busy)
            queue = service.router.service.queue
            first = asyncio.ensure_future(service.complete(LONG))
            await service.until(lambda: len(queue) == 1)
            second = asyncio.ensure_future(service.complete("short", max_tokens=16))
            await service.until(lambda: len(queue) == 2)
            service.engine.push(headroom_bytes=8 * BLOCK, **busy)
            decided(await second, "queue", "single")  # one that waited behind
            decided(await service.complete("short", max_tokens=16), "accept", "single")
            assert queue.passed == 2
            assert not first.done()
            service.engine.push(headroom_bytes=100 * BLOCK)
            assert (await first).status_code == 200

    asyncio.run(scenario())


def test_a_full_queue_is_429(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=ROUTING) as service:
            releases = [headroom_pb2.Release(after_ms=2500, bytes=90 * BLOCK)]
            await refreshed(service, service.engine, headroom_bytes=BLOCK, releases=releases)
            waiting = [asyncio.ensure_future(service.complete(LONG)) for _ in range(2)]
            await service.until(lambda: len(service.router.service.queue) == 2)
            answer = await service.complete(LONG)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "QUEUE_FULL"
            assert answer.headers["retry-after"] in ("3", "4")
            decided(answer, "reject", "single")
            service.engine.push(headroom_bytes=100 * BLOCK)
            assert [a.status_code for a in await asyncio.gather(*waiting)] == [200, 200]

    asyncio.run(scenario())


def test_waiting_too_long_is_429_or_another_pool(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = {**ROUTING, "queue": {"max_requests": 2, "timeout": 0.3}}
        async with start_service(large=(200,), routing=routing) as service:
            await refreshed(service, service.engine, headroom_bytes=BLOCK)
            answer = await service.complete(LONG)
            decided(answer, "route4", "tp2pp2")
            await refreshed(service, service.engines[1], headroom_bytes=BLOCK)
            answer = await service.complete(LONG)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "QUEUE_TIMEOUT"
            assert 1 <= int(answer.headers["retry-after"]) <= 30

    asyncio.run(scenario())


def test_the_next_engine_is_tried(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 90)) as service:
            first, second = service.engines
            for script in (
                {"refuse": busy()},
                {"refuse": ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "bye")},
                {"fail_after": 0},
            ):
                first.script = type(first.script)(**script)
                answer = await service.complete()
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-ullage-engine"] == "single-1"
            assert len(first.requests) == len(second.requests) == 3

    asyncio.run(scenario())


def test_a_refusing_engine_is_asked_again_after_its_next_report(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            engine.script.refuse = busy()
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: len(engine.requests) == 1)
            engine.script.refuse = None
            engine.push()
            assert (await task).status_code == 200
            assert len(engine.requests) == 2

    asyncio.run(scenario())


def test_an_engine_that_keeps_failing_is_503(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.heartbeat_s = 0.05
            service.engine.script.fail_after = 0
            service.engine.script.failure = ServiceError(
                grpc.StatusCode.UNAVAILABLE, "DRAINING", "stopping"
            )
            answer = await service.complete()
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert len(service.engine.requests) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["WORKER_LOST", "REQUEST_FAILED"])
def test_a_request_that_breaks_engines_is_tried_on_one_other(
    start_service: "StartService", reason: str
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100)) as service:
            for engine in service.engines:
                engine.script.fail_after = 0
                engine.script.failure = ServiceError(grpc.StatusCode.INTERNAL, reason, "broke")
            answer = await service.complete()
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == reason
            assert sorted(len(engine.requests) for engine in service.engines) == [0, 1, 1]

    asyncio.run(scenario())


def test_the_engines_own_refusal_reaches_the_client(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.refuse = invalid("temperature", "temperature is odd")
            answer = await service.complete()
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "temperature"

    asyncio.run(scenario())


def test_a_break_after_the_first_token_is_an_error_event(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.script.fail_after = 2
            answer = await service.chat(stream=True)
            assert answer.status_code == 200
            *_, error, done = answer.text.strip().split("\n\n")
            assert error.startswith('data: {"error":')
            assert "lost" in error
            assert done == "data: [DONE]"
            assert (await service.stats())["latest"][0]["error"] == "WORKER_LOST"
            whole = await service.chat()
            assert whole.status_code == 503

    asyncio.run(scenario())


@pytest.mark.parametrize("change", [{"draining": True}, {"ready": False}], ids=str)
def test_engines_that_take_nothing_get_nothing(
    start_service: "StartService", change: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 50)) as service:
            first = service.engines[0]
            first.push(**change)
            await service.until(lambda: service.engine_state("single-0") in ("draining", "loading"))
            for _ in range(6):
                assert (await service.complete()).headers["x-ullage-engine"] == "single-1"

    asyncio.run(scenario())


def test_a_silent_engine_is_stale(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 50)) as service:
            service.engines[0].is_mute = True
            await service.until(lambda: service.engine_state("single-0") == "stale")
            assert (
                "ullage_router_stale_engines 1.0" in (await service.monitoring.get("/metrics")).text
            )
            for _ in range(4):
                assert (await service.complete()).headers["x-ullage-engine"] == "single-1"

    asyncio.run(scenario())


def test_a_restarted_engine_is_found_again(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.engine.stop()
            await service.until(lambda: service.engine_state("single-0") == "connecting")
            answer = await service.complete()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "NO_ENGINE"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert (await service.http.get("/readyz")).status_code == 200  # it queues, and answers
            await service.engine.restart()
            await service.until(lambda: service.engine_state("single-0") == "ready")
            assert (await service.complete()).status_code == 200
            assert (await service.http.get("/readyz")).status_code == 200

    asyncio.run(scenario())


def test_a_recovering_engine_is_waited_for(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.push(ready=False)
            await service.until(lambda: service.engine_state("single-0") == "loading")
            task = asyncio.ensure_future(service.complete())
            await service.until(lambda: len(service.router.service.queue) == 1)
            service.engine.push(ready=True)
            answer = await task
            assert answer.status_code == 200
            decided(answer, "queue", "single")

    asyncio.run(scenario())


def test_another_model_is_not_used(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(wait=False, model="other") as service:
            answer = await service.complete(model="other")
            assert answer.status_code == 503
            assert (await service.http.get("/healthz")).status_code == 200

    asyncio.run(scenario())


def test_credit_keeps_a_burst_within_the_headroom(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.heartbeat_s = 30.0
                engine.script.hold = asyncio.Event()
                await refreshed(service, engine, headroom_bytes=22 * BLOCK)
            tasks = [asyncio.ensure_future(service.complete(LONG)) for _ in range(6)]
            await service.until(lambda: len(service.router.service.queue) == 4)
            await service.until(lambda: all(engine.requests for engine in service.engines))
            assert [len(engine.requests) for engine in service.engines] == [1, 1]
            stats = (await service.stats())["engines"]
            assert [e["credit_bytes"] for e in stats] == [21 * BLOCK] * 2
            for engine in service.engines:
                engine.script.hold.set()
                engine.push(headroom_bytes=100 * BLOCK)
            answers = await asyncio.gather(*tasks)
            assert {answer.status_code for answer in answers} == {200}
            assert all(e.credit_bytes == 0 for e in service.router.service.engines.all())

    asyncio.run(scenario())


def test_the_deadline_before_the_first_token_is_504(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(limits={"request_timeout": 2.0}) as service:
            service.engine.script.hold = asyncio.Event()
            answer = await service.complete()
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "DEADLINE"
            await service.until(lambda: len(service.engine.cancelled) == 1)

    asyncio.run(scenario())


def test_the_deadline_after_it_ends_the_answer(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(limits={"request_timeout": 2.0}) as service:
            service.engine.script.pause = asyncio.Event()
            answer = (await service.complete()).json()
            choice = answer["choices"][0]
            assert choice["text"] == "Hello"
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
            assert answer["usage"]["completion_tokens"] == 1

    asyncio.run(scenario())
