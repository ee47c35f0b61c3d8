"""Rules for the keys of quantization_config, by `quant_method`.

See `ullage_engine.model_config.keys` for the meaning of these rules.
"""

from ullage_engine.model_config.keys import Key, fixed, harmless, read

_METHOD = read("kind of quantisation", "quant_method")
_BY_TENSORS = harmless(
    "the tensors say which matrices are quantised",
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "lm_head"),
    "tie_word_embeddings",
)
_KERNELS = harmless(
    "which kernels of other engines compute",
    *("exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16", "max_input_length"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "cache_block_outputs", "use_triton"),
)
_MAKING = harmless(
    "how the numbers were found",
    *("damp_percent", "damp_auto_increment", "dataset", "tokenizer", "true_sequential"),
    *("static_groups", "model_name_or_path", "model_file_base_name", "model_seqlen", "batch_size"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "meta"),
    *("modules_in_block_to_quantize", "mse", "act_group_aware", "hyb_act", "quantizer"),
)
_AUTO_ROUND = {
    **harmless(
        "how the numbers were found",
        *("autoround_version", "amp", "enable_minmax_tuning", "enable_norm_bias_tuning"),
        *("enable_quanted_input", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr"),
        *("minmax_lr", "nsamples", "seqlen", "scale_dtype", "to_quant_block_names", "model_free"),
    ),
    **fixed("kind of the numbers", ("int",), "data_type"),
    **fixed("bits of activations, which are not rounded", (16,), "act_bits"),
    **harmless(
        "how activations would be rounded",
        *("act_data_type", "act_dynamic", "act_group_size", "act_sym"),
    ),
}

GPTQ: dict[str, Key] = {
    **_METHOD,
    **_BY_TENSORS,
    **_KERNELS,
    **_MAKING,
    **_AUTO_ROUND,
    **harmless("which kernels of other engines compute", "backend"),
    **read("bits of a number: 4 or 8", "bits"),
    **read("columns that share a scale; -1 is a whole row", "group_size"),
    **read("whether columns are in another order, which g_idx tells", "desc_act"),
    **harmless("zero points are in the tensors", "sym"),
    **fixed(
        "whether zero points are stored less one, or as they are",
        ("gptq", "gptq_v2"),
        *("checkpoint_format", "format"),
    ),
    **fixed("kind of quantisation", ("gptq",), "method"),
    **fixed("layout of the numbers", (False,), "is_marlin_format"),
    **fixed("layout of the numbers", ("int32",), "pack_dtype"),
    **fixed("bits that differ from layer to layer", ({},), "dynamic"),
}

AWQ: dict[str, Key] = {
    **_METHOD,
    **_BY_TENSORS,
    **_KERNELS,
    **_MAKING,
    **_AUTO_ROUND,
    **fixed("bits of a number", (4,), "bits"),
    **read("columns that share a scale; -1 is a whole row", "group_size"),
    **fixed("layout of the numbers", ("gemm", "GEMM"), "version", "format", "checkpoint_format"),
    **fixed("layout of the numbers", ("int32",), "pack_dtype"),
    **fixed("kind of quantisation", ("awq",), "method"),
    **fixed(
        "program that made it, or kernels of other engines",
        (
            *("autoawq", "auto", "auto_trainable", "gemm", "gemm_triton", "machete", "marlin"),
            *("exllama_v1", "exllama_v2", "torch_awq", "torch_fused_awq"),
        ),
        "backend",
    ),
    **harmless("zero points are in the tensors", "sym"),
    **fixed("whether columns are in another order", (False,), "desc_act"),
    **fixed("bits that differ from layer to layer", ({},), "dynamic"),
    **fixed("whether there are zero points", (True,), "zero_point"),
}

MXFP4: dict[str, Key] = {
    **_METHOD,
    **_BY_TENSORS,
    **harmless("the engine computes with packed weights", "dequantize"),
}

ULLAGE: dict[str, Key] = {**_METHOD, **fixed("format of the numbers", ("int4",), "format")}

FP8: dict[str, Key] = {
    **_METHOD,
    **_BY_TENSORS,
    **fixed(
        "rounding of activations, which is left out", ("dynamic", "static"), "activation_scheme"
    ),
    **fixed("kind of the numbers", ("e4m3",), "fmt"),
    **fixed("kind of the scales", ("float", "ue8m0"), "scale_fmt"),
    **read("rows and columns that share a scale", "weight_block_size"),
    **fixed("kind of the experts' numbers", ("fp8",), "expert_dtype"),
    **harmless("the engine computes with packed weights", "dequantize"),
}

COMPRESSED: dict[str, Key] = {
    **_METHOD,
    **_BY_TENSORS,
    **read("layout of the numbers; see below", "format"),
    **read("scheme of the matrices, at most one", "config_groups"),
    **harmless(
        "where the file comes from",
        *("global_compression_ratio", "quantization_status", "version"),
    ),
    **read("scales of KV, none allowed", "kv_cache_scheme"),
    **fixed("rotations of the matrices", ({},), "transform_config"),
    **read("zeros that are left out, none allowed", "sparsity_config"),
}

COMPRESSED_GROUP: dict[str, Key] = {
    **read("layout of the numbers", "format"),
    **read("scheme of inputs and of weights", "input_activations", "weights"),
    **read("scheme of outputs, none allowed", "output_activations"),
    **harmless("the tensors say which matrices are quantised", "targets"),
}

COMPRESSED_NUMBERS: dict[str, Key] = {
    **read("kind of the numbers", "num_bits", "type", "symmetric", "dynamic"),
    **read("what shares a scale", "strategy", "group_size", "block_structure"),
    **read("order of the columns, which has to be theirs", "actorder"),
    **harmless("how the numbers were found", "observer", "observer_kwargs"),
    **harmless("the tensors have their own types", "scale_dtype", "zp_dtype"),
}

QUANTIZATION_KEYS: dict[str, dict[str, Key]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": FP8,
    "compressed-tensors": COMPRESSED,
    "mxfp4": MXFP4,
    "ullage": ULLAGE,
}
"""Rules for the keys of quantization_config, by `quant_method`."""
