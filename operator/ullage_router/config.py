"""The router's configuration: one YAML or JSON file, read once, never changed.

The operator writes this file (`ullage_operator.manifests`); sizes are bytes and times are seconds.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ullage_router.cascade.config import CascadeSection
from ullage_router.pick.config import TicketsSection
from ullage_router.wake.config import WakeSection
from ullage_rpc.config import Strict, read_file
from ullage_rpc.keys import TENANT_NAME
from ullage_rpc.limits import MAX_PRIORITY

LARGE_POOL = "large"
OTHER_TENANTS = "other"
"""Metrics' label of tenants with a key that are not listed."""

Rung = Literal["shrinkContext", "shrinkOutput", "queue", "route", "reject"]
DEFAULT_LADDER: tuple[Rung, ...] = ("shrinkContext", "shrinkOutput", "queue", "route", "reject")

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
RetryAfter = Annotated[int, msgspec.Meta(ge=1, le=30)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class HTTPSection(Strict, frozen=True, kw_only=True):
    host: str = "0.0.0.0"
    port: Port = 8000
    """0 takes a free port, which the log names."""


class GRPCSection(Strict, frozen=True, kw_only=True):
    host: str = "0.0.0.0"
    port: Port = 9000


class MetricsSection(Strict, frozen=True, kw_only=True):
    host: str = "0.0.0.0"
    port: Port = 9090


class ProbesSection(Strict, frozen=True, kw_only=True):
    """grpc.health.v1 and nothing else, without TLS, which the kubelet's probes do not speak."""

    host: str = "0.0.0.0"
    port: Port = 8081


class PoolSection(Strict, frozen=True, kw_only=True):
    name: Text
    """The pool named `large` takes the large requests."""
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """`name:port`, where every A record is an engine, or `ip:port`."""
    sleeps: bool = False
    """It may have no engine and gets one when a request wants it, which is held meanwhile."""

    def __post_init__(self) -> None:
        for target in self.targets:
            host, colon, port = target.rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"target {target!r} is not host:port, such as engines:9000")


class QueueSection(Strict, frozen=True, kw_only=True):
    max_requests: Count = 256
    max_bytes: Count = 64 << 30
    """Most predicted bytes that wait for memory."""
    max_prompt_bytes: Count = 256 << 20
    """Most memory of this process that waiting requests hold."""
    timeout: Seconds = 10.0
    """Longest wait of one request."""
    aging: Seconds = 0.05
    """Waiting this long makes up for one level of priority."""


class ShrinkContextSection(Strict, frozen=True, kw_only=True):
    max_dropped_share: Share = 1.0
    """Of the prompt's tokens, what may go at most."""
    keep_turns: Positive = 1
    """Newest turns that always stay, as system prompts do."""


class ShrinkOutputSection(Strict, frozen=True, kw_only=True):
    min_tokens: Positive = 16
    """The output is not shrunk below this."""
    min_share: Share = 0.25
    """Of what was asked for, nor below this."""


class RouteSection(Strict, frozen=True, kw_only=True):
    pools: tuple[Text, ...] = ()
    """Where else a request may go, preferred first; empty: every other pool in its order."""


class RejectSection(Strict, frozen=True, kw_only=True):
    min_retry_after: RetryAfter = 1
    max_retry_after: RetryAfter = 30
    """Bounds of Retry-After, seconds."""

    def __post_init__(self) -> None:
        low, high = self.min_retry_after, self.max_retry_after
        if low > high:
            raise ValueError(f"min_retry_after {low} is above max_retry_after {high}; lower it")


class RungsSection(Strict, frozen=True, kw_only=True):
    """The thresholds of each rung; those of waiting are in `queue`."""

    shrink_context: ShrinkContextSection = ShrinkContextSection()
    shrink_output: ShrinkOutputSection = ShrinkOutputSection()
    route: RouteSection = RouteSection()
    reject: RejectSection = RejectSection()


class AffinitySection(Strict, frozen=True, kw_only=True):
    """Sending requests where their beginning may be cached."""

    max_sessions: Count = 8192
    """Sessions whose engine is remembered; 0 turns it off."""
    max_prefixes: Count = 65536
    """Blocks of 64 prompt tokens whose engine is remembered; 0 turns it off."""
    max_extra_load: Count = 8
    """Requests that the remembered engine may have more than another one."""


