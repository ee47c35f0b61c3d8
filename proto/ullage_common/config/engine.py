"""The engine's configuration: one YAML or JSON file, read once, never changed."""

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
    """The engines' budget; they apply it, routers show it in /stats."""

    threshold_percent: SomePercent = 85.0
    """Percent of the device that may be used."""
    safety_reserve: SomeBytes = 2 << 30
    """Bytes of each device that stay empty under the threshold."""

    @property
    def threshold(self) -> float:
        return self.threshold_percent / 100


class RequestLimits(Strict, frozen=True, kw_only=True):
    max_output_tokens: Positive = 4096
    request_timeout: SomeSeconds = 30.0
    """Longest time in seconds without a token: from the request's arrival to its first token, and
    from each token to the next. Beam searches and best_of above n, of which nothing is sent before
    the end, are bounded by `total_timeout` only."""
    total_timeout: SomeSeconds = 540.0
    """Longest time in seconds from the request's arrival to its last token."""

    def __post_init__(self) -> None:
        if self.request_timeout > self.total_timeout:
            raise ValueError(
                f"request_timeout {self.request_timeout:g} is above total_timeout "
                f"{self.total_timeout:g}; raise total_timeout"
            )


class TicketFolder(Strict, frozen=True, kw_only=True):
    keys_dir: Text
    """Folder with one key a file, the same for routers and engines; the last by name signs."""


# Engines alone read the rest.


class ModelSection(Strict, frozen=True, kw_only=True):
    source: str
    """URI of the model: `pkg://package/file`, `file:///path`, `hf://org/name@revision`,
    `s3://bucket/prefix` or `pvc://claim/path`."""
    name: str
    """Name by which clients ask for the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto is bfloat16 where the device computes in it."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8", "w8a8"] = "auto"
    """Format that matrices of an unquantised checkpoint are converted to; w8a8 needs a calibration,
    which `ullage quantize` makes. A checkpoint that is quantised itself says so. auto converts no
    matrix of a layer, and on x86 CPUs with AVX2 computes with a GGUF file's blocks as they are."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Type of stored keys and values. fp8 is float8 E4M3; auto is the type of activations, but
    bfloat16 where `dtype` is auto and the C++ library for CPUs computes."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens; None is the model's own limit."""
    deterministic: bool = False
    allow_unknown_config: bool = False
    """Log keys of the model's configuration that the native engine does not know, and compute
    without them, instead of refusing the model."""
    generation_defaults: bool = True
    """Whether sampling parameters that a request leaves out are those of the model's
    generation_config.json or GGUF metadata; else they are the API's."""


class AdapterSection(Strict, frozen=True, kw_only=True):
    """A LoRA adapter of the model, which clients choose by its name."""

    name: Text
    source: str
    """URI of the adapter's folder, as a model's."""
    rank: Positive
    """Rank of its matrices, at most `memory.max_lora_rank`."""


class AdaptersFile(Strict, frozen=True, kw_only=True):
    """A file with the adapters of an engine that runs, which loads and unloads what is edited."""

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
"""What to set instead of the arguments of vLLM that are Ullage's to set, by the argument's name."""
_ARGUMENT = re.compile(r"[a-z][a-z0-9_]*")


class VllmSection(Strict, frozen=True, kw_only=True):
    """What only workers with vLLM read."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of `vllm.EngineArgs` that this configuration has no field for."""

    def __post_init__(self) -> None:
        for name in self.args:
            if not _ARGUMENT.fullmatch(name):
                raise ValueError(
                    f"args.{name} is no argument of vLLM; write it as vllm.EngineArgs does, with "
                    "lower-case letters, digits and underscores"
                )
            if instead := OWNED_VLLM_ARGS.get(name):
                raise ValueError(f"args.{name} is not yours to set; instead use {instead}")


class GroupSection(Strict, frozen=True, kw_only=True):
    """The pods that one engine with vLLM spans: this one, which leads, and its followers."""

    nodes: Positive = 1
    """Number of pods; each has `gpus` / `nodes` of the engine's GPUs."""
    join_port: Port = 29500
    """Port of the leader at which followers join, and by whose connections each side learns that
    the other has ended."""
    vllm_port: Port = 29501
    """Port of the leader for vLLM's own rendezvous, its `master_port`."""


def follower_place(index: int, nodes: int) -> tuple[int, int]:
    """Return the index of a follower's leader, and its rank among the nodes of the engine.

    Args:
        index: among the followers of all engines of a pool.
        nodes: of one engine; the leader has rank 0.
    """
    leader, position = divmod(index, nodes - 1)
    return leader, position + 1


