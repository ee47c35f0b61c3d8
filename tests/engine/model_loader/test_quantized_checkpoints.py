"""Quantised checkpoints, packed here by hand from the formats' definitions, are read as the weights
that they stand for."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.keys import check_keys
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.quantization_keys import QUANTIZATION_KEYS
from ullage_engine.model_loader.loader import LoadedModel, ShardModel, load_weights
from ullage_engine.model_loader.quantized import open_directory
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.parallel.slices import Slicer
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import Encoding, unpack

HIDDEN = 128
WIDTH = 256
VOCAB = 96
GROUP = 32
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": WIDTH,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
LAYER = "model.layers.0."
SHAPES = {
    LAYER + "self_attn.q_proj": (128, HIDDEN),
    LAYER + "self_attn.k_proj": (64, HIDDEN),
    LAYER + "self_attn.v_proj": (64, HIDDEN),
    LAYER + "self_attn.o_proj": (HIDDEN, 128),
    LAYER + "mlp.gate_proj": (WIDTH, HIDDEN),
    LAYER + "mlp.up_proj": (WIDTH, HIDDEN),
    LAYER + "mlp.down_proj": (HIDDEN, WIDTH),
}
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Pack = Callable[[str, tuple[int, int]], tuple[Tensors, torch.Tensor]]
"""Packs a random matrix; its tensors, and the weights they stand for."""


def words(codes: list[list[int]], bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Rows of codes as rows of int32, 32 / bits codes in each."""
    count = 32 // bits
    order = order or list(range(count))
    packed = []
    for row in codes:
        line = []
        for start in range(0, len(row), count):
            word = 0
            for place, which in enumerate(order):
                word |= row[start + which] << (bits * place)
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


class Random:
    """Codes, zero points and scales of one seed."""

    def __init__(self, seed: int, bits: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.bits = bits

    def codes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << self.bits, shape, generator=self.generator)

    def scales(self, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=self.generator) / 100 + 0.001).half()


