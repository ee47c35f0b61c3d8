"""With `deterministic` a token's logits are a function of its context, family by family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ullage_testing.small_models import DTYPES

from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

NewRunner = Callable[..., ModelRunner]

LENGTH = 150
EVERY_LOGPROB = SamplingParams(temperature=0.0, top_logprobs=199)

Logprobs = tuple[list[int], list[float]]


def new_loaded(
    family: str,
    dtype: torch.dtype,
    folder: Path,
    random_model: Callable[[str, int], Any],
    load: Callable[..., LoadedModel],
) -> LoadedModel:
    seed = 20_261
    random_model(family, seed).save_pretrained(folder)
    return load(f"file://{folder}", dtype)


def chunk(number: int, start: int, end: int, step: int) -> Chunk:
    """Part of a sequence, the `step`th one computed; its states alternate between two slots."""
    tokens = [(37 * place * (number + 2)) % 199 for place in range(end)]
    return Chunk(
        request_id=str(number),
        token_ids=tokens[start:],
        start=start,
        block_ids=list(range(number, 256, 16))[: -(-end // 16)],
        sampling=EVERY_LOGPROB,
        history=tokens,
        num_prompt_tokens=end,
        state_slot=2 * number + step % 2 if start else None,
        next_state_slot=2 * number + (step + 1) % 2,
    )


def compute(runner: ModelRunner, *chunks: Chunk) -> dict[str, Logprobs]:
    sampled = runner.execute(StepPlan(list(chunks)))
    return {each.request_id: (each.top_ids, each.top_logprobs) for each in sampled}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3", "lfm2", "lfm2_moe"])
def test_neither_chunks_nor_neighbours_change_a_token(
    family: str,
    dtype: torch.dtype,
    tmp_path: Path,
    random_model: Callable[[str, int], Any],
    load: Callable[..., LoadedModel],
    new_runner: NewRunner,
) -> None:
    loaded = new_loaded(family, dtype, tmp_path, random_model, load)
    runner = new_runner(loaded, dtype, deterministic=True)
    assert runner.verify_row_invariance() is None
    whole = compute(runner, chunk(0, 0, LENGTH, 0))["0"]
    for size in (64, 7):
        for step, start in enumerate(range(0, LENGTH, size)):
            last = compute(runner, chunk(0, start, min(LENGTH, start + size), step))
        assert last["0"] == whole
    compute(runner, *(chunk(number, 0, LENGTH - 1 - number, 0) for number in range(2)))
    compute(runner, *(chunk(number, 0, 20 + number, 0) for number in range(2, 8)))
    decodes = [chunk(number, LENGTH - 1 - number, LENGTH - number, 1) for number in range(2)]
    decodes += [chunk(number, 20 + number, 21 + number, 1) for number in range(2, 8)]
    together = compute(runner, *decodes, chunk(9, 0, 90, 0))
    assert together["0"] == whole
    for each in decodes:
        assert compute(runner, each)[each.request_id] == together[each.request_id]


def test_a_family_without_it_says_so(
    tmp_path: Path,
    random_model: Callable[[str, int], Any],
    load: Callable[..., LoadedModel],
    new_runner: NewRunner,
) -> None:
    loaded = new_loaded("gpt_oss", torch.float32, tmp_path, random_model, load)
    error = new_runner(loaded, deterministic=True).verify_row_invariance()
    assert error is not None
    assert "gpt_oss" in error
    assert "windows" in error
