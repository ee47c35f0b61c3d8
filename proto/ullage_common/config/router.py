"""The router's configuration: one YAML or JSON file, read once, never changed."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from ullage_common.config.engine import MemoryBudget, RequestLimits, TicketFolder
from ullage_common.process import addresses
from ullage_common.process.api_keys import TENANT_NAME
from ullage_common.process.config_file import (
    Bytes,
    Count,
    LogLevel,
    Percent,
    Port,
    Positive,
    PositiveFloat,
    Seconds,
    Share,
    SomeBytes,
    SomePercent,
    SomeSeconds,
    Strict,
    Text,
)
from ullage_common.process.tracing import TracingSection
from ullage_common.wire.limits import MAX_PRIORITY

MAX_STEPS = 4


class StepTLS(Strict, frozen=True, kw_only=True):
    dir: Text
    """Folder with tls.crt and tls.key, which this router shows if it is asked for a certificate,
    and ca.crt, the authority of the other router's certificate."""
    server_name: Text
    """Name that the other router's certificate must have."""


class StepSection(Strict, frozen=True, kw_only=True):
    name: Text
    """Name of the step in headers, metrics and logs."""
    target: str = ""
    """gRPC address `host:port` of another service's router; empty: this service's own engines."""
    tls: StepTLS | None = None
    """Settings of TLS towards that router; None: plaintext."""
    key_dir: Text | None = None
    """Folder with `key`, the API key that this service has there; None: the client's own is handed
    on."""

    def __post_init__(self) -> None:
        if self.target:
            addresses.split(self.target)
        if not self.target and (self.tls or self.key_dir):
            raise ValueError(
                f"step {self.name!r} is this service's own engines, which need neither tls nor "
                "key_dir; leave them out or give it a target"
            )


class ConfidenceSection(Strict, frozen=True, kw_only=True):
    tokens: Annotated[int, msgspec.Meta(ge=1, le=128)] = 16
    """Number of tokens that are held back and judged."""
    threshold_percent: Percent = 60.0
    """Least geometric mean of the tokens' probabilities, in percent."""

    @property
    def threshold(self) -> float:
        return self.threshold_percent / 100


class HeuristicsSection(Strict, frozen=True, kw_only=True):
    """Signs that make a prompt start a step higher, each by one; 0 and false turn one off."""

    prompt_characters: Count = 6000
    turns: Count = 10
    code: bool = True
    maths: bool = True
    tools: bool = True


class FallbackSection(Strict, frozen=True, kw_only=True):
    """Signs of load at which requests of low priority take the first step's answer, whatever its
    confidence.
    """

    pressure_level: Count = 1
    """Pressure level of every own engine that is ready; 0 turns this sign off."""
    queued_requests: Count = 8
    """Number of requests that wait in this router; 0 turns this sign off."""
    max_priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = -1
    """Requests up to this priority are low."""


class CascadeSection(Strict, frozen=True, kw_only=True):
    name: Text
    """Name of this service's cascade, unlike any other's: a request that comes back is recognised
    by it."""
    steps: Annotated[tuple[StepSection, ...], msgspec.Meta(min_length=2, max_length=MAX_STEPS)]
    """Steps of the cascade, cheapest first."""
    confidence: ConfidenceSection = ConfidenceSection()
    heuristics: HeuristicsSection = HeuristicsSection()
    parallel: bool = False
    """The next step begins together with the one that is judged."""
    fallback: FallbackSection | None = None

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names):
            raise ValueError(f"cascade.steps {names} share a name; give each its own")
        own = [step.name for step in self.steps if not step.target]
        if len(own) != 1:
            raise ValueError(
                f"cascade.steps: {len(own)} have no target; exactly one is this service's own"
            )
        if self.fallback and not self.steps[0].target:
            raise ValueError(
                "cascade.fallback: the first step is this service itself; put another before it"
            )

    @property
    def own(self) -> int:
        """Index of the step that is this service's own engines."""
        return next(i for i, step in enumerate(self.steps) if not step.target)


class RouterTickets(TicketFolder, frozen=True, kw_only=True):
    """Settings of tickets, by which clients send requests straight to engines."""

    ttl: SomeSeconds = 10.0
    """Seconds that a ticket which is not used holds its memory."""
    required: bool = False
    """Engines take nothing without a ticket, so what this router sends has one too."""