def gptq(seed: int, bits: int, *, desc_act: bool, sym: bool, less: int = 1) -> Pack:
    random = Random(seed, bits)

    def pack(stem: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        rows, columns = shape
        groups = columns // GROUP
        codes = random.codes(columns, rows)
        scales = random.scales(groups, rows)
        middle = torch.full((groups, rows), 1 << (bits - 1))
        points = middle if sym else random.codes(groups, rows)
        index = torch.arange(columns) // GROUP
        if desc_act:
            index = index[torch.randperm(columns, generator=random.generator)]
        stored = (points - less) % (1 << bits)
        tensors = {
            f"{stem}.qweight": words(codes.t().tolist(), bits).t().contiguous(),
            f"{stem}.qzeros": words(stored.tolist(), bits),
            f"{stem}.scales": scales,
            f"{stem}.g_idx": index.int(),
        }
        return tensors, ((codes - points[index]) * scales.float()[index]).t()

    return pack


def awq(seed: int) -> Pack:
    random = Random(seed, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(stem: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        rows, columns = shape
        codes = random.codes(columns, rows)
        points = random.codes(columns // GROUP, rows)
        scales = random.scales(columns // GROUP, rows)
        tensors = {
            f"{stem}.qweight": words(codes.tolist(), 4, order),
            f"{stem}.qzeros": words(points.tolist(), 4, order),
            f"{stem}.scales": scales,
        }
        index = torch.arange(columns) // GROUP
        return tensors, ((codes - points[index]) * scales.float()[index]).t()

    return pack


def scaled(seed: int, dtype: torch.dtype, kind: str) -> Pack:
    random = Random(seed, 7)

    def pack(stem: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        rows, columns = shape
        values = (random.codes(rows, columns) - 64).to(dtype)
        block = (32, 64)
        size = {"tensor": (), "row": (rows, 1), "block": (rows // 32, columns // 64)}[kind]
        scales = random.scales(*size).float()
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        tensors = {f"{stem}.weight": values, f"{stem}.{name}": scales}
        if kind == "block":
            scales = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return tensors, values.float() * scales

    return pack


def save(folder: Path, pack: Pack, quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Writes a model; its dequantised weights."""
    folder.mkdir(exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        LAYER + "input_layernorm.weight": torch.ones(HIDDEN),
        LAYER + "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    weights = {}
    for stem, shape in SHAPES.items():
        packed, weights[stem] = pack(stem, shape)
        tensors |= packed
    save_file(tensors, folder / "model.safetensors")
    config = CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def load(folder: Path, quantization: str = "none", shard: ShardModel | None = None) -> LoadedModel:
    section = ModelSection(source=f"file://{folder}", name="t", quantization=quantization)  # type: ignore[arg-type]
    prepared = folder / "prepared"
    return load_weights(section, CPU, torch.float32, prepared, lambda done, total: None, shard)


def loaded_weights(model: LoadedModel, name: str) -> torch.Tensor:
    if name in model.encodings:
        return unpack(model.packed(name)).dequantise()
    return model.tensors[name]


def check_ranks(folder: Path, name: str, matrix: torch.Tensor) -> None:
    """Each of two tensor ranks holds the numbers of its rows or columns of the matrix."""
    layout = RankLayout(tensor=2)
    for rank in range(2):
        part = load(folder, shard=partial(sliced, layout, rank))
        plain = Slicer(part.model_config, layout, rank).part(name, matrix)
        assert (loaded_weights(part, name) - plain).abs().max() <= plain.abs().max() * 2**-10


def sliced(
    layout: RankLayout, rank: int, model_config: ModelConfig, encodings: dict[str, Encoding]
) -> Slicer:
    return Slicer(model_config, layout, rank, encodings)


def check(folder: Path, weights: dict[str, torch.Tensor], encoding: str | None) -> None:
    """Every matrix is what was packed, in the format that is expected (None: plain numbers)."""
    model = load(folder)
    attention = [weights[f"{LAYER}self_attn.{name}_proj"] for name in "qkv"]
    mlp = [weights[f"{LAYER}mlp.{name}_proj"] for name in ("gate", "up")]
    wanted = {
        "qkv": torch.cat(attention),
        "output": weights[LAYER + "self_attn.o_proj"],
        "gate_up": torch.cat(mlp),
        "down": weights[LAYER + "mlp.down_proj"],
    }
    for name, matrix in wanted.items():
        # Tiles have scales and offsets in float16.
        found = loaded_weights(model, f"layers.0.{name}")
        assert (found - matrix).abs().max() <= matrix.abs().max() * 2**-10
        check_ranks(folder, f"layers.0.{name}", matrix)
    layers = {name for name in model.encodings if name.startswith("layers.")}
    formats = {model.encodings[name].format for name in layers}
    assert formats == ({encoding} if encoding else set())
    reader = open_directory(folder)
    for stem, matrix in weights.items():
        torch.testing.assert_close(reader.read(f"{stem}.weight").float(), matrix)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("sym", [False, True])
def test_gptq(tmp_path: Path, seed: int, bits: int, desc_act: bool, sym: bool) -> None:
    """Columns in any order are dequantised; in their own order they are kept."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": desc_act}
    weights = save(tmp_path, gptq(seed, bits, desc_act=desc_act, sym=sym), config)
    check(tmp_path, weights, None if desc_act else f"int{bits}")


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_gptq_with_zero_points_as_they_are(tmp_path: Path, seed: int, key: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, key: "gptq_v2"}
    weights = save(tmp_path, gptq(seed, 4, desc_act=False, sym=False, less=0), config)
    check(tmp_path, weights, "int4")


AUTO_ROUND = {
    "act_bits": 16,
    "act_data_type": "int",
    "act_dynamic": True,
    "act_group_size": 128,
    "act_sym": True,
    "amp": True,
    "autoround_version": "0.5.1",
    "data_type": "int",
    "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": False,
    "iters": 1000,
    "enable_quanted_input": True,
    "gradient_accumulate_steps": 1,
    "low_gpu_mem_usage": True,
    "lr": 0.001,
    "minmax_lr": 0.001,
    "nsamples": 512,
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
    "super_bits": None,
    "to_quant_block_names": None,
}
"""What AutoRound writes beside the keys of the format that it exports to."""


TRANSFORMERS = {
    "act_group_aware": True,
    "backend": "auto",
    "batch_size": 1,
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "desc_act": False,
    "meta": None,
    "sym": True,
    "true_sequential": True,
}
"""What transformers 5 writes with GPTQ and AWQ when it saves a model again."""


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4, "format": "gptq", **TRANSFORMERS},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, **AUTO_ROUND},
        {"quant_method": "gptq", "bits": 4, "method": "gptq", "format": "gptq", "meta": {}},
        {"quant_method": "awq", "bits": 4, "format": "gemm", "version": "gemm", **TRANSFORMERS},
        {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, **AUTO_ROUND},
        {"quant_method": "fp8", "dequantize": False, "expert_dtype": "fp8", "scale_fmt": "float"},
    ],
    ids=lambda section: f"{section['quant_method']}-{len(section)}",
)
def test_keys_that_quantisers_write_are_no_reason_to_refuse(section: Config) -> None:
    keys = QUANTIZATION_KEYS[section["quant_method"]]
    check_keys(HFConfig(Path("config.json"), section), keys)


def test_awq(tmp_path: Path, seed: int) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    check(tmp_path, save(tmp_path, awq(seed), config), "int4")


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_fp8(tmp_path: Path, seed: int, kind: str) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    check(tmp_path, save(tmp_path, scaled(seed, torch.float8_e4m3fn, kind), config), "fp8")


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (4,), (1, 1), ()])
def test_scales_are_told_apart_by_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Blocks may be as many as rows: 2 x 2 of a matrix with 4 rows."""
    random = Random(3, 7)
    values = (random.codes(4, 16) - 64).to(torch.float8_e4m3fn)
    scales = random.scales(*shape).float()
    stem = LAYER + "self_attn.q_proj"
    save(tmp_path, scaled(3, torch.float8_e4m3fn, "row"), {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [2, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {f"{stem}.weight": values, f"{stem}.weight_scale": scales}
    save_file(tensors, path)
    own = scales
    if shape == (2, 2):
        own = scales.repeat_interleave(2, 0).repeat_interleave(8, 1)
    elif shape:
        own = scales.reshape(-1, 1)
    found = open_directory(tmp_path).read(f"{stem}.weight").float()
    torch.testing.assert_close(found, values.float() * own)


def test_scales_that_lie_along_the_columns_are_refused(tmp_path: Path) -> None:
    """They are as many as rows, and say nothing about which."""
    pack = scaled(1, torch.float8_e4m3fn, "row")

    def turned(stem: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        tensors, weights = pack(stem, shape)
        name = f"{stem}.weight_scale"
        return tensors | {name: tensors[name].t().contiguous()}, weights

    save(tmp_path, turned, {"quant_method": "fp8"})
    with pytest.raises(WeightsError, match=r"neither rows nor blocks of 128 x 128"):
        load(tmp_path)


def compressed(rounded: bool = False, format: str = "int-quantized", **weights: Any) -> Config:
    """A quantization_config as llm-compressor writes it; `weights` changes that of weights."""
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    activations = {**numbers, "dynamic": True, "strategy": "token"} if rounded else None
    stored = {**numbers, "strategy": "channel", "dynamic": False, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": stored, "input_activations": activations}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


@pytest.mark.parametrize("rounded", [False, True])
def test_int8_of_compressed_tensors(tmp_path: Path, seed: int, rounded: bool) -> None:
    weights = save(tmp_path, scaled(seed, torch.int8, "row"), compressed(rounded))
    check(tmp_path, weights, "w8a8" if rounded else "int8")


def with_points(pack: Pack, seed: int, rows: bool = True) -> Pack:
    """The same matrices with zero points."""
    generator = torch.Generator().manual_seed(seed)

    def pack_points(stem: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        tensors, weights = pack(stem, shape)
        points = torch.randint(-128, 128, (shape[0] if rows else 1, 1), generator=generator)
        tensors[f"{stem}.weight_zero_point"] = points.to(torch.int8)
        return tensors, weights - points * tensors[f"{stem}.weight_scale"]

    return pack_points


@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_int8_with_zero_points(tmp_path: Path, seed: int, kind: str) -> None:
    pack = with_points(scaled(seed, torch.int8, kind), seed, kind == "row")
    check(tmp_path, save(tmp_path, pack, compressed(symmetric=False)), "int8")


@pytest.mark.parametrize("rounded", [False, True])
def test_zero_points_that_the_configuration_denies_are_refused(
    tmp_path: Path, seed: int, rounded: bool
) -> None:
    save(tmp_path, with_points(scaled(seed, torch.int8, "row"), seed), compressed(rounded))
    with pytest.raises(WeightsError, match=r"weight_zero_point' .* use a symmetric model"):
        load(tmp_path)


def test_small_numbers_without_a_scale_are_refused(tmp_path: Path, seed: int) -> None:
    save(tmp_path, scaled(seed, torch.int8, "row"), {})
    with pytest.raises(WeightsError, match=r"torch.int8 without a known scale"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (compressed(rounded=True, symmetric=False), "weights.symmetric is False"),
        (compressed(symmetric=False, type="float"), "weights.symmetric is False"),
        (compressed(num_bits=4), "config_groups.group_0.weights.num_bits is 4"),
        (compressed(strategy="group", group_size=32), "weights.strategy is 'group'"),
        (compressed(actorder="group"), "weights.actorder is 'group'"),
        (compressed(dynamic=True), "weights.dynamic is True"),
        (compressed(twist=1), "weights.twist 1 is not known"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transform_config is"),
        (compressed() | {"twist": 1}, "quantization_config.twist 1 is not known"),
        ({"quant_method": "gptq", "bits": 4, "twist": 1}, "twist 1 is not known"),
        (compressed() | {"sparsity_config": {"format": "bitmask"}}, "format is 'bitmask'"),
        (compressed() | {"config_groups": {}}, "config_groups has 0"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        ({"quant_method": "fp8", "rotation": 1}, "rotation 1 is not known"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {}}}, "dynamic is"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "act_bits": 8}, "act_bits is 8"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "'llm-awq'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point is False"),
        ({"quant_method": "ullage", "format": "int2"}, "format is 'int2'"),
    ],
)
def test_settings_that_change_the_numbers_are_refused(
    tmp_path: Path, seed: int, config: Config, words: str
) -> None:
    save(tmp_path, scaled(seed, torch.int8, "row"), config)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert words in str(caught.value)


def test_static_activations_are_refused(tmp_path: Path, seed: int) -> None:
    config = compressed(rounded=True)
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    save(tmp_path, scaled(seed, torch.int8, "row"), config)
    with pytest.raises(WeightsError, match=r"input_activations.dynamic is False"):
        load(tmp_path)


def test_gptq_without_the_order_or_with_other_groups_is_refused(tmp_path: Path, seed: int) -> None:
    pack = gptq(seed, 4, desc_act=False, sym=True)

    def without_order(stem: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        tensors, weights = pack(stem, shape)
        return {key: each for key, each in tensors.items() if "g_idx" not in key}, weights

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
    save(tmp_path, without_order, config)
    with pytest.raises(WeightsError, match="g_idx' is missing"):
        load(tmp_path)
    save(tmp_path, without_order, config | {"desc_act": False, "group_size": 2 * GROUP})
    with pytest.raises(WeightsError, match="group_size 64 needs"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "exl2"}, ["quant_method 'exl2'", "gptq, awq"]),
        ({"quant_method": "gptq", "bits": 3}, ["bits is 3", "4 or 8"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["version is 'gemv'", "gemm"]),
        ({"quant_method": "compressed-tensors", "format": "pack"}, ["format is 'pack'"]),
    ],
)
def test_other_quantisations_are_refused(
    tmp_path: Path, seed: int, config: dict[str, Any], words: list[str]
) -> None:
    save(tmp_path, awq(seed), config)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_quantised_checkpoint_is_not_quantised_to_something_else(
    tmp_path: Path, seed: int
) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    save(tmp_path, awq(seed), config)
    assert load(tmp_path, "int4").encodings
    with pytest.raises(WeightsError, match=r"quantization int8: .* quantised as int4 already"):
        load(tmp_path, "int8")


def test_w8a8_needs_a_calibrated_model(tmp_path: Path, seed: int) -> None:
    save(tmp_path, awq(seed), {"quant_method": "awq", "bits": 4, "group_size": GROUP})
    with pytest.raises(WeightsError, match="ullage quantize --format w8a8 --calibrate"):
        load(tmp_path, "w8a8")
