"""The engine's configuration: one YAML or JSON file, read once, never changed.

The operator writes this file (`ullage_operator.manifests`); sizes are bytes and times are seconds.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ullage_rpc.config import Strict, read_file


class ModelSection(Strict, frozen=True, kw_only=True):
    source: str
    """`pkg://package/file`, `file:///path`, `hf://org/name@revision`, `pvc://claim/path`."""
    name: str
    """Name clients use."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto is bfloat16 where the device computes in it."""
    quantization: Literal["none", "int8", "int4", "fp8", "w8a8"] = "none"
    """Format that matrices of an unquantised checkpoint are brought to; w8a8 needs a calibration,
    which `ullage quantize` makes. A checkpoint that is quantised itself says so."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Type of stored keys and values: the computing type, or float8 E4M3."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens; None is the model's own limit."""
    deterministic: bool = False


class ParallelismSection(Strict, frozen=True, kw_only=True):
    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages of consecutive layers; tensor * pipeline is `gpus`."""
    micro_batches: Annotated[int, msgspec.Meta(ge=1)] = 6
    """Parts of a step that flow through the stages one behind the other."""
    nccl: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment of NCCL, over `ullage_engine.core.worker_env.TRANSFER_ENV`."""


class MemorySection(Strict, frozen=True, kw_only=True):
    threshold: float = 0.85
    """Share of the device that may be used."""
    safety_reserve: int = 2 << 30
    session_kv_limit: int = 512 << 20
    max_kv: int = 20 << 30
    device_bytes: int | None = None
    """Budget of a CPU device; None is the cgroup's limit."""
    prefix_cache: bool = True
    """Keep computed KV and share it with requests that begin alike."""
    session_idle: float = 300.0
    """Seconds without a request after which a session's KV may be evicted like any other."""
    host_kv: int = 0
    """Host memory for sequences preempted by swapping; 0 recomputes them."""


class BatchingSection(Strict, frozen=True, kw_only=True):
    prefill_window: float = 0.006
    decode_window: float = 0.003
    decode_max_batch_tokens: int = 8192
    prefill_chunk_tokens: int = 512
    """Most prompt tokens computed in one step; 0 turns chunking off."""
    max_sequences: int = 64


class LimitsSection(Strict, frozen=True, kw_only=True):
    max_output_tokens: int = 4096
    request_timeout: float = 30.0
    step_deadline: Annotated[float, msgspec.Meta(ge=1.0)] = 30.0
    """A worker that has work and finishes no step for this long is restarted."""


class DegradeLevel(Strict, frozen=True, kw_only=True):
    """What requests are given less of while headroom is below a share of the KV pool."""

    below: float
    max_output_tokens: int | None = None
    max_temperature: float | None = None
    max_top_p: float | None = None
    batch_share: float | None = None
    """Share of `batching.max_sequences` that run at once."""


class DegradeSection(Strict, frozen=True, kw_only=True):
    change_sampling: bool = True
    """Levels may lower temperature and top_p."""
    hysteresis: float = 0.05
    levels: tuple[DegradeLevel, ...] = ()
    """In any order; of those whose `below` exceeds the headroom the smallest holds."""


class ServerSection(Strict, frozen=True, kw_only=True):
    engine_id: str = "engine-0"
    """Unique in the service; the pod's name on Kubernetes."""
    pool: str = "single"
    host: str = "0.0.0.0"
    grpc_port: int = 9000
    metrics_port: int = 9090
    probe_port: int | None = None
    """grpc.health.v1 and headroom, read only and without TLS, which the kubelet does not speak."""
    tls_dir: str | None = None
    """Folder with tls.crt, tls.key and ca.crt: clients must have a certificate of that authority.
    None: plaintext. Read again when it changes."""
    run_dir: str = "/run/ullage"
    """Sockets, and nothing that must outlive the process."""
    weights_dir: str = "/run/ullage/weights"
    """Prepared weights, mapped by every worker; engines of one host may share it."""
    threads: int | None = None
    """CPU threads of a worker; None is every core the process may use."""
    allow_fault_injection: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class TicketsSection(Strict, frozen=True, kw_only=True):
    """Requests that come straight from clients, with a router's leave."""

    keys_dir: Annotated[str, msgspec.Meta(min_length=1)]
    """Folder with one key a file, the same as the routers'."""
    required: bool = False
    """Nothing is taken without a ticket, and AdminService is not served: clients reach the port."""


class EngineConfig(Strict, frozen=True, kw_only=True):
    model: ModelSection
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: Annotated[int, msgspec.Meta(ge=1)] = 1
    """GPUs, or worker processes on a CPU."""
    parallelism: ParallelismSection = ParallelismSection()
    memory: MemorySection = MemorySection()
    batching: BatchingSection = BatchingSection()
    limits: LimitsSection = LimitsSection()
    degrade: DegradeSection = DegradeSection()
    tickets: TicketsSection | None = None
    """Unset: whoever reaches this engine may use it, and tickets are not looked at."""
    server: ServerSection = ServerSection()


def read_config(path: Path) -> EngineConfig:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: see `ullage_rpc.config.read_file`.
    """
    return read_file(path, EngineConfig)
