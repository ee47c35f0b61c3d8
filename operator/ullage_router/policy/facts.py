"""The input of `decide`: one request, the engines and the policy, at one moment.

All of it is plain, frozen data. Admission builds it from live objects for each decision, so
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
"""Minimum health at which engines are compared by their load and no longer by their health."""
STEP_GROWTH = 1.5
"""Assumed slowdown of a step for each doubling of its sequences beyond the measured batches."""


class Side(StrEnum):
    """The side of a rollout: the stable engines or the canary's."""

    STABLE = "stable"
    CANARY = "canary"


class EngineState(Enum):
    """Whether an engine takes new requests."""

    USABLE = "usable"
    RECOVERING = "recovering"
    """Connected, with a worker that is not ready yet, so that waiting is worthwhile."""
    UNUSABLE = "unusable"


class QueueState(Enum):
    """The state of the queue for one request."""

    OPEN = "open"
    FULL = "full"
    SPENT = "spent"
    """The request has waited for the longest allowed time."""
    LATE = "late"
    """The request's answer can no longer end in time."""


class Release(msgspec.Struct, frozen=True):
    """Memory that an engine predicts to be released."""

    after_s: float
    """Seconds from now."""
    size: int
    """Bytes."""


class EngineView(msgspec.Struct, frozen=True):
    """One engine at one moment."""

    id: str
    """The engine's key (`engine_key`)."""
    pool: str
    standing: EngineState
    available: int
    """Reported headroom minus the credit of requests that the report cannot include, bytes."""
    capacity: int
    """Size of the KV pool, bytes."""
    profile: MemoryProfile
    expected_output: int
    """Output tokens that the engine expects of an answer."""
    max_model_len: int
    health: float = 1.0
    """From 0 to 1."""
    load: int = 0
    """Number of requests that run, wait or are in flight."""
    releases: tuple[Release, ...] = ()
    """Predicted releases, the soonest first."""
    backlog_tokens: int = 0
    """Prompt tokens that are computed before those of a new request."""
    prefill_pairs: int = 0
    """Pairs of queries and keys in the backlog that this router sent."""
    prefill_speed: float = 0.0
    """Prompt tokens a second (0 when unknown)."""
    decode_speed: float = 0.0
    """Tokens a second of one sequence at present (0 when unknown)."""
    step_seconds: tuple[float, ...] = ()
    """Measured seconds of a step with 1 sequence, 2 to 3, 4 to 7 and so on (empty when unknown)."""
    step_limit_s: float = math.inf
    """Longest step, in seconds, with which the running requests would still end in time."""
    max_sequences: int = 0
    """Most sequences in a step (0 when unknown)."""
    kind: tuple[int, ...] = ()
    """Key of the engine's kind, set on creation.

    Engines of one kind have the same room for a request, and price it alike.
    """

    def __post_init__(self) -> None:
        kind = (id(self.profile), self.capacity, self.max_model_len, self.expected_output)
        msgspec.structs.force_setattr(self, "kind", kind)

    def longest(self, prompt_tokens: int, samples: int, *, has_session: bool = False) -> int:
        """Return the length of the longest sequence that the engine can ever hold, in tokens.

        Args:
            prompt_tokens: tokens of the prompt that all samples share.
            samples: number of sequences, all of that length.
        """
        capacity = self.most_bytes(has_session=has_session)
        held = most_tokens(self.profile, capacity, prompt_tokens, samples)
        return min(self.max_model_len, held)

    def most_bytes(self, *, has_session: bool) -> int:
        """Return the maximum KV bytes that one request may take, in a session or without one."""
        limit = self.profile.session_kv_bytes if has_session else 0
        return min(self.capacity, limit) if limit else self.capacity

    def prefill_work(self, mlp_products: int) -> int:
        """Return the work that is computed before a new request's prompt (`balance.work`)."""
        return self.prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds until a new request's prompt is begun (0 when the speed is unknown)."""
        return self.backlog_tokens / self.prefill_speed if self.prefill_speed else 0.0

    def step_s(self, load: int) -> float:
        """Return the predicted seconds of a step, or 0 if unknown.

        The cost of one more sequence depends on the device, so measured times are used for batches
        of measured size. Beyond them every doubling is assumed to cost STEP_GROWTH times as much.

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
    """The time limits of a request, in seconds (infinite without a limit)."""

    ttft_s: float = math.inf
    """Objective of the first token, from the request's arrival."""
    e2e_s: float = math.inf
    """Objective of the last token, from the request's arrival."""
    waited_s: float = 0.0
    """Seconds since the arrival."""
    first_token_s: float = math.inf
    """Seconds from now until the first token must have arrived."""
    end_s: float = math.inf
    """Seconds from now until the last token must have arrived."""


