"""An engine's Prometheus metrics: `ullage_*` and the `vllm:` names that dashboards expect.

The `vllm:` aliases are derived from the same samples on every scrape, so nothing is counted twice.
Each worker counts from zero, but the exported counters include the counts of earlier workers.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from ullage_common.process.cpu_pressure import waiting_seconds
from ullage_common.process.metrics import (
    AtScrape,
    CounterName,
    GaugeName,
)
from ullage_common.wire.tls import Certificates
from ullage_engine import metric_names as names
from ullage_engine.gpu.monitor import GpuMonitor
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.server.journal import JournalEntry
from ullage_engine.server.vllm_aliases import VllmAliases
from ullage_engine.server.worker_metrics import WorkerCollector, families
from ullage_kv import FAILURES, TierStats
from ullage_kv.service import PeerTraffic

_SUCCESS = ("stop", "length")
"""Request outcomes for which latencies are recorded."""


class EngineMetrics:
    """An engine's Prometheus metrics, in their own registry."""

    def __init__(self, model: str) -> None:
        native = self._native = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(VllmAliases(native))
        ProcessCollector(registry=native)
        self._values = (model, "0")
        self._worker = WorkerCollector(self._values)
        native.register(self._worker)
        self._blocks = self._gauge(names.BLOCKS)
        self._used_blocks = self._gauge(names.BLOCKS_USED)
        self._block_tokens = self._gauge(names.BLOCK_TOKENS)
        self._block_bytes = 1
        self._ranks = names.RANK_LAYERS.register(native)
        self._gauge(names.SERVER_RESIDENT).set_function(_resident_bytes)
        self._steps = names.STEPS.counts(native, *self._values)
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.worker_restarts = self._counter(names.WORKER_RESTARTS)
        self.start_proof_failures = self._counter(names.START_PROOF_FAILURES)
        self.collective_errors = self._counter(names.COLLECTIVE_ERRORS)
        self._requests = names.REQUESTS.counts(native, *self._values)
        self._degraded = names.DEGRADED.counts(native, *self._values)
        self._generation_tokens = names.GENERATION_TOKENS.counts(native, *self._values)
        self._ttft = names.TTFT.tallies(native, *self._values)
        self._inter_token = names.INTER_TOKEN.tallies(native, *self._values)
        self._per_token = names.PER_TOKEN.tallies(native, *self._values)
        self._e2e = names.E2E.tallies(native, *self._values)
        self._output_length = names.OUTPUT_LENGTH.tallies(native, *self._values)

    def watch_certificates(self, certificates: Certificates) -> None:
        """Start exporting the status of the server's certificate."""
        problems = names.CERTIFICATE_PROBLEMS
        expiry = names.CERTIFICATE_EXPIRY
        self._gauge(problems).set_function(lambda: bool(certificates.problem))
        self._gauge(expiry).set_function(lambda: certificates.material.expires.timestamp())

    def watch_cpu(self, worker_seconds: Callable[[], float]) -> None:
        """Export the use of the host's CPU, which is read on each scrape.

        Args:
            worker_seconds: returns the CPU time of all workers so far.
        """

        def collect() -> Iterable[Metric]:
            worker = names.WORKER_CPU.family()
            worker.add_metric(self._values, worker_seconds())
            waiting = names.CPU_WAITING.family()
            if (seconds := waiting_seconds()) is not None:
                waiting.add_metric(self._values, seconds)
            yield from (worker, waiting)

        self._native.register(AtScrape(collect))

    def worker_ready(self, ready: Ready) -> None:
        """Export a new worker's metrics. Its counters start at zero."""
        for place in ready.ranks:
            fields = msgspec.structs.asdict(place)
            own = (str(fields[name]) for name in names.RANK_LAYERS.labels[len(self._values) :])
            self._ranks.labels(*self._values, *own).set(place.num_layers)
        self._block_bytes = max(1, ready.profile.block_bytes)
        self._block_tokens.set(ready.profile.block_tokens)
        self._worker.replace()
        self.worker_state(ready.state)

    def worker_state(self, state: WorkerState) -> None:
        """Export a worker's gauges and counters. Counters include the counts of earlier workers."""
        self._worker.state = state
        self._blocks.set(state.kv_pool_bytes // self._block_bytes)
        self._used_blocks.set(state.kv_held_bytes // self._block_bytes)

    def workers_ran_out_of_memory(self, count: int) -> None:
        """Add `count` out-of-memory errors that workers could not report before they died."""
        self._worker.count(names.OOM_EVENTS, count)

    def watch_tiers(
        self,
        stats: Callable[[], list[TierStats]],
        not_loaded: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """Export statistics of the KV tiers outside the device, which are read on each scrape.

        Args:
            stats: returns each tier's statistics.
            not_loaded: returns the number of blocks that could not be loaded, by tier and reason.
        """

        def collect() -> Iterable[Metric]:
            tiers = stats()
            labelled = [((*self._values, tier.name), tier) for tier in tiers]
            yield from families(names.TIERS.items(), labelled)
            info = names.TIER_INFO.family()
            failures = names.TIER_FAILURES.family()
            for labels, tier in labelled:
                info.add_metric((*labels, tier.backend), 1)
                for status in FAILURES:
                    # From zero, since Prometheus sees no increase in a counter's first sample.
                    failures.add_metric((*labels, status), tier.failures.get(status, 0))
            missed = names.TIER_NOT_LOADED.family()
            for tier_and_reason, count in not_loaded().items():
                missed.add_metric((*self._values, *tier_and_reason), count)
            yield from (info, failures, missed)

        self._native.register(AtScrape(collect))

    def watch_peers(self, stats: Callable[[], PeerTraffic]) -> None:
        """Export how many KV blocks other engines have read from or written to this engine.

        The counts are read on each scrape.
        """

        def collect() -> Iterable[Metric]:
            return families(names.PEERS.items(), [(self._values, stats())])

        self._native.register(AtScrape(collect))

    def watch_gpus(self, monitor: GpuMonitor) -> None:
        """Export the latest statistics from the GPU driver, which are read on each scrape."""

        def collect() -> Iterable[Metric]:
            gpus = [((*self._values, gpu.index, gpu.uuid), gpu) for gpu in monitor.samples]
            yield from families(names.GPUS.items(), gpus)
            for name, parts_of in names.GPU_PARTS.items():
                family = name.family()
                for labels, gpu in gpus:
                    for part, value in parts_of(gpu).items():
                        family.add_metric((*labels, part), value)
                yield family
            xids = names.GPU_XID_ERRORS.family()
            silent = names.GPU_DRIVER_SILENT.family()
            for (index, uuid, number), count in list(monitor.xid_errors.items()):
                xids.add_metric((*self._values, index, uuid, str(number)), count)
            silent.add_metric(self._values, monitor.is_silent)
            yield from (xids, silent)

        self._native.register(AtScrape(collect))

    def step_done(self) -> None:
        self._steps[()] += 1

    def tokens(self, entry: JournalEntry, num_tokens: int) -> None:
        """Record that `num_tokens` new tokens of a request have arrived together."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._generation_tokens[()] += num_tokens
        if entry.last_token_at is None:
            self._count_degraded(entry)
            self._ttft.observe(now - entry.accepted_at)
            # The samples share one prompt, so it counts once.
            self._prompt_tokens.inc(0 if entry.index else entry.job.request.num_prompt_tokens)
        else:
            seconds = (now - entry.last_token_at) / num_tokens
            self._inter_token.observe(seconds, times=num_tokens)
        entry.last_token_at = now

    def _count_degraded(self, entry: JournalEntry) -> None:
        for change in entry.job.degraded:
            what = change.partition("=")[0]
            self._degraded[what] += 1

    def embedding(self, entry: JournalEntry) -> None:
        """Count a request whose embedding has arrived."""
        entry.last_token_at = time.monotonic()
        self._ttft.observe(entry.last_token_at - entry.accepted_at)
        self._prompt_tokens.inc(entry.job.request.num_prompt_tokens)

    def ended(self, entry: JournalEntry, outcome: str) -> None:
        """Count a finished request by outcome: stop, length, timeout, cancelled or error reason."""
        self.refused(outcome)
        if outcome not in _SUCCESS or entry.last_token_at is None:
            return
        took = entry.last_token_at - entry.accepted_at
        self._e2e.observe(took)
        # An embedding has no output.
        if entry.output_ids:
            self._output_length.observe(len(entry.output_ids))
        if num_tokens := len(entry.output_ids) - entry.num_restored:
            self._per_token.observe(took / num_tokens)

    def refused(self, outcome: str) -> None:
        """Count a request that was refused before it had a journal entry."""
        self._requests[outcome] += 1

    def _gauge(self, name: GaugeName) -> Gauge:
        return name.register(self._native).labels(*self._values)

    def _counter(self, name: CounterName) -> Counter:
        return name.register(self._native).labels(*self._values)


def _resident_bytes() -> float:
    """Return this process's resident memory in bytes, as reported by the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * 4096)
