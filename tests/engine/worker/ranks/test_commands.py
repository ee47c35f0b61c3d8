"""What crosses to other ranks at every step."""

from dataclasses import replace

import msgspec
import torch

from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.sampler import sample
from ullage_engine.worker.rank_group import Execute, ToRank, for_rank

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


def received(samples: bool) -> StepPlan:
    encoded = msgspec.msgpack.encode(Execute(for_rank(PLAN, samples)))
    command = msgspec.msgpack.decode(encoded, type=ToRank)
    assert isinstance(command, Execute)
    return command.plan


def test_a_history_crosses_only_where_a_penalty_reads_it() -> None:
    assert [each.history for each in received(samples=True).chunks] == [[], TEXT, []]
    assert [each.history for each in received(samples=False).chunks] == [[], [], []]


def test_a_rank_samples_from_what_it_gets_what_rank_0_would() -> None:
    logits = torch.randn(2, 211, generator=torch.Generator().manual_seed(5))
    here = sample(logits.clone(), PLAN.chunks[:2])
    assert sample(logits.clone(), received(samples=True).chunks[:2]) == here


def test_a_mask_crosses_only_to_the_rank_that_samples() -> None:
    masked = replace(chunk(SAMPLED), allowed=b"\x05", banned=[7])
    for samples, mask in ((True, b"\x05"), (False, None)):
        encoded = msgspec.msgpack.encode(Execute(for_rank(StepPlan([masked]), samples)))
        (got,) = msgspec.msgpack.decode(encoded, type=Execute).plan.chunks
        assert (got.allowed, got.banned) == (mask, [7])
