"""The supported model families: readers for their config.json, and their tensor names.

Llama, SmolLM2 and Qwen3: x += attention(norm(x)); x += mlp(norm(x)), in every layer, with

attention(x) = softmax(rotate(Q) rotate(K)ᵀ / √d) V, causal, with grouped KV heads
mlp(x) = down(silu(gate x) · up x)

Qwen3 also normalises each head of Q and K before rotation.

LFM2, dense and mixture-of-experts: most layers use a gated short convolution, the others use
attention.

x += mixer(norm(x)); x += feed_forward(norm(x)), where the mixer is attention with normalised heads
or the convolution

B, C, u = in(x);  y_t = C_t · Σ_j w_j (B·u)_{t-j};  conv(x) = out(y)

and the feed-forward is down(silu(gate x) · up x). In mixture-of-experts models, the layers from
`num_dense_layers` on sum the outputs of four experts instead. These are selected by
sigmoid(router x) + bias and weighted by their normalised sigmoids.

gpt-oss: x += attention(norm(x)); x += experts(norm(x)), in every layer. Every other layer attends
to a window of 128 tokens. Each head's softmax includes one additional logit, a learned attention
sink without a value vector. The four experts with the largest logits are weighted by a softmax over
these four logits. An expert computes

down((up' + 1) · g · sigmoid(1.702 g)),  g = min(gate x, 7),  up' = clamp(up x, -7, 7)

and all of its projections have a bias, as do those of attention.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ullage_engine.model_config.family_keys import FAMILY_KEYS
from ullage_engine.model_config.hf_config import HFConfig, Json
from ullage_engine.model_config.keys import check_keys
from ullage_engine.model_config.model_config import (
    ExpertsSpec,
    LayerSpec,
    ModelConfig,
    contradiction,
)
from ullage_engine.model_config.quantization_keys import QUANTIZATION_KEYS
from ullage_engine.model_config.rope import read_rope
from ullage_engine.protocol.errors import WeightsError

_GPT_OSS_ROPE: Json = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Position scaling for gpt-oss models whose config.json does not define any."""

_OLD_KINDS = {"attention": "full_attention"}
"""Maps layer types in older config.json files to their current names."""

_LFM2_TIE_KEYS = ("tie_embedding", "tie_word_embeddings")
"""Keys in LFM2's config.json that say whether the output projection is tied to the embedding."""

_GGUF_MODEL_TYPES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "gpt-oss": "gpt_oss",
}
"""Maps architecture names in GGUF files to values of `model_type`."""


@dataclass(frozen=True, slots=True)
class Names:
    """Hugging Face's tensor names, without `model.layers.N.` and `.weight`."""

    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    conv: str = "conv.conv"
    conv_in: str = "conv.in_proj"
    conv_out: str = "conv.out_proj"
    router: str = "feed_forward.gate"
    router_bias: str = "feed_forward.expert_bias"
    """Full name of the router's bias within a layer. No suffix is added."""
    expert: str = "feed_forward.experts.{}."
    """Prefix of an expert's tensor names, or an empty string if a single tensor holds all experts.

    The full name consists of this prefix and the last component of `gate`, `up` or `down`.
    """
    norm: str = "model.norm"
    """Full name of the norm after the last layer, without `.weight`."""


LLAMA = Names()

LFM2 = replace(
    LLAMA,
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    norm="model.embedding_norm",
)

GPT_OSS = replace(LLAMA, router="mlp.router", router_bias="mlp.router.bias", expert="")


