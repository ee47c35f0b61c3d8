"""Metrics that are read off the worker's state: one line each.

The worker counts since its own start; what is exported goes on through every restart.
"""

from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from ullage_engine.memory.predictor import block_bytes
from ullage_engine.messages import Ready, WorkerState

Read = Callable[[WorkerState], float]


def _held_bytes(state: WorkerState) -> int:
    """KV in block tables: neither free nor kept by caches alone."""
    return max(0, state.kv_pool_bytes - state.kv_free_bytes - state.kv_reclaimable_bytes)


def _used_ratio(state: WorkerState) -> float:
    return _held_bytes(state) / state.kv_pool_bytes if state.kv_pool_bytes else 0.0


def _waste_ratio(state: WorkerState) -> float:
    held = _held_bytes(state)
    return max(0.0, 1.0 - state.kv_used_bytes / held) if held else 0.0


_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("requests_running", "Sequences in the batch", lambda s: s.num_running),
    ("requests_waiting", "Sequences admitted, not started", lambda s: s.num_waiting),
    ("kv_used_ratio", "Share of the KV pool in use, 0 to 1", _used_ratio),
    ("kv_waste_ratio", "Share of the KV in use that holds no tokens, 0 to 1", _waste_ratio),
    ("kv_pool_bytes", "KV pool", lambda s: s.kv_pool_bytes),
    ("kv_committed_bytes", "Promised, not allocated yet", lambda s: s.kv_committed_bytes),
    ("memory_headroom_bytes", "What a new request may take", lambda s: s.headroom_bytes),
    ("worker_resident_bytes", "Resident memory of the worker", lambda s: s.rss_bytes),
    ("sessions", "Sessions that keep KV between requests", lambda s: s.num_sessions),
    ("session_bytes", "KV that sessions keep between requests", lambda s: s.session_bytes),
    ("engine_pressure_level", "Degrade level, 1 the mildest; 0 none", lambda s: s.pressure_level),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("preemptions", "Sequences preempted for memory", lambda s: s.num_preemptions),
    ("swaps", "Preemptions by swapping to host memory", lambda s: s.num_swaps),
    ("oom_events", "Steps that ran out of memory", lambda s: s.num_oom_events),
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
)


_RANK_LABELS = ("rank", "stage", "tensor_rank", "device", "first_layer")


class WorkerMetrics:
    """Gauges and counters of whichever worker serves."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            made = Gauge(f"ullage_{name}", text, list(labels), registry=registry)
            return made.labels(**labels)

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"ullage_{name}", text, list(labels), registry=registry)
            return made.labels(**labels)

        self._gauges = [(gauge(name, text), read) for name, text, read in _GAUGES]
        self._counters = [(counter(name, text), read) for name, text, read in _COUNTERS]
        self._blocks = gauge("kv_blocks_total", "Blocks of the KV pool")
        self._used_blocks = gauge("kv_blocks_used", "Blocks in block tables")
        self._block_tokens = gauge("kv_block_size_tokens", "Tokens of one block")
        names = [*labels, *_RANK_LABELS]
        text = "Layers of each rank: the device map"
        self._ranks = Gauge("ullage_rank_layers", text, names, registry=registry)
        self._labels = labels
        self._seen = [0.0] * len(_COUNTERS)
        self._block_bytes = 1

    def ready(self, ready: Ready) -> None:
        """A new worker, which counts from 0."""
        profile = ready.profile
        for place in ready.ranks:
            fields = msgspec.structs.asdict(place)
            own = {name: str(fields[name]) for name in _RANK_LABELS}
            self._ranks.labels(**self._labels, **own).set(place.num_layers)
        self._block_bytes = max(1, block_bytes(profile))
        self._block_tokens.set(profile.block_tokens)
        self._seen = [0.0] * len(_COUNTERS)

    def state(self, state: WorkerState) -> None:
        for gauge, read in self._gauges:
            gauge.set(read(state))
        self._blocks.set(state.kv_pool_bytes // self._block_bytes)
        self._used_blocks.set(_held_bytes(state) // self._block_bytes)
        counts = [read(state) for _, read in self._counters]
        for (counter, _), count, seen in zip(self._counters, counts, self._seen, strict=True):
            counter.inc(max(0.0, count - seen))
        self._seen = counts
