"""The parts of a spec about pods: pools of engines, and routers."""

from typing import Any

from msgspec import field

from ullage_operator.sections import Bytes, Seconds, Section

SINGLE, LARGE = "single", "large"


class Parallelism(Section, frozen=True, kw_only=True):
    tensor: int
    pipeline: int


class Memory(Section, frozen=True, kw_only=True):
    threshold: float
    safety_reserve: Bytes
    session_kv_limit: Bytes
    max_kv: Bytes
    device_bytes: Bytes | None = None
    prefix_cache: bool
    session_idle: Seconds
    host_kv: Bytes


class ModelCache(Section, frozen=True, kw_only=True):
    claim_name: str | None = None
    host_path: str | None = None
    size_limit: int | str | None = None


class Placing(Section, frozen=True, kw_only=True):
    """Where pods run and what they carry, in the API's own words."""

    resources: dict[str, dict[str, int | str]] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    affinity: dict[str, Any] = field(default_factory=dict)
    topology_spread_constraints: list[dict[str, Any]] = field(default_factory=list)
    priority_class_name: str | None = None
    pod_labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)


class Targets(Section, frozen=True, kw_only=True):
    kv_utilization: float
    queue_wait: Seconds
    ttft: bool


class Pace(Section, frozen=True, kw_only=True):
    """How fast the number of pods changes in one direction."""

    window: Seconds
    pods: int
    percent: int
    period: Seconds


class Autoscaling(Section, frozen=True, kw_only=True):
    enabled: bool
    provider: str
    min_replicas: int
    max_replicas: int
    warm_spares: int
    targets: Targets
    scale_up: Pace
    scale_down: Pace
    idle_after: Seconds
    prometheus_url: str | None = None


class Pool(Placing, frozen=True, kw_only=True):
    replicas: int
    """Engine pods; where they follow demand, the number of this moment."""
    autoscaling: Autoscaling | None = None
    gpus: int
    gpu_resource_name: str
    parallelism: Parallelism
    micro_batches: int
    nccl: dict[str, str] = field(default_factory=dict)
    memory: Memory
    """The service's memory with the pool's own fields over it."""
    runtime_class_name: str | None = None
    shm_size: int | str
    start_timeout: Seconds
    model_cache: ModelCache = ModelCache()
    env: list[dict[str, Any]] = field(default_factory=list)
    env_from: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    volume_mounts: list[dict[str, Any]] = field(default_factory=list)


class Router(Placing, frozen=True, kw_only=True):
    replicas: int
    processes: int


class ServiceAccount(Section, frozen=True, kw_only=True):
    annotations: dict[str, str] = field(default_factory=dict)


class PullSecret(Section, frozen=True, kw_only=True):
    name: str
