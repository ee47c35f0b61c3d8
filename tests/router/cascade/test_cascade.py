"""Two real routers, one a step of the other: who answers, what is told, what ends."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.process.api_keys import entry
from ullage_common.process.config_file import ConfigError
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.cascade.peer import PeerKey
from ullage_router.errors import http_status

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WORDS = ("small", " says", " so", " now")
TOKENS = {"confidence": {"tokens": 2, "threshold_percent": 60}}
SURE = -0.1
UNSURE = -3.0
BUSY = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=1)
NO_WAITING = {"ladder": ["reject"]}
Outcomes = list[tuple[str, str]]


@contextlib.asynccontextmanager
async def cascade(start: "StartService", **more: Any) -> AsyncIterator[tuple["Service", "Service"]]:
    """(small, big): the big service's router asks the small one's first."""
    sections = {name: more.pop(name) for name in ("routing", "limits") if name in more}
    async with start(model="small-model", routing=NO_WAITING) as small:
        small.engine.script.words = WORDS
        steps = [
            {"name": "small", "target": f"127.0.0.1:{small.router.grpc_port}"},
            {"name": "big"},
        ]
        section = {"name": "default/big", "steps": steps, **TOKENS, **more}
        async with start(model="big-model", cascade=section, **sections) as big:
            yield small, big


async def ask(big: "Service", **more: Any) -> Any:
    return await big.chat(**({"model": "big-model"} | more))


def text(answer: Any) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


async def outcomes(big: "Service") -> Outcomes:
    latest = (await big.stats())["latest"][0]
    return [(attempt["step"], attempt["outcome"]) for attempt in latest["attempts"]]


def test_a_sure_answer_of_the_small_model_is_the_answer(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with cascade(start_service) as (small, big):
            small.engine.script.logprob = SURE
            host = inference_pb2.CachedTokens(tier="host", tokens=16, seconds=0.5)
            small.engine.script.cached = inference_pb2.Usage(
                cached_tokens=16, cached_by_tier=[host]
            )
            answer = await ask(big)
            assert text(answer) == "small says so now"
            assert answer.headers["x-ullage-model"] == "small-model"
            assert answer.headers["x-ullage-cascade"].startswith("small=served;confidence=0.9")
            assert answer.headers["x-ullage-engine"] == "single-0"
            assert answer.headers["x-ullage-cached"] == "host=16;seconds=0.500"
            assert "x-ullage-discarded-tokens" not in answer.headers
            assert answer.json()["model"] == "big-model", "the body names what was asked for"
            assert answer.json()["choices"][0]["logprobs"] is None
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert big.engine.requests == []
            sent = small.engine.requests[0]
            assert sent.output.HasField("top_logprobs"), "asked for what it is judged by"
            latest = (await big.stats())["latest"][0]
            assert (latest["model"], latest["output_tokens"]) == ("small-model", 4)
            assert latest["ttft_s"] is not None

    asyncio.run(scenario())


def test_a_step_over_tls_with_the_key_of_the_service(
    start_service: "StartService", make_authority: Callable[[], Any], tmp_path: Path
) -> None:
    """The other router demands a certificate and a key, and the client has neither."""

    async def scenario() -> None:
        authority = make_authority()
        shown = authority.issue(tmp_path / "small", "small.test")
        own = authority.issue(tmp_path / "big", "big.test")
        keys = tmp_path / "keys"
        secret = tmp_path / "secret"
        keys.mkdir()
        secret.mkdir()
        (keys / "big").write_text(entry("sk-big-0123456789"))
        (secret / "key").write_text("sk-big-0123456789\n")
        tls = {"router": {"dir": str(shown), "client_ca_dir": str(shown)}}
        tenants = {"keys_dir": str(keys)}
        async with start_service(model="small-model", tls=tls, tenants=tenants) as small:
            small.engine.script.logprob = SURE
            step = {
                "name": "small",
                "target": f"127.0.0.1:{small.router.grpc_port}",
                "tls": {"dir": str(own), "server_name": "small.test"},
                "key_dir": str(secret),
            }
            section = {"name": "default/big", "steps": [step, {"name": "big"}], **TOKENS}
            async with start_service(model="big-model", cascade=section) as big:
                answer = await ask(big)
                assert answer.headers["x-ullage-model"] == "small-model"
                assert await outcomes(big) == [("small", "served")]
                stats = json.loads((await big.monitoring.get("/stats")).text)
                assert stats["tls"]["cascade.small"]["problem"] == ""
                (tenant,) = small.router.service.tenants.snapshot()["tenants"]["usage"]
                assert (tenant["name"], tenant["requests"]) == ("big", 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("text", [None, "short", entry("sk-big-0123456789"), "with spaces in it"])
def test_an_unusable_key_is_refused_at_start(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/key: ")) as caught:
        asyncio.run(PeerKey(tmp_path).start())
    assert text is None or text not in str(caught.value)


def test_an_unsure_one_is_handed_on(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with cascade(start_service) as (small, big):
            small.engine.script.logprob = UNSURE
            answer = await ask(big)
            assert text(answer) == "Hello big world"
            assert answer.headers["x-ullage-model"] == "big-model"
            assert (
                answer.headers["x-ullage-cascade"] == "small=escalated;confidence=0.050, big=served"
            )
            assert answer.headers["x-ullage-discarded-tokens"] == "2"
            assert not big.engine.requests[0].output.HasField("top_logprobs")
            assert answer.json()["usage"]["completion_tokens"] == 3, "only what is read"
            page = (await big.monitoring.get("/metrics")).text
            assert 'cascade_attempts_total{outcome="escalated",step="small"} 1.0' in page
            assert 'cascade_attempts_total{outcome="served",step="big"} 1.0' in page
            assert 'cascade_discarded_tokens_total{step="small"} 2.0' in page
            told = (await big.stats())["cascade"]
            assert told[0]["outcomes"] == {"escalated": 1}
            assert (told[0]["discarded_tokens"], told[1]["outcomes"]) == (2, {"served": 1})

    asyncio.run(scenario())


def test_the_discarded_answer_is_cancelled_in_its_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with cascade(start_service, confidence={"tokens": 1}) as (small, big):
            small.engine.script.logprob = UNSURE
            small.engine.script.pause = asyncio.Event()  # it would never end by itself
            assert text(await ask(big)) == "Hello big world"
            await big.until(lambda: len(small.engine.cancelled) == 1, timeout_s=20)

    asyncio.run(scenario())


def test_streams_hold_back_and_then_flow(start_service: "StartService") -> None:
    """Nothing is sent before the judgement; afterwards every token goes on as it comes."""

    async def scenario() -> None:
        async with cascade(start_service, confidence={"tokens": 1}) as (small, big):
            small.engine.script.logprob = SURE
            small.engine.script.pause = asyncio.Event()
            body = {"model": "big-model", "stream": True, "prompt": "Hi", "logprobs": 0}
            async with big.http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.headers["x-ullage-model"] == "small-model"
                lines = answer.aiter_lines()
                first = json.loads((await anext(lines)).removeprefix("data: "))
                assert first["choices"][0]["text"] == "small"
                kept = first["choices"][0]["logprobs"]["token_logprobs"]
                assert kept == pytest.approx([SURE]), "the client asked for them"
                small.engine.script.pause.set()
                rest = [line async for line in lines if line.startswith("data: {")]
                said = [json.loads(line[6:])["choices"][0]["text"] for line in rest]
                assert "".join(said) == " says so now"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ({"refuse": BUSY}, "refused"),
        ({"fail_after": 1}, "failed"),
        ({"words": ()}, "escalated"),
        ({"logprob": float("nan")}, "escalated"),
    ],
    ids=["refusal", "failure", "empty", "nan"],
)
def test_whatever_keeps_the_small_one_from_answering_the_big_one_answers(
    start_service: "StartService", script: dict[str, Any], outcome: str
) -> None:
    async def scenario() -> None:
        async with cascade(start_service) as (small, big):
            for name, value in script.items():
                setattr(small.engine.script, name, value)
            answer = await ask(big)
            assert (answer.status_code, text(answer)) == (200, "Hello big world")
            assert await outcomes(big) == [("small", outcome), ("big", "served")]

    asyncio.run(scenario())


def test_a_small_service_that_is_not_there_costs_nothing_but_a_moment(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with cascade(start_service) as (small, big):
            await small.router.stop()
            assert text(await ask(big)) == "Hello big world"
            assert await outcomes(big) == [("small", "refused"), ("big", "served")]

    asyncio.run(scenario())


def test_a_step_gets_only_its_share_of_the_time(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with cascade(start_service, limits={"request_timeout": 4.0}) as (small, big):
            small.engine.script.hold = asyncio.Event()
            assert text(await ask(big)) == "Hello big world"
            assert await outcomes(big) == [("small", "slow"), ("big", "served")]
            await big.until(lambda: len(small.engine.cancelled) == 1, timeout_s=20)

    asyncio.run(scenario())


def test_the_last_step_tells_its_error(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with cascade(start_service, routing=NO_WAITING) as (small, big):
            small.engine.script.logprob = UNSURE
            big.engine.script.refuse = BUSY
            answer = await ask(big)
            assert answer.status_code == 429
            assert "retry-after" in answer.headers
            assert answer.headers["x-ullage-action"] == "reject"
            assert await outcomes(big) == [("small", "escalated"), ("big", "refused")]
            bad = await ask(big, temperature=9)
            assert bad.status_code == 400, "what is wrong is told before any step is asked"
            assert len(small.engine.requests) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"text": "Why?\n```\nx = 1\n```"},
        {"text": "What is 12 * (34 + 56) / 78?"},
        {"text": "x" * 99, "stop_token_ids": [3]},
        {"text": "y" * 201},
    ],
    ids=["n", "code", "maths", "tokens", "length"],
)
def test_what_starts_at_the_large_model(
    start_service: "StartService", more: dict[str, Any]
) -> None:
    async def scenario() -> None:
        heuristics = {"prompt_characters": 200}
        async with cascade(start_service, heuristics=heuristics) as (small, big):
            answer = await ask(big, **more)
            assert (answer.status_code, small.engine.requests) == (200, [])
            assert answer.headers["x-ullage-cascade"] == "big=served"

    asyncio.run(scenario())


@pytest.mark.parametrize("logprob", [SURE, UNSURE])
def test_in_parallel_the_loser_is_cancelled(start_service: "StartService", logprob: float) -> None:
    async def scenario() -> None:
        async with cascade(start_service, parallel=True) as (small, big):
            small.engine.script.logprob = logprob
            small.engine.script.hold = asyncio.Event()
            is_sure = logprob == SURE
            if is_sure:
                big.engine.script.hold = asyncio.Event()  # it would never answer
            asked = asyncio.ensure_future(ask(big))
            await big.until(lambda: len(big.engine.requests) == 1, timeout_s=20)
            small.engine.script.hold.set()
            answer = await asked
            assert text(answer) == ("small says so now" if is_sure else "Hello big world")
            loser = [("small", "served"), ("big", "lost")]
            handed = [("small", "escalated"), ("big", "served")]
            assert await outcomes(big) == (loser if is_sure else handed)
            if is_sure:
                await big.until(lambda: len(big.engine.cancelled) == 1, timeout_s=20)
            engine = big.router.service.engines.all()[0]
            await big.until(lambda: engine.inflight == 0, timeout_s=20)

    asyncio.run(scenario())


def test_at_the_peak_low_priorities_get_the_small_model(start_service: "StartService") -> None:
    """Degraded instead of refused: no judgement, and others keep the larger model."""

    async def scenario() -> None:
        async with cascade(start_service, fallback={"pressure_level": 2}) as (small, big):
            small.engine.script.logprob = UNSURE
            known = big.router.service.engines.all()[0]
            big.engine.push(pressure_level=2)
            await big.until(lambda: known.headroom.pressure_level == 2, timeout_s=20)
            low, usual = [await generate(big, priority) for priority in (-1, 0)]
            assert low[0].accepted.model == "small-model"
            assert [a.outcome for a in low[0].accepted.attempts] == ["fallback"]
            assert usual[0].accepted.model == "big-model"
            assert [a.outcome for a in usual[0].accepted.attempts] == ["escalated", "served"]
            assert usual[0].accepted.attempts[0].confidence == pytest.approx(0.0498, rel=1e-2)
            assert all(not r.delta.logprobs for r in low + usual)

    asyncio.run(scenario())


async def generate(
    big: "Service", priority: int = 0, metadata: tuple[tuple[str, str], ...] = ()
) -> list[Any]:
    request = inference_pb2.GenerateRequest(text="Hi", priority=priority)
    return [response async for response in big.grpc.Generate(request, metadata=metadata)]


@pytest.mark.parametrize(
    ("here", "asked", "there", "sent"),
    [
        ({"priority": 50}, 0, {}, 0),
        ({"priority": 50}, 0, {"priority": 3}, 3),
        ({"max_priority": 50}, 40, {"priority": 3, "max_priority": 9}, 3),
        ({"priority": -10}, 0, {}, -10),
        ({"priority": -10}, 0, {"priority": 3}, -10),
        ({"priority": -10}, 0, {"priority": -20}, -20),
        ({"max_priority": 50}, -7, {"priority": -20, "max_priority": -5}, -7),
        ({"priority": 50}, 0, None, 0),
        ({"priority": -10}, 0, None, -10),
    ],
)
def test_a_priority_here_is_none_there(
    start_service: "StartService",
    tmp_path: Path,
    here: dict[str, int],
    asked: int,
    there: dict[str, int] | None,
    sent: int,
) -> None:
    """The other service's tenants have rules of their own, or it has none (None)."""
    key = "sk-alice-0123456789"
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").write_text(entry(key))

    def tenants(rules: dict[str, int]) -> dict[str, Any]:
        named = [{"name": "alice", **rules}]
        return {"keys_dir": str(tmp_path / "keys"), "tenants": named}

    async def scenario() -> None:
        theirs = {} if there is None else {"tenants": tenants(there)}
        async with start_service(model="small-model", **theirs) as small:
            small.engine.script.logprob = SURE
            steps = [
                {"name": "small", "target": f"127.0.0.1:{small.router.grpc_port}"},
                {"name": "big"},
            ]
            section = {"name": "default/big", "steps": steps, **TOKENS}
            async with start_service(
                model="big-model", cascade=section, tenants=tenants(here)
            ) as big:
                answer = await generate(big, asked, (("authorization", f"Bearer {key}"),))
                attempts = [(a.step, a.outcome) for a in answer[0].accepted.attempts]
                assert attempts == [("small", "served")]
                assert [request.priority for request in small.engine.requests] == [sent]

    asyncio.run(scenario())


