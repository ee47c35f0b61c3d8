"""The input of `decide`: one request, the engines and the policy, at one moment.

The input is plain, immutable data. Admission builds it from live objects for each decision, so
decisions can be tested without an engine, an event loop or a clock.
"""

import math
from collections.abc import Mapping
from enum import Enum, StrEnum

import msgspec

from ullage_common.config.router import PrefillSection, Rung, RungsSection
from ullage_common.request_cost import Demand, MemoryProfile, most_tokens
from ullage_router.policy.deferral import NOBODY, Deferrals

WELL = 0.5
"""Minimum health of a healthy engine. Healthy engines are ranked by load, memory and health."""
STEP_GROWTH = 1.5
"""Assumed slowdown of a step for each doubling of the batch beyond the measured batch sizes."""


class Side(StrEnum):
    """An engine's role in a rollout: stable or canary."""

    STABLE = "stable"
    CANARY = "canary"


class EngineState(Enum):
    """Whether an engine takes new requests."""

    USABLE = "usable"
    RECOVERING = "recovering"
    """Connected, but the worker is not ready yet. Requests may wait for the engine."""
    UNUSABLE = "unusable"


class QueueState(Enum):
    """Whether a request may wait in the queue, and if not, why."""

    OPEN = "open"
    FULL = "full"
    SPENT = "spent"
    """The request has waited for the maximum allowed time."""
    LATE = "late"
    """The answer could no longer finish in time."""


class Release(msgspec.Struct, frozen=True):
    """A release of KV memory that an engine predicts."""

    after_s: float
    """Seconds from now until the release."""
    size: int
    """Number of bytes released."""


class BreakerLimit(msgspec.Struct, frozen=True):
    """The state of an engine that has as many requests as its circuit breaker allows.

    Only requests that were sent after the breaker opened count.
    """

    limit: int
    """Maximum number of concurrent requests. Each first token doubles the limit."""
    running: int
    """Number of running requests, at least `limit`."""
    not_begun: int
    """Number of running requests that have no first token yet."""
    due_s: float
    """Seconds until one of these first tokens is late (negative if one is)."""
    pause_s: float = 0.0
    """Seconds until the breaker's pause ends (0 if the breaker is not open)."""


class EngineView(msgspec.Struct, frozen=True):
    """The state of one engine at one moment."""

    id: str
    """The engine's key, as returned by `engine_key`."""
    pool: str
    standing: EngineState
    available: int
    """Reported headroom in bytes, minus reservations that the report may not include yet."""
    capacity: int
    """Size of the KV pool in bytes."""
    profile: MemoryProfile
    expected_output: int
    """Number of output tokens that the engine expects in an answer."""
    max_model_len: int
    health: float = 1.0
    """Health of the engine, from 0 to 1."""
    load: int = 0
    """Number of requests that are running, waiting or in flight."""
    releases: tuple[Release, ...] = ()
    """Predicted releases of memory, soonest first."""
    unreported: int = 0
    """Bytes of requests that were sent after the engine predicted its releases."""
    backlog_tokens: int = 0
    """Number of prompt tokens queued for prefill ahead of a new request's prompt."""
    prefill_pairs: int = 0
    """Number of query-key pairs in the backlog, counting only prompts that this router sent."""
    prefill_speed: float = 0.0
    """Prefill speed in prompt tokens per second (0 if unknown)."""
    decode_speed: float = 0.0
    """Current decode speed of one sequence in tokens per second (0 if unknown)."""
    step_seconds: tuple[float, ...] = ()
    """Measured step times, in seconds, for 1, 2-3, 4-7, ... sequences (empty if unknown)."""
    step_limit_s: float = math.inf
    """Longest step, in seconds, with which all running requests would meet their deadlines."""
    max_sequences: int = 0
    """Maximum number of sequences in a step (0 if unknown)."""
    breaker: BreakerLimit | None = None
    """The circuit breaker's limit on requests, or None if the limit is not reached.

    An engine that has reached its limit is `RECOVERING`.
    """
    kind: tuple[int, ...] = ()
    """Key shared by all engines with identical memory properties, set on creation.

    Engines of the same kind have the same capacity and predict the same bytes for a request.
    """

    def __post_init__(self) -> None:
        kind = (id(self.profile), self.capacity, self.max_model_len, self.expected_output)
        msgspec.structs.force_setattr(self, "kind", kind)

    def longest(self, prompt_tokens: int, samples: int, *, has_session: bool = False) -> int:
        """Return the longest sequence, in tokens, that the engine can hold when it is empty.

        Args:
            prompt_tokens: number of tokens in the prompt, which all samples share.
            samples: number of sequences of this length that must fit together.
        """
        capacity = self.most_bytes(has_session=has_session)
        held = most_tokens(self.profile, capacity, prompt_tokens, samples)
        return min(self.max_model_len, held)

    def most_bytes(self, *, has_session: bool) -> int:
        """Return the maximum number of KV bytes that one request may use.

        If the request belongs to a session, the per-session limit (if any) also applies.
        """
        limit = self.profile.session_kv_bytes if has_session else 0
        return min(self.capacity, limit) if limit else self.capacity

    def prefill_work(self, mlp_products: int) -> int:
        """Return the prefill work queued ahead of a new prompt, measured in query-key pairs."""
        return self.prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds until the prefill of a new request's prompt starts (0 if unknown)."""
        return self.backlog_tokens / self.prefill_speed if self.prefill_speed else 0.0

    def step_s(self, load: int) -> float:
        """Return the predicted duration of a step in seconds (0 if unknown).

        How much one more sequence slows a step depends on the device, so measured times are used
        for the batch sizes that have been measured. For larger batches, each doubling is assumed to
        multiply the time by STEP_GROWTH.

        Args:
            load: number of requests on the engine.
        """
        measured = self.step_seconds
        if not measured:
            return 1.0 / self.decode_speed if self.decode_speed else 0.0
        if self.max_sequences:
            load = min(load, self.max_sequences)

        bucket = load.bit_length() - 1
        last = len(measured) - 1
        if bucket <= last:
            return measured[bucket]
        return measured[last] * STEP_GROWTH ** (bucket - last)


