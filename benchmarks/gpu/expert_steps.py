"""Milliseconds of a decode step of models with experts: LFM2-8B-A1B in bfloat16, gpt-oss-20b in
MXFP4. Recorded, not judged.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.lfm2.weights import SIZES
from benchmarks.gpu.models import GPT_OSS_20B, config_of, random_model
from ullage_engine.kernels.arena import BLOCK_TOKENS, GATHER_TOKENS, StepLimits
from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)

BATCHES = (1, 32)

STRIDE = 7919
"""A prime between the rows' tokens, so that rows choose different experts."""


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how often."""

    models: dict[str, dict[str, object]]
    """config.json by name."""
    context: int
    """Tokens that each decode attends, its own included."""
    warm_ups: int
    steps: int


FULL = Sizes(
    models={"LFM2-8B-A1B": SIZES["full"], "gpt-oss-20b": GPT_OSS_20B},
    context=1024,
    warm_ups=3,
    steps=20,
)
TINY = Sizes(
    models={
        "LFM2, tiny": SIZES["small"] | {"num_hidden_layers": 4, "full_attn_idxs": [2]},
        "gpt-oss, tiny": GPT_OSS_20B
        | {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "vocab_size": 512,
        },
    },
    context=40,
    warm_ups=1,
    steps=2,
)


def decode_figures(device: torch.device, tiny: bool) -> Iterator[Figure]:
    """Yield the median milliseconds of a step, tokens on the host included, by model and batch."""
    sizes = TINY if tiny else FULL
    for name, values in sizes.models.items():
        loaded = random_model(config_of(values), torch.bfloat16, device)
        yield Figure(f"{name}, weights", loaded.nbytes / 1e9, "GB")
        vocab = loaded.model_config.vocab
        blocks = -(-sizes.context // BLOCK_TOKENS)
        limits = StepLimits(
            max_tokens=max(BATCHES),
            max_rows=max(BATCHES),
            max_model_len=sizes.context,
            gather_tokens=GATHER_TOKENS,
            itemsize=torch.bfloat16.itemsize,
        )
        runner = ModelRunner(loaded, device, torch.bfloat16, limits)
        runner.allocate_arena()
        runner.allocate_kv(max(BATCHES) * blocks)
        for batch in BATCHES:
            chunks = [_decode(row, sizes.context, blocks, vocab) for row in range(batch)]
            took = _median_seconds(runner, StepPlan(chunks), sizes)
            yield Figure(f"{name}, step of {batch} x {sizes.context}", took * 1e3, "ms")
        # The next model needs the memory.
        del runner, loaded
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _median_seconds(runner: ModelRunner, plan: StepPlan, sizes: Sizes) -> float:
    for _ in range(sizes.warm_ups):
        runner.execute(plan)
    seconds = []
    for _ in range(sizes.steps):
        runner.sync()
        started = time.perf_counter()
        runner.execute(plan)  # returns with the tokens, which have waited for the device
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _decode(row: int, context: int, blocks: int, vocab: int) -> Chunk:
    """Make the last token of a context, in blocks and with states of its own."""
    return Chunk(
        request_id=str(row),
        token_ids=[STRIDE * row % vocab],
        start=context - 1,
        block_ids=list(range(row * blocks, (row + 1) * blocks)),
        sampling=GREEDY,
        history=[7] * context,
        num_prompt_tokens=context,
        state_slot=2 * row,
        next_state_slot=2 * row + 1,
    )
