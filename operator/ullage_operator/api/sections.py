"""Sections of a spec that only the operator reads, and the conversion of Kubernetes quantities and
Go durations to bytes and seconds.

Sections that routers and engines read too are in `ullage_common.config`.
"""

import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import field, inspect

from ullage_common.config.engine import HostedTiers, HostTierSection, MemoryLimits, RankGrid
from ullage_common.config.router import CORSSection, PoolRole, TenantRules
from ullage_common.process.config_file import Bytes, Seconds, Strict
from ullage_operator.api import naming

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i|[kMGTPE])?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|us|h|m|s)")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_SECONDS = {
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
}


def parse_bytes(value: int | str) -> int:
    """Return the bytes of `2Gi`, `500M`, `1.5Gi` or 1024; a fraction of a byte is rounded up.

    Raises:
        ValueError: the text is not such a quantity.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity of bytes; write 512Mi, 2Gi or 1000000")
    number, suffix = match.groups()
    return math.ceil(Decimal(number) * scale(suffix or ""))


def scale(suffix: str) -> int:
    """Return the bytes of one unit: Ki is 1024, k is 1000, no suffix is 1."""
    if not suffix:
        return 1
    power = "kmgtpe".index(suffix[0].lower()) + 1
    return int((1024 if suffix.endswith("i") else 1000) ** power)


def parse_decimal(value: int | str) -> float:
    """Return the number that the API writes as an integer or as text, such as 2 or `0.5`.

    Raises:
        ValueError: the text is not such a number.
    """
    if not _DECIMAL.fullmatch(str(value)):
        raise ValueError(f'{value!r} is not a number; write 2 or, in quotes, "0.5"')
    return float(value)


_MAX_SECONDS = 100 * 365 * 86400
"""Longest duration; longer ones, which the definition accepts, are read as this one."""


def parse_seconds(value: int | str) -> float:
    """Return the seconds of a Go duration such as `10s`, `6ms` or `1m30s`.

    Raises:
        ValueError: the text is not such a duration.
    """
    text = str(value)
    if not text or _DURATION.sub("", text):
        raise ValueError(f"{value!r} is not a duration; write 10s, 6ms or 1m30s")
    parts = _DURATION.findall(text)
    total = sum(Decimal(number) * _SECONDS[unit] for number, unit in parts)
    return float(min(total, _MAX_SECONDS))


_POWERS = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", -3: "m"}


def amount(value: int | str) -> Decimal:
    """Return the value of a quantity, such as 0.5 for `500m`.

    Raises:
        ValueError: the text is not a quantity, `m` for thousandths included.
    """
    text = str(value)
    match = _QUANTITY.fullmatch(text.removesuffix("m"))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity; write 500m, 2, 512Mi or 2Gi")
    number, suffix = match.groups()
    return Decimal(number) * (Decimal("0.001") if text.endswith("m") else scale(suffix or ""))


def canonical(value: int | str) -> str:
    """Return a quantity as the API server stores it, so that applied and stored objects are equal.

    Raises:
        ValueError: the text is not a quantity.
    """
    number = amount(value)
    if str(value).endswith("i") and number >= 1024 and number == int(number):
        return _in_powers_of_1024(int(number))
    return _in_powers_of_1000(number)


def _in_powers_of_1024(number: int) -> str:
    power = 0
    while number % 1024 == 0 and power < len("KMGTPE"):
        number = number // 1024
        power = power + 1
    return f"{number}{'KMGTPE'[power - 1]}i" if power else str(number)


def _in_powers_of_1000(number: Decimal) -> str:
    if number == 0:
        return "0"
    milli = math.ceil(number.scaleb(3))
    power = -3
    while milli % 1000 == 0 and power < max(_POWERS):
        milli = milli // 1000
        power = power + 3
    return f"{milli}{_POWERS[power]}"


_WORDS = {"kv": "KV", "e2e": "E2E", "ca": "CA", "url": "URL", "cpu": "CPU"}
_COMPLETED = {MemoryLimits.__module__, TenantRules.__module__}
"""Modules whose sections the definition completes."""
_UNITS: Mapping[str, Callable[[Any], Any]] = {"bytes": parse_bytes, "seconds": parse_seconds}


def camel(name: str) -> str:
    """`session_kv_limit` is `sessionKVLimit` in the API."""
    first, *rest = name.split("_")
    return first + "".join(_WORDS.get(word, word.capitalize()) for word in rest)


_API_WORDS = {
    "bfloat16": "BFloat16",
    "cpu": "CPU",
    "cuda": "CUDA",
    "fp8": "FP8",
    "grpc": "grpc",
    "http": "http",
    "keda": "KEDA",
    "off": "None",
    "vllm": "VLLM",
    "w8a8": "W8A8",
}


def api_word(word: str) -> str:
    """Return how the API spells a word of a configuration file: in CamelCase."""
    return _API_WORDS.get(word, word[:1].upper() + word[1:])


Reader = Callable[[Any, str], Any]
"""Turns a value of the API, which stands at a path, into one that msgspec converts."""


def section_reader(section: type[Strict]) -> Reader:
    """Return what renames a section's fields to snake case and turn its quantities into bytes
    and seconds.

    The reader raises msgspec.ValidationError for a quantity that cannot be read, and for a field
    that the definition would have filled in.
    """
    kind = inspect.type_info(section)
    assert isinstance(kind, inspect.StructType)
    return _section_reader(kind)


def _reader(kind: inspect.Type) -> Reader | None:
    """Return the converter of API values to `kind`; None where they need no conversion."""
    match kind:
        case inspect.Metadata(extra={"unit": unit}):
            return partial(_read_quantity, _UNITS[unit])
        case inspect.FloatType():
            return partial(_read_quantity, parse_decimal)
        case inspect.Metadata(type=inner) | inspect.UnionType(types=(inner, *_)):
            return _reader(inner)
        case inspect.StructType():
            return _section_reader(kind)
        case inspect.LiteralType(values=values):
            return partial(_read_word, {api_word(str(value)): value for value in values})
        case inspect.VarTupleType(item_type=inner) if read := _reader(inner):
            return partial(_read_list, read)
        case inspect.DictType(value_type=inner) if read := _reader(inner):
            return partial(_read_map, read)
        case _:
            return None


def _read_quantity(parse: Callable[[Any], Any], value: Any, path: str) -> Any:
    if value is None or isinstance(value, float):  # of `to_api`
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise msgspec.ValidationError(f"{error} - at `${path}`") from error


def _read_word(words: Mapping[str, Any], value: Any, path: str) -> Any:
    """Return the word of configuration files for an API word.

    Words of configuration files pass unchanged, since releases and kept specs contain them.
    """
    return words.get(value, value) if isinstance(value, str) else value


def _read_list(read: Reader, values: Any, path: str) -> Any:
    return [read(value, f"{path}[{i}]") for i, value in enumerate(values)]


def _read_map(read: Reader, values: Any, path: str) -> Any:
    return {name: read(value, f"{path}.{name}") for name, value in values.items()}


def _section_reader(kind: inspect.StructType) -> Reader:
    # The readers' own defaults are for files that people write: the API's are the definition's.
    is_complete = _is_complete(kind.cls)
    fields = [
        (
            each.name,
            camel(each.name),
            _reader(each.type),
            each.required or (is_complete and each.default is not None),
        )
        for each in kind.fields
    ]

    def read_section(section: Any, path: str) -> Any:
        if not isinstance(section, dict):
            return section
        values = {}
        for field_name, name, read, is_required in fields:
            if name in section:
                value = section[name]
                values[field_name] = read(value, f"{path}.{name}") if read else value
            elif is_required:
                raise msgspec.ValidationError(f"missing required field `{name}` - at `${path}`")
        return values

    return read_section


def field_names(section: type[Strict]) -> set[str]:
    """Return the names of a section's fields, and of those of the sections in it."""
    return set(_field_names(inspect.type_info(section)))


