"""Tokens that are tried before they are known: answers stay the same, and nobody pays for it."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from ullage_testing.fake_device import choose_repetitively

from ullage_engine.protocol.requests import BeamParams, SamplingParams
from ullage_engine.protocol.step_plan import SampledToken
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.speculation import (
    MAX_SPECULATING,
    NGRAM,
    PAUSE_TOKENS,
    PromptLookup,
)
from ullage_engine.worker.engine import EngineCore

MakeRig = Callable[..., Any]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 60)),
    st.integers(1, 9),
    st.integers(1, 60),
)
def test_a_draft_followed_the_last_tokens_where_they_were_last_before(
    tokens: list[int], lengths: list[int], count: int, reach: int
) -> None:
    text: list[int] = []
    lookup = PromptLookup(text, reach)
    # As it grows, and not all at once.
    for length in [*sorted(lengths), len(tokens)]:
        text += tokens[len(text) : length]
        draft = lookup.draft(count)
        assert lookup.num_ngrams <= reach
        ends = [
            end
            for end in range(max(NGRAM, len(text) - reach), len(text))
            if text[end - NGRAM : end] == text[len(text) - NGRAM :]
        ]
        assert len(draft) == (count if ends else 0)
        whole = text + draft
        for place in range(len(draft)):
            assert whole[len(text) + place] == whole[ends[-1] + place]


@pytest.mark.parametrize("count", [1, MAX_SPECULATING])
def test_answers_are_those_without_and_take_fewer_steps(make_rig: MakeRig, count: int) -> None:
    rig = make_rig(blocks=200, speculative=6, max_sequences=40)
    prompts = {f"r{seed}": [30 + seed, 7, 8, 9] * 5 for seed in range(count)}
    for seed, (name, prompt) in enumerate(prompts.items()):
        assert rig.submit(rig.request(name, prompt, 120, seed=seed)) is None
    assert rig.run() == {
        name: rig.undisturbed(prompt, seed, 120)
        for seed, (name, prompt) in enumerate(prompts.items())
    }
    assert rig.scheduler.num_steps < 96
    stats = rig.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_more_sequences_than_rows_are_free_for_try_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=200, speculative=6, max_sequences=40)
    for seed in range(MAX_SPECULATING + 1):
        rig.submit(rig.request(f"r{seed}", [1, 2, 3] * 5, 40, seed=seed))
    while rig.scheduler.stats().num_running > MAX_SPECULATING or not rig.scheduler.num_steps:
        plan = rig.scheduler.schedule()
        assert all(chunk.num_sampled == 1 for chunk in plan.chunks)
        rig.finish(plan)
    assert rig.scheduler.speculation.num_draft_tokens == 0


def test_a_step_has_no_more_rows_than_sequences_may_run(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=200, speculative=16, max_sequences=8)
    for seed in range(3):
        rig.submit(rig.request(f"r{seed}", [1, 2, 3] * 5, 60, seed=seed))
    most = 0
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        rows = sum(chunk.num_sampled for chunk in plan.chunks if chunk.sampling)
        assert rows <= 8
        most = max(most, rows)
        rig.finish(plan)
    assert most > 3


def test_nobody_is_preempted_for_a_draft_behind_a_fork(make_rig: MakeRig) -> None:
    num_preemptions = []
    for speculative in (0, 6):
        rig = make_rig(blocks=5, expected=1, speculative=speculative, max_sequences=40)
        rig.device.choose = choose_repetitively
        prompt = [1, 2, 3] * 9  # its last block is shared, and copied before it is written
        rig.submit(*(rig.request(f"r{seed}", prompt, 8, seed=seed) for seed in range(3)))
        rig.run()
        num_preemptions.append(rig.scheduler.stats().num_preemptions)
    assert num_preemptions == [1, 1]


def test_nothing_is_kept_of_sequences_that_ended(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=200, speculative=6, max_sequences=40)
    for seed in range(3):
        rig.submit(rig.request(f"r{seed}", [seed, 2, 3] * 6, 40, seed=seed))
    speculation = rig.scheduler.speculation
    kept = []
    while rig.scheduler.has_work:
        kept.append(speculation.num_sequences)
        rig.step()
        rig.scheduler.cancel("r0") if len(kept) == 3 else None
    assert max(kept) == 3
    assert speculation.num_accepted_tokens
    assert speculation.num_sequences == 0


def test_an_answer_ends_where_it_would(make_rig: MakeRig) -> None:
    prompt = [1, 2, 3] * 6
    for length in range(1, 12):
        for has_stop in (False, True):
            rig = make_rig(speculative=9, max_sequences=40)
            answer = rig.undisturbed(prompt, 5, 12)
            stop = [answer[length - 1]] if has_stop else []
            end = answer.index(stop[0]) + 1 if has_stop else length
            most = 12 if has_stop else length
            rig.submit(rig.request("r", prompt, most, seed=5, stop=stop))
            assert rig.run()["r"] == answer[:end], (length, has_stop)
            assert rig.outputs["r"][-1].finish == ("stop" if has_stop else "length")


def test_requests_whose_next_token_depends_on_more_than_kv_try_nothing(make_rig: MakeRig) -> None:
    for changes in (
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(presence_penalty=1.0)},
        {"grammar": "root ::= x"},
        {"min_tokens": 60},
        {"beam": BeamParams(width=2)},
    ):
        answers: list[list[int]] = []
        for speculative in (0, 6):
            rig = make_rig(blocks=200, speculative=speculative, max_sequences=40)
            rig.device.choose = choose_repetitively
            engine = EngineCore(rig.scheduler, rig.device, ThroughputEstimator())
            request = replace(rig.request("r", [1, 2, 3] * 6, 40), **changes)
            submit = engine.submit_group if request.beam else rig.scheduler.submit_group
            assert submit([request]) == []
            tokens: list[int] = []
            while engine.has_work:
                tokens += [token for output in engine.step() for token in output.token_ids]
            answers.append(tokens)
        assert answers[0] == answers[1], changes
        assert len(answers[1]) == 40, changes
        assert rig.scheduler.speculation.num_draft_tokens == 0, changes


def test_a_sequence_that_is_hard_to_guess_pauses(make_rig: MakeRig) -> None:
    def token_at(position: int) -> int:
        # The same three tokens again and again, and then always another one.
        return position if position % 4 == 3 else 1000 + position % 4

    rig = make_rig(blocks=200, speculative=2, max_sequences=40)
    rig.submit(rig.request("r", [token_at(position) for position in range(20)], 300))
    tried = []
    while rig.scheduler.has_work:
        chunks = rig.scheduler.schedule().chunks
        tried += [chunk.end for chunk in chunks if chunk.num_sampled > 1]
        parts = [part for chunk in chunks for part in chunk.sampled_parts()]
        rig.scheduler.commit([SampledToken("r", token_at(part.end), 0.0, [], []) for part in parts])
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps[0] == 4
    assert sum(gap >= PAUSE_TOKENS for gap in gaps) == 3
    assert len(tried) < 12
    assert rig.scheduler.speculation.num_accepted_tokens == 0
