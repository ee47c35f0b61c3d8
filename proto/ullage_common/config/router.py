"""The router's configuration file, in YAML or JSON. It is read once and never changes."""

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
    """Folder with tls.crt and tls.key, for client authentication, and ca.crt.

    ca.crt is the certificate of the authority that signed the other router's certificate.
    """
    server_name: Text
    """Host name expected in the other router's certificate."""


class StepSection(Strict, frozen=True, kw_only=True):
    name: Text
    """Name of the cascade's step in headers, metrics and logs."""
    target: str = ""
    """gRPC address `host:port` of another service's router (empty for this service's engines)."""
    tls: StepTLS | None = None
    """TLS settings for the other router, or None for plaintext."""
    key_dir: Text | None = None
    """Folder with `key`, the API key for the other router, or None to forward the client's key."""

    def __post_init__(self) -> None:
        if self.target:
            addresses.split(self.target)
        if not self.target and (self.tls or self.key_dir):
            raise ValueError(
                f"step {self.name!r} is the service itself, which needs neither tls nor "
                "key_dir; leave them out or give it a target"
            )


class ConfidenceSection(Strict, frozen=True, kw_only=True):
    tokens: Annotated[int, msgspec.Meta(ge=1, le=128)] = 16
    """Number of initial tokens that the router holds back to judge the model's confidence."""
    threshold_percent: Percent = 60.0
    """Minimum geometric mean of the tokens' probabilities, in percent."""

    @property
    def threshold(self) -> float:
        return self.threshold_percent / 100


class HeuristicsSection(Strict, frozen=True, kw_only=True):
    """Settings for heuristics that detect hard prompts, for example by length or by code.

    A request starts one step higher in the cascade for each heuristic that it matches. 0 or false
    disables a heuristic.
    """

    prompt_characters: Count = 6000
    turns: Count = 10
    code: bool = True
    maths: bool = True
    tools: bool = True


class FallbackSection(Strict, frozen=True, kw_only=True):
    """Settings for keeping low-priority requests on the cascade's first step under high load.

    Such a request gets the first step's answer regardless of its confidence, which keeps it off the
    engines of later steps. The load counts as high if either `pressure_level` or `queued_requests`
    is reached.
    """

    pressure_level: Count = 1
    """Pressure level that all ready engines must have reached (0 to ignore pressure levels)."""
    queued_requests: Count = 8
    """Minimum number of requests waiting in this router (0 to ignore the queue)."""
    max_priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = -1
    """Requests with this priority or a lower one count as low-priority."""


class CascadeSection(Strict, frozen=True, kw_only=True):
    name: Text
    """Unique name of this service's cascade, used to detect requests that loop between services."""
    steps: Annotated[tuple[StepSection, ...], msgspec.Meta(min_length=2, max_length=MAX_STEPS)]
    """Steps of the cascade, cheapest first."""
    confidence: ConfidenceSection = ConfidenceSection()
    heuristics: HeuristicsSection = HeuristicsSection()
    parallel: bool = False
    """Whether to start the next step while the current step's answer is still being judged."""
    fallback: FallbackSection | None = None

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names):
            raise ValueError(f"cascade.steps {names} share a name; give each its own")
        own = [step.name for step in self.steps if not step.target]
        if len(own) != 1:
            raise ValueError(
                f"cascade.steps: {len(own)} have no target; leave out the target of exactly one"
            )
        if self.fallback and not self.steps[0].target:
            raise ValueError(
                "cascade.fallback: the first step is this service itself; put another before it"
            )

    @property
    def own(self) -> int:
        """Return the index of the cascade step that runs on this service's own engines."""
        return next(i for i, step in enumerate(self.steps) if not step.target)


class RouterTickets(TicketFolder, frozen=True, kw_only=True):
    """Settings for tickets, which let clients send requests directly to engines."""

    ttl: SomeSeconds = 10.0
    """How long an unused ticket keeps its memory reservation, in seconds."""
    required: bool = False
    """Whether engines require tickets. If so, this router also sends a ticket with its requests."""


