"""The ladder's rungs, their thresholds and what each response says of them."""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import (
    DEFAULT_LADDER,
    RouteSection,
    Rung,
    RungsSection,
    ShrinkContextSection,
    ShrinkOutputSection,
)
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_common.wire.errors import from_rpc_error
from ullage_router.policy.decide import decide, min_output
from ullage_router.policy.decision import KEPT_STEPS, Decision
from ullage_router.policy.facts import (
    EngineState,
    EngineView,
    QueueState,
    RequestFacts,
    RoutingPolicy,
)
from ullage_router.policy.next_step import NextStep, Refuse, Run, ShrinkContext, Wait

if TYPE_CHECKING:
    Service = Any
    StartService = Any

PROFILE = MemoryProfile(16, (CacheGroup(1000),))
BLOCK = PROFILE.block_bytes
POOLS = ("single", "large", "spot")
ALL: tuple[Rung, ...] = ("shrinkContext", *DEFAULT_LADDER)
"""The default, and the rung that a manifest must ask for."""
DEFAULT = RoutingPolicy(POOLS, 1000, 10_000_000, DEFAULT_LADDER, large_pool="large")
FAR = {
    "shrink_context": {"max_dropped_percent": 100, "keep_turns": 1},
    "shrink_output": {"min_percent": 25, "below_expected": True},
}
"""Bounds of shrinking that let the first two rungs go far."""
POLICY = replace(
    DEFAULT,
    ladder=ALL,
    rungs=RungsSection(
        shrink_context=ShrinkContextSection(**FAR["shrink_context"]),
        shrink_output=ShrinkOutputSection(**FAR["shrink_output"]),
    ),
)


def engine(pool: str, free: int, **more: Any) -> EngineView:
    """An engine of 100 blocks, `free` of them available."""
    fields: dict[str, Any] = {
        "standing": EngineState.USABLE,
        "available": free * BLOCK,
        "capacity": 100 * BLOCK,
        "profile": PROFILE,
        "expected_output": 64,
        "max_model_len": 1600,
    }
    return EngineView(pool, pool, **{**fields, **more})


def facts(prompt: int, **more: Any) -> RequestFacts:
    return RequestFacts(prompt, 64, 16, **more)


def said(decision: NextStep) -> str:
    """A decision in a few words: step, reason, pool."""
    match decision:
        case Run():
            return f"{decision.step} {decision.reason} {decision.pool} {decision.max_tokens}"
        case ShrinkContext():
            return f"shrinkContext {decision.reason} to {decision.prompt_tokens}"
        case Wait():
            return f"queue {decision.reason} {decision.pool}"
        case Refuse():
            return f"reject {decision.reason}"


# 20 blocks at home hold 320 tokens: 256 and the 64 expected, or 304 and the fewest 16.
HOME = engine("single", 20)
FULL = QueueState.FULL
ELSEWHERE = [HOME, engine("large", 90), engine("spot", 90)]
TRANSITIONS = {
    "accept": (facts(256, droppable=True), [HOME], "accept FITS single 64"),
    "to shrinkContext": (facts(257, droppable=True), [HOME], "shrinkContext KV_HEADROOM to 256"),
    "to shrinkOutput": (facts(257), [HOME], "shrinkOutput KV_HEADROOM single 63"),
    "still shrinkOutput": (facts(304), [HOME], "shrinkOutput KV_HEADROOM single 16"),
    "to queue": (facts(305), [HOME], "queue KV_HEADROOM single"),
    "queue before route": (facts(305), ELSEWHERE, "queue KV_HEADROOM single"),
    "to route, full": (facts(305, queue=FULL), ELSEWHERE, "route SPILL large 64"),
    "to route, spent": (
        facts(305, queue=QueueState.SPENT),
        ELSEWHERE,
        "route SPILL large 64",
    ),
    "to reject, full": (facts(305, queue=FULL), [HOME], "reject QUEUE_FULL"),
    "to reject, spent": (facts(305, queue=QueueState.SPENT), [HOME], "reject QUEUE_TIMEOUT"),
    "to reject, late": (facts(305, queue=QueueState.LATE), [HOME], "reject DEADLINE"),
    "never": (facts(1590), [HOME], "reject CONTEXT_TOO_LONG"),
    "no engine": (facts(1), [], "reject NO_ENGINE"),
}


