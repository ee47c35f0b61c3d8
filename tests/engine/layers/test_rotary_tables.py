"""Rotary tables: exact, and the same bits whatever torch and numpy compute with."""

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.layers.rotary_tables import (
    cosine_and_sine,
    different_table,
    fill_half_tables,
    fill_tables,
    rotary_frequencies,
)
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig

POSITIONS = 2048


def model_config(head_dim: int = 64, theta: float = 10_000.0, **own: Any) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        layers=(LayerSpec(),),
        hidden=head_dim,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate=1,
        vocab=1,
        max_position=POSITIONS,
        rope_theta=theta,
        rms_eps=1e-5,
        tied=True,
        **own,
    )


def tables(config: ModelConfig, positions: int = POSITIONS) -> tuple[torch.Tensor, torch.Tensor]:
    cos = torch.empty(positions, config.head_dim)
    sin = torch.empty(positions, config.head_dim)
    fill_tables(config, cos, sin)
    return cos, sin


RECORDED = {
    (64, 10_000.0, None, 1.0): ("05ba762128399cf0ac6b77466cd56583bb2f80b41d9cdef76ad5b6ac539b44bf"),
    (128, 500_000.0, 8.0, 1.0): (
        "771dde7dca784eeb1eb1088e48934f97fb61c7ab8d580794871b2848fd3f1f10"
    ),
    (80, 1e6, None, 1.1386294): (
        "69bc676e2d020ef4c8945598576619f93ed20030b986a1aabb5ea753f980f071"
    ),
}
"""SHA-256 of both tables, by width, theta, factor and scale."""


@pytest.mark.parametrize("case", RECORDED)
def test_tables_have_the_recorded_bits_on_every_machine(
    case: tuple[int, float, float | None, float],
) -> None:
    head_dim, theta, factor, scale = case
    factors = None if factor is None else [factor] * (head_dim // 2)
    config = model_config(head_dim, theta, rope_factors=factors, rope_scale=scale)
    digest = hashlib.sha256()
    for table in tables(config):
        digest.update(table.numpy().data)
    assert digest.hexdigest() == RECORDED[case]


def test_no_vector_function_of_torch_or_numpy_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tables(model_config())

    def wrong(*arguments: Any, **options: Any) -> Any:
        pytest.fail("computed by a vector library, whose bits are another's elsewhere")

    for name in ("cos", "sin", "exp", "pow", "log"):
        monkeypatch.setattr(torch.Tensor, name, wrong)
        monkeypatch.setattr(torch, name, wrong)
    for name in ("cos", "sin", "exp", "power", "log"):
        monkeypatch.setattr(np, name, wrong)
    assert all(map(torch.equal, tables(model_config()), expected))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(0, 2.0**20, width=32, allow_subnormal=False), min_size=1, max_size=20),
    st.integers(0, 600_000),
)
def test_cosine_and_sine_are_the_mathematical_ones(angles: list[float], quarters: int) -> None:
    # Angles beside whole quarter turns, too, where one of both is nearly nothing.
    given_angles = np.array([*angles, quarters * math.pi / 2], dtype=np.float32)
    cosines, sines = cosine_and_sine(given_angles)
    for angle, cosine, sine in zip(given_angles.tolist(), cosines, sines, strict=True):
        assert cosine == pytest.approx(math.cos(angle), rel=1e-15, abs=1e-18)
        assert sine == pytest.approx(math.sin(angle), rel=1e-15, abs=1e-18)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1e6])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_models_see_the_positions_they_were_trained_with(theta: float, head_dim: int) -> None:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    reference = 1.0 / theta**exponents
    # Torch's power is wrong by one place of the last bit now and then.
    ours = torch.from_numpy(rotary_frequencies(model_config(head_dim, theta)))
    assert torch.allclose(ours, reference, rtol=2.4e-7, atol=0)


def test_half_tables_are_halves_of_whole_ones() -> None:
    config = model_config(rope_scale=1.25)
    cos, sin = tables(config)
    halves = torch.empty(POSITIONS, 32), torch.empty(POSITIONS, 32)
    fill_half_tables(config, *halves)
    assert torch.equal(halves[0], cos[:, :32])
    assert torch.equal(cos[:, 32:], cos[:, :32])
    assert torch.equal(halves[1], sin[:, 32:])
    assert torch.equal(-halves[1], sin[:, :32])
    assert different_table(config, *halves) == different_table(config, cos, sin) == ""


@pytest.mark.parametrize("name", ["cos", "sin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_damaged_table_is_found(name: str, dtype: torch.dtype) -> None:
    config = model_config()
    whole = {
        key: table.to(dtype) for key, table in zip(("cos", "sin"), tables(config), strict=True)
    }
    assert different_table(config, **whole) == ""
    damaged = whole[name][POSITIONS - 1, -1].view(
        torch.int16 if dtype.itemsize == 2 else torch.int32
    )
    damaged ^= 1
    assert different_table(config, **whole) == name
