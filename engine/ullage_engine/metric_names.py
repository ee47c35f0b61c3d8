"""The engine's metrics: their `ullage_*` names, and vLLM's names where vLLM has the same metric.

The tables for the worker, the GPUs, the tiers and the peers map each metric to a function that
reads its value.
"""

from collections.abc import Callable, Mapping

from ullage_common.process.metrics import (
    CounterName,
    GaugeName,
    HistogramName,
    MetricName,
    Tally,
)
from ullage_engine.gpu.nvml import THROTTLE_REASONS, GpuSample
from ullage_engine.protocol.figures import (
    QUEUE_SECONDS,
    STEP_SECONDS,
    STEP_SEQUENCES,
    STEP_TOKENS,
)
from ullage_engine.protocol.worker_state import WorkerState
from ullage_kv import TierStats
from ullage_kv.service import PeerTraffic

# vLLM's buckets, seconds, so that its dashboards' quantiles can be compared.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
# Those of vLLM, which end at the longest text of its model.
LENGTH_BUCKETS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0),
    *(10_000.0, 20_000.0, 50_000.0, 100_000.0),
)

ENGINE = ("model_name", "engine")
"""Labels of every time series. `engine` is always 0, like the index of vLLM's first engine."""


def _counter(name: str, text: str, *labels: str) -> CounterName:
    return CounterName(name, text, (*ENGINE, *labels))


def _gauge(name: str, text: str, *labels: str) -> GaugeName:
    return GaugeName(name, text, (*ENGINE, *labels))


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> HistogramName:
    return HistogramName(name, text, ENGINE, buckets=buckets)


# requests, as the server sees them ---------------------------------------------------------------

REQUESTS = _counter("ullage_requests", "Ended requests by outcome", "outcome")
PROMPT_TOKENS = _counter("ullage_prompt_tokens", "Tokens of started prompts")
GENERATION_TOKENS = _counter("ullage_generation_tokens", "Tokens generated")
TTFT = _histogram(
    "ullage_time_to_first_token_seconds", "From acceptance to the first token", TTFT_BUCKETS
)
INTER_TOKEN = _histogram(
    "ullage_inter_token_latency_seconds", "Between two tokens of one request", TOKEN_BUCKETS
)
PER_TOKEN = _histogram(
    "ullage_request_time_per_output_token_seconds",
    "Mean time of a token in one request",
    TOKEN_BUCKETS,
)
E2E = _histogram(
    "ullage_e2e_request_latency_seconds", "From acceptance to the last token", REQUEST_BUCKETS
)
OUTPUT_LENGTH = _histogram(
    "ullage_request_generation_tokens",
    "Tokens of an answer that ended by itself or at its limit",
    LENGTH_BUCKETS,
)
DEGRADED = _counter(
    "ullage_engine_degraded_requests",
    "Answers begun that were given less than was asked for, because memory was short",
    "what",
)
STEPS = _counter("ullage_steps", "Steps that produced tokens")
WORKER_RESTARTS = _counter("ullage_worker_restarts", "Workers replaced")
START_PROOF_FAILURES = _counter(
    "ullage_start_proof_failures",
    "Starts of a worker that ended because they computed otherwise than a verified one",
)
COLLECTIVE_ERRORS = _counter(
    "ullage_collective_errors",
    "Groups of ranks that were lost in a collective (NCCL or gloo) or to another rank's end",
)

# the device map, and the server itself -----------------------------------------------------------

