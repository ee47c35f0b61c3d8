"""The engine's configuration file, in YAML or JSON. It is read once and never changes."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from ullage_common.process import addresses
from ullage_common.process.config_file import (
    Bytes,
    LogLevel,
    Percent,
    Port,
    Positive,
    Seconds,
    SomeBytes,
    SomePercent,
    SomeSeconds,
    Strict,
    Text,
)
from ullage_common.process.tracing import TracingSection

Device = Literal["auto", "cpu", "cuda"]
EngineKind = Literal["auto", "native", "vllm"]

# Routers read these three, too.


class MemoryBudget(Strict, frozen=True, kw_only=True):
    """The memory budget that every engine enforces and that routers show in /stats."""

    threshold_percent: SomePercent = 85.0
    """Percentage of the device's memory that the engine may use."""
    safety_reserve: SomeBytes = 2 << 30
    """Bytes of each device's memory to keep free below the threshold."""

    @property
    def threshold(self) -> float:
        return self.threshold_percent / 100


class RequestLimits(Strict, frozen=True, kw_only=True):
    max_output_tokens: Positive = 4096
    request_timeout: SomeSeconds = 30.0
    """Maximum seconds between a request's arrival and its first token, and between two tokens.

    Beam searches, and requests whose best_of exceeds n, produce no output until the end. They are
    limited only by `total_timeout`.
    """
    total_timeout: SomeSeconds = 540.0
    """Maximum seconds from the request's arrival to its last token."""

    def __post_init__(self) -> None:
        if self.request_timeout > self.total_timeout:
            raise ValueError(
                f"request_timeout {self.request_timeout:g} is above total_timeout "
                f"{self.total_timeout:g}; raise total_timeout"
            )


class TicketFolder(Strict, frozen=True, kw_only=True):
    keys_dir: Text
    """Folder with one signing key per file, shared by routers and engines.

    The key whose file name sorts last signs new tickets.
    """


# Engines alone read the rest.


class ModelSection(Strict, frozen=True, kw_only=True):
    source: str
    """URI of the model: `pkg://package/file`, `file:///path`, `hf://org/name@revision`,
    `s3://bucket/prefix` or `pvc://claim/path`."""
    name: str
    """Name by which clients request the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations. auto means bfloat16 if the device supports it."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8", "w8a8"] = "auto"
    """Format to which the matrices of an unquantised checkpoint are converted.

    w8a8 needs a calibration from `ullage quantize`. A quantised checkpoint declares its own format.
    auto leaves the layers' matrices unconverted. On x86 CPUs with AVX2, auto computes directly on a
    GGUF file's quantised blocks.
    """
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache.

    fp8 means float8 E4M3. auto means the data type of activations, with one exception: if `dtype`
    is auto and the C++ library for CPUs runs the model, auto means bfloat16.
    """
    max_model_len: int | None = None
    """Maximum total number of prompt and output tokens, or None for the model's own limit."""
    deterministic: bool = False
    allow_unknown_config: bool = False
    """Whether the native engine ignores keys of the model's configuration that it does not support.

    The engine then logs these keys instead of refusing to load the model.
    """
    generation_defaults: bool = True
    """Whether the model's own defaults apply to sampling parameters that a request omits.

    These defaults come from the model's generation_config.json or GGUF metadata. If this is False,
    the API's defaults apply.
    """


class AdapterSection(Strict, frozen=True, kw_only=True):
    """A LoRA adapter of the model, which clients select by name."""

    name: Text
    source: str
    """URI of the adapter's folder, in the same format as a model's URI."""
    rank: Positive
    """Rank of the adapter's matrices, at most `memory.max_lora_rank`."""


class AdaptersFile(Strict, frozen=True, kw_only=True):
    """File that lists a running engine's adapters. The engine watches the file for changes."""

    adapters: tuple[AdapterSection, ...] = ()


