"""Sliced products, summed over ranks, equal the whole product; nothing is held twice or nowhere."""

from typing import Any

import msgspec
import pytest
import torch

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.layers.attention import AttentionLayer
from ullage_engine.layers.decoder import kv_bounds
from ullage_engine.layers.linear import PlainLinear, quantized_linear, scratch_bytes
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.parallel.layout import LayoutError, RankLayout, kv_heads, rank_model_config
from ullage_engine.parallel.slices import Slicer, check_groups
from ullage_engine.quantization.formats import (
    Encoding,
    Format,
    Packed,
    Quantized,
    pack,
    piece_of,
    quantise,
    unpack,
)

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
    seed = 20_261
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
    queries = []
    keys = []
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


# Heads of 64 and widths of 256, so that two ranks cut between groups of 64 and tiles of 64 rows.
WIDE = msgspec.structs.replace(
    GEOMETRY,
    hidden=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate=256,
    conv_channels=128,
    experts=ExpertsSpec(
        num_experts=3, experts_per_token=2, intermediate=128, scoring="sigmoid", is_biased=True
    ),
)
MATRICES = {
    "layers.0.qkv": (512, 128),
    "layers.0.output": (128, 256),
    "layers.0.gate_up": (512, 128),
    "layers.0.down": (128, 256),
    "layers.1.conv_in": (384, 128),
    "layers.1.conv_out": (128, 128),
    "layers.1.experts_gate_up": (3, 256, 128),
    "layers.1.experts_down": (3, 128, 128),
}
FORMATS: list[tuple[Format, int, bool]] = [
    ("int8", 0, False),
    ("w8a8", 0, False),
    ("fp8", 0, False),
    ("fp8", 32, False),
    ("int4", 64, False),
    ("int4", 32, True),
    ("int8", 32, True),
    ("mxfp4", 32, False),
]


