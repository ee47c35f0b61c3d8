"""Pick: the same decisions as Generate, tickets that engines can check, credit that comes back."""

import asyncio
import base64
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import RungsSection, ShrinkOutputSection
from ullage_common.process.config_file import ConfigError
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_common.tickets.tickets import (
    Claims,
    TicketError,
    engine_tag,
    load_keys,
    read,
    sign,
    verify,
)
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.policy.decide import decide, min_output
from ullage_router.policy.facts import (
    EngineState,
    EngineView,
    RequestFacts,
    RoutingPolicy,
    TimeLimits,
)
from ullage_router.policy.next_step import Refuse, Run
from ullage_router.tickets.batch import Ask, PickBatch

if TYPE_CHECKING:
    Service = Any
    StartService = Any

KEY = b"k" * 32
BLOCK_BYTES = 16_000
LADDER = ("shrinkContext", "shrinkOutput", "queue", "route", "reject")
ENOUGH_S = 20.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a").write_bytes(KEY + b"\n")
    return folder


def tickets(keys: Path, **more: Any) -> dict[str, Any]:
    return {"tickets": {"keys_dir": str(keys), **more}}


def ask(prompt: int = 10, most: int = 16, **more: Any) -> pb.PricedRequest:
    return pb.PricedRequest(prompt_tokens=prompt, max_tokens=most, **more)


