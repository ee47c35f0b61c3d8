"""Prompts deep in their context, computed by a real model: no step costs more than it may, and the
answer is the one of whole chunks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_common.config.engine import BatchingSection, EngineConfig, ModelSection, ServerSection
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.requests import EngineRequest, PromptLogprobs, SamplingParams
from ullage_engine.protocol.step_plan import SampledToken, StepPlan
from ullage_engine.scheduler.batch_plan import PromptCost
from ullage_engine.worker import startup
from ullage_engine.worker.rank import RankStartup

SIZES = {"vocab_size": 208, "hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
LONGEST = 6144
CHUNK = 512


class CostedRunner:
    """Computes by another runner, and notes what the prompt tokens of each step cost."""

    def __init__(self, runner: Any, cost: PromptCost) -> None:
        self.costs: list[float] = []
        self._runner = runner
        self._cost = cost

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        chunks = [(chunk.start, len(chunk.token_ids)) for chunk in plan.prompts]
        self.costs.append(sum(self._cost.of(*each) for each in chunks))
        return list(self._runner.execute(plan))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.fixture
def start(tmp_path: Path, random_model: Callable[..., Any]) -> Callable[[PromptCost], Any]:
    """Starts a small model of a long context on this CPU, with costs as they are given."""
    model = random_model("llama", 1, **SIZES, max_position_embeddings=LONGEST)
    model.save_pretrained(tmp_path / "model")
    config = EngineConfig(
        model=ModelSection(
            source=f"file://{tmp_path}/model", name="m", dtype="auto", quantization="int8"
        ),
        device="cpu",
        batching=BatchingSection(max_sequences=2),
        server=ServerSection(weights_dir=str(tmp_path), threads=torch.get_num_threads()),
    )

    def make(cost: PromptCost) -> tuple[Any, CostedRunner]:
        own = RankStartup(config, 0, lambda loading: None)
        own.load()
        own.allocate_arenas()
        own.warm_up()
        own.allocate_kv(LONGEST // 16 + 8)
        own.finalize()
        assert own.prompt_cost.step_budget > 1.0
        assert own.longest_step_s > 0.0
        own.prompt_cost = cost
        own.prompt_tokens = CHUNK
        runner = CostedRunner(own.runner, cost)
        started = startup._started(own, runner, LONGEST // 16 + 8, own.ledger, int, own.close)
        return started.engine, runner

    return make


def answer(engine: Any, prompt: list[int]) -> list[int]:
    request = EngineRequest(
        request_id="a",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=8,
        sampling=SamplingParams(temperature=0.0),
    )
    assert engine.submit_group([request]) == []
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    assert engine.take_failed() == []
    return tokens


@pytest.mark.skipif(instruction_set() is None, reason="the library cannot be used here")
def test_a_deep_prompt_is_computed_in_ever_smaller_chunks_to_the_same_answer(
    start: Callable[[PromptCost], Any],
) -> None:
    prompt = [7919 * at % 199 + 1 for at in range(LONGEST - 40)]
    cost = PromptCost(even_context=400.0)
    whole_engine, whole = start(cost)
    expected = answer(whole_engine, prompt)
    # As it was: steps grow with their context.
    assert max(whole.costs) > 8 * whole.costs[0]

    budget = cost.of(0, CHUNK)
    engine, shrunk = start(replace(cost, step_budget=budget))
    assert answer(engine, prompt) == expected
    assert max(shrunk.costs) <= budget * (1 + 1e-9)
    # None wastes what it may cost, but the last.
    full = [each for each in shrunk.costs if each > 0.0][:-1]
    assert min(full) > 0.9 * budget
