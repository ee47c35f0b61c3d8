"""Normalisation, rotation and the gate against their formulas."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.layers.attention import (
    DefaultBackend,
    head_norm,
    rms_norm,
    rotate,
)
from ullage_engine.layers.decoder import Decoder, Weights, gate
from ullage_engine.layers.linear import FusedQuantizedLinear
from ullage_engine.layers.rotary_tables import fill_tables
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.quantization.formats import Encoding, Format, Packed


def model_config(head_dim: int, factors: list[float] | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        layers=(LayerSpec(),) * 1,
        hidden=head_dim,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate=1,
        vocab=1,
        max_position=64,
        rope_theta=10_000.0,
        rope_factors=factors,
        rms_eps=1e-5,
        tied=True,
    )


def tables(
    head_dim: int, positions: int, factors: list[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    cos = torch.empty(positions, head_dim)
    sin = torch.empty(positions, head_dim)
    fill_tables(model_config(head_dim, factors), cos, sin)
    return cos, sin


@pytest.mark.parametrize("rows", [1, 7, 512, 1100])
def test_rms_norm(rows: int) -> None:
    x = torch.randn(rows, 48)
    weight = torch.randn(48)
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_all_heads_of_a_usual_step_are_normalised_in_one_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[int] = []
    plain = F.rms_norm

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        launched.append(x.numel())
        return plain(x, *others)

    heads = torch.randn(512, 32, 128)
    weight = torch.rand(128)
    expected = plain(heads, (128,), weight, 1e-6)
    monkeypatch.setattr(F, "rms_norm", counted)
    head_norm(heads, weight, 1e-6)
    assert torch.equal(heads, expected)
    assert launched == [heads.numel()]


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 63), pair=st.integers(0, 7), angle=st.floats(0, 6))
def test_rotation_turns_each_pair_by_its_angle(position: int, pair: int, angle: float) -> None:
    cos, sin = tables(16, 64)
    x = torch.zeros(1, 1, 16)
    x[0, 0, pair], x[0, 0, pair + 8] = math.cos(angle), math.sin(angle)
    out = torch.empty_like(x)
    rotate(x, cos[position : position + 1], sin[position : position + 1], out)
    turned = angle + position / 10_000 ** (2 * pair / 16)
    assert out[0, 0, pair].item() == pytest.approx(math.cos(turned), abs=1e-4)
    assert out[0, 0, pair + 8].item() == pytest.approx(math.sin(turned), abs=1e-4)


def test_factors_slow_the_rotation() -> None:
    plain = tables(16, 64)[0]
    slowed = tables(16, 64, [4.0] * 8)[0]
    assert torch.allclose(slowed[40], plain[10], atol=1e-6)


def test_gate() -> None:
    gate_up = torch.randn(5, 12)
    expected = torch.nn.functional.silu(gate_up[:, :6]) * gate_up[:, 6:]
    out = torch.empty(5, 6)
    gate(gate_up.clone(), out)
    assert torch.allclose(out, expected)


def test_layers_of_other_formats_are_other_kinds() -> None:
    """Warm-up runs one of each, and each format has kernels of its own."""
    model = ModelConfig(
        architecture="llama", layers=(LayerSpec(),) * 4, hidden=32, num_heads=2, num_kv_heads=1,
        head_dim=16, intermediate=32, vocab=20, max_position=64, rope_theta=1e4, rms_eps=1e-5,
        tied=True,
    )  # fmt: skip
    limits = StepLimits(32, 4, 64, 64, 4)
    arena = allocate(step_arena(model, limits), torch.float32, torch.device("cpu"))

    def linear(name: str) -> FusedQuantizedLinear:
        format: Format = "int8" if name == "layers.1.down" else "int4"
        encoding = Encoding(format=format, shape=(32, 32), group=32)
        return FusedQuantizedLinear(Packed(encoding, {}), lambda *operands: None)

    tensors = {
        plan.name: torch.ones(plan.shape) for plan in plan_tensors(model) if len(plan.shape) == 1
    }
    weights = Weights(tensors, linear=linear, experts=lambda name: pytest.fail(name))
    decoder = Decoder(weights, model, limits, arena, DefaultBackend(model, limits, arena))
    assert decoder.one_of_each_kind() == [1, 3]