@pytest.mark.parametrize(
    ("asked", "engines", "expected"), list(TRANSITIONS.values()), ids=list(TRANSITIONS)
)
def test_each_transition(asked: RequestFacts, engines: list[EngineView], expected: str) -> None:
    assert said(decide(asked, engines, POLICY)) == expected


WITHOUT = {
    "shrinkContext": (facts(257, droppable=True), "shrinkOutput KV_HEADROOM single 63"),
    "shrinkOutput": (facts(257), "queue KV_HEADROOM single"),
    "queue": (facts(305), "route SPILL large 64"),
    "route": (facts(305, queue=FULL), "reject QUEUE_FULL"),
    "reject": (facts(305, queue=FULL), "route SPILL large 64"),
}


@pytest.mark.parametrize("rung", WITHOUT)
def test_a_rung_left_out_is_not_taken(rung: Rung) -> None:
    asked, expected = WITHOUT[rung]
    policy = replace(POLICY, ladder=tuple(r for r in ALL if r != rung))
    assert said(decide(asked, ELSEWHERE, policy)) == expected


def test_without_any_rung_it_is_refused() -> None:
    assert said(decide(facts(257), ELSEWHERE, replace(POLICY, ladder=()))) == "reject KV_HEADROOM"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (facts(341, droppable=True), "shrinkContext KV_HEADROOM to 256"),
        (facts(342, droppable=True), "queue KV_HEADROOM single"),
        (facts(2048, droppable=True), "shrinkContext CONTEXT_TOO_LONG to 1536"),
        (facts(2049, droppable=True), "reject CONTEXT_TOO_LONG"),
        (facts(257), "queue KV_HEADROOM single"),
        (replace(facts(257), max_tokens=4096), "queue KV_HEADROOM single"),
        (replace(facts(256), max_tokens=4096), "accept FITS single 1344"),
    ],
)
def test_by_default_little_is_taken(asked: RequestFacts, expected: str) -> None:
    """A quarter of the context, and nothing of an answer as long as the engines expect."""
    assert said(decide(asked, [HOME], replace(DEFAULT, ladder=ALL))) == expected


@given(st.integers(1, 3000), st.integers(0, 100), st.sampled_from(QueueState))
def test_by_default_no_conversation_is_rewritten(
    prompt: int, blocks: int, queue: QueueState
) -> None:
    asked = facts(prompt, droppable=True, queue=queue)
    for engines in ([engine("single", blocks)], [engine("single", blocks), *ELSEWHERE[1:]]):
        assert not isinstance(decide(asked, engines, DEFAULT), ShrinkContext)


def with_rungs(**rungs: Any) -> RoutingPolicy:
    return replace(POLICY, rungs=RungsSection(**rungs))


@pytest.mark.parametrize(
    ("percent", "expected"),
    [
        (36, "shrinkContext KV_HEADROOM to 256"),
        (35, "queue KV_HEADROOM single"),
    ],
)
def test_not_more_of_the_context_is_dropped_than_allowed(percent: float, expected: str) -> None:
    policy = with_rungs(shrink_context=ShrinkContextSection(max_dropped_percent=percent))
    assert said(decide(facts(400, droppable=True), [HOME], policy)) == expected


def test_a_conversation_that_would_lose_too_much_is_invalid() -> None:
    policy = with_rungs(shrink_context=ShrinkContextSection(max_dropped_percent=50))
    asked = facts(5000, droppable=True)
    assert said(decide(asked, [HOME], POLICY)) == "shrinkContext CONTEXT_TOO_LONG to 1536"
    assert said(decide(asked, [HOME], policy)) == "reject CONTEXT_TOO_LONG"


