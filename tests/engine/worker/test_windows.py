"""A small gpt-oss answers alike whether or not its windows have KV blocks of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.worker.engine import EngineCore

WINDOW = 20
CHUNK = 64
LONGEST = 512
BLOCKS = 200

Answer = list[tuple[int, float]]


@pytest.fixture(scope="module")
def loaded(
    random_model: Callable[..., Any],
    load: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    seed = 20_261
    folder: Path = tmp_path_factory.mktemp("gpt_oss")
    random_model("gpt_oss", seed).save_pretrained(folder)
    return load(f"file://{folder}")


def make_engine(runner: ModelRunner, *, windowed: bool, host_slots: int) -> EngineCore:
    group = CacheGroup(runner.kv_block_bytes // 16)
    groups = (group, CacheGroup(group.bytes_per_token, WINDOW)) if windowed else (group,)
    profile = MemoryProfile(
        16, groups, prefill_chunk_tokens=CHUNK, kv_pool_bytes=BLOCKS * runner.kv_block_bytes
    )
    runner.allocate_kv(BLOCKS, host_slots)
    throughput = ThroughputEstimator()
    # A slow prefill, so that what can be swapped is.
    throughput.prefill_tokens_per_second = 1.0
    limits = SchedulerLimits(LONGEST, 8, CHUNK, True, 8192)
    lengths = OutputLengthEstimator(LONGEST, start=8)
    policy = KvPolicy(host_slots=host_slots)
    return EngineCore(Scheduler(profile, limits, throughput, lengths, policy), runner, throughput)


def answers(engine: EngineCore, prompts: list[list[int]]) -> dict[str, Answer]:
    """Everything told of prompts that come one after the other, two of them as two samples."""
    told: dict[str, Answer] = {}
    for number, prompt in enumerate(prompts):
        requests = [
            EngineRequest(
                request_id=f"{number}.{sample}",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                max_tokens=90,
                sampling=SamplingParams(temperature=1.0, seed=number + sample, top_logprobs=1),
            )
            for sample in range(2)
        ]
        assert engine.submit_group(requests) == []
    preempt_at = 60
    while engine.has_work:
        for output in engine.step():
            assert output.logprobs is not None
            entry = (output.token_ids[0], output.logprobs[0].logprob)
            told.setdefault(output.request_id, []).append(entry)
        preempt_at -= 1
        if preempt_at == 0:
            engine.scheduler.preempt_newest()
        engine.scheduler.check_integrity()
    assert engine.take_failed() == []
    return told


@pytest.mark.parametrize("host_slots", [0, 60])
def test_windows_of_their_own_change_no_token(
    loaded: Any, new_runner: Callable[..., ModelRunner], host_slots: int
) -> None:
    shared = [7 * at % 199 for at in range(150)]
    prompts = [[*shared, at] for at in range(2)] + [[at % 199 for at in range(200, 300)]]
    told = []
    for windowed in (False, True):
        runner = new_runner(loaded, max_step_tokens=CHUNK + 8, max_sequences=8, windowed=windowed)
        engine = make_engine(runner, windowed=windowed, host_slots=host_slots)
        told.append(answers(engine, prompts))
        stats = engine.scheduler.stats()
        assert stats.prefix_hit_tokens > 0
        assert stats.num_swaps == (host_slots > 0)
    assert told[0] == told[1]
    assert [len(answer) for answer in told[1].values()] == [90] * 6


def test_a_block_is_half_as_large_where_half_of_the_layers_have_windows(
    loaded: Any, new_runner: Callable[..., ModelRunner]
) -> None:
    whole, half = (new_runner(loaded, windowed=windowed) for windowed in (False, True))
    assert whole.kv_block_bytes == 2 * half.kv_block_bytes
    for runner in (whole, half):
        assert runner.allocated_bytes()["kv_pool"] == 256 * runner.kv_block_bytes