class RankGrid(Strict, frozen=True, kw_only=True):
    """How the devices of an engine divide a model."""

    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages of consecutive layers; tensor * pipeline is `gpus`."""


class ParallelismSection(RankGrid, frozen=True, kw_only=True):
    micro_batches: Positive = 6
    """Parts of a step that flow through the stages one behind the other."""
    decode_batches: Positive | None = None
    """Batches of decodes in flight at once; None is one for each stage where a stage has a device
    of its own, and one in all on CPUs, whose stages share processors and memory."""
    nccl: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment of NCCL, over `ullage_engine.server.worker_env.TRANSFER_ENV`."""


class HostTierSection(Strict, frozen=True, kw_only=True):
    """KV in host memory, which outlives the worker."""

    size: SomeBytes | None = None
    """Memory that is taken when the engine starts, beside the device's; 0: there is no such tier,
    and none below it. None: 256 MiB where there are tiers below it, else `default_host_tier`."""


class FileTierSection(Strict, frozen=True, kw_only=True):
    """KV in files, which outlive the engine."""

    path: Text
    """Folder, made if it is missing; engines may share it, each has its own files in it."""
    size: Annotated[Bytes, msgspec.Meta(ge=1)] = 2 << 30
    """Most bytes that the files of one engine take."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path {self.path!r} is not absolute; begin it with /")


class RemoteTierSection(Strict, frozen=True, kw_only=True):
    """KV of other engines with the same model."""

    peers: tuple[Text, ...]
    """Addresses of them, host:port; a name that has several addresses is several peers, and what is
    this engine itself is left out."""
    deadline: SomeSeconds = 1.0
    """Seconds that one transfer of blocks may take."""
    copy: bool = False
    """Whether blocks that are used twice, or kept for a session, are copied to one peer, so that
    they outlive this engine."""
    server_name: Text | None = None
    """Name that the peers' certificates have; None: the host of their address."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            addresses.split(peer)


DEFAULT_HOST_TIER = 256 << 20
_MIN_DEFAULT_HOST_TIER = 16 << 20
_GPU_WORKER_BYTES = 1 << 30
"""Host memory of a worker of a GPU: Python, torch and the device's context."""


class HostedTiers(Strict, frozen=True, kw_only=True):
    host: HostTierSection = HostTierSection()

    @property
    def asked_host_bytes(self) -> int | None:
        """Size that the host tier must have, or the engine does not start; None: nobody asked for
        one, neither by its size nor by a tier below it.
        """
        has_lower = any(getattr(self, name) for name in ("remote", "file"))
        return DEFAULT_HOST_TIER if self.host.size is None and has_lower else self.host.size


class TiersSection(HostedTiers, frozen=True, kw_only=True):
    """Where KV is kept that the device has no room for, the fastest first."""

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
    """What KV and adapters may take."""

    session_kv_limit: Bytes = 512 << 20
    """Most KV of one session, between its requests and while they run; 0: none is kept, and nothing
    is bounded."""
    max_kv: Bytes | None = None
    """Most KV of a device; None: `kv_limit` has the default."""
    adapter_percent: SomePercent = 10.0
    """Percent of each device that slots of LoRA adapters may take: there are as many as fit into
    it, at most `max_loras`, and one at least."""
    max_loras: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most LoRA adapters that are loaded at a time; 0: the engine serves none. None: 8 where the
    engine starts with adapters, else 0."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=512)] = 16
    """Largest rank of an adapter, which all slots have room for."""
    device_bytes: Bytes | None = None
    """Budget of a CPU device; None is the cgroup's limit."""
    prefix_cache: bool = True
    """Whether computed KV is kept and shared with requests that begin alike."""
    session_idle: Seconds = 300.0
    """Seconds without a request after which a session's KV is evicted before any other."""
    host_kv: Bytes = 0
    """Host memory for sequences preempted by swapping; 0 recomputes them."""

    @property
    def adapter_share(self) -> float:
        return self.adapter_percent / 100


MAX_CPU_KV = 20 << 30


def kv_limit(memory: MemoryLimits, *, on_cpu: bool) -> int | None:
    """Return the most KV bytes of a device; None if its budget is the only limit.

    A GPU's memory is there for nothing else. Of a CPU's, other processes want a part, and KV that
    its cores cannot read in time is of no use.
    """
    return MAX_CPU_KV if memory.max_kv is None and on_cpu else memory.max_kv


