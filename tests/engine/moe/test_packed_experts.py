"""A layer of experts by the kernels that a GPU runs, here in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ullage_engine.kernels.mxfp4 import Decoder
from ullage_engine.layers.expert_matrices import PickedExperts, packed_experts
from ullage_engine.layers.experts import Experts
from ullage_engine.memory.experts import mxfp4_scratch_bytes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)


def picked(packed: Any) -> PickedExperts:
    return PickedExperts(packed, packed)


@pytest.mark.parametrize("tokens", [2, 20])
@torch.inference_mode()
def test_plain_weights(
    new_layer: Callable[..., Any], build: Callable[..., Experts], tokens: int
) -> None:
    layer = new_layer(True)
    x, out = torch.randn(tokens, 64), torch.zeros(tokens, 64)
    build(layer, tokens, lambda weights: picked(packed_experts(weights, None, "plain"))).run(x, out)
    torch.testing.assert_close(out, layer.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [2, 20])
@torch.inference_mode()
def test_weights_stay_packed(
    new_packable_layer: Callable[..., Any],
    random_packed: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    build: Callable[..., Experts],
    seed: int,
    tokens: int,
) -> None:
    layer = new_packable_layer()
    parts = [random_packed(8, 128, 2, seed=seed), random_packed(8, 64, 2, seed=seed + 1)]
    scratch = torch.empty(mxfp4_scratch_bytes("cpu", 4), dtype=torch.uint8)
    decoder = Decoder(torch.float32, scratch)
    gate_up, down = (decoder.decode(*each).clone() for each in parts)
    x = torch.randn(tokens, 64)
    plain, ours = torch.zeros_like(x), torch.zeros_like(x)
    build(replace(layer, gate_up=gate_up, down=down), tokens).run(x, plain)
    stores = iter([picked(packed_experts(b.flatten(2), s, "mxfp4")) for b, s in parts])
    build(layer, tokens, lambda weights: next(stores)).run(x, ours)
    assert float((ours - plain).abs().max() / plain.abs().max()) < 1e-4
