"""An LLMService as frozen values, with bytes and seconds instead of quantities and durations, and
the operator's own settings, which come from its environment.

Every default comes from the CRD (`ullage_operator.api.schema`), so none is spelled here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from ullage_common import version
from ullage_common.config.engine import (
    DEFAULT_HOST_TIER,
    AdapterSection,
    BatchingSection,
    DegradeSection,
    Device,
    EngineKind,
    LimitsSection,
    ModelSection,
    ProfilingSection,
    VllmSection,
    default_max_loras,
)
from ullage_common.config.router import (
    Anonymous,
    ConfidenceSection,
    FallbackSection,
    HeuristicsSection,
    NamedTenant,
    PoolRole,
    PromptsSection,
    RoutingSection,
    SLOSection,
    StreamingSection,
    TenantRules,
)
from ullage_common.process.addresses import split
from ullage_common.process.config_file import LogLevel, Seconds, Strict
from ullage_common.process.tracing import TracingSection
from ullage_operator.api import naming, schema
from ullage_operator.api.bases import NO_BASES, Bases, base_names, with_bases
from ullage_operator.api.errors import InvalidManifest, Problem
from ullage_operator.api.renames import upgraded
from ullage_operator.api.sections import (
    MemorySpec,
    PoolSpec,
    PullSecret,
    RolloutSpec,
    RouterSpec,
    SecurityContext,
    ServiceAccount,
    amount,
    camel,
    field_names,
    parse_bytes,
    parse_seconds,
    section_reader,
)


class S3Spec(Strict, frozen=True, kw_only=True):
    """The store of `s3://` sources; without a field of it, AWS with the pod's own identity."""

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
        """Return the step's name in headers, metrics and logs.

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

    def server_name(self, namespace: str) -> str:
        """Return the name in the certificate of the step's router."""
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
        """All steps; the own engines come last unless a step names them."""
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
    """Peers of a NetworkPolicy; None: the operator's choice."""


class BaseRef(Strict, frozen=True, kw_only=True):
    name: str


class Spec(Strict, frozen=True, kw_only=True):
    model: ModelSection
    base_refs: tuple[BaseRef, ...] = ()
    """Bases that the other fields are already laid over, the strongest last."""
    device: Device
    engine: EngineKind
    vllm: VllmSection
    adapters: tuple[AdapterSection, ...] = ()
    adapter_claims: tuple[str, ...] | None = None
    """Claims that engines mount for adapters; never None once a spec is read."""
    image: str | None = None
    stop: bool
    """Whether no pool has an engine, on purpose."""
    allow_fault_injection: bool
    service_account: ServiceAccount
    security_context: SecurityContext
    image_pull_secrets: tuple[PullSecret, ...] = ()
    model_pull_policy: str | None = None
    """Pull policy of the model's image; None: Kubernetes chooses by its tag."""
    s3: S3Spec | None = None
    router: RouterSpec
    replicas: int
    """Engine pods of the first pool, unless it says how many it has."""
    pools: dict[str, PoolSpec]
    """Pools in order of preference: by their roles, then by name."""
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
        """Return whether engines have slots for LoRA adapters, even while the spec lists none."""
        return any(pool.memory.max_loras for pool in self.pools.values())


_read_spec = section_reader(Spec)
_API_NAMES = {name: camel(name) for name in field_names(Spec)}
_NAMES = re.compile(r"args\.\S+|(?<!\w)'[^']*'|\w+")
"""A word of a message; what is quoted and arguments of vLLM are one."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One LLMService."""

    name: str
    namespace: str
    uid: str
    """Empty outside Kubernetes."""
    generation: int
    spec: Spec