_SERVED_BY_ULLAGE = "nothing, since requests come by Ullage's own server"
_ADAPTERS = "adapters, each with its rank"
_REVISION = "model.source, as hf://org/name@revision"
_NODES = "nodes of the pool"
_REPLICAS = "replicas of the pool"
_MAX_KV = "memory.max_kv"
_MAX_LORAS = "memory.max_loras and memory.adapter_percent"
_RANKS = "parallelism.tensor and parallelism.pipeline"
_KV_TIERS = "memory.tiers"
OWNED_VLLM_ARGS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.source",
        "model_weights": "model.source",
        "tokenizer": "model.source, whose tokenizer is used",
        "skip_tokenizer_init": "nothing, since the server tokenises",
        "revision": _REVISION,
        "code_revision": _REVISION,
        "tokenizer_revision": _REVISION,
        "download_dir": "the pool's modelCache, or HF_HOME",
        # Configurations are kept in ConfigMaps, in clear text.
        "hf_token": "HF_TOKEN in the environment (podTemplate's env, from a Secret)",
        "served_model_name": "model.name",
        "dtype": "model.dtype",
        "quantization": "model.quantization",
        "kv_cache_dtype": "model.kv_dtype",
        "max_model_len": "model.max_model_len",
        "seed": "the field seed of a request",
        "generation_config": "model.generation_defaults",
        "override_generation_config": "the sampling parameters of a request",
        "tensor_parallel_size": "parallelism.tensor",
        "pipeline_parallel_size": "parallelism.pipeline",
        "prefill_context_parallel_size": _RANKS,
        "decode_context_parallel_size": _RANKS,
        "data_parallel_size": _REPLICAS,
        "data_parallel_size_local": _REPLICAS,
        "data_parallel_rank": _REPLICAS,
        "data_parallel_start_rank": _REPLICAS,
        "data_parallel_address": _REPLICAS,
        "data_parallel_rpc_port": _REPLICAS,
        "data_parallel_hybrid_lb": _REPLICAS,
        "data_parallel_external_lb": _REPLICAS,
        "data_parallel_multi_port_external_lb": _REPLICAS,
        "data_parallel_backend": _REPLICAS,
        "distributed_executor_backend": "parallelism and nodes of the pool",
        "nnodes": _NODES,
        "node_rank": _NODES,
        "master_addr": _NODES,
        "master_port": _NODES,
        "gpu_memory_utilization": "memory.threshold_percent and memory.safety_reserve",
        "kv_cache_memory_bytes": _MAX_KV,
        "num_gpu_blocks_override": _MAX_KV,
        "watermark": "memory.threshold_percent and memory.safety_reserve",
        "kv_offloading_size": _KV_TIERS,
        "kv_offloading_backend": _KV_TIERS,
        "kv_transfer_config": _KV_TIERS,
        "enable_prefix_caching": "nothing, since samples of a prompt share it",
        "max_num_seqs": "batching.max_sequences",
        "max_num_active_seqs": "batching.max_sequences",
        "max_num_batched_tokens": "batching.prefill_chunk_tokens",
        "max_num_scheduled_tokens": "batching.prefill_chunk_tokens",
        "enable_chunked_prefill": "batching.prefill_chunk_tokens",
        "scheduling_policy": "the field priority of a request",
        "scheduler_cls": "nothing, since admission counts on vLLM's own scheduler",
        "worker_cls": "nothing, since admission counts on vLLM's own worker",
        "worker_extension_cls": "nothing, since it is what resumes answers after a restart",
        "structured_outputs_config": "nothing, since grammars are those of the native engine",
        "disable_log_stats": "nothing, since the engine has metrics of its own",
        "enable_lora": _ADAPTERS,
        "max_lora_rank": "memory.max_lora_rank",
        "max_loras": _MAX_LORAS,
        "max_cpu_loras": _MAX_LORAS,
        "lora_modules": _ADAPTERS,
        "host": _SERVED_BY_ULLAGE,
        "port": _SERVED_BY_ULLAGE,
        "api_key": _SERVED_BY_ULLAGE,
    }
)
"""vLLM arguments that users may not set, each with the setting to use instead."""
_ARGUMENT = re.compile(r"[a-z][a-z0-9_]*")


