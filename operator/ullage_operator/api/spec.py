"""Immutable types for an LLMService, with bytes and seconds instead of quantities and durations.

This module sets no defaults, because every default comes from the CRD
(`ullage_operator.api.schema`).
"""

from typing import Any, Literal

import msgspec

from ullage_common.config.engine import (
    AdapterSection,
    BatchingSection,
    DegradeSection,
    Device,
    EngineKind,
    LimitsSection,
    ModelSection,
    ProfilingSection,
    VllmSection,
)
from ullage_common.config.router import (
    Anonymous,
    ConfidenceSection,
    FallbackSection,
    HeuristicsSection,
    NamedTenant,
    PromptsSection,
    RoutingSection,
    SLOSection,
    StreamingSection,
    TenantRules,
)
from ullage_common.process.addresses import split
from ullage_common.process.config_file import LogLevel, Seconds, Strict
from ullage_common.process.tracing import TracingSection
from ullage_operator.api import naming
from ullage_operator.api.sections import (
    MemorySpec,
    PoolSpec,
    PullSecret,
    RolloutSpec,
    RouterSpec,
    SecurityContext,
    ServiceAccount,
)


class S3Spec(Strict, frozen=True, kw_only=True):
    """Settings for the object store that serves `s3://` sources.

    By default, this is AWS S3, which is accessed with the pod's identity.
    """

    endpoint: str | None = None
    region: str | None = None
    secret_name: str | None = None
    anonymous: bool = False


class StepTLSSpec(Strict, frozen=True, kw_only=True):
    secret_name: str
    server_name: str | None = None


class CascadeStep(Strict, frozen=True, kw_only=True):
    service: str | None = None
    address: str | None = None
    own: bool = False
    tls: StepTLSSpec | None = None
    key_secret_name: str | None = None

    def __post_init__(self) -> None:
        if self.address:
            split(self.address)

    def name(self, service: str) -> str:
        """Return the name that identifies this cascade step in headers, metrics and logs.

        Args:
            service: the name of the service that defines the cascade, which is the result if the
                step runs on that service's own engines.
        """
        return self.service or self.address or service

    @property
    def target(self) -> str:
        """Return the gRPC address of the step's router (empty for the service's own engines)."""
        if self.service:
            return f"{naming.router_name(self.service)}:{naming.GRPC_PORT}"
        return self.address or ""

    def server_name(self, namespace: str) -> str:
        """Return the server name to expect in the certificate of the step's router."""
        if self.tls and self.tls.server_name:
            return self.tls.server_name
        if self.service:
            return f"{naming.router_name(self.service)}.{namespace}.svc"
        return split(self.target)[0]


class CascadeSpec(Strict, frozen=True, kw_only=True):
    steps: tuple[CascadeStep, ...]
    confidence: ConfidenceSection
    heuristics: HeuristicsSection
    parallel: bool
    fallback: FallbackSection | None = None

    @property
    def complete_steps(self) -> tuple[CascadeStep, ...]:
        """Return all steps of the cascade.

        The service's own engines are appended as the last step unless the spec already lists them.
        """
        if any(step.own for step in self.steps):
            return self.steps
        return (*self.steps, CascadeStep(own=True))


class TenantsSpec(Strict, frozen=True, kw_only=True):
    secret_name: str
    anonymous: Anonymous
    protect_stats: bool
    across_routers: Literal["split", "each"]
    defaults: TenantRules
    named: tuple[NamedTenant, ...]


class RouterTLSSpec(Strict, frozen=True, kw_only=True):
    secret_name: str
    client_ca_secret_name: str | None = None


class EngineTLSSpec(Strict, frozen=True, kw_only=True):
    secret_name: str
    router_secret_name: str | None = None
    server_name: str | None = None


class TLSSpec(Strict, frozen=True, kw_only=True):
    router: RouterTLSSpec | None = None
    engines: EngineTLSSpec | None = None


