"""Rescaled rotary frequencies equal transformers', whatever their parameters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ullage_engine.model_config.hf_config import HFConfig, read_rope

head_dims = st.sampled_from([16, 64, 128])
thetas = st.sampled_from([1e4, 1.5e5, 1e6])
originals = st.sampled_from([2048, 4096, 8192])
factors = st.floats(1.5, 40)


def compare(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    parameters = scaling | {"rope_theta": theta}
    ours = read_rope(HFConfig(Path("c"), {"rope_parameters": parameters}), head_dim)
    theirs = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=int(
            scaling["factor"] * scaling["original_max_position_embeddings"]
        ),
        standardize_rope_params=lambda: None,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    assert ours.factors is not None
    assert torch.allclose(plain / torch.tensor(ours.factors), frequencies, rtol=1e-4)
    assert ours.scale == pytest.approx(scale)


@settings(max_examples=40, deadline=None)
@given(head_dims, thetas, originals, factors, st.booleans())
def test_yarn(head_dim: int, theta: float, original: int, factor: float, truncate: bool) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": truncate,
        "original_max_position_embeddings": original,
    }
    compare(scaling, head_dim, theta)


@settings(max_examples=40, deadline=None)
@given(head_dims, thetas, originals, factors)
def test_llama3(head_dim: int, theta: float, original: int, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    compare(scaling, head_dim, theta)
