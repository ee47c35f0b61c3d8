"""Comparing answers token by token, as sums of plain numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.policy.facts import EngineState, EngineView
from ullage_router.rollout.answers import (
    MAX_NLL,
    AnswerCounts,
    TokenLogprob,
    could_take,
    has_room,
    is_likeliest,
    nll,
)

LOGPROBS = st.floats(-40.0, 0.0) | st.just(math.nan) | st.just(-math.inf)


def told(token_id: int, logprob: float, **top: float) -> TokenLogprob:
    """The log-probabilities of a position: those of `_7=-0.1` are of token 7, likeliest first."""
    alternatives = [
        inference_pb2.Alternative(token_id=int(name[1:]), logprob=value)
        for name, value in top.items()
    ]
    return TokenLogprob(token_id=token_id, logprob=logprob, top=alternatives)


@st.composite
def positions(draw: st.DrawFn) -> TokenLogprob:
    token_id = draw(st.integers(0, 5))
    top = draw(st.integers(0, 5))
    return told(token_id, draw(LOGPROBS), **{f"_{top}": draw(LOGPROBS)})


ANSWERS = st.lists(st.lists(st.tuples(positions(), st.none() | positions()), max_size=6))


@given(ANSWERS)
def test_sums_are_finite_and_within_their_bounds(answers):
    counts = AnswerCounts()
    for answer in answers:
        counts.add_answer(answer)
    assert counts.prompts == len(answers)
    assert 0 <= counts.agreed <= counts.tokens == sum(map(len, answers))
    for total in (counts.canary_nll, counts.stable_nll):
        assert 0.0 <= total <= MAX_NLL * counts.tokens


@given(st.lists(positions(), min_size=1, max_size=6))
def test_a_side_agrees_with_itself_and_worst_with_one_that_fails(answer):
    greedy = [told(each.token_id, each.logprob, **{f"_{each.token_id}": -0.1}) for each in answer]
    same = AnswerCounts()
    same.add_answer((each, each) for each in greedy)
    assert same.agreed == same.tokens
    assert same.canary_nll == same.stable_nll

    failing = AnswerCounts()
    failing.add_answer((each, None) for each in greedy)
    assert failing.agreed == 0
    assert failing.canary_nll == MAX_NLL * len(greedy)
    assert failing.stable_nll == same.stable_nll


@given(ANSWERS, ANSWERS)
def test_the_order_of_answers_does_not_matter(one, other):
    forwards = AnswerCounts()
    backwards = AnswerCounts()
    for answer in one + other:
        forwards.add_answer(answer)
    for answer in reversed(one + other):
        backwards.add_answer(answer)
    assert forwards.agreed == backwards.agreed
    assert forwards.canary_nll == pytest.approx(backwards.canary_nll)


def test_a_token_is_found_among_the_chosen_and_the_likeliest():
    forced = told(3, -4.0, _7=-0.1, _8=-2.5)
    assert [nll(token, forced) for token in (3, 7, 8)] == pytest.approx([4.0, 0.1, 2.5])
    assert nll(9, forced) == MAX_NLL
    assert is_likeliest(7, forced)
    assert not is_likeliest(3, forced)
    assert not is_likeliest(3, told(3, -0.1))


@pytest.mark.parametrize(("available", "has"), [(10_000_000, True), (1_599_999, False), (0, False)])
def test_a_replay_takes_a_tenth_of_the_free_memory_at_most(available, has):
    profile = MemoryProfile(16, (CacheGroup(1000),))
    view = EngineView("e", "single", EngineState.USABLE, available, 10_000_000, profile, 32, 2000)
    assert has_room(view, 160) is has


@pytest.mark.parametrize(
    ("capacity", "tokens", "can"),
    [(1_600_000, 159, True), (1_599_999, 159, False), (0, 1, False), (10**9, 2001, False)],
)
def test_an_engine_could_take_a_tenth_of_all_its_memory(capacity, tokens, can):
    profile = MemoryProfile(16, (CacheGroup(1000),))
    view = EngineView("e", "single", EngineState.USABLE, 0, capacity, profile, 32, 2000)
    assert could_take(view, tokens) is can
