"""Writes random checkpoints of every family in Hugging Face's layout, without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ullage_engine.model_config.hf_config import read_config
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.tensor_plan import plan_tensors

SEED = 1

COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "intermediate_size": 1792,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "eos_token_id": 0,
}
LLAMA = {**COMMON, "rms_norm_eps": 1e-5, "model_type": "llama"}
LFM2 = {
    **COMMON,
    "norm_eps": 1e-5,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
}
GPT_OSS = {
    **COMMON,
    "rms_norm_eps": 1e-5,
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "sliding_window": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped heads, tied": {
        **LLAMA,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "llama, every head its own KV": {**LLAMA, "num_hidden_layers": 4},
    "llama, explicit head_dim": {**LLAMA, "head_dim": 128, "num_key_value_heads": 2},
    "qwen3": {
        **COMMON,
        "rms_norm_eps": 1e-5,
        "model_type": "qwen3",
        "head_dim": 128,
        "num_key_value_heads": 4,
    },
    "lfm2": {
        **LFM2,
        "model_type": "lfm2",
        "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **LFM2,
        "model_type": "lfm2_moe",
        "intermediate_size": 1024,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "num_dense_layers": 2,
    },
    "gpt_oss": GPT_OSS,
    "gpt_oss, packed": {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}},
}
"""config.json of each model, with about 20 to 40 million parameters."""


def write_model(name: str, folder: Path, changes: dict[str, Any] | None = None) -> str:
    """Write a model with the settings of `changes`, and return its source URI."""
    config = MODELS[name] | (changes or {})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(SEED)
    plans = plan_tensors(read_model_config(read_config(folder)))
    tensors: dict[str, torch.Tensor] = {}
    for part in (part for plan in plans for part in plan.parts):
        is_packed = part.source.endswith(("gate_up_proj", "experts.down_proj"))
        if "quantization_config" in config and is_packed:
            tensors |= _packed(part.source, part.shape)
        else:
            tensors[part.source] = _numbers(part.shape)
    save_file(tensors, folder / "model.safetensors")
    return f"file://{folder}"


def _numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Draw bfloat16 values with a magnitude of about 0.02.

    The values are drawn as integers, which are the same for every version of torch and on every
    processor. Normally distributed values would differ in their last bits.
    """
    whole = torch.randint(-128, 128, shape, dtype=torch.int16)
    return (whole.float() * 2.0**-12).to(torch.bfloat16)


def _packed(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Draw MXFP4 blocks and scales for a tensor with the unpacked shape [experts, in, out]."""
    experts, inside, out = shape
    groups = (experts, out, inside // 32)
    blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
    scales = torch.randint(118, 122, groups, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}
