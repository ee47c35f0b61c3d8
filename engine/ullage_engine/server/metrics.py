"""Prometheus metrics of an engine: `ullage_*`, and the `vllm:` names that dashboards expect.

The aliases are made from the same samples at every scrape, so nothing is counted twice.
"""

import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ullage_engine.messages import Ready, WorkerState
from ullage_engine.server.journal import Entry

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
    """All of an engine's metrics, on a registry of their own."""

    def __init__(self, model: str) -> None:
        self._native = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(_WithAliases(self._native))
        self._labels = {"model_name": model, "engine": "0"}
        self._requests_running = self._gauge("requests_running", "Sequences in the batch")
        self._requests_waiting = self._gauge("requests_waiting", "Sequences admitted, not started")
        self._kv_total = self._gauge("kv_blocks_total", "Blocks of the KV pool")
        self._kv_used = self._gauge("kv_blocks_used", "Blocks in block tables")
        self._kv_block_tokens = self._gauge("kv_block_size_tokens", "Tokens of one block")
        self._kv_ratio = self._gauge("kv_used_ratio", "Share of the KV pool in use, 0 to 1")
        self._kv_pool = self._gauge("kv_pool_bytes", "KV pool")
        self._kv_committed = self._gauge("kv_committed_bytes", "Promised, not allocated yet")
        self._headroom = self._gauge("memory_headroom_bytes", "What a new request may take")
        self._resident = self._gauge("worker_resident_bytes", "Resident memory of the worker")
        self._server_resident = self._gauge("server_resident_bytes", "The same of the server")
        self._server_resident.set_function(_resident_bytes)
        self._preemptions = self._counter("preemptions", "Sequences preempted for memory")
        self._oom_events = self._counter("oom_events", "Steps that ran out of memory")
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
        self._seen_preemptions = 0
        self._seen_oom_events = 0
        self._block_bytes = 0

    def worker_ready(self, ready: Ready) -> None:
        """A new worker: its own counters start at zero."""
        profile = ready.profile
        per_token = sum(group.bytes_per_token for group in profile.groups)
        self._block_bytes = profile.block_tokens * per_token
        self._kv_block_tokens.set(profile.block_tokens)
        self._seen_preemptions = self._seen_oom_events = 0
        self.worker_state(ready.state)

    def worker_state(self, state: WorkerState) -> None:
        free = state.kv_free_bytes + state.kv_reclaimable_bytes
        used = max(0, state.kv_pool_bytes - free)
        block_bytes = self._block_bytes or 1
        self._requests_running.set(state.num_running)
        self._requests_waiting.set(state.num_waiting)
        self._kv_total.set(state.kv_pool_bytes // block_bytes)
        self._kv_used.set(used // block_bytes)
        self._kv_ratio.set(used / state.kv_pool_bytes if state.kv_pool_bytes else 0.0)
        self._kv_pool.set(state.kv_pool_bytes)
        self._kv_committed.set(state.kv_committed_bytes)
        self._headroom.set(max(0, free - state.kv_committed_bytes))
        self._resident.set(state.rss_bytes)
        self._preemptions.inc(max(0, state.num_preemptions - self._seen_preemptions))
        self._oom_events.inc(max(0, state.num_oom_events - self._seen_oom_events))
        self._seen_preemptions = state.num_preemptions
        self._seen_oom_events = state.num_oom_events

    def step_done(self) -> None:
        self._steps.inc()

    def tokens(self, entry: Entry, num_tokens: int) -> None:
        """New tokens of a request; call before the entry takes them."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._generation_tokens.inc(num_tokens)
        if entry.last_token_at is None:
            self._ttft.observe(now - entry.accepted_at)
            # All samples have one prompt.
            self._prompt_tokens.inc(0 if entry.index else entry.job.request.num_prompt_tokens)
        else:
            self._inter_token.observe((now - entry.last_token_at) / num_tokens)
        entry.last_token_at = now

    def ended(self, entry: Entry, outcome: str) -> None:
        """The last of a request: stop, length, timeout, cancelled or an error's reason."""
        self.refused(outcome)
        if outcome not in _SUCCESS or entry.last_token_at is None:
            return
        took = entry.last_token_at - entry.accepted_at
        self._e2e.observe(took)
        self._per_token.observe(took / len(entry.output_ids))

    def refused(self, outcome: str) -> None:
        """A request that never was an entry."""
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


class _WithAliases(Collector):
    """The families of a registry, and some of them again under vLLM's names."""

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
    """vLLM's constant gauge whose labels carry the size of the KV pool."""

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
    """Resident memory of this process, from the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * 4096)
