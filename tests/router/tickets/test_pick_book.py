"""Like requests by one ticket: what it may hold, what it holds, and that all of it comes back."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import TenantRules
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_common.tickets.tickets import engine_tag, verify
from ullage_router.engines.engine import Engine
from ullage_router.policy.credit import Credit, CreditBook
from ullage_router.policy.facts import EngineState, EngineView, RoutingPolicy, TimeLimits
from ullage_router.policy.next_step import Refuse, Run
from ullage_router.tenants.account import Account, open_account
from ullage_router.tenants.session import TenantSession
from ullage_router.tickets.batch import Ask, PickBatch
from ullage_router.tickets.book import OpenTickets, TicketCharge

if TYPE_CHECKING:
    Service = Any
    StartService = Any

KEY = b"k" * 32
BLOCK_BYTES = 16_000
SIZE = 100
PROMPT = 10
OUTPUT = 20
TICKET_S = 16.0
REQUEST_S = 30.0


class Memory:
    """The books of one engine."""

    def __init__(self) -> None:
        self.book = CreditBook()

    def on_accepted(self, credit: Credit) -> None:
        self.book.on_accepted(credit)

    def on_first_token(self, credit: Credit) -> None:
        self.book.on_first_token(credit)

    def release(self, *credits: Credit) -> None:
        for credit in credits:
            self.book.release(credit)


class World:
    """A book with an engine and a tenant."""

    def __init__(self, concurrency: int | None = 1000) -> None:
        self.now, self.memory, self.placed = 0.0, Memory(), Counter[int]()
        self.engine = cast("Engine", self.memory)
        self.book = OpenTickets(TICKET_S, REQUEST_S, lambda: self.now)
        self.account: Account = open_account("a", TenantRules(concurrency=concurrency), 1.0, 0.0)

    def place(self, number: int, count: int) -> None:
        if self.placed[number]:
            return
        session = TenantSession(self.account)
        session.open_request(pb.GenerateRequest(), "tiny", count)
        credits = [self.memory.book.reserve(SIZE, PROMPT) for _ in range(count)]
        self.book.add(number, self.engine, credits, TicketCharge(session, PROMPT, OUTPUT))
        self.placed[number] = count

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.book.sweep()
        self.memory.book.on_report()

    def check(self) -> None:
        self.memory.book.check_integrity()
        assert self.account.quota.active == self.book.open == self.memory.book.inflight
        ended = self.book.counts["ended"] + self.book.counts["expired"]
        assert self.book.open + ended == self.placed.total()
        assert self.account.prompt_tokens == ended * PROMPT


steps = st.one_of(
    st.tuples(st.just("place"), st.integers(1, 6), st.integers(1, 8)),
    st.tuples(st.just("accept"), st.integers(1, 6), st.integers(1, 9)),
    st.tuples(st.just("end"), st.integers(1, 6), st.integers(1, 9)),
    st.tuples(st.just("later"), st.just(0), st.integers(0, 40)),
)


@given(st.lists(steps, max_size=60), st.sampled_from([None, 1000]))
def test_all_that_was_given_comes_back(
    told: list[tuple[str, int, int]], concurrency: int | None
) -> None:
    world = World(concurrency)
    for what, number, count in told:
        match what:
            case "place":
                world.place(number, count)
            case "accept":
                world.book.report([number] * count, [])
            case "end":
                world.book.report([], [number] * count)
            case _:
                world.later(float(count))
        world.check()
    world.later(TICKET_S)
    world.later(REQUEST_S)
    world.check()
    assert (world.book.open, world.memory.book.total, world.account.quota.active) == (0, 0, 0)
    assert world.account.output_tokens == world.placed.total() * OUTPUT, "each is paid, once"


def test_what_was_accepted_keeps_its_place_until_it_must_have_ended() -> None:
    world = World()
    world.place(1, 3)
    world.book.report([1, 1], [])
    world.later(TICKET_S)
    assert world.account.quota.active == 2, "one was never used"
    world.later(REQUEST_S - 1)
    assert world.account.quota.active == 2
    world.book.report([], [1])
    assert world.account.quota.active == 1, "a late report still counts"
    world.later(1.0)
    assert (world.account.quota.active, world.book.counts["expired"]) == (0, 2)


def test_where_nobody_is_limited_the_ticket_ends_it() -> None:
    world = World(concurrency=None)
    world.place(1, 3)
    world.book.report([1], [])
    world.later(TICKET_S)
    assert world.book.open == 0


def test_one_use_ends_once_whoever_says_so() -> None:
    world = World()
    world.place(1, 2)
    world.place(2, 2)
    world.book.report([], [1, 1, 1, 1, 99])
    world.check()
    assert (world.book.open, world.account.prompt_tokens) == (2, 2 * PROMPT)


def view(number: int, blocks: int, **more: Any) -> EngineView:
    fields = {
        "profile": MemoryProfile(16, (CacheGroup(1000),)),
        "expected_output": 32,
        "max_model_len": 1000,
    }
    size = blocks * BLOCK_BYTES
    fields |= {"standing": EngineState.USABLE, "capacity": max(size, 100 * BLOCK_BYTES)}
    return EngineView(id=f"e{number}", pool="single", available=size, **(fields | more))


POLICY = RoutingPolicy(("single",), 8000, 1 << 40, ("reject",))


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 80)), max_size=6),
    st.sampled_from([0.0, 50.0]),
    st.randoms(use_true_random=False),
)
def test_like_requests_never_take_more_than_there_is(
    blocks: list[int], asked: list[tuple[int, int]], speed: float, chance: Any
) -> None:
    views = [view(i, size, prefill_speed=speed) for i, size in enumerate(blocks)]
    batch = PickBatch(views, POLICY, {}, 400, TimeLimits(first_token_s=10.0))
    used = Counter[str]()
    prompts = Counter[str]()
    for prompt, wanted in asked:
        ask = Ask(prompt, 32)
        left = wanted
        share = batch.share(wanted)
        while left:
            run, count = batch.place(ask, chance.getrandbits(30), min(left, share))
            assert 0 < count <= min(left, share)
            if isinstance(run, Refuse):
                again, _ = batch.place(ask, chance.getrandbits(30))
                assert isinstance(again, Refuse), "not even one fits"
                assert again.reason == run.reason
                break
            used[run.engine] += count * run.demand.kv_bytes
            prompts[run.engine] += count * prompt
            left -= count
    for each in views:
        assert used[each.id] <= each.available
        if speed:
            assert prompts[each.id] / speed <= 0.8 * 10.0 or prompts[each.id] <= 100


def test_like_requests_are_spread() -> None:
    batch = PickBatch(
        [view(i, 1000) for i in range(4)], POLICY, {}, 400, TimeLimits(first_token_s=10.0)
    )
    share = batch.share(64)
    found = Counter[str]()
    for draw in (1, 5, 6, 4):
        run, count = batch.place(Ask(10, 16), draw, share)
        assert isinstance(run, Run)
        found[run.engine] += count
    assert (share, found.total(), len(found)) == (16, 64, 4)
    many = PickBatch(
        [view(i, 1000) for i in range(100)], POLICY, {}, 400, TimeLimits(first_token_s=10.0)
    )
    assert (many.share(8), many.share(64)) == (1, 4)


@pytest.mark.parametrize("num_engines", [3, 4])
def test_one_by_one_every_engine_gets_its_share(num_engines: int) -> None:
    views = [view(i, 10_000) for i in range(num_engines)]
    batch = PickBatch(views, POLICY, {}, 400, TimeLimits())
    chance = random.Random(1)
    placed = Counter[str]()
    for _ in range(400):
        run, _count = batch.place(Ask(10, 16), chance.getrandbits(64))
        assert isinstance(run, Run)
        placed[run.engine] += 1
    share = 400 / num_engines
    assert all(0.9 * share < placed[each.id] < 1.1 * share for each in views)


@pytest.fixture
def tickets(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "ticket-keys"
    folder.mkdir()
    (folder / "key").write_bytes(KEY)
    return {"keys_dir": str(folder)}


def test_one_ticket_for_as_many_as_fit(
    start_service: "StartService", tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(single=(13,), tickets=tickets) as service:
            engine = service.router.service.engines.all()[0]
            priced = pb.PricedRequest(prompt_tokens=30, max_tokens=16, count=5)
            answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]))
            placed, rest = answer.placed
            assert (placed.count, rest.count, bool(rest.refusal.reason)) == (2, 3, True)
            assert placed.predicted_bytes == 3 * BLOCK_BYTES
            assert engine.credit_bytes == 6 * BLOCK_BYTES
            claims = verify(placed.ticket, (KEY,), engine_tag("single-0"), time.time())
            assert (claims.uses, claims.prompt_tokens, claims.max_tokens) == (2, 30, 16)
            picks = (await service.stats())["picks"]
            assert (picks["open"], picks["placed"], picks["refused"]) == (2, 2, 3)
            told = pb.PickRequest(accepted=[placed.id], ended=[placed.id])
            await service.grpc.Pick(told)
            assert engine.inflight == 1
            await service.grpc.Pick(told)
            assert (engine.inflight, engine.credit_bytes) == (0, 0)
            priced.count = 1025
            with pytest.raises(Exception, match="at most 1024"):
                await service.grpc.Pick(pb.PickRequest(requests=[priced]))

    asyncio.run(scenario())
