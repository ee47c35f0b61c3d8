"""gpt-oss: x += attention(norm(x)); x += experts(norm(x)), in every layer.

Every other layer sees a window of 128 tokens. Each head's softmax has one more entry, a learned
sink, whose share is given to nothing. Of the experts the four with the largest logits are weighed
by a softmax over those four; an expert is

down((up' + 1) · g · sigmoid(1.702 g)),  g = min(gate x, 7),  up' = clamp(up x, -7, 7)

and all of its products, like those of attention, add a bias.
"""

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.geometry import ExpertsSpec, LayerSpec, ModelGeometry
from ullage_engine.models.rope import read_rope
from ullage_engine.weights.errors import WeightsError


def gpt_oss(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """A gpt-oss from its config.json."""
    config.require(attention_bias=True, hidden_act="silu", swiglu_limit=7.0, swiglu_alpha=1.702)
    head_dim = config.int("head_dim")
    width = config.int("intermediate_size")
    rope = read_rope(config, head_dim, theta=150_000.0)
    return ModelGeometry(
        architecture="gpt_oss",
        layers=tuple(_layers(config)),
        hidden=config.int("hidden_size"),
        num_heads=config.int("num_attention_heads"),
        num_kv_heads=config.int("num_key_value_heads"),
        head_dim=head_dim,
        intermediate=width,
        vocab=config.int("vocab_size"),
        max_position=config.int("max_position_embeddings"),
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_scale=rope.scale,
        rms_eps=config.float("rms_norm_eps"),
        tied=config.bool("tie_word_embeddings", False),
        eos_token_ids=eos_token_ids,
        has_attention_bias=True,
        has_sinks=True,
        experts=ExpertsSpec(
            num_experts=config.int("num_local_experts"),
            experts_per_token=config.int("num_experts_per_tok"),
            intermediate=width,
            scoring="softmax",
            is_biased=True,
        ),
    )


def _layers(config: ModelConfig) -> list[LayerSpec]:
    count, window = config.int("num_hidden_layers"), config.int("sliding_window")
    types = config.list("layer_types")
    if types is None:
        types = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    windows = {"full_attention": 0, "sliding_attention": window}
    if len(types) != count or not windows.keys() >= set(map(str, types)):
        raise WeightsError(
            f"{config.path}: layer_types is {types!r}, not one full_attention or "
            f"sliding_attention for each of {count} layers; use another model"
        )
    return [LayerSpec(window=windows[str(kind)], feed_forward="experts") for kind in types]