@pytest.mark.parametrize(
    ("asked", "most", "rung", "least"),
    [
        (None, 4096, ShrinkOutputSection(), 16),
        (400, 400, ShrinkOutputSection(), 200),
        (8, 8, ShrinkOutputSection(), 8),
        (400, 400, ShrinkOutputSection(min_percent=25), 100),
        (400, 400, ShrinkOutputSection(min_tokens=300), 300),
        (400, 400, ShrinkOutputSection(min_percent=100), 400),
    ],
)
def test_how_far_the_output_may_be_shrunk(
    asked: int | None, most: int, rung: ShrinkOutputSection, least: int
) -> None:
    assert min_output(asked, most, rung) == least


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((), "route SPILL large 64"),
        (("spot", "large"), "route SPILL spot 64"),
        (("spot",), "route SPILL spot 64"),
        (("single",), "reject QUEUE_FULL"),
    ],
)
def test_pools_are_taken_in_the_order_given(pools: tuple[str, ...], expected: str) -> None:
    policy = with_rungs(route=RouteSection(pools=pools))
    assert said(decide(facts(305, queue=FULL), ELSEWHERE, policy)) == expected


def test_a_trail_stays_short() -> None:
    decision = Decision()
    for i in range(100):
        decision = decision.after("engine", f"R{i}")
    decision = decision.after("accept", "FITS")
    assert len(decision.trail) == KEPT_STEPS
    assert decision.trail[0] == "engine=R0"
    assert decision.trail[-2:] == ("...", "accept=FITS")


# Through a router: every word of the answer's headers.

QUICK = {"max_requests": 4, "timeout": 0.3}
TURNS = [
    {"role": "system", "content": "Be brief."},
    *({"role": role, "content": role[0] * 60} for _ in range(4) for role in ("user", "assistant")),
    {"role": "user", "content": "last?"},
]


async def free(service: "Service", blocks: int, index: int = 0, **more: Any) -> None:
    """The engine has so many blocks free, and the router has heard it."""
    name = service.engines[index].headroom.engine
    service.engines[index].push(headroom_bytes=blocks * BLOCK, **more)
    known = next(e for e in service.router.service.engines.all() if e.id == name)
    await service.until(lambda: known.headroom.headroom_bytes == blocks * BLOCK, 20)


def words(answer: Any) -> tuple[int, str, str, str]:
    found = answer.headers
    return (
        answer.status_code,
        found["x-ullage-action"],
        found["x-ullage-degraded"],
        found["x-ullage-trail"],
    )


async def chat(service: "Service") -> Any:
    body = {"messages": TURNS, "max_tokens": 32}
    return await service.http.post("/v1/chat/completions", json=body)


