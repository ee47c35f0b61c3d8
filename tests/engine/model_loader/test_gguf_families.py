"""GGUF and safetensors of the same weights give the same tensors and geometry.

Names come from the `gguf` package's own table, which converters use.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ullage_common.config.engine import ModelSection
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.layers.native_decoder import library_refusal
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import unpack

CPU = torch.device("cpu")
LIMITS = StepLimits(max_tokens=64, max_rows=4, max_model_len=128, gather_tokens=256, itemsize=4)

Load = Callable[..., LoadedModel]
Mxfp4 = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Blocks [experts, out, groups, 16] and scales [experts, out, groups] by Hugging Face's name."""

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "head_dim": 16}),
    "lfm2": ("lfm2", {**LFM2, "block_multiple_of": 16}),
    "lfm2_moe": ("lfm2moe", {**LFM2, **EXPERTS, "num_dense_layers": 1}),
    "gpt_oss": (
        "gpt-oss",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
}


def make(family: str, overrides: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**(COMMON | overrides)))
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.normal_()
    return model.float()


def as_converted(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What converters make of a state dict: experts stacked [experts, out, in], gates and ups
    apart."""
    for name, value in state.items():
        base, _, part = name.rpartition("experts.")
        if part.startswith("gate_up_proj") and "mlp" in base:  # gpt-oss: alternating columns
            rows = value if part.endswith("bias") else value.transpose(1, 2)
            yield f"{base}experts.gate_proj{part[12:].replace('_', '.')}", rows[:, ::2]
            yield f"{base}experts.up_proj{part[12:].replace('_', '.')}", rows[:, 1::2]
        elif part.startswith("gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            yield f"{base}experts.gate_proj", gate
            yield f"{base}experts.up_proj", up
        elif part == "down_proj":
            yield name, value.transpose(1, 2) if "mlp" in base else value
        elif part == "down_proj_bias":
            yield f"{base}experts.down_proj.bias", value
        else:
            yield name, value.squeeze(1) if "conv.conv" in name else value


def gguf_tensor_name(names: gguf.TensorNameMap, name: str) -> str:
    base, _, part = name.rpartition("experts.")
    stacked = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
    stem = part.partition(".")[0]
    if base and stem in stacked:
        layer = base.split(".")[2]
        return f"blk.{layer}.{stacked[stem]}" + (".bias" if part.endswith(".bias") else ".weight")
    own = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert own is not None, name
    endings = {"exp_probs_b": ".bias", "attn_sinks": ".weight"}
    return str(own) + endings.get(str(own).rpartition(".")[2], "")


def gguf_blocks(packed: Mxfp4, layer: int, part: str) -> npt.NDArray[np.uint8]:
    """[experts, out, bytes]: a scale, then 16 bytes whose low halves are the first 16 numbers."""
    prefix = f"model.layers.{layer}.mlp.experts."
    name = prefix + ("down_proj" if part == "down" else "gate_up_proj")
    rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
    blocks, scales = (each[:, rows] for each in packed[name])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(3)
    data = torch.cat([scales[..., None], codes[..., :16] | (codes[..., 16:] << 4)], dim=-1)
    return np.ascontiguousarray(data.flatten(2).numpy())


def write_metadata(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    writer.add_eos_token_id(2)
    if "lfm2" in family:
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
        writer.add_shortconv_l_cache(3)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
    if family == "lfm2":  # the adjusted width
        writer.add_feed_forward_length(32)
    if family == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if family in ("lfm2_moe", "gpt_oss"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)


def write(
    path: Path,
    architecture: str,
    model: Any,
    family: str,
    packed: Mxfp4 | None = None,
    blocks: gguf.GGMLQuantizationType | None = None,
) -> None:
    """`blocks`: what matrices of layers are quantised to."""
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, model.config, family)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, value in as_converted(state):
        own = gguf_tensor_name(names, name)
        if packed is not None and own.endswith("_exps.weight"):
            part = own.split("_")[1]
            raw = gguf_blocks(packed, int(own.split(".")[1]), part)
            writer.add_tensor(own, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        numbers = np.ascontiguousarray(value.numpy())
        is_matrix = value.dim() > 1 and "ffn_gate_inp" not in own and "shortconv.conv" not in own
        if blocks is not None and is_matrix:
            writer.add_tensor(own, gguf.quants.quantize(numbers, blocks), raw_dtype=blocks)
            continue
        writer.add_tensor(own, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(value: Any) -> Any:
    """Plain values; numbers as GGUF keeps them, in float32."""
    value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_agree(family: str, tmp_path: Path, load: Load) -> None:
    architecture, overrides = FAMILIES[family]
    model = make(family, overrides)
    folder = tmp_path / "safetensors"
    path = tmp_path / "model.gguf"
    model.save_pretrained(folder)
    write(path, architecture, model, family)
    ours = load(f"file://{path}")
    theirs = load(f"file://{folder}")
    assert rounded(ours.model_config) == rounded(theirs.model_config)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_experts_are_kept(kind: str, tmp_path: Path, load: Load) -> None:
    """So that the C++ library computes such a model, with the numbers that the file has."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_intermediate_size": 32, "intermediate_size": 64}
    model = make("lfm2_moe", FAMILIES["lfm2_moe"][1] | sizes | experts)
    path = tmp_path / "model.gguf"
    write(path, "lfm2moe", model, "lfm2_moe", blocks=gguf.GGMLQuantizationType[kind])
    ours, plain = (load(f"file://{path}", quantization=each) for each in ("auto", "none"))
    assert ours.encodings["layers.2.experts_down"].shape == (4 * 64, 32)
    if instruction_set() is None:
        pytest.skip("the library cannot be used here")
    assert library_refusal(ours, LIMITS, CPU, torch.float32) == ""
    for name in ours.encodings:
        if name.startswith("layers."):
            weights = unpack(ours.packed(name)).dequantise()
            expected = plain.tensors[name].flatten(0, -2)
            assert torch.allclose(weights, expected, rtol=2e-3, atol=1e-3), name


def test_packed_experts_agree(
    tmp_path: Path, load: Load, save_mxfp4: Callable[[Any, Path, int], Mxfp4]
) -> None:
    model = make("gpt_oss", FAMILIES["gpt_oss"][1] | {"intermediate_size": 64})
    folder = tmp_path / "safetensors"
    path = tmp_path / "model.gguf"
    packed = save_mxfp4(model, folder, 20_261)
    write(path, "gpt-oss", model, "gpt_oss", packed)
    ours = load(f"file://{path}")
    theirs = load(f"file://{folder}")
    assert ours.encodings == theirs.encodings
    assert {each.format for each in ours.encodings.values()} == {"mxfp4"}
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name


def test_packed_experts_are_not_rounded_again(
    tmp_path: Path, save_mxfp4: Callable[[Any, Path, int], Mxfp4]
) -> None:
    model = make("gpt_oss", FAMILIES["gpt_oss"][1] | {"intermediate_size": 64})
    packed = save_mxfp4(model, tmp_path / "safetensors", 1)
    path = tmp_path / "model.gguf"
    write(path, "gpt-oss", model, "gpt_oss", packed)
    section = ModelSection(source=f"file://{path}", name="m", quantization="int4")
    with pytest.raises(WeightsError, match=r"model\.quantization int4: .* mxfp4 already; set none"):
        load_weights(section, CPU, torch.float32, tmp_path, lambda done, total: None)