class WakeSection(Strict, frozen=True, kw_only=True):
    max_requests: Count = 256
    """Maximum number of requests to hold at a time while engines start."""
    max_bytes: SomeBytes = 64 << 20
    """Maximum memory in bytes that this process uses for held requests."""
    timeout: SomeSeconds = 300.0
    """Maximum time to hold a request, in seconds. The request's own time limit also applies."""


OTHER_TENANTS = "other"
"""Metric label for tenants that have a key but are not listed in the configuration."""

Rung = Literal["shrinkContext", "shrinkOutput", "queue", "route", "reject"]
DEFAULT_LADDER: tuple[Rung, ...] = ("shrinkOutput", "queue", "route", "reject")
"""The default ladder: the measures to try, in order, for a request that does not fit.

The ladder does not drop old turns (`shrinkContext`), because the oldest turns of an agent's
conversation describe its task.
"""

Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
RetryAfter = Annotated[Seconds, msgspec.Meta(ge=1, le=30)]


class HTTPSection(Strict, frozen=True, kw_only=True):
    host: str | None = None
    """Address to listen on, or None for all IPv4 and IPv6 addresses."""
    port: Port = 8000
    """Port of the HTTP server (0 to choose a free port and log it)."""
    public_stats: bool = False
    """Whether this port also serves /stats and /metrics, as the metrics port does."""


ANY_ORIGIN = "*"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s,]+)$"
Origin = Annotated[str, msgspec.Meta(pattern=_ORIGIN, max_length=300)]
"""The `Origin` header of browsers: a scheme, a host, and a port unless it is the default one."""


class CORSSection(Strict, frozen=True, kw_only=True):
    """Cross-origin settings (CORS): which web pages may call the API from a browser."""

    allowed_origins: Annotated[tuple[Origin, ...], msgspec.Meta(max_length=32)] = ()
    """Allowed origins (`*` for all).

    A server on a loopback address also accepts the host names of these origins in `Host`.
    """


class GRPCSection(Strict, frozen=True, kw_only=True):
    host: str | None = None
    """Address to listen on, or None for all IPv4 and IPv6 addresses."""
    port: Port = 9000


class MetricsSection(Strict, frozen=True, kw_only=True):
    host: str | None = None
    """Address to listen on, or None for all IPv4 and IPv6 addresses."""
    port: Port = 9090


class ConsoleSection(Strict, frozen=True, kw_only=True):
    """Settings of the web console, which the metrics port serves at /console."""

    local: bool = False
    """Whether the service runs on the user's own machine.

    If so, the API port also serves the console, and the console can generate an overload.
    """


class ProbesSection(Strict, frozen=True, kw_only=True):
    """Settings for the health port, which serves only grpc.health.v1.

    The port has no TLS, because kubelet's gRPC probes do not support it.
    """

    host: str | None = None
    """Address to listen on, or None for all IPv4 and IPv6 addresses."""
    port: Port = 8081


PoolRole = Literal["standard", "large", "overflow"]
"""Which requests a pool serves: ordinary ones, large ones, or those that fit in no other pool."""


class PoolSection(Strict, frozen=True, kw_only=True):
    name: Text
    role: PoolRole = "standard"
    """Kind of requests that the pool serves. The first pool always serves ordinary requests."""
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Addresses of engines: `name:port`, `ip:port` or `[ip]:port`.

    Each A record of a name stands for one engine. AAAA records are used only if there is no A
    record.
    """
    sleeps: bool = False
    """Whether the pool may scale to zero engines.

    A request that needs a sleeping pool is held while an engine starts.
    """

    def __post_init__(self) -> None:
        for target in self.targets:
            addresses.split(target)


class QueueSection(Strict, frozen=True, kw_only=True):
    max_requests: Count = 256
    max_bytes: SomeBytes = 64 << 30
    """Maximum total predicted KV bytes of all requests that are waiting for memory."""
    max_prompt_bytes: SomeBytes = 256 << 20
    """Maximum memory in bytes that this process uses for waiting requests."""
    timeout: SomeSeconds = 10.0
    """Maximum time that a request may wait in the queue, in seconds."""
    aging: SomeSeconds = 0.05
    """Waiting time that raises a request's effective priority by one level, in seconds."""
    backfill: Count = 16
    """Maximum number of requests that may overtake the first request in the queue (0 for none).

    A later request may start first (backfill) if it fits while the first request waits for memory.
    """