def _model_config(
    config: HFConfig,
    *,
    layers: Iterable[LayerSpec],
    intermediate: int,
    rms_eps: float,
    head_dim: int | None = None,
    rope_theta: float = 10_000.0,
    rope_default: Json | None = None,
    **own: Any,
) -> ModelConfig:
    """Create a `ModelConfig` from the config.json keys that all families have in common.

    Args:
        config: the config.json.
        layers: the specification of each layer.
        intermediate: width of a dense feed-forward layer.
        rms_eps: epsilon of the norms.
        head_dim: the family's default width of a head.
        rope_theta: the family's default base of the rotary frequencies.
        rope_default: the family's default position scaling.
        own: family-specific values for fields of `ModelConfig`, which override the common ones.
    """
    hidden = config.int("hidden_size")
    heads = config.int("num_attention_heads")
    head_dim = config.int("head_dim", hidden // heads if head_dim is None else head_dim)

    default = None if rope_default is None else HFConfig(config.path, rope_default)
    rope = read_rope(config, head_dim, rope_theta, default)
    max_position = config.int("max_position_embeddings")

    fields = {
        "num_kv_heads": config.int("num_key_value_heads", heads),
        "tied": bool(tie(config)),
        **own,
    }
    return ModelConfig(
        architecture=str(config.get("model_type")),
        layers=tuple(layers),
        hidden=hidden,
        num_heads=heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=config.int("vocab_size"),
        max_position=max_position if rope.longest is None else rope.longest,
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_scale=rope.scale,
        rms_eps=rms_eps,
        **fields,
    )


def llama(config: HFConfig) -> ModelConfig:
    """Read a Llama model's config.json."""
    kinds = _layer_kinds(config, {"full_attention"})
    return _llama_config(config, [0] * len(kinds), has_qk_norm=False)


def qwen3(config: HFConfig) -> ModelConfig:
    """Read a dense Qwen3 model's config.json."""
    window = _window(config, 4096) if config.bool("use_sliding_window", False) else None
    first = config.int("max_window_layers", 28)
    windows = _layer_windows(
        config,
        window,
        lambda index: "full_attention" if window is None or index < first else "sliding_attention",
    )
    return _llama_config(config, windows, has_qk_norm=True, head_dim=128)


def _llama_config(config: HFConfig, windows: Iterable[int], **own: Any) -> ModelConfig:
    return _model_config(
        config,
        layers=[LayerSpec(window=window) for window in windows],
        intermediate=config.int("intermediate_size"),
        rms_eps=config.float("rms_norm_eps", 1e-6),
        has_attention_bias=config.bool("attention_bias", False),
        **own,
    )


def _layer_kinds(
    config: HFConfig, served: set[str], kind_of: Callable[[int], str] = lambda _: "full_attention"
) -> list[str]:
    """Return each layer's type, as listed in `layer_types` or else derived from the layer's index.

    Raises:
        WeightsError: if `layer_types` does not assign a supported type to each layer.
    """
    count = config.int("num_hidden_layers")
    given = config.list("layer_types")
    if given is None:
        return [kind_of(index) for index in range(count)]

    kinds = [_OLD_KINDS.get(str(kind), str(kind)) for kind in given]
    if len(kinds) != count or not served.issuperset(kinds):
        raise WeightsError(
            f"{config.path}: layer_types is {given!r}, not one of {', '.join(sorted(served))} for "
            f"each of {count} layers; use another model"
        )
    return kinds


def _window(config: HFConfig, default: int) -> int | None:
    """Return the value of `sliding_window` in tokens, or None if the key is present but null."""
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None
    window = config.int("sliding_window", default)
    if window < 1:
        raise WeightsError(
            f"{config.path}: sliding_window is {window}, not at least 1; download the model again"
        )
    return window


def _layer_windows(
    config: HFConfig, window: int | None, kind_of: Callable[[int], str]
) -> list[int]:
    """Return each layer's sliding window in tokens, or 0 if the layer attends to all tokens."""
    kinds = _layer_kinds(config, {"full_attention", "sliding_attention"}, kind_of)
    if window is None and "sliding_attention" in kinds:
        raise WeightsError(
            f"{config.path}: layers are sliding_attention, but use_sliding_window or "
            "sliding_window gives them no window; download the model again"
        )
    return [(window or 0) * (kind == "sliding_attention") for kind in kinds]


def lfm2(config: HFConfig) -> ModelConfig:
    """Read a dense LFM2 model's config.json."""
    return _lfm2_config(config, _lfm2_adjusted_width(config), None)


def lfm2_moe(config: HFConfig) -> ModelConfig:
    """Read an LFM2 mixture-of-experts model's config.json."""
    experts = ExpertsSpec(
        num_experts=config.int("num_experts"),
        experts_per_token=config.int("num_experts_per_tok"),
        intermediate=config.int("moe_intermediate_size"),
        scoring="sigmoid",
        is_normalised=config.bool("norm_topk_prob", True),
        scale=config.float("routed_scaling_factor", 1.0),
    )
    return _lfm2_config(config, config.int("intermediate_size"), experts)


def _lfm2_config(config: HFConfig, intermediate: int, experts: ExpertsSpec | None) -> ModelConfig:
    model_config = _model_config(
        config,
        layers=_lfm2_layers(config, experts),
        intermediate=intermediate,
        rms_eps=config.float("norm_eps", 1e-5),
        rope_theta=1e6,
        num_kv_heads=config.int("num_key_value_heads", 8),
        has_qk_norm=True,
        conv_kernel=config.int("conv_L_cache", 3),
        conv_channels=config.int("hidden_size"),
        experts=experts,
    )

    theta = config.float("theta", model_config.rope_theta)
    if theta != model_config.rope_theta:
        raise WeightsError(
            f"{config.path}: theta is {theta!r}, but the base of positions is "
            f"{model_config.rope_theta!r}; give rope_theta the value that the model was trained "
            "with, and remove theta"
        )
    return model_config


def _lfm2_layers(config: HFConfig, experts: ExpertsSpec | None) -> list[LayerSpec]:
    count = config.int("num_hidden_layers")
    num_dense = config.int("num_dense_layers", 2) if experts else count
    return [
        LayerSpec(
            mixer="attention" if attends else "conv",
            feed_forward="dense" if index < num_dense else "experts",
        )
        for index, attends in enumerate(_lfm2_attends(config))
    ]


def _lfm2_attends(config: HFConfig) -> list[bool]:
    """Return one flag per layer: True for attention, False for a convolution.

    The configuration lists either the types of all layers or the indices of the attention layers.
    """
    indices = config.list("full_attn_idxs")
    kinds = _layer_kinds(
        config,
        {"full_attention", "conv"},
        lambda index: "full_attention" if indices is None or index in indices else "conv",
    )
    return [kind == "full_attention" for kind in kinds]


def _lfm2_adjusted_width(config: HFConfig) -> int:
    """Return the width of feed-forward layers.

    The width is two thirds of the configured width, multiplied by `block_ffn_dim_multiplier` and
    rounded up to a multiple of `block_multiple_of`. If `block_auto_adjust_ff_dim` is false, the
    configured width is used unchanged.
    """
    given = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    width = config.int(given)
    if not config.bool("block_auto_adjust_ff_dim", True):
        return width

    width = int(2 * width / 3)
    if config.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return width

    width = int(config.float("block_ffn_dim_multiplier", 1.0) * width)
    multiple = config.int("block_multiple_of", 256)
    return -(-width // multiple) * multiple


def gpt_oss(config: HFConfig) -> ModelConfig:
    """Read a gpt-oss model's config.json."""
    width = config.int("intermediate_size")
    return _model_config(
        config,
        layers=_gpt_oss_layers(config),
        intermediate=width,
        rms_eps=config.float("rms_norm_eps", 1e-5),
        head_dim=64,
        rope_theta=150_000.0,
        rope_default=_GPT_OSS_ROPE,
        num_kv_heads=config.int("num_key_value_heads", 8),
        has_attention_bias=config.bool("attention_bias", True),
        has_sinks=True,
        experts=ExpertsSpec(
            num_experts=config.int("num_local_experts"),
            experts_per_token=config.int("num_experts_per_tok"),
            intermediate=width,
            scoring="softmax",
            is_biased=True,
        ),
    )


def _gpt_oss_layers(config: HFConfig) -> list[LayerSpec]:
    windows = _layer_windows(
        config,
        _window(config, 128),
        lambda index: "full_attention" if index % 2 else "sliding_attention",
    )
    return [LayerSpec(window=window, feed_forward="experts") for window in windows]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family's config.json reader and tensor names, which are used to read checkpoints."""

    architecture: str
    """Name of the family's class in the `architectures` key of config.json."""
    read: Callable[[HFConfig], ModelConfig]
    names: Names
    is_tied: bool = False
    """Whether the output projection shares the embedding's weights by default."""
    tie_keys: tuple[str, ...] = ("tie_word_embeddings",)
    """Keys in config.json that define weight tying. The first one that is present is used."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama, LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", qwen3, LLAMA),
    "lfm2": Family("Lfm2ForCausalLM", lfm2, LFM2, is_tied=True, tie_keys=_LFM2_TIE_KEYS),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", lfm2_moe, LFM2, is_tied=True, tie_keys=_LFM2_TIE_KEYS),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, GPT_OSS),
}


def gguf_model_type(path: Path, architecture: object) -> str:
    """Return the `model_type` that corresponds to a GGUF file's architecture.

    Raises:
        WeightsError: if the architecture is not supported.
    """
    model_type = _GGUF_MODEL_TYPES.get(architecture) if isinstance(architecture, str) else None
    if model_type is None:
        raise WeightsError(
            f"{path}: architecture {architecture!r} is not supported; "
            f"use a model of {', '.join(sorted(_GGUF_MODEL_TYPES))}"
        )
    return model_type


def tie(config: HFConfig) -> bool | None:
    """Return whether the output projection shares the embedding's weights.

    Return None if the configuration does not specify weight tying and the family is unknown.

    Raises:
        WeightsError: if the value is neither true nor false.
    """
    name = config.values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    for key in family.tie_keys if family else ("tie_word_embeddings",):
        if config.get(key) is not None:
            return config.bool(key, False)
    return family.is_tied if family else None


def read_model_config(config: HFConfig) -> ModelConfig:
    """Return the `ModelConfig` that a config.json describes.

    Raises:
        WeightsError: if its architecture is unknown, or a value is missing or not supported.
    """
    name = config.values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise WeightsError(
            f"{config.path}: model_type {name!r} is not supported; "
            f"use a model of {', '.join(sorted(FAMILIES))}"
        )

    architectures = config.list("architectures")
    # A classifier or an embedding model of the same family has other outputs.
    if architectures is not None and family.architecture not in architectures:
        served = ", ".join(sorted(each.architecture for each in FAMILIES.values()))
        raise WeightsError(
            f"{config.path}: architectures {architectures!r} are not supported; use a model of "
            f"{served}"
        )

    check_keys(config, FAMILY_KEYS[str(name)])
    quantization = config.section("quantization_config")
    method = quantization.get("quant_method")
    # The loader refuses other methods by name.
    if isinstance(method, str) and method in QUANTIZATION_KEYS:
        check_keys(quantization, QUANTIZATION_KEYS[method], "quantization_config.")

    try:
        model_config = family.read(config)
    except (ArithmeticError, ValueError) as error:
        raise WeightsError(
            f"{config.path}: its numbers contradict one another ({error}); download the model again"
        ) from error

    wrong = contradiction(model_config)
    if wrong:
        raise WeightsError(f"{config.path}: {wrong}; download the model again")
    return model_config
