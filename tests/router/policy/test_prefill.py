"""Prompts are spread by what they cost: the formula, the assignment, and a router under load."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_common.config.router import DEFAULT_LADDER, PrefillSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.policy.balance import (
    EngineLoad,
    PrefillTask,
    balance,
    critical_path,
    pairs,
    work,
)
from ullage_router.policy.credit import CreditBook
from ullage_router.policy.decide import decide
from ullage_router.policy.facts import EngineState, EngineView, RequestFacts, RoutingPolicy
from ullage_router.policy.next_step import Run

if TYPE_CHECKING:
    Service = Any
    StartService = Any

EXAMPLE = (6000, 2000, 6000, 2000, 2000, 2000)
PATIENCE_S = 30.0
BLOCK = 16_000


def test_what_a_prompt_costs() -> None:
    assert [pairs(n) for n in (0, 1, 2, 2000, 6000)] == [0, 1, 3, 2_001_000, 18_003_000]
    assert work(2000, 0) == 2_001_000
    assert work(2000, 8192) == 2_001_000 + 16_384_000


def jobs_of(
    tokens: Sequence[int], places: Sequence[str], mlp_products: int = 0
) -> list[PrefillTask]:
    sizes = dict.fromkeys("ab", 1)
    return [
        PrefillTask(work(n, mlp_products), at, sizes) for n, at in zip(tokens, places, strict=True)
    ]


IDLE = [EngineLoad("a", 0, 100), EngineLoad("b", 0, 100)]


@pytest.mark.parametrize("mlp_products", [0, 8192])
def test_the_example_of_the_requirement(mlp_products: int) -> None:
    in_turns = list("ababab")
    attention = jobs_of(EXAMPLE, in_turns)
    assert critical_path(attention, in_turns, IDLE) == 38_007_000
    places = balance(jobs_of(EXAMPLE, in_turns, mlp_products), IDLE)
    assert critical_path(attention, places, IDLE) == 22_005_000


def test_what_engines_have_to_do_already_counts() -> None:
    lanes = [EngineLoad("a", pairs(6000), 100), EngineLoad("b", pairs(2000), 100)]
    jobs = jobs_of(EXAMPLE[2:], "aaaa")
    assert critical_path(jobs, balance(jobs, lanes), lanes) == 22_005_000


def test_an_engine_that_no_prompt_may_take_has_no_say() -> None:
    """A canary's lane, or one that is held back, may be the busiest of all."""
    busy = EngineLoad("canary", 10**12, 100)
    assert sorted(balance(jobs_of((2000, 2000), "aa"), [*IDLE, busy])) == ["a", "b"]


def test_memory_decides_before_work() -> None:
    lanes = [EngineLoad("a", 0, 100), EngineLoad("b", 10**9, 100), EngineLoad("c", 0, 4)]
    jobs = [PrefillTask(10, "a", {"a": 5, "b": 5, "c": 5}), PrefillTask(10, "a", {"a": 96, "b": 5})]
    assert balance(jobs, lanes) == ["a", "a"]


def test_without_a_better_way_everybody_stays() -> None:
    jobs = [PrefillTask(10, "b", {"a": 1, "b": 1}), PrefillTask(10, "a", {"a": 1, "b": 1})]
    assert balance(jobs, IDLE) == ["b", "a"]
    assert balance([], IDLE) == []


job_lists = st.lists(
    st.builds(
        lambda n, at, sizes: PrefillTask(work(n, 10), at, sizes | {at: 5}),
        st.integers(0, 5000),
        st.sampled_from("abc"),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 20)),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(job_lists, st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 60)), min_size=3))
