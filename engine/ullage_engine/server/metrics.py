"""Prometheus metrics of an engine: `ullage_*`, and the `vllm:` names that dashboards expect.

The aliases are made from the same samples at every scrape, so nothing is counted twice. The worker
counts since its own start; what is exported goes on through every restart.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ullage_common.wire.tls import Certificates
from ullage_engine.protocol.messages import Ready, WorkerState
from ullage_engine.server.journal import JournalEntry
from ullage_kv import TierStats
from ullage_kv.service import PeerTraffic

Read = Callable[[WorkerState], float]


def _used_ratio(state: WorkerState) -> float:
    return state.kv_held_bytes / state.kv_pool_bytes if state.kv_pool_bytes else 0.0


_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("requests_running", "Sequences in the batch", lambda s: s.num_running),
    ("requests_waiting", "Sequences admitted, not started", lambda s: s.num_waiting),
    ("kv_used_ratio", "Share of the KV pool in use, 0 to 1", _used_ratio),
    (
        "kv_waste_ratio",
        "Share of the KV in use that holds no tokens, 0 to 1",
        lambda s: s.kv_waste_ratio,
    ),
    ("kv_pool_bytes", "KV pool", lambda s: s.kv_pool_bytes),
    ("kv_committed_bytes", "Reserved, not allocated yet", lambda s: s.kv_committed_bytes),
    ("memory_headroom_bytes", "What a new request may take", lambda s: s.headroom_bytes),
    (
        "memory_withheld_bytes",
        "Headroom withheld because other processes took memory of the device",
        lambda s: s.kv_withheld_bytes,
    ),
    (
        "swap_bandwidth_bytes_per_second",
        "Bandwidth to host memory measured at start; 0 without host memory for KV",
        lambda s: s.swap_bytes_per_second,
    ),
    ("worker_resident_bytes", "Resident memory of the worker", lambda s: s.rss_bytes),
    ("sessions", "Sessions that keep KV between requests", lambda s: s.num_sessions),
    ("session_bytes", "KV that sessions keep between requests", lambda s: s.session_bytes),
    ("engine_pressure_level", "Degrade level, 1 the mildest; 0 none", lambda s: s.pressure_level),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("preemptions", "Sequences preempted for memory", lambda s: s.num_preemptions),
    ("swaps", "Preemptions by swapping to host memory", lambda s: s.num_swaps),
    ("swap_out_bytes", "KV copied to host memory", lambda s: s.swap_out_bytes),
    ("swap_in_bytes", "KV copied back from host memory", lambda s: s.swap_in_bytes),
    ("swap_seconds", "Time of copying KV to host memory and back", lambda s: s.swap_seconds),
    ("oom_events", "Steps that ran out of memory", lambda s: s.num_oom_events),
    (
        "nonfinite_logits",
        "Requests failed because their logits were NaN or infinite",
        lambda s: s.num_nonfinite_logits,
    ),
    (
        "steps_overlapped",
        "Steps begun while later pipeline stages computed an earlier one",
        lambda s: s.num_overlapped_steps,
    ),
    (
        "prefix_cache_queries_tokens",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.prefix_lookup_tokens,
    ),
    (
        "prefix_cache_hits_tokens",
        "Of them, those whose KV was found",
        lambda s: s.prefix_hit_tokens,
    ),
    (
        "prefix_cache_merged_tokens",
        "Tokens whose KV was computed twice and is stored once",
        lambda s: s.prefix_merged_tokens,
    ),
    ("adapter_loads", "LoRA adapters loaded into a slot", lambda s: s.num_adapter_loads),
    ("adapter_unloads", "LoRA adapters that gave way", lambda s: s.num_adapter_unloads),
)


_RANK_LABELS = ("rank", "stage", "tensor_rank", "device", "first_layer")


# vLLM's buckets, seconds, so that its dashboards' quantiles can be compared.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)

_ALIASES = {
    "ullage_requests_running": "vllm:num_requests_running",
    "ullage_requests_waiting": "vllm:num_requests_waiting",
    "ullage_kv_used_ratio": "vllm:kv_cache_usage_perc",
    "ullage_prefix_cache_queries_tokens": "vllm:prefix_cache_queries",
    "ullage_prefix_cache_hits_tokens": "vllm:prefix_cache_hits",
    "ullage_preemptions": "vllm:num_preemptions",
    "ullage_prompt_tokens": "vllm:prompt_tokens",
    "ullage_generation_tokens": "vllm:generation_tokens",
    "ullage_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "ullage_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "ullage_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "ullage_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds"),
}
_SUCCESS = ("stop", "length")


class EngineMetrics:
    """All metrics of an engine, on a registry of their own."""

    def __init__(self, model: str) -> None:
        self._native = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(_WithAliases(self._native))
        self._labels = {"model_name": model, "engine": "0"}
        self._gauges = [(self._gauge(name, text), read) for name, text, read in _GAUGES]
        self._counters = [(self._counter(name, text), read) for name, text, read in _COUNTERS]
        self._seen = [0.0] * len(_COUNTERS)
        """What the present worker has counted; the next one counts from 0."""
        self._blocks = self._gauge("kv_blocks_total", "Blocks of the KV pool")
        self._used_blocks = self._gauge("kv_blocks_used", "Blocks in block tables")
        self._block_tokens = self._gauge("kv_block_size_tokens", "Tokens of one block")
        self._block_bytes = 1
        self._ranks = Gauge(
            "ullage_rank_layers",
            "Layers of each rank: the device map",
            [*self._labels, *_RANK_LABELS],
            registry=self._native,
        )
        self._server_resident = self._gauge("server_resident_bytes", "The same of the server")
        self._server_resident.set_function(_resident_bytes)
        self._steps = self._counter("steps", "Steps that produced tokens")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of started prompts")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.worker_restarts = self._counter("worker_restarts", "Workers replaced")
        self._requests = Counter(
            "ullage_requests",
            "Ended requests",
            [*self._labels, "outcome"],
            registry=self._native,
        )
        self._degraded = Counter(
            "ullage_engine_degraded_requests",
            "Answers begun that were given less than was asked for, because memory was short",
            [*self._labels, "what"],
            registry=self._native,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Acceptance to first token", TTFT_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request", TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token", TOKEN_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Acceptance to last token", REQUEST_BUCKETS
        )

    def watch_certificates(self, certificates: Certificates) -> None:
        """Exports the state of the server's certificate from now on."""
        name, text = "certificate_problems", "1 while the newest certificate cannot be used"
        self._gauge(name, text).set_function(lambda: bool(certificates.problem))
        expiry = self._gauge("certificate_expiry_timestamp_seconds", "When the certificate ends")
        expiry.set_function(lambda: certificates.material.expires.timestamp())

    def worker_ready(self, ready: Ready) -> None:
        """Begins with a new worker, whose own counters start at zero."""
        for place in ready.ranks:
            fields = msgspec.structs.asdict(place)
            own = {name: str(fields[name]) for name in _RANK_LABELS}
            self._ranks.labels(**self._labels, **own).set(place.num_layers)
        self._block_bytes = max(1, ready.profile.block_bytes)
        self._block_tokens.set(ready.profile.block_tokens)
        self._seen = [0.0] * len(_COUNTERS)
        self.worker_state(ready.state)

    def worker_state(self, state: WorkerState) -> None:
        """Exports a worker's gauges and counters, which go on over its replacements."""
        for gauge, read in self._gauges:
            gauge.set(read(state))
        self._blocks.set(state.kv_pool_bytes // self._block_bytes)
        self._used_blocks.set(state.kv_held_bytes // self._block_bytes)
        counts = [read(state) for _, read in self._counters]
        for (counter, _), count, seen in zip(self._counters, counts, self._seen, strict=True):
            counter.inc(max(0.0, count - seen))
        self._seen = counts

    def watch_tiers(
        self,
        stats: Callable[[], list[TierStats]],
        not_loaded: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """Exports the figures of tiers outside the device, read when they are asked for.

        `not_loaded`: returns the blocks that requests did not begin with, by tier and reason.
        """
        self._native.register(_TierCollector(stats, not_loaded, self._labels))

    def watch_peers(self, stats: Callable[[], PeerTraffic]) -> None:
        """Exports what other engines read and write here, read when it is asked for."""
        self._native.register(_PeerCollector(stats, self._labels))

    def step_done(self) -> None:
        self._steps.inc()

    def tokens(self, entry: JournalEntry, num_tokens: int) -> None:
        """Counts new tokens of a request; call it before the entry appends them."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._generation_tokens.inc(num_tokens)
        if entry.last_token_at is None:
            self._count_degraded(entry)
            self._ttft.observe(now - entry.accepted_at)
            # All samples have one prompt.
            self._prompt_tokens.inc(0 if entry.index else entry.job.request.num_prompt_tokens)
        else:
            self._inter_token.observe((now - entry.last_token_at) / num_tokens)
        entry.last_token_at = now

    def _count_degraded(self, entry: JournalEntry) -> None:
        for change in entry.job.degraded:
            what = change.partition("=")[0]
            self._degraded.labels(**self._labels, what=what).inc()

    def embedding(self, entry: JournalEntry) -> None:
        """Counts a request whose embedding is there."""
        entry.last_token_at = time.monotonic()
        self._ttft.observe(entry.last_token_at - entry.accepted_at)
        self._prompt_tokens.inc(entry.job.request.num_prompt_tokens)

    def ended(self, entry: JournalEntry, outcome: str) -> None:
        """Counts a request's end: stop, length, timeout, cancelled or an error's reason."""
        self.refused(outcome)
        if outcome not in _SUCCESS or entry.last_token_at is None:
            return
        took = entry.last_token_at - entry.accepted_at
        self._e2e.observe(took)
        if num_tokens := len(entry.output_ids) - entry.num_restored:
            self._per_token.observe(took / num_tokens)

    def refused(self, outcome: str) -> None:
        """Counts a request that never had a journal entry."""
        self._requests.labels(**self._labels, outcome=outcome).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"ullage_{name}", text, list(self._labels), registry=self._native)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"ullage_{name}", text, list(self._labels), registry=self._native)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"ullage_{name}", text, list(self._labels), registry=self._native, buckets=buckets
        )
        return histogram.labels(**self._labels)


_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("capacity_bytes", "Most that a tier of KV may hold", lambda s: s.capacity_bytes),
    ("used_bytes", "What it holds", lambda s: s.used_bytes),
    ("blocks", "Blocks of KV that it holds", lambda s: s.num_blocks),
    ("queued", "Transfers of blocks that wait or are under way", lambda s: s.queued),
)
_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("hits", "Blocks read from a tier of KV", lambda s: s.hits),
    ("misses", "Blocks looked for and not read", lambda s: s.misses),
    ("evictions", "Blocks that made room for others", lambda s: s.evictions),
    ("read_bytes", "KV read from a tier", lambda s: s.read_bytes),
    ("read_seconds", "Time in which something was read", lambda s: s.read_seconds),
    ("written_bytes", "KV written to a tier", lambda s: s.written_bytes),
    ("written_seconds", "Time in which something was written", lambda s: s.written_seconds),
)


class _TierCollector(Collector):
    """A collector of the tiers' own figures, each with the tier as a label."""

    def __init__(
        self,
        stats: Callable[[], list[TierStats]],
        not_loaded: Callable[[], Mapping[tuple[str, str], int]],
        labels: Mapping[str, str],
    ) -> None:
        self._stats = stats
        self._not_loaded = not_loaded
        self._names = [*labels, "tier"]
        self._values = list(labels.values())

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        tiers = self._stats()
        for name, text, read in _TIER_GAUGES:
            gauge = GaugeMetricFamily(f"ullage_kv_tier_{name}", text, labels=self._names)
            for tier in tiers:
                gauge.add_metric([*self._values, tier.name], read(tier))
            yield gauge
        for name, text, read in _TIER_COUNTERS:
            counter = CounterMetricFamily(f"ullage_kv_tier_{name}", text, labels=self._names)
            for tier in tiers:
                counter.add_metric([*self._values, tier.name], read(tier))
            yield counter
        info = GaugeMetricFamily(
            "ullage_kv_tier_info",
            "How a tier of KV moves bytes: 1",
            labels=[*self._names, "backend"],
        )
        failures = CounterMetricFamily(
            "ullage_kv_tier_failures",
            "Blocks that were neither read nor stored nor absent",
            labels=[*self._names, "status"],
        )
        for tier in tiers:
            info.add_metric([*self._values, tier.name, tier.backend], 1)
            for status, count in tier.failures.items():
                failures.add_metric([*self._values, tier.name, status], count)
        yield info
        yield failures
        not_loaded = CounterMetricFamily(
            "ullage_kv_tier_not_loaded",
            "Blocks that a tier had and requests did not begin with",
            labels=[*self._names, "reason"],
        )
        for (tier_name, reason), count in self._not_loaded().items():
            not_loaded.add_metric([*self._values, tier_name, reason], count)
        yield not_loaded


_PEER_GAUGES: tuple[tuple[str, str, Callable[[PeerTraffic], float]], ...] = (
    ("leases", "Leases of KV that other engines have here", lambda s: s.leases),
    ("held_slots", "Blocks that they read or write", lambda s: s.held_slots),
)
_PEER_COUNTERS: tuple[tuple[str, str, Callable[[PeerTraffic], float]], ...] = (
    ("read_blocks", "Blocks of KV that other engines read here", lambda s: s.read_blocks),
    ("read_bytes", "KV that other engines read here", lambda s: s.read_bytes),
    ("written_blocks", "Blocks of KV that other engines copied here", lambda s: s.written_blocks),
    ("written_bytes", "KV that other engines copied here", lambda s: s.written_bytes),
    ("expired_leases", "Leases that no engine ended in time", lambda s: s.expired_leases),
)


class _PeerCollector(Collector):
    """A collector of what peers read and write."""

    def __init__(self, stats: Callable[[], PeerTraffic], labels: Mapping[str, str]) -> None:
        self._stats = stats
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        traffic, values = self._stats(), list(self._labels.values())
        for name, text, read in _PEER_GAUGES:
            gauge = GaugeMetricFamily(f"ullage_kv_peers_{name}", text, labels=[*self._labels])
            gauge.add_metric(values, read(traffic))
            yield gauge
        for name, text, read in _PEER_COUNTERS:
            counter = CounterMetricFamily(f"ullage_kv_peers_{name}", text, labels=[*self._labels])
            counter.add_metric(values, read(traffic))
            yield counter


class _WithAliases(Collector):
    """A collector of a registry's families, some of them again under vLLM's names."""

    def __init__(self, native: CollectorRegistry) -> None:
        self._native = native

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._native.collect()}
        yield from families.values()
        for name, alias in _ALIASES.items():
            yield _renamed(families[name], alias)
        yield _success(families["ullage_requests"])
        yield _cache_config(families)


def _renamed(family: Metric, name: str) -> Metric:
    metric = Metric(name, family.documentation, family.type)
    metric.samples = [
        sample._replace(name=sample.name.replace(family.name, name, 1)) for sample in family.samples
    ]
    return metric


def _success(requests: Metric) -> Metric:
    metric = Metric("vllm:request_success", requests.documentation, requests.type)
    for sample in requests.samples:
        labels = dict(sample.labels)
        outcome = labels.pop("outcome")
        if sample.name.endswith("_total") and outcome in _SUCCESS:
            labels["finished_reason"] = outcome
            metric.add_sample("vllm:request_success_total", labels, sample.value)
    return metric


def _cache_config(families: dict[str, Metric]) -> Metric:
    """Returns vLLM's constant gauge whose labels carry the size of the KV pool."""

    def value(name: str) -> str:
        samples = families[name].samples
        return str(int(samples[0].value)) if samples else "0"

    metric = GaugeMetricFamily(
        "vllm:cache_config_info", "KV cache", labels=["block_size", "num_gpu_blocks", "engine"]
    )
    metric.add_metric(
        [value("ullage_kv_block_size_tokens"), value("ullage_kv_blocks_total"), "0"], 1
    )
    return metric


def _resident_bytes() -> float:
    """Returns the resident memory of this process in bytes, from the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * 4096)
