"""The log record of each request, the latest records, and counts over all requests."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ullage.inference.v1 import inference_pb2
from ullage_router.policy.decision import UNDECIDED, Decision

KEPT_DECISIONS = 50
KEPT_MOMENTS = 64
"""Size limit of a timeline. A request that many engines lose gets no further entries."""
DEVICE = "device"
"""Name of the tier from which nothing is loaded."""
RESUMED_INEXACT = "x-ullage-resumed-inexact"
"""Header, metadata key and comment of an answer that an engine with another fingerprint resumed."""


class TierHit(NamedTuple):
    """Prompt tokens of a request whose KV was cached in one tier of its engine."""

    tier: str
    """device, host, remote or file."""
    num_tokens: int
    seconds: float
    """Seconds from the request for the KV until it was on the device, or 0 where it was there."""


def cached_tokens(
    counted: inference_pb2.Accepted | inference_pb2.Usage,
) -> tuple[TierHit, ...]:
    """Return the tiers with cached KV of the prompt, and the tokens of each."""
    if counted.cached_by_tier:
        return tuple(
            TierHit(each.tier, each.tokens, each.seconds) for each in counted.cached_by_tier
        )
    num_tokens = counted.cached_tokens
    return (TierHit(DEVICE, num_tokens, 0.0),) if num_tokens else ()


class Moment(NamedTuple):
    """A step in a request's timeline, or an event."""

    event: str
    """tokenised, decided, queued, sent, admitted, first_token, engine_failed or resumed."""
    at_s: float
    """Unix time of the end."""
    seconds: float
    """Duration, or 0 for an event without one."""
    fields: Mapping[str, object]


@dataclass(slots=True)
class RequestRecord:
    """The facts of one request that are logged and counted.

    The protocols create the record. Every stage may add to the timeline. `Generation` writes
    `finish` with the answer's last event. Only `RequestPipeline` writes the other fields, when the
    answer begins and when the request is over.
    """

    request_id: str
    arrived: float = field(default_factory=time.monotonic)
    arrived_unix: float = field(default_factory=time.time)
    tenant: str = ""
    """Empty where no tenants are configured, or the key is unknown."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """The x-ratelimit-* headers with the tenant's remaining quota."""
    decision: Decision = UNDECIDED
    status: int = 0
    """HTTP status that the client got, or would have got. It is 499 after a disconnect."""
    error: str = ""
    """Reason of the error that the client got."""
    retry_after_s: int | None = None
    """The Retry-After of the answer in seconds, or None without one."""
    is_cancelled: bool = False
    """Whether the client disconnected, or got the error of another request."""
    priority: int = 0
    held_s: float = 0.0
    """Seconds for which the request was held until its pool was awake."""
    ttft_s: float | None = None
    cached: tuple[TierHit, ...] = ()
    """Prompt tokens whose KV the engine had when the answer began."""
    output_tokens: int = 0
    finish: str = ""
    """OpenAI's finish reason, or empty where the answer did not end, or has several choices."""
    timeline: list[Moment] = field(default_factory=list)
    """Steps and events, oldest first."""
    ended: float | None = None

    def note(self, event: str, seconds: float = 0.0, **fields: object) -> None:
        """Add a step that ends now to the timeline.

        Args:
            seconds: duration of the step.
            fields: further facts, for the log and for spans.
        """
        if len(self.timeline) < KEPT_MOMENTS:
            self.timeline.append(Moment(event, time.time(), seconds, fields))

    def note_queued(self, seconds: float, pool: str) -> None:
        """Add a wait in the queue, merged with a wait just before it."""
        if self.timeline and self.timeline[-1].event == "queued":
            seconds += self.timeline.pop().seconds
        self.note("queued", seconds, pool=pool)

    @property
    def duration_s(self) -> float:
        return (self.ended or time.monotonic()) - self.arrived

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of the answer after its first token, or None without a second token."""
        seconds = self.duration_s - (self.ttft_s or 0.0)
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds else None

    def as_json(self) -> dict[str, object]:
        """Return the record for the log and /stats."""
        decision = self.decision
        speed = self.tokens_per_second
        return {
            "request_id": self.request_id,
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
    """Counts since start and the latest records."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self.records: deque[RequestRecord] = deque(maxlen=KEPT_DECISIONS)
        """The latest records, oldest first."""
        self.output_tokens = 0
        """Tokens of all answers that ended, including those that broke off."""

    def on_end(self, record: RequestRecord) -> None:
        """Count a request that is over, and keep its record."""
        decision = record.decision
        if decision.action:
            self._counts[decision.action, decision.route, decision.reason] += 1
        self.records.append(record)
        self.output_tokens += record.output_tokens

    def counts(self) -> list[dict[str, object]]:
        """Return the numbers of decisions by action, route and reason."""
        return [
            {"action": action, "route": route, "reason": reason, "count": count}
            for (action, route, reason), count in sorted(self._counts.items())
        ]

    def latest(self) -> list[dict[str, object]]:
        """Return the latest records, newest first."""
        return [record.as_json() for record in reversed(self.records)]