RANK_LAYERS = _gauge(
    "ullage_rank_layers",
    "Layers of each rank: the device map",
    *("rank", "stage", "tensor_rank", "device", "first_layer"),
)
WORKER_CPU = _counter(
    "ullage_worker_cpu_seconds", "CPU time of the workers and their ranks, as seen at scrapes"
)
CPU_WAITING = _counter(
    "ullage_cpu_waiting_seconds",
    "Time in which some thread of the container waited for a core; without cgroup v2 of the node",
)
BLOCK_TOKENS = _gauge("ullage_kv_block_size_tokens", "Tokens of one block")
BLOCKS = _gauge("ullage_kv_blocks", "Blocks of the KV pool")
BLOCKS_USED = _gauge("ullage_kv_blocks_used", "Blocks in block tables")
SERVER_RESIDENT = _gauge(
    "ullage_server_resident_bytes",
    "Resident memory of the server, without its worker and fork server",
)
CERTIFICATE_PROBLEMS = _gauge(
    "ullage_certificate_problems", "1 while the newest certificate cannot be used"
)
CERTIFICATE_EXPIRY = _gauge(
    "ullage_certificate_expiry_timestamp_seconds", "When the server's certificate ends"
)

# what the worker reports -------------------------------------------------------------------------


def _used_ratio(state: WorkerState) -> float:
    return state.kv_held_bytes / state.kv_pool_bytes if state.kv_pool_bytes else 0.0


REQUESTS_RUNNING = _gauge("ullage_requests_running", "Sequences in the batch")
REQUESTS_WAITING = _gauge("ullage_requests_waiting", "Sequences admitted, not started")
KV_USED_RATIO = _gauge("ullage_kv_used_ratio", "Share of the KV pool in use, 0 to 1")
OOM_EVENTS = _counter(
    "ullage_oom_events",
    "Steps that ran out of memory, and workers that ended since the kernel gave them none",
)
PREEMPTIONS = _counter("ullage_preemptions", "Sequences preempted for memory")
PREFIX_QUERIES = _counter(
    "ullage_prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache"
)
PREFIX_HITS = _counter(
    "ullage_prefix_cache_hits_tokens", "Looked-up prompt tokens whose KV was found"
)
DRAFT_TOKENS = _counter("ullage_spec_decode_draft_tokens", "Draft tokens of speculation checked")
ACCEPTED_TOKENS = _counter(
    "ullage_spec_decode_accepted_tokens", "Draft tokens of speculation that answers got"
)

WORKER_GAUGES: dict[GaugeName, Callable[[WorkerState], float]] = {
    REQUESTS_RUNNING: lambda s: s.num_running,
    REQUESTS_WAITING: lambda s: s.num_waiting,
    KV_USED_RATIO: _used_ratio,
    _gauge(
        "ullage_kv_waste_ratio", "Share of the KV in use that holds no tokens, 0 to 1"
    ): lambda s: s.kv_waste_ratio,
    _gauge("ullage_kv_pool_bytes", "Size of the KV pool"): lambda s: s.kv_pool_bytes,
    _gauge("ullage_kv_committed_bytes", "KV reserved, not allocated yet"): lambda s: (
        s.kv_committed_bytes
    ),
    _gauge("ullage_memory_headroom_bytes", "KV that a new request may take"): lambda s: (
        s.headroom_bytes
    ),
    _gauge(
        "ullage_memory_withheld_bytes",
        "Headroom withheld because other processes took memory of the device",
    ): lambda s: s.kv_withheld_bytes,
    _gauge(
        "ullage_swap_bandwidth_bytes_per_second",
        "Bandwidth to host memory measured at start; 0 without host memory for KV",
    ): lambda s: s.swap_bytes_per_second,
    _gauge(
        "ullage_worker_resident_bytes",
        "Resident memory of the worker's ranks; on CUDA, rank 0's own bytes of its device",
    ): lambda s: s.rss_bytes,
    _gauge("ullage_sessions", "Sessions that keep KV between requests"): lambda s: s.num_sessions,
    _gauge("ullage_session_bytes", "KV that sessions keep between requests"): lambda s: (
        s.session_bytes
    ),
    _gauge("ullage_engine_pressure_level", "Degrade level, 1 the mildest; 0 none"): lambda s: (
        s.pressure_level
    ),
    _gauge(
        "ullage_engine_batch_share",
        "Share of the largest batch that may run, 0 to 1: less while memory is short or GPUs hot",
    ): lambda s: s.batch_share,
    _gauge(
        "ullage_engine_boost_off", "1 while the batch is smaller because GPUs are throttled"
    ): lambda s: s.batch_limit < 1.0,
}

