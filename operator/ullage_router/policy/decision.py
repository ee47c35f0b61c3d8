"""The values that decisions are made from and that they become.

`RequestFacts`, `EngineView` and `RoutingPolicy` are one request, the engines and the rules at one
moment. `Decision` is the outcome: admission writes it, and records, headers, logs and gRPC's
trailing metadata read it. It never changes: each rung of the ladder makes a new one.
"""

import math
from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from typing import Literal

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import PrefillSection, Rung, RungsSection
from ullage_common.request_cost import Demand, MemoryProfile, most_tokens
from ullage_router.policy.deferral import NOBODY, Deferrals

KEPT_STEPS = 12
MIB = 1 << 20

Outcome = Literal["served", "fallback", "escalated", "refused", "failed", "slow", "lost"]
"""served     its answer is the answer
fallback   its answer is the answer because the larger model's engines are busy
escalated  its first tokens were too unsure
refused    it took no such request, or none now
failed     it broke off before its answer was released
slow       it had not enough tokens in its share of the time
lost       begun in parallel and not needed"""

ANSWERED = frozenset({"served", "fallback"})


class Attempt(msgspec.Struct, frozen=True):
    """One step of a cascade that was tried."""

    step: str
    outcome: Outcome
    model: str = ""
    """The model's name in that step; empty when it is not known."""
    confidence: float | None = None
    """Geometric mean probability of the tokens that were judged."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens of an attempt that was thrown away, as far as they had arrived."""
    reason: str = ""
    """Reason of the error that ended the attempt; empty when none did."""

    @property
    def discarded_tokens(self) -> int:
        """Completion tokens that are discarded with the attempt."""
        return 0 if self.outcome in ANSWERED else self.completion_tokens

    def to_wire(self) -> inference_pb2.CascadeAttempt:
        return inference_pb2.CascadeAttempt(
            step=self.step,
            model=self.model,
            outcome=self.outcome,
            confidence=self.confidence,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            reason=self.reason,
        )

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.step,
            "model": self.model,
            "outcome": self.outcome,
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "completion_tokens": self.completion_tokens,
            "reason": self.reason,
        }


class Decision(msgspec.Struct, frozen=True):
    """What was decided about a request up to one moment."""

    action: str = ""
    """accept, shrink, queue, route4 or reject; empty until something is decided."""
    pool: str = ""
    """The pool that the decision is about; empty where another router decided."""
    route: str = ""
    """The pool's label in headers, logs and metrics (`route_of`)."""
    reason: str = ""
    engine: str = ""
    side: str = ""
    """stable or canary; empty until an engine is chosen."""
    revision: str = ""
    """Revision of the engine; empty when it is not known."""
    model: str = ""
    """Name of the model that serves the request."""
    prompt_tokens: int = 0
    predicted_bytes: int | None = None
    """KV bytes that the request is predicted to take; None until they are predicted."""
    available_bytes: int | None = None
    """KV bytes that the engine had, or the best one of the pool; None where nobody asked."""
    degraded: tuple[str, ...] = ()
    """What was taken from the request, such as `max_tokens=64`."""
    trail: tuple[str, ...] = ()
    """Steps taken with their reasons, such as `queue=KV_HEADROOM`, oldest first."""
    queued_s: float = 0.0
    """Seconds that the request waited for memory."""
    attempts: tuple[Attempt, ...] = ()
    """Steps of the cascade that were tried."""
    coalesced_with: str = ""
    """Id of the request whose generation is shared; empty when the request has its own."""

    @property
    def lowered_limit(self) -> str:
        """The output limit that was lowered, such as `max_tokens=64`; empty when it was not."""
        return next((word for word in self.degraded if word.startswith("max_tokens=")), "")

    @property
    def predicted_mib(self) -> float:
        return round((self.predicted_bytes or 0) / MIB, 3)

    @property
    def explanation(self) -> dict[str, str]:
        """The decision in the details of an error; empty when there is none."""
        if not self.action:
            return {}
        return {"action": self.action, "route": self.route, "trail": ", ".join(self.trail)}

    def next_trail(self, step: str, reason: str) -> tuple[str, ...]:
        """Return the trail with one more step; of very many the first and the last are kept."""
        trail = (*self.trail, f"{step}={reason}")
        return trail if len(trail) <= KEPT_STEPS else (*trail[: KEPT_STEPS - 2], "...", trail[-1])

    def after(self, step: str, reason: str) -> "Decision":
        """Return the decision with one more step taken."""
        return msgspec.structs.replace(self, trail=self.next_trail(step, reason))

    def lowered(self, changes: Iterable[str]) -> "Decision":
        """Return the decision with limits that an engine lowered further, such as `max_tokens=64`:
        the engine's value is the last in the list."""
        degraded = self.degraded
        for change in changes:
            name = change.partition("=")[0]
            degraded = (*(old for old in degraded if old.partition("=")[0] != name), change)
        if not degraded or self.action != "accept":
            return msgspec.structs.replace(self, degraded=degraded)
        return msgspec.structs.replace(
            self,
            degraded=degraded,
            action="shrink",
            reason="PRESSURE",
            trail=self.next_trail("engine", "PRESSURE"),
        )