class VllmSection(Strict, frozen=True, kw_only=True):
    """Settings for workers that run vLLM."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of `vllm.EngineArgs` that this configuration has no field for."""

    def __post_init__(self) -> None:
        for name in self.args:
            if not _ARGUMENT.fullmatch(name):
                raise ValueError(
                    f"args.{name} is not an argument of vLLM; write it as vllm.EngineArgs does, "
                    "with lower-case letters, digits and underscores"
                )
            if instead := OWNED_VLLM_ARGS.get(name):
                raise ValueError(f"args.{name} is not yours to set; instead use {instead}")


class GroupSection(Strict, frozen=True, kw_only=True):
    """The pods of one multi-node vLLM engine. This pod is the leader, and the others follow it."""

    nodes: Positive = 1
    """Number of pods. Each pod has `gpus` / `nodes` GPUs of the engine."""
    join_port: Port = 29500
    """Port of the leader to which followers connect.

    If the leader or a follower exits, the other end detects the closed connection.
    """
    vllm_port: Port = 29501
    """Port of the leader for vLLM's rendezvous (`master_port` in vLLM)."""


def follower_place(index: int, nodes: int) -> tuple[int, int]:
    """Return the index of a follower's leader, and the follower's node rank in its engine.

    Args:
        index: the follower's index among all followers in the pool.
        nodes: the number of nodes per engine. The leader has rank 0.
    """
    leader, position = divmod(index, nodes - 1)
    return leader, position + 1


class RankGrid(Strict, frozen=True, kw_only=True):
    """How a model is sharded across an engine's devices."""

    tensor: int = 1
    """Number of tensor-parallel ranks, across which each layer is sharded."""
    pipeline: int = 1
    """Number of pipeline stages, each with consecutive layers. tensor * pipeline equals `gpus`."""


class ParallelismSection(RankGrid, frozen=True, kw_only=True):
    micro_batches: Positive = 6
    """Number of micro-batches into which a step is split for the pipeline stages."""
    decode_batches: Positive | None = None
    """Maximum number of decode batches in flight at once.

    None means one per pipeline stage if each stage has a separate device. On CPUs, where stages
    share processors and memory, None means one in total.
    """
    nccl: dict[str, str] = msgspec.field(default_factory=dict)
    """NCCL variables that override those in `ullage_engine.server.worker_env.TRANSFER_ENV`."""


class HostTierSection(Strict, frozen=True, kw_only=True):
    """Settings for the host-memory KV tier. Its content survives a worker process restart."""

    size: SomeBytes | None = None
    """Bytes of host memory to allocate when the engine starts.

    0 turns off the host tier and all tiers below it. None means 256 MiB if there are tiers below
    the host tier. Otherwise None means the size that `default_host_tier` returns.
    """


class FileTierSection(Strict, frozen=True, kw_only=True):
    """Settings for the file-based KV tier. Its content survives a restart of the engine."""

    path: Text
    """Folder of the files, created if missing. Engines that share a folder use separate files."""
    size: Annotated[Bytes, msgspec.Meta(ge=1)] = 2 << 30
    """Maximum total size of one engine's files, in bytes."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path {self.path!r} is not absolute; begin it with /")


class RemoteTierSection(Strict, frozen=True, kw_only=True):
    """Settings for the remote KV tier, which shares blocks with engines serving the same model."""

    peers: tuple[Text, ...]
    """Addresses of the other engines, as host:port.

    A host name that resolves to several addresses stands for several peers. This engine's own
    address is ignored.
    """
    deadline: SomeSeconds = 1.0
    """Maximum seconds for one transfer of blocks."""
    copy: bool = False
    """Whether to copy a block to one peer if the block was used twice or belongs to a session.

    The copies remain available after this engine stops.
    """
    server_name: Text | None = None
    """Expected name in the peers' certificates, or None for the host in each peer's address."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            addresses.split(peer)


