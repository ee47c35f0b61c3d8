"""Rules for GGUF metadata keys that affect a model's computation, and their config.json names.

In a file, each of these keys has the architecture's name as a prefix, which is omitted here. Other
keys, such as those that begin with `general.` or `tokenizer.`, do not describe layers.
"""

from collections.abc import Mapping

from ullage_engine.model_config.keys import Key, fixed, harmless, read

GGUF_NAMES: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "sliding_window": "attention.sliding_window",
}
"""Maps config.json keys to GGUF metadata keys."""

SIGMOID = 2
"""Value of llama.cpp's `expert_gating_func` key that selects a sigmoid, as in LFM2."""

_SOFTMAX_OF_CHOSEN = 3
"""Value of llama.cpp's `expert_gating_func` key that selects a softmax over the chosen experts."""

_COMMON: dict[str, Key] = {
    **read("as config.json's key of the same meaning", *GGUF_NAMES.values()),
    **read("heads of keys and values, or those of each layer", "attention.head_count_kv"),
    **read("scaling of positions: none, linear, yarn", "rope.scaling.type"),
    **read("factor by which the context was extended", "rope.scaling.factor"),
    **read("context before it was extended", "rope.scaling.original_context_length"),
    **read("bounds of YaRN's ramp, in turns", "rope.scaling.yarn_beta_fast"),
    **read("bounds of YaRN's ramp, in turns", "rope.scaling.yarn_beta_slow"),
    **read("a linear scaling in its old spelling", "rope.scale_linear"),
    **read("has to be the width of a head", "rope.dimension_count", "attention.value_length"),
    **harmless("the embedding says it", "vocab_size"),
    **harmless("where the file comes from", "rope.scaling.finetuned", "tensor_data_layout"),
    **harmless("for embedders only", "pooling_type"),
    **fixed("factor of YaRN's factor", (1.0,), "rope.scaling.attn_factor"),
    **fixed("factor of YaRN's factor", (1.0,), "rope.scaling.yarn_attn_factor"),
    **fixed("weight of YaRN", (1.0,), "rope.scaling.yarn_ext_factor"),
    **fixed("factor of YaRN's factor", (0.0,), "rope.scaling.yarn_log_multiplier"),
    **fixed("whether a token sees those before it alone", (True,), "attention.causal"),
    **fixed("other positions", (0.0,), "attention.max_alibi_bias"),
    **fixed(
        "limits of scores",
        (0.0,),
        *("attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping"),
        *("attention.scale",),
    ),
    **fixed("multipliers", (1.0,), "logit_scale", "residual_scale", "embedding_scale"),
    **fixed("parts that these models do not have", (False,), "use_parallel_residual"),
    **fixed("parts that these models do not have", (0,), "expert_shared_count"),
    **fixed("groups of experts", (0, 1), "expert_group_count", "expert_group_used_count"),
}

_DENSE = {
    **_COMMON,
    **fixed("experts, which these models do not have", (0,), "expert_count", "expert_used_count"),
}

GGUF_KEYS: Mapping[str, dict[str, Key]] = {
    "llama": _DENSE | fixed("tokens that a layer sees", (0,), "attention.sliding_window"),
    "qwen3": _DENSE | fixed("tokens that a layer sees", (0,), "attention.sliding_window"),
    "lfm2": _DENSE | fixed("tokens that a layer sees", (0,), "attention.sliding_window"),
    "lfm2moe": {
        **_COMMON,
        **fixed("tokens that a layer sees", (0,), "attention.sliding_window"),
        **fixed("how experts are scored: by sigmoids", (SIGMOID,), "expert_gating_func"),
    },
    "gpt-oss": {
        **_COMMON,
        **fixed(
            "how experts are scored: by a softmax over those chosen",
            (_SOFTMAX_OF_CHOSEN,),
            "expert_gating_func",
        ),
        **fixed(
            "every how many layers there is no window", (2,), "attention.sliding_window_pattern"
        ),
    },
}
"""Rules for GGUF metadata keys, by architecture."""


def own_keys(metadata: Mapping[str, object], architecture: str) -> dict[str, object]:
    """Return the metadata whose keys begin with the architecture's name, without this prefix.

    These keys describe the model's layers. For example, `llama.block_count` becomes `block_count`.
    """
    prefix = f"{architecture}."
    return {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
