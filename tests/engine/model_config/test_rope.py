"""Rescaled rotary frequencies equal transformers', whatever their parameters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.rope import read_rope

head_dims = st.sampled_from([16, 64, 128])
thetas = st.sampled_from([1e4, 1.5e5, 1e6])
originals = st.sampled_from([2048, 4096, 8192])
factors = st.floats(1.5, 40)


def compare(scaling: dict[str, Any], head_dim: int, theta: float, longest: int) -> None:
    parameters = scaling | {"rope_theta": theta}
    values = {"rope_parameters": parameters, "max_position_embeddings": longest}
    ours = read_rope(HFConfig(Path("c"), values), head_dim)
    theirs = SimpleNamespace(
        rope_parameters={"original_max_position_embeddings": longest} | parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=longest,
        standardize_rope_params=lambda: None,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    divisors = torch.ones(head_dim // 2) if ours.factors is None else torch.tensor(ours.factors)
    assert torch.allclose(plain / divisors, frequencies, rtol=1e-4)
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
    compare(scaling, head_dim, theta, 65536)


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
    compare(scaling, head_dim, theta, 65536)


optional = {
    "original_max_position_embeddings": originals,
    "attention_factor": st.none() | st.floats(0.1, 2),
    "mscale": st.none() | st.floats(0, 2),
    "mscale_all_dim": st.none() | st.floats(0, 2),
    "beta_fast": st.sampled_from([None, 0, 4, 32]),
    "beta_slow": st.sampled_from([None, 0, 1, 4]),
    "truncate": st.sampled_from([None, True, False]),
}


@settings(max_examples=100, deadline=None)
@given(head_dims, thetas, st.none() | factors, st.fixed_dictionaries({}, optional=optional))
def test_yarn_with_any_of_its_keys(
    head_dim: int, theta: float, factor: float | None, keys: dict[str, Any]
) -> None:
    compare({"rope_type": "yarn", "factor": factor} | keys, head_dim, theta, 32768)


@settings(max_examples=20, deadline=None)
@given(head_dims, thetas, factors, st.sampled_from(["linear", "dynamic"]))
def test_linear_and_dynamic(head_dim: int, theta: float, factor: float, kind: str) -> None:
    compare({"rope_type": kind, "factor": factor}, head_dim, theta, 4096)


@settings(max_examples=40, deadline=None)
@given(thetas, originals, st.none() | factors, st.none() | st.floats(0.1, 2), st.data())
def test_longrope(
    theta: float, original: int, factor: float | None, attention: float | None, data: st.DataObject
) -> None:
    lists = st.lists(st.floats(0.5, 64), min_size=8, max_size=8)
    scaling = {
        "rope_type": "longrope",
        "factor": factor,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
        "short_factor": data.draw(lists),
        "long_factor": data.draw(lists),
    }
    compare(scaling, 16, theta, 32768)
