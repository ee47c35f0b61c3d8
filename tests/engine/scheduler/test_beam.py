"""Beam search against every text there is, on vocabularies small enough to try them all."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.protocol.requests import TokenLogprobs
from ullage_engine.scheduler.beam_search import BeamRules, Candidate, Hypothesis, Search, advance

STOP = 0

Model = Mapping[tuple[int, ...], list[float]]
"""Log-probabilities of the next token after every text."""


def make_model(seed: int, vocab: int, depth: int) -> Model:
    draw = np.random.default_rng(seed)
    return {
        text: np.log(draw.dirichlet(np.ones(vocab))).tolist()
        for length in range(depth)
        for text in itertools.product(range(vocab), repeat=length)
    }


def candidates(model: Model, text: tuple[int, ...], rules: BeamRules) -> list[Candidate]:
    likeliest = sorted(enumerate(model[text]), key=lambda pair: -pair[1])
    return [
        Candidate(token, TokenLogprobs(logprob, [], []))
        for token, logprob in likeliest[: rules.num_candidates]
    ]


def search(model: Model, rules: BeamRules) -> tuple[Hypothesis, ...]:
    state = Search()
    while not state.is_over:
        some = [candidates(model, tuple(beam.token_ids), rules) for beam in state.beams]
        state = advance(state, some, rules)
        assert len(state.beams) <= rules.width
        assert all(len(beam.tokens) < rules.max_tokens for beam in state.beams)
    return state.finished


def logprob(model: Model, text: tuple[int, ...]) -> float:
    return sum(model[text[:place]][token] for place, token in enumerate(text))


def all_texts(vocab: int, depth: int) -> list[tuple[int, ...]]:
    """Every text that ends: at its first stop token, or at `depth` tokens."""
    return [
        text
        for length in range(1, depth + 1)
        for text in itertools.product(range(vocab), repeat=length)
        if STOP not in text[:-1] and (text[-1] == STOP or length == depth)
    ]


SIZES = st.tuples(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_a_search_wide_enough_finds_the_best_texts_of_all(sizes: tuple[int, int, int]) -> None:
    seed, vocab, depth = sizes
    model = make_model(seed, vocab, depth)
    texts = sorted(all_texts(vocab, depth), key=lambda text: -logprob(model, text))
    # Sums only fall as texts grow, so without a penalty stopping early loses nothing.
    rules = BeamRules(len(texts), 0.0, frozenset({STOP}), depth)
    found = search(model, rules)
    assert [tuple(each.token_ids) for each in found] == texts
    assert [each.score for each in found] == pytest.approx([logprob(model, t) for t in texts])


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 6), st.floats(-2, 3))
def test_what_is_found_is_possible_distinct_and_ranked(
    sizes: tuple[int, int, int], width: int, penalty: float
) -> None:
    seed, vocab, depth = sizes
    model = make_model(seed, vocab, depth)
    found = search(model, BeamRules(width, penalty, frozenset({STOP}), depth))
    texts = [tuple(each.token_ids) for each in found]
    assert len(set(texts)) == len(texts) == min(width, len(all_texts(vocab, depth)))
    assert set(texts) <= set(all_texts(vocab, depth))
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    for each, text in zip(found, texts, strict=True):
        assert each.score == pytest.approx(logprob(model, text) / len(text) ** penalty)
        assert each.finish == ("stop" if text[-1] == STOP else "length")


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 4), st.floats(-1, 2))
def test_knowing_more_candidates_changes_nothing(
    sizes: tuple[int, int, int], width: int, penalty: float
) -> None:
    seed, vocab, depth = sizes
    model = make_model(seed, vocab, depth)
    rules = BeamRules(width, penalty, frozenset({STOP, 1}), depth)
    state = Search()
    while not state.is_over:
        few = [candidates(model, tuple(beam.token_ids), rules) for beam in state.beams]
        everything = [
            [Candidate(token, TokenLogprobs(value, [], [])) for token, value in enumerate(values)]
            for values in (model[tuple(beam.token_ids)] for beam in state.beams)
        ]
        following = advance(state, few, rules)
        assert following == advance(state, everything, rules)
        state = following


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_one_beam_is_greedy_until_it_ends(sizes: tuple[int, int, int]) -> None:
    seed, vocab, depth = sizes
    model = make_model(seed, vocab, depth)
    text: tuple[int, ...] = ()
    while len(text) < depth and STOP not in text:
        text = (*text, int(np.argmax(model[text])))
    (found,) = search(model, BeamRules(1, 0.0, frozenset({STOP}), depth))
    if text[-1] != STOP:
        assert tuple(found.token_ids) == text
    else:  # it goes on beside the finished text as long as that could be bettered
        assert found.score >= logprob(model, text) - 1e-9


def test_the_length_limit_of_the_engine_ends_a_search_as_max_tokens_does() -> None:
    model = make_model(3, 5, 4)
    short = search(model, BeamRules(3, 1.0, frozenset(), 2))
    state = Search()
    rules = BeamRules(3, 1.0, frozenset(), 4)
    for is_last in (False, True):
        some = [candidates(model, tuple(beam.token_ids), rules) for beam in state.beams]
        state = advance(state, some, rules, is_last=is_last)
    assert state.is_over
    assert state.finished == short
    assert all(math.isfinite(each.score) for each in short)
