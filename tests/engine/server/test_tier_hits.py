"""The tiers that had a prompt's KV, as the engine's answers and its log name them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.process.logs import MORE_FIELDS
from ullage_engine.server.journal import Journal, JournalEntry, TierHit

Serve = Callable[..., AbstractAsyncContextManager[Any]]
HITS = [TierHit("host", 4064, 0.021), TierHit("remote", 0, 0.3), TierHit("file", 512, 0.25)]
HOST = pb.CachedTokens(tier="host", tokens=4064, seconds=0.021)
FILE = pb.CachedTokens(tier="file", tokens=512, seconds=0.25)
ON_DEVICE = 2
"""Tokens that the worker finds on the device for requests with a session."""


def ask(**fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), request_id="mine")
    if not fields.get("embed"):
        request.stop.max_tokens = 4
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


async def ends(engine: Any, request: pb.GenerateRequest) -> tuple[pb.Accepted, pb.Usage]:
    events = [event async for event in engine.inference.Generate(request)]
    return events[0].accepted, events[-1].finished.usage


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[TierHit]], None]:
    """Makes tiers have the prompts of all requests from now on."""
    opens = Journal.open

    def loads(hits: list[TierHit]) -> None:
        def opened(journal: Journal, entry: JournalEntry) -> None:
            entry.tier_hits = hits
            opens(journal, entry)

        monkeypatch.setattr(Journal, "open", opened)

    return loads


@pytest.mark.parametrize(
    ("session", "tiers"),
    [
        ("", [HOST, FILE]),
        ("s", [pb.CachedTokens(tier="device", tokens=ON_DEVICE), HOST, FILE]),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_message_and_the_last_name_every_tier(
    serve: Serve,
    load: Callable[[list[TierHit]], None],
    caplog: pytest.LogCaptureFixture,
    session: str,
    tiers: list[pb.CachedTokens],
    n: int,
) -> None:
    load(HITS)
    caplog.set_level(logging.INFO, "ullage.engine")

    async def scenario() -> None:
        async with serve() as engine:
            asked = ask(session_id=session, samples=pb.Samples(n=n))
            for message in await ends(engine, asked):
                assert list(message.cached_by_tier) == tiers
                assert message.cached_tokens == sum(tier.tokens for tier in tiers)

    asyncio.run(scenario())
    [line] = [each for each in caplog.records if each.message == "first_token"]
    fields = vars(line)[MORE_FIELDS]
    assert (fields["request_id"], fields["prompt_tokens"]) == ("mine", 3)
    assert fields["cached_tokens"] == {tier.tier: tier.tokens for tier in tiers}
    assert fields["cached_s"] == {tier.tier: tier.seconds for tier in tiers}


def test_an_embedding_names_its_tiers(serve: Serve, load: Callable[[list[TierHit]], None]) -> None:
    load([HITS[0]])

    async def scenario() -> None:
        async with serve(task="embed") as engine:
            for message in await ends(engine, ask(embed=True)):
                assert (message.cached_tokens, list(message.cached_by_tier)) == (4064, [HOST])

    asyncio.run(scenario())


@pytest.mark.parametrize("session", ["", "s"])
def test_what_no_tier_had_names_none(
    serve: Serve, caplog: pytest.LogCaptureFixture, session: str
) -> None:
    caplog.set_level(logging.INFO, "ullage.engine")

    async def scenario() -> None:
        async with serve() as engine:
            for message in await ends(engine, ask(session_id=session)):
                assert message.cached_tokens == (ON_DEVICE if session else 0)
                assert not message.cached_by_tier

    asyncio.run(scenario())
    [line] = [each for each in caplog.records if each.message == "first_token"]
    assert "cached_tokens" not in vars(line)[MORE_FIELDS]
