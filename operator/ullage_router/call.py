"""The call that passes through the router's stages, and the interfaces of its answer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, cast

import msgspec
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.process.tracing import Span
from ullage_common.wire.continuation import write_cached
from ullage_common.wire.validation import is_growing
from ullage_router.policy.decision import UNDECIDED, Decision
from ullage_router.policy.facts import Side
from ullage_router.prompts.prompts import Prompt
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.session import TenantSession

Event = inference_pb2.GenerateResponse
NOT_RENDERED = cast(Prompt, None)
"""Stands for the prompt of a call until `render` has returned one."""


class PausableDeadline:
    """The deadlines of an answer's first and last token, paused while the request is held.

    Args:
        at: deadline of the last token, on the monotonic clock.
        first_token_at: deadline of the first token, on the same clock.
        token_timeout_s: longest time in seconds to the first token, and between two tokens.

    held_s
        seconds for which the deadline was paused so far
    """

    def __init__(self, at: float, first_token_at: float, token_timeout_s: float) -> None:
        self._at = at
        self._first_token_at = min(at, first_token_at)
        self.token_timeout_s = token_timeout_s
        self.held_s = 0.0
        self._timeouts: list[asyncio.Timeout] = []

    @property
    def at(self) -> float:
        """Return the deadline of the last token, on the monotonic clock."""
        return self._at + self.held_s

    @property
    def first_token_at(self) -> float:
        """Return the deadline of the first token, on the monotonic clock."""
        return self._first_token_at + self.held_s

    @property
    def remaining_s(self) -> float:
        return self.at - time.monotonic()

    @property
    def first_token_remaining_s(self) -> float:
        return self.first_token_at - time.monotonic()

    @contextlib.contextmanager
    def pauses(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Within the block, pause the timeout whenever the deadline is paused."""
        self._timeouts.append(timeout)
        try:
            yield
        finally:
            self._timeouts.remove(timeout)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Postpone the deadline and its timeouts by the duration of the block."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        ends = [timeout.when() for timeout in self._timeouts]
        for timeout in self._timeouts:
            timeout.reschedule(None)

        try:
            yield
        finally:
            passed = loop.time() - began
            self.held_s += passed
            for timeout, end in zip(self._timeouts, ends, strict=True):
                timeout.reschedule(None if end is None else end + passed)


def deadline_of(
    request: inference_pb2.GenerateRequest, record: RequestRecord, timeout_s: float, stall_s: float
) -> PausableDeadline:
    """Return the deadline of a request that has arrived.

    An answer that does not arrive token by token may use the whole time limit for its first token.
    Embeddings may not.

    Args:
        timeout_s: seconds from the arrival to the last token.
        stall_s: longest time in seconds without a token.
    """
    is_bounded = request.embed or is_growing(request)
    token_timeout_s = min(timeout_s, stall_s) if is_bounded else timeout_s
    arrived = record.arrived
    return PausableDeadline(arrived + timeout_s, arrived + token_timeout_s, token_timeout_s)


class DecisionLog:
    """The latest decision about one run of a request, which the record also needs after a failure.

    A `Call` is frozen, so the stages change its decision here. A copy of a call that runs on its
    own gets its own log.

    latest
        the latest decision
    """

    __slots__ = ("latest",)

    def __init__(self, latest: Decision = UNDECIDED) -> None:
        self.latest = latest

    def change(self, **changes: object) -> None:
        """Change fields of the latest decision."""
        self.latest = replace(self.latest, **changes)

    def add_step(self, step: str, reason: str, /, **changes: object) -> None:
        """Add a step to the decision's trail, and change fields."""
        self.latest = replace(self.latest.after(step, reason), **changes)

    def adopt(self, decision: Decision, **changes: object) -> None:
        """Replace the latest decision by another one, with some fields changed."""
        self.latest = replace(decision, **changes) if changes else decision


