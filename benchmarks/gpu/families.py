"""Decode steps of models with experts, tokens on the host included: LFM2-8B-A1B in bfloat16 and
gpt-oss-20b in MXFP4, with random weights made on the device. Recorded, not judged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from benchmarks.gpu.figures import Figure, Job, Report
from benchmarks.gpu.lfm2.weights import SIZES
from benchmarks.gpu.rates import seconds_of
from benchmarks.gpu.sequences import GREEDY, make_runner

from ullage_engine.kernels.arena import BLOCK_TOKENS
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import FLOAT32
from ullage_engine.model_loader.tensor_plan import TensorPlan, plan_tensors
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.quantization.formats import MXFP4_GROUP, SCALES, VALUES, Encoding, pieces_of

BATCHES = (1, 32)

STRIDE = 7919
"""A prime between the rows' tokens, so that rows choose different experts."""

MXFP4_SCALES = (118, 122)
"""Least scale of random MXFP4 weights, and the one after the greatest: 2^-9 to 2^-6, so that rows
of a few thousand numbers up to 6 have lengths of about 1."""

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
    """What is measured."""

    models: dict[str, dict[str, object]]
    """config.json by name."""
    context: int
    """Tokens that each decode attends, its own included."""


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
    """Yield the milliseconds of a step, by model and batch."""
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
            chunks = [_decode(row, sizes.context, blocks, vocab) for row in range(batch)]
            took = seconds_of(partial(runner.execute, StepPlan(chunks)), device)
            yield Figure(f"{name}, step of {batch} x {sizes.context}", took * 1e3, "ms")
        # The next model needs the memory.
        del runner, loaded
        if device.type == "cuda":
            torch.cuda.empty_cache()


def config_of(values: dict[str, object]) -> ModelConfig:
    """Read a config.json that is no file."""
    return read_model_config(HFConfig(Path("config.json"), values))


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Make a model's weights of a fixed seed; those of gpt-oss' experts are MXFP4, as its are."""
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    encodings: dict[str, Encoding] = {}
    for plan in plan_tensors(config):
        if config.architecture == "gpt_oss" and _is_expert_matrix(plan):
            rows = plan.shape[0] * plan.shape[1]
            encodings[plan.name] = Encoding(
                format="mxfp4", shape=(rows, plan.shape[2]), group=MXFP4_GROUP
            )
            tensors |= _random_mxfp4(plan.name, encodings[plan.name], generator)
            continue
        weights = torch.randn(
            plan.shape,
            generator=generator,
            device=device,
            # In the computing type at once: a stack of experts in float32 would be twice as large.
            dtype=torch.float32 if plan.name.rpartition(".")[2] in FLOAT32 else dtype,
        )
        tensors[plan.name] = weights.mul_(plan.shape[-1] ** -0.5)
        if plan.name.endswith("norm"):
            weights.add_(1)
    return LoadedModel(config, tensors, sum(each.nbytes for each in tensors.values()), encodings)


def _is_expert_matrix(plan: TensorPlan) -> bool:
    return plan.name.endswith(("experts_gate_up", "experts_down"))


def _random_mxfp4(
    name: str, encoding: Encoding, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Make the pieces of a packed matrix: any byte is two numbers, and not any is a scale."""
    ranges = {VALUES: (0, 256), SCALES: MXFP4_SCALES}
    return {
        f"{name}.{piece.name}": torch.randint(
            *ranges[piece.name],
            piece.shape,
            dtype=piece.dtype,
            device=generator.device,
            generator=generator,
        )
        for piece in pieces_of(encoding, torch.bfloat16)
    }


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