def default_host_tier(
    memory: MemoryLimits, device: Device, num_ranks: int, limit: int | None
) -> int:
    """Return the size of a host tier that nobody asked for, which is to be in nobody's way.

    It is 256 MiB, and at most an eighth of what the rest of the engine leaves of a limit; below
    16 MiB there is none, and 0 is returned.

    Args:
        num_ranks: workers of the engine in one container.
        limit: bytes that the container may take; None: no limit.
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


class BatchingSection(Strict, frozen=True, kw_only=True):
    prefill_window: Seconds = 0.006
    decode_window: Seconds = 0.003
    decode_max_batch_tokens: int = 8192
    """Most sequences that one step decodes, a token each. How much KV they read together is bounded
    by what was measured at the start."""
    prefill_chunk_tokens: int | None = None
    """Most prompt tokens computed in one step; 0 turns chunking off. None is 512, or with vLLM what
    vLLM takes for the device."""
    max_sequences: int = 64
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """Most draft tokens of a sequence that one step checks, found by prompt lookup; 0: none."""


class LimitsSection(RequestLimits, frozen=True, kw_only=True):
    step_deadline: Annotated[Seconds, msgspec.Meta(ge=1.0)] = 30.0
    """Seconds after which a worker that has work and finishes no step is restarted."""


class DegradeLevel(Strict, frozen=True, kw_only=True):
    """Limits of requests while headroom is below a percentage of the KV pool."""

    below_percent: Percent
    max_output_tokens: int | None = None
    max_temperature: float | None = None
    max_top_p: float | None = None
    batch_percent: Percent | None = None
    """Percent of `batching.max_sequences` that run at once."""

    @property
    def below(self) -> float:
        return self.below_percent / 100

    @property
    def batch_share(self) -> float | None:
        return None if self.batch_percent is None else self.batch_percent / 100


class ThrottlingSection(Strict, frozen=True, kw_only=True):
    """When fewer sequences run at once because the driver slows GPUs down."""

    enabled: bool = True
    power_cap: bool = False
    """Whether the power limit counts as heat does. Many GPUs reach it at full load in good
    health."""
    after: Seconds = 10.0
    """Seconds of throttling after which the batch shrinks by `batch_step_percent`, and again after
    as many more."""
    recover_after: Seconds = 30.0
    """Seconds without any throttling after which it grows by `batch_step_percent`."""
    batch_step_percent: SomePercent = 25.0
    """Percent of `batching.max_sequences` that one step takes or gives back."""
    min_batch_percent: SomePercent = 25.0
    """Percent of `batching.max_sequences` that run at once whatever the heat."""

    @property
    def batch_step(self) -> float:
        return self.batch_step_percent / 100

    @property
    def min_batch_share(self) -> float:
        return self.min_batch_percent / 100


class DegradeSection(Strict, frozen=True, kw_only=True):
    change_sampling: bool = True
    """Levels may lower temperature and top_p."""
    hysteresis_percent: Percent = 5.0
    pressure_levels: tuple[DegradeLevel, ...] = ()
    """Levels in any order; of those whose `below_percent` exceeds the headroom the smallest
    holds."""
    throttling: ThrottlingSection = ThrottlingSection()

    @property
    def hysteresis(self) -> float:
        return self.hysteresis_percent / 100


class ServerSection(Strict, frozen=True, kw_only=True):
    engine_id: str = "engine-0"
    """Id of the engine, unique in the service; the pod's name on Kubernetes."""
    pool: str = "single"
    host: str | None = None
    """Address to listen at; None: every address, of IPv4 and IPv6."""
    grpc_port: int = 9000
    metrics_port: int = 9090
    probe_port: int | None = None
    """Port of grpc.health.v1 and headroom, read only and without TLS, which the kubelet does not
    speak."""
    tls_dir: str | None = None
    """Folder with tls.crt, tls.key and ca.crt: clients must have a certificate of that authority.
    None: plaintext. Read again when it changes."""
    run_dir: str = "/run/ullage"
    """Sockets, and nothing that must outlive the process."""
    weights_dir: str = "/run/ullage/weights"
    """Folder of prepared weights, mapped by every worker; engines of one host may share it."""
    threads: int | None = None
    """CPU threads of a worker; None is every core the process may use."""
    cores: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """Numbers of the cores that the engine runs on, and on no others; none: on any."""
    owns_cores: bool | None = None
    """Whether no other engine computes on these cores, so that threads spin for one another where
    they would sleep. None: if the engine may use only some of the machine's cores."""
    standby_worker: bool = False
    """Whether a second worker process has imported its libraries and waits to take over from one
    that ends. On a CPU the ledger counts its memory."""
    allow_fault_injection: bool = False
    log_level: LogLevel = "info"


