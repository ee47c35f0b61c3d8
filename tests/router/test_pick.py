"""The choice among engines that have room: affinity, two draws, and their limits."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.config import DEFAULT_LADDER
from ullage_router.decide import Run, decide
from ullage_router.predict import Profile
from ullage_router.views import EngineView, Facts, Policy, Standing

PROFILE = Profile(block_tokens=16, bytes_per_token=1000)
POLICY = Policy(("single", "large"), 10_000, 10_000_000, DEFAULT_LADDER, max_extra_load=4)


def engine(id_: str, free: int = 50, **more: Any) -> EngineView:
    """An engine of 100 blocks, `free` of them available."""
    fields = {"pool": "single", "standing": Standing.USABLE, "max_model_len": 1600, **more}
    size = PROFILE.block_bytes
    return EngineView(
        id_,
        available=free * size,
        capacity=100 * size,
        profile=PROFILE,
        expected_output=64,
        **fields,
    )


def chosen(engines: list[EngineView], preferred: str = "", draw: int = 0) -> str:
    facts = Facts(100, 64, 16, preferred=preferred, draw=draw)
    decision = decide(facts, engines, POLICY)
    assert isinstance(decision, Run), decision
    return decision.engine


def test_the_preferred_engine_is_taken_while_it_has_room() -> None:
    engines = [engine("a", free=90), engine("b", free=20), engine("c", free=90)]
    assert chosen(engines, "b") == "b"
    assert chosen([engine("a"), engine("b", free=5)], "b") == "a"
    assert chosen([engine("a"), engine("b", standing=Standing.UNUSABLE)], "b") == "a"
    assert chosen(engines, "gone") in "ac"


def test_it_yields_to_one_that_has_far_less_to_do() -> None:
    for load, expected in ((4, "b"), (5, "a")):
        assert chosen([engine("a"), engine("b", load=load)], "b") == expected


@given(st.integers(0, 2**30))
@settings(max_examples=100, deadline=None)
def test_of_two_drawn_the_one_with_more_memory_is_taken(draw: int) -> None:
    engines = [engine("a", free=20), engine("b", free=40), engine("c", free=60)]
    assert chosen(engines, draw=draw) != "a"
    assert chosen([engine("a", health=0.2), engine("b")], draw=draw) == "b"


def test_equal_engines_share_the_work() -> None:
    engines = [engine(name) for name in "abcd"]
    counts = Counter(chosen(engines, draw=draw) for draw in range(1200))
    assert set(counts.values()) == {300}
