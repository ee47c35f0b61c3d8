"""Layers of experts of transformers, and ours of the same weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from msgspec import structs

from ullage_engine.kernels.arena import SLICE_TOKENS, StepLimits, step_arena
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.kernels.moe import clamped_gate
from ullage_engine.layers.decoder import gate
from ullage_engine.layers.linear import Linear, PlainLinear
from ullage_engine.layers.moe import ExpertLinears, Experts, ExpertWeights, LoopedExperts, Reduce
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig

HIDDEN = 64
WIDTH = 48
EXPERTS = 8
CHOSEN = 3

Wrap = Callable[[torch.Tensor], ExpertLinears]


@dataclass(frozen=True)
class Layer:
    """One layer of transformers', and its weights as they are prepared for ours."""

    spec: ExpertsSpec
    expected: Callable[[torch.Tensor], torch.Tensor]
    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def skewed(seed: int) -> torch.Tensor:
    """A router's bias by which all tokens choose expert 0, none the last two."""
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(seed))
    bias[0] = 50.0
    bias[-2:] = -50.0
    return bias


def randomise(module: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3, generator=generator)


def lfm2(seed: int, is_skewed: bool) -> Layer:
    from transformers import Lfm2MoeConfig
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock

    spec = ExpertsSpec(
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        intermediate=WIDTH,
        scoring="sigmoid",
        scale=1.5,
    )
    config = Lfm2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        routed_scaling_factor=spec.scale,
        num_hidden_layers=1,
        layer_types=["conv"],
    )
    block = Lfm2MoeSparseMoeBlock(config)
    randomise(block, seed)
    bias = torch.randn(EXPERTS) if not is_skewed else skewed(seed)
    block.expert_bias.copy_(bias)
    return Layer(
        spec=spec,
        expected=lambda x: block(x[None])[0],
        router=block.gate.weight.data,
        router_bias=bias,
        gate_up=block.experts.gate_up_proj.data,
        down=block.experts.down_proj.data,
    )


def gpt_oss(seed: int, is_skewed: bool) -> Layer:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    spec = ExpertsSpec(
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        intermediate=WIDTH,
        scoring="softmax",
        is_biased=True,
    )
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=1,
    )
    block = GptOssMLP(config)
    randomise(block, seed)
    block.experts.gate_up_proj.data *= 10  # Some gates and ups are beyond their limits.
    if is_skewed:
        block.router.bias.data.copy_(skewed(seed))
    experts = block.experts
    # Gate and up are columns in turn; prepared, all rows of the gate come first.
    gate_up = experts.gate_up_proj.data.transpose(1, 2)
    bias = experts.gate_up_proj_bias.data
    return Layer(
        spec=spec,
        expected=lambda x: block(x[None])[0][0],
        router=block.router.weight.data,
        router_bias=block.router.bias.data,
        gate_up=torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1).contiguous(),
        down=experts.down_proj.data.transpose(1, 2).contiguous(),
        gate_up_bias=torch.cat([bias[:, ::2], bias[:, 1::2]], 1),
        down_bias=experts.down_proj_bias.data,
    )


def model_config_of(spec: ExpertsSpec) -> ModelConfig:
    return ModelConfig(
        architecture="lfm2_moe",
        layers=(LayerSpec(feed_forward="experts"),),
        hidden=HIDDEN,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HIDDEN,
        intermediate=1,
        vocab=1,
        max_position=64,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        tied=True,
        experts=spec,
    )


def looped(weights: torch.Tensor) -> ExpertLinears:
    return LoopedExperts([PlainLinear(each) for each in weights])


def build_experts(
    layer: Layer,
    tokens: int,
    wrap: Wrap = looped,
    matrix: Callable[[torch.Tensor], Linear] = PlainLinear,
    deterministic: bool = False,
    reduce: Reduce | None = None,
    dtype: torch.dtype = torch.float32,
    max_slice_tokens: int = SLICE_TOKENS["cpu"],
) -> Experts:
    """Ours, with an arena of its own for steps of up to `tokens`."""
    limits = StepLimits(
        max_tokens=tokens,
        max_rows=1,
        max_model_len=64,
        gather_tokens=64,
        block_tokens=16,
        itemsize=dtype.itemsize,
        deterministic=deterministic,
        max_slice_tokens=max_slice_tokens,
    )
    arena = allocate(step_arena(model_config_of(layer.spec), limits), dtype, torch.device("cpu"))
    for buffer in arena.values():
        buffer.fill_(float("nan"))  # Nothing may be read that was not written.
    weights = ExpertWeights(
        router=matrix(layer.router.to(dtype)),
        gate_up=wrap(layer.gate_up.to(dtype)),
        down=wrap(layer.down.to(dtype)),
        gate=clamped_gate if layer.spec.is_biased else gate,
        router_bias=layer.router_bias,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )
    return Experts(layer.spec, weights, arena, deterministic, reduce)


@pytest.fixture(params=[lfm2, gpt_oss])
def new_layer(request: pytest.FixtureRequest, seed: int) -> Callable[[bool], Layer]:
    """A layer of either family with random weights; skewed or not."""
    return lambda is_skewed=False: request.param(seed, is_skewed)


@pytest.fixture(scope="session")
def build() -> Callable[..., Experts]:
    return build_experts


@pytest.fixture(scope="session")
def model_config_with() -> Callable[[ExpertsSpec], ModelConfig]:
    """A model of one layer, with such experts."""
    return model_config_of


@pytest.fixture
def new_packable_layer(new_layer: Callable[..., Layer]) -> Callable[[], Layer]:
    """A layer whose experts are 64 wide, two groups of MXFP4; its matrices are to be replaced."""

    def make() -> Layer:
        layer = new_layer()
        return replace(
            layer,
            spec=structs.replace(layer.spec, intermediate=64),
            gate_up_bias=None if layer.gate_up_bias is None else torch.randn(EXPERTS, 128),
        )

    return make


@pytest.fixture(scope="session")
def random_packed() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Makes MXFP4 blocks and scales of [..., groups], with numbers about 1."""

    def make(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        return blocks, torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)

    return make