WORKER_COUNTERS: dict[CounterName, Callable[[WorkerState], float]] = {
    PREEMPTIONS: lambda s: s.num_preemptions,
    _counter(
        "ullage_swaps", "Preemptions by swapping to host memory; the others compute KV again"
    ): lambda s: s.num_swaps,
    _counter("ullage_swap_out_bytes", "KV copied to host memory"): lambda s: s.swap_out_bytes,
    _counter("ullage_swap_in_bytes", "KV copied back from host memory"): lambda s: s.swap_in_bytes,
    _counter(
        "ullage_swap_seconds", "Time of copying KV to host memory and back, on rank 0"
    ): lambda s: s.swap_seconds,
    OOM_EVENTS: lambda s: s.num_oom_events,
    _counter(
        "ullage_nonfinite_logits", "Requests failed because their logits were NaN or infinite"
    ): lambda s: s.num_nonfinite_logits,
    _counter(
        "ullage_steps_overlapped",
        "Steps begun while later pipeline stages computed an earlier one",
    ): lambda s: s.num_overlapped_steps,
    PREFIX_QUERIES: lambda s: s.prefix_lookup_tokens,
    PREFIX_HITS: lambda s: s.prefix_hit_tokens,
    _counter(
        "ullage_prefix_cache_merged_tokens",
        "Tokens whose KV was computed twice and is stored once",
    ): lambda s: s.prefix_merged_tokens,
    DRAFT_TOKENS: lambda s: s.num_draft_tokens,
    ACCEPTED_TOKENS: lambda s: s.num_accepted_tokens,
    _counter("ullage_adapter_loads", "LoRA adapters loaded into a slot"): lambda s: (
        s.num_adapter_loads
    ),
    _counter("ullage_adapter_unloads", "LoRA adapters that gave way"): lambda s: (
        s.num_adapter_unloads
    ),
}

BATCH_SIZE_CHANGES = _counter(
    "ullage_batch_size_changes",
    "Steps with more sequences than the step before (grow) or fewer (shrink)",
    "direction",
)
STEP_TOKENS_SEEN = _histogram(
    "ullage_step_tokens", "Tokens of one step, of prompts and of output", STEP_TOKENS
)
QUEUE_TIME = _histogram(
    "ullage_request_queue_time_seconds",
    "From acceptance to the step in which a prompt's first tokens are computed",
    QUEUE_SECONDS,
)

WORKER_HISTOGRAMS: dict[HistogramName, Callable[[WorkerState], Tally]] = {
    _histogram("ullage_step_seconds", "Time of one step", STEP_SECONDS): (
        lambda s: s.figures.step_seconds
    ),
    STEP_TOKENS_SEEN: lambda s: s.figures.step_tokens,
    _histogram("ullage_step_sequences", "Sequences of one step", STEP_SEQUENCES): (
        lambda s: s.figures.step_sequences
    ),
    QUEUE_TIME: lambda s: s.figures.queue_seconds,
}

# GPUs, as their driver sees them ------------------------------------------------------------------


def _gpu_gauge(name: str, text: str, *labels: str) -> GaugeName:
    return _gauge(f"ullage_gpu_{name}", text, "gpu", "uuid", *labels)


def _gpu_counter(name: str, text: str, *labels: str) -> CounterName:
    return _counter(f"ullage_gpu_{name}", text, "gpu", "uuid", *labels)


def _throttled(sample: GpuSample) -> dict[str, float]:
    held = sample.throttle_reasons
    return {} if held is None else {reason: reason in held for reason in THROTTLE_REASONS}