class TicketsSection(TicketFolder, frozen=True, kw_only=True):
    """Requests that come straight from clients, with a router's leave."""

    required: bool = False
    """Whether nothing is taken without a ticket. AdminService is not served then: clients reach the
    port."""


class ProfilingSection(Strict, frozen=True, kw_only=True):
    """Who may look at steps."""

    enabled: bool = False
    """Whether AdminService profiles: whoever reaches the port may ask for it."""
    nvtx: bool = False
    """Whether steps have NVTX ranges, for Nsight on CUDA devices."""


class EngineConfig(Strict, frozen=True, kw_only=True):
    engine: EngineKind = "auto"
    """What computes: the native engine or vLLM; see `choose_engine` for auto."""
    model: ModelSection
    adapters: tuple[AdapterSection, ...] = ()
    adapters_file: Text | None = None
    """File whose `adapters` are served in the place of those here: it is read again whenever it
    changes. None: they stay as they are."""
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
    """Settings of tickets. Unset: whoever reaches this engine may use it, and tickets are not
    looked at."""
    server: ServerSection = ServerSection()
    profiling: ProfilingSection = ProfilingSection()
    cuda_graphs: bool | None = None
    """Whether steps of decodes alone are repeated as CUDA graphs, where one native rank computes a
    model without experts by kernels. Experimental: it has not run on a GPU, and no manifest has
    it. None: they are not."""
    tracing: TracingSection | None = None
    """Where spans of requests go; None: nowhere."""

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
                f"gpus {self.gpus} is no multiple of group.nodes {self.group.nodes}, of which each "
                "has an equal part; change one of them"
            )
        if self.memory.tiers.remote and self.tickets and self.tickets.required:
            raise ValueError(
                "memory.tiers.remote is set, but with tickets.required clients reach the port at "
                "which engines read and write one another's KV; leave one of them out"
            )

    @property
    def num_local_ranks(self) -> int:
        """Ranks on each node."""
        return self.gpus // self.group.nodes

    @property
    def max_loras(self) -> int:
        """Most adapters that are loaded at a time; 0: the engine serves none."""
        has_adapters = bool(self.adapters) or self.adapters_file is not None
        return default_max_loras(self.memory.max_loras, has_adapters=has_adapters)


DEFAULT_MAX_LORAS = 8


def default_max_loras(asked: int | None, *, has_adapters: bool) -> int:
    """Return the default number of adapters loaded at a time."""
    if asked is not None:
        return asked
    return DEFAULT_MAX_LORAS if has_adapters else 0


def name_taken_twice(model: str, adapters: Iterable[AdapterSection]) -> str:
    """Return the problem of an adapter with the name of the model or of another adapter; empty if
    none has.
    """
    taken = {model}
    for place, adapter in enumerate(adapters):
        if adapter.name in taken:
            return (
                f"adapters[{place}].name is {adapter.name!r}, which the model or another adapter "
                "is called; give it a name of its own"
            )
        taken.add(adapter.name)
    return ""


VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for; a smaller adapter takes the room of the next one."""


def refusal_by_vllm(model: ModelSection, memory: MemoryLimits) -> str:
    """Return the reason why vLLM refuses these settings, as a line that names the field and its
    remedy; empty if vLLM takes them.
    """
    if model.quantization not in ("auto", "none", "fp8"):
        return (
            f"model.quantization: {model.quantization} is the native engine's; with vLLM set fp8, "
            "or name a checkpoint that is quantised itself"
        )
    if model.deterministic:
        return (
            "model.deterministic: vLLM has no such mode here; set false, or choose the native "
            "engine"
        )
    if memory.host_kv:
        return (
            "memory.host_kv: vLLM computes preempted requests again; set 0, or choose the native "
            "engine"
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
    """Return the engine that computes, and why.

    Args:
        on_cuda: whether the device is a CUDA GPU.
        has_vllm: whether vLLM is installed, or the image has it.
        native_refusal: why the native engine does not serve the model; empty: it does.
        vllm_refusal: why vLLM does not take the settings, of `refusal_by_vllm`; empty: it does.
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