class RequestFacts(msgspec.Struct, frozen=True):
    """One request, and the queue before it.

    The queue appears twice. `ahead`, `passable` and `waiting` are its requests by pool. `claimed`
    are its requests by engine: those that can use few engines, as with a rare adapter.
    """

    # The request
    prompt_tokens: int
    max_tokens: int
    """Maximum number of output tokens of each sample."""
    min_tokens: int
    """Minimum output tokens of an acceptable answer, at which shrinking stops."""
    samples: int = 1
    """Number of answers to generate, each of up to `max_tokens`."""
    has_session: bool = False
    """Whether the limit of KV bytes of one session applies."""
    droppable: bool = False
    """Whether the conversation has turns that may be dropped."""

    # The queue
    queue: QueueState = QueueState.OPEN
    ahead: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that requests before this one wait for, by pool. Pools without waiters are absent."""
    passable: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the head of the queue waits for, by pool.

    Pools in which the head may not be passed are absent.
    """
    refused_by: frozenset[str] = frozenset()
    """Keys of engines that refused the request and have sent no report since."""
    claimed: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the first waiter for an engine needs, by the engine's key.

    The value is 0 if that waiter may not be passed. Only engines are present whose waiters can use
    few other engines.
    """
    waiting: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of requests that wait before this one, by pool."""
    deferrals: Deferrals = NOBODY
    """Requests that were refused before this one and will come back."""

    # Preferences
    limits: TimeLimits = TimeLimits()
    preferred: str = ""
    """Key of the engine whose caches hold most of the prompt's beginning (empty when unknown)."""
    draw: int = 0
    """A random number, drawn by the caller, so that the same input gives the same decision."""

    # Memoised by `placement.py`, by kind of engine
    rooms: dict[tuple[int, ...], int] = msgspec.field(default_factory=dict)
    """Output tokens for which an empty engine has room."""
    prices: dict[tuple[int, ...], Demand] = msgspec.field(default_factory=dict)
    """Predicted bytes of the request."""

    def __post_init__(self) -> None:
        # `replace` would share these with a request of another size.
        msgspec.structs.force_setattr(self, "rooms", {})
        msgspec.structs.force_setattr(self, "prices", {})


class RoutingPolicy(msgspec.Struct, frozen=True):
    """The rules of the service's configuration that decisions follow."""

    pools: tuple[str, ...]
    """Pools in order of preference."""
    large_request_tokens: int
    """Prompt tokens above which a request is large."""
    large_request_kv: int
    """KV bytes above which a request is large."""
    ladder: tuple[Rung, ...]
    """Rungs to try, in this order, when a request does not fit at home."""
    rungs: RungsSection = msgspec.field(default_factory=RungsSection)
    max_extra_load: int = 8
    """Number of requests by which a preferred engine's load may exceed the alternative's."""
    prefill: PrefillSection = msgspec.field(default_factory=PrefillSection)
    large_pool: str = ""
    """Pool that takes large requests (empty when there is none)."""


def engine_key(side: Side, pool: str, address: str) -> str:
    """Return the key of an engine in decisions.

    An address alone is ambiguous: it may be in several pools, and a canary's address may become a
    stable engine's.
    """
    return f"{side}/{pool}/{address}"
