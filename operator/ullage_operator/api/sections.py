"""Sections of a spec that only the operator reads.

Sections that routers and engines also read are in `ullage_common.config`.
"""

import posixpath
from typing import Any, Literal

from msgspec import field

from ullage_common.config.engine import HostedTiers, HostTierSection, MemoryLimits, RankGrid
from ullage_common.config.router import CORSSection, FilesLimits, PoolRole
from ullage_common.process.config_file import Bytes, Seconds, Strict
from ullage_operator.api import naming

Retention = Literal["retain", "delete"]
USER = 65532
"""User and group ID in the images, which is also the CRD's default."""


class Thresholds(Strict, frozen=True, kw_only=True):
    error_percent: float
    ttft_percent: int
    e2e_percent: int
    restarts: int
    agreement_percent: float = 85.0
    perplexity_percent: int = 120

    @property
    def error_rate(self) -> float:
        return self.error_percent / 100

    @property
    def ttft_ratio(self) -> float:
        return self.ttft_percent / 100

    @property
    def e2e_ratio(self) -> float:
        return self.e2e_percent / 100


class AnswersSpec(Strict, frozen=True, kw_only=True):
    """The prompts whose answers are compared between the canary and stable engines."""

    prompts: Literal["configMap", "sampled"]
    config_map_name: str | None = None


