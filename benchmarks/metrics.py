"""Measure the cost of metrics: a scrape of each process, and the share in requests and steps.

A scrape is measured in this process with as many series as a busy service has: 20 tenants, all
statuses, three tiers and eight ranks. The cost of metrics for one request, one token and one step
is measured in this process, too, by timing each function. The share of metrics in a service's time
is computed from the metrics of `ullage up` with the example's model under load. The benchmark
prints one JSON object:

scrape            CPU time and samples of one scrape of the router, the engine and the operator
router_share      share of metrics in the router's CPU time per request
server_share      share of metrics in the engine server's CPU time per token
worker_share      share of metrics in a worker's step
whole_share       share of metrics in all CPU time and all steps
missed            figures that miss their limits

examples:
  python -m benchmarks metrics
  python -m benchmarks metrics --quick             scrapes and calls, without a service

exit status: 0 every figure is within its limit, 1 otherwise
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
import typing
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.load import level
from benchmarks.support.local_service import start
from benchmarks.support.options import new_parser
from ullage_common.process.metrics import (
    CounterName,
    GaugeName,
    exposition,
    metric_names,
)
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.figures import Figures
from ullage_engine.protocol.messages import Ready, StateReport
from ullage_engine.protocol.worker_state import RankPlace, WorkerState
from ullage_engine.server.metrics import EngineMetrics
from ullage_kv import TierStats
from ullage_kv.service import PeerTraffic
from ullage_operator import metric_names as operator_names
from ullage_router import metric_names as router_names
from ullage_router.policy.decision import Decision
from ullage_router.telemetry.metrics import Metrics, TenantMetrics
from ullage_router.telemetry.record import RequestRecord, TierHit

MANIFEST = Path(__file__).resolve().parents[1] / "examples" / "smollm2.yaml"
MOST_SCRAPE_MS = 10.0
MOST_SHARE = 0.01
FLOORS = f"floors: each scrape <= {MOST_SCRAPE_MS:g} ms, router, worker and whole <= {MOST_SHARE:g}"
TENANTS = tuple(f"tenant-{number}" for number in range(20))
CODES = (200, 400, 401, 429, 499, 500, 503, 504)
REPORTS_A_SECOND = 10
"""Number of reports that a busy worker sends per second."""
REPEATS = 20_000


PROFILE = MemoryProfile(
    block_tokens=16,
    groups=(CacheGroup(bytes_per_token=10),),
    state_bytes_per_sequence=0,
    activation_bytes_per_token=0,
    sampler_bytes_per_sequence=0,
    prefill_chunk_tokens=64,
    kv_pool_bytes=16_000,
)


def made(action: str, queued_s: float = 0.0) -> Decision:
    """Return a typical routing decision."""
    reason = "QUEUE_FULL" if action == "reject" else "FITS"
    return Decision(action, "single", "single", reason, "engine-0", queued_s=queued_s)


@dataclass
class BusyRouter:
    """A router's metrics with as many series as on a busy router."""

    metrics: Metrics
    tenants: TenantMetrics
    record: RequestRecord

    def on_end(self) -> None:
        """Record the end of a request."""
        record = self.record
        self.metrics.on_end(record)
        self.tenants.on_end(record.tenant, record.status, 100, record.output_tokens)


def busy_router() -> BusyRouter:
    metrics = Metrics(TENANTS)
    tenants = TenantMetrics(metrics.registry, TENANTS)

    registered = {family.name for family in metrics.registry.collect()}
    for name in metric_names(router_names):
        if isinstance(name, GaugeName) and not name.labels and name.name not in registered:
            metrics.watch(name, float)
        elif isinstance(name, CounterName) and not name.labels and name.name not in registered:
            metrics.count(name, float)

    router = BusyRouter(metrics, tenants, RequestRecord("r"))
    for tenant in TENANTS:
        for code in CODES:
            for priority in (-1, 0, 1):
                record = RequestRecord("r", tenant=tenant, status=code, priority=priority)
                record.decision = made("reject" if code == 429 else "accept", queued_s=0.1)
                record.ttft_s = 0.1
                record.output_tokens = 50
                record.ended = record.arrived + 2
                record.cached = (TierHit("device", 64, 0.0),)
                router.record = record
                router.on_end()

    router.record = RequestRecord("r", tenant=TENANTS[0], status=200)
    router.record.decision = made("accept")
    router.record.ttft_s = 0.1
    router.record.output_tokens = 50
    router.record.ended = router.record.arrived + 2
    return router