class WakeSection(Strict, frozen=True, kw_only=True):
    max_requests: Count = 256
    """Most requests that are held at once."""
    max_bytes: SomeBytes = 64 << 20
    """Most memory of this process that held requests take."""
    timeout: SomeSeconds = 300.0
    """Longest time in seconds that a request is held, beside its own time limit."""


OTHER_TENANTS = "other"
"""Metrics' label of tenants with a key that are not listed."""

Rung = Literal["shrinkContext", "shrinkOutput", "queue", "route", "reject"]
DEFAULT_LADDER: tuple[Rung, ...] = ("shrinkOutput", "queue", "route", "reject")
"""A conversation is rewritten only where a ladder names `shrinkContext`: the oldest turns of an
agent's conversation are its task."""

Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
RetryAfter = Annotated[Seconds, msgspec.Meta(ge=1, le=30)]


class HTTPSection(Strict, frozen=True, kw_only=True):
    host: str | None = None
    """Address to listen at; None: every address, of IPv4 and IPv6."""
    port: Port = 8000
    """Port of the HTTP server; 0 takes a free one, which the log names."""
    public_stats: bool = False
    """Whether /stats and /metrics are served here, too, and not on the port of the metrics only."""


ANY_ORIGIN = "*"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s,]+)$"
Origin = Annotated[str, msgspec.Meta(pattern=_ORIGIN, max_length=300)]
"""What browsers send as `Origin`: a scheme, a host and a port that is not the scheme's own."""


class CORSSection(Strict, frozen=True, kw_only=True):
    """Web pages of other origins that may use the API from a browser."""

    allowed_origins: Annotated[tuple[Origin, ...], msgspec.Meta(max_length=32)] = ()
    """`*`: those of all. The names of their hosts may be in `Host`, too, on loopback addresses."""


class GRPCSection(Strict, frozen=True, kw_only=True):
    host: str | None = None
    """Address to listen at; None: every address, of IPv4 and IPv6."""
    port: Port = 9000


class MetricsSection(Strict, frozen=True, kw_only=True):
    host: str | None = None
    """Address to listen at; None: every address, of IPv4 and IPv6."""
    port: Port = 9090


class ConsoleSection(Strict, frozen=True, kw_only=True):
    """Settings of the console, which the port of the metrics serves at /console."""

    local: bool = False
    """Whether the service is on one's own machine: the port of the API serves the page, too, which
    can send an overload then."""


class ProbesSection(Strict, frozen=True, kw_only=True):
    """Port of grpc.health.v1 alone, without TLS, which the kubelet's probes do not speak."""

    host: str | None = None
    """Address to listen at; None: every address, of IPv4 and IPv6."""
    port: Port = 8081


PoolRole = Literal["standard", "large", "overflow"]
"""Requests that a pool takes: ordinary ones, large ones, or those that the others cannot hold."""


class PoolSection(Strict, frozen=True, kw_only=True):
    name: Text
    role: PoolRole = "standard"
    """Requests that the pool takes; the first pool takes the ordinary ones, whatever its role."""
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Addresses of engines: `name:port`, where every A record is an engine (every AAAA record where
    there is none), `ip:port` or `[ip]:port`."""
    sleeps: bool = False
    """Whether the pool may have no engine and gets one when a request wants it, which is held
    meanwhile."""

    def __post_init__(self) -> None:
        for target in self.targets:
            addresses.split(target)


class QueueSection(Strict, frozen=True, kw_only=True):
    max_requests: Count = 256
    max_bytes: SomeBytes = 64 << 30
    """Most predicted bytes of requests that wait for memory."""
    max_prompt_bytes: SomeBytes = 256 << 20
    """Most memory of this process that waiting requests hold."""
    timeout: SomeSeconds = 10.0
    """Longest wait of one request."""
    aging: SomeSeconds = 0.05
    """Seconds of waiting that make up for one level of priority."""
    backfill: Count = 16
    """Most requests that pass one that waits first in line; 0: none."""


class ShrinkContextSection(Strict, frozen=True, kw_only=True):
    max_dropped_percent: SomePercent = 25.0
    """Largest percentage of the prompt's tokens that may be dropped."""
    keep_turns: Positive = 4
    """Number of newest turns that always stay, as system prompts do."""

    @property
    def max_dropped_share(self) -> float:
        return self.max_dropped_percent / 100