class BreakerSection(Strict, frozen=True, kw_only=True):
    """Holding back an engine that fails requests."""

    failures: Positive = 5
    """In a row."""
    pause: Seconds = 1.0
    """The first one; every failed probe doubles it."""
    max_pause: Seconds = 60.0
    max_ejected_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Most of a pool's ready engines that are held back at once; 0 turns it off."""

    def __post_init__(self) -> None:
        if self.pause > self.max_pause:
            raise ValueError(
                f"pause {self.pause:g} is above max_pause {self.max_pause:g}; lower it"
            )


class RetrySection(Strict, frozen=True, kw_only=True):
    """Trying another engine before the first token."""

    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    """Of requests."""
    per_second: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Always allowed, beside the share."""
    burst: Positive = 100
    """Most that can be saved up."""


class PlacementSection(Strict, frozen=True, kw_only=True):
    """Which of the engines that have room gets a request."""

    affinity: AffinitySection = AffinitySection()
    breaker: BreakerSection = BreakerSection()
    retries: RetrySection = RetrySection()


class PrefillSection(Strict, frozen=True, kw_only=True):
    """How prompts are spread over engines that are busy with others."""

    window: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.006
    """How long they wait for others to be spread together; 0: they do not."""
    mlp_products: Count = 8192
    """Products of a query and a key that all else of a token's layers costs as much as."""


class CoalesceSection(Strict, frozen=True, kw_only=True):
    """Sharing of one generation by identical deterministic requests."""

    enabled: bool = True
    window: Seconds = 0.003
    """How long others may join one that has sent something."""
    across_tenants: bool = False


class ReplaceSection(Strict, frozen=True, kw_only=True):
    """Whether a later request with the same idempotency key ends the earlier one."""

    enabled: bool = True


class RoutingSection(Strict, frozen=True, kw_only=True):
    large_request_tokens: Positive = 8000
    """Prompts longer than this take the large pool."""
    large_request_kv: Positive = 6000 << 20
    """Requests predicted above this many KV bytes take the large pool."""
    ladder: tuple[Rung, ...] = DEFAULT_LADDER
    """What is tried, in this order, when a request does not fit; its end is always a refusal."""
    rungs: RungsSection = RungsSection()
    queue: QueueSection = QueueSection()
    placement: PlacementSection = PlacementSection()
    prefill: PrefillSection = PrefillSection()
    coalesce: CoalesceSection = CoalesceSection()
    replace: ReplaceSection = ReplaceSection()
    wake: WakeSection = WakeSection()

    def __post_init__(self) -> None:
        if len(set(self.ladder)) != len(self.ladder):
            raise ValueError(f"ladder {list(self.ladder)} names a rung twice; name each once")
        if "reject" in self.ladder[:-1]:
            raise ValueError(f"ladder {list(self.ladder)} goes on after reject; put reject last")


class CleanseSection(Strict, frozen=True, kw_only=True):
    """What is taken out of every conversation; system prompts, code and JSON stay."""

    whitespace: bool = False
    zero_width: bool = False
    html: bool = False


class CompressSection(Strict, frozen=True, kw_only=True):
    """Summing up the oldest turns of a long conversation."""

    method: Literal["extractive", "model", "off"] = "extractive"
    threshold: Annotated[float, msgspec.Meta(ge=0.1, le=1)] = 0.75
    """Share of the context from which on it is done."""
    share: Annotated[float, msgspec.Meta(ge=0.05, le=0.9)] = 0.25
    """Share of the turns, the oldest, that are summed up."""
    fact_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.9
    """Share of their facts that the summary must have, or it is not used."""
    keep_turns: Positive = 4
    """Newest turns that stay word for word."""
    timeout: Seconds = 5.0
    """For the model's summary."""


class PromptsSection(Strict, frozen=True, kw_only=True):
    cleanse: CleanseSection = CleanseSection()
    compress: CompressSection = CompressSection()


class LimitsSection(Strict, frozen=True, kw_only=True):
    max_output_tokens: Positive = 4096
    request_timeout: Seconds = 30.0
    """From the request's arrival to its last token."""


class StreamingSection(Strict, frozen=True, kw_only=True):
    """How tokens reach a client."""

    buffer_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Tokens that an engine may be ahead of a client that reads slowly."""
    coalesce_tokens: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """Most tokens that leave together."""
    coalesce_window: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.02
    """Longest that tokens wait for others; 0: not at all. A client that got none for so long gets
    the next one at once."""
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Pace of one streamed answer; 0: as fast as tokens come."""
    keepalive: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    """A comment is sent after so long without a token; 0: never."""


