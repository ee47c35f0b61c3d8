"""A prompt's tokens have the log-probabilities that they have when they are generated."""

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from ullage_testing import native_models
from ullage_testing.small_models import make_llama

from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import PromptLogprobs, SamplingParams
from ullage_engine.protocol.step_plan import Chunk, PromptTargets, StepPlan
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.runner.prompt_logprobs import score_on_device, score_rows

TOP = 3
LENGTH = 70
BESIDE = 40

Scored = tuple[list[float], list[list[int]], list[list[float]], list[int]]
"""Log-probabilities of the tokens, ids and log-probabilities of alternatives, and ranks."""


def chunk_of(
    tokens: list[int], start: int, end: int, name: int = 0, force: int | None = None
) -> Chunk:
    """Tokens `start` to `end` of a prompt, which are scored, or behind which one is generated."""
    last = min(end + 1, len(tokens))
    targets = PromptTargets(start + 1, tokens[start + 1 : last], TOP)
    allowed = () if force is None else (force,)
    sampling = SamplingParams(temperature=0.0, top_logprobs=TOP, allowed_token_ids=allowed)
    return Chunk(
        request_id=str(name),
        token_ids=tokens[start:end],
        start=start,
        block_ids=[name + 2 * block for block in range(-(-end // 16))],
        sampling=sampling if end == len(tokens) or force is not None else None,
        history=tokens,
        num_prompt_tokens=len(tokens),
        next_state_slot=name,
        targets=targets if force is None else None,
    )


def joined(parts: Sequence[PromptLogprobs]) -> Scored:
    position = 1
    scored: Scored = ([], [], [], [])
    for part in parts:
        assert part.start == position, "a gap"
        position += part.num_tokens
        logprobs = np.frombuffer(part.logprobs, "<f4").reshape(part.num_tokens, 1 + TOP)
        scored[0].extend(logprobs[:, 0].tolist())
        scored[1].extend(np.frombuffer(part.top_ids, "<i4").reshape(-1, TOP).tolist())
        scored[2].extend(logprobs[:, 1:].tolist())
        scored[3].extend(np.frombuffer(part.ranks, "<i4").tolist())
    return scored


def as_prompt(runner: ModelRunner, tokens: list[int], cuts: Sequence[int]) -> Scored:
    """The scores of a prompt that is computed in parts, beside another prompt."""
    beside = [1 + index % 7 for index in range(BESIDE)]
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        other = Chunk("1", beside, 0, [1, 3, 5], None, beside, BESIDE, next_state_slot=1)
        runner.execute(StepPlan([chunk_of(tokens, start, end), other]))
    return joined(runner.take_prompt_logprobs())


def as_output(runner: ModelRunner, tokens: list[int]) -> Scored:
    """The log-probabilities of the same tokens, generated one by one."""
    scored: Scored = ([], [], [], [])
    for end in range(1, len(tokens)):
        # Alone, the first row of a step. Its logits are a row of a product with one row.
        chunk = chunk_of(tokens[:end], end - 1, end, force=tokens[end])
        [sampled] = runner.execute(StepPlan([chunk]))
        assert sampled.token_id == tokens[end]
        scored[0].append(sampled.logprob)
        scored[1].append(sampled.top_ids)
        scored[2].append(sampled.top_logprobs)
    return scored


def assert_same(found: Scored, wanted: Scored) -> None:
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert one == other


@pytest.fixture(scope="module")
def deterministic(
    tmp_path_factory: pytest.TempPathFactory,
    load: Callable[..., LoadedModel],
    new_runner: Callable[..., ModelRunner],
) -> ModelRunner:
    _, folder = make_llama(tmp_path_factory.mktemp("llama"))
    return new_runner(load(f"file://{folder}"), deterministic=True, max_sequences=4)


@pytest.mark.parametrize("shape", native_models.SHAPES[:3], ids=["int8", "norms", "int4"])
def test_the_library_gives_the_same_bits_as_for_generated_tokens(
    shape: native_models.Shape, seed: int
) -> None:
    loaded = native_models.make_model(shape)
    tokens = native_models.random_tokens(LENGTH)
    limits = changed(native_models.LIMITS, max_rows=5)
    wanted = as_output(native_models.make_runner(loaded), tokens)
    for cuts in ([], [1], [16, 17, 64], [LENGTH - 1]):
        runner = native_models.make_runner(loaded, limits=limits)
        found = as_prompt(runner, tokens, cuts)
        assert_same(found, wanted)
        assert len(found[0]) == LENGTH - 1


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_deterministic_steps_give_the_same_bits(
    deterministic: ModelRunner, data: st.DataObject
) -> None:
    """However the prompt is cut, and however many rows the buffer of logits has."""
    tokens = data.draw(st.lists(st.integers(0, 198), min_size=2, max_size=60))
    places = st.lists(st.integers(1, len(tokens) - 1), max_size=3, unique=True)
    cuts = sorted(data.draw(places))
    assert_same(as_prompt(deterministic, tokens, cuts), as_output(deterministic, tokens))


def test_ranks_and_alternatives_are_those_of_all_logits(deterministic: ModelRunner) -> None:
    tokens = [5, 90, 17, 3, 150, 2, 2]
    scored = as_prompt(deterministic, tokens, [3])
    for end in range(1, len(tokens)):
        chunk = chunk_of(tokens[:end], 0, end, force=tokens[end])
        [logits] = [each.clone() for _, each in deterministic.logits(StepPlan([chunk]))]
        row = torch.log_softmax(logits[0].double(), -1)
        own = row[tokens[end]]
        assert scored[0][end - 1] == pytest.approx(own.item(), abs=1e-5)
        assert scored[1][end - 1] == row.argsort(descending=True, stable=True)[:TOP].tolist()
        assert scored[3][end - 1] == 1 + (row > own).sum().item()


@pytest.mark.parametrize("top", [0, 4])
def test_devices_score_as_processors_do(seed: int, top: int) -> None:
    computed = torch.randn(9, 500) * 3
    tokens = list(range(40, 49))
    wanted = score_rows(computed.clone(), tokens, top)
    found = score_on_device(computed.clone(), tokens, top, computed)
    assert np.abs(found.logprobs - wanted.logprobs).max() < 1e-5
    assert (found.top_ids == wanted.top_ids).all()
    assert (found.ranks == wanted.ranks).all()


def test_only_asked_rows_are_scored(deterministic: ModelRunner) -> None:
    """A chunk that was split, or computed again, has targets that other chunks score."""
    tokens = list(range(20, 60))
    targets = PromptTargets(8, tokens[8:30], 0)
    chunk = replace(chunk_of(tokens, 5, 20), targets=targets)
    deterministic.execute(StepPlan([chunk]))
    [scored] = deterministic.take_prompt_logprobs()
    assert (scored.start, scored.num_tokens) == (8, 13)
    assert scored.top_ids == b""
    assert len(scored.logprobs) == 13 * 4


def test_scoring_allocates_no_logits(smollm2: LoadedModel, new_runner: Any) -> None:
    """All rows go through the sampler's buffer: a warmed-up runner has the same bytes behind it."""
    runner = new_runner(smollm2, max_sequences=4)
    runner.warm_up()
    before = runner.allocated_bytes()
    assert before["sampler_arena"] == runner.sampler_arena_bytes
    tokens = list(range(1000, 1300))
    runner.execute(StepPlan([chunk_of(tokens, 0, 300)]))
    [scored] = runner.take_prompt_logprobs()
    assert scored.num_tokens == 299
    assert runner.allocated_bytes() == before
    assert runner.sampler_arena_bytes < 300 * 49_152 * 4