class ShrinkOutputSection(Strict, frozen=True, kw_only=True):
    min_tokens: Positive = 16
    """The output is not shrunk below this."""
    min_percent: SomePercent = 50.0
    """Least percentage of the requested output that a request is shrunk to."""
    below_expected: bool = False
    """Whether the output may be shrunk below what engines expect of an answer, as one that asks for
    no length otherwise never is."""

    @property
    def min_share(self) -> float:
        return self.min_percent / 100


class RouteSection(Strict, frozen=True, kw_only=True):
    pools: tuple[Text, ...] = ()
    """Other pools a request may go to, preferred first; empty: every other pool in its order."""


class RejectSection(Strict, frozen=True, kw_only=True):
    min_retry_delay: RetryAfter = 1.0
    max_retry_delay: RetryAfter = 30.0
    """Bounds of Retry-After, in seconds."""

    def __post_init__(self) -> None:
        low = self.min_retry_delay
        high = self.max_retry_delay
        if low > high:
            raise ValueError(f"min_retry_delay {low:g} is above max_retry_delay {high:g}; lower it")


class RungsSection(Strict, frozen=True, kw_only=True):
    """The thresholds of each rung; those of waiting are in `queue`."""

    shrink_context: ShrinkContextSection = ShrinkContextSection()
    shrink_output: ShrinkOutputSection = ShrinkOutputSection()
    route: RouteSection = RouteSection()
    reject: RejectSection = RejectSection()


class AffinitySection(Strict, frozen=True, kw_only=True):
    """Settings of sending requests where their beginning may be cached."""

    max_sessions: Count = 8192
    """Sessions whose engine is remembered; 0 turns it off."""
    max_prefixes: Count = 65536
    """Blocks of 64 prompt tokens whose engine is remembered; 0 turns it off."""
    max_extra_load: Count = 8
    """Requests that the remembered engine may have more than another one."""


class BreakerSection(Strict, frozen=True, kw_only=True):
    """Settings of holding back an engine that fails requests."""

    failures: Positive = 5
    """Number of failures in a row after which an engine is held back."""
    pause: SomeSeconds = 1.0
    """The first one; every failed probe doubles it."""
    max_pause: SomeSeconds = 60.0
    max_ejection_percent: Percent = 50.0
    """Largest percentage of a pool's ready engines that are held back at once; 0 turns it off."""

    def __post_init__(self) -> None:
        if self.pause > self.max_pause:
            raise ValueError(
                f"pause {self.pause:g} is above max_pause {self.max_pause:g}; lower it"
            )

    @property
    def max_ejected_share(self) -> float:
        return self.max_ejection_percent / 100


class RetrySection(Strict, frozen=True, kw_only=True):
    """Settings of trying another engine before the first token."""

    percent: Percent = 20.0
    """Retries allowed, in percent of requests."""
    per_second: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Always allowed, beside the percentage."""
    burst: Positive = 100
    """Most retries that can be saved up."""

    @property
    def share(self) -> float:
        return self.percent / 100


class PlacementSection(Strict, frozen=True, kw_only=True):
    """Settings of choosing among the engines that have room for a request."""

    affinity: AffinitySection = AffinitySection()
    breaker: BreakerSection = BreakerSection()
    retries: RetrySection = RetrySection()


class PrefillSection(Strict, frozen=True, kw_only=True):
    """Settings of spreading prompts over engines that are busy with others."""

    window: Annotated[Seconds, msgspec.Meta(ge=0, le=10)] = 0.006
    """Seconds that prompts wait for others to be spread together; 0: they do not."""
    mlp_products: Count = 8192
    """Products of a query and a key that all else of a token's layers costs as much as."""


class CoalesceSection(Strict, frozen=True, kw_only=True):
    """Settings of sharing one generation among identical deterministic requests."""

    enabled: bool = True
    window: SomeSeconds = 0.003
    """Seconds that others may join a generation which has sent something."""
    across_tenants: bool = False


class ReplaceSection(Strict, frozen=True, kw_only=True):
    """Whether a later request with the same `x-ullage-replace` ends the earlier one."""

    enabled: bool = False


