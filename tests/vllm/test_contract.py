"""What Ullage needs of vLLM beside its documented interface, name by name, and that a text is the
one that others compute. It runs first: after another version each failure names what has changed.
"""

import dataclasses
import inspect
import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
import vllm
from msgspec import structs
from transformers import LlamaConfig
from ullage_testing.small_models import (
    SOURCE,
    continue_greedily,
    foreign_warnings_allowed,
    load_smollm2_reference,
    smollm2_path,
)
from vllm.config import KVTransferConfig, ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_worker import Worker

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import (
    OWNED_VLLM_ARGS,
    AdapterSection,
    EngineConfig,
    ModelSection,
)
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.protocol.requests import SamplingParams as Sampling
from ullage_engine.server.grammar import grammar_text
from ullage_engine.tokenizer.tokenizer import load_tokenizer
from ullage_engine.vllm_worker import arguments
from ullage_engine.vllm_worker.bindings import core as vllm_core
from ullage_engine.vllm_worker.bindings.connector import TierConnector, transfer_config
from ullage_engine.vllm_worker.bindings.requests import Grammar, sampling_arguments
from ullage_engine.worker.device import HostTier

Start = Callable[..., Any]

THIS = object()
"""Stands for `self`, and for values whose type does not matter."""


def calls(function: Callable[..., Any], *positional: object, **by_name: object) -> Any:
    return pytest.param(function, positional, by_name, id=function.__qualname__)


CALLS = [
    calls(EngineArgs.create_engine_config, THIS, UsageContext.OPENAI_API_SERVER),
    calls(
        LLMEngine,
        vllm_config=THIS,
        executor_class=THIS,
        log_stats=False,
        usage_context=UsageContext.OPENAI_API_SERVER,
    ),
    calls(MultiprocExecutor, THIS, monitor_workers=False),
    calls(MultiprocExecutor._ensure_worker_termination, THIS),
    calls(MultiprocExecutor.register_failure_callback, THIS, THIS),
    calls(MultiprocExecutor.start_worker_monitor, THIS, inline=True),
    calls(LLMEngine.add_request, THIS, "id", THIS, THIS, lora_request=None, priority=0),
    calls(LLMEngine.abort_request, THIS, ["id"], internal=True),
    calls(LLMEngine.step, THIS),
    calls(tokens_input, [1], cache_salt=None),
    calls(LoRARequest, "name", 1, "/folder"),
    calls(StructuredOutputsParams, grammar="start: /a/"),
    calls(get_pp_indices, 4, 0, 2),
    calls(Executor.get_class, THIS),
    calls(Executor.determine_available_memory, THIS),
    calls(Executor.initialize_from_config, THIS, [THIS]),
    calls(Executor.collective_rpc, THIS, "ullage_load_adapter", args=(THIS,)),
    calls(WorkerLoRAManager._load_adapter, THIS, THIS),
    calls(KVCacheManager.get_computed_blocks, THIS, THIS),
    calls(KVCacheManager.get_blocks, THIS, "id"),
    calls(KVCacheBlocks.get_block_ids, THIS),
    calls(KVTransferConfig, **vars(transfer_config(HostTier("/proc/1/fd/3", 1)))),
    calls(BlockPool.touch, THIS, [THIS]),
    calls(BlockPool.free_blocks, THIS, [THIS]),
    calls(BlockPool.get_num_free_blocks, THIS),
    calls(Request.append_output_token_ids, THIS, [1]),
    calls(StructuredOutputManager._create_grammar, THIS, THIS),
    calls(InputBatch.add_request, THIS, THIS),
    calls(_pool_bytes_per_block, THIS, [THIS]),
    calls(Worker.add_lora, THIS, THIS),
    calls(LLMEngine.remove_lora, THIS, 1),
    calls(PoolingParams, task="embed"),
    calls(MambaSpec.max_memory_usage_bytes, THIS, THIS),
    calls(ModelConfig.get_vocab_size, THIS),
    calls(ModelConfig.get_total_num_hidden_layers, THIS),
    calls(ModelConfig.get_num_attention_heads, THIS, THIS),
    calls(ModelConfig.get_num_kv_heads, THIS, THIS),
    # Counted by tests of blocks.
    calls(Scheduler._preempt_request, THIS, THIS, 0.0),
]

