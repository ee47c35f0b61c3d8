"""Long bodies have turns: few at a time, tenants after one another, none lost."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ullage_common.process.addresses import listen
from ullage_common.wire.errors import ServiceError
from ullage_router.http import long_bodies
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.long_bodies import MAX_LONG_BYTES, BodyTurn, LongBodies
from ullage_router.http.messages import Reply, Request
from ullage_router.http.server import HTTPServer

if TYPE_CHECKING:
    StartService = Any

QUARTER = MAX_LONG_BYTES // 4
COUNT = MAX_LONG_BYTES // (3 << 19) + 1
"""Bodies of 1.5 MiB, of which all but one could have a turn to arrive at one time."""
WAIT_S = 20.0


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_few_have_a_turn_and_tenants_follow_one_another() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        order: list[str] = []
        turns: dict[str, BodyTurn] = {}

        async def take(tenant: str, number: int) -> None:
            turn = await bodies.take(QUARTER, tenant)
            order.append(f"{tenant}{number}")
            turns[order[-1]] = turn

        names = [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("b", 2), ("c", 1)]
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(take(*name))
                await settled()
            assert order == ["a1", "a2", "b1", "b2"]
            bodies.give_back(turns["b1"])
            await settled()
            assert order[4:] == ["c1"]  # a has half of all
            bodies.give_back(turns["a1"])
            bodies.give_back(turns["a2"])
            await settled()
            assert order[5:] == ["a3", "a4"]

    asyncio.run(scenario())


def test_clients_without_a_name_may_have_all_turns() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        async with asyncio.timeout(20):
            turns = [await bodies.take(QUARTER, "") for _ in range(4)]
        waiting = asyncio.create_task(bodies.take(QUARTER, ""))
        await settled()
        assert not waiting.done()
        bodies.give_back(turns[0])
        await waiting

    asyncio.run(scenario())


def test_a_large_body_leaves_its_room_to_several() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        large = await bodies.take(3 * QUARTER, "")
        await bodies.take(QUARTER, "")
        waiting = [asyncio.create_task(bodies.take(QUARTER, tenant)) for tenant in ("", "", "a")]
        await settled()
        bodies.give_back(large)
        async with asyncio.timeout(WAIT_S):
            turns = await asyncio.gather(*waiting)
        assert all(turns)

    asyncio.run(scenario())


def test_who_goes_or_waits_too_long_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        turns = [await bodies.take(QUARTER, "") for _ in range(4)]
        gone, last = (asyncio.create_task(bodies.take(QUARTER, "")) for _ in range(2))
        await settled()
        gone.cancel()
        await settled()
        bodies.give_back(turns[0])
        await last
        both = asyncio.create_task(bodies.take(QUARTER, ""))
        await settled()
        bodies.give_back(turns[1])
        both.cancel()  # its turn has come at this moment
        await settled()
        await bodies.take(QUARTER, "")
        monkeypatch.setattr(long_bodies, "TURN_TIMEOUT_S", 0.01)
        with pytest.raises(TimeoutError):
            await bodies.take(QUARTER, "")
        bodies.give_back(turns[2])
        await bodies.take(QUARTER, "")

    asyncio.run(scenario())


def test_a_body_of_any_size_has_its_turn() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        turn = await bodies.take(1, "a")
        await bodies.take(1, "")
        largest = asyncio.create_task(bodies.take(HTTPLimits().max_body_bytes, "a"))
        await settled()
        assert not largest.done()
        bodies.give_back(turn)
        await largest

    asyncio.run(scenario())


async def awaited(bodies: LongBodies, turn: BodyTurn) -> None:
    """Wait for more of a body that has its turn until it is lost."""
    async with asyncio.timeout(None) as timeout:
        with bodies.awaited(turn, timeout):
            await asyncio.Event().wait()


async def is_lost(bodies: LongBodies, turn: BodyTurn) -> bool:
    try:
        await awaited(bodies, turn)
    except TimeoutError:
        bodies.give_back(turn)
        return True
    return False


def test_a_body_that_brings_nothing_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_bodies, "IDLE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        bodies = LongBodies()
        slow, _ = [await bodies.take(2 * QUARTER, "") for _ in range(2)]
        watch = asyncio.create_task(is_lost(bodies, slow))
        await asyncio.sleep(0.2)
        assert not watch.done()  # nobody else wants a turn
        async with asyncio.timeout(WAIT_S):
            await bodies.take(QUARTER, "")
            assert await watch

    asyncio.run(scenario())


def test_a_turn_that_was_lost_as_a_part_came_can_be_lost_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_bodies, "IDLE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        bodies = LongBodies()
        slow, _ = [await bodies.take(2 * QUARTER, "") for _ in range(2)]
        loop = asyncio.get_running_loop()
        part = loop.create_future()

        def come_as_the_turn_is_lost() -> None:
            part.set_result(None)
            slow.lose()

        async with asyncio.timeout(None) as timeout:
            with bodies.awaited(slow, timeout):
                loop.call_soon(come_as_the_turn_is_lost)
                await part
        async with asyncio.timeout(WAIT_S):
            watch = asyncio.create_task(is_lost(bodies, slow))
            await bodies.take(QUARTER, "")
            assert await watch

    asyncio.run(scenario())


def test_bytes_make_up_for_time_that_has_passed() -> None:
    turn = BodyTurn(8 << 20, "", idle_since=100.0)
    assert turn.lost_at() == 102
    turn.idle_s = 1.5
    assert turn.lost_at() == 100.5
    turn.add(512 << 10)
    assert turn.lost_at() == 101.5
    turn.add(8 << 20)
    assert turn.lost_at() == 102
    turn.idle_since = None
    assert turn.lost_at() == float("inf")


def test_a_tenant_that_waits_for_its_own_bodies_ends_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_bodies, "IDLE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        bodies = LongBodies()
        own = [await bodies.take(QUARTER, "a") for _ in range(2)]
        other = await bodies.take(QUARTER, "b")
        watch = asyncio.create_task(is_lost(bodies, other))
        waiting = asyncio.create_task(bodies.take(QUARTER, "a"))
        await asyncio.sleep(0.2)
        assert not watch.done()
        bodies.give_back(own[0])
        await waiting
        watch.cancel()
        await settled()

    asyncio.run(scenario())


async def post(port: int, path: str, rest: bytes) -> tuple[Any, Any]:
    """Send a request of which the head is complete but for its length; returns reader and writer.

    The body is sent as far as the router takes it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head % path.encode() + rest)
    return reader, writer