class IdempotencySection(Strict, frozen=True, kw_only=True):
    """Settings of giving requests with the same `Idempotency-Key` one answer."""

    enabled: bool = False
    ttl: SomeSeconds = 600.0
    """Seconds for which a finished answer is kept."""
    max_bytes: SomeBytes = 16 << 20
    """Most bytes of finished answers that a process keeps."""


class RoutingSection(Strict, frozen=True, kw_only=True):
    large_request_tokens: Positive = 8000
    """Prompts longer than this take the pool of role large."""
    large_request_kv: Annotated[Bytes, msgspec.Meta(ge=1)] = 6000 << 20
    """Requests predicted above this many KV bytes take the pool of role large."""
    ladder: tuple[Rung, ...] = DEFAULT_LADDER
    """Rungs that are tried, in this order, when a request does not fit; the last is always a
    refusal."""
    rungs: RungsSection = RungsSection()
    queue: QueueSection = QueueSection()
    placement: PlacementSection = PlacementSection()
    prefill: PrefillSection = PrefillSection()
    coalesce: CoalesceSection = CoalesceSection()
    replace: ReplaceSection = ReplaceSection()
    idempotency: IdempotencySection = IdempotencySection()
    wake: WakeSection = WakeSection()

    def __post_init__(self) -> None:
        if len(set(self.ladder)) != len(self.ladder):
            raise ValueError(f"ladder {list(self.ladder)} names a rung twice; name each once")
        if "reject" in self.ladder[:-1]:
            raise ValueError(f"ladder {list(self.ladder)} goes on after reject; put reject last")


class CleanseSection(Strict, frozen=True, kw_only=True):
    """Kinds of text removed from every conversation; system prompts, code and JSON stay."""

    whitespace: bool = False
    zero_width: bool = False
    html: bool = False
    """Texts that are plainly HTML become what a reader would see."""

    @property
    def is_any(self) -> bool:
        return self.whitespace or self.zero_width or self.html


class CompressSection(Strict, frozen=True, kw_only=True):
    """Settings of summarising the oldest turns of a long conversation."""

    method: Literal["extractive", "off"] = "off"
    threshold_percent: Annotated[float, msgspec.Meta(ge=10, le=100)] = 75.0
    """Percent of the context from which on turns are summarised."""
    percent: Annotated[float, msgspec.Meta(ge=5, le=90)] = 25.0
    """Percent of the turns, the oldest, that are summarised."""
    fact_percent: Percent = 90.0
    """Percent of the turns' facts that the summary must have, or it is not used."""
    keep_turns: Positive = 4
    """Number of newest turns that stay word for word."""

    @property
    def threshold(self) -> float:
        return self.threshold_percent / 100

    @property
    def share(self) -> float:
        return self.percent / 100

    @property
    def fact_share(self) -> float:
        return self.fact_percent / 100


SpecialTokens = Literal["template", "trusted"]
"""Whose special tokens are such: the chat template's alone, or all that a text spells."""


class PromptsSection(Strict, frozen=True, kw_only=True):
    special_tokens: SpecialTokens = "template"
    cleanse: CleanseSection = CleanseSection()
    compress: CompressSection = CompressSection()


class StreamingSection(Strict, frozen=True, kw_only=True):
    """Settings of how tokens are sent to a client."""

    buffer_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Tokens that an engine may be ahead of a client that reads slowly."""
    coalesce_tokens: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """Most tokens that are sent together."""
    coalesce_window: Annotated[Seconds, msgspec.Meta(ge=0, le=1)] = 0.02
    """Longest time in seconds that tokens wait for others; 0: not at all. A client that got none
    for so long gets the next one at once."""
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Pace of one streamed answer; 0: as fast as tokens come."""
    keepalive: Annotated[Seconds, msgspec.Meta(ge=0)] = 15.0
    """Seconds without a token after which a comment is sent; 0: never."""


Anonymous = Literal["allow", "deny"]