FIELDS = {
    FullAttentionSpec: {"block_size"},
    SlidingWindowSpec: {"block_size", "sliding_window", "extra_retained_tokens"},
    UniformTypeKVCacheSpecs: {"kv_cache_specs"},
    KVCacheConfig: {"num_blocks", "kv_cache_tensors", "kv_cache_groups"},
    CachedRequestState: {"sampling_params", "generator", "output_token_ids"},
    CompletionOutput: {"token_ids", "logprobs", "finish_reason"},
}

FREE_ARGS = """
enable_return_routed_experts return_sampling_mask hf_config_path runner convert
enable_prompt_embeds tokenizer_mode trust_remote_code allowed_local_media_path
allowed_media_domains safetensors_load_strategy safetensors_prefetch_num_threads
safetensors_prefetch_block_size load_format config_format cudagraph_capture_sizes
max_cudagraph_capture_size ir_op_priority distributed_timeout_seconds
cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
moe_backend linear_backend sparse_indexer_topk_backend all2all_backend enable_elastic_ep
elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dp_sync_interval
dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config enable_eplb
expert_placement_strategy max_parallel_loading_workers block_size prefix_caching_hash_algo
prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend
cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
offload_params long_prefill_token_threshold long_prefill_token_threshold_adaptive
max_num_queued_reqs max_num_queued_tokens max_logprobs logprobs_mode use_fp64_gumbel
enable_trace_replay aggregate_engine_logging hf_overrides model_class_overrides
quantization_config allow_deprecated_quantization enforce_eager disable_custom_all_reduce
enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds
interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize default_mm_loras
fully_sharded_loras lora_dtype lora_target_modules enable_tower_connector_lora
specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
ray_workers_use_nsight model_loader_extra_config ignore_patterns disable_chunked_mm_input
scheduler_reserve_full_isl prefill_schedule_interval disable_hybrid_kv_cache_manager
aux_output_config reasoning_parser reasoning_parser_plugin speculative_config spec_method
spec_model spec_tokens watermark_config diffusion_config show_hidden_metrics_for_version
otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics
kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
enable_mm_processor_stats pooler_config compilation_config attention_config engram_config
mamba_config kernel_config enable_flashinfer_autotune profiler_config logging_config log_level
log_config_file kv_events_config ec_transfer_config ec_manager_config reasoning_config
enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names
enable_cumem_allocator enable_nccl_comm_suspend model_impl
attention_backend kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype
mamba_block_size prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint
replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config
use_tqdm_on_load pt_load_map_location logits_processors async_scheduling stream_interval
kv_sharing_fast_prefill swa_bounded_replay optimization_level performance_mode
fault_tolerance_config enable_fault_tolerance tokens_only shutdown_timeout weight_transfer_config
fail_on_environ_validation gdn_prefill_backend kda_prefill_backend kda_decode_backend
"""
"""Names of the arguments that `vllm.args` may set: none adds ranks, a queue or a place of KV that
Ullage does not see, and none is a secret."""

GRAMMARS = {
    "accept_tokens": ["request_id", "tokens"],
    "validate_tokens": ["tokens"],
    "rollback": ["num_tokens"],
    "fill_bitmask": ["bitmask", "batch_index"],
    "is_terminated": [],
    "reset": [],
}