class ShrinkContextSection(Strict, frozen=True, kw_only=True):
    max_dropped_percent: SomePercent = 25.0
    """Maximum percentage of the prompt's tokens that may be dropped."""
    keep_turns: Positive = 4
    """Number of newest turns that are never dropped. System prompts are never dropped either."""

    @property
    def max_dropped_share(self) -> float:
        return self.max_dropped_percent / 100


class ShrinkOutputSection(Strict, frozen=True, kw_only=True):
    min_tokens: Positive = 16
    """Minimum output limit, in tokens, after shrinking."""
    min_percent: SomePercent = 50.0
    """Minimum length of a shrunk output, as a percentage of the requested output."""
    below_expected: bool = False
    """Whether the output may be shrunk below the answer length that the engines predict.

    If not, the output of a request without a length limit never shrinks below this length.
    """

    @property
    def min_share(self) -> float:
        return self.min_percent / 100


class RouteSection(Strict, frozen=True, kw_only=True):
    pools: tuple[Text, ...] = ()
    """Other pools to try, in order of preference.

    If this is empty, all other pools are tried in the router's order of preference.
    """


class RejectSection(Strict, frozen=True, kw_only=True):
    min_retry_delay: RetryAfter = 1.0
    max_retry_delay: RetryAfter = 30.0
    """Upper bound of Retry-After in seconds. `min_retry_delay` is the lower bound."""

    def __post_init__(self) -> None:
        low = self.min_retry_delay
        high = self.max_retry_delay
        if low > high:
            raise ValueError(f"min_retry_delay {low:g} is above max_retry_delay {high:g}; lower it")


class RungsSection(Strict, frozen=True, kw_only=True):
    """Settings for the admission ladder, which deals with requests that do not fit.

    The rungs of the ladder are the measures to try in order. Waiting is also a rung, but it is
    configured in the `queue` section.
    """

    shrink_context: ShrinkContextSection = ShrinkContextSection()
    shrink_output: ShrinkOutputSection = ShrinkOutputSection()
    route: RouteSection = RouteSection()
    reject: RejectSection = RejectSection()


class AffinitySection(Strict, frozen=True, kw_only=True):
    """Settings for sending a request to the engine whose KV cache already has its prefix."""

    max_sessions: Count = 8192
    """Maximum number of sessions to remember an engine for (0 turns this off)."""
    max_prefixes: Count = 65536
    """Maximum number of 64-token prompt blocks to remember an engine for (0 turns this off)."""
    max_extra_load: Count = 8
    """How many more requests the remembered engine may have than the alternative engine.

    If the difference is larger, the alternative engine is chosen, although it lacks the prefix.
    """


class BreakerSection(Strict, frozen=True, kw_only=True):
    """Settings for the circuit breaker, which ejects an engine after repeated failures."""

    failures: Positive = 5
    """Number of consecutive failures that open the breaker."""
    pause: SomeSeconds = 1.0
    """How long the breaker stays open at first, in seconds. Each failed probe doubles this time."""
    max_pause: SomeSeconds = 60.0
    max_ejection_percent: Percent = 50.0
    """Maximum percentage of a pool's ready engines to eject at a time (0 for no ejection)."""

    def __post_init__(self) -> None:
        if self.pause > self.max_pause:
            raise ValueError(
                f"pause {self.pause:g} is above max_pause {self.max_pause:g}; lower it"
            )

    @property
    def max_ejected_share(self) -> float:
        return self.max_ejection_percent / 100


