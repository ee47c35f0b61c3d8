"""Speculation on real models: what is served is what would be served without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from ullage_engine.worker.engine import EngineCore

BLOCKS = 64
FEW = {7: 60.0, 8: 60.0, 9: 60.0}
"""Biases to few tokens, so that a random model repeats itself."""
SAMPLINGS = [
    SamplingParams(temperature=0.0, logit_bias=FEW),
    SamplingParams(temperature=0.0, top_logprobs=1, logit_bias=FEW),
    SamplingParams(temperature=0.7, seed=11, top_logprobs=2, logit_bias=FEW),
    SamplingParams(temperature=0.4, top_p=0.8, top_k=40, seed=3, logit_bias=FEW),
]

Answers = dict[str, list[tuple[int, float | None]]]


def make_engine(runner: ModelRunner, num_speculative_tokens: int) -> EngineCore:
    group = CacheGroup(runner.kv_block_bytes // 16)
    profile = MemoryProfile(16, (group,), kv_pool_bytes=BLOCKS * runner.kv_block_bytes)
    limits = SchedulerLimits(
        max_model_len=512,
        max_sequences=16,
        prompt_tokens=64,
        is_chunked=True,
        decode_tokens=8192,
        num_speculative_tokens=num_speculative_tokens,
    )
    throughput = ThroughputEstimator()
    lengths = OutputLengthEstimator(512, start=32)
    return EngineCore(Scheduler(profile, limits, throughput, lengths), runner, throughput)


def answers(engine: EngineCore) -> Answers:
    """Serves the same requests as ever: an out of memory and a preemption are among the steps."""
    for number, sampling in enumerate(SAMPLINGS):
        prompt = [20 + number, *range(30, 40), *range(30, 38)]
        request = EngineRequest(
            request_id=str(number),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_tokens=70,
            sampling=sampling,
        )
        assert engine.submit(request) is None
    engine.inject_out_of_memory(10)
    return run(engine)


def run(engine: EngineCore) -> Answers:
    told: Answers = {}
    while engine.has_work:
        for output in engine.step():
            unreported: list[float | None] = [None] * len(output.token_ids)
            logprobs = [each.logprob for each in output.logprobs or []] or unreported
            entries = zip(output.token_ids, logprobs, strict=True)
            told.setdefault(output.request_id, []).extend(entries)
        engine.scheduler.check_integrity()
        if engine.num_steps == 15:
            engine.scheduler.preempt_newest()
    assert engine.take_failed() == []
    return told


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_with_speculation_are_those_without(
    save_llama: Callable[..., tuple[Any, Path]],
    load: Callable[..., Any],
    new_runner: Callable[..., ModelRunner],
    deterministic: bool,
) -> None:
    _, folder = save_llama()
    runner = new_runner(load(f"file://{folder}"), num_blocks=BLOCKS, deterministic=deterministic)
    plain = make_engine(runner, 0)
    expected = answers(plain)
    engine = make_engine(runner, 3)
    got = answers(engine)
    assert {name: [token for token, _ in each] for name, each in got.items()} == {
        name: [token for token, _ in each] for name, each in expected.items()
    }
    for name in ("1", "2"):
        logprobs = [logprob for _, logprob in expected[name]]
        assert [logprob for _, logprob in got[name]] == pytest.approx(logprobs, abs=1e-3)
    if deterministic:
        assert got == expected
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert speculation.num_accepted_tokens > 0
    assert engine.num_steps < plain.num_steps


def test_a_trained_model_copies_a_text_in_fewer_steps(
    smollm2: Any, new_runner: Callable[..., ModelRunner]
) -> None:
    runner = new_runner(smollm2, num_blocks=BLOCKS)
    told: list[Answers] = []
    num_steps: list[int] = []
    for num_speculative_tokens in (0, 5):
        engine = make_engine(runner, num_speculative_tokens)
        prompt = [*range(2000, 2020)] * 3
        for seed in range(2):
            sampling = SamplingParams(temperature=0.5 * seed, seed=seed)
            request = EngineRequest(
                request_id=str(seed),
                token_ids=[100 + seed, *prompt],
                num_prompt_tokens=1 + len(prompt),
                max_tokens=30,
                sampling=sampling,
            )
            assert engine.submit(request) is None
        told.append(run(engine))
        num_steps.append(engine.num_steps)
    assert told[0] == told[1]
    assert num_steps[1] < 0.6 * num_steps[0], num_steps