class TicketsSpec(Strict, frozen=True, kw_only=True):
    secret_name: str
    ttl: Seconds
    required: bool


class BackoffSpec(Strict, frozen=True, kw_only=True):
    first: Seconds
    max: Seconds


class HealingSpec(Strict, frozen=True, kw_only=True):
    enabled: bool
    not_ready_after: Seconds
    silent_after: Seconds
    min_health_percent: int
    restarts_per_hour: int
    backoff: BackoffSpec

    @property
    def min_health(self) -> float:
        return self.min_health_percent / 100


class SLOSpec(SLOSection, frozen=True, kw_only=True):
    e2e_p95: Seconds
    error_percent: float

    @property
    def error_rate(self) -> float:
        return self.error_percent / 100


class PodMonitor(Strict, frozen=True, kw_only=True):
    enabled: bool
    interval: Seconds
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class PrometheusRule(Strict, frozen=True, kw_only=True):
    enabled: bool
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class ConsoleSpec(Strict, frozen=True, kw_only=True):
    enabled: bool


class ObservabilitySpec(Strict, frozen=True, kw_only=True):
    log_level: LogLevel | None = None
    tracing: TracingSection | None = None
    console: ConsoleSpec
    profiling: ProfilingSection
    pod_monitor: PodMonitor
    prometheus_rule: PrometheusRule
    metrics_from: list[dict[str, Any]] | None = None
    """NetworkPolicy peers that may read metrics, or None for the operator's default."""


class BaseRef(Strict, frozen=True, kw_only=True):
    name: str


class Spec(Strict, frozen=True, kw_only=True):
    model: ModelSection
    base_refs: tuple[BaseRef, ...] = ()
    """Bases over which the other fields were merged. The last base takes precedence."""
    device: Device
    engine: EngineKind
    vllm: VllmSection
    adapters: tuple[AdapterSection, ...] = ()
    adapter_claims: tuple[str, ...] | None = None
    """Claims that engines mount for adapters (never None in a parsed spec)."""
    image: str | None = None
    stop: bool
    """Whether the service is stopped, which scales all of its pools to zero engines."""
    allow_fault_injection: bool
    service_account: ServiceAccount
    security_context: SecurityContext
    image_pull_secrets: tuple[PullSecret, ...] = ()
    model_pull_policy: str | None = None
    """Pull policy of the model's image. With None, Kubernetes derives the policy from the tag."""
    s3: S3Spec | None = None
    router: RouterSpec
    replicas: int
    """Number of engines of the first pool, unless the pool sets its own number."""
    pools: dict[str, PoolSpec]
    """Pools in order of preference: ordered by role, then by name."""
    memory: MemorySpec
    routing: RoutingSection
    cascade: CascadeSpec | None = None
    prompts: PromptsSection
    batching: BatchingSection
    limits: LimitsSection
    streaming: StreamingSection
    degrade: DegradeSection
    tenants: TenantsSpec | None = None
    tickets: TicketsSpec | None = None
    tls: TLSSpec = TLSSpec()
    healing: HealingSpec
    rollout: RolloutSpec
    slo: SLOSpec
    observability: ObservabilitySpec

    @property
    def serves_adapters(self) -> bool:
        """Return whether the engines of any pool reserve slots for LoRA adapters.

        They may do so even if the spec lists no adapters.
        """
        return any(pool.memory.max_loras for pool in self.pools.values())


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """An LLMService: its identity in the cluster and its spec."""

    name: str
    namespace: str
    uid: str
    """Kubernetes uid of the service (empty outside Kubernetes)."""
    generation: int
    spec: Spec


def image_of(source: str) -> str:
    """Return the image reference of an `oci://` source (empty for other sources)."""
    scheme, _, reference = source.partition("://")
    return reference.partition("#")[0] if scheme == "oci" else ""


def claim_of(source: str) -> str:
    """Return the claim of a `pvc://` source (empty for other sources)."""
    scheme, _, path = source.partition("://")
    return path.partition("/")[0] if scheme == "pvc" else ""
