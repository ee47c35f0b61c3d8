"""Rules for the keys in each model family's config.json (see `ullage_engine.model_config.keys`)."""

from ullage_engine.model_config.keys import Key, fixed, harmless, read, same

_SILU = ("silu", "swish")

# In no family, all read by `ullage_engine.model_config.registry`.
_SIZES = {
    **read("family of the model", "model_type"),
    **read("class of the model, which has to be the family's", "architectures"),
    **read("rows of the embedding", "vocab_size"),
    **read("width of a token", "hidden_size"),
    **read("layers", "num_hidden_layers"),
    **read("heads of queries", "num_attention_heads"),
    **read("heads of keys and values", "num_key_value_heads"),
    **read("width of a head; hidden_size / num_attention_heads without it", "head_dim"),
    **read("width of a feed-forward layer", "intermediate_size"),
    **read("longest sequence", "max_position_embeddings"),
    **read(
        "whether the output projection is the embedding; a different lm_head.weight in the files "
        "counts",
        "tie_word_embeddings",
    ),
    **read("format of quantised matrices; its own keys are checked, too", "quantization_config"),
    **read("tokens that end an answer", "eos_token_id"),
}

_ROPE = {
    **read("base and scaling of positions; see below", "rope_parameters"),
    **read("the same in its old spelling, which counts where both are there", "rope_scaling"),
    **read("base of positions where the scaling has none", "rope_theta"),
    **read(
        "context before a scaling, where the scaling has none", "original_max_position_embeddings"
    ),
    **fixed("share of a head that is rotated", (1.0,), "partial_rotary_factor"),
    **fixed("which numbers of a head are a pair", (False,), "rope_interleaved", "rope_traditional"),
    **fixed("layers without positions", ([],), "no_rope_layers", "nope_layers"),
}

