"""The tiers that had a prompt's KV: in usage, in the header, in the record and in the metrics."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from ullage_testing.fake_engine import Script

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.process.logs import MORE_FIELDS

StartService = Callable[..., AbstractAsyncContextManager[Any]]
HEADER = "x-ullage-cached"
NOTHING = pb.Usage()
ON_DEVICE = pb.Usage(cached_tokens=16)
IN_TIERS = pb.Usage(
    cached_tokens=4608,
    cached_by_tier=[
        pb.CachedTokens(tier="device", tokens=16),
        pb.CachedTokens(tier="host", tokens=4080, seconds=0.0214),
        pb.CachedTokens(tier="file", tokens=512, seconds=1.5),
    ],
)
BY_TIER = {"device": 16, "host": 4080, "file": 512}
CASES = [
    (NOTHING, {"cached_tokens": 0}, None),
    (ON_DEVICE, {"cached_tokens": 16}, "device=16"),
    (
        IN_TIERS,
        {"cached_tokens": 4608, "cached_tokens_details": BY_TIER},
        "device=16, host=4080;seconds=0.021, file=512;seconds=1.500",
    ),
]


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    """The usage of a whole answer, or of a stream's last chunk."""
    assert answer.status_code == 200, answer.text
    chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return dict(json.loads(chunks[-1] if chunks else answer.text)["usage"])


@pytest.mark.parametrize(("cached", "details", "header"), CASES)
def test_usage_and_header_name_the_tiers(
    start_service: StartService, cached: pb.Usage, details: dict[str, Any], header: str | None
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script = Script(cached=cached)
            for ask in (service.chat, service.complete):
                for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                    answer = await ask(**more)
                    assert usage_of(answer)["prompt_tokens_details"] == details
                    assert answer.headers.get(HEADER) == header

    asyncio.run(scenario())


def test_over_grpc_both_ends_of_an_answer_name_the_tiers(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script = Script(cached=IN_TIERS)
            call = service.grpc.Generate(pb.GenerateRequest(text="Hi"))
            first, *_, last = [event async for event in call]
            for message in (first.accepted, last.finished.usage):
                assert message.cached_tokens == IN_TIERS.cached_tokens
                assert message.cached_by_tier == IN_TIERS.cached_by_tier

    asyncio.run(scenario())


def test_record_log_and_metrics_name_the_tiers(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seconds = {"device": 0.0, "host": 0.0214, "file": 1.5}

    async def scenario() -> None:
        async with start_service(routing={"coalesce": {"enabled": True}}) as service:
            service.engine.script = Script(cached=IN_TIERS, pause=asyncio.Event())
            # Both share one generation, whose KV was found once.
            both = asyncio.gather(*(service.complete(temperature=0) for _ in range(2)))
            coalescer = service.router.service.coalescer
            await service.until(lambda: coalescer.joined == 1)
            service.engine.script.pause.set()
            assert {answer.headers[HEADER] for answer in await both} == {CASES[2][2]}
            service.engine.script = Script()
            await service.complete()
            new, *shared = (await service.stats())["latest"]
            assert (new["cached_tokens"], new["cached_s"]) == ({}, {})
            for latest in shared:
                assert (latest["cached_tokens"], latest["cached_s"]) == (BY_TIER, seconds)
            assert len(service.engine.requests) == 2
            lines = (await service.monitoring.get("/metrics")).text.splitlines()
            for tier, tokens in BY_TIER.items():
                line = f'ullage_router_cached_tokens_total{{tier="{tier}"}} {float(tokens)}'
                assert line in lines

    asyncio.run(scenario())
    logged = [vars(each)[MORE_FIELDS] for each in caplog.records if each.message == "answered"]
    assert [each["cached_tokens"] for each in logged] == [BY_TIER, BY_TIER, {}]
    assert [each["cached_s"] for each in logged] == [seconds, seconds, {}]
