"""The real model against transformers: the same tokens, however the work is cut."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.runner.model_runner import ModelRunner

Generate = Callable[..., list[list[int]]]
LENGTHS = [1, 3, 16, 17, 40, 130, 300]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(20, 49_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(
    prompts: list[list[int]], smollm2_reference: Any, reference: Callable[..., list[int]]
) -> list[list[int]]:
    return [reference(smollm2_reference, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def runner(smollm2: LoadedModel, new_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return new_runner(smollm2)


def test_the_file_is_read_as_what_it_is(smollm2: LoadedModel) -> None:
    model_config = smollm2.model_config
    assert (model_config.num_layers, model_config.hidden, model_config.vocab) == (30, 576, 49152)
    assert (model_config.num_heads, model_config.num_kv_heads, model_config.head_dim) == (9, 3, 64)
    assert model_config.tied
    assert model_config.kv_bytes_per_token(2) == 23_040


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [256, 48])
def test_alone_it_equals_transformers(
    runner: ModelRunner,
    generate: Generate,
    prompts: list[list[int]],
    expected: list[list[int]],
    chunk_tokens: int,
) -> None:
    alone = [generate(runner, [prompt], NUM_TOKENS, chunk_tokens)[0] for prompt in prompts]
    assert alone == expected


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [256, 48])
def test_in_a_batch_it_equals_transformers(
    runner: ModelRunner,
    generate: Generate,
    prompts: list[list[int]],
    expected: list[list[int]],
    chunk_tokens: int,
) -> None:
    assert generate(runner, prompts, NUM_TOKENS, chunk_tokens) == expected


def test_warm_up_changes_nothing(
    smollm2: LoadedModel,
    runner: ModelRunner,
    new_runner: Callable[..., ModelRunner],
    generate: Generate,
    prompts: list[list[int]],
) -> None:
    """The runner that was not warmed up equals transformers, by the tests marked slow."""
    warm = new_runner(smollm2, max_step_tokens=96, max_sequences=4)
    warm.warm_up()
    cold = generate(runner, prompts[:4], NUM_TOKENS, 64)
    assert generate(warm, prompts[:4], NUM_TOKENS, 64) == cold
