"""Computes the values that `ullage top` shows at one moment, from two samples of a router.

This module has no I/O and no clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "ullage_router_"
"""Prefix of the router's metrics. Other metrics are ignored."""
MAX_LATEST = 50
"""Maximum number of latest requests in a frame."""

Document = Mapping[str, Any]
"""A parsed JSON object."""


class Sample(msgspec.Struct, frozen=True):
    """The content of a router's /stats and /metrics at one moment."""

    at: float
    """Time of the sample in seconds, on the monotonic clock."""
    stats: Document
    """The content of /stats."""
    totals: Mapping[tuple[str, ...], float]
    """Counters and gauges from /metrics.

    A key is the metric's name without PREFIX, followed by the label values in the order of the
    label names.
    """


class EngineRow(msgspec.Struct, frozen=True):
    """The values shown for one engine. All sizes refer to its KV pool and are in bytes."""

    id: str
    pool: str
    route: str
    state: str
    trouble: str
    pressure_level: int = 0
    pool_bytes: int = 0
    used_bytes: int = 0
    """Bytes that hold the KV of running sequences."""
    committed_bytes: int = 0
    """Bytes that are reserved for admitted requests but not used yet."""
    reclaimable_bytes: int = 0
    """Bytes of cached KV that can be evicted for new requests."""
    headroom_bytes: int = 0
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    """Decode speed of all running sequences together."""
    restarts: int = 0
    """Number of restarts of the engine's workers and server."""


class DecisionRow(msgspec.Struct, frozen=True):
    """The number of routing decisions with the same action and reason since the router started."""

    action: str
    reason: str
    total: int
    per_s: float


class LatestRow(msgspec.Struct, frozen=True):
    """A row in the list of the latest finished requests."""

    request_id: str
    arrived: float
    """Unix time at which the request arrived."""
    action: str
    reason: str
    route: str
    engine: str
    status: int
    retry_after_s: int | None
    predicted_bytes: int | None
    available_bytes: int | None
    queued_s: float
    ttft_s: float | None
    output_tokens: int


class Frame(msgspec.Struct, frozen=True):
    """All values in one refresh of the display."""

    model: str
    ready: bool
    requests_per_s: float
    tokens_per_s: float
    """Decode speed of all running sequences on all engines."""
    answered_tokens_per_s: float
    """Output tokens per second, counting only finished responses."""
    refused_per_s: float
    inflight: int
    queue_requests: int
    queue_max_requests: int
    queue_bytes: int
    queue_oldest_s: float
    """Longest current wait in the queue, in seconds."""
    retry_after_s: tuple[int, int] | None
    """Smallest and largest Retry-After among the latest requests, in seconds.

    None if none of these requests was refused with a Retry-After.
    """
    engines: tuple[EngineRow, ...]
    decisions: tuple[DecisionRow, ...]
    """Routing decisions, most frequent first."""
    latest: tuple[LatestRow, ...]
    """Latest finished requests, newest first."""


def read_metrics(text: str) -> dict[tuple[str, ...], float]:
    """Parse the router's counters and gauges from Prometheus text, keyed as in `Sample.totals`."""
    totals: dict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "gauge"):
            continue
        for sample in family.samples:
            if not sample.name.startswith(PREFIX):
                continue
            values = (sample.labels[name] for name in sorted(sample.labels))
            totals[(sample.name.removeprefix(PREFIX), *values)] += sample.value

    return dict(totals)


def make_frame(before: Sample | None, now: Sample) -> Frame:
    """Compute a frame from two samples. Without an earlier sample, all rates are 0."""
    stats = now.stats
    queue = stats["queue"]

    engines = tuple(sorted(map(_engine, stats["engines"]), key=lambda row: (row.pool, row.id)))
    latest = tuple(_latest(record) for record in stats["latest"][:MAX_LATEST])
    waits = [row.retry_after_s for row in latest if row.retry_after_s is not None]
    decisions = _decisions(before, now)

    return Frame(
        model=stats["model"],
        ready=stats["ready"],
        requests_per_s=_rate(before, now, "requests_total"),
        tokens_per_s=round(sum(engine.tokens_per_s for engine in engines), 2),
        answered_tokens_per_s=_rate(before, now, "output_tokens_total"),
        refused_per_s=round(sum(row.per_s for row in decisions if row.action == "reject"), 2),
        inflight=int(_total(now, "inflight_requests")),
        queue_requests=int(_total(now, "queue_requests")),
        queue_max_requests=queue["max_requests"],
        queue_bytes=int(_total(now, "queue_bytes")),
        queue_oldest_s=queue.get("oldest_s", 0.0),
        retry_after_s=(min(waits), max(waits)) if waits else None,
        engines=engines,
        decisions=decisions,
        latest=latest,
    )


def _engine(engine: Document) -> EngineRow:
    named = {name: engine[name] for name in ("id", "pool", "route", "state", "trouble")}
    if "kv_pool_bytes" not in engine:  # the engine has not reported yet
        return EngineRow(**named)

    pool = engine["kv_pool_bytes"]
    free = engine["kv_free_bytes"]
    reclaimable = engine["kv_reclaimable_bytes"]
    committed = engine["kv_committed_bytes"]
    return EngineRow(
        **named,
        pressure_level=engine["pressure_level"],
        pool_bytes=pool,
        used_bytes=max(0, pool - free - reclaimable),
        committed_bytes=committed,
        # Committed bytes are first taken from free ones, and only then evict cached KV.
        reclaimable_bytes=max(0, reclaimable - max(0, committed - free)),
        headroom_bytes=engine["headroom_bytes"],
        running=engine["requests_running"],
        waiting=engine["requests_waiting"],
        tokens_per_s=round(engine["requests_running"] * engine["decode_tokens_per_second"], 2),
        restarts=engine.get("worker_restarts", 0) + engine["reports"]["restarts"],
    )


def _latest(record: Document) -> LatestRow:
    is_refused = record["status"] >= 400
    reason = record["error"] if is_refused and record["error"] else record["reason"]
    return msgspec.convert({**record, "reason": reason}, LatestRow)


def _decisions(before: Sample | None, now: Sample) -> tuple[DecisionRow, ...]:
    counts = _counts(now)
    earlier = _counts(before) if before else {}
    rows = [
        DecisionRow(*key, count, _per_s(before, now, count - earlier.get(key, 0)))
        for key, count in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.per_s, -row.total, row.action, row.reason)))


def _counts(sample: Sample) -> dict[tuple[str, str], int]:
    """Count a sample's decisions by action and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for each in sample.stats["decisions"]:
        counts[each["action"], each["reason"]] += each["count"]

    return dict(counts)


def _total(sample: Sample, name: str) -> float:
    return sum(value for key, value in sample.totals.items() if key[0] == name)


def _rate(before: Sample | None, now: Sample, name: str) -> float:
    return _per_s(before, now, _total(now, name) - _total(before, name)) if before else 0.0


def _per_s(before: Sample | None, now: Sample, grown: float) -> float:
    """Return a counter's growth per second (0 if a restart of the router reset the counter)."""
    if before is None or now.at <= before.at:
        return 0.0
    return round(max(0.0, grown) / (now.at - before.at), 2)


def total_headroom(engines: Iterable[EngineRow]) -> tuple[int, int]:
    """Return the total headroom and the total size of all KV pools, in bytes."""
    rows = list(engines)
    return sum(row.headroom_bytes for row in rows), sum(row.pool_bytes for row in rows)