def quantised(format: Format, group: int, is_tiled: bool, weights: torch.Tensor) -> Packed:
    """A matrix, or one of each expert, in groups of so many columns; 0: a scale for each row."""
    rows = weights.flatten(0, -2)
    shape = (rows.shape[0], rows.shape[1])
    encoding = Encoding(
        format=format,
        shape=shape,
        group=group or shape[1],
        has_zeros=is_tiled or format == "int4",
        is_tiled=is_tiled,
    )
    if format == "mxfp4":
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        scales = torch.randint(120, 130, (shape[0], shape[1] // group), dtype=torch.uint8)
        numbers = Quantized(format, codes, scales)
    elif format == "fp8" and group:
        values = rows.clamp(-448, 448).to(torch.float8_e4m3fn)
        numbers = Quantized(format, values, torch.rand(shape[0], shape[1] // group))
    else:
        numbers = quantise(rows, encoding, torch.float32)
    return Packed(encoding, pack(numbers, encoding, torch.float32))


@pytest.mark.parametrize("layout", [RankLayout(2, 1), RankLayout(2, 2)])
@pytest.mark.parametrize(("format", "group", "is_tiled"), FORMATS)
def test_a_rank_holds_the_packed_numbers_of_its_rows_and_columns(
    format: Format, group: int, is_tiled: bool, layout: RankLayout
) -> None:
    whole = {
        name: quantised(format, group, is_tiled, torch.randn(shape))
        for name, shape in MATRICES.items()
    }
    encodings = {name: each.encoding for name, each in whole.items()}
    check_groups("large", WIDE, encodings, layout)
    for rank in range(layout.world):
        slicer = Slicer(WIDE, layout, rank, encodings)
        plain = Slicer(WIDE, layout, rank)
        held = {name for name in MATRICES if plain.holds(name)}
        assert slicer.encodings.keys() == held
        for name in held:
            encoding = slicer.encodings[name]
            pieces = {}
            for kind, tensor in whole[name].pieces.items():
                part = slicer.part(f"{name}.{kind}", tensor)
                assert part is not None
                assert part.shape == piece_of(encoding, kind).shape
                assert part.is_contiguous()
                pieces[kind] = part
            weights = unpack(whole[name]).dequantise().view(MATRICES[name])
            expected = plain.part(name, weights)
            assert expected is not None
            ours = unpack(Packed(encoding, pieces)).dequantise()
            assert torch.equal(ours, expected.flatten(0, -2)), name


def test_products_of_ranks_that_round_their_own_activations_add_up() -> None:
    name = "layers.0.down"
    x = torch.randn(5, 256)
    weights = quantised("w8a8", 0, False, torch.randn(128, 256))
    encodings = {name: weights.encoding}
    total = torch.zeros(5, 128)
    layout = RankLayout(2, 1)
    for rank in range(2):
        slicer = Slicer(WIDE, layout, rank, encodings)
        pieces = {kind: slicer.cut(f"{name}.{kind}", each) for kind, each in weights.pieces.items()}
        packed = Packed(slicer.encodings[name], pieces)
        scratch = torch.zeros(scratch_bytes([packed.encoding], 4), dtype=torch.uint8)
        columns = slice(128 * rank, 128 * (rank + 1))
        matrix = quantized_linear(packed, torch.float32, scratch)
        matrix.forward_add(x[:, columns].contiguous(), total)
    exact = x @ unpack(weights).dequantise().t()
    assert (total - exact).norm() < 0.02 * exact.norm()


def int4(shape: tuple[int, int], **layout: Any) -> Encoding:
    return Encoding(format="int4", shape=shape, **{"group": 128, "has_zeros": True, **layout})


GPT_OSS_20B: dict[str, Any] = {
    "layers": (LayerSpec(feed_forward="experts"),) * 24,
    "num_heads": 64,
    "num_kv_heads": 8,
    "experts": ExpertsSpec(
        num_experts=32, experts_per_token=4, intermediate=2880, scoring="softmax", is_biased=True
    ),
}
MISFITS: list[tuple[dict[str, Encoding], dict[str, Any], RankLayout, str]] = [
    # Three query heads of 64 columns a rank: the second group of 128 would be both ranks'.
    (
        {"layers.0.output": int4((128, 384))},
        {"num_heads": 6},
        RankLayout(2, 1),
        "2 ranks would cut the 384 inputs of layers.0.output at 192, but int4 keeps 128 of them "
        "together; set 1 and let pipeline",
    ),
    (
        {"layers.0.output": int4((128, 384))},
        {"num_heads": 6},
        RankLayout(2, 2),  # and four stages of two layers there cannot be
        "2 ranks would cut the 384 inputs of layers.0.output at 192, but int4 keeps 128 of them "
        "together; set gpus, tensor and pipeline to 1",
    ),
    (
        {"layers.1.experts_down": Encoding(format="mxfp4", shape=(32 * 2880, 2880), group=32)},
        GPT_OSS_20B,
        RankLayout(8, 1),
        "8 ranks would cut the 2880 inputs of layers.1.experts_down at 360, but mxfp4 keeps 32 of "
        "them together; set 1 or 2 and let pipeline",
    ),
    (
        {"layers.0.down": int4((128, 256), group=32, is_tiled=True)},
        {"num_kv_heads": 16, "num_heads": 16},
        RankLayout(16, 1),
        "16 ranks would cut the 256 inputs of layers.0.down at 16, but int4 keeps 32 of them "
        "together; set 8 and let pipeline",
    ),
]


@pytest.mark.parametrize(("encodings", "sizes", "layout", "words"), MISFITS)
def test_a_group_that_ranks_would_share_is_named_with_what_fits(
    encodings: dict[str, Encoding], sizes: dict[str, Any], layout: RankLayout, words: str
) -> None:
    model_config = msgspec.structs.replace(WIDE, **sizes)
    with pytest.raises(LayoutError) as caught:
        check_groups("large", model_config, encodings, layout)
    assert str(caught.value).startswith(f"pools.large.parallelism.tensor: {words}")