UNDECIDED = Decision()


def route_of(pool: str, tensor: int, pipeline: int) -> str:
    """Return the label of a pool in headers, logs and metrics.

    It is the arrangement of ranks, such as tp2pp2, where tensor ranks and pipeline stages share a
    model, else the pool's name.
    """
    return f"tp{tensor}pp{pipeline}" if tensor > 1 and pipeline > 1 else pool


def attempts_header(attempts: Iterable[Attempt]) -> str:
    """Render attempts as `small=escalated;confidence=0.412, big=served`, a structured field's
    dictionary."""
    return ", ".join(map(_header_entry, attempts))


def _header_entry(attempt: Attempt) -> str:
    confidence = "" if attempt.confidence is None else f";confidence={attempt.confidence:.3f}"
    return f"{attempt.step}={attempt.outcome}{confidence}"


class Side(StrEnum):
    """The engines of a rollout that a request is meant for."""

    STABLE = "stable"
    CANARY = "canary"


WELL = 0.5
"""Health from which on engines are compared by their load and no longer by their health."""
STEP_GROWTH = 1.5
"""Times as long as a step is taken to be when twice as many sequences are in it as were measured.
"""


class EngineState(Enum):
    """Whether an engine takes new requests."""

    USABLE = "usable"
    RECOVERING = "recovering"
    """Connected, with a worker that is not ready yet: worth waiting for."""
    UNUSABLE = "unusable"


class QueueState(Enum):
    """The state of the queue for one request."""

    OPEN = "open"
    FULL = "full"
    SPENT = "spent"
    """The request has waited as long as it may."""
    LATE = "late"
    """The request's answer can no longer end in time."""


class Release(msgspec.Struct, frozen=True):
    """Memory that an engine predicts to get back."""

    after_s: float
    size: int


class EngineView(msgspec.Struct, frozen=True):
    """One engine at one moment, as decisions see it."""

    id: str
    """The engine's key (`Engine.key`)."""
    pool: str
    standing: EngineState
    available: int
    """Reported headroom minus the credit of requests that the report cannot include, bytes."""
    capacity: int
    """Size of the KV pool, bytes."""
    profile: MemoryProfile
    expected_output: int
    max_model_len: int
    health: float = 1.0
    load: int = 0
    """Number of requests that run, wait or are on their way."""
    releases: tuple[Release, ...] = ()
    backlog_tokens: int = 0
    """Prompt tokens that are computed before those of a new request."""
    prefill_pairs: int = 0
    """Products of queries and keys in the backlog, as far as this router sent it."""
    prefill_speed: float = 0.0
    """Prompt tokens a second; 0 when unknown."""
    decode_speed: float = 0.0
    """Tokens a second of one sequence at present; 0 when unknown."""
    step_seconds: tuple[float, ...] = ()
    """Measured seconds of a step with 1 sequence, 2 to 3, 4 to 7 and so on; empty when unknown."""
    step_limit_s: float = math.inf
    """Longest seconds of a step with which what runs there would still end in time."""
    max_sequences: int = 0
    """Most sequences in a step; 0 when unknown."""
    kind: tuple[int, ...] = ()
    """Engines of one kind have the same room for a request and price it alike; set here."""

    def __post_init__(self) -> None:
        kind = (id(self.profile), self.capacity, self.max_model_len, self.expected_output)
        msgspec.structs.force_setattr(self, "kind", kind)

    def longest(self, prompt_tokens: int, samples: int, *, has_session: bool = False) -> int:
        """Return the longest sequence that the engine can ever hold, in tokens of each sample of
        such a prompt."""
        capacity = self.most_bytes(has_session=has_session)
        held = most_tokens(self.profile, capacity, prompt_tokens, samples)
        return min(self.max_model_len, held)

    def most_bytes(self, *, has_session: bool) -> int:
        """Return the KV bytes that one request may ever take, of a session or without one."""
        limit = self.profile.session_kv_bytes if has_session else 0
        return min(self.capacity, limit) if limit else self.capacity

    def prefill_work(self, mlp_products: int) -> int:
        """Return the work that is computed before a new request's prompt (`credit.work`)."""
        return self.prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds until a new request's prompt is begun; 0 when the speed is unknown."""
        return self.backlog_tokens / self.prefill_speed if self.prefill_speed else 0.0

    def step_s(self, load: int) -> float:
        """Return the seconds of a step while so many requests are on the engine; 0 when unknown.

        One more sequence in a step costs little or much, as the device has it: what was measured
        counts, and beyond it each doubling is taken to cost half more.
        """
        measured = self.step_seconds
        if not measured:
            return 1.0 / self.decode_speed if self.decode_speed else 0.0
        if self.max_sequences:
            load = min(load, self.max_sequences)
        bucket = load.bit_length() - 1
        last = len(measured) - 1
        return (
            measured[bucket] if bucket <= last else measured[last] * STEP_GROWTH ** (bucket - last)
        )


