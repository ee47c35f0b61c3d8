"""What was decided: one record a request, the latest of them and counts of all."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ullage_router.cascade.trail import Attempt
from ullage_router.config import LARGE_POOL
from ullage_router.predict import Demand
from ullage_router.wake.patience import Patience

MIB = 1 << 20
KEPT_DECISIONS = 50
KEPT_STEPS = 12
LARGE_ROUTE = "tp2pp2"


def route_of(pool: str) -> str:
    """The word for a pool in headers, logs and metrics."""
    return LARGE_ROUTE if pool == LARGE_POOL else pool


@dataclass(slots=True)
class Record:
    """One request on its way; filled by whoever learns something about it."""

    request_id: str
    arrived: float = field(default_factory=time.monotonic)
    arrived_unix: float = field(default_factory=time.time)
    tenant: str = ""
    """Empty where no tenants are configured, or the key is nobody's."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """x-ratelimit-* headers: what is left of the tenant's quota."""
    prompt_tokens: int = 0
    predicted_bytes: int | None = None
    """None until a prediction could be made."""
    action: str = ""
    """Empty until something was decided."""
    route: str = ""
    reason: str = ""
    engine: str = ""
    degraded: list[str] = field(default_factory=list)
    trail: list[str] = field(default_factory=list)
    """Steps taken with their reasons, such as `queue=KV_HEADROOM`, oldest first."""
    model: str = ""
    """That serves it."""
    side: str = ""
    """stable or canary; empty until it was sent to an engine."""
    revision: str = ""
    """Of the engine that serves it; empty when that is not known."""
    attempts: list[Attempt] = field(default_factory=list)
    """Steps of the cascade that were tried."""
    status: int = 0
    """HTTP status that the client was told, or would be; 499 when it had gone."""
    error: str = ""
    """Reason of the error that the client was told."""
    priority: int = 0
    queued_s: float = 0.0
    patience: Patience = field(default_factory=Patience)
    """Stands still while the request is held."""
    ttft_s: float | None = None
    output_tokens: int = 0
    coalesced_with: str = ""
    """Id of the request whose generation it shared; empty: it had its own."""
    ended: float | None = None

    def step(self, name: str, reason: str) -> None:
        """A step down the ladder; of very many the first ones and the last are kept."""
        self.trail.append(f"{name}={reason}")
        if len(self.trail) > KEPT_STEPS:
            self.trail[KEPT_STEPS - 2 : KEPT_STEPS] = ["..."]

    @property
    def explanation(self) -> dict[str, str]:
        """What was decided, for the details of an error; empty when nothing was."""
        if not self.action:
            return {}
        return {"action": self.action, "route": self.route, "trail": ", ".join(self.trail)}

    def degrade(self, changes: Iterable[str]) -> None:
        """Takes over what an engine lowered, such as `max_tokens=64`; its word is the last."""
        for change in changes:
            name = change.partition("=")[0]
            self.degraded = [old for old in self.degraded if old.partition("=")[0] != name]
            self.degraded.append(change)
        if self.degraded and self.action == "accept":
            self.action, self.reason = "shrink", "PRESSURE"
            self.step("engine", "PRESSURE")

    @property
    def predicted_mib(self) -> float:
        return round((self.predicted_bytes or 0) / MIB, 3)

    def predict(self, demand: Demand) -> None:
        self.predicted_bytes = demand.total

    @property
    def duration_s(self) -> float:
        return (self.ended or time.monotonic()) - self.arrived

    def as_json(self) -> dict[str, object]:
        seconds = self.duration_s - (self.ttft_s or 0.0)
        speed = (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds else None
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "arrived": self.arrived_unix,
            "prompt_tokens": self.prompt_tokens,
            "predicted_bytes": self.predicted_bytes,
            "action": self.action,
            "route": self.route,
            "reason": self.reason,
            "engine": self.engine,
            "degraded": list(self.degraded),
            "trail": list(self.trail),
            "model": self.model,
            "side": self.side,
            "revision": self.revision,
            "attempts": [attempt.as_json() for attempt in self.attempts],
            "status": self.status,
            "error": self.error,
            "priority": self.priority,
            "queued_s": round(self.queued_s, 4),
            "held_s": round(self.patience.held_s, 4),
            "ttft_s": self.ttft_s and round(self.ttft_s, 4),
            "output_tokens": self.output_tokens,
            "coalesced_with": self.coalesced_with,
            "tokens_per_second": speed and round(speed, 2),
            "duration_s": round(self.duration_s, 4),
        }


class Stats:
    """Counts since start and the latest records."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._latest: deque[Record] = deque(maxlen=KEPT_DECISIONS)

    def ended(self, record: Record) -> None:
        """A request got its last word."""
        if record.action:
            self._counts[record.action, record.route, record.reason] += 1
        self._latest.append(record)

    def counts(self) -> list[dict[str, object]]:
        return [
            {"action": action, "route": route, "reason": reason, "count": count}
            for (action, route, reason), count in sorted(self._counts.items())
        ]

    def latest(self) -> list[dict[str, object]]:
        """Newest first."""
        return [record.as_json() for record in reversed(self._latest)]
