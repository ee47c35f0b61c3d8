"""The real model against transformers: the same tokens, however the work is cut."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.core.runner import ModelRunner
from ullage_engine.weights.store import LoadedModel

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
    geometry = smollm2.geometry
    assert (geometry.num_layers, geometry.hidden, geometry.vocab) == (30, 576, 49152)
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == (9, 3, 64)
    assert geometry.tied
    assert geometry.eos_token_ids == [2]
    assert geometry.kv_bytes_per_token(2) == 23_040


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
    new_runner: Callable[..., ModelRunner],
    generate: Generate,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    runner = new_runner(smollm2, max_step_tokens=96, max_sequences=4)
    runner.warm_up()
    assert generate(runner, prompts[:4], NUM_TOKENS, 64) == expected[:4]