def test_never_worse_and_always_within_memory(
    jobs: list[PrefillTask], engines: list[tuple[int, int]]
) -> None:
    lanes = [EngineLoad(id_, busy, room) for id_, (busy, room) in zip("abc", engines, strict=False)]
    present = [job.engine for job in jobs]
    places = balance(jobs, lanes)
    assert critical_path(jobs, places, lanes) <= critical_path(jobs, present, lanes)
    assert all(place in job.sizes for job, place in zip(jobs, places, strict=True))
    if places != present:
        for lane in lanes:
            held = [j.sizes[lane.id] for j, p in zip(jobs, places, strict=True) if p == lane.id]
            assert sum(held) <= lane.room


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8000), min_size=1, max_size=7))
def test_at_most_a_third_longer_than_the_best(tokens: list[int]) -> None:
    jobs = jobs_of(tokens, "a" * len(tokens))
    best = min(
        critical_path(jobs, places, IDLE) for places in itertools.product("ab", repeat=len(jobs))
    )
    # Graham's bound for two machines is 7/6.
    assert critical_path(jobs, balance(jobs, IDLE), IDLE) * 6 <= best * 7


def test_credit_knows_what_is_left_to_compute() -> None:
    book = CreditBook()
    first = book.reserve(1, 100)
    second = book.reserve(1, 200)
    assert book.prefill_pairs(0) == pairs(100) + pairs(200)
    book.on_accepted(first)
    book.on_report()
    book.on_report()
    assert book.prefill_pairs(100) == pairs(100) + pairs(200)
    assert book.prefill_pairs(50) == pairs(100) / 2 + pairs(200)
    assert book.prefill_pairs(500) == pairs(100) + pairs(200)
    book.on_first_token(first)
    assert book.prefill_pairs(100) == pairs(200)
    book.on_first_token(second)
    assert (book.prefill_pairs(100), book.tokens, book.total) == (0, 0, 1)
    book.release(second)
    book.check_integrity()


PROFILE = MemoryProfile(16, (CacheGroup(1000),))
POLICY = RoutingPolicy(("single",), 1 << 20, 1 << 40, DEFAULT_LADDER, max_extra_load=0)


def view(id_: str, backlog: Sequence[int] = (), **more: Any) -> EngineView:
    fields: dict[str, Any] = {
        "available": 1000 * BLOCK,
        "capacity": 1000 * BLOCK,
        "standing": EngineState.USABLE,
        "expected_output": 64,
        "max_model_len": 16_000,
        "backlog_tokens": sum(backlog),
        "prefill_pairs": sum(map(pairs, backlog)),
        "prefill_speed": 1000.0,
    }
    return EngineView(id=id_, pool="single", profile=PROFILE, **{**fields, **more})


def runs(
    *engines: EngineView, policy: RoutingPolicy = POLICY, **facts: Any
) -> set[tuple[str, tuple[str, ...]]]:
    """(engine, other choices) for any chance."""
    found = set()
    for draw in range(12):
        decision = decide(RequestFacts(100, 64, 16, draw=draw, **facts), engines, policy)
        assert isinstance(decision, Run), decision
        found.add((decision.engine, tuple(decision.choices)))
    return found


def test_an_idle_engine_is_taken_at_once() -> None:
    busy = view("a", [2000])
    idle = view("b", available=10 * BLOCK + 64_000)
    assert runs(busy, view("c", [10]), idle) == {("b", ())}
    assert runs(busy, view("b", health=0.1)) == {("a", ("a", "b"))}


def test_only_who_would_wait_longer_than_the_window_waits_in_it() -> None:
    assert runs(view("a", [5])) == {("a", ())}
    assert runs(view("a", [6])) == {("a", ("a",))}
    assert runs(view("a", [6000], prefill_speed=0.0)) == {("a", ())}
    off = replace(POLICY, prefill=PrefillSection(window=0))
    assert runs(view("a", [6000]), policy=off) == {("a", ())}


def test_of_busy_engines_the_cheapest_prompts_are_waited_for() -> None:
    """As many tokens in one long prompt take longer than in short ones."""
    assert runs(view("a", [4000]), view("b", [1000] * 4)) == {("b", ("a", "b"))}


def test_a_cached_beginning_is_not_left() -> None:
    assert runs(view("a", [10]), view("b", [5]), preferred="a") == {("a", ())}


def test_choices_are_those_that_may_have_it() -> None:
    engines = [view("a", [10]), view("b", [90]), view("c", [90], capacity=2 * BLOCK)]
    engines.append(view("d", [90], standing=EngineState.UNUSABLE))
    assert runs(*engines[:1], *engines[2:]) == {("a", ("a",))}
    assert runs(*engines, refused_by=frozenset("b")) == {("a", ("a",))}


