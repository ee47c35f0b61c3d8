"""Every rung of the ladder and every way between them."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_common.config.router import (
    DEFAULT_LADDER,
    Rung,
    RungsSection,
    ShrinkContextSection,
    ShrinkOutputSection,
)
from ullage_common.request_cost import CacheGroup, MemoryProfile, predict
from ullage_router.policy.decide import decide, decide_among, min_output, passes
from ullage_router.policy.facts import (
    EngineState,
    EngineView,
    QueueState,
    Release,
    RequestFacts,
    RoutingPolicy,
    TimeLimits,
)
from ullage_router.policy.forecast import is_on_time
from ullage_router.policy.next_step import NextStep, Refuse, Run, ShrinkContext, Wait

SHRINK = ShrinkOutputSection(min_percent=25, below_expected=True)
PROFILE = MemoryProfile(16, (CacheGroup(1000),))
BLOCK = PROFILE.block_bytes
ALL = ("shrinkContext", *DEFAULT_LADDER)
"""The default, and the rung that a manifest must ask for."""
POLICY = RoutingPolicy(
    ("single", "large"),
    1000,
    10_000_000,
    ALL,
    RungsSection(
        shrink_context=ShrinkContextSection(max_dropped_percent=100), shrink_output=SHRINK
    ),
    large_pool="large",
)


def engine(id_: str = "a", free: int = 20, **more: Any) -> EngineView:
    """An engine of 100 blocks, `free` of them available."""
    fields: dict[str, Any] = {
        "pool": "single",
        "standing": EngineState.USABLE,
        "available": free * BLOCK,
        "capacity": 100 * BLOCK,
        "profile": PROFILE,
        "expected_output": 64,
        "max_model_len": 1600,
    }
    return EngineView(id_, **{**fields, **more})


def large(free: int = 200, **more: Any) -> EngineView:
    more = {"capacity": 400 * BLOCK, "max_model_len": 6400, **more}
    return engine("L", free, pool="large", **more)


def facts(prompt: int = 100, most: int = 64, **more: Any) -> RequestFacts:
    return RequestFacts(prompt, most, more.pop("least", min_output(most, most, SHRINK)), **more)


def test_a_changed_request_is_priced_anew() -> None:
    short = facts(10)
    decide(short, [engine(free=90)], POLICY)
    for changed in (replace(short, prompt_tokens=100), replace(facts(10), prompt_tokens=100)):
        assert decide(changed, [engine(free=90)], POLICY) == decide(
            facts(100, least=short.min_tokens), [engine(free=90)], POLICY
        )
    assert replace(short, prompt_tokens=100).prices is not short.prices


def test_a_large_pool_alone_is_everybodys_home() -> None:
    alone = replace(POLICY, pools=("large",))
    for prompt in (100, 1500):
        found = decide(facts(prompt), [large()], alone)
        assert isinstance(found, Run)
        assert (found.pool, found.step) == ("large", "accept")


def ladder(*rungs: Rung) -> RoutingPolicy:
    return replace(POLICY, ladder=rungs)


def run(decision: NextStep) -> tuple[str, str, str, int]:
    assert isinstance(decision, Run), decision
    return decision.action, decision.reason, decision.engine, decision.max_tokens


def test_what_fits_is_accepted() -> None:
    decision = decide(facts(), [engine()], POLICY)
    assert run(decision) == ("accept", "FITS", "a", 64)
    assert isinstance(decision, Run)
    assert decision.demand == predict(PROFILE, 100, 64, 64)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (facts(prompt=1001), "LARGE_REQUEST"),
        (facts(prompt=1000), "FITS"),
    ],
)
def test_large_prompts_take_the_large_pool(asked: RequestFacts, expected: str) -> None:
    decision = decide(asked, [engine(free=100), large()], POLICY)
    action, reason, _, _ = run(decision)
    assert (action, reason) == ("route4" if expected != "FITS" else "accept", expected)


def test_large_kv_takes_the_large_pool() -> None:
    policy = replace(POLICY, large_request_kv=10 * BLOCK)
    assert run(decide(facts(prompt=100), [engine(), large()], policy))[0] == "route4"
    assert run(decide(facts(prompt=60), [engine(), large()], policy))[0] == "accept"


def test_a_large_prompt_without_a_large_pool_stays() -> None:
    assert run(decide(facts(prompt=1200), [engine(free=100)], POLICY))[0] == "accept"


def test_what_the_first_pool_can_never_hold_takes_the_next() -> None:
    small = engine(capacity=10 * BLOCK, free=10)
    assert run(decide(facts(prompt=300), [small, large()], POLICY))[:2] == ("route4", "CAPACITY")


def test_context_is_shrunk_first() -> None:
    decision = decide(facts(prompt=500, droppable=True), [engine(free=20)], POLICY)
    assert decision == ShrinkContext("KV_HEADROOM", 20 * 16 - 64, 1)


def test_output_is_shrunk_next() -> None:
    decision = decide(facts(prompt=290), [engine(free=20)], POLICY)
    assert run(decision) == ("shrink", "KV_HEADROOM", "a", 30)


def test_output_is_not_shrunk_below_a_quarter() -> None:
    assert isinstance(decide(facts(prompt=310), [engine(free=20)], POLICY), Wait)
    assert isinstance(decide(facts(prompt=300, most=240), [engine(free=20)], POLICY), Wait)


def test_then_it_waits() -> None:
    decision = decide(facts(prompt=400), [engine(free=20)], POLICY)
    assert isinstance(decision, Wait)
    assert (decision.reason, decision.pool) == ("KV_HEADROOM", "single")


@pytest.mark.parametrize("state", [QueueState.FULL, QueueState.SPENT])
def test_then_it_takes_another_pool(state: QueueState) -> None:
    decision = decide(facts(prompt=400, queue=state), [engine(free=20), large()], POLICY)
    assert run(decision) == ("route4", "SPILL", "L", 64)


def test_another_pool_may_shrink_it_too() -> None:
    asked = facts(prompt=400, queue=QueueState.FULL)
    decision = decide(asked, [engine(free=20), large(free=27)], POLICY)
    assert run(decision) == ("route4", "KV_HEADROOM", "L", 32)
    no_shrink = ladder("queue", "route", "reject")
    assert isinstance(decide(asked, [engine(free=20), large(free=27)], no_shrink), Refuse)


@pytest.mark.parametrize(
    ("state", "reason"),
    [(QueueState.FULL, "QUEUE_FULL"), (QueueState.SPENT, "QUEUE_TIMEOUT")],
)
def test_the_end_is_a_refusal_with_a_time(state: QueueState, reason: str) -> None:
    releases = (Release(0.5, 2 * BLOCK), Release(3.2, 40 * BLOCK))
    decision = decide(facts(prompt=400, queue=state), [engine(releases=releases)], POLICY)
    assert isinstance(decision, Refuse)
    assert (decision.kind, decision.reason, decision.retry_after_s) == ("busy", reason, 4)
    assert "retry in 4 s" in decision.message
    assert str(29 * BLOCK) in decision.message


def test_a_ladder_without_queue_refuses_for_memory() -> None:
    decision = decide(facts(prompt=400), [engine()], ladder("reject"))
    assert isinstance(decision, Refuse)
    assert decision.reason == "KV_HEADROOM"


def test_the_order_of_the_ladder_counts() -> None:
    engines = [engine(free=20), large()]
    asked = facts(prompt=290, droppable=True)
    assert run(decide(asked, engines, ladder("route", "queue")))[1] == "SPILL"
    assert isinstance(decide(asked, engines, ladder("queue", "route")), Wait)
    assert run(decide(asked, engines, ladder("shrinkOutput", "shrinkContext")))[0] == "shrink"
    assert isinstance(decide(asked, engines, ladder("reject", "queue")), Refuse)
    assert isinstance(decide(asked, engines, ladder()), Refuse)


def test_nobody_overtakes_those_who_wait() -> None:
    asked = facts(prompt=50, ahead={"single": 5 * BLOCK}, droppable=True)
    assert isinstance(decide(asked, [engine(free=90)], POLICY), Wait)
    refused = decide(replace(asked, queue=QueueState.FULL), [engine(free=90)], POLICY)
    assert isinstance(refused, Refuse)


def test_the_time_of_a_refusal_counts_those_ahead() -> None:
    releases = tuple(Release(float(i), 10 * BLOCK) for i in range(1, 9))
    asked = facts(prompt=400, queue=QueueState.FULL)
    alone = decide(asked, [engine(releases=releases)], POLICY)
    behind = decide(
        replace(asked, ahead={"single": 30 * BLOCK}), [engine(releases=releases)], POLICY
    )
    assert isinstance(alone, Refuse)
    assert isinstance(behind, Refuse)
    assert (alone.retry_after_s, behind.retry_after_s) == (1, 4)


def test_a_session_gets_no_more_than_it_may_hold() -> None:
    """A block is 16 tokens; a session may hold 20 of them, any other request 100."""
    profile = MemoryProfile(16, (CacheGroup(1000),), session_kv_bytes=20 * BLOCK)
    bound = engine(free=100, profile=profile)
    whole = decide(facts(prompt=100, most=600), [bound], POLICY)
    held = decide(facts(prompt=100, most=600, has_session=True), [bound], POLICY)
    assert isinstance(whole, Run)
    assert isinstance(held, Run)
    assert (whole.max_tokens, held.max_tokens) == (600, 320 - 100)
    refused = decide(facts(prompt=400, has_session=True), [bound], POLICY)
    assert isinstance(refused, Refuse)
    assert (refused.kind, refused.reason) == ("invalid", "KV_NEVER_FITS")
    assert f"one session may hold {20 * BLOCK}" in refused.message
    assert "raise memory.sessionKVLimit" in refused.message
    shorter = decide(facts(prompt=400, has_session=True, droppable=True), [bound], POLICY)
    assert isinstance(shorter, ShrinkContext)
    assert (shorter.reason, shorter.prompt_tokens) == ("CONTEXT_TOO_LONG", 320 - 64)


def test_what_can_never_fit_is_invalid_at_once() -> None:
    context = decide(facts(prompt=1590), [engine()], POLICY)
    assert isinstance(context, Refuse)
    assert (context.kind, context.reason) == ("invalid", "CONTEXT_TOO_LONG")
    assert "1590" in context.message
    assert "1600" in context.message
    memory = decide(facts(prompt=500), [engine(capacity=10 * BLOCK)], POLICY)
    assert isinstance(memory, Refuse)
    assert (memory.kind, memory.reason) == ("invalid", "KV_NEVER_FITS")
    assert memory.retry_after_s is None


def test_a_conversation_too_long_is_shortened_instead() -> None:
    decision = decide(facts(prompt=5000, droppable=True), [engine()], POLICY)
    assert decision == ShrinkContext("CONTEXT_TOO_LONG", 1600 - 64, 1)
    no_shrink = decide(facts(prompt=5000, droppable=True), [engine()], ladder("queue"))
    assert isinstance(no_shrink, Refuse)


def test_the_output_is_cut_to_the_context() -> None:
    decision = decide(facts(prompt=1500, most=4096, least=16), [engine(free=100)], POLICY)
    assert run(decision)[3] == 100


def test_without_any_engine_it_is_unavailable() -> None:
    for engines in ([], [engine(standing=EngineState.UNUSABLE)]):
        decision = decide(facts(), engines, POLICY)
        assert isinstance(decision, Refuse)
        assert (decision.kind, decision.reason) == ("unavailable", "NO_ENGINE")
        assert decision.retry_after_s


def test_a_recovering_engine_is_waited_for() -> None:
    recovering = engine(standing=EngineState.RECOVERING)
    decision = decide(facts(), [recovering], POLICY)
    assert isinstance(decision, Wait)
    assert decision.reason == "NOT_READY"
    assert run(decide(facts(), [recovering, large()], POLICY))[:2] == ("route4", "SPILL")
    gone = decide(facts(queue=QueueState.SPENT), [recovering], POLICY)
    assert isinstance(gone, Refuse)
    assert gone.kind == "unavailable"


def test_an_engine_that_refused_is_not_asked_again() -> None:
    engines = [engine("a", 90), engine("b", 20)]
    assert run(decide(facts(refused_by=frozenset("a")), engines, POLICY))[2] == "b"
    assert isinstance(decide(facts(refused_by=frozenset("ab")), engines, POLICY), Wait)


def test_of_two_drawn_the_freer_one_is_taken() -> None:
    engines = [engine("a", 20), engine("b", 90)]
    assert {run(decide(facts(draw=d), engines, POLICY))[2] for d in range(8)} == {"b"}
    three = [*engines, engine("c", 50)]
    chosen = {run(decide(facts(draw=d), three, POLICY))[2] for d in range(30)}
    assert chosen == {"b", "c"}


def test_a_failing_engine_is_taken_last() -> None:
    engines = [engine("a", 50, health=1.0), engine("b", 60, health=0.1)]
    assert {run(decide(facts(draw=d), engines, POLICY))[2] for d in range(8)} == {"a"}


def test_a_pile_of_prompts_is_not_made_higher_than_time_allows() -> None:
    late = engine(free=90, backlog_tokens=2000, prefill_speed=100.0)
    asked = facts(limits=TimeLimits(first_token_s=30.0))
    assert run(decide(asked, [engine(free=90, backlog_tokens=2000)], POLICY))[0] == "accept"
    assert run(decide(asked, [replace(late, backlog_tokens=2300)], POLICY))[0] == "accept"
    assert run(decide(asked, [replace(late, prefill_speed=101.0)], POLICY))[0] == "accept"
    slow = replace(late, prefill_speed=80.0)
    waiting = decide(asked, [slow], POLICY)
    assert isinstance(waiting, Wait)
    assert waiting.reason == "DEADLINE"
    refused = decide(asked, [slow], ladder("reject"))
    assert isinstance(refused, Refuse)
    assert (refused.kind, refused.reason, refused.retry_after_s) == ("busy", "DEADLINE", 25)
    idle = replace(slow, backlog_tokens=0)
    assert (
        run(decide(facts(prompt=900, limits=TimeLimits(first_token_s=1.0)), [idle], POLICY))[0]
        == "accept"
    )


releases = st.lists(st.builds(Release, st.floats(0, 200), st.integers(0, 100 * BLOCK)), max_size=4)
views = st.builds(
    EngineView,
    id=st.sampled_from("abcdef"),
    pool=st.sampled_from(("single", "large")),
    standing=st.sampled_from(EngineState),
    available=st.integers(-10 * BLOCK, 100 * BLOCK),
    capacity=st.integers(0, 100).map(lambda n: n * BLOCK),
    profile=st.just(PROFILE),
    expected_output=st.integers(0, 512),
    max_model_len=st.integers(1, 4000),
    health=st.floats(0, 1),
    releases=releases.map(tuple),
    backlog_tokens=st.integers(0, 10_000),
    prefill_speed=st.sampled_from((0.0, 50.0, 5000.0)),
    load=st.integers(0, 40),
    decode_speed=st.sampled_from((0.0, 5.0, 50.0)),
    step_seconds=st.sampled_from(((), (0.05,), (0.05, 0.06, 0.1))),
    max_sequences=st.sampled_from((0, 8, 64)),
)
engine_lists = st.lists(views, max_size=5, unique_by=lambda e: e.id)
all_facts = st.builds(
    lambda prompt, most, **more: RequestFacts(prompt, most, min_output(most, most, SHRINK), **more),
    st.integers(1, 3000),
    st.integers(1, 1000),
    droppable=st.booleans(),
    queue=st.sampled_from(QueueState),
    ahead=st.dictionaries(st.sampled_from(("single", "large")), st.integers(0, 50 * BLOCK)),
    refused_by=st.frozensets(st.sampled_from("abcdef")),
    limits=st.builds(
        TimeLimits,
        ttft_s=st.sampled_from((2.0, math.inf)),
        e2e_s=st.sampled_from((5.0, math.inf)),
        waited_s=st.floats(0, 10),
        first_token_s=st.floats(0, 60),
        end_s=st.sampled_from((20.0, math.inf)),
    ),
    waiting=st.dictionaries(st.sampled_from(("single", "large")), st.integers(0, 50)),
    draw=st.integers(0, 1 << 30),
    samples=st.integers(1, 16),
)
ladders = st.permutations(ALL).flatmap(
    lambda rungs: st.integers(0, 5).map(lambda n: tuple(rungs[:n]))
)


@settings(max_examples=300, deadline=None)
@given(all_facts, engine_lists, ladders)
def test_promises_of_any_decision(
    asked: RequestFacts, engines: list[EngineView], rungs: tuple[Rung, ...]
) -> None:
    policy = replace(POLICY, ladder=rungs)
    decision = decide(asked, engines, policy)
    assert decide(asked, engines, policy) == decision
    match decision:
        case Run():
            chosen = next(e for e in engines if e.id == decision.engine)
            assert chosen.standing is EngineState.USABLE
            assert chosen.id not in asked.refused_by
            assert chosen.pool not in asked.ahead
            assert decision.demand.kv_bytes <= chosen.available
            assert 1 <= decision.max_tokens <= asked.max_tokens
            assert decision.max_tokens >= asked.min_tokens
            assert asked.prompt_tokens + decision.max_tokens <= chosen.max_model_len
        case Refuse(kind="invalid"):
            assert decision.retry_after_s is None
        case Refuse():
            assert decision.retry_after_s is not None
            assert 1 <= decision.retry_after_s <= 30
        case ShrinkContext():
            assert asked.droppable
            assert 0 < decision.fewest <= decision.prompt_tokens < asked.prompt_tokens
        case Wait():
            assert asked.queue is QueueState.OPEN
            assert decision.pool in {e.pool for e in engines}


def fits_at_home(engine_view: EngineView, wanted: RequestFacts, decision: Run) -> bool:
    """Whether a request may run on an engine as it is, by the plain rules."""
    room = engine_view.longest(wanted.prompt_tokens, wanted.samples) - wanted.prompt_tokens
    most = min(wanted.max_tokens, room)
    demand = predict(
        engine_view.profile,
        wanted.prompt_tokens,
        most,
        engine_view.expected_output,
        wanted.samples,
    )
    return (
        engine_view.pool == decision.pool
        and engine_view.standing is EngineState.USABLE
        and is_on_time(
            engine_view,
            wanted.prompt_tokens,
            demand.tokens - wanted.prompt_tokens,
            wanted.limits,
        )
        and room >= wanted.min_tokens
        and (most, demand) == (decision.max_tokens, decision.demand)
        and demand.kv_bytes <= engine_view.available
    )


some_engines = st.lists(
    st.builds(
        engine,
        st.integers(0, 99).map(str),
        st.integers(0, 100),
        pool=st.sampled_from(["single", "single", "large"]),
        standing=st.sampled_from(EngineState),
        load=st.integers(0, 20),
        backlog_tokens=st.integers(0, 500),
        prefill_speed=st.sampled_from([0.0, 100.0]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda view: view.id,
)


@settings(max_examples=400, deadline=None)
@given(
    some_engines,
    st.integers(1, 1700),
    st.integers(1, 600),
    st.integers(1, 3),
    st.integers(0, 2**30 - 1),
    st.randoms(use_true_random=False),
    st.sampled_from([{}, {"single": 1}, {"large": 1}]),
)
def test_what_a_few_engines_say_all_would_say(
    engines: list[EngineView],
    prompt: int,
    most: int,
    samples: int,
    draw: int,
    random: Any,
    ahead: dict[str, int],
) -> None:
    """A decision over a sample places a request where the decision over all may, or leaves it to
    that."""
    wanted = facts(
        prompt, most, samples=samples, draw=draw, limits=TimeLimits(first_token_s=10.0), ahead=ahead
    )
    usable = [e for e in engines if e.standing is EngineState.USABLE]
    single = [e for e in usable if e.pool == "single"]
    sample = random.sample(single, min(len(single), random.randrange(5)))
    larges = [e for e in engines if e.pool == "large"]
    usable_larges = [e for e in larges if e in usable]
    sample += usable_larges[:2] or larges[:1]
    quick = decide_among(wanted, sample, POLICY)
    plain = decide(wanted, engines, POLICY)
    if quick is None:
        if len(sample) == len(engines):
            assert not (isinstance(plain, Run) and plain.reason in {"FITS", "LARGE_REQUEST"})
        return
    assert isinstance(plain, Run)
    decided = (quick.action, quick.reason, quick.pool, quick.max_tokens, quick.step)
    assert decided == (plain.action, plain.reason, plain.pool, plain.max_tokens, plain.step)
    chosen = next(e for e in engines if e.id == quick.engine)
    assert fits_at_home(chosen, wanted, quick)


def test_a_few_engines_cannot_say_what_needs_another_pool() -> None:
    small = engine("a", capacity=10 * BLOCK, free=10)
    assert decide_among(facts(prompt=300), [small, large()], POLICY) is None
    assert decide_among(facts(prompt=300), [small], POLICY) is None
    assert decide_among(facts(), [], POLICY) is None


def test_without_a_usable_large_engine_a_large_request_waits_for_it() -> None:
    loading = large(standing=EngineState.UNUSABLE)
    assert decide_among(facts(prompt=1001), [engine(free=100), loading], POLICY) is None


@settings(max_examples=300, deadline=None)
@given(
    engine_lists,
    all_facts,
    st.sampled_from([{}, {"single": 10 * BLOCK}, {"single": 60 * BLOCK, "large": BLOCK}]),
    st.sampled_from([("single",), ("single", "large")]),
    st.sampled_from([ALL, ("route", "queue", "reject"), ("queue", "reject")]),
)
def test_who_waits_behind_others_hears_what_a_whole_decision_says(
    engines: list[EngineView],
    wanted: RequestFacts,
    passable: dict[str, int],
    crowded: tuple[str, ...],
    rungs: tuple[Rung, ...],
) -> None:
    ahead = dict.fromkeys(crowded, 10 * BLOCK)
    behind = replace(wanted, ahead=ahead, passable=passable, queue=QueueState.OPEN)
    may_run = isinstance(decide(behind, engines, ladder(*rungs)), Run)
    if "large" in crowded:
        assert passes(behind, engines, ladder(*rungs)) == may_run
    else:  # what becomes of it where it cannot wait is for later
        assert may_run or not passes(behind, engines, ladder(*rungs))
