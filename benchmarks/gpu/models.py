"""Models with random weights, made on the device as the loader would leave them there."""

from pathlib import Path

import torch

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import FLOAT32
from ullage_engine.model_loader.tensor_plan import TensorPlan, plan_tensors
from ullage_engine.quantization.formats import MXFP4_GROUP, SCALES, VALUES, Encoding, pieces_of

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