class TimeLimits(msgspec.Struct, frozen=True):
    """A request's time limits, in seconds (infinite if there is no limit)."""

    ttft_s: float = math.inf
    """Objective for the time from the request's arrival to the first token."""
    e2e_s: float = math.inf
    """Objective for the time from the request's arrival to the last token."""
    waited_s: float = 0.0
    """Seconds since the request's arrival."""
    first_token_s: float = math.inf
    """Seconds from now until the first token must have arrived."""
    end_s: float = math.inf
    """Seconds from now until the last token must have arrived."""
    may_delay_others: bool = False
    """Whether the request may make running requests late, as an answer that lost its engine may."""


class RequestFacts(msgspec.Struct, frozen=True):
    """What `decide` knows about a request, and about the requests that are queued ahead of it.

    The queue is described in two ways. `ahead`, `passable` and `waiting` summarise all queued
    requests, by pool. `claimed` summarises, by engine, only the requests that few engines can run,
    such as requests for a rare adapter.
    """

    # The request
    prompt_tokens: int
    max_tokens: int
    """Maximum number of output tokens per sample."""
    min_tokens: int
    """Minimum number of output tokens in an acceptable answer.

    The output is never shrunk below this number.
    """
    samples: int = 1
    """Number of answers to generate, each of up to `max_tokens`."""
    has_session: bool = False
    """Whether the limit on KV bytes per session applies to the request."""
    droppable: bool = False
    """Whether the conversation has turns that may be dropped."""

    # The queue
    queue: QueueState = QueueState.OPEN
    ahead: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the requests ahead of this one are waiting for, by pool.

    Pools without waiting requests are absent.
    """
    passable: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the first request in the queue is waiting for, by pool.

    Pools in which no request may overtake the first one are absent.
    """
    refused_by: frozenset[str] = frozenset()
    """Keys of engines that refused the request and have not sent a report since."""
    claimed: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the first request waiting for an engine needs, by the engine's key.

    The value is 0 if no request may overtake that request. An engine is listed only if its waiting
    requests can run on few other engines.
    """
    waiting: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of requests queued ahead of this one, by pool."""
    patience_s: float = math.inf
    """Seconds that the request may still wait in the queue.

    Infinity if no client would retry the request, as for an answer that lost its engine.
    """
    deferrals: Deferrals = NOBODY
    """Requests that were refused before this one and will be retried."""

    # Preferences
    limits: TimeLimits = TimeLimits()
    preferred: str = ""
    """Key of the engine with the longest cached prefix of the prompt (empty if unknown)."""
    draw: int = 0
    """A random number, drawn by the caller so that `decide` itself is deterministic."""

    # Memoised by `placement.py`, by kind of engine
    rooms: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    """Number of output tokens that fit on an empty engine, by `EngineView.kind`."""
    prices: dict[tuple[int, ...], Demand] = msgspec.field(default_factory=dict)
    """Predicted KV bytes of the request, by `EngineView.kind`."""

    def __post_init__(self) -> None:
        # `replace` would share these with a request of another size.
        msgspec.structs.force_setattr(self, "rooms", {})
        msgspec.structs.force_setattr(self, "prices", {})


class RoutingPolicy(msgspec.Struct, frozen=True):
    """The configured rules for choosing a request's pool, engine and fallbacks."""

    pools: tuple[str, ...]
    """The pools of the service, in order of preference."""
    large_request_tokens: int
    """Prompt tokens above which a request is large."""
    large_request_kv: int
    """KV bytes above which a request is large."""
    ladder: tuple[Rung, ...]
    """Fallbacks to try, in this order, if a request does not fit in its home pool."""
    rungs: RungsSection = msgspec.field(default_factory=RungsSection)
    max_extra_load: int = 8
    """Maximum number of extra requests on an engine that is chosen for its cached prefix.

    The number is relative to the load of the engine that would be chosen otherwise.
    """
    prefill: PrefillSection = msgspec.field(default_factory=PrefillSection)
    large_pool: str = ""
    """Pool that takes large requests (empty if there is none)."""


def engine_key(side: Side, pool: str, address: str) -> str:
    """Return the key that identifies an engine in decisions.

    An address alone is ambiguous: several pools may contain the same address, and a canary engine's
    address may later be reused by a stable engine.
    """
    return f"{side}/{pool}/{address}"