def parse(manifest: Any, default_namespace: str = "default", bases: Bases = NO_BASES) -> Service:
    """Return the service that a manifest describes.

    Raises:
        InvalidManifest: the API server would refuse it, an unknown field was written, or a base
            is not among those given.
    """
    definition = schema.load_schema()
    stored, problems = schema.complete(definition, manifest)
    if problems:
        raise InvalidManifest(problems)
    spec = _over_bases(definition, stored, stored["spec"], bases)
    if problems := contradictions(spec):
        raise InvalidManifest(problems)
    return service_of(stored["metadata"], to_spec(spec), default_namespace)


def _over_bases(
    definition: schema.Schema, manifest: Mapping[str, Any], spec: Any, bases: Bases
) -> Any:
    """Return a spec merged over its bases; return a spec without bases unchanged."""
    if not base_names(spec):
        return spec
    return with_bases(definition, manifest["metadata"]["name"], spec, bases)


def parse_stored(manifest: Mapping[str, Any]) -> Service:
    """Return a service that an API server has validated and stored with its defaults.

    Unknown fields belong to a definition newer than this operator, as during an upgrade of both.
    They are left to the next operator.

    Raises:
        InvalidManifest: a value cannot be read, or contradicts another.
    """
    return parse_filled(manifest)[0]


def parse_filled(manifest: Mapping[str, Any], bases: Bases = NO_BASES) -> tuple[Service, list[str]]:
    """Return a stored service, and the paths of the fields that got their default here.

    An API server fills in the defaults of its own definition of LLMService. A definition older than
    this operator leaves newer fields without defaults.

    Raises:
        InvalidManifest: a value cannot be read, or contradicts another.
    """
    whole = schema.load_schema()
    definition = whole["properties"]["spec"]
    spec: Any = manifest.get("spec")
    # An API server with an older definition returns the field names of that definition.
    spec = upgraded(spec, definition) if isinstance(spec, Mapping) else spec
    filled = schema.fill(definition, spec, "spec")
    if problems := [*schema.misfits(definition, spec, "spec")]:
        raise InvalidManifest(problems)
    spec = _over_bases(whole, manifest, spec, bases)
    values = to_spec(spec)
    if problems := contradictions(spec):
        raise InvalidManifest(problems)
    return service_of(manifest["metadata"], values), filled


def to_spec(stored: Mapping[str, Any]) -> Spec:
    """Return the frozen values of a spec whose defaults are filled in.

    Raises:
        InvalidManifest: a value is missing or cannot be read.
    """
    complete = with_tenant_defaults(with_pool_defaults(stored))
    try:
        return _with_room_for_adapters(
            _with_time_to_start(msgspec.convert(_read_spec(complete, ""), Spec))
        )
    except msgspec.ValidationError as error:
        raise _refusal(error, stored) from error


def _with_time_to_start(spec: Spec) -> Spec:
    """Return a spec whose rollout deadline covers the start time that its pools declare.

    A pool with the default start time leaves the deadline to the rollout, which may want to give up
    sooner.
    """
    pools = schema.load_schema()["properties"]["spec"]["properties"]["pools"]
    usual = pools["additionalProperties"]["properties"]["startTimeout"]["default"]
    longest = max((pool.start_timeout for pool in spec.pools.values()), default=0.0)
    if longest <= max(parse_seconds(usual), spec.rollout.start_deadline):
        return spec
    rollout = msgspec.structs.replace(spec.rollout, start_deadline=longest)
    return msgspec.structs.replace(spec, rollout=rollout)


def _with_room_for_adapters(spec: Spec) -> Spec:
    """Return a spec with adapter slots and mounted claims for its adapters, unless it sets them.

    Slots and claims belong to engines' releases while adapters do not, so only an edit that exceeds
    them starts a rollout.
    """
    replaced = msgspec.structs.replace
    has_adapters = bool(spec.adapters)

    def with_slots(memory: MemorySpec) -> MemorySpec:
        slots = default_max_loras(memory.max_loras, has_adapters=has_adapters)
        return replaced(memory, max_loras=slots)

    claims = spec.adapter_claims
    if claims is None:
        named = (claim_of(adapter.source) for adapter in spec.adapters)
        claims = tuple(dict.fromkeys(filter(None, named)))
    pools = {
        name: replaced(pool, memory=with_slots(pool.memory)) for name, pool in spec.pools.items()
    }
    return replaced(spec, memory=with_slots(spec.memory), pools=pools, adapter_claims=claims)