class TimeLimits(msgspec.Struct, frozen=True):
    """The times that a request must keep, in seconds; what is infinite is not limited."""

    ttft_s: float = math.inf
    """Objective of the first token, from the request's arrival."""
    e2e_s: float = math.inf
    """Objective of the last token, from the request's arrival."""
    waited_s: float = 0.0
    """Seconds since the arrival."""
    first_token_s: float = math.inf
    """Seconds from now until the first token must have come."""
    end_s: float = math.inf
    """Seconds from now until the last token must have come."""


class RequestFacts(msgspec.Struct, frozen=True):
    """One request, and the requests that wait before it."""

    prompt_tokens: int
    max_tokens: int
    """Largest number of output tokens that the request asks for."""
    min_tokens: int
    """Fewest output tokens that still make an answer: shrinking stops here."""
    samples: int = 1
    """Number of answers to generate, each of as many output tokens."""
    has_session: bool = False
    """Whether the request is bounded by what one session may hold."""
    droppable: bool = False
    """Whether the conversation has turns that may be dropped."""
    queue: QueueState = QueueState.OPEN
    ahead: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that requests before this one wait for, by pool; a pool without waiters is absent."""
    passable: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the first of those waits for, by pool; a pool where it may not be passed is
    absent."""
    refused_by: frozenset[str] = frozenset()
    """Keys of engines that may not have it now: they have reported nothing since they refused it.
    """
    claimed: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Engines that somebody waits for before it who can use few others, by key: bytes that the
    first of those waits for; 0 where it may not be passed."""
    waiting: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of requests that wait before this one, by pool."""
    deferrals: Deferrals = NOBODY
    """Requests that were refused before this one and will come back."""
    limits: TimeLimits = TimeLimits()
    preferred: str = ""
    """Key of the engine whose caches have most of the prompt's beginning; empty when none is known.
    """
    draw: int = 0
    """A random number from outside, so that the same input gives the same decision."""
    rooms: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    """Output tokens that an empty engine has room for, by kind of engine, as far as asked for."""
    prices: dict[tuple[int, ...], Demand] = msgspec.field(default_factory=dict)
    """Predicted bytes by kind of engine, as far as asked for."""

    def __post_init__(self) -> None:  # a changed copy has its own
        msgspec.structs.force_setattr(self, "rooms", {})
        msgspec.structs.force_setattr(self, "prices", {})


class RoutingPolicy(msgspec.Struct, frozen=True):
    pools: tuple[str, ...]
    """Pools in order of preference."""
    large_request_tokens: int
    large_request_kv: int
    ladder: tuple[Rung, ...]
    rungs: RungsSection = msgspec.field(default_factory=RungsSection)
    max_extra_load: int = 8
    """Number of requests that a preferred engine may have more than the alternative."""
    prefill: PrefillSection = msgspec.field(default_factory=PrefillSection)
    large_pool: str = ""
    """Pool that takes large requests; empty: there is none."""