def _nothing() -> None:
    """Do nothing, for a request whose body takes no room."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """A request with its context, as its protocol made it. Later stages get changed copies."""

    request: inference_pb2.GenerateRequest
    record: RequestRecord
    """The log record. `RequestRecord` names the stages that write it."""
    tenant: TenantSession
    """The tenant's session, which holds the request's part of the quota."""
    deadline: PausableDeadline
    metadata: tuple[tuple[str, str], ...] = ()
    """Metadata for the engine: the trace context."""
    authorization: str | None = None
    """The client's credentials, for routers of other services."""
    is_streamed: bool = True
    """Whether the client reads tokens as they arrive, rather than the whole answer at the end."""
    path: tuple[str, ...] = ()
    """Names of the cascades that forwarded the request to this router."""
    release_body: Callable[[], None] = _nothing
    """Frees the memory of the request's body. It is called once the prompt is rendered."""
    end_turn: Callable[[], None] = _nothing
    """Ends the turn of a long body. It is called before a wait outside of this router."""
    prompt_cache_key: str = ""
    """OpenAI's key of requests with a common prefix. They go to one engine, which holds no
    memory for them. A session takes precedence."""
    replace_key: str = ""
    """The key with which a later call of the tenant replaces this call (empty for none)."""
    idempotency_key: str = ""
    """The key with which a later call of the tenant gets the same answer, or empty for none."""
    decisions: DecisionLog = msgspec.field(default_factory=DecisionLog)
    span: Span | None = None
    """The span of the request, or None where tracing is off."""

    adapter: str = ""
    """The adapter that the request names as its model, or empty for the model itself.

    It is known once the request is opened.
    """
    hands_on: bool = False
    """Whether a refusal leads to the next step of a cascade, rather than to the client."""
    side: Side = Side.STABLE
    """The rollout's side that was drawn for the request."""
    prompt: Prompt = NOT_RENDERED
    """The prompt, which is known once it is rendered for the side's model."""


class EngineStream(Protocol):
    """The part of an answer that one engine generates. Its first token has arrived."""

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """Return the engine's acceptance."""

    @property
    def is_over(self) -> bool:
        """Return whether the last event has been read."""

    @property
    def has_stalled(self) -> bool:
        """Return whether the answer is over because no token came for too long."""

    async def read(self) -> Event:
        """Return the next event. The last event is Finished.

        Raises:
            ServiceError: the engine failed.
        """

    def close(self) -> None:
        """End the engine's work on the answer, unless it has ended."""


class ResponseStream(Protocol):
    """An answer that has begun."""

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """Return the engine's acceptance with the complete decision."""

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens read so far, or the engine's count after the last event."""

    def events(self) -> AsyncIterator[Event]:
        """Yield any number of Delta (and SampleFinished, for several samples), then Finished.

        Raises:
            ServiceError: the engine fails after tokens were sent.
        """

    def close(self) -> None:
        """End the work on the answer, unless it has ended."""


Handler = Callable[[Call], Awaitable[ResponseStream]]
"""Starts an answer and returns it with its first token. Raises ServiceError when the request is
refused, or fails before its first token."""


def asked_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    """Return max_tokens of a request, or None when it is not set."""
    return request.stop.max_tokens if request.stop.HasField("max_tokens") else None


def num_samples(samples: inference_pb2.Samples) -> int:
    """Return the number of answers that the engine generates. It may return fewer of them."""
    return max(1, samples.n, samples.best_of, samples.beam.width)


def timed_out(accepted: inference_pb2.Accepted, output_tokens: int) -> Event:
    """Return the last event of an answer whose time limit passed between two tokens."""
    usage = inference_pb2.Usage(
        prompt_tokens=accepted.prompt_tokens, completion_tokens=output_tokens
    )
    write_cached(usage, accepted)
    reason = inference_pb2.FINISH_REASON_TIMEOUT
    return Event(finished=inference_pb2.Finished(reason=reason, usage=usage))
