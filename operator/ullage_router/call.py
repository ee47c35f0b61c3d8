"""A request on its way through the router, and its answer, as the stages of the chain see them."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ullage.inference.v1 import inference_pb2
from ullage_common.process.tracing import Span
from ullage_common.wire.continuation import Progress, write_cached
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import is_growing
from ullage_router.policy.decision import UNDECIDED, Decision
from ullage_router.policy.facts import Side
from ullage_router.prompts.prompts import Prompt
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.session import TenantSession, anonymous_session

Event = inference_pb2.GenerateResponse
NO_PROGRESS = Progress(inference_pb2.GenerateRequest())


class PausableDeadline:
    """The times by which an answer must have begun and ended, paused while the request is held.

    Args:
        at: time by which the last token must have come, on the monotonic clock.
        first_token_at: time by which the first token must have come, on the same clock.

    held_s
        seconds for which the deadline was paused so far
    """

    def __init__(self, at: float, first_token_at: float) -> None:
        self._at = at
        self._first_token_at = min(at, first_token_at)
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


def _nothing() -> None:
    """Do nothing: the request has no body that takes room."""


@dataclass(slots=True, eq=False)
class Call:
    """A request with its context, to which the stages of the chain add their results."""

    request: inference_pb2.GenerateRequest
    record: RequestRecord
    """The log record; only the pipeline writes it."""
    timeout_s: float
    """Seconds from arrival to the last token."""
    stall_s: float = math.inf
    """Longest time in seconds without a token, from arrival to the first token or between two.
    Answers that are known only at their end have no such bound, except embeddings."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Metadata that is passed on to the engine: the trace."""
    tenant: TenantSession = field(default_factory=anonymous_session)
    """The tenant's session, which holds the request's part of the quota."""
    authorization: str | None = None
    """The client's credentials, for routers of other services."""
    is_streamed: bool = True
    """Whether the client reads tokens as they come, and not only the whole answer."""
    hands_on: bool = False
    """Whether a refusal goes to the next step of a cascade, and not to the client."""
    path: tuple[str, ...] = ()
    """Names of the cascades that handed the request on to this router."""
    release_body: Callable[[], None] = _nothing
    """Gives back the room for the request's body; called once its prompt is rendered."""
    end_turn: Callable[[], None] = _nothing
    """Lets other long bodies come; called before the request waits outside of this router."""
    prompt_cache_key: str = ""
    """OpenAI's key of requests with a common beginning. They go to one engine, which holds no
    memory for them. A session has precedence."""
    replace_key: str = ""
    """The key with which a later call of the tenant replaces this one; empty for none."""
    idempotency_key: str = ""
    """The key with which a later call of the tenant gets the same answer; empty for none."""
    decision: Decision = UNDECIDED
    """The latest decision about the request."""
    side: Side = Side.STABLE
    """The rollout's side that was drawn for the request."""
    is_trial: bool = False
    """Whether the request runs only on a canary with room for it now. Otherwise stable engines
    serve it."""
    refused_by: dict[str, int] = field(default_factory=dict)
    """Engines that refused or failed the request: their keys, with the number of their reports at
    that time."""
    is_growing: bool = field(init=False)
    """Whether tokens arrive one after another, and not all of them at the end."""
    progress: Progress = NO_PROGRESS
    """The received part of the answer; `EngineStages` sets one for each request."""
    ended_by: ServiceError | None = None
    """Error of another request that caused a cancellation; None where the client left."""
    span: Span | None = None
    """The span of the request; None where tracing is off."""
    deadline: PausableDeadline = field(init=False)
    adapter: str = ""
    """The adapter that the request names as its model; empty: the model without one."""
    prompt: Prompt = field(init=False)
    """The prompt; the stage `render` sets it."""

    def __post_init__(self) -> None:
        self.is_growing = is_growing(self.request)
        if not (self.is_growing or self.request.embed):
            self.stall_s = math.inf
        arrived = self.record.arrived
        self.deadline = PausableDeadline(arrived + self.timeout_s, arrived + self.stall_s)

    @property
    def token_timeout_s(self) -> float:
        """Return the longest time in seconds to the first token, and between two tokens."""
        return min(self.timeout_s, self.stall_s)


class EngineStream(Protocol):
    """The part of an answer that one engine generates; it has its first token."""

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """Return the engine's acceptance."""

    @property
    def is_over(self) -> bool:
        """Return whether the last event was read."""

    @property
    def has_stalled(self) -> bool:
        """Return whether the answer is over because no token came for too long."""

    async def read(self) -> Event:
        """Return the next event; the last is Finished.

        Raises:
            ServiceError: the engine failed.
        """

    def close(self) -> None:
        """End the engine's work on the answer; harmless when it has ended."""


class ResponseStream(Protocol):
    """An answer that has begun."""

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """Return the engine's acceptance with the complete decision."""

    @property
    def output_tokens(self) -> int:
        """Return the tokens that were read so far; after the last event, the engine's own count."""

    def events(self) -> AsyncIterator[Event]:
        """Yield Delta and, of several samples, SampleFinished any number of times, then Finished.

        Raises:
            ServiceError: the engine fails now that tokens were sent.
        """

    def close(self) -> None:
        """End the work on the answer; harmless when it has ended."""


Handler = Callable[[Call], Awaitable[ResponseStream]]
"""Starts an answer and returns it with its first token. Raises ServiceError when the request is
refused, or fails before its first token."""


class Stage(Protocol):
    """One link of the chain, which calls the next handler or answers by itself."""

    def __call__(self, call: Call, proceed: Handler) -> Awaitable[ResponseStream]:
        """Start an answer.

        Args:
            proceed: the rest of the chain.
        """


def asked_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    """Return max_tokens of a request; None when it names none."""
    return request.stop.max_tokens if request.stop.HasField("max_tokens") else None


def num_samples(samples: inference_pb2.Samples) -> int:
    """Return the number of answers that the engine generates; it may return fewer."""
    return max(1, samples.n, samples.best_of, samples.beam.width)


def timed_out(accepted: inference_pb2.Accepted, output_tokens: int) -> Event:
    """Return the last event of an answer whose time limit passed between two tokens."""
    usage = inference_pb2.Usage(
        prompt_tokens=accepted.prompt_tokens, completion_tokens=output_tokens
    )
    write_cached(usage, accepted)
    reason = inference_pb2.FINISH_REASON_TIMEOUT
    return Event(finished=inference_pb2.Finished(reason=reason, usage=usage))