GPUS: dict[CounterName | GaugeName, Callable[[GpuSample], float | None]] = {
    _gpu_gauge("memory_total_bytes", "Memory of a GPU, or of the instance of one (MIG)"): (
        lambda s: s.memory_total_bytes
    ),
    _gpu_gauge("memory_used_bytes", "Memory that all its processes use"): (
        lambda s: s.memory_used_bytes
    ),
    _gpu_gauge("memory_free_bytes", "Memory that is free"): lambda s: s.memory_free_bytes,
    _gpu_gauge("memory_reserved_bytes", "Memory that the driver keeps for itself"): (
        lambda s: s.memory_reserved_bytes
    ),
    _gpu_gauge("power_watts", "Power that the GPU draws"): lambda s: s.power_watts,
    _gpu_gauge("power_limit_watts", "Power that the GPU may draw"): lambda s: s.power_limit_watts,
    _gpu_gauge("temperature_celsius", "Temperature of the GPU"): lambda s: s.temperature_celsius,
    _gpu_gauge("sm_clock_hertz", "Clock of the multiprocessors"): lambda s: s.sm_clock_hertz,
    _gpu_gauge("memory_clock_hertz", "Clock of the memory"): lambda s: s.memory_clock_hertz,
    _gpu_gauge("utilization_ratio", "Share of time in which a kernel ran, 0 to 1"): (
        lambda s: s.utilization_ratio
    ),
    _gpu_gauge("memory_utilization_ratio", "Share of time in which memory was accessed, 0 to 1"): (
        lambda s: s.memory_utilization_ratio
    ),
    _gpu_gauge("row_remap_pending", "1 while a row of memory waits for a reset to be replaced"): (
        lambda s: s.row_remap_pending
    ),
    _gpu_gauge("row_remap_failed", "1 if a row of memory could not be replaced"): (
        lambda s: s.row_remap_failed
    ),
    _gpu_gauge("nvlinks_active", "NVLinks that are up"): lambda s: s.nvlinks_active,
    _gpu_counter(
        "ecc_uncorrected_errors", "Uncorrected errors of memory since the driver was loaded"
    ): lambda s: s.ecc_uncorrected_errors,
    _gpu_counter("pcie_replays", "Packets that were sent again over PCIe"): (
        lambda s: s.pcie_replays
    ),
}
GPU_PARTS: dict[CounterName | GaugeName, Callable[[GpuSample], Mapping[str, float]]] = {
    _gpu_gauge(
        "throttled", "1 while the driver slows the GPU down for this reason", "reason"
    ): _throttled,
    _gpu_counter("remapped_rows", "Rows of memory that were replaced", "cause"): (
        lambda s: s.remapped_rows
    ),
    _gpu_counter("nvlink_errors", "Errors of all NVLinks of the GPU", "kind"): (
        lambda s: s.nvlink_errors
    ),
    _gpu_counter("failed_calls", "Questions that the driver could not answer", "error"): (
        lambda s: s.failed_calls
    ),
}
"""Maps GPU metrics with an extra label to functions that return a value for each label value."""
GPU_XID_ERRORS = _gpu_counter(
    "xid_errors", "Errors that the driver reported since the engine started", "xid"
)
GPU_DRIVER_SILENT = _gauge("ullage_gpu_driver_silent", "1 while the driver does not answer")

# KV in tiers outside the device ------------------------------------------------------------------

