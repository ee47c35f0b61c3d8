"""Published configurations give the sizes that their models are known to have."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.registry import FAMILIES, read_model_config
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.errors import WeightsError

LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "conv_L_cache": 3,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-5,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "tie_embedding": True,
}
LFM2_8B_A1B: dict[str, Any] = {
    "model_type": "lfm2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": [
        "full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)
    ],
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
YARN = {"original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[dict[str, Any], float, int, int]] = {
    "LFM2-350M": (
        LFM2 | {"hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656},
        354.4e6,
        12_288,
        40_960,
    ),
    "LFM2-1.2B": (
        LFM2
        | {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "block_ff_dim": 12288,
            "intermediate_size": 8192,
        },
        1.170e9,
        12_288,
        81_920,
    ),
    "LFM2-2.6B": (
        LFM2
        | {
            "num_hidden_layers": 30,
            "full_attn_idxs": [2, 5, 9, 13, 17, 21, 24, 27],
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "intermediate_size": 10752,
            "block_auto_adjust_ff_dim": False,
        },
        2.57e9,
        16_384,
        180_224,
    ),
    "LFM2-8B-A1B": (LFM2_8B_A1B, 8_339_828_736, 12_288, 147_456),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        0.596e9,
        114_688,
        0,
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
        },
        8.03e9,
        131_072,
        0,
    ),
    "gpt-oss-20b": (GPT_OSS_20B, 20.9e9, 49_152, 0),
}
"""config.json, parameters, KV bytes a token and state bytes a sequence in bfloat16."""


def read(values: dict[str, Any]) -> ModelConfig:
    return read_model_config(HFConfig(Path("config.json"), values))


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name: str) -> None:
    values, parameters, kv_bytes, state_bytes = MODELS[name]
    model_config = read(values)
    planned = sum(math.prod(plan.shape) for plan in plan_tensors(model_config))
    assert planned == pytest.approx(parameters, rel=2e-3)
    assert model_config.kv_bytes_per_token(2) == kv_bytes
    assert model_config.state_bytes(2) == state_bytes


def test_what_replaying_costs() -> None:
    assert read(LFM2_8B_A1B).replay_tokens == 36
    assert read(MODELS["LFM2-350M"][0]).replay_tokens == 20
    assert read(GPT_OSS_20B).replay_tokens == 0


def test_a_factor_of_one_that_other_engines_have_changes_nothing() -> None:
    scaling = {**GPT_OSS_20B["rope_scaling"], "attn_factor": 1.0}
    assert read(GPT_OSS_20B | {"rope_scaling": scaling}) == read(GPT_OSS_20B)
    with pytest.raises(WeightsError, match=r"rope_scaling.attn_factor is 2.0"):
        read(GPT_OSS_20B | {"rope_scaling": scaling | {"attn_factor": 2.0}})


def test_gpt_oss_alternates_windows() -> None:
    model_config = read(GPT_OSS_20B)
    assert [layer.window for layer in model_config.layers[:3]] == [128, 0, 128]
    assert model_config.rope_scale == pytest.approx(1.3466, abs=1e-4)


@pytest.mark.parametrize("changes", [{"architectures": ["Lfm2ForSequenceClassification"]}])
def test_another_architecture_is_refused_with_those_known(changes: dict[str, Any]) -> None:
    with pytest.raises(WeightsError) as caught:
        read(MODELS["LFM2-350M"][0] | changes)
    message = str(caught.value)
    assert "Lfm2ForSequenceClassification" in message
    assert all(family.architecture in message for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": ["conv"] * 3}, "layer_types"),
        ({"layer_types": ["mamba"] * 24}, "layer_types"),
        ({"use_expert_bias": False}, "use_expert_bias"),
        ({"conv_bias": True}, "conv_bias"),
        ({"block_dim": 40}, "block_dim is 40, but hidden_size is 2048"),
        ({"theta": 1e4}, "remove theta"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"layer_types": "conv"}, "not a list"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(WeightsError, match=word):
        read(LFM2_8B_A1B | changes)


def test_configurations_are_what_files_hold() -> None:
    assert all(json.loads(json.dumps(values)) == values for values, *_ in MODELS.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "contradict"),
        ({"num_hidden_layers": 0}, "number of layers is 0"),
        ({"hidden_size": -64, "head_dim": 64}, "hidden size is -64"),
        ({"num_key_value_heads": 5}, "32 heads cannot share 5 KV heads"),
        ({"head_dim": 15}, "head size is 15"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.0} | YARN}, "factor .* is 0.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor .* is -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "alpha": 1.0}}, "alpha 1.0 is not"),
        ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "rope_scaling.factor 8.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "same positions"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA3}, "remove rope_scaling"),
        ({"theta": 1e4}, "theta 10000.0 is not known"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "contradict"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32}, "no window"),
        ({"model_type": "qwen3", "layer_types": ["conv"] * 32}, "full_attention"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "new": 1}}, "config.new 1"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "config.version"),
    ],
)
def test_nonsense_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        read(MODELS["Llama-3.1-8B"][0] | changes)


def test_more_experts_than_there_are() -> None:
    with pytest.raises(WeightsError, match="40 experts of 32"):
        read(LFM2_8B_A1B | {"num_experts_per_tok": 40})


def test_a_null_multiplier_leaves_the_width_alone() -> None:
    values = MODELS["LFM2-350M"][0]
    assert read(values).intermediate == 4608
    assert read(values | {"block_ffn_dim_multiplier": None}).intermediate == 4437


def test_an_unknown_key_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    values = LFM2_8B_A1B | {"surprise": 5, "quantization_config": {"quant_method": "mxfp4", "x": 1}}
    allowed = HFConfig(Path("config.json"), values, allows_unknown=True)
    assert read_model_config(allowed) == read(LFM2_8B_A1B)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "surprise 5 is not known here" in warnings[0]
    assert "quantization_config.x 1 is not known here" in warnings[1]


def test_what_is_known_to_change_numbers_is_never_allowed() -> None:
    values = LFM2_8B_A1B | {"logits_scaling": 8.0}
    with pytest.raises(WeightsError, match=r"logits_scaling is 8\.0, but only 1 is"):
        read_model_config(HFConfig(Path("config.json"), values, allows_unknown=True))


def test_longrope_serves_the_original_context_alone_where_longer_ones_differ() -> None:
    def longest(long_factor: list[float]) -> int:
        scaling = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": long_factor}
        own = {"original_max_position_embeddings": 4096}
        values = MODELS["Llama-3.1-8B"][0] | {"rope_scaling": scaling} | own
        return read(values).max_position

    assert longest([2.0] * 64) == 4096
    assert longest([1.0] * 64) == 131072
