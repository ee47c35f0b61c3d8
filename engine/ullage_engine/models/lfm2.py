"""LFM2 and its mixtures of experts: most layers mix by a gated short convolution, some attend.

x += mixer(norm(x)); x += feed_forward(norm(x)), where the mixer is attention with normalised heads
or the convolution

B, C, u = in(x);  y_t = C_t · Σ_j w_j (B·u)_{t-j};  conv(x) = out(y)

and the feed-forward is down(silu(gate x) · up x), or from layer `num_dense_layers` on the sum of
four experts, chosen by sigmoid(router x) + bias and weighed by their normalised sigmoids.
"""

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.geometry import ExpertsSpec, LayerSpec, ModelGeometry
from ullage_engine.models.rope import read_rope
from ullage_engine.weights.errors import WeightsError


def lfm2(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """A dense LFM2 from its config.json."""
    return _geometry(config, "lfm2", eos_token_ids, _adjusted_width(config), None)


def lfm2_moe(config: ModelConfig, eos_token_ids: list[int]) -> ModelGeometry:
    """An LFM2 with experts from its config.json."""
    config.require(use_expert_bias=True)
    experts = ExpertsSpec(
        num_experts=config.int("num_experts"),
        experts_per_token=config.int("num_experts_per_tok"),
        intermediate=config.int("moe_intermediate_size"),
        scoring="sigmoid",
        is_normalised=config.bool("norm_topk_prob", True),
        scale=config.float("routed_scaling_factor", 1.0),
    )
    return _geometry(config, "lfm2_moe", eos_token_ids, config.int("intermediate_size"), experts)


def _geometry(
    config: ModelConfig,
    architecture: str,
    eos_token_ids: list[int],
    intermediate: int,
    experts: ExpertsSpec | None,
) -> ModelGeometry:
    config.require(conv_bias=False)
    hidden, heads = config.int("hidden_size"), config.int("num_attention_heads")
    head_dim = config.int("head_dim", hidden // heads)
    rope = read_rope(config, head_dim, theta=1e6)
    tied = config.bool("tie_embedding", config.bool("tie_word_embeddings", True))
    return ModelGeometry(
        architecture=architecture,
        layers=tuple(_layers(config, experts)),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.int("num_key_value_heads", 8),
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=config.int("vocab_size"),
        max_position=config.int("max_position_embeddings"),
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_scale=rope.scale,
        rms_eps=config.float("norm_eps", 1e-5),
        tied=tied,
        eos_token_ids=eos_token_ids,
        has_qk_norm=True,
        conv_kernel=config.int("conv_L_cache", 3),
        conv_channels=hidden,
        experts=experts,
    )


def _layers(config: ModelConfig, experts: ExpertsSpec | None) -> list[LayerSpec]:
    count = config.int("num_hidden_layers")
    num_dense = config.int("num_dense_layers", 2) if experts else count
    return [
        LayerSpec(
            mixer="attention" if attends else "conv",
            feed_forward="dense" if index < num_dense else "experts",
        )
        for index, attends in enumerate(_attends(config, count))
    ]


def _attends(config: ModelConfig, count: int) -> list[bool]:
    """Which layers attend, from either spelling of the configuration."""
    types = config.list("layer_types")
    if types is None:
        indices = config.list("full_attn_idxs")
        return [indices is None or index in indices for index in range(count)]
    if len(types) != count or not {"full_attention", "conv"}.issuperset(map(str, types)):
        raise WeightsError(
            f"{config.path}: layer_types is {types!r}, not one full_attention or conv for each of "
            f"{count} layers; use another model"
        )
    return [kind == "full_attention" for kind in types]


def _adjusted_width(config: ModelConfig) -> int:
    """Width of the feed-forward layers: two thirds of what is configured, in whole multiples."""
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