def test_each_transition_through_a_router(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = {"ladder": ALL, "queue": QUICK, "rungs": FAR}
        async with start_service(large=(200,), routing=routing) as service:
            assert words(await service.complete()) == (200, "accept", "", "accept=FITS")
            await free(service, 20)
            assert words(await chat(service)) == (
                200,
                "shrink",
                "dropped_messages=6",
                "shrinkContext=KV_HEADROOM, accept=FITS",
            )
            answer = await service.complete("x" * 300, max_tokens=32)
            assert words(answer) == (200, "shrink", "max_tokens=20", "shrinkOutput=KV_HEADROOM")
            answer = await service.complete("x" * 400)
            assert words(answer) == (200, "route4", "", "queue=KV_HEADROOM, route=SPILL")
            await free(service, 26, 1)
            service.engines[1].script.reason = inference_pb2.FINISH_REASON_LENGTH
            answer = await service.complete("x" * 400)
            trail = "queue=KV_HEADROOM, route=KV_HEADROOM"
            assert words(answer) == (200, "route4", "max_tokens=16", trail)
            assert answer.json()["choices"][0]["stop_reason"] == "max_tokens=16"
            await free(service, 2, 1)
            answer = await service.complete("x" * 400)
            trail = "queue=KV_HEADROOM, reject=QUEUE_TIMEOUT"
            assert words(answer) == (429, "reject", "", trail)
            answer = await service.complete("x" * 1999)
            assert words(answer) == (400, "reject", "", "reject=CONTEXT_TOO_LONG")
            latest = (await service.stats())["latest"]
            assert [entry["trail"] for entry in latest[:2]] == [
                ["reject=CONTEXT_TOO_LONG"],
                ["queue=KV_HEADROOM", "reject=QUEUE_TIMEOUT"],
            ]

    asyncio.run(scenario())


def test_a_ladder_of_one_rung(start_service: "StartService") -> None:
    async def scenario() -> None:
        routing = {"ladder": ["reject"], "rungs": {"reject": {"min_retry_delay": 4}}}
        async with start_service(large=(200,), routing=routing) as service:
            releases = [headroom_pb2.Release(after_ms=1500, bytes=90 * BLOCK)]
            await free(service, 20, releases=releases)
            answer = await chat(service)
            assert words(answer) == (429, "reject", "", "reject=KV_HEADROOM")
            assert answer.headers["retry-after"] == "4"

    asyncio.run(scenario())


def test_newest_turns_stay_and_too_much_is_not_dropped(start_service: "StartService") -> None:
    async def scenario(rung: dict[str, Any], degraded: str) -> None:
        routing = {"ladder": ALL, "queue": QUICK, "rungs": {"shrink_context": rung}}
        async with start_service(routing=routing) as service:
            await free(service, 20)
            answer = await chat(service)
            assert answer.headers["x-ullage-degraded"] == degraded

    asyncio.run(scenario({"keep_turns": 3, "max_dropped_percent": 100}, "dropped_messages=6"))
    asyncio.run(scenario({"keep_turns": 6, "max_dropped_percent": 100}, ""))
    asyncio.run(scenario({"keep_turns": 1, "max_dropped_percent": 30}, ""))


def test_by_default_a_conversation_waits_as_it_is(start_service: "StartService") -> None:
    """Also where turns could be dropped: the engine gets every one of them, or none."""

    async def scenario() -> None:
        async with start_service(routing={"queue": QUICK, "rungs": FAR}) as service:
            await free(service, 20)
            answer = await chat(service)
            trail = "queue=KV_HEADROOM, reject=QUEUE_TIMEOUT"
            assert words(answer) == (429, "reject", "", trail)
            await free(service, 90)
            assert words(await chat(service)) == (200, "accept", "", "accept=FITS")
            served = service.engine.requests[-1].token_ids.ids
            text = service.router.service.engines.model.decode(served)
            assert all(turn["content"] in text for turn in TURNS)

    asyncio.run(scenario())


def test_no_engine_is_503(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.engine.stop()
            await service.until(lambda: service.engine_state("single-0") == "connecting", 20)
            assert words(await service.complete()) == (503, "reject", "", "reject=NO_ENGINE")

    asyncio.run(scenario())


def test_grpc_says_the_same(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing={"rungs": FAR}) as service:
            await free(service, 20)
            request = inference_pb2.GenerateRequest(text="x" * 300)
            request.stop.max_tokens = 32
            first = await anext(aiter(service.grpc.Generate(request)))
            assert first.accepted.action == "shrink"
            assert list(first.accepted.trail) == ["shrinkOutput=KV_HEADROOM"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in service.grpc.Generate(
                    inference_pb2.GenerateRequest(text="x" * 1999)
                ):
                    pass
            told = from_rpc_error(caught.value).metadata
            assert (told["action"], told["trail"]) == ("reject", "reject=CONTEXT_TOO_LONG")

    asyncio.run(scenario())