def request(size: int) -> bytes:
    padding = b"x" * size
    body = b'{"messages":[{"role":"user","content":"Hi"}],"input":"Hi","padding":"%b"}' % padding
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_clients_that_stop_in_a_long_body_hold_up_nobody(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_bodies, "IDLE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with start_service() as service:
            port = service.router.http_port
            half = 1_200_000
            slow = [
                await post(
                    port,
                    "chat/completions",
                    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (half + 1) + b" " * half,
                )
                for _ in range(2)
            ]
            reader, writer = await post(port, "chat/completions", request(2 << 20))
            async with asyncio.timeout(WAIT_S):
                assert b" 200 " in await reader.readline()
                ends = [asyncio.create_task(each[0].readline()) for each in slow]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert any(end.done() and b" 503 " in end.result() for end in ends)
            for end in ends:
                end.cancel()
            for _, each in (*slow, (reader, writer)):
                each.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["chat/completions", "embeddings"])
def test_a_body_that_is_parsed_lets_others_come(start_service: "StartService", path: str) -> None:
    """Requests that wait for a pool which sleeps keep no turn."""

    async def scenario() -> None:
        async with start_service(sleepy=("single",), wait=False) as service:
            port = service.router.http_port
            clients = [await post(port, path, request(3 << 19)) for _ in range(COUNT)]
            pipeline = service.router.service.pipeline
            await service.until(lambda: pipeline.inflight == COUNT)
            for _, writer in clients:
                writer.close()
            await service.until(lambda: pipeline.inflight == 0)

    asyncio.run(scenario())


def test_a_body_whose_answer_another_request_gets_lets_others_come(
    start_service: "StartService",
) -> None:
    """Requests that wait for the answer to the first one with their key keep no turn."""

    async def scenario() -> None:
        routing = {"idempotency": {"enabled": True}}
        async with start_service(single=(10_000,), routing=routing) as service:
            service.engine.script.hold = asyncio.Event()
            port = service.router.http_port
            keys = service.router.service.idempotency
            rest = b"Idempotency-Key: k\r\n" + request(3 << 19)
            clients = [await post(port, "chat/completions", rest) for _ in range(COUNT)]
            await service.until(lambda: keys.repeated == COUNT - 1)
            service.engine.script.hold.set()
            async with asyncio.timeout(WAIT_S):
                assert all([b" 200 " in await reader.readline() for reader, _ in clients])
            for _, writer in clients:
                writer.close()

    asyncio.run(scenario())


def test_a_body_that_another_service_answers_lets_others_come(
    start_service: "StartService",
) -> None:
    """Requests that wait for another step of a cascade keep no turn."""

    async def scenario() -> None:
        async with start_service(sleepy=("single",), wait=False, model="small") as small:
            target = f"127.0.0.1:{small.router.grpc_port}"
            steps = [{"name": "small", "target": target}, {"name": "big"}]
            async with start_service(cascade={"name": "default/big", "steps": steps}) as big:
                port = big.router.http_port
                clients = [
                    await post(port, "chat/completions", request(3 << 19)) for _ in range(COUNT)
                ]
                pipelines = [each.router.service.pipeline for each in (big, small)]
                await big.until(lambda: pipelines[0].inflight == COUNT)
                for _, writer in clients:
                    writer.close()
                await big.until(lambda: not any(each.inflight for each in pipelines))

    asyncio.run(scenario())


def test_the_wait_for_a_turn_is_no_time_of_the_body() -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def serve(request: Request, reply: Reply) -> None:
            try:
                body = await request.read()
            except ServiceError as error:
                await reply.whole(503, [], error.reason.encode())
                return
            if request.path == "/v1/wait":
                await go_on.wait()
            await reply.whole(200, [], b"%d" % len(body))

        server = HTTPServer(serve, HTTPLimits(body_timeout_s=2.0, max_long_bytes=3 << 20))
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        await server.start(listener)
        first = await post(port, "wait", request(3 << 19))
        await asyncio.sleep(0.5)
        second = await post(port, "now", request(7 << 18))
        await asyncio.sleep(4)
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            assert b" 200 " in await first[0].readline()
            assert b" 200 " in await second[0].readline()
        for _, writer in (first, second):
            writer.close()
        await server.stop(WAIT_S)

    asyncio.run(scenario())
