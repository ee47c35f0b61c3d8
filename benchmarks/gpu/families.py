"""Records the time of decode steps of mixture-of-experts models, without judging the results.

The models are LFM2-8B-A1B in bfloat16 and gpt-oss-20b in MXFP4, with random weights drawn on the
device. The time of a step includes copying its tokens to the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.figures import Figure, Job, Report
from benchmarks.gpu.lfm2.weights import SIZES
from benchmarks.gpu.models import decode_of, random_model
from benchmarks.gpu.rates import seconds_of
from benchmarks.gpu.sequences import GREEDY, make_runner
from ullage_engine.kernels.arena import BLOCK_TOKENS
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.protocol.step_plan import StepPlan

BATCHES = (1, 32)

GPT_OSS_20B: dict[str, object] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@dataclass(frozen=True)
class Sizes:
    """The models and the context length of the measurements."""

    models: dict[str, dict[str, object]]
    """Contents of config.json by model name."""
    context: int
    """Number of tokens that each decode attends to, including its own."""


FULL = Sizes(models={"LFM2-8B-A1B": SIZES["full"], "gpt-oss-20b": GPT_OSS_20B}, context=1024)
TINY = Sizes(
    models={
        "LFM2, tiny": SIZES["tiny"],
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
)


def run(job: Job, report: Report) -> None:
    for figure in decode_figures(torch.device(job.device), job.tiny):
        report(figure)


def decode_figures(device: torch.device, tiny: bool) -> Iterator[Figure]:
    """Yield the time of a decode step in milliseconds, for each model and batch size."""
    sizes = TINY if tiny else FULL
    # Some CPUs compute bfloat16 a hundred times more slowly.
    dtype = torch.float32 if tiny else torch.bfloat16
    rows = max(BATCHES)
    blocks = -(-sizes.context // BLOCK_TOKENS)

    for name, values in sizes.models.items():
        loaded = random_model(config_of(values), dtype, device)
        yield Figure(f"{name}, weights", loaded.nbytes / 1e9, "GB")
        runner = make_runner(loaded, device, dtype, rows, rows * blocks, sizes.context)
        vocab = loaded.model_config.vocab

        for batch in BATCHES:
            chunks = [decode_of(row, sizes.context, blocks, vocab, GREEDY) for row in range(batch)]
            took = seconds_of(partial(runner.execute, StepPlan(chunks)), device)
            yield Figure(f"{name}, step of {batch} x {sizes.context}", took * 1e3, "ms")

        # Free the memory for the next model.
        del runner, loaded
        if device.type == "cuda":
            torch.cuda.empty_cache()


def config_of(values: dict[str, object]) -> ModelConfig:
    """Parse a model configuration from a dictionary instead of a file."""
    return read_model_config(HFConfig(Path("config.json"), values))
