"""Decode steps that are repeated by graphs give the logits of steps that are launched anew.

Kernels run in Triton's interpreter. What a graph does on a GPU is done here by calling the captured
action again: whatever it holds of the step that it was captured from is then wrong.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner import step_graphs
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.runner.step_graphs import Action, StepGraphs

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled kernels take no tensors of a CPU"
)

MAX_ROWS = 4
MAX_MODEL_LEN = 96
WIDTH = 4
"""Blocks of the narrower of two widths of tables here; interpreting a wide one takes minutes."""
NUM_BLOCKS = 32
GREEDY = SamplingParams(temperature=0.0)

FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


class Captures:
    """A capture whose graphs call the action again; counts how often."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, action: Action) -> Action:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            action()

        return replay


@pytest.fixture(params=FAMILIES)
def loaded(
    request: pytest.FixtureRequest,
    random_model: Callable[..., Any],
    load: Callable[..., LoadedModel],
    tmp_path: Any,
) -> LoadedModel:
    model = random_model(request.param, 5, head_dim=16, **FAMILIES[request.param])
    model.save_pretrained(tmp_path)
    return load(f"file://{tmp_path}")


def make_runner(loaded: LoadedModel, captures: Captures | None) -> ModelRunner:
    limits = StepLimits(
        max_tokens=64,
        max_rows=MAX_ROWS,
        max_model_len=MAX_MODEL_LEN,
        gather_tokens=512,
        itemsize=4,
    )
    # Wrapped, so that the C++ library leaves the step to torch.
    runner = ModelRunner(
        loaded,
        torch.device("cpu"),
        torch.float32,
        limits,
        wrap=lambda name, matrix: matrix,
        new_capture=None if captures is None else lambda: captures,
    )
    runner.allocate_arena()
    runner.allocate_kv(NUM_BLOCKS)
    runner.run_largest()
    return runner


def steps() -> Iterator[StepPlan]:
    """Yield a prompt for each sequence, then decodes of some of them, and mixed steps."""
    chooser = random.Random(3)
    # The next token of the last one needs the wider table.
    lengths = [5, 33, 16, WIDTH * 16]
    tables = [list(range(number, NUM_BLOCKS, MAX_ROWS)) for number in range(MAX_ROWS)]
    states = [0] * MAX_ROWS

    def chunk(number: int, start: int, count: int) -> Chunk:
        states[number] ^= 1
        return Chunk(
            request_id=str(number),
            token_ids=[(31 * at + number) % 199 for at in range(start, start + count)],
            start=start,
            block_ids=tables[number],
            sampling=GREEDY,
            history=[0] * (start + count),
            num_prompt_tokens=1,
            state_slot=2 * number + (states[number] ^ 1) if start else None,
            next_state_slot=2 * number + states[number],
        )

    for number, length in enumerate(lengths):
        yield StepPlan([chunk(number, 0, length)])
    for step in range(8):
        chosen = chooser.sample(range(MAX_ROWS), 1 + step % MAX_ROWS)
        plan = [chunk(number, lengths[number], 1) for number in chosen]
        for number in chosen:
            lengths[number] += 1
        if step == 5:
            # With a prompt beside them no graph computes the decodes.
            plan = [each for each in plan if each.request_id != "0"]
            plan.append(chunk(0, 0, 3))
            lengths[0] = 3
        yield StepPlan(plan)


def logits_of(runner: ModelRunner) -> list[dict[str, torch.Tensor]]:
    results = []
    with torch.inference_mode():
        for plan in steps():
            rows: dict[str, torch.Tensor] = {}
            for chunks, logits in runner.logits(plan):
                rows |= {
                    each.request_id: row.clone() for each, row in zip(chunks, logits, strict=True)
                }
            results.append(rows)
    return results


def test_graphs_repeat_what_launches_compute(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    monkeypatch.setattr(step_graphs, "LEAST_WIDTH", WIDTH)
    captures = Captures()
    expected = logits_of(make_runner(loaded, None))
    runner = make_runner(loaded, captures)
    # Rows of 1, 2, 3 and 4, two widths of each.
    assert captures.captured == runner.num_graphs == 8
    for actual, wanted in zip(logits_of(runner), expected, strict=True):
        assert actual.keys() == wanted.keys()
        for number, row in wanted.items():
            # More splits of the context are summed in another order.
            torch.testing.assert_close(actual[number], row, rtol=1e-4, atol=1e-4)
    assert captures.replayed == 7

    # Another pool has other addresses.
    runner.allocate_kv(NUM_BLOCKS)
    assert runner.num_graphs == 0
    runner.run_largest()
    assert captures.captured == 16
    assert runner.num_graphs == 8


def test_models_with_experts_are_launched_anew(
    random_model: Callable[..., Any],
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    random_model("gpt_oss", 5, head_dim=16, num_hidden_layers=1).save_pretrained(tmp_path)
    captures = Captures()
    runner = make_runner(load(f"file://{tmp_path}"), captures)
    assert captures.captured == runner.num_graphs == 0


@pytest.mark.parametrize(("most", "widths"), [(8, [8]), (64, [64]), (72, [64, 72])])
def test_widths_end_with_the_widest(most: int, widths: list[int]) -> None:
    graphs = StepGraphs(Captures, most)
    assert graphs.widths == widths
    assert [graphs.width(blocks) for blocks in (1, most)] == [widths[0], most]
