"""Whole models of every family compute alike by kernels over pages and by torch over gathers.

Kernels run in Triton's interpreter: `runs_on` is told that a CPU has them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled kernels take no tensors of a CPU"
)

NUM_BLOCKS = 64
STEPS = [
    [(0, 37), (1, 1), (2, 3)],
    [(0, 1), (1, 17), (3, 5), (4, 2)],
    [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],  # five decodes, and a row of padding
    [(0, 1), (2, 14), (3, 1)],
]
"""(sequence, tokens) of each chunk."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "gpt_oss": {"num_hidden_layers": 2},
}

TOLERANCES = {"plain": 1e-3, "windowed": 1e-3, "fp8": 5e-2}
"""Largest difference, in standard deviations of the logits. A key that differs in its last bit may
be rounded to the next float8, 1/16 away."""


@dataclass
class Sequence:
    """Tokens computed so far, in blocks and states of its own."""

    number: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)

    def chunk(self, tokens: int, windowed: bool) -> Chunk:
        start = self.length
        self.length = self.length + tokens
        history = [(31 * at * (self.number + 3) + 7) % 199 for at in range(self.length)]
        # Blocks are dealt like cards, the windows' from the other end.
        count = -(-self.length // 16)
        blocks = [self.number + 6 * at for at in range(count)]
        slots = (2 * self.number, 2 * self.number + 1)
        return Chunk(
            request_id=str(self.number),
            token_ids=history[start:],
            start=start,
            block_ids=blocks,
            window_block_ids=[NUM_BLOCKS - 1 - block for block in blocks] if windowed else [],
            sampling=SamplingParams(temperature=0.0),
            history=history,
            num_prompt_tokens=1,
            state_slot=slots[(start + self.number) % 2] if start else None,
            next_state_slot=slots[(start + self.number + 1) % 2],
        )


def make_runner(loaded: LoadedModel, *, is_fp8: bool, windowed: bool) -> ModelRunner:
    limits = StepLimits(
        max_tokens=96,
        max_rows=8,
        max_model_len=128,
        gather_tokens=512,
        itemsize=4,
        fp8_kv=is_fp8,
        windowed=windowed,
    )
    # Wrapped, so that the C++ library leaves the step to torch.
    runner = ModelRunner(
        loaded, torch.device("cpu"), torch.float32, limits, wrap=lambda name, matrix: matrix
    )
    runner.allocate_arena()
    runner.allocate_kv(NUM_BLOCKS)
    return runner


def logits_of_steps(runner: ModelRunner, windowed: bool) -> list[torch.Tensor]:
    sequences = [Sequence(number) for number in range(6)]
    results = []
    with torch.inference_mode():
        for step in STEPS:
            chunks = [sequences[number].chunk(tokens, windowed) for number, tokens in step]
            parts = runner.logits(StepPlan(chunks))
            results.append(torch.cat([logits.clone() for _, logits in parts]))
    return results


@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("llama", "fp8"),
        ("qwen3", "plain"),
        ("lfm2_moe", "plain"),
        ("gpt_oss", "plain"),
        ("gpt_oss", "windowed"),
        ("gpt_oss", "fp8"),
    ],
)
def test_logits(
    family: str,
    kv: str,
    random_model: Callable[..., Any],
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # Attention's kernels take heads of a power of two.
    random_model(family, 20_261, head_dim=16, **FAMILIES[family]).save_pretrained(tmp_path)
    loaded = load(f"file://{tmp_path}")
    windowed = kv == "windowed"
    plain = make_runner(loaded, is_fp8=kv == "fp8", windowed=windowed)
    expected = logits_of_steps(plain, windowed)
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    fused = make_runner(loaded, is_fp8=kv == "fp8", windowed=windowed)
    for actual, wanted in zip(logits_of_steps(fused, windowed), expected, strict=True):
        tolerance = TOLERANCES[kv] * float(wanted.std())
        torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)
