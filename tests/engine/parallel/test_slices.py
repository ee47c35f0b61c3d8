"""Sliced products, summed over ranks, equal the whole product; nothing is held twice or nowhere."""

import secrets

import pytest
import torch

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.layers.attention import AttentionLayer
from ullage_engine.layers.decoder import kv_bounds
from ullage_engine.layers.linear import PlainLinear
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.parallel.layout import RankLayout, kv_heads, rank_model_config
from ullage_engine.parallel.slices import Slicer

GEOMETRY = ModelConfig(
    architecture="lfm2_moe",
    layers=(LayerSpec(), LayerSpec(mixer="conv", feed_forward="experts")),
    hidden=16,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    intermediate=10,
    vocab=20,
    max_position=64,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    conv_kernel=3,
    conv_channels=16,
    experts=ExpertsSpec(
        num_experts=3, experts_per_token=2, intermediate=6, scoring="sigmoid", is_biased=True
    ),
)


def whole_model(generator: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {
        "embedding": (20, 16),
        "norm": (16,),
        "layers.0.mixer_norm": (16,),
        "layers.0.qkv": (48, 16),
        "layers.0.qkv_bias": (48,),
        "layers.0.output": (16, 24),
        "layers.0.output_bias": (16,),
        "layers.0.sinks": (6,),
        "layers.0.gate_up": (20, 16),
        "layers.0.down": (16, 10),
        "layers.1.conv_in": (48, 16),
        "layers.1.conv": (16, 3),
        "layers.1.conv_out": (16, 16),
        "layers.1.router": (3, 16),
        "layers.1.experts_gate_up": (3, 12, 16),
        "layers.1.experts_gate_up_bias": (3, 12),
        "layers.1.experts_down": (3, 16, 6),
        "layers.1.experts_down_bias": (3, 16),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }


@pytest.fixture
def whole() -> dict[str, torch.Tensor]:
    seed = secrets.randbits(32)
    print("seed", seed)
    return whole_model(torch.Generator().manual_seed(seed))


def parts_of(whole: dict[str, torch.Tensor], layout: RankLayout) -> list[dict[str, torch.Tensor]]:
    slicers = [Slicer(GEOMETRY, layout, rank) for rank in range(layout.world)]
    return [
        {name: part for name in whole if (part := each.part(name, whole[name])) is not None}
        for each in slicers
    ]


@pytest.mark.parametrize("tensor", [2, 3, 6])
def test_shapes_are_those_of_the_ranks_geometry(
    whole: dict[str, torch.Tensor], tensor: int
) -> None:
    layout = RankLayout(tensor, 1)
    for rank, part in enumerate(parts_of(whole, layout)):
        own = rank_model_config(GEOMETRY, layout, rank)
        assert own.experts is not None
        assert part["layers.0.qkv"].shape == (own.qkv_width, 16)
        assert part["layers.0.qkv_bias"].shape == (own.qkv_width,)
        assert part["layers.0.output"].shape == (16, own.query_width)
        assert part["layers.0.sinks"].shape == (own.num_heads,)
        assert part["layers.0.gate_up"].shape == (2 * own.intermediate, 16)
        assert part["layers.1.conv_in"].shape == (3 * own.conv_channels, 16)
        assert part["layers.1.conv"].shape == (own.conv_channels, 3)
        assert part["layers.1.experts_gate_up"].shape == (3, 2 * own.experts.intermediate, 16)
        assert all(each.is_contiguous() for each in part.values())
        assert torch.equal(part["layers.0.output_bias"], whole["layers.0.output_bias"])


@pytest.mark.parametrize("tensor", [2, 3])
def test_partial_feed_forwards_and_convolutions_add_up(
    whole: dict[str, torch.Tensor], tensor: int
) -> None:
    x = torch.randn(5, 16, dtype=torch.float64)
    parts = parts_of(whole, RankLayout(tensor, 1))
    for compute in (dense, conv, experts):
        total = torch.stack([compute(part, x) for part in parts]).sum(0)
        assert torch.allclose(total, compute(whole, x), atol=1e-12), compute.__name__


def dense(part: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ part["layers.0.gate_up"].t()).chunk(2, 1)
    return gate.sigmoid() * up @ part["layers.0.down"].t()


def conv(part: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    b, c, u = (x @ part["layers.1.conv_in"].t()).chunk(3, 1)
    return c * (b * u * part["layers.1.conv"].sum(1)) @ part["layers.1.conv_out"].t()


def experts(part: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for expert in range(3):
        wide = x @ part["layers.1.experts_gate_up"][expert].t()
        gate, up = (wide + part["layers.1.experts_gate_up_bias"][expert]).chunk(2, 1)
        down = part["layers.1.experts_down"][expert].t()
        total += gate.sigmoid() * up @ down + part["layers.1.experts_down_bias"][expert]
    return total


@pytest.mark.parametrize("tensor", [2, 3, 6])
def test_every_head_is_projected_once_and_kv_heads_kept_by_several_are_alike(
    whole: dict[str, torch.Tensor], tensor: int
) -> None:
    layout = RankLayout(tensor, 1)
    queries, keys = [], []
    for rank, part in enumerate(parts_of(whole, layout)):
        own = rank_model_config(GEOMETRY, layout, rank)
        sizes = [own.query_width, own.num_kv_heads * 4, own.num_kv_heads * 4]
        q, k, _ = part["layers.0.qkv"].split(sizes)
        queries.append(q)
        keys.append(k)
    assert torch.equal(torch.cat(queries), whole["layers.0.qkv"][:24])
    kept = keys[:: max(1, tensor // 3)]
    assert torch.equal(torch.cat(kept), whole["layers.0.qkv"][24:36])


@pytest.mark.parametrize("tensor", [2, 3, 6])
def test_ranks_scale_their_heads_kv_as_the_whole_does(
    whole: dict[str, torch.Tensor], tensor: int
) -> None:
    layout = RankLayout(tensor, 1)
    expected = bounds(whole, GEOMETRY)
    for rank, part in enumerate(parts_of(whole, layout)):
        heads = kv_heads(GEOMETRY, layout, rank)
        own = bounds(part, rank_model_config(GEOMETRY, layout, rank))
        torch.testing.assert_close(own, expected[:, heads.start : heads.end])


def bounds(part: dict[str, torch.Tensor], model_config: ModelConfig) -> torch.Tensor:
    """Of keys and values, [2, kv_heads]."""
    tensors = {name: tensor.float() for name, tensor in part.items()}
    layer = AttentionLayer(
        qkv=PlainLinear(tensors["layers.0.qkv"]),
        output=PlainLinear(tensors["layers.0.output"]),
        qkv_bias=tensors["layers.0.qkv_bias"],
    )
    limits = StepLimits(8, 1, 64, 64, itemsize=4)
    arena = allocate(step_arena(model_config, limits), torch.float32, torch.device("cpu"))
    found = kv_bounds(layer, tensors["layers.0.mixer_norm"], model_config, limits, arena)
    return found.view(2, model_config.num_kv_heads)


def test_stages_hold_their_layers_and_views_of_the_file(whole: dict[str, torch.Tensor]) -> None:
    first, last = parts_of(whole, RankLayout(1, 2))
    assert set(first) == {name for name in whole if "layers.0" in name} | {"embedding"}
    assert set(last) == {name for name in whole if "layers.1" in name} | {"embedding", "norm"}
    assert all(part[name] is whole[name] for part in (first, last) for name in part)
