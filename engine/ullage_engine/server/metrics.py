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
from ullage_engine.server.worker_metrics import WorkerMetrics
from ullage_rpc.tls import Certificates

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
    """All of an engine's metrics, on a registry of their own."""

    def __init__(self, model: str) -> None:
        self._native = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(_WithAliases(self._native))
        self._labels = {"model_name": model, "engine": "0"}
        self._worker = WorkerMetrics(self._labels, self._native)
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
        """Shows the state of the server's certificate from now on."""
        name, text = "certificate_problems", "1 while the newest certificate cannot be used"
        self._gauge(name, text).set_function(lambda: bool(certificates.problem))
        expiry = self._gauge("certificate_expiry_timestamp_seconds", "When the certificate ends")
        expiry.set_function(lambda: certificates.material.expires.timestamp())

    def worker_ready(self, ready: Ready) -> None:
        """A new worker: its own counters start at zero."""
        self._worker.ready(ready)
        self.worker_state(ready.state)

    def worker_state(self, state: WorkerState) -> None:
        self._worker.state(state)

    def step_done(self) -> None:
        self._steps.inc()

    def tokens(self, entry: Entry, num_tokens: int) -> None:
        """New tokens of a request; call before the entry takes them."""
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

    def _count_degraded(self, entry: Entry) -> None:
        for change in entry.job.degraded:
            what = change.partition("=")[0]
            self._degraded.labels(**self._labels, what=what).inc()

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