def image_of(source: str) -> str:
    """Return the image reference of an `oci://` source; empty for other sources."""
    scheme, _, reference = source.partition("://")
    return reference.partition("#")[0] if scheme == "oci" else ""


def claim_of(source: str) -> str:
    """Return the claim of a `pvc://` source; empty for other sources."""
    scheme, _, path = source.partition("://")
    return path.partition("/")[0] if scheme == "pvc" else ""


def in_api_names(text: str) -> str:
    """Return a message with API field names instead of those of configuration files.

    Arguments of vLLM and quoted text keep their names, since users wrote them.
    """
    return _NAMES.sub(lambda match: _API_NAMES.get(match[0], match[0]), text)


_OF_A_POOL = re.compile(r"spec\.pools\.(\w+)\.memory\.(\w+)")


def _refusal(error: msgspec.ValidationError, stored: Mapping[str, Any]) -> InvalidManifest:
    text, _, where = str(error).partition(" - at `$")
    text = in_api_names(text)
    path = "spec" + in_api_names(where.rstrip("`"))
    # A pool inherits the service's memory, so its path may name a field that only the service has.
    inherited = _OF_A_POOL.match(path)
    if inherited and inherited[2] not in stored["pools"][inherited[1]].get("memory", {}):
        path = path.replace(f"pools.{inherited[1]}.", "", 1)
    if missing := re.search("missing required field `(.+)`", text):
        path = f"{path}.{camel(missing[1])}"
        return InvalidManifest([Problem(path, "required field is missing")])
    return InvalidManifest([Problem(path, text)])


def service_of(
    metadata: Mapping[str, Any], spec: Spec, default_namespace: str = "default"
) -> Service:
    return Service(
        name=metadata["name"],
        namespace=metadata.get("namespace", default_namespace),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        spec=spec,
    )


MIN_BYTES = 2**20
"""Below this much memory no model runs."""
MAX_BYTES = 2**46
"""64 TiB: no machine has more memory."""


def contradictions(spec: Mapping[str, Any]) -> list[Problem]:
    """Return the contradictions between fields of a complete spec that the definition allows."""
    if unreadable := [*unreadable_amounts(spec), *shared_roles(spec)]:
        return unreadable
    complete = with_pool_defaults(spec)
    pools = complete["pools"].items()
    in_memory = (each for name, pool in pools for each in _memory(spec, name, pool))
    sliced = (each for name, pool in pools for each in _slices(spec, name, pool))
    # Pools that inherit the same field report it once.
    return [*excesses(spec), *sliced, *_adapters(spec), *dict.fromkeys(in_memory)]


_MIG_SLICE = "/mig-"
"""Part of the resource names of MIG slices in NVIDIA's device plugin."""