ATTRIBUTES = {
    # of the engine core
    "core.scheduler": Scheduler,
    "core.model_executor": Executor,
    "core.model_executor.kv_configs": list,
    # of the scheduler
    "scheduler.requests": dict,
    "scheduler.max_num_active_reqs": int,
    "scheduler.num_lookahead_tokens": int,
    "scheduler.kv_cache_config": KVCacheConfig,
    "scheduler.kv_cache_manager": KVCacheManager,
    "scheduler.kv_cache_manager.enable_caching": bool,
    "scheduler.kv_cache_manager.block_pool": BlockPool,
    "scheduler.kv_cache_manager.block_pool.num_gpu_blocks": int,
    "scheduler.kv_cache_manager.block_pool.null_block.is_null": bool,
    "scheduler.kv_cache_manager.block_pool.null_block.ref_cnt": int,
    "scheduler.kv_cache_manager.coordinator.single_type_managers": tuple,
    "scheduler.structured_output_manager": StructuredOutputManager,
    "scheduler.structured_output_manager._use_async_grammar_compilation": bool,
    "scheduler.defer_block_free": bool,
    # of the configuration
    "config.max_concurrent_batches": int,
    "config.max_in_flight_tokens": int,
    "config.model_config.original_max_model_len": int,
    "config.model_config.max_model_len": int,
    "config.model_config.runner_type": str,
    "config.cache_config.block_size": int,
    "config.cache_config.kv_cache_layout": str,
    "config.compilation_config.static_forward_context": dict,
    "config.scheduler_config.enable_chunked_prefill": bool,
    "config.scheduler_config.max_num_batched_tokens": int,
    "config.parallel_config.tensor_parallel_size": int,
    "config.parallel_config.pipeline_parallel_size": int,
    # of the model runner for CPUs
    "runner.input_batch": InputBatch,
    "runner.requests": dict,
}

REQUEST = EngineRequest(
    request_id="a",
    token_ids=list(range(100, 197)),
    num_prompt_tokens=97,
    max_tokens=24,
    sampling=Sampling(temperature=0.0),
)
RESUMED = {
    "greedy": Sampling(temperature=0.0),
    "noise": Sampling(temperature=1.0, seed=5, top_p=0.95, top_k=50),
    "penalties": Sampling(
        temperature=0.8,
        seed=6,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
    ),
}
PATIENCE_S = 300.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def changed(what: str) -> str:
    return f"vLLM {vllm.__version__}: {what} changed since {vllm_core.VERSION}"


def test_it_is_the_version_that_this_was_written_for() -> None:
    vllm_core.check_version()