TIERS: dict[CounterName | GaugeName, Callable[[TierStats], float]] = {
    _gauge("ullage_kv_tier_capacity_bytes", "Most that a tier of KV may hold", "tier"): lambda s: (
        s.capacity_bytes
    ),
    _gauge("ullage_kv_tier_used_bytes", "KV that a tier holds", "tier"): lambda s: s.used_bytes,
    _gauge("ullage_kv_tier_blocks", "Blocks of KV that a tier holds", "tier"): (
        lambda s: s.num_blocks
    ),
    _gauge(
        "ullage_kv_tier_queued", "Transfers of blocks that wait or are under way", "tier"
    ): lambda s: s.queued,
    _counter("ullage_kv_tier_hits", "Blocks read from a tier of KV", "tier"): lambda s: s.hits,
    _counter("ullage_kv_tier_misses", "Blocks looked for and not read", "tier"): (
        lambda s: s.misses
    ),
    _counter("ullage_kv_tier_evictions", "Blocks that made room for others", "tier"): (
        lambda s: s.evictions
    ),
    _counter("ullage_kv_tier_read_bytes", "KV read from a tier", "tier"): lambda s: s.read_bytes,
    _counter("ullage_kv_tier_read_seconds", "Time in which something was read", "tier"): (
        lambda s: s.read_seconds
    ),
    _counter("ullage_kv_tier_written_bytes", "KV written to a tier", "tier"): (
        lambda s: s.written_bytes
    ),
    _counter("ullage_kv_tier_written_seconds", "Time in which something was written", "tier"): (
        lambda s: s.written_seconds
    ),
}
TIER_INFO = _gauge("ullage_kv_tier_info", "How a tier of KV moves bytes: 1", "tier", "backend")
TIER_FAILURES = _counter(
    "ullage_kv_tier_failures",
    "Blocks that were neither read nor stored nor absent",
    *("tier", "status"),
)
TIER_NOT_LOADED = _counter(
    "ullage_kv_tier_not_loaded",
    "Blocks that a tier had and requests did not begin with",
    *("tier", "reason"),
)
PEERS: dict[CounterName | GaugeName, Callable[[PeerTraffic], float]] = {
    _gauge("ullage_kv_peers_leases", "Leases of KV that other engines have here"): (
        lambda s: s.leases
    ),
    _gauge("ullage_kv_peers_held_slots", "Blocks that other engines read or write"): (
        lambda s: s.held_slots
    ),
    _counter("ullage_kv_peers_read_blocks", "Blocks of KV that other engines read here"): (
        lambda s: s.read_blocks
    ),
    _counter("ullage_kv_peers_read_bytes", "KV that other engines read here"): (
        lambda s: s.read_bytes
    ),
    _counter("ullage_kv_peers_written_blocks", "Blocks of KV that other engines copied here"): (
        lambda s: s.written_blocks
    ),
    _counter("ullage_kv_peers_written_bytes", "KV that other engines copied here"): (
        lambda s: s.written_bytes
    ),
    _counter("ullage_kv_peers_expired_leases", "Leases that no engine ended in time"): (
        lambda s: s.expired_leases
    ),
}

# vLLM's names ------------------------------------------------------------------------------------

VLLM_NAMES: dict[MetricName, str] = {
    REQUESTS_RUNNING: "vllm:num_requests_running",
    REQUESTS_WAITING: "vllm:num_requests_waiting",
    KV_USED_RATIO: "vllm:kv_cache_usage_perc",
    PREFIX_QUERIES: "vllm:prefix_cache_queries",
    PREFIX_HITS: "vllm:prefix_cache_hits",
    PREEMPTIONS: "vllm:num_preemptions",
    DRAFT_TOKENS: "vllm:spec_decode_num_draft_tokens",
    ACCEPTED_TOKENS: "vllm:spec_decode_num_accepted_tokens",
    PROMPT_TOKENS: "vllm:prompt_tokens",
    GENERATION_TOKENS: "vllm:generation_tokens",
    TTFT: "vllm:time_to_first_token_seconds",
    INTER_TOKEN: "vllm:inter_token_latency_seconds",
    PER_TOKEN: "vllm:request_time_per_output_token_seconds",
    E2E: "vllm:e2e_request_latency_seconds",
    OUTPUT_LENGTH: "vllm:request_generation_tokens",
    QUEUE_TIME: "vllm:request_queue_time_seconds",
    STEP_TOKENS_SEEN: "vllm:iteration_tokens_total",
}
"""vLLM's names for metrics that have the same values as Ullage's."""
VLLM_SUCCESS = _counter("vllm:request_success", "Requests answered to their end", "finished_reason")
VLLM_CACHE = GaugeName(
    "vllm:cache_config_info", "Size of the KV pool: 1", ("block_size", "num_gpu_blocks", "engine")
)