def worker_state(figures: Figures) -> WorkerState:
    numbers = {
        name: 1
        for name, kind in typing.get_type_hints(WorkerState).items()
        if kind is int and name != "pressure_level"
    }
    speeds = {"decode_tokens_per_second": 1.0, "prefill_tokens_per_second": 1.0}
    return WorkerState(
        **numbers, **speeds, threshold=0.9, releases=[], ledger=[], figures=figures.copy()
    )


def busy_figures() -> Figures:
    figures = Figures()
    for number in range(1000):
        figures.observe_step(number / 5000, 1 + number * 8, 1 + number % 64)
        figures.observe_start(time.monotonic() - number / 100)
    return figures


def entry() -> Any:
    """Return the part of a half-answered request that the engine's metrics read."""
    now = time.monotonic()
    request = SimpleNamespace(num_prompt_tokens=100)
    job = SimpleNamespace(request=request, degraded=())
    return SimpleNamespace(
        job=job, index=0, accepted_at=now, last_token_at=now, output_ids=[1] * 50, num_restored=0
    )


def busy_engine() -> EngineMetrics:
    metrics = EngineMetrics("model")
    state = worker_state(busy_figures())

    places = [
        RankPlace(
            rank=rank,
            stage=rank // 4,
            tensor_rank=rank % 4,
            device="cuda",
            first_layer=0,
            num_layers=40,
            num_attention_layers=40,
            num_heads=8,
            num_kv_heads=2,
        )
        for rank in range(8)
    ]

    profile = {"profile": PROFILE, "max_model_len": 64, "vocab_size": 9, "dtype": "float32"}
    metrics.worker_ready(Ready(**profile, ranks=places, state=state))  # type: ignore[arg-type]

    tiers = [TierStats(name, "threads") for name in ("host", "remote", "file")]
    missed = {(tier.name, reason): 1 for tier in tiers for reason in ("slower", "unused", "late")}
    metrics.watch_tiers(lambda: tiers, lambda: missed)
    traffic = PeerTraffic(*range(7))
    metrics.watch_peers(lambda: traffic)

    for outcome in ("stop", "length", "timeout", "cancelled", "INVALID_FIELD", "KV_HEADROOM"):
        metrics.ended(entry(), outcome)
    metrics.tokens(entry(), 1)
    return metrics


def busy_operator() -> CollectorRegistry:
    registry = CollectorRegistry()
    result = operator_names.RECONCILE.register(registry)
    for each in ("ok", "denied", "invalid", "gone", "temporary", "permanent", "bug"):
        result.labels(each).inc()
    operator_names.RECONCILE_SECONDS.register(registry).observe(0.1)
    restarts = operator_names.WATCH_RESTARTS.register(registry)
    objects = operator_names.OBJECTS.register(registry)
    for kind in range(16):
        objects.labels(f"kind-{kind}").set(3)
        for reason in ("ended", "forgotten", "unavailable"):
            restarts.labels(f"kind-{kind}", reason).inc()
    return registry


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    """Return the CPU time of one scrape, and the number of samples and bytes in the scrape."""
    text = exposition(registry)
    times = []
    for _ in range(30):
        started = time.thread_time()
        exposition(registry)
        times.append(1e3 * (time.thread_time() - started))
    samples = sum(not line.startswith(b"#") for line in text.splitlines())
    return {"ms": round(statistics.median(times), 2), "samples": samples, "bytes": len(text)}