DEFAULT_HOST_TIER = 256 << 20
_MIN_DEFAULT_HOST_TIER = 16 << 20
_GPU_WORKER_BYTES = 1 << 30
"""Estimated bytes of host memory that Python, torch and the CUDA context use per GPU worker."""


class HostedTiers(Strict, frozen=True, kw_only=True):
    host: HostTierSection = HostTierSection()

    @property
    def asked_host_bytes(self) -> int | None:
        """Return the requested size of the host tier in bytes, or None if no size is requested.

        A size is requested if the configuration sets one or has a tier below the host tier.
        The engine refuses to start if there is not enough memory for this size.
        """
        has_lower = any(getattr(self, name) for name in ("remote", "file"))
        return DEFAULT_HOST_TIER if self.host.size is None and has_lower else self.host.size


class TiersSection(HostedTiers, frozen=True, kw_only=True):
    """Storage tiers for KV that does not fit on the device, from fastest to slowest."""

    remote: RemoteTierSection | None = None
    file: FileTierSection | None = None

    def __post_init__(self) -> None:
        if self.host.size != 0:
            return
        for name in ("remote", "file"):
            if getattr(self, name):
                raise ValueError(
                    f"host.size is 0, but the tier {name} passes blocks through host memory; set "
                    f"host.size, such as 268435456, or leave {name} out"
                )


class MemoryLimits(MemoryBudget, frozen=True, kw_only=True):
    """Limits on the memory that KV and adapters may use."""

    session_kv_limit: Bytes = 512 << 20
    """Maximum KV bytes of one session, both while its requests run and between requests.

    With 0, no KV is kept between a session's requests, and its running requests have no limit.
    """
    max_kv: Bytes | None = None
    """Maximum KV bytes per device, or None for the default that `kv_limit` returns."""
    adapter_percent: SomePercent = 10.0
    """Maximum percentage of each device's memory to use for LoRA adapter slots.

    The engine allocates as many slots as fit, at most `max_loras` and at least one.
    """
    max_loras: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum number of LoRA adapters that are loaded at a time.

    With 0, the engine serves no adapters. None means 8 if the engine starts with adapters, and 0
    otherwise.
    """
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=512)] = 16
    """Maximum rank of an adapter. Every adapter slot is allocated for this rank."""
    device_bytes: Bytes | None = None
    """Memory budget of a CPU device in bytes, or None for the cgroup's limit."""
    prefix_cache: bool = True
    """Whether to keep computed KV and share it with requests that have the same prefix."""
    session_idle: Seconds = 300.0
    """How long a session may be idle before its KV is evicted ahead of other KV, in seconds."""
    host_kv: Bytes = 0
    """Bytes of host memory for swapping out preempted sequences (0 to recompute them instead)."""

    @property
    def adapter_share(self) -> float:
        return self.adapter_percent / 100


MAX_CPU_KV = 20 << 30


def kv_limit(memory: MemoryLimits, *, on_cpu: bool) -> int | None:
    """Return the limit on a device's KV in bytes, or None if only the memory budget limits it.

    A GPU has no default limit, because its memory has no other use. On a CPU, a default limit
    applies, because other processes need part of the memory, and because KV is useless if the cores
    cannot read it in time.
    """
    return MAX_CPU_KV if memory.max_kv is None and on_cpu else memory.max_kv


