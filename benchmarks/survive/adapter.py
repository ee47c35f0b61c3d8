"""Writes a LoRA adapter for a checkpoint, with small random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
NAME = "style"
"""Name by which clients ask for the adapter."""


def write_adapter(checkpoint: Path, folder: Path) -> Path:
    """Write an adapter of the queries and values of each layer, as PEFT does.

    Args:
        checkpoint: folder with the `config.json` of a Llama.
        folder: folder for the adapter.

    Returns:
        The adapter's folder.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    widths = {
        "q_proj": head * config["num_attention_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }

    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) / 1e3

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": list(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))
    return folder