def cost_us(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return a function's CPU time per call in microseconds, as the minimum of several rounds."""
    rounds = []
    for _ in range(5):
        started = time.thread_time()
        for _ in range(repeats):
            call()
        rounds.append(1e6 * (time.thread_time() - started) / repeats)
    return min(rounds)


@dataclass(frozen=True)
class Costs:
    """CPU time that metrics take, in microseconds."""

    request: float
    """CPU time per request in the router."""
    token: float
    """CPU time per token in the engine's server, if each token comes from a separate step."""
    step: float
    """CPU time per step in the worker."""
    report: float
    """CPU time for the step and queue-time figures in one of the worker's reports."""


def measure_costs() -> Costs:
    router = busy_router()
    engine = busy_engine()
    figures = busy_figures()
    begun = entry()
    encoder = msgspec.msgpack.Encoder()
    engine.tokens(begun, 1)

    def token() -> None:
        engine.step_done()
        engine.tokens(begun, 1)

    def report(known: Figures) -> float:
        state = worker_state(known)
        state = msgspec.structs.replace(state, figures=known)
        return cost_us(lambda: encoder.encode(StateReport(state=state)), 2000)

    copying = cost_us(figures.copy, 2000)
    return Costs(
        request=cost_us(router.on_end),
        token=cost_us(token),
        step=cost_us(lambda: figures.observe_step(0.01, 64, 64)),
        report=copying + report(figures) - report(Figures()),
    )


class ServiceCounters:
    """Counters of a service's processes, read from their metrics."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._router = state["metrics_url"]
        self._engines = [engine["metrics_url"] for engine in state["engines"]]

    def counts(self) -> dict[str, float]:
        router = read(self._router)
        engine = read(*self._engines)
        return {
            "requests": router["ullage_router_requests_total"],
            "router_s": router["process_cpu_seconds_total"],
            "server_s": engine["process_cpu_seconds_total"],
            "tokens": engine["ullage_generation_tokens_total"],
            "steps": engine["ullage_step_seconds_count"],
            "steps_s": engine["ullage_step_seconds_sum"],
        }


def read(*urls: str) -> dict[str, float]:
    """Return the sum of all samples for each metric name."""
    sums: dict[str, float] = {}
    for url in urls:
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def under_load(options: argparse.Namespace) -> dict[str, float]:
    """Return a service's requests, tokens, steps and CPU seconds during the load."""
    with tempfile.TemporaryDirectory() as folder:
        state_file = Path(folder) / "state.json"
        process, _ = start(MANIFEST, state_file)
        try:
            state = json.loads(state_file.read_text())
            service = ServiceCounters(state)
            ask = (state["http_url"], state["model"])
            asyncio.run(level(*ask, options.concurrency, options.concurrency, 20, 4))
            before = service.counts()
            asyncio.run(level(*ask, options.concurrency, options.requests, 20, options.tokens))
            after = service.counts()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return {name: after[name] - count for name, count in before.items()}


def shares(costs: Costs, did: dict[str, float]) -> dict[str, float]:
    """Return the shares of a service's time that metrics take."""
    router_s = 1e-6 * costs.request * did["requests"]
    server_s = 1e-6 * costs.token * did["tokens"]
    reports = min(did["steps"], REPORTS_A_SECOND * did["steps_s"])
    worker_s = 1e-6 * (costs.step * did["steps"] + costs.report * reports)
    all_s = did["router_s"] + did["server_s"] + did["steps_s"]
    return {
        "router_share": router_s / did["router_s"],
        "server_share": server_s / did["server_s"],
        "worker_share": worker_s / did["steps_s"],
        "whole_share": (router_s + server_s + worker_s) / all_s,
    }


def main() -> int:
    parser = new_parser("metrics", __doc__, FLOORS)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="measure scrapes and calls only")
    options = parser.parse_args()

    registries = {
        "router": busy_router().metrics.registry,
        "engine": busy_engine().registry,
        "operator": busy_operator(),
    }

    scrapes = {name: scrape(registry) for name, registry in registries.items()}
    costs = measure_costs()
    missed = [f"scrape of {name}" for name, each in scrapes.items() if each["ms"] > MOST_SCRAPE_MS]

    report: dict[str, Any] = {
        "scrape": scrapes,
        "us": {name: round(value, 3) for name, value in vars(costs).items()},
    }

    if not options.quick:
        print("measuring a service under load ...", file=sys.stderr)
        did = under_load(options)
        report["service"] = {name: round(value, 3) for name, value in did.items()}
        for name, share in shares(costs, did).items():
            report[name] = round(share, 5)
            if share > MOST_SHARE and name != "server_share":
                missed.append(name)

    print(json.dumps(report | {"missed": missed}, indent=2))
    return 1 if missed else 0