async def error_of(service: "Service", request: pb.PickRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.grpc.Pick(request)
    return from_rpc_error(caught.value)


def engine_view(number: int, pool: str, available: int, **more: Any) -> EngineView:
    fields = {
        "standing": EngineState.USABLE,
        "capacity": 100 * BLOCK_BYTES,
        "profile": MemoryProfile(16, (CacheGroup(1000),)),
        "expected_output": 32,
        "max_model_len": 1000,
    }
    return EngineView(id=f"e{number}", pool=pool, available=available, **(fields | more))


views = st.lists(
    st.builds(
        engine_view,
        st.integers(0, 99),
        st.sampled_from(["single", "large"]),
        st.integers(0, 100).map(lambda blocks: blocks * BLOCK_BYTES),
        standing=st.sampled_from(EngineState),
        load=st.integers(0, 20),
        backlog_tokens=st.integers(0, 500),
        prefill_speed=st.sampled_from([0.0, 100.0]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda view: view.id,
)
asks = st.builds(
    Ask,
    st.integers(1, 1200),
    st.integers(0, 600),
    st.integers(1, 3),
    st.sampled_from(["", "e1", "e2"]),
    st.sampled_from([frozenset(), frozenset({"e1"})]),
)


@given(views, asks, st.integers(0, 2**30 - 1), st.booleans())
def test_a_pick_is_what_decide_would_say(
    engines: list[EngineView], wanted: Ask, draw: int, is_ahead: bool
) -> None:
    """The quick way never places what the ladder would not, nor at another price."""
    policy = RoutingPolicy(("single", "large"), 800, 60 * BLOCK_BYTES, LADDER, large_pool="large")
    ahead = {"single": 1} if is_ahead else {}
    found, _ = PickBatch(engines, policy, ahead, 400, TimeLimits(first_token_s=10.0)).place(
        wanted, draw
    )
    most = min(wanted.max_tokens or 400, 400)
    facts = RequestFacts(
        prompt_tokens=wanted.prompt_tokens,
        max_tokens=most,
        min_tokens=min_output(
            most if wanted.max_tokens else None, most, policy.rungs.shrink_output
        ),
        samples=wanted.samples,
        ahead=ahead,
        refused_by=wanted.refused_by,
        limits=TimeLimits(first_token_s=10.0),
        draw=draw,
    )
    said = decide(facts, engines, policy)
    if isinstance(found, Run):
        assert isinstance(said, Run)
        assert (found.action, found.pool, found.max_tokens) == (
            said.action,
            said.pool,
            said.max_tokens,
        )
        assert found.demand == said.demand
        engine = next(e for e in engines if e.id == found.engine)
        assert found.demand.kv_bytes <= engine.available
        assert found.engine not in wanted.refused_by
    else:
        assert not isinstance(said, Run) or said.max_tokens < most


@pytest.mark.parametrize("preferred", ["", "e0", "e1"])
def test_a_pick_goes_where_the_request_would_go(preferred: str) -> None:
    """To the engine whose prompts are computed sooner, whatever memory the other one has."""
    engines = [
        engine_view(0, "single", 90 * BLOCK_BYTES, load=2, backlog_tokens=400, prefill_speed=1e3),
        engine_view(1, "single", 40 * BLOCK_BYTES, load=3, prefill_speed=1e3),
    ]
    policy = RoutingPolicy(("single",), 8000, 1 << 40, LADDER)
    for draw in range(8):
        run, _ = PickBatch(engines, policy, {}, 400, TimeLimits(first_token_s=10.0)).place(
            Ask(10, 16, preferred=preferred), draw
        )
        facts = RequestFacts(10, 16, 16, preferred=preferred, draw=draw)
        wanted = decide(facts, engines, policy)
        assert isinstance(run, Run)
        assert isinstance(wanted, Run)
        assert run.engine == wanted.engine == (preferred or "e1")


def test_what_comes_at_its_end_has_the_whole_time() -> None:
    busy = engine_view(
        0, "single", 90 * BLOCK_BYTES, load=1, backlog_tokens=5000, prefill_speed=100.0
    )
    policy = RoutingPolicy(("single",), 8000, 1 << 40, LADDER)
    limits = TimeLimits(first_token_s=30.0, end_s=600.0)
    answers = [
        PickBatch([busy], policy, {}, 400, limits).place(Ask(10, 16, comes_at_end=at_end), 0)[0]
        for at_end in (False, True)
    ]
    assert [type(each) for each in answers] == [Refuse, Run]


def test_a_shorter_answer_in_another_pool_is_left_to_generate() -> None:
    engines = [
        engine_view(0, "single", 0),
        engine_view(1, "large", 3 * BLOCK_BYTES, expected_output=100),
    ]
    rungs = RungsSection(shrink_output=ShrinkOutputSection(min_percent=10, below_expected=True))
    policy = RoutingPolicy(
        ("single", "large"),
        800,
        60 * BLOCK_BYTES,
        ("shrinkOutput", "route", "reject"),
        rungs,
        large_pool="large",
    )
    batch = PickBatch(engines, policy, {}, 400, TimeLimits(first_token_s=10.0))
    run, _ = batch.place(Ask(16, 100), 0)
    assert isinstance(run, Refuse)
    assert "a shorter answer" in run.message


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 4))
def test_a_batch_never_promises_more_than_there_is(prompts: list[int], count: int) -> None:
    engines = [engine_view(i, "single", 20 * BLOCK_BYTES) for i in range(count)]
    policy = RoutingPolicy(("single",), 8000, 1 << 40, LADDER)
    batch = PickBatch(engines, policy, {}, 400, TimeLimits(first_token_s=10.0))
    used = dict.fromkeys((e.id for e in engines), 0)
    draws = random.Random(7)
    for prompt in prompts:
        run, _ = batch.place(Ask(prompt, 32), draws.getrandbits(30))
        if isinstance(run, Run):
            used[run.engine] += run.demand.kv_bytes
        else:
            assert isinstance(run, Refuse)
    assert all(size <= 20 * BLOCK_BYTES for size in used.values())


def test_tickets_name_engine_and_size(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100), **tickets(keys)) as service:
            asked = [ask(10, 16), ask(20, 0, priority=3), ask(9999)]
            answer = await service.grpc.Pick(pb.PickRequest(requests=asked))
            small, open_, never = answer.placed
            for placed, prompt, most in ((small, 10, 16), (open_, 20, 4096)):
                address = answer.engines[placed.engine]
                engine = next(e for e in service.engines if e.address == address)
                tag = engine_tag(engine.headroom.engine)
                claims = verify(placed.ticket, (KEY,), tag, time.time())
                assert (claims.id, claims.prompt_tokens) == (placed.id, prompt)
                assert claims.max_tokens == placed.max_tokens <= most
                assert placed.predicted_bytes % BLOCK_BYTES == 0
            assert never.id == 0
            assert never.refusal.reason == "CONTEXT_TOO_LONG"
            assert never.refusal.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert (await service.stats())["picks"]["placed"] == service.router.service.issuer.open

    asyncio.run(scenario())