def default_host_tier(
    memory: MemoryLimits, device: Device, num_ranks: int, limit: int | None
) -> int:
    """Return the default size of the host tier in bytes, or 0 for no host tier.

    The default is 256 MiB. In a container with a memory limit, the host tier gets at most an eighth
    of what remains of the limit after the rest of the engine has taken its memory. If this is less
    than 16 MiB, there is no host tier.

    Args:
        num_ranks: number of the engine's workers in one container.
        limit: memory limit of the container in bytes, or None without a limit.
    """
    if limit is None:
        return DEFAULT_HOST_TIER
    budget = limit if memory.device_bytes is None else memory.device_bytes * num_ranks
    on_cpu = int(memory.threshold * budget)
    on_gpus = memory.host_kv + _GPU_WORKER_BYTES * num_ranks
    taken = {"cpu": on_cpu, "cuda": on_gpus, "auto": max(on_cpu, on_gpus)}[device]
    size = min(DEFAULT_HOST_TIER, (limit - taken) // 8)
    return size if size >= _MIN_DEFAULT_HOST_TIER else 0


class MemorySection(MemoryLimits, frozen=True, kw_only=True):
    tiers: TiersSection = TiersSection()


PREFILL_CHUNK_TOKENS = 512
"""Default of `prefill_chunk_tokens` for the native engine."""


class BatchingSection(Strict, frozen=True, kw_only=True):
    prefill_window: Seconds = 0.006
    decode_window: Seconds = 0.003
    decode_max_batch_tokens: int = 8192
    """Maximum number of sequences that one step decodes, one token each.

    The engine also limits how much KV these sequences read in one step. It measures this limit at
    startup.
    """
    prefill_chunk_tokens: int | None = None
    """Maximum number of prompt tokens computed in one step. 0 turns chunked prefill off.

    None means 512 for the native engine, and vLLM's own default for vLLM.
    """
    max_sequences: int = 64
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """Maximum draft tokens per sequence and step, from prompt lookup (0 for no speculation)."""


class LimitsSection(RequestLimits, frozen=True, kw_only=True):
    step_deadline: Annotated[Seconds, msgspec.Meta(ge=1.0)] = 30.0
    """A worker with pending work is restarted if no step finishes for this many seconds."""


class DegradeLevel(Strict, frozen=True, kw_only=True):
    """Limits on requests that apply while headroom is below a percentage of the KV pool."""

    below_percent: Percent
    max_output_tokens: int | None = None
    max_temperature: float | None = None
    max_top_p: float | None = None
    batch_percent: Percent | None = None
    """Maximum number of running sequences, as a percentage of `batching.max_sequences`."""

    @property
    def below(self) -> float:
        return self.below_percent / 100

    @property
    def batch_share(self) -> float | None:
        return None if self.batch_percent is None else self.batch_percent / 100


class ThrottlingSection(Strict, frozen=True, kw_only=True):
    """Settings for shrinking the batch while the driver throttles a GPU."""

    enabled: bool = True
    power_cap: bool = False
    """Whether throttling at the power limit is treated like thermal throttling.

    Many healthy GPUs reach the power limit at full load.
    """
    after: Seconds = 10.0
    """Seconds of throttling that make the batch shrink by another `batch_step_percent`."""
    recover_after: Seconds = 30.0
    """Seconds without throttling that make the batch grow by another `batch_step_percent`."""
    batch_step_percent: SomePercent = 25.0
    """Percentage of `batching.max_sequences` by which the batch shrinks or grows at a time."""
    min_batch_percent: SomePercent = 25.0
    """Minimum batch size while GPUs throttle, as a percentage of `batching.max_sequences`."""

    @property
    def batch_step(self) -> float:
        return self.batch_step_percent / 100

    @property
    def min_batch_share(self) -> float:
        return self.min_batch_percent / 100


class DegradeSection(Strict, frozen=True, kw_only=True):
    change_sampling: bool = True
    """Whether pressure levels may lower temperature and top_p."""
    hysteresis_percent: Percent = 5.0
    pressure_levels: tuple[DegradeLevel, ...] = ()
    """Pressure levels, in any order.

    If headroom is below the thresholds of several levels, the one with the smallest `below_percent`
    applies.
    """
    throttling: ThrottlingSection = ThrottlingSection()

    @property
    def hysteresis(self) -> float:
        return self.hysteresis_percent / 100


class ServerSection(Strict, frozen=True, kw_only=True):
    engine_id: str = "engine-0"
    """Id of the engine, unique within the service (the pod's name on Kubernetes)."""
    pool: str = "single"
    host: str | None = None
    """Address to listen on, or None for all IPv4 and IPv6 addresses."""
    grpc_port: int = 9000
    metrics_port: int = 9090
    probe_port: int | None = None
    """Read-only port without TLS, for grpc.health.v1 and headroom reports.

    It has no TLS because the kubelet's probes do not support TLS.
    """
    tls_dir: str | None = None
    """Folder with tls.crt, tls.key and ca.crt, or None for plaintext.

    The engine reloads the files when they change. Clients must have a certificate that the
    authority in ca.crt has signed.
    """
    run_dir: str = "/run/ullage"
    """Folder for sockets and for files that need not survive the process."""
    weights_dir: str = "/run/ullage/weights"
    """Folder of prepared weights, which workers memory-map. Engines on one host may share it."""
    threads: int | None = None
    """CPU threads per worker, or None for one per core that the process may use."""
    cores: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """Indices of the CPU cores to which the engine is pinned (empty for no pinning)."""
    owns_cores: bool | None = None
    """Whether no other engine uses these cores. Idle threads may then spin instead of sleeping.

    None means True if the engine may use only some of the machine's cores.
    """
    standby_worker: bool = False
    """Whether to keep a standby vLLM worker that replaces a worker that exits.

    The standby worker has already imported its libraries. On a CPU, its memory is accounted for in
    the memory ledger. Native workers need none, because they are forked from a process that has
    imported the libraries.
    """
    allow_fault_injection: bool = False
    log_level: LogLevel = "info"


class TicketsSection(TicketFolder, frozen=True, kw_only=True):
    """Settings for requests that clients send directly to engines with a router's ticket."""

    required: bool = False
    """Whether every request needs a ticket.

    If tickets are required, the port is exposed to clients, so the engine does not serve
    AdminService on it.
    """


class ProfilingSection(Strict, frozen=True, kw_only=True):
    """Settings for profiling engine steps."""

    enabled: bool = False
    """Whether AdminService serves profiles to everyone who can reach the port."""
    nvtx: bool = False
    """Whether to mark engine steps with NVTX ranges, for profiling CUDA devices in Nsight."""


class EngineConfig(Strict, frozen=True, kw_only=True):
    engine: EngineKind = "auto"
    """The engine that runs the model: native or vLLM. For auto, `choose_engine` decides."""
    model: ModelSection
    adapters: tuple[AdapterSection, ...] = ()
    adapters_file: Text | None = None
    """File whose `adapters` replace the adapters in this configuration, or None.

    The engine reloads the file whenever it changes.
    """
    vllm: VllmSection = VllmSection()
    device: Device = "auto"
    gpus: Positive = 1
    """Number of GPUs, or of worker processes on a CPU."""
    parallelism: ParallelismSection = ParallelismSection()
    group: GroupSection = GroupSection()
    memory: MemorySection = MemorySection()
    batching: BatchingSection = BatchingSection()
    limits: LimitsSection = LimitsSection()
    degrade: DegradeSection = DegradeSection()
    tickets: TicketsSection | None = None
    """Ticket settings. If None, the engine ignores tickets and accepts every request."""
    server: ServerSection = ServerSection()
    profiling: ProfilingSection = ProfilingSection()
    cuda_graphs: bool | None = None
    """Whether to replay decode-only steps as CUDA graphs. None means no.

    The setting takes effect only if a single native rank runs a model without experts, using GPU
    kernels. It is experimental: it has not run on a GPU, and no manifest sets it.
    """
    tracing: TracingSection | None = None
    """Where to send request traces, or None for no tracing."""

    def __post_init__(self) -> None:
        if problem := name_taken_twice(self.model.name, self.adapters):
            raise ValueError(problem)
        if self.adapters and self.max_loras == 0:
            raise ValueError(
                "memory.max_loras is 0, so that no adapter can be loaded; raise it, or leave "
                "adapters out"
            )
        if self.gpus % self.group.nodes:
            raise ValueError(
                f"gpus {self.gpus} is not a multiple of group.nodes {self.group.nodes}, which "
                "divide them equally; change one of them"
            )
        if self.memory.tiers.remote and self.tickets and self.tickets.required:
            raise ValueError(
                "memory.tiers.remote is set, but with tickets.required clients reach the port at "
                "which engines read and write one another's KV; leave one of them out"
            )

    @property
    def num_local_ranks(self) -> int:
        """Return the number of ranks on each node."""
        return self.gpus // self.group.nodes

    @property
    def max_loras(self) -> int:
        """Return the maximum number of adapters loaded at once (0 if adapters are disabled)."""
        has_adapters = bool(self.adapters) or self.adapters_file is not None
        return default_max_loras(self.memory.max_loras, has_adapters=has_adapters)


DEFAULT_MAX_LORAS = 8


def default_max_loras(asked: int | None, *, has_adapters: bool) -> int:
    """Return the maximum number of adapters loaded at once.

    This is `asked` if it is set. Otherwise it is DEFAULT_MAX_LORAS for an engine that starts with
    adapters, and 0 for one that does not.
    """
    if asked is not None:
        return asked
    return DEFAULT_MAX_LORAS if has_adapters else 0


def name_taken_twice(model: str, adapters: Iterable[AdapterSection]) -> str:
    """Return an error message if an adapter has the name of the model or of another adapter.

    The message is empty if all names are unique.
    """
    taken = {model}
    for place, adapter in enumerate(adapters):
        if adapter.name in taken:
            return (
                f"adapters[{place}].name is {adapter.name!r}, the name of the model or of another "
                "adapter; give it a name of its own"
            )
        taken.add(adapter.name)
    return ""


VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM has kernels for. Any other rank uses the memory of the next larger one."""


def refusal_by_vllm(model: ModelSection, memory: MemoryLimits) -> str:
    """Return why vLLM refuses these settings (empty if it accepts them).

    The reason is one line that names the field and a remedy.
    """
    if model.quantization not in ("auto", "none", "fp8"):
        return (
            f"model.quantization: only the native engine has {model.quantization}; with vLLM set "
            "fp8, or use a quantised checkpoint"
        )
    if model.deterministic:
        return (
            "model.deterministic: vLLM has no such mode here; set false, or choose the native "
            "engine"
        )
    if memory.host_kv:
        return (
            "memory.host_kv: vLLM recomputes preempted requests; set 0, or choose the native engine"
        )
    return ""


def choose_engine(
    kind: EngineKind,
    *,
    on_cuda: bool,
    has_vllm: bool,
    native_refusal: str = "",
    vllm_refusal: str = "",
) -> tuple[Literal["native", "vllm"], str]:
    """Choose the engine that runs the model, and return it with the reason.

    Args:
        on_cuda: whether the device is a CUDA GPU.
        has_vllm: whether vLLM is installed, or included in the container image.
        native_refusal: why the native engine does not serve the model (empty if it does).
        vllm_refusal: why vLLM refuses the settings, from `refusal_by_vllm` (empty if vLLM accepts
            them).
    """
    if kind != "auto":
        return kind, f"engine is {kind}"
    if not has_vllm:
        return "native", "vLLM is not installed"
    if vllm_refusal:
        return "native", f"vLLM refuses {vllm_refusal}"
    if on_cuda:
        return "vllm", "vLLM is installed and the device is a CUDA GPU"
    if native_refusal:
        return "vllm", f"the native engine does not serve the model: {native_refusal}"
    return "native", "the device is a CPU and the native engine serves the model"