class RetrySection(Strict, frozen=True, kw_only=True):
    """Limits on retrying requests on another engine if they fail before the first token."""

    percent: Percent = 20.0
    """Allowed retries, as a percentage of requests."""
    per_second: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Retries per second to allow on top of the percentage."""
    burst: Positive = 100
    """Maximum number of unused retries that can accumulate."""

    @property
    def share(self) -> float:
        return self.percent / 100


class PlacementSection(Strict, frozen=True, kw_only=True):
    """Settings for choosing among engines that have enough memory for a request."""

    affinity: AffinitySection = AffinitySection()
    breaker: BreakerSection = BreakerSection()
    retries: RetrySection = RetrySection()


class PrefillSection(Strict, frozen=True, kw_only=True):
    """Settings for the prefill window, which balances prompts across busy engines.

    A prompt waits for a short time if its engine needs at least as long to prefill the prompts that
    are already queued there. The prompts that have waited are then distributed together by their
    cost. Prompts whose prefix is cached on their engine do not wait.
    """

    window: Annotated[Seconds, msgspec.Meta(ge=0, le=10)] = 0.006
    """How long prompts wait to be placed together, in seconds (0 for no wait)."""
    mlp_products: Count = 8192
    """Non-attention cost of one token, in units of one query-key dot product's cost."""


class CoalesceSection(Strict, frozen=True, kw_only=True):
    """Settings for sharing one generation among identical deterministic requests."""

    enabled: bool = True
    window: SomeSeconds = 0.003
    """Seconds during which identical requests may still join a generation that has sent tokens."""
    across_tenants: bool = False


class ReplaceSection(Strict, frozen=True, kw_only=True):
    """Settings for cancelling a request when a later one has the same `x-ullage-replace` header."""

    enabled: bool = False


class IdempotencySection(Strict, frozen=True, kw_only=True):
    """Settings for reusing one answer for all requests with the same `Idempotency-Key`."""

    enabled: bool = False
    ttl: SomeSeconds = 600.0
    """How long a finished answer is kept, in seconds."""
    max_bytes: SomeBytes = 16 << 20
    """Maximum total bytes of the finished answers that one process keeps."""


class ResponsesSection(Strict, frozen=True, kw_only=True):
    """Settings for storing answers of /v1/responses, so that later requests can continue them."""

    enabled: bool = False
    ttl: SomeSeconds = 3600.0
    """How long a response is kept, in seconds."""
    max_bytes: SomeBytes = 64 << 20
    """Maximum total bytes of the responses that one process keeps."""


class BatchLimits(Strict, frozen=True, kw_only=True):
    """Limits on batches, whose requests are in uploaded files."""

    max_concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """Maximum number of requests of batches that are answered at a time."""
    max_requests: Positive = 50_000
    """Maximum number of requests of a batch."""
    max_active: Positive = 64
    """Maximum number of batches that have not ended. One tenant gets at most half of this."""


class FilesLimits(Strict, frozen=True, kw_only=True):
    """Limits on the files that clients upload to /v1/files."""

    max_file_bytes: Annotated[Bytes, msgspec.Meta(ge=1)] = 512 << 20
    max_bytes: Annotated[Bytes, msgspec.Meta(ge=1)] = 8 << 30
    """Maximum total bytes of all files. One tenant gets at most half of this."""
    max_files: Positive = 10_000
    """Maximum number of files. One tenant gets at most half of this."""
    ttl: SomeSeconds = 30 * 86400.0
    """Maximum time for which a file is kept, in seconds."""
    batches: BatchLimits = BatchLimits()


class FilesSection(FilesLimits, frozen=True, kw_only=True):
    """Settings of the store of uploaded files."""

    dir: Text
    """Folder of the files. One router process at a time uses it."""