# Through a router.

POOL = {
    "single": (2000, 2000),
    "max_model_len": 8000,
    "limits": {"request_timeout": 150.0},
    "slo": {"ttft_p95": 150.0, "e2e_p95": 150.0},
}


def start(start_service: "StartService", window: float) -> Any:
    routing = {
        "queue": {"timeout": 50.0},
        "prefill": {"window": window},
        "placement": {"affinity": {"max_extra_load": 0}},
    }
    return start_service(**POOL, routing=routing)


def hold(service: "Service") -> asyncio.Event:
    """Prompts stay uncomputed until it is set."""
    held = asyncio.Event()
    for engine in service.engines:
        engine.script.hold = held
    return held


async def free(service: "Service", blocks: int, speed: float = 1000.0) -> None:
    """Engines have so many blocks free and compute so many prompt tokens a second."""
    for engine in service.engines:
        engine.push(headroom_bytes=blocks * BLOCK, prefill_tokens_per_second=speed)
    known = service.router.service.engines.all()
    await service.until(
        lambda: all(e.headroom.headroom_bytes == blocks * BLOCK for e in known), PATIENCE_S
    )


def sent(service: "Service") -> list[list[int]]:
    """Prompt tokens by engine."""
    return [[len(r.token_ids.ids) for r in engine.requests] for engine in service.engines]


def prompt(number: int, tokens: int) -> str:
    return str(number) * tokens  # no two begin alike


@pytest.mark.parametrize("order", [EXAMPLE, (6000, 2000, 2000, 2000, 6000, 2000)], ids=str)
def test_what_waits_is_balanced(start_service: "StartService", order: tuple[int, ...]) -> None:
    """In the second order, whoever goes to the engine with least to do, one by one, ends with
    24,006,000."""

    async def scenario() -> None:
        async with start(start_service, window=2.0) as service:
            held = hold(service)
            room = service.router.service.queue
            await free(service, 2)
            tasks = []
            for i, tokens in enumerate(order, 1):
                task = asyncio.ensure_future(service.complete(prompt(i, tokens)))
                tasks.append(task)
                await service.until(lambda n=i: len(room) == n, PATIENCE_S)
            await free(service, 2000)
            await service.until(lambda: sum(map(len, sent(service))) == 6, PATIENCE_S)
            critical = max(sum(map(pairs, tokens)) for tokens in sent(service))
            assert critical == 22_005_000
            held.set()
            assert [a.status_code for a in await asyncio.gather(*tasks)] == [200] * 6
            prefill = (await service.stats())["prefill"]
            assert prefill["waiting"] == 0

    asyncio.run(scenario())


def test_nobody_waits_for_an_idle_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start(start_service, window=10.0) as service:
            held = hold(service)
            await free(service, 1999, speed=5.0)
            tasks = [asyncio.ensure_future(service.complete(prompt(i, 100))) for i in range(2)]
            await service.until(lambda: sorted(map(len, sent(service))) == [1, 1], PATIENCE_S)
            assert service.router.service.admission.window.waited == 0
            held.set()
            assert [a.status_code for a in await asyncio.gather(*tasks)] == [200, 200]

    asyncio.run(scenario())


def test_who_leaves_the_window_leaves_no_memory_behind(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start(start_service, window=10.0) as service:
            held = hold(service)
            window = service.router.service.admission.window
            await free(service, 1999, speed=5.0)
            first = [asyncio.ensure_future(service.complete(prompt(i, 100))) for i in range(2)]
            await service.until(lambda: sorted(map(len, sent(service))) == [1, 1], PATIENCE_S)
            third = asyncio.ensure_future(service.complete(prompt(3, 100)))
            await service.until(lambda: len(window) == 1, PATIENCE_S)
            third.cancel()
            await service.until(lambda: len(window) == 0, PATIENCE_S)
            held.set()
            assert [a.status_code for a in await asyncio.gather(*first)] == [200, 200]
            engines = service.router.service.engines.all()
            await service.until(lambda: not any(e.inflight for e in engines), PATIENCE_S)
            assert [e.credit_bytes for e in engines] == [0, 0]

    asyncio.run(scenario())