class RolloutSpec(Strict, frozen=True, kw_only=True):
    strategy: Literal["auto", "canary", "rolling"]
    weight_steps: tuple[int, ...]
    step_duration: Seconds
    min_requests: int
    max_wait: Seconds
    start_deadline: Seconds
    canary_replicas: int
    thresholds: Thresholds
    auto_rollback: bool
    paused: bool
    surge: Literal["auto", "always", "never"] = "auto"
    max_unavailable: int | str = "25%"
    answers: AnswersSpec | None = None
    """Which answers to compare, or None to compare none."""

    def most_unavailable(self, replicas: int) -> int:
        """Return the maximum number of a pool's engines that a rollout may make unavailable.

        A percentage is rounded down, but the result is at least one engine.
        """
        if isinstance(self.max_unavailable, int):
            return min(self.max_unavailable, replicas)
        percent = int(self.max_unavailable.removesuffix("%"))
        return min(max(1, replicas * percent // 100), replicas)


class ClaimTemplate(Strict, frozen=True, kw_only=True):
    """The template of a persistent volume claim that Kubernetes creates for each pod."""

    size: int | str
    storage_class_name: str | None = None


class ModelCache(Strict, frozen=True, kw_only=True):
    claim_name: str | None = None
    host_path: str | None = None
    size_limit: int | str | None = None
    claim_template: ClaimTemplate | None = None
    warm: bool = False
    """Whether a Job downloads the model into the claim before engines need it."""


class ClaimRetention(Strict, frozen=True, kw_only=True):
    """The retention policy of a claim template's volumes."""

    when_deleted: Retention
    when_scaled: Retention


class ResourceClaim(Strict, frozen=True, kw_only=True):
    """Devices that each pod claims through dynamic resource allocation (DRA)."""

    name: str
    resource_claim_template_name: str
    request: str | None = None
    """Name of the claim's request that the engine uses, or None for all requests."""


class RemoteTierSpec(Strict, frozen=True, kw_only=True):
    """Settings for the remote KV tier, which reuses KV blocks held by the pool's other engines.

    The engines are found through the pool's Service.
    """

    deadline: Seconds
    copy: bool


class FileTierSpec(Strict, frozen=True, kw_only=True):
    size: Bytes
    path: str | None = None
    """Folder in the container, or None for the operator's default."""
    claim_name: str | None = None
    host_path: str | None = None

    @property
    def folder(self) -> str:
        """Return the folder in the container, without double or trailing slashes."""
        return posixpath.normpath("/" + (self.path or naming.KV_DIR).lstrip("/"))


class TiersSpec(HostedTiers, frozen=True, kw_only=True):
    host: HostTierSection
    remote: RemoteTierSpec | None = None
    file: FileTierSpec | None = None


class MemorySpec(MemoryLimits, frozen=True, kw_only=True):
    """The `memory` section of the engine configuration, plus the KV tiers from the spec."""

    tiers: TiersSpec


class PodSection(Strict, frozen=True, kw_only=True):
    """Base class of sections whose pod fields have the same names as in Kubernetes."""

    resources: dict[str, dict[str, int | str]] = field(default_factory=dict)
    pod_template: dict[str, Any] = field(default_factory=dict)
    """Pod fields to merge with the pod fields that the operator sets."""


class Targets(Strict, frozen=True, kw_only=True):
    kv_utilization_percent: int
    queue_wait: Seconds
    ttft: bool

    @property
    def kv_utilization(self) -> float:
        return self.kv_utilization_percent / 100


class ScalingPace(Strict, frozen=True, kw_only=True):
    """Limits on how fast the number of pods may change in one direction, up or down."""

    window: Seconds
    pods: int
    percent: int
    period: Seconds


class AuthenticationRef(Strict, frozen=True, kw_only=True):
    name: str
    kind: str


class KEDATrigger(Strict, frozen=True, kw_only=True):
    """A trigger of a KEDA ScaledObject, with the field names that KEDA uses."""

    type: str
    metadata: dict[str, str]
    name: str | None = None
    metric_type: str | None = None
    use_cached_metrics: bool | None = None
    authentication_ref: AuthenticationRef | None = None


class KEDASpec(Strict, frozen=True, kw_only=True):
    authentication_ref: AuthenticationRef | None = None
    """KEDA's credentials for the Prometheus queries that the operator generates."""
    triggers: tuple[KEDATrigger, ...] = ()


class AutoscalingSpec(Strict, frozen=True, kw_only=True):
    enabled: bool
    provider: Literal["ullage", "keda"]
    min_replicas: int
    max_replicas: int
    warm_spares: int
    targets: Targets
    scale_up: ScalingPace
    scale_down: ScalingPace
    idle_after: Seconds
    prometheus_url: str | None = None
    keda: KEDASpec | None = None


class PoolSpec(PodSection, frozen=True, kw_only=True):
    role: PoolRole = "standard"
    replicas: int
    """Number of engines, or the current number if the pool is autoscaled."""
    autoscaling: AutoscalingSpec | None = None
    gpus: int
    """Number of GPUs per engine, summed over all of its nodes."""
    nodes: int
    """Number of pods that one engine spans."""
    gpu_resource_name: str
    resource_claims: tuple[ResourceClaim, ...] = ()
    """Device claims that give the pods their GPUs instead of `gpu_resource_name`."""
    parallelism: RankGrid
    micro_batches: int
    standby_worker: bool = False
    nccl: dict[str, str] = field(default_factory=dict)
    memory: MemorySpec
    """The service's memory section, with the pool's own fields merged over it."""
    shm_size: int | str | None = None
    start_timeout: Seconds
    model_cache: ModelCache = ModelCache()
    persistent_volume_claim_retention_policy: ClaimRetention

    @property
    def gpus_per_pod(self) -> int:
        return self.gpus // self.nodes


class RouterServiceSpec(Strict, frozen=True, kw_only=True):
    """The routers' Service, with Kubernetes' own field names."""

    type: str = "ClusterIP"
    annotations: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    load_balancer_class: str | None = None
    load_balancer_source_ranges: tuple[str, ...] | None = None
    external_traffic_policy: str | None = None


class ParentRef(Strict, frozen=True, kw_only=True):
    name: str
    namespace: str | None = None
    section_name: str | None = None
    port: int | None = None


class GatewaySpec(Strict, frozen=True, kw_only=True):
    parent_refs: tuple[ParentRef, ...]
    hostnames: tuple[str, ...] | None = None


class RouterAutoscaling(Strict, frozen=True, kw_only=True):
    min_replicas: int
    max_replicas: int
    target_cpu_utilization_percentage: int


class FilesSpec(FilesLimits, frozen=True, kw_only=True):
    path: str | None = None
    """Folder in the container, or None for the operator's default."""
    claim_name: str | None = None

    @property
    def folder(self) -> str:
        """Return the folder in the container, without double or trailing slashes."""
        return posixpath.normpath("/" + (self.path or naming.FILES_DIR).lstrip("/"))


class RouterSpec(PodSection, frozen=True, kw_only=True):
    replicas: int
    """Number of router pods, or the current number under a HorizontalPodAutoscaler."""
    public_stats: bool = False
    cors: CORSSection | None = None
    files: FilesSpec | None = None
    service: RouterServiceSpec = RouterServiceSpec()
    gateway: GatewaySpec | None = None
    autoscaling: RouterAutoscaling | None = None

    @property
    def most_replicas(self) -> int:
        """Return the maximum number of router pods."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas


class ServiceAccount(Strict, frozen=True, kw_only=True):
    name: str | None = None
    """Name of an existing ServiceAccount, or None if the operator should create ServiceAccounts."""
    annotations: dict[str, str] = field(default_factory=dict)


class SecurityContext(Strict, frozen=True, kw_only=True):
    """User and group IDs of all pods. Fields that are None are left to the cluster or the image."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None


class PullSecret(Strict, frozen=True, kw_only=True):
    name: str