_HARMLESS = {
    **harmless(
        "the tokenizer's files say it",
        *("bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("unk_token_id", "decoder_start_token_id", "tokenizer_class", "model_max_length"),
    ),
    **harmless(
        "for training only",
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout"),
        *("residual_dropout", "embedding_dropout", "initializer_range", "initializer_factor"),
        *("gradient_checkpointing", "router_aux_loss_coef", "router_jitter_noise"),
        *("label_smoothing", "use_cache", "neftune_noise_alpha", "use_bfloat16"),
    ),
    **harmless(
        "for other outputs of transformers only",
        *("output_attentions", "output_hidden_states", "output_router_logits", "output_past"),
        *("return_dict", "use_return_dict", "tie_last_hidden_states", "torchscript"),
        *("chunk_size_feed_forward", "keys_to_ignore_at_inference", "tf_legacy_loss"),
    ),
    **harmless(
        "which code of transformers computes",
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_attn_implementation_internal", "experts_implementation", "_experts_implementation"),
        *("_experts_implementation_internal", "use_flash_attention", "_flash_attn_2_enabled"),
        *("pretraining_tp", "auto_map"),
    ),
    **harmless(
        "the tensors have their own types, and spec.model.dtype says in which one is computed",
        *("dtype", "torch_dtype"),
    ),
    **harmless(
        "where the file comes from",
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
        *("transformers.js_config", "unsloth_version", "unsloth_fixed", "is_llama_config"),
        *("model_name", "base_model_name_or_path", "license", "language"),
    ),
    **harmless(
        "for classifiers only",
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        *("task_specific_params", "classifier_dropout", "classifier_bias"),
    ),
    **harmless(
        "sampling, which generation_config.json and requests decide",
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p"),
        *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
        *("exponential_decay_length_penalty", "begin_suppress_tokens", "epsilon_cutoff"),
        *("eta_cutoff", "encoder_repetition_penalty", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "prefix", "max_new_tokens"),
    ),
    **harmless("decoders are the only kind", "is_decoder", "tie_encoder_decoder"),
    **harmless("the longest context is max_position_embeddings", "max_sequence_length"),
}

_BOUND = {
    **fixed("other kinds of models", (False,), "is_encoder_decoder", "add_cross_attention"),
    **fixed("other kinds of models", (None,), "cross_attention_hidden_size", "text_config"),
    **fixed("other kinds of models", (None,), "vision_config", "audio_config"),
    **fixed("values that differ from layer to layer", ({},), "per_layer_config", "pruned_heads"),
    **fixed(
        "quantisation in another format",
        ({},),
        *("quantization", "compression_config", "sparsity_config"),
    ),
    **fixed(
        "limits of scores",
        (None,),
        *("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"),
        *("query_pre_attn_scalar", "clip_qkv", "attention_multiplier", "attention_scale"),
        *("attention_chunk_size", "dim_model_base", "swiglu_limits"),
    ),
    **fixed(
        "multipliers",
        (1,),
        *("embedding_multiplier", "embedding_scale", "residual_multiplier", "residual_scale"),
        *("logits_scaling", "logit_scale", "logits_scale", "lm_head_multiplier", "scale_emb"),
        *("scale_depth", "rope_ratio"),
    ),
    **fixed(
        "parts that these models do not have",
        (False,),
        *("qk_layernorm", "lm_head_bias", "use_parallel_residual", "parallel_attn", "alibi"),
        *("use_alibi", "attention_out_bias", "norm_bias"),
    ),
}

_NORM = read("number under the root of norms", "rms_norm_eps")
_ACTIVATION = fixed("activation of feed-forward layers", _SILU, "hidden_act")

LLAMA = {
    **_SIZES,
    **_ROPE,
    **_NORM,
    **_HARMLESS,
    **_BOUND,
    **_ACTIVATION,
    **read("whether all four projections of attention add a bias", "attention_bias"),
    **fixed("whether projections of feed-forward layers add a bias", (False,), "mlp_bias"),
    **fixed("norms of heads", (False,), "qk_norm", "use_qk_norm"),
    **fixed("tokens that a layer sees", (None,), "sliding_window"),
    **fixed("windows that are not used", (False,), "use_sliding_window"),
    **read("kinds of the layers: only full_attention", "layer_types"),
}

QWEN3 = {
    **_SIZES,
    **_ROPE,
    **_NORM,
    **_HARMLESS,
    **_BOUND,
    **_ACTIVATION,
    **read("width of a head; 128 without it", "head_dim"),
    **read("whether all four projections of attention add a bias", "attention_bias"),
    **fixed("whether projections of feed-forward layers add a bias", (False,), "mlp_bias"),
    **fixed("norms of heads, which there always are", (True,), "qk_norm", "use_qk_norm"),
    **read("tokens that a layer of sliding_attention sees", "sliding_window"),
    **read("whether any layer has a window", "use_sliding_window"),
    **read("first layer with a window, where layer_types does not say", "max_window_layers"),
    **read("kinds of the layers: full_attention, sliding_attention", "layer_types"),
}

_LFM2 = {
    **_SIZES,
    **_ROPE,
    **_HARMLESS,
    **_BOUND,
    **_ACTIVATION,
    **read("number under the root of norms", "norm_eps"),
    **same("the same", "block_norm_eps", "norm_eps"),
    **read("base of positions in older files, which has to be rope_theta's", "theta"),
    **read("the same as tie_word_embeddings, and counts first", "tie_embedding"),
    **read("taps of the convolutions", "conv_L_cache"),
    **fixed("whether convolutions add a bias", (False,), "conv_bias"),
    **read("kinds of the layers: full_attention, conv", "layer_types"),
    **read("layers that attend, where layer_types does not say", "full_attn_idxs"),
    **same("the same", "block_dim", "hidden_size"),
    **same("the same", "conv_dim", "hidden_size"),
    **same("the same", "conv_dim_out", "hidden_size"),
    **same("the same", "num_heads", "num_attention_heads"),
    **fixed("gates of feed-forward layers", (True,), "block_use_swiglu"),
    **fixed("positions of attention", (True,), "use_pos_enc"),
    **fixed("tokens that a layer sees", (None,), "sliding_window"),
    **fixed("whether projections add a bias", (False,), "attention_bias", "mlp_bias"),
    **harmless(
        "for training only",
        *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_use_xavier_init",),
    ),
}

LFM2 = {
    **_LFM2,
    **read("the same as intermediate_size, and counts first", "block_ff_dim"),
    **read(
        "how the width of feed-forward layers is adjusted",
        *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    ),
}

LFM2_MOE = {
    **_LFM2,
    **read("layers before the first with experts", "num_dense_layers"),
    **read("experts of a layer", "num_experts"),
    **read("experts of a token", "num_experts_per_tok"),
    **read("width of an expert", "moe_intermediate_size"),
    **read("whether the weights of a token's experts are divided by their sum", "norm_topk_prob"),
    **read("factor of the experts' weights", "routed_scaling_factor"),
    **fixed("whether a bias decides which experts are chosen", (True,), "use_expert_bias"),
}

GPT_OSS = {
    **_SIZES,
    **_ROPE,
    **_NORM,
    **_HARMLESS,
    **_BOUND,
    **_ACTIVATION,
    **read("whether all four projections of attention add a bias", "attention_bias"),
    **read("tokens that a layer of sliding_attention sees", "sliding_window"),
    **read("kinds of the layers: full_attention, sliding_attention", "layer_types"),
    **read("experts of a layer", "num_local_experts"),
    **same("the same", "num_experts", "num_local_experts"),
    **read("experts of a token", "num_experts_per_tok"),
    **same("the same", "experts_per_token", "num_experts_per_tok"),
    **fixed("limit of an expert's activations", (7.0,), "swiglu_limit"),
    **fixed("gain of an expert's gate", (1.702,), "swiglu_alpha"),
    **harmless("the context before the scaling, which the scaling has", "initial_context_length"),
}

FAMILY_KEYS: dict[str, dict[str, Key]] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "gpt_oss": GPT_OSS,
}
"""Rules for the keys of config.json, by `model_type`."""
