"""Prometheus metrics of an engine: `ullage_*`, and the `vllm:` names that dashboards expect.

The aliases are made from the same samples at every scrape, so nothing is counted twice. The worker
counts since its own start; what is exported goes on through every restart.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ullage_common.process.metrics import (
    AtScrape,
    CounterName,
    GaugeName,
    HistogramName,
    Tally,
)
from ullage_common.wire.tls import Certificates
from ullage_engine import metric_names as names
from ullage_engine.gpu.monitor import GpuMonitor
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.server.journal import JournalEntry
from ullage_kv import TierStats
from ullage_kv.service import PeerTraffic

_SUCCESS = ("stop", "length")
_FINISHED_REASONS = {"stop": "stop", "length": "length", "timeout": "abort", "cancelled": "abort"}
"""What vLLM calls the outcomes of requests that it would have begun."""

_Owner = TypeVar("_Owner")


class EngineMetrics:
    """All metrics of an engine, on a registry of their own."""

    def __init__(self, model: str) -> None:
        native = self._native = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(_WithAliases(native))
        ProcessCollector(registry=native)
        self._values = (model, "0")
        self._worker = _WorkerCollector(self._values)
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

    def watch_certificates(self, certificates: Certificates) -> None:
        """Export the state of the server's certificate from now on."""
        problems = names.CERTIFICATE_PROBLEMS
        expiry = names.CERTIFICATE_EXPIRY
        self._gauge(problems).set_function(lambda: bool(certificates.problem))
        self._gauge(expiry).set_function(lambda: certificates.material.expires.timestamp())

    def worker_ready(self, ready: Ready) -> None:
        """Begin with a new worker, whose own counters start at zero."""
        for place in ready.ranks:
            fields = msgspec.structs.asdict(place)
            own = (str(fields[name]) for name in names.RANK_LAYERS.labels[len(self._values) :])
            self._ranks.labels(*self._values, *own).set(place.num_layers)
        self._block_bytes = max(1, ready.profile.block_bytes)
        self._block_tokens.set(ready.profile.block_tokens)
        self._worker.replace()
        self.worker_state(ready.state)

    def worker_state(self, state: WorkerState) -> None:
        """Export a worker's gauges and counters, which go on over its replacements."""
        self._worker.state = state
        self._blocks.set(state.kv_pool_bytes // self._block_bytes)
        self._used_blocks.set(state.kv_held_bytes // self._block_bytes)

    def workers_ran_out_of_memory(self, count: int) -> None:
        """Count workers that ended because memory ran out and could not report it themselves."""
        self._worker.count(names.OOM_EVENTS, count)

    def watch_tiers(
        self,
        stats: Callable[[], list[TierStats]],
        not_loaded: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """Export the figures of tiers outside the device, read when they are asked for.

        `not_loaded`: returns the blocks that requests did not begin with, by tier and reason.
        """

        def collect() -> Iterable[Metric]:
            tiers = stats()
            labelled = [((*self._values, tier.name), tier) for tier in tiers]
            yield from _families(names.TIERS.items(), labelled)
            info = names.TIER_INFO.family()
            failures = names.TIER_FAILURES.family()
            for labels, tier in labelled:
                info.add_metric((*labels, tier.backend), 1)
                for status, count in tier.failures.items():
                    failures.add_metric((*labels, status), count)
            missed = names.TIER_NOT_LOADED.family()
            for tier_and_reason, count in not_loaded().items():
                missed.add_metric((*self._values, *tier_and_reason), count)
            yield from (info, failures, missed)

        self._native.register(AtScrape(collect))

    def watch_peers(self, stats: Callable[[], PeerTraffic]) -> None:
        """Export what other engines read and write here, read when it is asked for."""

        def collect() -> Iterable[Metric]:
            return _families(names.PEERS.items(), [(self._values, stats())])

        self._native.register(AtScrape(collect))

    def watch_gpus(self, monitor: GpuMonitor) -> None:
        """Export the driver's latest answers, read when they are asked for."""

        def collect() -> Iterable[Metric]:
            gpus = [((*self._values, gpu.index, gpu.uuid), gpu) for gpu in monitor.samples]
            yield from _families(names.GPUS.items(), gpus)
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
        """Count new tokens of a request, which came together."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._generation_tokens[()] += num_tokens
        if entry.last_token_at is None:
            self._count_degraded(entry)
            self._ttft.observe(now - entry.accepted_at)
            # All samples have one prompt.
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
        """Count a request whose embedding is there."""
        entry.last_token_at = time.monotonic()
        self._ttft.observe(entry.last_token_at - entry.accepted_at)
        self._prompt_tokens.inc(entry.job.request.num_prompt_tokens)

    def ended(self, entry: JournalEntry, outcome: str) -> None:
        """Count a request's end: stop, length, timeout, cancelled or an error's reason."""
        self.refused(outcome)
        if outcome not in _SUCCESS or entry.last_token_at is None:
            return
        took = entry.last_token_at - entry.accepted_at
        self._e2e.observe(took)
        if num_tokens := len(entry.output_ids) - entry.num_restored:
            self._per_token.observe(took / num_tokens)

    def refused(self, outcome: str) -> None:
        """Count a request that never had a journal entry."""
        self._requests[outcome] += 1

    def _gauge(self, name: GaugeName) -> Gauge:
        return name.register(self._native).labels(*self._values)

    def _counter(self, name: CounterName) -> Counter:
        return name.register(self._native).labels(*self._values)


def _families(
    table: Iterable[tuple[CounterName | GaugeName, Callable[[_Owner], float | None]]],
    owners: Collection[tuple[tuple[str, ...], _Owner]],
) -> Iterable[Metric]:
    """Yield a table's metrics with a sample of every owner that has one; an owner's labels stand
    beside it."""
    for name, read in table:
        family = name.family()
        for labels, owner in owners:
            if (value := read(owner)) is not None:
                family.add_metric(labels, value)
        yield family


_Sums = tuple[dict[CounterName, float], dict[HistogramName, Tally], tuple[int, int]]
_Seen = tuple[
    WorkerState | None, dict[CounterName, float], dict[HistogramName, Tally], tuple[int, int]
]


class _WorkerCollector(Collector):
    """A collector of what workers report; its counts go on over their replacements."""

    def __init__(self, values: tuple[str, ...]) -> None:
        self._values = values
        # Replaced at once, since a scrape is in another thread: the present worker's state, None
        # before the first one is ready, and what former workers counted, tallied and changed.
        self._seen: _Seen = (
            None,
            dict.fromkeys(names.WORKER_COUNTERS, 0.0),
            {name: Tally() for name in names.WORKER_HISTOGRAMS},
            (0, 0),
        )

    @property
    def state(self) -> WorkerState | None:
        """The present worker's; None before the first one is ready."""
        return self._seen[0]

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._seen = (state, *self._seen[1:])

    def count(self, name: CounterName, count: int) -> None:
        """Add what no worker has reported."""
        state, counts, tallies, changes = self._seen
        self._seen = (state, {**counts, name: counts[name] + count}, tallies, changes)

    def replace(self) -> None:
        """Keep what the worker has counted: the next one counts from zero."""
        self._seen = (None, *_sums(self._seen))

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        seen = self._seen
        if seen[0] is not None:
            yield from _families(names.WORKER_GAUGES.items(), [(self._values, seen[0])])
        counts, tallies, changes = _sums(seen)
        for counter_name, count in counts.items():
            counter = counter_name.family()
            counter.add_metric(self._values, count)
            yield counter
        for histogram_name, tally in tallies.items():
            yield histogram_name.family({self._values: tally})
        directions = names.BATCH_SIZE_CHANGES.family()
        for direction, count in zip(("grow", "shrink"), changes, strict=True):
            directions.add_metric((*self._values, direction), count)
        yield directions


def _sums(seen: _Seen) -> _Sums:
    """Return what all workers have counted."""
    state, counts, tallies, (grown, shrunk) = seen
    if state is None:
        return counts, tallies, (grown, shrunk)
    return (
        {name: counts[name] + read(state) for name, read in names.WORKER_COUNTERS.items()},
        {name: tallies[name] + read(state) for name, read in names.WORKER_HISTOGRAMS.items()},
        (grown + state.figures.num_grown, shrunk + state.figures.num_shrunk),
    )


class _WithAliases(Collector):
    """A collector of a registry's families, some of them again under vLLM's names."""

    def __init__(self, native: CollectorRegistry) -> None:
        self._native = native

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._native.collect()}
        yield from families.values()
        for name, alias in names.VLLM_NAMES.items():
            if name.name in families:
                yield _renamed(families[name.name], alias)
        yield _success(families[names.REQUESTS.name])
        yield _cache_config(families)


def _renamed(family: Metric, name: str) -> Metric:
    metric = Metric(name, family.documentation, family.type)
    metric.samples = [
        sample._replace(name=sample.name.replace(family.name, name, 1)) for sample in family.samples
    ]
    return metric


def _success(requests: Metric) -> Metric:
    """Return how many requests ended as vLLM's do."""
    counts = dict.fromkeys(_FINISHED_REASONS.values(), 0.0)
    values: tuple[str, ...] = ()
    for sample in requests.samples:
        model, engine, outcome = (sample.labels[name] for name in names.REQUESTS.labels)
        if sample.name.endswith("_total") and (reason := _FINISHED_REASONS.get(outcome)):
            values = (model, engine)
            counts[reason] += sample.value
    metric = names.VLLM_SUCCESS.family()
    for reason, count in counts.items():
        if values:
            metric.add_metric((*values, reason), count)
    return metric


def _cache_config(families: dict[str, Metric]) -> Metric:
    """Return vLLM's constant gauge whose labels carry the size of the KV pool."""

    def value(name: GaugeName) -> str:
        samples = families[name.name].samples
        return str(int(samples[0].value)) if samples else "0"

    metric = names.VLLM_CACHE.family()
    metric.add_metric((value(names.BLOCK_TOKENS), value(names.BLOCKS), "0"), 1)
    return metric


def _resident_bytes() -> float:
    """Return the resident memory of this process in bytes, from the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * 4096)