class RoutingSection(Strict, frozen=True, kw_only=True):
    large_request_tokens: Positive = 8000
    """Requests with more prompt tokens than this go to the pool with role `large`."""
    large_request_kv: Annotated[Bytes, msgspec.Meta(ge=1)] = 6000 << 20
    """Requests with more predicted KV bytes than this go to the pool with role `large`."""
    ladder: tuple[Rung, ...] = DEFAULT_LADDER
    """Measures to try, in order, for a request that does not fit. The last one rejects it."""
    rungs: RungsSection = RungsSection()
    queue: QueueSection = QueueSection()
    placement: PlacementSection = PlacementSection()
    prefill: PrefillSection = PrefillSection()
    coalesce: CoalesceSection = CoalesceSection()
    replace: ReplaceSection = ReplaceSection()
    idempotency: IdempotencySection = IdempotencySection()
    responses: ResponsesSection = ResponsesSection()
    wake: WakeSection = WakeSection()

    def __post_init__(self) -> None:
        if len(set(self.ladder)) != len(self.ladder):
            raise ValueError(f"ladder {list(self.ladder)} names a rung twice; name each once")
        if "reject" in self.ladder[:-1]:
            raise ValueError(f"ladder {list(self.ladder)} goes on after reject; put reject last")


class CleanseSection(Strict, frozen=True, kw_only=True):
    """Settings for removing some kinds of text from conversations.

    System prompts, code and JSON are left as is.
    """

    whitespace: bool = False
    zero_width: bool = False
    html: bool = False
    """Whether to replace obvious HTML with the text that a browser would show."""

    @property
    def is_any(self) -> bool:
        return self.whitespace or self.zero_width or self.html


class CompressSection(Strict, frozen=True, kw_only=True):
    """Settings for summarising the oldest turns of a long conversation."""

    method: Literal["extractive", "off"] = "off"
    threshold_percent: Annotated[float, msgspec.Meta(ge=10, le=100)] = 75.0
    """The oldest turns are summarised above this percentage of the context length."""
    percent: Annotated[float, msgspec.Meta(ge=5, le=90)] = 25.0
    """Percentage of the turns to summarise, starting with the oldest."""
    fact_percent: Percent = 90.0
    """Minimum percentage of the turns' facts that a usable summary must keep."""
    keep_turns: Positive = 4
    """Number of newest turns to leave unchanged."""

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
"""Which special tokens prompts may contain: the template's, or also those spelled in text."""


Reasoning = Literal["auto", "off", "think", "mistral", "granite", "response"]
"""Format in which the model writes reasoning. "auto" detects it from the chat template."""


class PromptsSection(Strict, frozen=True, kw_only=True):
    special_tokens: SpecialTokens = "template"
    reasoning: Reasoning = "auto"
    cleanse: CleanseSection = CleanseSection()
    compress: CompressSection = CompressSection()


class StreamingSection(Strict, frozen=True, kw_only=True):
    """Settings for streaming tokens to a client."""

    buffer_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Maximum number of tokens that an engine may generate ahead of a slow client."""
    coalesce_tokens: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    """Maximum number of tokens in one streamed chunk."""
    coalesce_window: Annotated[Seconds, msgspec.Meta(ge=0, le=1)] = 0.02
    """Maximum time to hold a token so that later ones can join it, in seconds (0 for no wait).

    If nothing was sent to a client for this long, the next token is sent immediately.
    """
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Maximum rate of one streamed answer, in tokens per second (0 for no limit)."""
    keepalive: Annotated[Seconds, msgspec.Meta(ge=0)] = 15.0
    """Send a keepalive comment after this many seconds without a token (0 for never)."""


Anonymous = Literal["allow", "deny"]


class TenantRules(Strict, frozen=True, kw_only=True):
    """A tenant's limits. A limit that is not set does not apply."""

    enabled: bool = True
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Maximum total number of prompt and output tokens per minute."""
    concurrency: Positive | None = None
    """Maximum number of concurrent requests, including waiting ones."""
    priority: Priority = 0
    """Priority of requests that do not specify one."""
    max_priority: Priority | None = None
    """Maximum priority that a request may specify, or None for `priority`."""
    weight: PositiveFloat = 1.0
    """Weight of the tenant in the queue, relative to tenants of equal priority."""
    tokens_per_second: PositiveFloat | None = None
    """Maximum rate of each stream, in tokens per second."""
    max_tokens: Positive | None = None
    """Maximum number of output tokens per answer."""
    models: tuple[Text, ...] = ()
    """Names of the models that the tenant's requests may use (empty for all)."""


