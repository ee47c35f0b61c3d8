"""Small requests pass a large one that waits first, and never cost it time."""

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_common.config.router import DEFAULT_LADDER
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.policy.decide import decide
from ullage_router.policy.facts import EngineState, EngineView, Release, RequestFacts, RoutingPolicy
from ullage_router.policy.forecast import end_s
from ullage_router.policy.next_step import Run, Wait

PROFILE = MemoryProfile(16, (CacheGroup(1000),))
BLOCK = PROFILE.block_bytes
POLICY = RoutingPolicy(("single",), 10_000, 1 << 30, DEFAULT_LADDER)
TOKENS_A_SECOND = 10.0
HEAD_BLOCKS = 60
IDLE = EngineView(
    id="a",
    pool="single",
    standing=EngineState.USABLE,
    available=100 * BLOCK,
    capacity=100 * BLOCK,
    profile=PROFILE,
    expected_output=64,
    max_model_len=1600,
    decode_speed=TOKENS_A_SECOND,
    prefill_speed=10_000.0,
    max_sequences=64,
)


def facts(prompt: int, output: int, **more: dict[str, int]) -> RequestFacts:
    return RequestFacts(prompt, output, output, ahead={"single": HEAD_BLOCKS * BLOCK}, **more)


@dataclass(frozen=True)
class _Running:
    end_s: float
    blocks: int


def _view(running: list[_Running], now: float) -> EngineView:
    """The engine as it would report itself, with every end predicted exactly."""
    releases = tuple(Release(r.end_s - now, r.blocks * BLOCK) for r in running)
    free = 100 - sum(r.blocks for r in running)
    return replace(IDLE, available=free * BLOCK, load=len(running), releases=releases)


def _head_start_s(running: list[_Running], now: float) -> float:
    """When the head has its memory, if nothing else comes."""
    free = 100 - sum(r.blocks for r in running)
    for each in sorted(running, key=lambda r: r.end_s):
        if free >= HEAD_BLOCKS:
            break
        now = each.end_s
        free = free + each.blocks
    return now


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 20), st.integers(10, 30)), min_size=3, max_size=3),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 300), st.integers(1, 200)),
        min_size=1,
        max_size=30,
    ),
)
def test_the_first_in_line_begins_as_early_as_without_those_that_pass(
    running_at_first: list[tuple[float, int]], arrivals: list[tuple[float, int, int]]
) -> None:
    running = [_Running(end, blocks) for end, blocks in running_at_first]
    alone = _head_start_s(running, 0.0)
    now = 0.0
    for gap, prompt, output in arrivals:
        now += gap
        running = [r for r in running if r.end_s > now]
        view = replace(_view(running, now), expected_output=output)
        if view.available >= HEAD_BLOCKS * BLOCK:
            break
        step = decide(facts(prompt, output, passable=PASSABLE), [view], POLICY)
        if isinstance(step, Run):
            end = now + end_s(view, prompt, output)
            running.append(_Running(end, step.demand.kv_bytes // BLOCK))
            assert sum(r.blocks for r in running) <= 100
        assert _head_start_s(running, now) <= max(now, alone) + 1e-9


BUSY = replace(IDLE, available=20 * BLOCK, load=3, releases=(Release(4.0, 80 * BLOCK),))
PASSABLE = {"single": HEAD_BLOCKS * BLOCK}


def test_only_what_ends_in_time_passes() -> None:
    for output, kind in ((39, Run), (41, Wait)):
        view = replace(BUSY, expected_output=output)
        assert isinstance(decide(facts(16, output, passable=PASSABLE), [view], POLICY), kind)


def test_nothing_passes_where_nothing_is_predicted() -> None:
    small = facts(16, 10, passable=PASSABLE)
    assert isinstance(decide(small, [BUSY], POLICY), Run)
    for view in (
        replace(BUSY, releases=()),
        replace(BUSY, decode_speed=0.0),
        replace(BUSY, available=HEAD_BLOCKS * BLOCK),
    ):
        assert isinstance(decide(small, [view], POLICY), Wait)
    assert math.isinf(end_s(replace(IDLE, prefill_speed=0.0), 10, 10))


FULL = replace(IDLE, id="full", available=0, load=3, releases=(Release(30.0, 100 * BLOCK),))


def claimed(output: int, size: int, **ahead: dict[str, int]) -> RequestFacts:
    return RequestFacts(16, output, output, claimed={"a": size}, **ahead)


def test_what_ends_in_time_passes_a_head_that_only_some_engines_can_serve() -> None:
    head = HEAD_BLOCKS * BLOCK
    for output, kind in ((39, Run), (41, Wait)):
        views = [replace(BUSY, expected_output=output), FULL]
        step = decide(claimed(output, head), views, POLICY)
        assert isinstance(step, kind)
        if isinstance(step, Run):
            assert (step.engine, step.choices) == ("a", {})
    free = replace(IDLE, id="free")
    step = decide(claimed(10, head), [BUSY, free], POLICY)
    assert isinstance(step, Run), "the engine that nobody waits for"
    assert step.engine == "free", "the engine that nobody waits for"


def test_no_head_is_passed_that_may_not_be() -> None:
    views = [replace(BUSY, expected_output=10), FULL]
    head = HEAD_BLOCKS * BLOCK
    late = {"single": 20 * BLOCK + 1}
    early = replace(BUSY, releases=(Release(0.5, BLOCK), Release(4.0, 79 * BLOCK)))
    for asked, engines in (
        (claimed(10, 0), views),  # that of few engines was passed too often
        (claimed(10, head, ahead=PASSABLE), views),  # that of the pool was
        (claimed(10, head, ahead=late, passable=late), [early, FULL]),  # it would begin before
        (claimed(10, 20 * BLOCK + 1, ahead=PASSABLE, passable=PASSABLE), [early, FULL]),
    ):
        assert isinstance(decide(asked, engines, POLICY), Wait)
    both = claimed(10, head, ahead=PASSABLE, passable=PASSABLE)
    assert isinstance(decide(both, views, POLICY), Run)


def test_nothing_passes_one_that_was_passed_too_often() -> None:
    assert isinstance(decide(facts(16, 10), [BUSY], POLICY), Wait)
