"""Names of the options of `vllm serve`, as of the pinned version of vLLM.

`tests/vllm` compares them with vLLM itself.
"""

_ENGINE_SWITCHES = """
    enable_return_routed_experts return_sampling_mask skip_tokenizer_init enable_prompt_embeds
    trust_remote_code numa_bind dcp_q_replicate data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb enable_hc_sp
    enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
    enable_elastic_ep enable_dbo disable_nccl_for_dp_synchronization enable_eplb
    enable_prefix_caching disable_sliding_window disable_cascade_attn
    long_prefill_token_threshold_adaptive use_fp64_gumbel enable_trace_replay disable_log_stats
    aggregate_engine_logging allow_deprecated_quantization enforce_eager
    disable_custom_all_reduce enable_shm_tensor_arena language_model_only enable_mm_embeds
    interleave_mm_strings mm_encoder_only skip_mm_profiling mm_device_do_normalize enable_lora
    fully_sharded_loras enable_tower_connector_lora specialize_active_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras ray_workers_use_nsight
    enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
    disable_hybrid_kv_cache_manager kv_cache_metrics cudagraph_metrics
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
    jit_monitor_verbose enable_mm_processor_stats enable_flashinfer_autotune enable_sleep_mode
    sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend
    enable_mamba_shared_prefix_checkpoint use_replayssm enable_mamba_cache_stochastic_rounding
    use_tqdm_on_load async_scheduling kv_sharing_fast_prefill swa_bounded_replay
    enable_fault_tolerance
"""

_ENGINE_VALUES = """
    model model_weights served_model_name tokenizer hf_config_path runner convert tokenizer_mode
    allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy
    safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format config_format
    dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes max_cudagraph_capture_size
    ir_op_priority distributed_executor_backend pipeline_parallel_size master_addr master_port
    nnodes node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind_nodes
    numa_bind_cpus device_ids tensor_parallel_size prefill_context_parallel_size
    decode_context_parallel_size dcp_comm_backend dcp_kv_cache_interleave_size
    cp_kv_cache_interleave_size data_parallel_size data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_backend
    moe_backend linear_backend sparse_indexer_topk_backend all2all_backend
    elastic_ep_max_dp_size ubatch_size dbo_decode_token_threshold dp_sync_interval
    dbo_prefill_token_threshold eplb_config expert_placement_strategy
    max_parallel_loading_workers block_size prefix_caching_hash_algo
    prefix_cache_retention_interval offload_backend cpu_offload_gb cpu_offload_params
    offload_group_size offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold max_num_seqs max_num_active_seqs max_num_queued_reqs
    max_num_queued_tokens max_logprobs logprobs_mode revision code_revision hf_token
    hf_overrides model_class_overrides tokenizer_revision quantization quantization_config
    limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
    mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
    renderer_num_workers video_pruning_rate video_pruning_method mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb max_loras max_lora_rank default_mm_loras
    max_cpu_loras lora_dtype lora_target_modules max_lora_cls_labels num_gpu_blocks_override
    model_loader_extra_config ignore_patterns prefill_schedule_interval watermark
    structured_outputs_config aux_output_config reasoning_parser reasoning_parser_plugin
    speculative_config spec_method spec_model spec_tokens watermark_config diffusion_config
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    per_request_spec_decode_metrics kv_cache_metrics_sample custom_histogram_buckets
    jit_monitor_mode scheduling_policy scheduler_cls pooler_config compilation_config
    attention_config engram_config mamba_config kernel_config worker_cls worker_extension_cls
    profiler_config logging_config log_level log_config_file kv_transfer_config kv_events_config
    ec_transfer_config ec_manager_config reasoning_config generation_config
    sleep_preserve_parameter_names override_generation_config model_impl attention_backend
    kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size
    prefix_match_unit mamba_cache_mode replayssm_buffer_len mamba_backend mamba_ssu_algorithm
    mamba_cache_philox_rounds additional_config pt_load_map_location logits_processors
    stream_interval optimization_level performance_mode fault_tolerance_config
    kv_offloading_size kv_offloading_backend shutdown_timeout weight_transfer_config
    gdn_prefill_backend kda_prefill_backend kda_decode_backend
"""

_SERVER_SWITCHES = """
    trust_request_chat_template trust_request_mm_kwargs return_tokens_as_token_ids
    enable_auto_tool_choice exclude_tools_when_tool_choice_none enable_prompt_tokens_details
    enable_per_request_metrics enable_server_load_tracking enable_force_include_usage
    enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas
    cohere_is_reasoning_model log_error_stack tokens_only enable_scale_out
    disable_uvicorn_access_log allow_credentials enable_ssl_refresh enable_request_id_headers
    disable_fastapi_docs enable_offline_docs enable_flash_late_interaction enable_log_requests
    disable_log_requests headless fail_on_environ_validation
"""

_SERVER_VALUES = """
    lora_modules chat_template chat_template_content_format default_chat_template_kwargs
    response_role tool_call_parser tool_parser_plugin tool_strict_level tool_server max_log_len
    sse_keep_alive_interval cohere_format anthropic_disabled_thinking_effort fingerprint_mode
    fingerprint_value host port grpc_port data_parallel_supervisor_port
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
    dp_supervisor_probe_failure_threshold uds uvicorn_log_level disable_access_log_for_endpoints
    allowed_origins allowed_methods allowed_headers api_key ssl_keyfile ssl_certfile
    ssl_ca_certs ssl_cert_reqs ssl_ciphers root_path middleware h11_max_incomplete_event_size
    h11_max_header_count api_server_count config
"""

_LIST_OPTIONS = """
    allowed_media_domains api_key collect_detailed_traces cpu_offload_params
    cudagraph_capture_sizes ignore_patterns kv_cache_dtype_skip_layers logits_processors
    lora_modules lora_target_modules numa_bind_cpus numa_bind_nodes offload_params
    served_model_name sleep_preserve_parameter_names
"""

ENGINE_SWITCHES = frozenset(_ENGINE_SWITCHES.split())
"""Arguments of vllm.EngineArgs that are on or off, and take no value."""

ENGINE_VALUES = frozenset(_ENGINE_VALUES.split())
"""Arguments of vllm.EngineArgs that take a value."""

SERVER_SWITCHES = frozenset(_SERVER_SWITCHES.split())
"""Options of vLLM's HTTP server that are on or off, and take no value."""

SERVER_VALUES = frozenset(_SERVER_VALUES.split())
"""Options of vLLM's HTTP server that take a value."""

LIST_OPTIONS = frozenset(_LIST_OPTIONS.split())
"""Options that take all values up to the next option."""

SHORT_OPTIONS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "q": "quantization",
    "n": "nnodes",
    "r": "node_rank",
    "ac": "attention_config",
    "cc": "compilation_config",
    "O": "optimization_level",
    "asc": "api_server_count",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dpn": "data_parallel_rank",
    "dpr": "data_parallel_start_rank",
    "dpl": "data_parallel_size_local",
    "dpa": "data_parallel_address",
    "dpp": "data_parallel_rpc_port",
    "dpb": "data_parallel_backend",
    "dph": "data_parallel_hybrid_lb",
    "dpe": "data_parallel_external_lb",
    "dpm": "data_parallel_multi_port_external_lb",
    "ep": "enable_expert_parallel",
    "sc": "speculative_config",
    "dc": "diffusion_config",
}
"""Long names of options that vLLM also accepts in a short form."""