def _field_names(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.Metadata(type=inner) | inspect.VarTupleType(item_type=inner):
            yield from _field_names(inner)
        case inspect.DictType(value_type=inner):
            yield from _field_names(inner)
        case inspect.UnionType(types=types):
            for member in types:
                yield from _field_names(member)
        case inspect.StructType(fields=fields):
            for each in fields:
                yield each.name
                yield from _field_names(each.type)


def _is_complete(kind: type) -> bool:
    """Whether the definition gives a default to every field but those that may be unset."""
    modules = {base.__module__ for base in kind.__mro__}
    return not modules.isdisjoint(_COMPLETED) and not issubclass(kind, TenantRules)


def to_api(value: Any) -> Any:
    """A section in the API's names, as it is read back from JSON; bytes and seconds are numbers."""
    match value:
        case msgspec.Struct():
            return {camel(n): to_api(getattr(value, n)) for n in value.__struct_fields__}
        case dict():
            return {name: to_api(each) for name, each in value.items()}
        case tuple() | list():
            return [to_api(each) for each in value]
        case _:
            return value


class Thresholds(Strict, frozen=True, kw_only=True):
    error_percent: float
    ttft_percent: int
    e2e_percent: int
    restarts: int

    @property
    def error_rate(self) -> float:
        return self.error_percent / 100

    @property
    def ttft_ratio(self) -> float:
        return self.ttft_percent / 100

    @property
    def e2e_ratio(self) -> float:
        return self.e2e_percent / 100


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

    def most_unavailable(self, replicas: int) -> int:
        """Return the number of engines of a pool that a rollout may take away at once.

        A percentage is rounded down, and at least one engine may go.
        """
        if isinstance(self.max_unavailable, int):
            return min(self.max_unavailable, replicas)
        percent = int(self.max_unavailable.removesuffix("%"))
        return min(max(1, replicas * percent // 100), replicas)


class ClaimTemplate(Strict, frozen=True, kw_only=True):
    """A persistent volume claim that each pod gets for itself."""

    size: int | str
    storage_class_name: str | None = None


class ModelCache(Strict, frozen=True, kw_only=True):
    claim_name: str | None = None
    host_path: str | None = None
    size_limit: int | str | None = None
    claim_template: ClaimTemplate | None = None
    warm: bool = False
    """Whether a Job fetches the model into the claim before engines need it."""


Retention = Literal["retain", "delete"]


class ClaimRetention(Strict, frozen=True, kw_only=True):
    """The retention policy of a claim template's volumes."""

    when_deleted: Retention
    when_scaled: Retention


class ResourceClaim(Strict, frozen=True, kw_only=True):
    """Devices that each pod claims by dynamic resource allocation."""

    name: str
    resource_claim_template_name: str
    request: str | None = None
    """Which of the claim's requests the engine has; None: all."""


class RemoteTierSpec(Strict, frozen=True, kw_only=True):
    """KV of the other engines of a pool, which find one another by the pool's Service."""

    deadline: Seconds
    copy: bool


class FileTierSpec(Strict, frozen=True, kw_only=True):
    size: Bytes
    path: str | None = None
    """Folder in the container; None: the operator's own choice."""
    claim_name: str | None = None
    host_path: str | None = None

    @property
    def folder(self) -> str:
        """The folder in the container, without doubled or closing slashes."""
        return posixpath.normpath("/" + (self.path or naming.KV_DIR).lstrip("/"))


class TiersSpec(HostedTiers, frozen=True, kw_only=True):
    host: HostTierSection
    remote: RemoteTierSpec | None = None
    file: FileTierSpec | None = None


class MemorySpec(MemoryLimits, frozen=True, kw_only=True):
    """What engines read as their section `memory`, with tiers as people ask for them."""

    tiers: TiersSpec


class PodSection(Strict, frozen=True, kw_only=True):
    """Pods of one kind, in Kubernetes' own words."""

    resources: dict[str, dict[str, int | str]] = field(default_factory=dict)
    pod_template: dict[str, Any] = field(default_factory=dict)
    """What pods have beside what the operator sets."""


class Targets(Strict, frozen=True, kw_only=True):
    kv_utilization_percent: int
    queue_wait: Seconds
    ttft: bool

    @property
    def kv_utilization(self) -> float:
        return self.kv_utilization_percent / 100


class Pace(Strict, frozen=True, kw_only=True):
    """Bounds on how fast the number of pods changes in one direction."""

    window: Seconds
    pods: int
    percent: int
    period: Seconds


class AuthenticationRef(Strict, frozen=True, kw_only=True):
    name: str
    kind: str


class KEDATrigger(Strict, frozen=True, kw_only=True):
    """A trigger of a ScaledObject, with KEDA's own field names."""

    type: str
    metadata: dict[str, str]
    name: str | None = None
    metric_type: str | None = None
    use_cached_metrics: bool | None = None
    authentication_ref: AuthenticationRef | None = None


class KEDASpec(Strict, frozen=True, kw_only=True):
    authentication_ref: AuthenticationRef | None = None
    """How KEDA logs in where it asks for the operator's own queries."""
    triggers: tuple[KEDATrigger, ...] = ()


class AutoscalingSpec(Strict, frozen=True, kw_only=True):
    enabled: bool
    provider: Literal["ullage", "keda"]
    min_replicas: int
    max_replicas: int
    warm_spares: int
    targets: Targets
    scale_up: Pace
    scale_down: Pace
    idle_after: Seconds
    prometheus_url: str | None = None
    keda: KEDASpec | None = None


class PoolSpec(PodSection, frozen=True, kw_only=True):
    role: PoolRole = "standard"
    replicas: int
    """Engine pods; where they follow demand, the number of this moment."""
    autoscaling: AutoscalingSpec | None = None
    gpus: int
    """GPUs of an engine, on all of its nodes."""
    nodes: int
    """Pods that an engine spans."""
    gpu_resource_name: str
    resource_claims: tuple[ResourceClaim, ...] = ()
    """Device claims that give the pods their GPUs instead of `gpu_resource_name`."""
    parallelism: RankGrid
    micro_batches: int
    standby_worker: bool = False
    nccl: dict[str, str] = field(default_factory=dict)
    memory: MemorySpec
    """The service's memory with the pool's own fields over it."""
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


class RouterSpec(PodSection, frozen=True, kw_only=True):
    replicas: int
    """Router pods; the present number where a HorizontalPodAutoscaler scales them."""
    public_stats: bool = False
    cors: CORSSection | None = None
    service: RouterServiceSpec = RouterServiceSpec()
    gateway: GatewaySpec | None = None
    autoscaling: RouterAutoscaling | None = None

    @property
    def most_replicas(self) -> int:
        """Return the highest number of router pods."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas


class ServiceAccount(Strict, frozen=True, kw_only=True):
    name: str | None = None
    """Name of an existing ServiceAccount; None: the operator's own ones."""
    annotations: dict[str, str] = field(default_factory=dict)


USER = 65532
"""User and group of the images, and the definition's default."""


class SecurityContext(Strict, frozen=True, kw_only=True):
    """User and groups of all pods; the cluster or the image chooses those that are None."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None


class PullSecret(Strict, frozen=True, kw_only=True):
    name: str
