"""What crosses to other ranks at every step."""

import msgspec
import pytest
import torch
from msgspec.structs import replace

from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.logits_edits import PenaltyCounts
from ullage_engine.runner.sampler import sample
from ullage_engine.worker.histories import KEPT_PLANS, ReceivedHistories, SentHistories
from ullage_engine.worker.rank_group import Execute, ToRank, for_rank
from ullage_engine.worker.rank_process import with_histories

TEXT = list(range(100, 190))
SAMPLED = SamplingParams(temperature=0.9, seed=5)
PENALISED = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.4)


def chunk(sampling: SamplingParams | None) -> Chunk:
    return Chunk(
        request_id="r",
        token_ids=TEXT[-1:],
        start=len(TEXT) - 1,
        block_ids=[0],
        sampling=sampling,
        history=TEXT,
        num_prompt_tokens=3,
    )


PLAN = StepPlan([chunk(SAMPLED), chunk(PENALISED), chunk(None)])


def received(plan: StepPlan, sent: SentHistories | None) -> StepPlan:
    encoded = msgspec.msgpack.encode(Execute(for_rank(plan, sent)))
    command = msgspec.msgpack.decode(encoded, type=ToRank)
    assert isinstance(command, Execute)
    return command.plan


def test_a_history_crosses_only_where_a_penalty_reads_it() -> None:
    sampled = received(PLAN, SentHistories(4))
    assert [each.history for each in sampled.chunks] == [[], TEXT, []]
    assert [each.history for each in received(PLAN, None).chunks] == [[], [], []]


def test_a_rank_samples_from_what_it_gets_what_rank_0_would() -> None:
    logits = torch.randn(2, 211, generator=torch.Generator().manual_seed(5))
    here = sample(logits.clone(), PLAN.chunks[:2])
    plan = with_histories(received(PLAN, SentHistories(4)), ReceivedHistories(4))
    assert sample(logits.clone(), plan.chunks[:2]) == here


def penalised(name: str, history: list[int]) -> Chunk:
    return replace(chunk(PENALISED), request_id=name, history=history)


def test_a_history_crosses_once_and_is_counted_once_where_it_is_sampled() -> None:
    sent = SentHistories(4)
    at_rank = ReceivedHistories(4)
    counts = PenaltyCounts(4)
    history = list(TEXT)
    counted = []
    for token in range(40):
        crossing = received(StepPlan([penalised("r", history)]), sent)
        assert len(crossing.chunks[0].history) == (1 if token else len(TEXT))
        (there,) = with_histories(crossing, at_rank).chunks
        assert there.history == history
        counted.append(counts.of(there))
        history.append(token)
    assert all(each is counted[0] for each in counted)


def test_histories_beyond_the_bound_and_of_reused_names_cross_whole() -> None:
    sent = SentHistories(2)
    at_rank = ReceivedHistories(2)
    histories = {name: [number] * 3 for number, name in enumerate("abc")}
    for step, name in enumerate("abcabccab"):
        if step == 6:
            histories["c"] = [70, 71]  # another request of this name
        (there,) = with_histories(
            received(StepPlan([penalised(name, histories[name])]), sent), at_rank
        ).chunks
        assert there.history == histories[name]
        histories[name].append(step)


def test_histories_of_requests_that_ended_are_forgotten_on_both_ranks() -> None:
    sent = SentHistories(4)
    at_rank = ReceivedHistories(4)

    def cross(name: str) -> int:
        crossing = received(StepPlan([penalised(name, TEXT)]), sent)
        (there,) = with_histories(crossing, at_rank).chunks
        assert there.history == TEXT
        return len(crossing.chunks[0].history)

    assert cross("ended") == len(TEXT)
    assert [cross("r") for _ in range(KEPT_PLANS - 2)] == [len(TEXT)] + [0] * (KEPT_PLANS - 3)
    assert cross("ended") == 0
    assert [cross("r") for _ in range(KEPT_PLANS)] == [0] * KEPT_PLANS
    more = replace(penalised("ended", []), history_start=len(TEXT))
    with pytest.raises(RuntimeError, match="ended: 0 tokens of its history are here"):
        at_rank.complete(more)
    # One that waited so long crosses again.
    assert cross("ended") == len(TEXT)
    assert at_rank.complete(more).history == TEXT


def test_a_mask_crosses_only_to_the_rank_that_samples() -> None:
    masked = replace(chunk(SAMPLED), allowed=b"\x05", banned=[7])
    for sent, mask in ((SentHistories(4), b"\x05"), (None, None)):
        (got,) = received(StepPlan([masked]), sent).chunks
        assert (got.allowed, got.banned) == (mask, [7])
