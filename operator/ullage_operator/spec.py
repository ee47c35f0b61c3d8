"""An LLMService as frozen values: bytes and seconds instead of quantities and durations.

Every default comes from the CRD (`ullage_operator.schema`), so none is spelled here.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ullage_operator import naming, schema
from ullage_operator.errors import InvalidManifest, Problem
from ullage_operator.pools import (
    LARGE,
    SINGLE,
    Memory,
    Pool,
    PullSecret,
    Router,
    ServiceAccount,
)
from ullage_operator.quantity import amount, parse_bytes, parse_seconds
from ullage_operator.routing import Routing
from ullage_operator.sections import Bytes, Rollout, Seconds, Section, Streaming


class Model(Section, frozen=True, kw_only=True):
    source: str
    name: str
    dtype: str
    quantization: str
    kv_dtype: str
    max_model_len: int | None = None
    deterministic: bool


class Step(Section, frozen=True, kw_only=True):
    service: str | None = None
    address: str | None = None
    own: bool = False

    def name(self, service: str) -> str:
        """How headers, metrics and logs call it.

        Args:
            service: whose cascade it is.
        """
        return self.service or self.address or service

    @property
    def target(self) -> str:
        """The gRPC address of its router; empty for the own engines."""
        if self.service:
            return f"{naming.router_name(self.service)}:{naming.GRPC_PORT}"
        return self.address or ""


class Confidence(Section, frozen=True, kw_only=True):
    tokens: int
    threshold: float


class Heuristics(Section, frozen=True, kw_only=True):
    prompt_characters: int
    turns: int
    code: bool
    maths: bool
    tools: bool


class Fallback(Section, frozen=True, kw_only=True):
    pressure_level: int
    queued_requests: int
    max_priority: int


class Cascade(Section, frozen=True, kw_only=True):
    steps: tuple[Step, ...]
    confidence: Confidence
    heuristics: Heuristics
    parallel: bool
    fallback: Fallback | None = None

    @property
    def complete_steps(self) -> tuple[Step, ...]:
        """With the own engines, which come last unless a step names them."""
        if any(step.own for step in self.steps):
            return self.steps
        return (*self.steps, Step(own=True))


class Cleanse(Section, frozen=True, kw_only=True):
    whitespace: bool
    zero_width: bool
    html: bool


class Compress(Section, frozen=True, kw_only=True):
    method: str
    threshold: float
    share: float
    fact_share: float
    keep_turns: int
    timeout: Seconds


class Prompts(Section, frozen=True, kw_only=True):
    cleanse: Cleanse
    compress: Compress


class Batching(Section, frozen=True, kw_only=True):
    prefill_window: Seconds
    decode_window: Seconds
    decode_max_batch_tokens: int
    prefill_chunk_tokens: int
    max_sequences: int


class Limits(Section, frozen=True, kw_only=True):
    max_output_tokens: int
    request_timeout: Seconds
    step_deadline: Seconds


class DegradeLevel(Section, frozen=True, kw_only=True):
    below: float
    max_output_tokens: int | None = None
    max_temperature: float | None = None
    max_top_p: float | None = None
    batch_share: float | None = None


class Degrade(Section, frozen=True, kw_only=True):
    change_sampling: bool
    hysteresis: float
    levels: tuple[DegradeLevel, ...]


class TenantRules(Section, frozen=True, kw_only=True):
    """What is unset is unlimited, or what the router takes it for."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    priority: int | None = None
    max_priority: int | None = None
    weight: float | None = None
    tokens_per_second: float | None = None
    max_tokens: int | None = None
    models: tuple[str, ...] | None = None


class NamedTenant(TenantRules, frozen=True, kw_only=True):
    name: str
    enabled: bool


class Tenants(Section, frozen=True, kw_only=True):
    secret_name: str
    anonymous: str
    protect_stats: bool
    across_routers: str
    defaults: TenantRules
    named: tuple[NamedTenant, ...]


class RouterTLS(Section, frozen=True, kw_only=True):
    secret_name: str
    client_ca_secret_name: str | None = None


class EngineTLS(Section, frozen=True, kw_only=True):
    secret_name: str
    router_secret_name: str | None = None
    server_name: str | None = None


class TLS(Section, frozen=True, kw_only=True):
    router: RouterTLS | None = None
    engines: EngineTLS | None = None