@pytest.mark.parametrize(("function", "positional", "by_name"), CALLS)
def test_what_is_called_can_be_called_so(
    function: Callable[..., Any], positional: tuple[object, ...], by_name: dict[str, object]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **by_name)
    except TypeError as error:
        pytest.fail(changed(f"{function.__qualname__}{signature}: {error};"))


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_that_are_read_exist(kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    missing = FIELDS[kind] - fields
    assert not missing, changed(f"{kind.__name__} has no {missing}; it")


def test_every_argument_of_the_engine_is_one_of_vllm() -> None:
    config = EngineConfig(
        model=ModelSection(source="file:///x", name="x"),
        adapters=(AdapterSection(name="a", source="file:///a", rank=8),),
    )
    made: dict[str, Any] = {}
    for chunk in (None, 0, 64):
        batching = structs.replace(config.batching, prefill_chunk_tokens=chunk)
        config = structs.replace(config, batching=batching)
        made |= arguments.engine_args(config, smollm2_path(), "float32", None)
    missing = made.keys() - {field.name for field in dataclasses.fields(EngineArgs)}
    assert not missing, changed(f"EngineArgs has no {missing}; it")


def test_every_argument_is_judged() -> None:
    """A new one is to be added to FREE_ARGS, or to OWNED_VLLM_ARGS with what to set instead."""
    fields = {each.name for each in dataclasses.fields(EngineArgs) if each.name[0] != "_"}
    free = set(FREE_ARGS.split())
    assert not free & OWNED_VLLM_ARGS.keys()
    unjudged = fields - OWNED_VLLM_ARGS.keys() - free
    assert not unjudged, changed(f"EngineArgs, which has {sorted(unjudged)},")
    assert not free - fields, changed(f"EngineArgs, which has no {sorted(free - fields)},")


def test_every_parameter_of_a_request_is_one_of_vllm() -> None:
    made = SamplingParams(**sampling_arguments(REQUEST, 24))
    assert made.output_kind is RequestOutputKind.DELTA, changed("SamplingParams")


def test_a_grammar_has_the_methods_that_are_made_for_it() -> None:
    methods = {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in vars(StructuredOutputGrammar).items()
        if getattr(method, "__isabstractmethod__", False)
    }
    assert methods == GRAMMARS, changed("StructuredOutputGrammar")


def test_a_connector_has_the_methods_that_vllm_calls() -> None:
    own = {name: each for name, each in vars(TierConnector).items() if inspect.isfunction(each)}
    for name in own.keys() - {"use", "_cached_blocks", "save_kv_layer"}:
        theirs = vars(KVConnectorBase_V1).get(name) or vars(SupportsHMA).get(name)
        assert theirs is not None, changed(f"{name} of a connector")
        parameters = inspect.signature(own[name]).parameters.keys()
        assert parameters == inspect.signature(theirs).parameters.keys(), changed(name)


def test_the_runner_for_gpus_is_told_apart() -> None:
    source = inspect.getsource(GPUModelRunner.__init__)
    assert "self.req_states" in source, changed("the V2 model runner's req_states")


def test_an_output_says_what_was_cached() -> None:
    parameters = inspect.signature(RequestOutput).parameters
    missing = {"request_id", "outputs", "num_cached_tokens"} - parameters.keys()
    assert not missing, changed(f"RequestOutput has no {missing}; it")


# a live engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(start_here: Start, write_checkpoint: Any) -> Any:
    """An engine with a small random Llama."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return start_here(
        write_checkpoint(LlamaConfig(**sizes, **heads)), memory={"max_kv": (4 << 20) + 1}
    )


def parts(started: Any) -> dict[str, Any]:
    core = started.core._engine.engine_core.engine_core
    return {
        "core": core,
        "scheduler": core.scheduler,
        "config": started.core._config,
        "runner": core.model_executor.driver_worker.worker.model_runner,
    }


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_what_is_read_of_a_live_engine_is_there(small: Any, path: str) -> None:
    part, _, name = path.partition(".")
    try:
        value = operator.attrgetter(name)(parts(small)[part])
    except AttributeError as error:
        pytest.fail(changed(f"{path} ({error})"))
    assert isinstance(value, ATTRIBUTES[path]), changed(f"{path} is {type(value).__name__}; it")


def test_its_pool_is_what_we_count(small: Any) -> None:
    [group] = parts(small)["scheduler"].kv_cache_config.kv_cache_groups
    # Keys and values of 32 tokens, 2 heads of 32 numbers, 4 bytes each, in each of 2 layers.
    page_bytes = 2 * 32 * 2 * 32 * 4
    assert group.kv_cache_spec.page_size_bytes == page_bytes, changed("page_size_bytes")
    assert small.core.block_bytes == 2 * page_bytes, changed("_pool_bytes_per_block")
    # Of 4 MiB and one byte are used 128 whole blocks, of which one is never given out.
    pool_bytes = small.core.pool_bytes
    assert pool_bytes == 128 * small.core.block_bytes == 4 << 20, changed("the pool's size")
    assert small.core.blocks.num_blocks == 127, changed("the null block")
    assert small.core.blocks.num_free == 127, changed("the null block")
    assert small.profile.kv_pool_bytes == pool_bytes - small.core.block_bytes
    kv = next(each for each in small.ledger.states() if each.name == "kv_pool")
    assert kv.allocated_bytes == pool_bytes
    allocated = {each.untyped_storage().nbytes() for each in parts(small)["runner"].kv_caches}
    assert allocated in ({pool_bytes}, {pool_bytes // 2}), changed("how KV is allocated")


def run(started: Any, *requests: EngineRequest, resumed: bool = False) -> list[list[int]]:
    """Returns the tokens that are produced for each request."""
    texts: dict[str, list[int]] = {each.request_id: [] for each in requests}
    for each in requests:
        assert started.engine.submit_group([each], resumed=resumed) == []
    while started.engine.has_work:
        for output in started.engine.step():
            texts[output.request_id] += output.token_ids
    assert started.engine.take_failed() == []
    return list(texts.values())


def is_resumed_exactly(started: Any, request: EngineRequest) -> bool:
    """Whether a request goes on the same from its first, middle and last but one token."""
    [whole] = run(started, request)
    places = {1, len(whole) // 2, len(whole) - 1}
    resumed = [
        structs.replace(request, request_id=str(place), token_ids=request.token_ids + whole[:place])
        for place in sorted(places)
    ]
    rests = run(started, *resumed, resumed=True)
    return all(whole[place:] == rest for place, rest in zip(sorted(places), rests, strict=True))


@pytest.mark.parametrize("sampling", RESUMED.values(), ids=RESUMED)
def test_a_resumed_request_goes_on_the_same(small: Any, sampling: Sampling) -> None:
    request = structs.replace(REQUEST, sampling=sampling, min_tokens=20, stop_token_ids=[2])
    assert is_resumed_exactly(small, request), changed("the model runner's state of a request")


def compiled(started: Any, request: EngineRequest) -> EngineRequest:
    """Returns the request once its grammar is compiled."""
    started.core._grammars.compile(request.grammar).result(PATIENCE_S)
    return request


def test_a_grammar_is_ready_when_its_request_is_added(small: Any) -> None:
    """Threads of vLLM must not use the compiled grammars while others are compiled."""
    grammar = grammar_text(pb.Grammar(regex="[a-z]+"))[1]
    request = structs.replace(REQUEST, request_id="matched", grammar=grammar)
    small.core.add(compiled(small, request), 24)
    added = small.core._requests["matched"].structured_output_request
    is_ready = isinstance(added._grammar, Grammar)
    small.core.abort("matched")
    assert is_ready, changed("where grammars are made")


# texts --------------------------------------------------------------------------------------------

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a village " * 9)


@pytest.fixture(scope="module")
def served(start_here: Start) -> Any:
    """An engine with SmolLM2 in float32, which takes the place of the small one."""
    return start_here(SOURCE)


def test_a_grammar_is_followed_and_goes_on_where_it_was(served: Any) -> None:
    tokenizer = load_tokenizer(smollm2_path())
    ends = list(tokenizer.eos_token_ids)
    request = structs.replace(
        prompts_of(tokenizer)[0],
        max_tokens=60,
        sampling=Sampling(temperature=1.2, seed=3),
        stop_token_ids=ends,
        grammar=grammar_text(pb.Grammar(json_schema=json.dumps(SCHEMA)))[1],
    )
    [whole] = run(served, compiled(served, request))
    answer = json.loads(tokenizer.decode([each for each in whole if each not in ends]))
    assert isinstance(answer["age"], int)
    assert len(answer["name"]) <= 12
    assert is_resumed_exactly(served, request), changed("how it makes grammars")


def prompts_of(tokenizer: Any) -> list[EngineRequest]:
    requests = []
    for number, text in enumerate(PROMPTS):
        ids = list(tokenizer.encode_text(text))
        requests.append(
            structs.replace(
                REQUEST,
                request_id=f"p{number}",
                token_ids=ids,
                num_prompt_tokens=len(ids),
                max_tokens=32,
            )
        )
    return requests


def test_greedy_text_is_that_of_transformers_and_of_plain_vllm(served: Any) -> None:
    requests = prompts_of(load_tokenizer(smollm2_path()))
    ours = run(served, *requests)
    folder = served.core._config.model_config.model
    with foreign_warnings_allowed():
        served.stop()
        plain = plain_vllm(folder, requests)
    assert ours == plain, "vLLM computes another text than through Ullage"
    model = load_smollm2_reference()
    assert ours == [continue_greedily(model, each.token_ids, 32) for each in requests]


def plain_vllm(folder: str, requests: list[EngineRequest]) -> list[list[int]]:
    """Returns the tokens of vLLM's own engine with its defaults."""
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype="float32",
            max_model_len=1024,
            enforce_eager=True,
            num_gpu_blocks_override=64,
            gpu_memory_utilization=0.3,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    texts: dict[str, list[int]] = {}
    for each in requests:
        engine.add_request(each.request_id, {"prompt_token_ids": each.token_ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] = list(output.outputs[0].token_ids)
    engine.engine_core.shutdown()
    return [texts[each.request_id] for each in requests]