def _slices(spec: Mapping[str, Any], name: str, pool: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield pools whose engines would span several MIG slices, which NCCL cannot connect.

    The definition has no rule for this: the number of GPUs has no default there.
    """
    resource = pool["gpuResourceName"]
    gpus = pool["gpus"]
    if _MIG_SLICE in resource and gpus > 1 and _device(spec) != "cpu":
        yield Problem(
            f"spec.pools.{name}.gpus",
            f"{gpus} of {resource} is no group of GPUs, since NCCL connects no slices of a GPU; "
            "set gpus: 1 and more replicas, or take whole GPUs",
        )


def _adapters(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the adapters that exceed the slots, ranks or mounted claims of engines."""
    memory = spec["memory"]
    adapters = spec.get("adapters", ())
    slots = memory.get("maxLoras")
    rank = memory["maxLoraRank"]

    if slots == 0 and adapters:
        yield Problem(
            "spec.memory.maxLoras",
            "0 leaves no slot for spec.adapters; raise it, or leave one of them out",
        )
    if slots and spec["engine"] == "Native":
        yield Problem(
            "spec.memory.maxLoras",
            f"{slots} is for LoRA adapters, which the native engine serves none of; set engine to "
            "VLLM, or leave it out",
        )

    mounted = spec.get("adapterClaims")
    for index, adapter in enumerate(adapters):
        if adapter["rank"] > rank:
            yield Problem(
                f"spec.adapters[{index}].rank",
                f"{adapter['rank']} is above memory.maxLoraRank {rank}, for which slots have room; "
                "raise maxLoraRank",
            )
        claim = claim_of(adapter["source"])
        if (
            claim
            and mounted is not None
            and claim not in (claim_of(spec["model"]["source"]), *mounted)
        ):
            yield Problem(
                f"spec.adapters[{index}].source",
                f"is on claim {claim}, which engines do not mount; add it to spec.adapterClaims",
            )


def shared_roles(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the roles that leave open which pool serves a request.

    The definition has rules for this, which objects stored under an older one may break.
    """
    names = ordered_pools(spec)
    for role in ("standard", "large"):
        sharing = [name for name in names if role_of(spec["pools"][name]) == role]
        if len(sharing) > 1:
            text = (
                f"pools {' and '.join(sharing)} have role {role.capitalize()}; set role of the "
                "one for large requests to Large, and of others to Overflow"
            )
            yield Problem("spec.pools", text)
    if all(role_of(pool) == "overflow" for pool in spec["pools"].values()):
        text = "no pool takes ordinary requests; set role of one to Standard"
        yield Problem("spec.pools", text)


def _memory(spec: Mapping[str, Any], name: str, pool: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield amounts of memory that no machine has or with which no engine of a pool starts.

    Args:
        spec: the spec as written.
        pool: the pool with its defaults.
    """
    memory = pool["memory"]
    limit = pool.get("resources", {}).get("limits", {}).get("memory", MAX_BYTES)
    own = spec["pools"][name].get("memory", {})

    def path(key: str) -> str:
        is_own = key.partition(".")[0] in own
        return f"spec.pools.{name}.memory.{key}" if is_own else f"spec.memory.{key}"

    if "maxKV" in memory and parse_bytes(memory["maxKV"]) < MIN_BYTES:
        yield Problem(path("maxKV"), f"{memory['maxKV']} holds no request; give at least 1Mi")
    tiers = memory.get("tiers", {})
    # A host tier that nobody asked for takes what there is room for, and contradicts nothing.
    default = f"{DEFAULT_HOST_TIER >> 20}Mi" if "remote" in tiers or "file" in tiers else 0
    host = tiers.get("host", {}).get("size", default)
    yield from (replace(each, path=path(each.path)) for each in _tiers(tiers, host))
    amounts = {key: memory.get(key) for key in ("deviceBytes", "hostKV")} | {_HOST_SIZE: host}
    asked = {key: parse_bytes(given) for key, given in amounts.items() if given}
    num_ranks = pool["gpus"] // pool.get("nodes", 1)  # of one pod
    ranks = {"deviceBytes": num_ranks}
    for_each = {"deviceBytes": f" for each of {num_ranks} workers"} if num_ranks > 1 else {}
    totals = {key: size * ranks.get(key, 1) for key, size in asked.items()}
    for key, total in totals.items():
        if total > amount(limit):
            most = "any machine has" if limit == MAX_BYTES else f"resources.limits.memory {limit}"
            each = for_each.get(key, "")
            yield Problem(path(key), f"{amounts[key]}{each} is more than {most}; lower it")
    on_cpu = [totals.get(key, 0) for key in ("deviceBytes", _HOST_SIZE)]
    has_tiers = memory["prefixCache"] and _device(spec) != "cuda"
    if has_tiers and max(on_cpu) <= amount(limit) < sum(on_cpu):
        each = for_each.get("deviceBytes", "")
        yield Problem(
            path(_HOST_SIZE),
            f"{host} beside deviceBytes {memory['deviceBytes']}{each} is more than "
            f"resources.limits.memory {limit}; lower one of them, or raise the limit",
        )
    if "deviceBytes" in asked and _device(spec) != "cuda":
        percent = memory["thresholdPercent"]
        reserve = memory["safetyReserve"]
        if asked["deviceBytes"] * percent // 100 - parse_bytes(reserve) < MIN_BYTES:
            yield Problem(
                path("deviceBytes"),
                f"{memory['deviceBytes']} leaves an engine nothing: of the {percent} % of it that "
                f"thresholdPercent allows, safetyReserve {reserve} is kept empty; raise it or "
                "lower safetyReserve",
            )


def unreadable_amounts(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the quantities that would go into pods unchanged and cannot be parsed."""
    places = {"spec.router": spec["router"]}
    places |= {f"spec.pools.{name}": pool for name, pool in spec["pools"].items()}
    for place, section in places.items():
        amounts = {
            f"resources.{kind}.{name}": value
            for kind, each in section.get("resources", {}).items()
            for name, value in each.items()
        }
        amounts["shmSize"] = section.get("shmSize", 0)
        cache = section.get("modelCache", {})
        amounts["modelCache.sizeLimit"] = cache.get("sizeLimit", 0)
        amounts["modelCache.claimTemplate.size"] = cache.get("claimTemplate", {}).get("size", 0)
        for path, value in amounts.items():
            try:
                amount(value)
            except ValueError as error:
                yield Problem(f"{place}.{path}", str(error))


_HOST_SIZE = "tiers.host.size"


def _tiers(tiers: Mapping[str, Any], host: int | str) -> Iterator[Problem]:
    """Tiers of KV that could hold no block, their fields below `memory`.

    Args:
        host: size of the host tier.
    """
    host_bytes = parse_bytes(host)
    if not host_bytes and (below := [name for name in ("remote", "file") if name in tiers]):
        yield Problem(
            _HOST_SIZE,
            f"{host} leaves no host tier, through which {' and '.join(below)} pass their blocks; "
            f"give at least 1Mi, or leave {' and '.join(below)} out",
        )
    if 0 < host_bytes < MIN_BYTES:
        yield Problem(_HOST_SIZE, f"{host} holds no block; give at least 1Mi, or 0 for no tiers")
    size = tiers.get("file", {}).get("size", MIN_BYTES)
    if parse_bytes(size) < MIN_BYTES:
        yield Problem("tiers.file.size", f"{size} holds no block; give at least 1Mi")


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


def with_pool_defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with every pool's size, memory and GPUs, pools in order of preference."""
    memory = spec.get("memory", {})
    names = ordered_pools(spec)
    complete = {}
    for name in names:
        pool = spec["pools"][name]
        takes_gpus = role_of(pool) == "large" and _device(spec) != "cpu"
        complete[name] = (
            {"replicas": spec["replicas"] if name == names[0] else 1}
            | with_pod_template(pool)
            | _rank_grid(pool, 4 if takes_gpus else 1)
            | {"memory": memory | pool.get("memory", {})}
        )
    router = with_pod_template(spec.get("router", {}))
    return {**spec, "router": router, "pools": complete}


_ROLES: tuple[PoolRole, ...] = get_args(PoolRole)
"""Roles in order of preference."""


def ordered_pools(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of a spec's pools in order of preference; the first is the default pool."""
    pools = spec.get("pools", {})
    return sorted(pools, key=lambda name: (_ROLES.index(role_of(pools[name])), name))


def role_of(pool: Mapping[str, Any]) -> PoolRole:
    """Return the role of a pool of a spec, in the word of configuration files."""
    role = str(pool.get("role", _ROLES[0])).lower()
    return next((each for each in _ROLES if each == role), _ROLES[0])


def with_pod_template(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pool or router without the empty parts of its pod template.

    So every spelling of a template is the same release.
    """
    given = section.get("podTemplate")
    if not given:
        return dict(section)
    metadata = {name: each for name, each in given.get("metadata", {}).items() if each}
    parts = (given | {"metadata": metadata}).items()
    return {**section, "podTemplate": {name: each for name, each in parts if each}}


def _device(spec: Mapping[str, Any]) -> str:
    return str(spec.get("device", "")).lower()


def _rank_grid(pool: Mapping[str, Any], default_gpus: int) -> dict[str, Any]:
    """GPUs of a pool and how they share the model; either follows from the other.

    The definition has no default for them: it has one schema for pools of every name.
    """
    parallelism = pool.get("parallelism")
    if parallelism is None:
        gpus = pool.get("gpus", default_gpus)
        side = 2 if gpus == 4 else 1
        return {"gpus": gpus, "parallelism": {"tensor": side, "pipeline": side}}
    return {"gpus": pool.get("gpus", parallelism["tensor"] * parallelism["pipeline"])}


def with_tenant_defaults(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec with every named tenant's rules complete."""
    tenants = spec.get("tenants")
    if not tenants:
        return spec
    named = [tenants["defaults"] | tenant for tenant in tenants["named"]]
    return {**spec, "tenants": tenants | {"named": named}}


VERSION = version()
MAX_ROLLOUTS = 3
DNS_LAG_S = 30.0
"""CoreDNS's `cache`, as Kubernetes sets it up."""
METRICS_NAMESPACE = "monitoring"
IMAGES = "localhost/ullage"
"""Where images are called what `make images` calls them: no registry serves them, so a node that
does not have them finds none of somebody else's."""
ENGINE_IMAGE = f"{IMAGES}/engine:{VERSION}"
"""The image for CPUs, without vLLM."""
CUDA_ENGINE_IMAGE = f"{IMAGES}/engine-cuda:{VERSION}"
"""The image for NVIDIA GPUs, without vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the operator's own Deployment, which hold for every service."""

    engine_image: str = ENGINE_IMAGE
    """ULLAGE_ENGINE_IMAGE: image of engine pods whose service names none."""
    cuda_engine_image: str = CUDA_ENGINE_IMAGE
    """ULLAGE_CUDA_ENGINE_IMAGE: image of those of them that have GPUs; empty: `engine_image`."""
    vllm_engine_image: str = ""
    """ULLAGE_VLLM_ENGINE_IMAGE: image of those that are to be vLLM; empty: `engine_image`."""
    router_image: str = f"{IMAGES}/operator:{VERSION}"
    """ULLAGE_ROUTER_IMAGE: image of router pods."""
    image_pull_policy: str = "IfNotPresent"
    """ULLAGE_IMAGE_PULL_POLICY: Always, IfNotPresent or Never."""
    image_pull_secrets: tuple[str, ...] = ()
    """ULLAGE_IMAGE_PULL_SECRETS: names, with commas between them, of Secrets in the services'
    namespaces with which their pods' images are fetched, besides those that a service names."""
    dns_lag_s: float = DNS_LAG_S
    """ULLAGE_DNS_LAG: seconds for which the cluster's DNS may go on answering what it knew. Routers
    find engines by it, so engines that end go on serving for longer, and a canary stays for twice
    as long once the stable engines are ready."""
    max_rollouts: int = MAX_ROLLOUTS
    """ULLAGE_MAX_ROLLOUTS: number of services that may be in a rollout when another one begins to
    try a new `engine_image`, which nobody's edit asks for."""
    log_level: str = "info"
    """ULLAGE_LOG_LEVEL: debug, info, warning or error, of the operator itself."""
    tracing: TracingSection | None = None
    """ULLAGE_TRACING_ENDPOINT, ULLAGE_TRACING_PROTOCOL (grpc or http; grpc): where spans of the
    operator's own reconciliations go; without an endpoint there are none."""
    namespace: str = ""
    """ULLAGE_OPERATOR_NAMESPACE: where the operator's own pods are, which alone may ask for
    headroom and measures; empty: in any namespace."""
    metrics_namespace: str = METRICS_NAMESPACE
    """ULLAGE_METRICS_NAMESPACE: namespace whose pods may read the metrics of services that do not
    say who may; empty: no pod may."""
    mesh: Literal["", "istio", "linkerd"] = ""
    """ULLAGE_MESH: istio or linkerd, whose sidecars are to leave the ports alone at which the
    operator asks pods for headroom and measures; empty: there is no mesh."""
    runbooks: str = "docs/runbooks"
    """ULLAGE_RUNBOOKS: where people read docs/runbooks, for the alerts of services: a URL, or the
    path in these sources."""
    on_kubernetes: bool = True
    """Whether pods have the devices that they ask for, and not all of the machine's."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        names = {
            "engine_image": "ULLAGE_ENGINE_IMAGE",
            "cuda_engine_image": "ULLAGE_CUDA_ENGINE_IMAGE",
            "vllm_engine_image": "ULLAGE_VLLM_ENGINE_IMAGE",
            "router_image": "ULLAGE_ROUTER_IMAGE",
            "image_pull_policy": "ULLAGE_IMAGE_PULL_POLICY",
            "log_level": "ULLAGE_LOG_LEVEL",
            "namespace": "ULLAGE_OPERATOR_NAMESPACE",
            "runbooks": "ULLAGE_RUNBOOKS",
        }
        given: dict[str, Any] = {
            field: environ[name] for field, name in names.items() if environ.get(name)
        }
        if "engine_image" in given:  # which is for all engines where no other is named
            given.setdefault("cuda_engine_image", "")
        secrets = environ.get("ULLAGE_IMAGE_PULL_SECRETS", "").split(",")
        return cls(
            **given,
            metrics_namespace=environ.get("ULLAGE_METRICS_NAMESPACE", METRICS_NAMESPACE),
            max_rollouts=_count(environ, "ULLAGE_MAX_ROLLOUTS", MAX_ROLLOUTS),
            dns_lag_s=_seconds(environ, "ULLAGE_DNS_LAG", DNS_LAG_S),
            mesh=_mesh(environ),
            tracing=_tracing(environ),
            image_pull_secrets=tuple(name for name in secrets if name),
        )


def _mesh(environ: Mapping[str, str]) -> Literal["", "istio", "linkerd"]:
    match environ.get("ULLAGE_MESH", ""):
        case ("" | "istio" | "linkerd") as mesh:
            return mesh
        case other:
            raise SystemExit(f"ULLAGE_MESH={other!r} is no known mesh; give istio, linkerd or none")


def _tracing(environ: Mapping[str, str]) -> TracingSection | None:
    endpoint = environ.get("ULLAGE_TRACING_ENDPOINT")
    if not endpoint:
        return None
    protocol = environ.get("ULLAGE_TRACING_PROTOCOL") or "grpc"
    try:
        return msgspec.convert({"endpoint": endpoint, "protocol": protocol}, TracingSection)
    except msgspec.ValidationError as error:
        raise SystemExit(f"ULLAGE_TRACING_ENDPOINT, ULLAGE_TRACING_PROTOCOL: {error}") from error


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    given = environ.get(name) or str(default)
    if not given.replace(".", "", 1).isdecimal():
        raise SystemExit(f"{name}={given!r} is no number of seconds; give one such as {default:g}")
    return float(given)


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name) or str(default)
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"{name}={given!r} is no number of services; give one such as {default}")
    return int(given)