def test_credit_is_kept_until_the_end_is_told(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(single=(8,), **tickets(keys)) as service:
            engine = service.router.service.engines.all()[0]
            first, second = (
                await service.grpc.Pick(pb.PickRequest(requests=[ask(30, 16), ask(30, 16)]))
            ).placed
            assert first.predicted_bytes == engine.credit_bytes == 3 * BLOCK_BYTES
            assert second.refusal.reason, "what the batch placed counts for the rest of it"
            assert second.refusal.retry_after_s >= 1
            await service.grpc.Pick(pb.PickRequest(accepted=[first.id]))
            await service.until(lambda: engine.credit_bytes == 0, ENOUGH_S)
            assert engine.inflight == 1, "reports include it by now"
            await service.grpc.Pick(pb.PickRequest(ended=[first.id, 12345]))
            assert engine.inflight == 0
            assert service.router.service.issuer.open == 0

    asyncio.run(scenario())


def test_who_finds_no_engine_was_not_heard(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(**tickets(keys)) as service:
            (placed,) = (await service.grpc.Pick(pb.PickRequest(requests=[ask()]))).placed
            engine = service.router.service.engines.all()[0]
            picker = service.router.service.issuer
            known = engine.model
            engine.model = None
            service.router.service.engines.on_state_change(engine)
            told = pb.PickRequest(requests=[ask()], ended=[placed.id])
            error = await error_of(service, told)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENGINE")
            assert picker.open == 1, "the client says it again"
            engine.model = known
            service.router.service.engines.on_state_change(engine)
            await service.grpc.Pick(told)
            assert picker.counts["ended"] == picker.open == 1

    asyncio.run(scenario())


def test_what_is_never_reported_expires(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(**tickets(keys, ttl=0.1)) as service:
            await service.grpc.Pick(pb.PickRequest(requests=[ask()]))
            engine = service.router.service.engines.all()[0]
            picker = service.router.service.issuer
            assert engine.inflight == 1
            await service.until(lambda: engine.inflight == 0, ENOUGH_S)
            assert (picker.open, picker.counts["expired"]) == (0, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(0), "requests[0].prompt_tokens"),
        (ask(samples=17), "requests[0].samples"),
        (ask(priority=101), "requests[0].priority"),
        (ask(session_id="s" * 257), "requests[0].session_id"),
        (ask(avoid=["a"] * 9), "requests[0].avoid"),
        (ask(prefixes=[1] * 65), "requests[0].prefixes"),
    ],
)
def test_wrong_requests_are_named(
    start_service: "StartService", keys: Path, request_: pb.PricedRequest, field: str
) -> None:
    async def scenario() -> None:
        async with start_service(**tickets(keys)) as service:
            error = await error_of(service, pb.PickRequest(requests=[request_]))
            assert (error.code, error.metadata["field"]) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                field,
            )
            many = await error_of(service, pb.PickRequest(requests=[ask()] * 1025))
            assert many.metadata["field"] == "requests"
            assert service.router.service.issuer.open == 0

    asyncio.run(scenario())


def test_without_tickets_pick_is_off(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            error = await error_of(service, pb.PickRequest(requests=[ask()]))
            assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "PICK_OFF")
            assert (await service.complete()).status_code == 200
            assert "x-ullage-ticket" not in service.engine.metadata[0]

    asyncio.run(scenario())


def test_sessions_and_prefixes_keep_to_their_engine(
    start_service: "StartService", keys: Path
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100), **tickets(keys)) as service:
            for origin in ({"session_id": "s"}, {"prefixes": [11, 12]}):
                found = set()
                for _ in range(6):
                    asked = pb.PickRequest(requests=[ask(**origin)])
                    answer = await service.grpc.Pick(asked)
                    found.add(answer.engines[answer.placed[0].engine])
                assert len(found) == 1

    asyncio.run(scenario())