class Tickets(Section, frozen=True, kw_only=True):
    secret_name: str
    ttl: Seconds
    required: bool


class Backoff(Section, frozen=True, kw_only=True):
    first: Seconds
    max: Seconds


class Healing(Section, frozen=True, kw_only=True):
    enabled: bool
    not_ready_after: Seconds
    silent_after: Seconds
    min_health: float
    restarts_per_hour: int
    backoff: Backoff


class SLO(Section, frozen=True, kw_only=True):
    ttft_p95: Seconds
    e2e_p95: Seconds
    error_rate: float


class PodMonitor(Section, frozen=True, kw_only=True):
    enabled: bool
    interval: str
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class PrometheusRule(Section, frozen=True, kw_only=True):
    enabled: bool
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class Observability(Section, frozen=True, kw_only=True):
    log_level: str | None = None
    pod_monitor: PodMonitor
    prometheus_rule: PrometheusRule
    metrics_from: list[dict[str, Any]]
    """Peers of a NetworkPolicy."""


class Spec(Section, frozen=True, kw_only=True):
    model: Model
    device: str
    image: str | None = None
    allow_fault_injection: bool
    service_account: ServiceAccount
    image_pull_secrets: tuple[PullSecret, ...] = ()
    router: Router
    pools: dict[str, Pool]
    """In order of preference: single, large, the others by name."""
    memory: Memory
    routing: Routing
    cascade: Cascade | None = None
    prompts: Prompts
    batching: Batching
    limits: Limits
    streaming: Streaming
    degrade: Degrade
    tenants: Tenants | None = None
    tickets: Tickets | None = None
    tls: TLS = TLS()
    healing: Healing
    rollout: Rollout
    slo: SLO
    observability: Observability


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One LLMService."""

    name: str
    namespace: str
    uid: str
    """Empty outside Kubernetes."""
    generation: int
    spec: Spec


def parse(manifest: Any, default_namespace: str = "default") -> Service:
    """The service that a manifest describes.

    Raises:
        InvalidManifest: the API server would refuse it, or an unknown field was written.
    """
    stored, problems = schema.complete(schema.load_schema(), manifest)
    if problems := problems or excesses(stored["spec"]):
        raise InvalidManifest(problems)
    metadata = stored["metadata"]
    return Service(
        name=metadata["name"],
        namespace=metadata.get("namespace", default_namespace),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        spec=msgspec.convert(with_pool_memory(stored["spec"]), Spec, dec_hook=decode),
    )


def parse_stored(manifest: Any) -> Service:
    """The service that an API server stored.

    It stores no field that its definition does not know. So what is unknown here comes from a
    definition newer than this operator, as while both are upgraded: it is left to the next one.

    Raises:
        InvalidManifest: as `parse`.
    """
    return parse(schema.prune(schema.load_schema(), manifest))


def excesses(spec: Mapping[str, Any]) -> list[Problem]:
    """Requests above their limits, which Kubernetes takes in no pod.

    The definition has no rule for them: API servers before 1.34 take every quantity for megabytes
    of text, and then comparing two costs more than they allow.
    """
    places = {"router": spec["router"]} | {f"pools.{n}": pool for n, pool in spec["pools"].items()}
    return [
        Problem(
            f"spec.{place}.resources.requests.{name}",
            f"{asked} exceeds the limit {limits[name]}; lower the request or raise the limit",
        )
        for place, section in places.items()
        for resources in [section.get("resources", {})]
        for limits in [resources.get("limits", {})]
        for name, asked in resources.get("requests", {}).items()
        if name in limits and amount(asked) > amount(limits[name])
    ]


def with_pool_memory(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with every pool's memory complete, and pools in order of preference."""
    known = {name: rank for rank, name in enumerate((SINGLE, LARGE))}
    ordered = sorted(spec["pools"].items(), key=lambda item: (known.get(item[0], 2), item[0]))
    pools = {
        name: pool | {"memory": spec["memory"] | pool.get("memory", {})} for name, pool in ordered
    }
    return {**spec, "pools": pools}


def decode(kind: type[Any], value: Any) -> Any:
    """Turns the API's text into bytes and seconds."""
    return Bytes(parse_bytes(value)) if kind is Bytes else Seconds(parse_seconds(value))
