"""Llama, SmolLM2 and Qwen3: x += attention(norm(x)); x += mlp(norm(x)), in every layer.

attention(x) = softmax(rotate(Q) rotate(K)ᵀ / √d) V, causal, with grouped KV heads
mlp(x) = down(silu(gate x) · up x)

Qwen3 also normalises each head of Q and K before it is rotated.
"""

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.geometry import LayerSpec, ModelGeometry
from ullage_engine.models.rope import read_rope
from ullage_engine.weights.errors import WeightsError


def llama(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """A Llama from its config.json."""
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False)
    return _geometry(config, "llama", eos_token_ids, has_qk_norm=False)


def qwen3(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """A dense Qwen3 from its config.json."""
    config.require(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    kinds = config.list("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise WeightsError(
            f"{config.path}: layer_types is {kinds!r}, but only full_attention is supported in "
            "Qwen3; use another model"
        )
    return _geometry(config, "qwen3", eos_token_ids, has_qk_norm=True)


def _geometry(
    config: ModelConfig, architecture: str, eos_token_ids: list[int], has_qk_norm: bool
) -> ModelGeometry:
    hidden, heads = config.int("hidden_size"), config.int("num_attention_heads")
    head_dim = config.int("head_dim", hidden // heads)
    rope = read_rope(config, head_dim)
    return ModelGeometry(
        architecture=architecture,
        layers=(LayerSpec(),) * config.int("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.int("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=config.int("intermediate_size"),
        vocab=config.int("vocab_size"),
        max_position=config.int("max_position_embeddings"),
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_scale=rope.scale,
        rms_eps=config.float("rms_norm_eps"),
        tied=config.bool("tie_word_embeddings", False),
        eos_token_ids=eos_token_ids,
        has_qk_norm=has_qk_norm,
    )
