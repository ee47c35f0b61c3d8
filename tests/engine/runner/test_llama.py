"""Small random models of every supported variety against transformers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

Save = Callable[..., tuple[Any, Path]]
Load = Callable[..., LoadedModel]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIETIES: dict[str, dict[str, Any]] = {
    "grouped heads, untied": {},
    "tied": {"tie_word_embeddings": True},
    "explicit head size": {"head_dim": 16},
    "a KV head for each head": {"num_key_value_heads": 6},
    "one KV head": {"num_key_value_heads": 1},
    "llama3 positions": {"rope_parameters": LLAMA3},
}


def logprobs_of(
    runner: ModelRunner, tokens: list[int], start: int
) -> tuple[list[int], list[float]]:
    """The five likeliest next tokens after computing from `start`."""
    chunk = Chunk(
        request_id="a",
        token_ids=tokens[start:],
        start=start,
        block_ids=list(range(-(-len(tokens) // 16))),
        sampling=SamplingParams(temperature=0.0, top_logprobs=5),
        history=tokens,
        num_prompt_tokens=len(tokens),
    )
    [sampled] = runner.execute(StepPlan([chunk]))
    assert sampled.token_id == sampled.top_ids[0]
    assert sampled.logprob == sampled.top_logprobs[0]
    return sampled.top_ids, sampled.top_logprobs


def expected_logprobs(model: Any, tokens: list[int]) -> tuple[list[int], list[float]]:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
    top = logits.log_softmax(-1).topk(5)
    return top.indices.tolist(), top.values.tolist()


@pytest.mark.parametrize("variety", VARIETIES)
def test_distribution_equals_transformers(
    variety: str, save_llama: Save, load: Load, new_runner: Callable[..., ModelRunner]
) -> None:
    model, folder = save_llama(**VARIETIES[variety])
    runner = new_runner(load(f"file://{folder}"))
    generator = random.Random(1)
    tokens = [generator.randrange(199) for _ in range(300)]
    for length in (1, 15, 16, 33, 200, 300):
        whole = logprobs_of(runner, tokens[:length], 0)
        expected = expected_logprobs(model, tokens[:length])
        assert whole[0] == expected[0]
        assert whole[1] == pytest.approx(expected[1], abs=2e-3)


def test_distribution_after_cached_tokens_equals_the_whole(
    save_llama: Save, load: Load, new_runner: Callable[..., ModelRunner]
) -> None:
    _, folder = save_llama()
    runner = new_runner(load(f"file://{folder}"))
    tokens = [(7 * index) % 199 for index in range(290)]
    whole = logprobs_of(runner, tokens, 0)
    for start in (289, 288, 272, 200, 129, 3):
        logprobs_of(runner, tokens[:start], 0)
        resumed = logprobs_of(runner, tokens, start)
        assert resumed[0] == whole[0]
        assert resumed[1] == pytest.approx(whole[1], abs=1e-3)


@pytest.mark.parametrize("start", [0, 150, 299])
def test_bfloat16_is_close_to_float32(
    start: int, save_llama: Save, load: Load, new_runner: Callable[..., ModelRunner]
) -> None:
    _, folder = save_llama(initializer_range=0.05)
    tokens = [(7 * index) % 199 for index in range(300)]
    exact = new_runner(load(f"file://{folder}"))
    rounded = new_runner(load(f"file://{folder}", torch.bfloat16), torch.bfloat16)
    for runner in (exact, rounded):
        logprobs_of(runner, tokens[: max(1, start)], 0)
    ids, values = logprobs_of(exact, tokens, start)
    rounded_ids, rounded_values = logprobs_of(rounded, tokens, start)
    near = dict(zip(rounded_ids, rounded_values, strict=True))
    assert near[ids[0]] == pytest.approx(values[0], abs=0.05)


@pytest.mark.parametrize("length", [5, 16, 17, 40])
def test_an_earlier_users_nan_does_not_outlive_it(
    length: int, save_llama: Save, load: Load, new_runner: Callable[..., ModelRunner]
) -> None:
    _, folder = save_llama()
    tokens = [(7 * index) % 199 for index in range(length)]
    clean = decoded_logprobs(new_runner(load(f"file://{folder}")), tokens)
    loaded = load(f"file://{folder}")
    # A copy, as nobody can write to weights that are mapped.
    name = next(iter(loaded.tensors))
    weight = loaded.tensors[name] = loaded.tensors[name].clone()
    poisoned = new_runner(loaded)
    kept = weight.clone()
    weight.fill_(float("nan"))
    poisoned.execute(StepPlan([Chunk("b", [1] * 64, 0, [0, 1, 2, 3], None, [1] * 64, 64)]))
    weight.copy_(kept)
    assert decoded_logprobs(poisoned, tokens) == clean


def decoded_logprobs(runner: ModelRunner, tokens: list[int]) -> tuple[list[int], list[float]]:
    """The same with the last token computed by itself."""
    logprobs_of(runner, tokens[:-1], 0)
    return logprobs_of(runner, tokens, len(tokens) - 1)