class NamedTenant(TenantRules, frozen=True, kw_only=True):
    name: Text


class TenantsSection(Strict, frozen=True, kw_only=True):
    keys_dir: Text
    """Folder with one file per tenant. The router reloads the folder when it changes.

    Each line of a file is a key or a `sha256:` entry.
    """
    anonymous: Anonymous = "deny"
    """Whether requests without a key are served, under the rules of the tenant `anonymous`."""
    protect_stats: bool = False
    """Whether /stats requires a key as well."""
    share: Share = 1.0
    """Fraction of every limit that this process may use. Other router processes share the rest."""
    defaults: TenantRules = TenantRules()
    """Rules for tenants that have a key but are not listed here."""
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
    """Certificates for the HTTP port and the gRPC port."""

    dir: Text
    """Folder with tls.crt and tls.key."""
    client_ca_dir: Text | None = None
    """Folder with the ca.crt that verifies client certificates, or None if clients need none."""


class EngineTLS(Strict, frozen=True, kw_only=True):
    """TLS on connections to engines."""

    dir: Text
    """Folder with tls.crt, tls.key and ca.crt. ca.crt verifies the engines' certificates."""
    server_name: Text
    """Expected name in the engines' certificates, because the router connects to IP addresses."""
    accept_plaintext: bool = False
    """Whether to connect in plaintext to engines that do not use TLS.

    While a rollout turns TLS on or off, only some of the engines use TLS.
    """


class TLSSection(Strict, frozen=True, kw_only=True):
    router: ServerTLS | None = None
    engines: EngineTLS | None = None


class SLOSection(Strict, frozen=True, kw_only=True):
    """Latency objectives. A request that would miss one of them is queued, rerouted or rejected."""

    ttft_p95: SomeSeconds = 7.0
    """Seconds from a request's arrival to its first token."""
    e2e_p95: SomeSeconds = 20.0
    """Seconds from a request's arrival to its last token."""


def large_pool(pools: Iterable[PoolSection]) -> str:
    """Return the name of the pool for large requests (empty if there is none)."""
    return next((pool.name for pool in pools if pool.role == "large"), "")


class RouterConfig(Strict, frozen=True, kw_only=True):
    model: Text
    """Name of the served model. Requests for another model get a 404."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """Pools in order of preference."""
    http: HTTPSection = HTTPSection()
    cors: CORSSection | None = None
    """CORS settings. If None, only web pages that the router serves may use the API."""
    grpc: GRPCSection = GRPCSection()
    metrics: MetricsSection = MetricsSection()
    console: ConsoleSection | None = None
    """Console settings, or None to turn off the console."""
    probes: ProbesSection | None = None
    tls: TLSSection = TLSSection()
    tickets: RouterTickets | None = None
    """Ticket settings, or None to disable tickets and the `Pick` RPC that issues them."""
    routing: RoutingSection = RoutingSection()
    files: FilesSection | None = None
    """Settings of uploaded files, or None if /v1/files is off."""
    prompts: PromptsSection = PromptsSection()
    limits: RequestLimits = RequestLimits()
    streaming: StreamingSection = StreamingSection()
    memory: MemoryBudget = MemoryBudget()
    slo: SLOSection = SLOSection()
    tenants: TenantsSection | None = None
    """Tenant settings. If None, clients need no key and have no limits."""
    cascade: CascadeSection | None = None
    """Cascade settings. If None, this service's own engines answer all requests."""
    rollout_file: Text | None = None
    """File that lists the engines of the canary (`canary.RolloutFile`)."""
    tracing: TracingSection | None = None
    """Where to send request traces, or None for no tracing."""
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
            raise ValueError(f"routing.rungs.route.pools {unknown} are not among the pools {names}")
