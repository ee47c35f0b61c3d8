"""A layer of experts by the kernels that a GPU runs, here in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits, mxfp4_scratch_bytes, step_arena
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.layers.attention import DefaultBackend
from ullage_engine.layers.moe import (
    ExpertLinears,
    Experts,
    LoopedExperts,
    Mxfp4Decoder,
    packed_experts,
)
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.quantization.formats import Encoding, Format, chosen_encoding, pack, quantise
from ullage_engine.runner.weights import linear_scratch_bytes, model_weights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)


@pytest.mark.parametrize("tokens", [2, 20])
@torch.inference_mode()
def test_plain_weights(
    new_layer: Callable[..., Any], build: Callable[..., Experts], tokens: int
) -> None:
    layer = new_layer(True)
    x = torch.randn(tokens, 64)
    out = torch.zeros(tokens, 64)
    build(layer, tokens, lambda weights: packed_experts(weights, None, "plain")).run(x, out)
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
    decoder = Mxfp4Decoder(torch.float32, scratch)
    gate_up, down = (decoder.decode(*each).clone() for each in parts)
    x = torch.randn(tokens, 64)
    plain = torch.zeros_like(x)
    ours = torch.zeros_like(x)
    build(replace(layer, gate_up=gate_up, down=down), tokens).run(x, plain)
    stores = iter([packed_experts(b.flatten(2), s, "mxfp4") for b, s in parts])
    build(layer, tokens, lambda weights: next(stores)).run(x, ours)
    assert float((ours - plain).abs().max() / plain.abs().max()) < 1e-4


LIMITS = StepLimits(
    max_tokens=20,
    max_rows=1,
    max_model_len=64,
    gather_tokens=64,
    block_tokens=16,
    itemsize=4,
)


def quantised(layer: Any, model_config: ModelConfig, format: Format) -> LoadedModel:
    """A loaded model of which only the experts' matrices are there."""
    tensors = {}
    encodings = {}
    for name, weights in (("gate_up", layer.gate_up), ("down", layer.down)):
        rows = weights.flatten(0, 1)
        encoding = chosen_encoding(format, tuple(rows.shape))
        pieces = pack(quantise(rows, encoding, torch.float32), encoding, torch.float32)
        tensors |= {f"layers.0.experts_{name}.{piece}": each for piece, each in pieces.items()}
        encodings[f"layers.0.experts_{name}"] = encoding
    return LoadedModel(model_config, tensors, 0, encodings)


def matrices(loaded: LoadedModel, deterministic: bool = False) -> list[ExpertLinears]:
    """Both of the layer's, as the engine makes them."""
    limits = replace(LIMITS, deterministic=deterministic)
    arena = allocate(step_arena(loaded.model_config, limits), torch.float32, torch.device("cpu"))
    backend = DefaultBackend(loaded.model_config, limits, arena)
    scratch = torch.empty(
        linear_scratch_bytes(loaded, limits, torch.device("cpu")), dtype=torch.uint8
    )
    weights = model_weights(loaded, limits, backend, torch.float32, scratch)
    return [weights.experts(f"layers.0.experts_{name}") for name in ("gate_up", "down")]


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize(
    ("format", "tolerance"), [("int8", 1e-4), ("int4", 1e-4), ("fp8", 1e-4), ("w8a8", 0.05)]
)
@torch.inference_mode()
def test_quantised_experts_stay_on_the_device(
    new_packable_layer: Callable[..., Any],
    model_config_with: Callable[..., ModelConfig],
    build: Callable[..., Experts],
    monkeypatch: pytest.MonkeyPatch,
    format: Format,
    tolerance: float,
    tokens: int,
) -> None:
    """Where kernels run nothing is looped over, and the result is that of the loop, but for what
    w8a8 rounds off activations there."""
    from ullage_engine.kernels.triton.matmul import TritonExperts

    layer = new_packable_layer()
    layer = replace(layer, gate_up=torch.randn(8, 128, 64), down=torch.randn(8, 64, 64))
    loaded = quantised(layer, model_config_with(layer.spec), format)
    looped = matrices(loaded)
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    ours = matrices(loaded)
    assert [type(each) for each in (*looped, *ours)] == [LoopedExperts] * 2 + [TritonExperts] * 2
    results = []
    x = torch.randn(tokens, 64) / 8
    for each in (looped, ours):
        stores = iter(each)
        results.append(torch.zeros_like(x))
        build(layer, tokens, lambda weights, stores=stores: next(stores)).run(x, results[-1])
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert error < tolerance


def test_what_kernels_cannot_group_is_looped_over(
    new_packable_layer: Callable[..., Any],
    model_config_with: Callable[..., ModelConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints may have groups of 16; and in deterministic mode rows have to be independent."""
    from ullage_engine.kernels.triton.matmul import TritonExperts

    layer = new_packable_layer()
    layer = replace(layer, gate_up=torch.randn(8, 128, 64), down=torch.randn(8, 64, 64))
    loaded = quantised(layer, model_config_with(layer.spec), "int8")
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    assert isinstance(matrices(loaded, deterministic=True)[0], LoopedExperts)
    name = "layers.0.experts_down"
    coarse = loaded.tensors[f"{name}.scales"]
    loaded.tensors[f"{name}.scales"] = coarse.expand(-1, 4).contiguous()
    loaded.encodings[name] = Encoding(format="int8", shape=(8 * 64, 64), group=16)
    assert [type(each) for each in matrices(loaded)] == [TritonExperts, LoopedExperts]