class TenantRules(Strict, frozen=True, kw_only=True):
    """Limits of one tenant; what is unset is unlimited."""

    enabled: bool = True
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Tokens a minute, prompt and output together."""
    concurrency: Positive | None = None
    """Requests at once, those that wait included."""
    priority: Priority = 0
    """Priority of requests that ask for none."""
    max_priority: Priority | None = None
    """Highest priority that a request may ask for; unset: `priority`."""
    weight: PositiveFloat = 1.0
    """Share of the queue among tenants of equal priority."""
    tokens_per_second: PositiveFloat | None = None
    """Pace of each stream."""
    max_tokens: Positive | None = None
    """Longest output of an answer, in tokens."""
    models: tuple[Text, ...] = ()
    """Names that its requests may use; none named: all."""


class NamedTenant(TenantRules, frozen=True, kw_only=True):
    name: Text


class TenantsSection(Strict, frozen=True, kw_only=True):
    keys_dir: Text
    """Folder with one file a tenant, with a key or `sha256:` entry in each line; read again when it
    changes."""
    anonymous: Anonymous = "deny"
    """Whether requests without a key are served, under the rules of the tenant `anonymous`."""
    protect_stats: bool = False
    """Whether /stats needs a key, too."""
    share: Share = 1.0
    """Share of every limit that this process lets through: others let through the rest."""
    defaults: TenantRules = TenantRules()
    """Rules of tenants with a key that are not listed."""
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
    """Certificates of the HTTP and the gRPC port."""

    dir: Text
    """Folder with tls.crt and tls.key."""
    client_ca_dir: Text | None = None
    """Folder with ca.crt: clients must have a certificate of this authority."""


class EngineTLS(Strict, frozen=True, kw_only=True):
    """Towards engines."""

    dir: Text
    """Folder with tls.crt, tls.key and ca.crt, the authority of the engines' certificates."""
    server_name: Text
    """Name in the engines' certificates: they are called by address."""
    accept_plaintext: bool = False
    """Whether engines that do not speak TLS are called in plaintext: while TLS is turned on or off,
    some engines speak it and others do not."""


class TLSSection(Strict, frozen=True, kw_only=True):
    router: ServerTLS | None = None
    engines: EngineTLS | None = None


class SLOSection(Strict, frozen=True, kw_only=True):
    """Objectives: a request that would miss one waits, goes elsewhere, or is refused."""

    ttft_p95: SomeSeconds = 7.0
    """Seconds from a request's arrival to its first token."""
    e2e_p95: SomeSeconds = 20.0
    """Seconds from a request's arrival to its last token."""


def large_pool(pools: Iterable[PoolSection]) -> str:
    """Return the name of the pool for large requests; empty if there is none."""
    return next((pool.name for pool in pools if pool.role == "large"), "")


class RouterConfig(Strict, frozen=True, kw_only=True):
    model: Text
    """Name of the served model; requests for another are answered 404."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """Pools in order of preference."""
    http: HTTPSection = HTTPSection()
    cors: CORSSection | None = None
    """Settings of CORS; None: only pages of the router itself may use it."""
    grpc: GRPCSection = GRPCSection()
    metrics: MetricsSection = MetricsSection()
    console: ConsoleSection | None = None
    """Settings of the console; None: it is off."""
    probes: ProbesSection | None = None
    tls: TLSSection = TLSSection()
    tickets: RouterTickets | None = None
    """Settings of tickets; unset: Pick is off."""
    routing: RoutingSection = RoutingSection()
    prompts: PromptsSection = PromptsSection()
    limits: RequestLimits = RequestLimits()
    streaming: StreamingSection = StreamingSection()
    memory: MemoryBudget = MemoryBudget()
    slo: SLOSection = SLOSection()
    tenants: TenantsSection | None = None
    """Settings of tenants; unset: everybody may do everything."""
    cascade: CascadeSection | None = None
    """Settings of the cascade; None: this service's own engines answer everything."""
    rollout_file: Text | None = None
    """Says which engines are a canary's (`canary.RolloutFile`)."""
    tracing: TracingSection | None = None
    """Where spans of requests go; None: nowhere."""
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools {names} share a name; give each its own")
        large = [pool.name for pool in self.pools if pool.role == "large"]
        if len(large) > 1:
            raise ValueError(f"pools {large} have role large; give it to one of them")
        owners: dict[str, str] = {}
        for pool in self.pools:
            for target in pool.targets:
                owner = owners.setdefault(target, pool.name)
                if owner != pool.name:
                    raise ValueError(
                        f"pools: target {target!r} is in {owner!r} and in {pool.name!r}, so its "
                        "memory would be given twice; leave it in one of them"
                    )
        unknown = sorted(set(self.routing.rungs.route.pools) - set(names))
        if unknown:
            raise ValueError(f"routing.rungs.route.pools {unknown} are none of the pools {names}")
