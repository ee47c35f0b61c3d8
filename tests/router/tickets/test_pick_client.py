"""The client: straight from engines where it can, through the router where it must."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc
import pytest
from ullage_testing.fake_engine import Script

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.process.api_keys import entry
from ullage_common.tickets import client as client_module
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
    start: "StartService",
    tmp_path: Path,
    is_on: bool = True,
    metadata: tuple[tuple[str, str], ...] = (),
    **more: Any,
) -> AsyncIterator[tuple["Service", Client]]:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "key").write_bytes(KEY)
    tickets = {"tickets": {"keys_dir": str(keys)}} if is_on else {}
    async with start(**tickets, **more) as service:
        router = f"127.0.0.1:{service.router.grpc_port}"
        async with Client(router, metadata=metadata) as client:
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
            picker = service.router.service.issuer
            calls = []
            pick = picker.pick
            picker.pick = lambda asked, *caller: calls.append(asked) or pick(asked, *caller)
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


def test_a_channel_with_an_answer_stays_open_however_many_there_are(
    start_service: "StartService", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_ENGINES", 1)

    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):
            pause = asyncio.Event()
            for engine in service.engines:
                engine.script = Script(pause=pause)
            long = asyncio.create_task(ask(client))
            await service.until(lambda: any(engine.active for engine in service.engines))
            busy, other = sorted(service.engines, key=lambda engine: not engine.active)
            busy.push(headroom_bytes=0)
            known = service.router.service.engines.all()
            await service.until(lambda: any(not engine.headroom.headroom_bytes for engine in known))
            other.script = Script()
            for _ in range(3):
                assert (await ask(client))[0].accepted.engine == other.headroom.engine
                await asyncio.sleep(0.1)  # a channel that is closed would cancel its calls now
            pause.set()
            assert text(await long) == "Hello big world"

    asyncio.run(scenario())


def test_only_engines_that_have_an_adapter_are_sent_what_names_it(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):
            lacking, having = service.engines
            having.adapters = ("sql",)
            having.push(epoch=having.headroom.epoch + 1)
            await service.until(lambda: "sql" in service.router.service.engines.adapters)
            for _ in range(40):
                accepted = (await ask(client, request(model="sql")))[0].accepted
                assert (accepted.engine, accepted.route) == ("single-1", "single")
            assert not lacking.requests
            for name in ("", "tiny"):
                accepted = (await ask(client, request(model=name)))[0].accepted
                assert accepted.route == "direct"

    asyncio.run(scenario())


def test_who_may_use_an_adapter_only_asks_for_the_model_once(
    start_service: "StartService", tmp_path: Path
) -> None:
    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants" / "alice").write_text(entry("sk-alice-0123456789"))
    rules = [{"name": "alice", "models": ["sql"]}]
    tenants = {"keys_dir": str(tmp_path / "tenants"), "tenants": rules}
    proof = (("authorization", "Bearer sk-alice-0123456789"),)

    async def scenario() -> None:
        async with connected(start_service, tmp_path, metadata=proof, tenants=tenants) as (
            service,
            client,
        ):
            service.engine.adapters = ("sql",)
            service.engine.push(epoch=service.engine.headroom.epoch + 1)
            engines = service.router.service.engines
            await service.until(lambda: "sql" in engines.adapters)
            with patch.object(engines, "describe", wraps=engines.describe) as describe:
                for _ in range(3):
                    events = await ask(client, request(model="sql"))
                    assert events[0].accepted.route == "single"
            assert describe.call_count == 1

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
            engine = service.engine
            known = service.router.service.engines.all()[0]
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


WORDS = ("One", " two", " three", " four")


async def first_word(client: Client, asked: pb.GenerateRequest, events: list[Any]) -> None:
    """Reads an answer to its end; the first word is in `events` when it has come."""
    async for event in client.generate(asked):
        events.append(event)


def is_on(events: list[Any]) -> bool:
    return any(event.delta.text for event in events)


@pytest.mark.parametrize("through", ["engine", "router", "router for a longer answer"])
def test_an_answer_goes_on_elsewhere_when_its_engine_is_lost(
    start_service: "StartService", tmp_path: Path, through: str
) -> None:
    """By another ticket, or through the router where there is no place at once, or one for a
    shorter answer only."""

    host = pb.CachedTokens(tier="host", tokens=1, seconds=0.5)
    first = pb.Usage(cached_tokens=1, cached_by_tier=[host])
    later = pb.Usage(cached_tokens=2)

    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):
            for engine in service.engines:
                engine.script = Script(words=WORDS, pause=asyncio.Event(), cached=first)
            events: list[Any] = []
            asked = request(stop=pb.StopConditions(max_tokens=4))
            task = asyncio.ensure_future(first_word(client, asked, events))
            await service.until(lambda: is_on(events), ENOUGH_S)
            (lost,) = [engine for engine in service.engines if engine.active]
            (other,) = [engine for engine in service.engines if engine is not lost]
            for engine in service.engines:
                engine.script = Script(words=WORDS, cached=later)
            if through == "router":
                give_no_place(service)
            elif through != "engine":
                give_shorter_places(service)
            await lost.stop()
            await task
            assert [e.WhichOneof("event") for e in events].count("accepted") == 1
            assert text(events) == "".join(WORDS)
            assert not [e for e in events if e.delta.token_ids], "they were not asked for"
            usage = events[-1].finished.usage
            assert usage.completion_tokens == 4
            assert (usage.cached_tokens, list(usage.cached_by_tier)) == (1, [host])
            assert events[-1].finished.resumes == 1
            assert (TICKET in other.metadata[-1]) == (through == "engine")
            assert list(other.requests[-1].continuation.answers[0].token_ids) == [0]
            assert other.requests[-1].sampling.seed == 7

    asyncio.run(scenario())


@pytest.mark.parametrize("through", ["engine", "router"])
def test_log_probabilities_of_a_prompt_come_once(
    start_service: "StartService", tmp_path: Path, through: str
) -> None:
    """Even if the engine is lost between two messages with them."""
    prompt = list(range(65, 76))

    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):

            def on_failure() -> None:
                for engine in service.engines:
                    engine.script = Script(words=WORDS, scored_at_once=6)
                if through == "router":
                    give_no_place(service)

            for engine in service.engines:
                engine.script = Script(fail_after_scored=8, on_failure=on_failure)
            output = pb.OutputOptions(prompt_logprobs=0)
            asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), output=output)
            events = await ask(client, asked)
            scored = [
                e.delta.prompt_logprobs for e in events if e.delta.HasField("prompt_logprobs")
            ]
            assert [token.token_id for part in scored for token in part.tokens] == prompt
            assert [part.start for part in scored] == [0, 4, 8]
            assert text(events) == "".join(WORDS)
            assert sorted(sent(service)) == [through == "engine", True]

    asyncio.run(scenario())


def test_an_answer_goes_on_elsewhere_when_its_engine_stops(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100, 100)) as (service, client):
            for engine in service.engines:
                cut = pb.FINISH_REASON_CANCELLED
                engine.script = Script(words=WORDS[:1], pause=asyncio.Event(), reason=cut)
            events: list[Any] = []
            asked = request(stop=pb.StopConditions(max_tokens=4))
            task = asyncio.ensure_future(first_word(client, asked, events))
            await service.until(lambda: is_on(events), ENOUGH_S)
            (stopping,) = [engine for engine in service.engines if engine.active]
            (other,) = [engine for engine in service.engines if engine is not stopping]
            other.script = Script(words=WORDS)
            stopping.script.pause.set()
            await task
            assert text(events) == "".join(WORDS)
            assert events[-1].finished.reason == pb.FINISH_REASON_STOP
            assert len(other.requests) == 1

    asyncio.run(scenario())


def give_shorter_places(service: "Service") -> None:
    """The router grants one token."""
    issuer = service.router.service.issuer
    pick = issuer.pick

    def grant(asked: pb.PickRequest, *caller: object) -> pb.PickResponse:
        response = pick(asked, *caller)
        for placed in response.placed:
            placed.max_tokens = 1
        return response

    issuer.pick = grant


def test_a_shorter_answer_may_be_shorter_than_its_shortest_length(
    start_service: "StartService", tmp_path: Path
) -> None:
    """An engine refuses a `min_tokens` above `max_tokens`."""

    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            give_shorter_places(service)
            stop = pb.StopConditions(max_tokens=4, min_tokens=3)
            assert (await ask(client, request(stop=stop)))[0].accepted.route == "direct"
            sent_stop = service.engine.requests[-1].stop
            assert (sent_stop.min_tokens, sent_stop.max_tokens) == (1, 1)

    asyncio.run(scenario())


def give_no_place(service: "Service") -> None:
    """The router takes reports and refuses every pick."""
    issuer = service.router.service.issuer
    pick = issuer.pick

    def refuse(asked: pb.PickRequest, *caller: object) -> pb.PickResponse:
        pick(pb.PickRequest(accepted=asked.accepted, ended=asked.ended), *caller)
        refused = pb.Placed(refusal=pb.Refusal(code=8, reason="KV_HEADROOM"), count=1)
        return pb.PickResponse(placed=[refused] * len(asked.requests))

    issuer.pick = refuse


@pytest.mark.parametrize("through", ["engine", "router"])
def test_a_tenant_pays_once_for_an_answer_that_goes_on_elsewhere(
    start_service: "StartService", tmp_path: Path, through: str
) -> None:
    api_keys = tmp_path / "api-keys"
    api_keys.mkdir()
    (api_keys / "alice").write_text("sk-alice-0123456789")
    rules = {"name": "alice", "requests_per_minute": 10, "tokens_per_minute": 1000}
    more = {
        "tenants": {"keys_dir": str(api_keys), "tenants": [rules]},
        "metadata": (("authorization", "Bearer sk-alice-0123456789"),),
        "single": (100, 100),
    }

    async def scenario() -> None:
        async with connected(start_service, tmp_path, **more) as (service, client):
            for engine in service.engines:
                engine.script = Script(words=WORDS, pause=asyncio.Event())
            events: list[Any] = []
            asked = request(stop=pb.StopConditions(max_tokens=4))
            task = asyncio.ensure_future(first_word(client, asked, events))
            await service.until(lambda: is_on(events), ENOUGH_S)
            (lost,) = [engine for engine in service.engines if engine.active]
            for engine in service.engines:
                engine.script = Script(words=WORDS)
            if through == "router":
                give_no_place(service)
            await lost.stop()
            await task
            assert text(events) == "".join(WORDS)
            router = service.router.service
            await service.until(
                lambda: not (router.issuer.open or router.pipeline.inflight), ENOUGH_S
            )
            (alice,) = (await service.stats())["tenants"]["usage"]
            names = ("requests", "requests_left", "prompt_tokens", "output_tokens", "active")
            assert [alice[name] for name in names] == [1, 9, 2, 4, 0]

    asyncio.run(scenario())


def test_the_router_is_told_which_answers_come_at_their_end(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            issuer = service.router.service.issuer
            priced = []
            pick = issuer.pick

            def note(asked: pb.PickRequest, *caller: object) -> pb.PickResponse:
                priced.extend(asked.requests)
                return pick(asked, *caller)

            issuer.pick = note
            await ask(client, request())
            await ask(client, request(samples=pb.Samples(beam=pb.BeamSearch(width=2))))
            assert [each.comes_at_end for each in priced] == [False, True]

    asyncio.run(scenario())


def test_an_answer_waits_for_an_engine_that_comes_back(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path) as (service, client):
            service.engine.script = Script(words=WORDS, pause=asyncio.Event())
            events: list[Any] = []
            asked = request(stop=pb.StopConditions(max_tokens=4))
            task = asyncio.ensure_future(first_word(client, asked, events))
            await service.until(lambda: is_on(events), ENOUGH_S)
            service.engine.script = Script(words=WORDS)
            await service.engine.restart()
            await task
            assert text(events) == "".join(WORDS)

    asyncio.run(scenario())


def test_an_answer_that_breaks_its_engines_is_given_up(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(100,) * 4) as (service, client):
            for engine in service.engines:
                engine.script.fail_after = 1
            with pytest.raises(ServiceError) as broken:
                await ask(client, request(stop=pb.StopConditions(max_tokens=3)))
            assert broken.value.reason == "WORKER_LOST"
            assert len(sent(service)) == 2, "two engines said so"

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


def test_newer_fields_reach_only_engines_that_know_them(
    start_service: "StartService", tmp_path: Path
) -> None:
    sampling = pb.SamplingParams(bad_words=["dog"])

    async def scenario() -> None:
        async with connected(start_service, tmp_path, single=(400, 400)) as (service, client):
            old, new = service.engines
            old.request_fields = ()
            old.push(epoch=old.headroom.epoch + 1)
            engines = service.router.service.engines.all()
            known = next(each for each in engines if each.address == old.address)
            await service.until(lambda: not known.description.request_fields, ENOUGH_S)

            asked = [ask(client, request(sampling=sampling)) for _ in range(8)]
            plain = [ask(client) for _ in range(30)]
            await asyncio.gather(*asked, *plain)
            assert not any(each.sampling.bad_words for each in old.requests)
            assert sum(bool(each.sampling.bad_words) for each in new.requests) == 8
            assert all(sent(service)), "all went straight to an engine"
            assert old.requests

            new.push(ready=False)
            await service.until(lambda: service.engine_state("single-1") != "ready", ENOUGH_S)
            with pytest.raises(ServiceError, match="no engine that knows bad_words is ready"):
                await ask(client, request(sampling=sampling))

    asyncio.run(scenario())
