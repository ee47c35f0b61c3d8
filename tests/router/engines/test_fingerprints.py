"""The router says how its engines differ, and marks answers that cross from one to another."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import httpx
import pytest
from ullage_testing.fake_engine import Script

from ullage.inference.v1 import inference_pb2 as pb

StartService = Callable[..., AbstractAsyncContextManager[Any]]
WORDS = ("One", " two", " three")
MARK = "x-ullage-resumed-inexact"


async def known(service: Any) -> None:
    """Waits until the router knows the fingerprints that its ready engines have."""
    engines = service.router.service.engines

    def is_known() -> bool:
        reported = {e.headroom.engine: e.headroom.fingerprint for e in service.engines}
        ready = {e.headroom.engine for e in service.engines if e.headroom.ready}
        seen = {name: each.digest for name, each in engines.numerics().items()}
        return seen == {name: reported[name] for name in ready}

    await service.until(is_known)


async def gauges(service: Any) -> dict[str, float]:
    lines = (await service.monitoring.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith("ullage_router_fingerprints{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}


def test_the_router_says_how_its_engines_differ(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100), large=(100,)) as service:
            for engine in service.engines:
                engine.set_facts(weights="w", processor="p")
            await known(service)
            stats = await service.stats()
            assert stats["fingerprints"] == {"count": 1, "differing": {}}
            digest = service.engine.headroom.fingerprint
            assert {each["fingerprint"] for each in stats["engines"]} == {digest}
            assert await gauges(service) == {"single": 1.0, "large": 1.0}
            described = await service.grpc.GetModel(pb.GetModelRequest())
            assert described.fingerprint == digest
            assert dict(described.fingerprint_facts) == {"weights": "w", "processor": "p"}

            service.engines[1].set_facts(weights="w", processor="q")
            await known(service)
            fingerprints = (await service.stats())["fingerprints"]
            by_value = {"p": ["large-0", "single-0"], "q": ["single-1"]}
            assert fingerprints == {"count": 2, "differing": {"processor": by_value}}
            assert await gauges(service) == {"single": 2.0, "large": 1.0}
            described = await service.grpc.GetModel(pb.GetModelRequest())
            assert not described.fingerprint
            assert not described.fingerprint_facts

            service.engines[1].set_facts(weights="w", processor="p")
            await known(service)
            assert (await service.stats())["fingerprints"]["count"] == 1

    with caplog.at_level(logging.INFO, "ullage_router.engines.engines"):
        asyncio.run(scenario())
    lines = [record for record in caplog.records if "numerics" in record.message]
    assert [(line.levelname, line.message) for line in lines[-2:]] == [
        ("WARNING", "engines differ in their numerics"),
        ("INFO", "engines have the same numerics again"),
    ]
    assert lines[-2].reason == "processor differs: p (large-0, single-0), q (single-1)"


def test_the_log_has_a_line_for_each_change_alone(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100)) as service:
            for engine, weights in zip(service.engines, "aab", strict=True):
                engine.set_facts(weights=weights)
            await known(service)
            caplog.clear()
            reports = [e.reports for e in service.router.service.engines.all()]
            for engine in service.engines:
                engine.push()
            all_engines = service.router.service.engines.all
            await service.until(
                lambda: all(e.reports > n for e, n in zip(all_engines(), reports, strict=True))
            )
            service.engines[1].set_facts(weights="b")  # one kind has another engine now
            await known(service)
            assert not [line for line in caplog.messages if "numerics" in line]
            service.engines[1].set_facts(weights="c")
            await known(service)
            assert len([line for line in caplog.messages if "numerics" in line]) == 1

    asyncio.run(scenario())


def test_an_engine_of_an_earlier_release_differs_and_one_that_loads_does_not(
    start_service: StartService,
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            service.engine.set_facts(weights="w")
            await known(service)
            differing = (await service.stats())["fingerprints"]["differing"]
            assert differing == {"fingerprint": {"none": ["single-1"], "reported": ["single-0"]}}
            service.engines[1].push(ready=False)
            await known(service)
            assert (await service.stats())["fingerprints"] == {"count": 1, "differing": {}}

    asyncio.run(scenario())


async def broken_off(service: Any, ask: Any) -> Any:
    """The result of a request whose engine is stopped after its first word."""
    for engine in service.engines:
        engine.script = Script(words=WORDS, pause=asyncio.Event())
    task = asyncio.ensure_future(ask)
    known_engines = service.router.service.engines.all
    await service.until(lambda: any(e.inflight and not e.backlog_tokens for e in known_engines()))
    lost = next(engine for engine in service.engines if engine.active)
    for engine in service.engines:
        engine.script = Script(words=WORDS)
    await lost.stop()
    return await task


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_that_crosses_says_so_at_its_end(
    start_service: StartService, differs: bool, is_chat: bool
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for number, engine in enumerate(service.engines):
                engine.set_facts(weights=f"w{number * differs}")
            await known(service)
            ask = service.chat if is_chat else service.complete
            usage = {"stream_options": {"include_usage": True}}
            answer = await broken_off(service, ask(stream=True, **usage))
            assert answer.text.endswith("data: [DONE]\n\n")
            assert (f"\n\n: {MARK}: true\n\ndata: [DONE]" in answer.text) == differs
            last = chunks_of(answer)[-1]
            expected = {"resumed_inexact": True, "resumed_on": [last_engine(service)]}
            assert last.get("ullage") == (expected if differs else None)
            [continued] = service_requests(service)
            assert list(continued.continuation.fingerprints) == [
                fingerprint for fingerprint in fingerprints_of(service) if fingerprint
            ]
            plain = await ask(stream=True)
            assert MARK not in plain.text

    def last_engine(service: Any) -> str:
        return next(e.headroom.engine for e in service.engines if has_continued(e))

    def has_continued(engine: Any) -> bool:
        return any(request.HasField("continuation") for request in engine.requests)

    def service_requests(service: Any) -> list[pb.GenerateRequest]:
        return [r for e in service.engines for r in e.requests if r.HasField("continuation")]

    def fingerprints_of(service: Any) -> list[str]:
        return [e.headroom.fingerprint for e in service.engines if not has_continued(e)]

    asyncio.run(scenario())


@pytest.mark.parametrize("differs", [True, False])
def test_a_whole_answer_that_crosses_has_a_header(
    start_service: StartService, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for number, engine in enumerate(service.engines):
                engine.set_facts(weights=f"w{number * differs}")
            await known(service)
            answer = await broken_off(service, service.complete())
            assert answer.headers.get(MARK) == ("true" if differs else None)
            assert answer.headers["x-ullage-resumed-on"]

    with caplog.at_level(logging.INFO, "ullage_router"):
        asyncio.run(scenario())
    [line] = [record for record in caplog.records if record.message == "answer resumed"]
    assert line.inexact == differs


@pytest.mark.parametrize("differs", [True, False])
def test_over_grpc_the_last_message_and_metadata_say_so(
    start_service: StartService, differs: bool
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for number, engine in enumerate(service.engines):
                engine.set_facts(weights=f"w{number * differs}")
            await known(service)
            call = service.grpc.Generate(pb.GenerateRequest(text="Hi"))

            async def read() -> list[pb.GenerateResponse]:
                return [event async for event in call]

            events = await broken_off(service, read())
            assert events[-1].finished.resumed_inexact == differs
            metadata = dict(await call.trailing_metadata())
            assert metadata.get(MARK) == ("true" if differs else None)
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(scenario())


def test_an_answer_goes_on_where_it_stays_exact_if_it_can(start_service: StartService) -> None:
    """Whichever engine of the other kind has less to do."""

    async def scenario() -> None:
        async with start_service(single=(100,) * 6) as service:
            for engine, weights in zip(service.engines, "aabbcc", strict=True):
                engine.set_facts(weights=weights)
            await known(service)
            answer = await broken_off(service, service.complete())
            assert MARK not in answer.headers
            names = {answer.headers["x-ullage-engine"], answer.headers["x-ullage-resumed-on"]}
            kinds = {e.headroom.fingerprint for e in service.engines if e.headroom.engine in names}
            assert len(names) == 2
            assert len(kinds) == 1

    asyncio.run(scenario())


def test_a_continuation_from_a_client_is_marked_too(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100,)) as service:
            service.engine.script = Script(words=WORDS)
            service.engine.set_facts(weights="w")
            await known(service)
            own = service.engine.headroom.fingerprint
            for fingerprints, is_inexact in (([own], False), (["other"], True), ([], True)):
                answer = pb.PartialAnswer(token_ids=[0], text_length=len(WORDS[0]))
                request = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=[72]),
                    sampling=pb.SamplingParams(seed=7),
                    stop=pb.StopConditions(max_tokens=3),
                    continuation=pb.Continuation(answers=[answer], fingerprints=fingerprints),
                )
                events = [event async for event in service.grpc.Generate(request)]
                assert events[-1].finished.resumed_inexact == is_inexact

    asyncio.run(scenario())
