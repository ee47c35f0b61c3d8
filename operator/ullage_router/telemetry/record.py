"""The log record of each request, and statistics over all requests."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ullage.inference.v1 import inference_pb2
from ullage_router.policy.decision import UNDECIDED, Decision

KEPT_DECISIONS = 50
KEPT_MOMENTS = 64
"""Maximum number of entries in a timeline, in case a request loses many engines."""
DEVICE = "device"
"""Name of the KV cache tier in device memory, whose KV can be used without loading it."""
RESUMED_INEXACT = "x-ullage-resumed-inexact"
"""Marks an answer that was resumed on an engine whose numerics may lead to different results.

The name is used as an HTTP header, as a gRPC metadata key and as an SSE comment.
"""


class TierHit(NamedTuple):
    """The part of a prompt whose KV was cached in one tier of the engine."""

    tier: str
    """Name of the cache tier: device, host, remote or file."""
    num_tokens: int
    seconds: float
    """Seconds it took to load the KV onto the device, or 0 if it was already there."""


def cached_tokens(
    counted: inference_pb2.Accepted | inference_pb2.Usage,
) -> tuple[TierHit, ...]:
    """Return the number of prompt tokens whose KV was cached, by tier."""
    if counted.cached_by_tier:
        return tuple(
            TierHit(each.tier, each.tokens, each.seconds) for each in counted.cached_by_tier
        )
    num_tokens = counted.cached_tokens
    return (TierHit(DEVICE, num_tokens, 0.0),) if num_tokens else ()


def add_cached(
    total: inference_pb2.Usage, counted: inference_pb2.Accepted | inference_pb2.Usage
) -> None:
    """Add the cached tokens of one prompt to the total of several, which has each tier once."""
    total.cached_tokens += counted.cached_tokens
    by_tier = {each.tier: each for each in total.cached_by_tier}
    for hit in cached_tokens(counted):
        entry = by_tier.get(hit.tier) or total.cached_by_tier.add(tier=hit.tier)
        entry.tokens += hit.num_tokens
        entry.seconds += hit.seconds


class Moment(NamedTuple):
    """A timeline entry of a request, either a step with a duration or an event without one."""

    event: str
    """One of tokenised, decided, queued, sent, admitted, first_token, engine_failed or resumed."""
    at_s: float
    """Unix time at which the step ended or the event happened."""
    seconds: float
    """Duration of the step in seconds, or 0 for an event."""
    fields: Mapping[str, object]


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request that are logged and counted.

    The HTTP and gRPC servers create the record. Every pipeline stage may add to the timeline.
    `Generation` writes `finish` at the answer's last event. The HTTP server names a body's unknown
    fields in `ignored`. `begin_span` writes `trace_id`. Only `RequestPipeline` writes the other
    fields, when the answer starts and when the request has ended.
    """

    request_id: str
    arrived: float = field(default_factory=time.monotonic)
    arrived_unix: float = field(default_factory=time.time)
    tenant: str = ""
    """Name of the tenant (empty if no tenants are configured or the key is unknown)."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """The `x-ratelimit-*` headers that state the tenant's remaining quota."""
    decision: Decision = UNDECIDED
    status: int = 0
    """HTTP status of the response, or its equivalent for gRPC. It is 499 after a disconnect."""
    error: str = ""
    """Reason code of the error that the client got (empty if there was none)."""
    retry_after_s: int | None = None
    """The response's Retry-After value in seconds, or None if it has no such header."""
    is_cancelled: bool = False
    """Whether the client disconnected or another request caused the cancellation."""
    priority: int = 0
    held_s: float = 0.0
    """How long the request was held while its pool scaled up from zero, in seconds."""
    ttft_s: float | None = None
    cached: tuple[TierHit, ...] = ()
    """Number of prompt tokens whose KV was already cached when the answer started, by tier."""
    ignored: tuple[str, ...] = ()
    """Parts of the request that had no effect, such as unknown fields."""
    output_tokens: int = 0
    finish: str = ""
    """OpenAI's finish reason (empty if the answer did not finish or has several choices)."""
    timeline: list[Moment] = field(default_factory=list)
    """Timeline entries, oldest first."""
    ended: float | None = None
    trace_id: str = ""
    """Id of the request's trace, in hexadecimal (empty if the request is not traced)."""

    def note(self, event: str, seconds: float = 0.0, **fields: object) -> None:
        """Add an event, or a step that ends at the current time, to the timeline.

        Args:
            seconds: duration of the step.
            fields: additional facts for the log and for trace spans.
        """
        if len(self.timeline) < KEPT_MOMENTS:
            self.timeline.append(Moment(event, time.time(), seconds, fields))

    def note_queued(self, seconds: float, pool: str) -> None:
        """Add a wait in the queue, or extend the previous timeline entry if it was also a wait."""
        if self.timeline and self.timeline[-1].event == "queued":
            seconds += self.timeline.pop().seconds
        self.note("queued", seconds, pool=pool)

    @property
    def duration_s(self) -> float:
        return (self.ended or time.monotonic()) - self.arrived

    @property
    def tokens_per_second(self) -> float | None:
        """Return the output speed after the first token, or None with fewer than two tokens."""
        seconds = self.duration_s - (self.ttft_s or 0.0)
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds else None

    def as_json(self) -> dict[str, object]:
        """Return the record as JSON fields for the log and /stats."""
        decision = self.decision
        speed = self.tokens_per_second
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
            "arrived": self.arrived_unix,
            "prompt_tokens": decision.prompt_tokens,
            "cached_tokens": {each.tier: each.num_tokens for each in self.cached},
            "cached_s": {each.tier: round(each.seconds, 4) for each in self.cached},
            "predicted_bytes": decision.predicted_bytes,
            "available_bytes": decision.available_bytes,
            "action": decision.action,
            "route": decision.route,
            "reason": decision.reason,
            "engine": decision.engine,
            "degraded": list(decision.degraded),
            "trail": list(decision.trail),
            "model": decision.model,
            "side": decision.side,
            "revision": decision.revision,
            "attempts": [attempt.as_json() for attempt in decision.attempts],
            "status": self.status,
            "error": self.error,
            "retry_after_s": self.retry_after_s,
            "priority": self.priority,
            "queued_s": round(decision.queued_s, 4),
            "held_s": round(self.held_s, 4),
            "ttft_s": self.ttft_s and round(self.ttft_s, 4),
            "output_tokens": self.output_tokens,
            "coalesced_with": decision.coalesced_with,
            "tokens_per_second": speed and round(speed, 2),
            "duration_s": round(self.duration_s, 4),
            "finish": self.finish,
            "timeline": [self._moment_json(moment) for moment in self.timeline],
        }

    def _moment_json(self, moment: Moment) -> dict[str, object]:
        after_s = round(moment.at_s - self.arrived_unix, 5)
        own = {"event": moment.event, "after_s": after_s, **moment.fields}
        return own | {"seconds": round(moment.seconds, 5)} if moment.seconds else own


class Stats:
    """Keeps totals since the router started, and the records of the latest requests."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self.records: deque[RequestRecord] = deque(maxlen=KEPT_DECISIONS)
        """Records of the latest requests, oldest first."""
        self.output_tokens = 0
        """Total output tokens of all answers that have ended, including interrupted answers."""

    def on_end(self, record: RequestRecord) -> None:
        """Count a request that has ended, and keep its record."""
        decision = record.decision
        if decision.action:
            self._counts[decision.action, decision.route, decision.reason] += 1
        self.records.append(record)
        self.output_tokens += record.output_tokens

    def counts(self) -> list[dict[str, object]]:
        """Return the number of decisions by action, route and reason."""
        return [
            {"action": action, "route": route, "reason": reason, "count": count}
            for (action, route, reason), count in sorted(self._counts.items())
        ]

    def latest(self) -> list[dict[str, object]]:
        """Return the records of the latest requests, newest first."""
        return [record.as_json() for record in reversed(self.records)]
