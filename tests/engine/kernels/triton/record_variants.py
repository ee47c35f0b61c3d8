"""Lists variants of kernels that steps ask for and warm-up has not made, without a GPU.

Triton compiles a kernel once for each key: types and alignment of its operands, and its constants.
Here keys are computed by Triton, and nothing is compiled or launched. Prints a line of JSON: the
number of variants that warm-up makes by kernel, and those that only steps asked for. A process of
its own, because the tests' Triton interprets.
"""

import json
import random
from collections import Counter
from typing import Any

import torch
from compile_kernels import Absent
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

MODEL = ModelConfig(
    architecture="lfm2_moe",
    layers=(
        LayerSpec(mixer="conv"),
        LayerSpec(),
        LayerSpec(feed_forward="experts"),
        LayerSpec(window=20),
    ),
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=48,
    vocab=97,
    max_position=2048,
    rope_theta=1e6,
    rms_eps=1e-5,
    tied=True,
    has_qk_norm=True,
    conv_kernel=3,
    conv_channels=64,
    experts=ExpertsSpec(num_experts=4, experts_per_token=2, intermediate=32, scoring="sigmoid"),
)
MAX_TOKENS = 200
MAX_ROWS = 24
MAX_LEN = 1024
NUM_BLOCKS = 64
STEPS = 60

Key = tuple[str, str, str]
"""A kernel's name, what Triton makes of its operands, and its options."""

asked: set[Key] = set()


def record(kernel: Any, grid: tuple[int, ...]) -> Any:
    """In place of kernel[grid]."""

    def recorded(*args: object, **constants: object) -> None:
        binder = kernel.device_caches[driver.active.get_current_device()][-1]
        _, specialization, options = binder(*args, **constants)
        asked.add((kernel.fn.__name__, str(specialization), str(options)))

    return recorded


def make_runner(*, is_fp8: bool) -> ModelRunner:
    tensors = {
        plan.name: torch.zeros(plan.shape, dtype=torch.bfloat16) for plan in plan_tensors(MODEL)
    }
    limits = StepLimits(
        max_tokens=MAX_TOKENS,
        max_rows=MAX_ROWS,
        max_model_len=MAX_LEN,
        gather_tokens=4096,
        itemsize=2,
        fp8_kv=is_fp8,
        windowed=True,
    )
    loaded = LoadedModel(MODEL, tensors, 0)
    runner = ModelRunner(loaded, torch.device("cpu"), torch.bfloat16, limits)
    runner.allocate_arena()
    runner.allocate_kv(NUM_BLOCKS)
    return runner


def random_step() -> StepPlan:
    """Any number of decodes and prompts at any place of their sequences."""
    chunks: list[Chunk] = []
    room = random.randint(1, MAX_TOKENS)
    for number in range(random.randint(1, MAX_ROWS)):
        tokens = 1 if random.random() < 0.7 else random.randint(2, 90)
        if tokens > room:
            break
        room -= tokens
        start = random.randint(0, MAX_LEN - tokens)
        blocks = [random.randrange(NUM_BLOCKS) for _ in range(-(-(start + tokens) // 16))]
        chunks.append(
            Chunk(
                request_id=str(number),
                token_ids=[1] * tokens,
                start=start,
                block_ids=blocks,
                window_block_ids=blocks,
                sampling=SamplingParams(temperature=0.0),
                history=[1] * (start + tokens),
                num_prompt_tokens=1,
                state_slot=2 * number if start else None,
                next_state_slot=2 * number + 1,
            )
        )
    return StepPlan(chunks)


def main() -> None:
    triton.runs_on = lambda device: True
    JITFunction.__getitem__ = record
    driver.set_active(Absent(90))
    random.seed(20_261)
    made: set[Key] = set()
    late: set[Key] = set()
    for is_fp8 in (False, True):
        runner = make_runner(is_fp8=is_fp8)
        asked.clear()
        runner.warm_up()
        warm = set(asked)
        for _ in range(STEPS):
            runner.execute(random_step())
        made |= warm
        late |= asked - warm
    print(json.dumps({"made": Counter(name for name, *_ in made), "late": sorted(late)}))


if __name__ == "__main__":
    main()
