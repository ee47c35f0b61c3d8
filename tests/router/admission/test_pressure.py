"""An engine under memory pressure lowers requests; the router's clients hear of it."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ullage.inference.v1 import inference_pb2
from ullage_router.policy.decision import Decision

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000


@pytest.mark.parametrize(
    ("before", "told", "after"),
    [
        ([], [], []),
        (["dropped_messages=2"], [], ["dropped_messages=2"]),
        (["max_tokens=64"], ["temperature=0"], ["max_tokens=64", "temperature=0"]),
        (["cleansed", "max_tokens=64"], ["max_tokens=32"], ["cleansed", "max_tokens=32"]),
    ],
)
def test_the_engines_word_is_the_last(before: list[str], told: list[str], after: list[str]) -> None:
    decision = Decision(degraded=tuple(before), action="queue").lowered(told)
    assert (decision.degraded, decision.action) == (tuple(after), "queue")


def test_what_the_engine_lowered_is_a_shrink() -> None:
    decision = Decision(action="accept", reason="FITS").lowered([])
    assert (decision.action, decision.reason) == ("accept", "FITS")
    decision = decision.lowered(["top_p=0.7"])
    assert (decision.action, decision.reason) == ("shrink", "PRESSURE")


@pytest.mark.parametrize("stream", [False, True])
def test_headers_and_stats_tell_it(start_service: "StartService", stream: bool) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.degraded = ("max_tokens=20", "temperature=0")
            service.engine.push(pressure_level=2)
            answer = await service.complete("Hi", max_tokens=32, stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-ullage-degraded"] == "max_tokens=20, temperature=0"
            assert answer.headers["x-ullage-action"] == "shrink"
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.headroom.pressure_level == 2)
            stats = await service.stats()
            assert stats["engines"][0]["pressure_level"] == 2
            assert stats["latest"][0]["degraded"] == ["max_tokens=20", "temperature=0"]
            service.engine.script.degraded = ()
            calm = await service.complete("Hi", max_tokens=32)
            assert calm.headers["x-ullage-degraded"] == ""
            assert calm.headers["x-ullage-action"] == "accept"

    asyncio.run(scenario())


def test_grpc_clients_are_told_in_accepted(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.degraded = ("max_tokens=20",)
            service.engine.script.max_tokens = 20
            request = inference_pb2.GenerateRequest(text="Hi")
            request.stop.max_tokens = 32
            events = [event async for event in service.grpc.Generate(request)]
            accepted = events[0].accepted
            assert list(accepted.degraded) == ["max_tokens=20"]
            assert (accepted.max_tokens, accepted.action) == (20, "shrink")

    asyncio.run(scenario())


def test_samples_are_priced_and_passed_on(start_service: "StartService") -> None:
    """30 prompt tokens fill one block that all share; each sample has three of its own,
    and one is there until all have copied it."""

    async def scenario() -> None:
        async with start_service() as service:
            request = inference_pb2.GenerateRequest(text="x" * 30)
            request.samples.n = 2
            request.samples.best_of = 4
            events = [event async for event in service.grpc.Generate(request)]
            assert events[0].accepted.predicted_bytes == (1 + 4 * 3 + 1) * BLOCK
            assert service.engine.requests[0].samples == request.samples

    asyncio.run(scenario())