class MemorySection(Strict, frozen=True, kw_only=True):
    """The engines' budget; they apply it, the router shows it in /stats."""

    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    safety_reserve: Count = 2 << 30


class TenantRules(Strict, frozen=True, kw_only=True):
    """What a tenant may do; what is unset is unlimited."""

    enabled: bool = True
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Prompt and output together."""
    concurrency: Positive | None = None
    """Requests at once, those that wait included."""
    priority: Priority = 0
    """Of requests that ask for none."""
    max_priority: Priority | None = None
    """Highest that a request may ask for; unset: `priority`."""
    weight: Seconds = 1.0
    """Share of the queue among tenants of equal priority."""
    tokens_per_second: Seconds | None = None
    """Pace of each stream."""
    max_tokens: Positive | None = None
    """Longest output of an answer."""
    models: tuple[Text, ...] = ()
    """Names that its requests may use; none named: all."""


class NamedTenant(TenantRules, frozen=True, kw_only=True):
    name: Text


class TenantsSection(Strict, frozen=True, kw_only=True):
    keys_dir: Text
    """One file a tenant, with a key or `sha256:` entry in each line; read again when it changes."""
    anonymous: Literal["allow", "deny"] = "deny"
    """Whether requests without a key are served, under the rules of the tenant `anonymous`."""
    protect_stats: bool = False
    """/stats needs a key, too."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Part of every limit that this process lets through: others let through the rest."""
    defaults: TenantRules = TenantRules()
    """Of tenants with a key that are not listed."""
    tenants: tuple[NamedTenant, ...] = ()

    def __post_init__(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        for name in names:
            if not TENANT_NAME.fullmatch(name) or name == OTHER_TENANTS:
                raise ValueError(
                    f"tenant {name!r} cannot be named so; use lower-case letters, digits, "
                    f"'-', '_' and '.', and not {OTHER_TENANTS!r}"
                )
        if len(set(names)) != len(names):
            raise ValueError(f"tenants {names} share a name; give each its own")


class ServerTLS(Strict, frozen=True, kw_only=True):
    """Of the HTTP and the gRPC port."""

    dir: Text
    """Folder with tls.crt and tls.key."""
    client_ca_dir: Text | None = None
    """Folder with ca.crt: clients must have a certificate of this authority."""


class EngineTLS(Strict, frozen=True, kw_only=True):
    """Towards engines."""

    dir: Text
    """Folder with tls.crt, tls.key and ca.crt, the authority of the engines' certificates."""
    server_name: Text
    """That engines' certificates have: they are called by address."""


class TLSSection(Strict, frozen=True, kw_only=True):
    router: ServerTLS | None = None
    engines: EngineTLS | None = None


class SLOSection(Strict, frozen=True, kw_only=True):
    """What is counted as late."""

    ttft_p95: Seconds = 7.0


class RouterConfig(Strict, frozen=True, kw_only=True):
    model: Text
    """Served name; requests for another are answered 404."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """In order of preference."""
    http: HTTPSection = HTTPSection()
    grpc: GRPCSection = GRPCSection()
    metrics: MetricsSection = MetricsSection()
    probes: ProbesSection | None = None
    tls: TLSSection = TLSSection()
    tickets: TicketsSection | None = None
    """Unset: Pick is off."""
    routing: RoutingSection = RoutingSection()
    prompts: PromptsSection = PromptsSection()
    limits: LimitsSection = LimitsSection()
    streaming: StreamingSection = StreamingSection()
    memory: MemorySection = MemorySection()
    slo: SLOSection = SLOSection()
    tenants: TenantsSection | None = None
    """Unset: everybody may do everything."""
    cascade: CascadeSection | None = None
    """None: this service's own engines answer everything."""
    rollout_file: Text | None = None
    """Says which engines are a canary's (`canary.RolloutFile`)."""
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Router processes that share the ports."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools {names} share a name; give each its own")
        unknown = sorted(set(self.routing.rungs.route.pools) - set(names))
        if unknown:
            raise ValueError(f"routing.rungs.route.pools {unknown} are none of the pools {names}")


def read_config(path: Path) -> RouterConfig:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: see `ullage_rpc.config.read_file`.
    """
    return read_file(path, RouterConfig)
