"""The client: straight from engines where it can, through the router where it must."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.tickets.client import Client
from ullage_common.tickets.tickets import engine_tag, verify
from ullage_common.wire.errors import ServiceError

if TYPE_CHECKING:
    Service = Any
    StartService = Any

KEY = b"k" * 32
TICKET = "x-ullage-ticket"
ENOUGH_S = 20.0
BUSY = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=1)


@contextlib.asynccontextmanager
async def connected(
    start: "StartService", tmp_path: Path, is_on: bool = True, **more: Any
) -> AsyncIterator[tuple["Service", Client]]:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "key").write_bytes(KEY)
    tickets = {"tickets": {"keys_dir": str(keys)}} if is_on else {}
    async with start(**tickets, **more) as service:
        async with Client(f"127.0.0.1:{service.router.grpc_port}") as client:
            yield service, client
        assert service.router.service.issuer.open == 0, "it told what ended"


def request(**more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[72, 105]), **more)


async def ask(client: Client, asked: pb.GenerateRequest | None = None) -> list[Any]:
    return [event async for event in client.generate(asked or request())]


def text(events: list[Any]) -> str:
    return "".join(event.delta.text for event in events)


def sent(service: "Service") -> list[bool]:
    """Of every call that reached an engine, whether it came with a ticket."""
    return [TICKET in metadata for e in service.engines for metadata in e.metadata]


def test_token_ids_go_straight_to_an_engine(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            first, *deltas, last = await ask(client)
            assert (first.accepted.engine, first.accepted.route) == ("single-0", "direct")
            assert text(deltas) == "Hello big world"
            assert last.finished.usage.completion_tokens == 3
            assert sent(service) == [True]
            assert (await service.stats())["latest"] == [], "the router relayed nothing"
            picker = service.router.service.issuer
            await service.until(lambda: picker.open == 0, ENOUGH_S)
            assert service.router.service.engines.all()[0].inflight == 0

    asyncio.run(scenario())


def test_many_at_once_share_picks(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(400, 400)) as (service, client):
            picker, calls = service.router.service.issuer, []
            pick = picker.pick
            picker.pick = lambda asked, visit: calls.append(asked) or pick(asked, visit)
            answers = await asyncio.gather(*(ask(client) for _ in range(60)))
            assert {text(answer) for answer in answers} == {"Hello big world"}
            assert sent(service) == [True] * 60
            sizes = [each.count or 1 for call in calls for each in call.requests]
            assert sum(sizes) == 60
            assert max(sizes) > 1, "those that came together went together"
            shared = 0
            for engine in service.engines:
                tag = engine_tag(engine.headroom.engine)
                for ticket, uses in Counter(each[TICKET] for each in engine.metadata).items():
                    assert uses <= verify(ticket, (KEY,), tag, time.time()).uses
                    shared += uses > 1
            assert shared, "and shared tickets"

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["text", "off"])
def test_what_goes_through_the_router(
    start_service: "StartService", tmp_path: Path, kind: str
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, is_on=kind != "off") as (service, client):
            asked = pb.GenerateRequest(text="Hi") if kind == "text" else request()
            for _ in range(2):
                events = await ask(client, asked)
                assert events[0].accepted.route == "single"
                assert text(events) == "Hello big world"
            assert sent(service) == [False, False]
            assert len((await service.stats())["latest"]) == 2

    asyncio.run(scenario())


def test_an_engine_that_refuses_is_left_for_another(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):
            service.engines[0].script.refuse = BUSY
            for _ in range(8):
                assert (await ask(client))[0].accepted.engine == "single-1"
            assert all(sent(service)), "the router was asked for places only"

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_reached_is_left_for_another(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):
            await service.engines[0].stop()
            answers = [await ask(client) for _ in range(4)]
            assert {answer[0].accepted.engine for answer in answers} == {"single-1"}

    asyncio.run(scenario())


def test_the_routers_refusal_is_the_clients(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        ladder = {"ladder": ["reject"]}
        async with connected(start_service, tmp_path, single=(4,), routing=ladder) as (_, client):
            with pytest.raises(ServiceError) as never:
                await ask(client, request(stop=pb.StopConditions(max_tokens=900)))
                asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 500))
                await ask(client, asked)
            assert never.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert never.value.reason == "KV_NEVER_FITS"

    asyncio.run(scenario())


def test_what_must_wait_waits_in_the_router(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            engine, known = service.engine, service.router.service.engines.all()[0]
            full = engine.headroom.headroom_bytes
            engine.push(headroom_bytes=0)
            await service.until(lambda: known.headroom.headroom_bytes == 0, ENOUGH_S)
            asked = asyncio.ensure_future(ask(client))
            room = service.router.service.queue
            await service.until(lambda: len(room) == 1, ENOUGH_S)
            engine.push(headroom_bytes=full)
            assert text(await asked) == "Hello big world"
            assert sent(service) == [False]

    asyncio.run(scenario())


def test_an_answer_that_breaks_off_is_told(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            service.engine.script.fail_after = 1
            with pytest.raises(ServiceError) as broken:
                await ask(client)
            assert broken.value.reason == "WORKER_LOST"
            assert sent(service) == [True], "nothing is generated twice"

    asyncio.run(scenario())


def test_leaving_an_answer_ends_it(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            service.engine.script.pause = asyncio.Event()
            events = client.generate(request())
            async for event in events:
                if event.delta.text:
                    break
            await events.aclose()
            await service.until(lambda: len(service.engine.cancelled) == 1, ENOUGH_S)
            picker = service.router.service.issuer
            await service.until(lambda: picker.open == 0, ENOUGH_S)

    asyncio.run(scenario())