def test_where_tickets_are_required_the_router_has_its_own(
    start_service: "StartService", keys: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**tickets(keys, required=True)) as service:
            assert (await service.complete(max_tokens=5)).status_code == 200
            ticket = service.engine.metadata[0]["x-ullage-ticket"]
            claims = verify(ticket, (KEY,), engine_tag("single-0"), time.time())
            assert (claims.prompt_tokens, claims.max_tokens, claims.samples) == (2, 5, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["BAD_TICKET", "TICKET_EXPIRED", "TICKET_USED"])
def test_a_ticket_that_an_engine_refuses_is_the_routers_affair(
    start_service: "StartService", keys: Path, reason: str
) -> None:
    """Each try has a ticket of its own, and no client is told to show a ticket."""

    async def scenario() -> None:
        refusal = ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, "pick again")
        async with start_service(single=(100, 100), **tickets(keys, required=True)) as service:
            for engine in service.engines:
                engine.script.refuse = refusal
            answer = await service.complete(max_tokens=5)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "NO_ENGINE"
            shown = [each["x-ullage-ticket"] for e in service.engines for each in e.metadata]
            ids = {read(ticket, (KEY,)).id for ticket in shown}
            assert len(ids) == len(shown) > 1

            service.engine.script.refuse = None
            assert (await service.complete(max_tokens=5)).status_code == 200

    asyncio.run(scenario())


def claims(**more: Any) -> Claims:
    fields = {"id": 1, "expires_ms": 10_000, "engine": engine_tag("e"), "prompt_tokens": 1}
    return Claims(**(fields | {"max_tokens": 2, "samples": 1, "priority": -100} | more))


@given(st.integers(1, 1024), st.booleans(), st.binary(min_size=16, max_size=16))
def test_a_ticket_says_what_was_signed(uses: int, is_sessionless: bool, salt: bytes) -> None:
    signed = claims(uses=uses, is_sessionless=is_sessionless, cache_salt=salt)
    assert verify(sign(signed, KEY), (KEY,), engine_tag("e"), 9.0) == signed


@given(st.integers(0, 500), st.integers(1, 255))
def test_a_changed_ticket_is_none(place: int, change: int) -> None:
    ticket = sign(claims(), KEY)
    assert verify(ticket, (b"x" * 32, KEY), engine_tag("e"), 9.0) == claims()
    raw = bytearray(base64.urlsafe_b64decode(ticket))
    raw[place % len(raw)] ^= change
    changed = base64.urlsafe_b64encode(raw).decode()
    with pytest.raises(TicketError, match="signed") as caught:
        verify(changed, (KEY,), engine_tag("e"), 9.0)
    assert caught.value.reason == "BAD_TICKET"


def test_tickets_of_others_and_of_yesterday() -> None:
    ticket = sign(claims(), KEY)
    for ticket_, key, engine, now, reason in (
        (ticket, b"o" * 32, "e", 9.0, "BAD_TICKET"),
        (ticket, KEY, "other", 9.0, "BAD_TICKET"),
        (ticket, KEY, "e", 15.1, "TICKET_EXPIRED"),
        ("", KEY, "e", 9.0, "BAD_TICKET"),
        (ticket + "AAAA", KEY, "e", 9.0, "BAD_TICKET"),
    ):
        with pytest.raises(TicketError) as caught:
            verify(ticket_, (key,), engine_tag(engine), now)
        assert caught.value.reason == reason
    assert verify(ticket, (KEY,), engine_tag("e"), 14.9).priority == -100


def test_keys_are_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no file"):
        load_keys(tmp_path)
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes; a key has at least 32"):
        load_keys(tmp_path)
    (tmp_path / "b").write_bytes(b"n" * 32)
    (tmp_path / "a").write_bytes(KEY)
    (tmp_path / "..data").mkdir()
    assert load_keys(tmp_path) == (KEY, b"n" * 32)
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(tmp_path / "none")
