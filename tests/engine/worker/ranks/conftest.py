"""Tiny random checkpoints, and recorded steps of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.tensor_plan import plan_tensors

COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
}

MakeCheckpoint = Callable[..., Path]


def packed(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The same with other weights of experts, in MXFP4."""
    kept = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            kept[name] = tensor
            continue
        experts, inside, out = tensor.shape
        shape = (experts, out, inside // 32)
        kept[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        kept[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator).byte()
    return kept


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """A folder with config.json and random weights, large enough that every token matters."""

    def make(seed: int, **values: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        eps = "norm_eps" if values["model_type"].startswith("lfm2") else "rms_norm_eps"
        values = COMMON | {eps: 1e-5} | values
        (folder / "config.json").write_text(json.dumps(values))
        model_config = read_model_config(HFConfig(folder / "config.json", values))
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            part.source: torch.randn(part.shape, generator=generator)
            * (0.3 if len(part.shape) > 1 else 1.0)
            for plan in plan_tensors(model_config)
            for part in plan.parts
        }
        if "quantization_config" in values:
            tensors = packed(tensors, generator)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make