def test_a_client_that_goes_ends_every_step(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with cascade(start_service, parallel=True) as (small, big):
            small.engine.script.hold = big.engine.script.hold = asyncio.Event()
            call = big.grpc.Generate(inference_pb2.GenerateRequest(text="Hi"))
            both = (small.engine, big.engine)
            await big.until(lambda: all(e.active == 1 for e in both), timeout_s=20)
            call.cancel()
            await big.until(lambda: all(e.active == 0 for e in both), timeout_s=20)
            await big.until(lambda: big.router.service.pipeline.inflight == 0, timeout_s=20)

    asyncio.run(scenario())


def test_a_step_gets_no_fields_that_its_service_does_not_know(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with cascade(start_service) as (small, big):
            small.engine.script.logprob = SURE
            assert text(await ask(big, bad_words=["dog"])) == "small says so now"
            assert list(small.engine.requests[-1].sampling.bad_words) == ["dog"]

        async with cascade(start_service) as (small, big):
            small.engine.script.logprob = SURE
            small.engine.request_fields = ()
            small.engine.push(epoch=small.engine.headroom.epoch + 1)
            known = small.router.service.engines.all()[0]
            await small.until(lambda: not known.description.request_fields)

            assert text(await ask(big, bad_words=["dog"])) == "Hello big world"
            assert await outcomes(big) == [("small", "refused"), ("big", "served")]
            assert (await small.stats())["latest"] == [], "the request was not sent"
            assert text(await ask(big)) == "small says so now"

    asyncio.run(scenario())


def test_circles_are_told_and_the_request_is_answered(start_service: "StartService") -> None:
    """Two services that name each other: the second sees the request come back."""

    async def scenario() -> None:
        async with cascade(start_service) as (small, big):
            metadata = (("x-ullage-cascade", "default/small,default/big"),)
            request = inference_pb2.GenerateRequest(text="Hi")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in big.grpc.Generate(request, metadata=metadata):
                    pass
            error = from_rpc_error(caught.value)
            assert error.reason == "CASCADE_LOOP"
            assert http_status(error) == 400, "nothing failed: the services name each other"
            assert "default/small -> default/big -> default/big" in error.message
            assert small.engine.requests == []
            small.engine.script.logprob = SURE
            await ask(big)
            assert await outcomes(big) == [("small", "served")]

    asyncio.run(scenario())


def test_without_a_cascade_the_model_is_told_too(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.chat()
            assert answer.headers["x-ullage-model"] == "tiny"
            assert "x-ullage-cascade" not in answer.headers
            assert (await service.stats())["cascade"] == []

    asyncio.run(scenario())
