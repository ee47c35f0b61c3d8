"""A small LFM2 gives the same tokens and log-probabilities, bit for bit, however it is scheduled.

Deterministic steps make that a sharp test: a convolution state that is off by anything shows.
"""

import itertools
import random
import time
import warnings
from collections.abc import Callable

import pytest
import torch

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.step_plan import SampledToken, StepPlan
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.worker.engine import EngineCore

VOCAB = 199
LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]
REPLAY = 8
Told = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


@pytest.fixture(scope="module")
def seed() -> int:
    return 20_261


@pytest.fixture(scope="module")
def lfm2(
    tmp_path_factory: pytest.TempPathFactory, load: Callable[..., LoadedModel], seed: int
) -> LoadedModel:
    folder = tmp_path_factory.mktemp("lfm2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, Lfm2Config

        torch.manual_seed(seed)
        config = Lfm2Config(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=len(LAYERS),
            layer_types=LAYERS,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=80,
            block_multiple_of=16,
            max_position_embeddings=512,
            initializer_range=0.3,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load(f"file://{folder}")


@pytest.fixture(scope="module", params=["auto", "fp8"])
def runner(
    lfm2: LoadedModel, new_runner: Callable[..., ModelRunner], request: pytest.FixtureRequest
) -> ModelRunner:
    sizes = {"max_step_tokens": 72, "max_sequences": 8}
    return new_runner(lfm2, **sizes, deterministic=True, kv_dtype=request.param)


def make_engine(
    runner: ModelRunner,
    *,
    blocks: int = 64,
    host_slots: int = 0,
    prefix_cache: bool = True,
    replay_tokens: int = REPLAY,
    restore_workspace: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    model_config = runner.model_config
    group = CacheGroup(bytes_per_token=runner.kv_block_bytes // 16)
    profile = MemoryProfile(
        block_tokens=16,
        groups=(group,),
        state_bytes_per_sequence=model_config.state_bytes(4),
        activation_bytes_per_token=1,
        sampler_bytes_per_sequence=1,
        prefill_chunk_tokens=64,
        kv_pool_bytes=blocks * 16 * group.bytes_per_token,
    )
    # What an engine before has left must not matter.
    runner.allocate_kv(blocks, host_slots)
    limits = SchedulerLimits(512, 8, 64, True, 1024, replay_tokens)
    policy = KvPolicy(prefix_cache=prefix_cache, host_slots=host_slots)
    throughput = ThroughputEstimator()
    # A slow prefill, so that what can be swapped is.
    throughput.prefill_tokens_per_second = 1.0
    return EngineCore(
        Scheduler(profile, limits, throughput, OutputLengthEstimator(512, start=8), policy),
        runner,
        throughput,
        restore_workspace=restore_workspace,
        clock=clock,
    )


def make_request(name: str, token_ids: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0, seed=len(name), top_logprobs=1),
    )


def run(engine: EngineCore, told: dict[str, Told]) -> dict[str, Told]:
    while engine.has_work:
        for output in engine.step():
            assert output.logprobs is not None
            entry = (output.token_ids[0], output.logprobs[0].logprob)
            told.setdefault(output.request_id, []).append(entry)
        engine.scheduler.check_integrity()
    assert engine.take_failed() == []
    return told


def alone(runner: ModelRunner, request: EngineRequest) -> Told:
    engine = make_engine(runner, prefix_cache=False)
    assert engine.submit(request) is None
    return run(engine, {})[request.request_id]


def tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(count)]


def after_a_hit(runner: ModelRunner, seed: int, replay_tokens: int) -> tuple[Told, EngineRequest]:
    """What is told of a prompt of 49 tokens whose first 48 are cached: the state behind those shows
    in the very token that is chosen next."""
    document = tokens(seed, 50)
    engine = make_engine(runner, replay_tokens=replay_tokens)
    engine.submit(make_request("first", document, 2))
    run(engine, {})
    request = make_request("second", document[:48] + tokens(seed + 1, 1), 6)
    engine.submit(request)
    told = run(engine, {})["second"]
    assert engine.scheduler.stats().prefix_hit_tokens == 48
    return told, request


def test_a_cached_prefix_changes_nothing(runner: ModelRunner, seed: int) -> None:
    assert runner.model_config.replay_tokens == REPLAY
    told, request = after_a_hit(runner, seed, REPLAY)
    assert told == alone(runner, request)


def test_a_replay_one_token_too_short_shows(runner: ModelRunner, seed: int) -> None:
    told, request = after_a_hit(runner, seed, REPLAY - 1)
    assert told != alone(runner, request)


@pytest.mark.parametrize("host_slots", [0, 6])
def test_short_memory_samples_and_failed_steps_change_nothing(
    runner: ModelRunner, seed: int, host_slots: int
) -> None:
    engine = make_engine(runner, blocks=12, host_slots=host_slots)
    document = tokens(seed, 33)
    groups = [
        [make_request("x" * (number + 1), document + tokens(seed + number, 4), 30)]
        for number in range(4)
    ]
    groups.append([make_request("s" * (number + 5), document, 9) for number in range(3)])
    told: dict[str, Told] = {}
    for group in groups:
        assert engine.submit_group(group, resumed=True) == []
    for step in (2, 9, 20):
        engine.inject_out_of_memory(step)
    run(engine, told)
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.num_oom_events == 3
    assert bool(engine.scheduler.stats().num_swaps) == bool(host_slots)
    for group in groups:
        for request in group:
            assert told[request.request_id] == alone(runner, request), request.request_id


def test_steps_that_wait_for_memory_change_nothing(
    runner: ModelRunner, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is given up after it has written KV and states, and is computed again later."""
    clock = itertools.count(step=0.3).__next__
    engine = make_engine(runner, restore_workspace=lambda: False, clock=clock)
    execute = runner.execute
    num_executed = 0

    def execute_in_vain(plan: StepPlan) -> list[SampledToken]:
        nonlocal num_executed
        num_executed += 1
        sampled = execute(plan)
        if num_executed % 5 in (1, 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sampled

    requests = [make_request("x" * number, tokens(seed + number, 70), 9) for number in (1, 2, 3)]
    for request in requests:
        assert engine.submit(request) is None
    monkeypatch.setattr(runner, "execute", execute_in_vain)
    told = run(engine, {})
    monkeypatch.undo()
    assert engine.num_oom_events > 4
    assert engine.scheduler.stats().num_preemptions == 0
    for request in requests:
        assert told[request.request_id] == alone(runner, request), request.request_id


def test_what_is_allocated_for_states_is_what_is_priced(runner: ModelRunner) -> None:
    runner.allocate_kv(7)
    allocated = runner.allocated_bytes()
    states = 2 * 8 * runner.model_config.state_bytes(4)
    assert allocated["state_pool"] == runner.state_pool_bytes == states + runner.kv_block_bytes
    assert allocated["kv_pool"] == 7 * runner.kv_block_bytes
