"""Defines `Call`, a request with its context, and the interfaces of the streams of its answer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
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
"""Placeholder for a call's prompt until the prompt is rendered."""


class PausableDeadline:
    """Deadlines for an answer's first and last token, which are paused while the request is held.

    Args:
        at: deadline for the last token, on the monotonic clock.
        first_token_at: deadline for the first token, on the same clock.
        token_timeout_s: maximum seconds until the first token, and between two tokens.

    Attributes:
        held_s: total seconds for which the deadlines have been paused so far.
    """

    def __init__(self, at: float, first_token_at: float, token_timeout_s: float) -> None:
        self._at = at
        self._first_token_at = min(at, first_token_at)
        self.token_timeout_s = token_timeout_s
        self.held_s = 0.0
        self._timeouts: list[asyncio.Timeout] = []
        self._followers: set[PausableDeadline] = set()
        """Deadlines of the requests that wait for the same answer, which are paused together."""
        self._paused_at: float | None = None
        """Start of the current pause, on the event loop's clock. None if not paused."""
        self._ends: dict[asyncio.Timeout, float | None] = {}
        """Times at which the paused timeouts would have ended."""

    @property
    def at(self) -> float:
        """Return the deadline for the last token, on the monotonic clock."""
        return self._at + self.held_s

    @property
    def first_token_at(self) -> float:
        """Return the deadline for the first token, on the monotonic clock."""
        return self._first_token_at + self.held_s

    @property
    def remaining_s(self) -> float:
        return self.at - time.monotonic()

    @property
    def first_token_remaining_s(self) -> float:
        return self.first_token_at - time.monotonic()

    def later(self, seconds: float) -> "PausableDeadline":
        """Return a copy whose deadlines are later by some seconds."""
        copy = PausableDeadline(
            self._at + seconds, self._first_token_at + seconds, self.token_timeout_s
        )
        copy.held_s = self.held_s
        return copy

    @contextlib.contextmanager
    def pauses(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Pause this timeout too whenever the deadlines are paused while the `with` block runs."""
        self._timeouts.append(timeout)
        try:
            yield
        finally:
            self._timeouts.remove(timeout)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Postpone the deadlines and their timeouts by the time spent inside the `with` block."""
        self._pause()
        try:
            yield
        finally:
            self._go_on()

    def add_follower(self, follower: "PausableDeadline") -> None:
        """Pause another request's deadlines, too, whenever these are paused."""
        self._followers.add(follower)
        if self._paused_at is not None:
            follower._pause()

    def remove_follower(self, follower: "PausableDeadline") -> None:
        """Let another request's deadlines go on, although these may be paused."""
        self._followers.remove(follower)
        if self._paused_at is not None:
            follower._go_on()

    def _pause(self) -> None:
        self._paused_at = asyncio.get_running_loop().time()
        self._ends = {each: each.when() for each in self._timeouts if not each.expired()}
        for timeout in self._ends:
            timeout.reschedule(None)
        for follower in self._followers:
            follower._pause()

    def _go_on(self) -> None:
        assert self._paused_at is not None, "not paused"
        passed = asyncio.get_running_loop().time() - self._paused_at
        self._paused_at = None
        self.held_s += passed
        for timeout, end in self._ends.items():
            timeout.reschedule(None if end is None else end + passed)
        for follower in self._followers:
            follower._go_on()


def deadline_of(
    request: inference_pb2.GenerateRequest, record: RequestRecord, timeout_s: float, stall_s: float
) -> PausableDeadline:
    """Return a request's deadlines, measured from its arrival.

    The first token normally has to arrive within `stall_s`. If an answer arrives all at once, for
    example with beam search, its first token may instead take as long as the entire answer.
    Embeddings also arrive all at once, but must do so within `stall_s`.

    Args:
        timeout_s: maximum seconds from the arrival to the last token.
        stall_s: maximum seconds without a token.
    """
    is_bounded = request.embed or is_growing(request)
    token_timeout_s = min(timeout_s, stall_s) if is_bounded else timeout_s
    arrived = record.arrived
    return PausableDeadline(arrived + timeout_s, arrived + token_timeout_s, token_timeout_s)


class DecisionLog:
    """Holds the latest decision about a request, so that it can be logged even after a failure.

    A `Call` is immutable, so the pipeline stages update its decision here. A copy of a call that
    runs independently, for example in a cascade, has its own log.

    Attributes:
        latest: the latest decision.
    """

    __slots__ = ("latest",)

    def __init__(self, latest: Decision = UNDECIDED) -> None:
        self.latest = latest

    def change(self, **changes: object) -> None:
        """Update the given fields of the latest decision."""
        self.latest = replace(self.latest, **changes)

    def add_step(self, step: str, reason: str, /, **changes: object) -> None:
        """Append a step to the decision's history (its trail), and update the given fields."""
        self.latest = replace(self.latest.after(step, reason), **changes)

    def adopt(self, decision: Decision, **changes: object) -> None:
        """Replace the latest decision with `decision`, updating the given fields in it."""
        self.latest = replace(decision, **changes) if changes else decision


def _nothing() -> None:
    """Do nothing. This is the default callback of calls that have no request body to release."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """A request and what the pipeline knows about it, whether it came over HTTP or gRPC.

    A call is immutable, so each pipeline stage passes a modified copy on to the next stage.
    """

    request: inference_pb2.GenerateRequest
    record: RequestRecord
    """The request's log record. `RequestRecord` documents which stages write to it."""
    tenant: TenantSession
    """The tenant's session, which tracks how much quota the request uses."""
    deadline: PausableDeadline
    metadata: tuple[tuple[str, str], ...] = ()
    """gRPC metadata to send to the engine, including the trace context."""
    authorization: str | None = None
    """The client's credentials, which are forwarded to the routers of other services."""
    is_streamed: bool = True
    """Whether the client reads tokens as they arrive, rather than waiting for the whole answer."""
    path: tuple[str, ...] = ()
    """Names of the cascades that have forwarded the request so far, to detect loops."""
    release_body: Callable[[], None] = _nothing
    """Callback that frees the memory of the request's body once the prompt is rendered."""
    end_turn: Callable[[], None] = _nothing
    """Callback that lets the next long request body be processed.

    Only a few long bodies are converted to prompts at a time. The callback runs before this request
    waits for anything outside the router, so that it does not hold up the others.
    """
    counts_only: bool = False
    """Whether the answer consists of the number of the prompt's tokens."""
    prompt_cache_key: str = ""
    """OpenAI's `prompt_cache_key`, which clients set on requests that share a prefix.

    Requests with the same key are sent to the same engine if possible. The engine does not reserve
    memory for them. If a session is also given, the key is ignored.
    """
    replace_key: str = ""
    """Key of a replaceable request (empty for none).

    If the same tenant makes a later call with the same key, that call cancels and replaces this
    call.
    """
    idempotency_key: str = ""
    """Key of an idempotent request (empty for none).

    If the same tenant makes a later call with the same key, it gets the same answer.
    """
    decisions: DecisionLog = msgspec.field(default_factory=DecisionLog)
    span: Span | None = None
    """The request's trace span, or None if tracing is off."""

    adapter: str = ""
    """The adapter that the request names as its model (empty for the base model).

    The field is set once the request's permissions and quota have been checked.
    """
    hands_on: bool = False
    """Whether the next cascade step gets the request if this service refuses it."""
    side: Side = Side.STABLE
    """The side of the rollout, stable or canary, that was chosen for the request."""
    prompt: Prompt = NOT_RENDERED
    """The prompt, once it has been rendered for the model of the chosen side."""


class EngineStream(Protocol):
    """The part of an answer that one engine generates, starting from its first token."""

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """Return the message with which the engine accepted the request."""

    @property
    def is_over(self) -> bool:
        """Return whether the stream's last event has been read."""

    @property
    def has_stalled(self) -> bool:
        """Return whether the answer was cut off because no token arrived for too long."""

    async def read(self) -> Event:
        """Return the next event of the answer. The last event is Finished.

        Raises:
            ServiceError: the engine failed.
        """

    def close(self) -> None:
        """Cancel the generation of the answer on the engine if it is still running."""


class ResponseStream(Protocol):
    """The complete answer to a request, as a stream whose first token has already arrived.

    Unlike an `EngineStream`, it is not tied to a single engine.
    """

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """Return the engine's Accepted message, with the router's decision filled in."""

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens read so far, or the engine's final count at the end."""

    def events(self) -> AsyncIterator[Event]:
        """Yield the events of the answer. The last event is Finished.

        The other events are Delta and, for several samples, SampleFinished.

        Raises:
            ServiceError: the engine failed after tokens were sent.
        """

    def close(self) -> None:
        """Stop generating the answer if it is still running."""


class CountedPrompt:
    """The answer to a call that only counts its prompt's tokens: a stream without events.

    Args:
        prompt_tokens: number of tokens in the prompt.
        ignored: parts of the request that have no effect.
    """

    output_tokens = 0

    def __init__(self, prompt_tokens: int, ignored: Sequence[str]) -> None:
        self.accepted = inference_pb2.Accepted(prompt_tokens=prompt_tokens, ignored=ignored)

    async def events(self) -> AsyncIterator[Event]:
        """Yield no events."""
        no_events: tuple[Event, ...] = ()
        for event in no_events:
            yield event

    def close(self) -> None:
        """Do nothing, since nothing is being generated."""


Handler = Callable[[Call], Awaitable[ResponseStream]]
"""A function that starts an answer, and returns its stream once the first token has arrived.

It raises ServiceError if the request is refused or fails before the first token.
"""


def asked_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    """Return the request's max_tokens, or None if the client did not set it."""
    return request.stop.max_tokens if request.stop.HasField("max_tokens") else None


def asked_of_engine(
    request: inference_pb2.GenerateRequest, prompt: Prompt | None
) -> inference_pb2.GenerateRequest:
    """Return the part of the request to an engine that says which answer is wanted.

    The prompt's tokens, the limits and the names of the request are not in it.

    Args:
        request: the client's request.
        prompt: the rendered prompt, or None before it is rendered. Its use of tools and its
            reasoning add options.
    """
    asked = inference_pb2.GenerateRequest(embed=request.embed)
    if asked.embed:
        return asked

    asked.sampling.CopyFrom(request.sampling)
    asked.stop.CopyFrom(request.stop)
    asked.output.CopyFrom(request.output)
    asked.samples.CopyFrom(request.samples)
    if request.HasField("grammar"):
        asked.grammar.CopyFrom(request.grammar)

    asked.output.echo = False  # the router has the prompt's text and echoes it
    asked.output.delta_token_ids = True  # another engine needs the ids to go on
    if prompt is not None:
        prompt.tool_use.ask(asked)
    return asked


def num_samples(samples: inference_pb2.Samples) -> int:
    """Return how many alternative answers the engine generates, even if it returns only some."""
    return max(1, samples.n, samples.best_of, samples.beam.width)


def timed_out(accepted: inference_pb2.Accepted, output_tokens: int) -> Event:
    """Return the final event for an answer that ran out of time between two tokens."""
    usage = inference_pb2.Usage(
        prompt_tokens=accepted.prompt_tokens, completion_tokens=output_tokens
    )
    write_cached(usage, accepted)
    reason = inference_pb2.FINISH_REASON_TIMEOUT
    return Event(finished=inference_pb2.Finished(reason=reason, usage=usage))
