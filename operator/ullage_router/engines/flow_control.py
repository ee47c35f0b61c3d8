"""Flow control between an engine that sends tokens and a client that reads them.

An engine may be at most `window` tokens ahead of the reader. Tokens in quick succession are
coalesced: the engine waits briefly for more tokens before it sends them
(`ullage_common.wire.flow_control`), and the reader gets all buffered tokens at once, up to
`coalesce_tokens`. If an answer is paced, its tokens reach the reader no faster than a given rate.

A watchdog ends all streams of an engine that falls silent or is without a worker for too long.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import StreamingSection
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.flow_control import merge_deltas
from ullage_router.background import failures_logged

WHOLE_WINDOW_S = 0.1
"""Maximum seconds that tokens of a non-streamed answer are held back to coalesce them."""
SHORT_ANSWER = 4
"""Number of responses in a short answer: acceptance, first token, remaining tokens and end."""
CHECK_INTERVAL_S = 1.0
"""Seconds between a watchdog's checks."""

Event = inference_pb2.GenerateResponse


@dataclass(frozen=True, slots=True)
class FlowControl:
    """The flow control settings for one answer's tokens."""

    window: int = 64
    """Maximum number of tokens by which the engine may be ahead of the reader."""
    coalesce_tokens: int = 4
    """Maximum number of tokens delivered at once, unless a single response already has more."""
    coalesce_s: float = 0.02
    """Maximum seconds that the engine holds back tokens to coalesce them, or 0 for no delay."""
    pace: float = 0.0
    """Maximum rate at which the reader gets tokens, in tokens per second, or 0 for no limit."""
    stall_s: float = math.inf
    """Maximum seconds that a reader waits for the next response."""

    @property
    def together(self) -> int:
        """Maximum number of tokens to combine into one response.

        It is lowered if the window is small, so that all responses of a short answer fit in the
        window.
        """
        return min(self.coalesce_tokens, max(1, self.window // SHORT_ANSWER))

    @property
    def responses(self) -> int:
        """Maximum number of responses by which the engine may be ahead of the reader.

        This is the window converted from tokens to responses, which may carry several tokens each.
        """
        return max(1, self.window // self.together)


def flow_of(streaming: StreamingSection, stall_s: float = math.inf) -> FlowControl:
    """Return the flow control settings from the configuration.

    Args:
        stall_s: maximum seconds that an engine may stay silent.
    """
    return FlowControl(
        window=streaming.buffer_tokens,
        coalesce_tokens=streaming.coalesce_tokens,
        coalesce_s=streaming.coalesce_window,
        pace=streaming.tokens_per_second,
        stall_s=stall_s,
    )


def for_unary(flow: FlowControl) -> FlowControl:
    """Return settings for a non-streamed answer: few, large responses and no pacing."""
    if flow.coalesce_tokens == 1:
        return replace(flow, pace=0.0)
    most = max(flow.coalesce_tokens, flow.window // 2)
    return replace(flow, coalesce_tokens=most, coalesce_s=WHOLE_WINDOW_S, pace=0.0)


def rate_limited(flow: FlowControl, most: float | None) -> FlowControl:
    """Return the settings with the pace capped at `most` tokens per second (None for no cap)."""
    return flow if most is None else replace(flow, pace=min(most, flow.pace or most))


def without_stalls(flow: FlowControl) -> FlowControl:
    """Return the settings without a stall limit, for an answer that has only one response."""
    return replace(flow, stall_s=math.inf)


class Source(Protocol):
    """The stream of responses that an engine sends for one answer."""

    async def read(self) -> Event | None:
        """Return the next response, or None after the last response.

        Raises:
            ServiceError: the request failed.
        """

    def end(self, error: ServiceError) -> None:
        """End the stream. Reads return the responses received so far, then raise the error."""

    def cancel(self) -> None:
        """Cancel the generation of the answer on the engine if it is still running."""


class ReceiveBuffer:
    """Buffers one request's responses until the reader takes them.

    Args:
        flow: the flow control of the answer.
        window: maximum number of buffered responses.
        grant: called with the number of additional responses that the engine may send.
    """

    def __init__(self, flow: FlowControl, window: int, grant: Callable[[int], None]) -> None:
        self._flow = flow
        self._window = window
        self._grant = grant
        self._loop = asyncio.get_running_loop()
        self._events: list[tuple[Event, inference_pb2.Delta | None]] = []
        """Buffered events, each paired with its token delta, or with None for other event types."""
        self._taken = 0
        """Number of responses read since the engine was last allowed to send more."""
        self._error: ServiceError | None = None
        self._has_ended = False
        self._due = 0.0
        """Earliest time at which a paced answer may deliver tokens, on the event loop's clock."""

        self._reader: asyncio.Future[None] | None = None
        """The future on which a reader waits for a response, or None if no reader is waiting."""
        self._waiting_since = math.inf
        """Time at which the reader found the buffer empty, on the event loop's clock.

        Infinite while a response is buffered or no reader is waiting.
        """
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_events(self) -> int:
        """Number of responses in the buffer."""
        return len(self._events)

    def put(self, event: Event, kind: str | None) -> None:
        """Add a response. `kind` names the field that is set in the response's `event` oneof."""
        self._waiting_since = math.inf
        if kind == "delta":
            self._events.append((event, event.delta))
        else:
            self._events.append((event, None))
            self._has_ended = self._has_ended or kind == "finished"
        if self._reader is not None:
            self._wake()

    def end(self, error: ServiceError | None = None) -> None:
        """Mark the end of the responses. Buffered responses can still be read."""
        self._has_ended = True
        self._error = self._error or error
        self._wake()

    async def read(self) -> Event | None:
        """Return the next response with adjacent tokens merged, or None after the last response.

        Raises:
            ServiceError: the request failed. It is raised after all earlier responses have been
                read.
        """
        if (wait_s := self._wait_s()) != 0:
            if wait_s is None:
                self._waiting_since = self._loop.time()
            await self._news()
        if self._events:
            return self._take()
        if self._error:
            raise self._error
        return None

    async def _news(self) -> None:
        reader = self._reader = self._loop.create_future()
        self._wake()
        try:
            await reader
        finally:
            self._reader = None
            if self._timer:
                self._timer.cancel()
                self._timer = None

    def _wake(self) -> None:
        """Wake the reader now, or later if pacing delays the next response."""
        if self._reader is None:
            return
        wait_s = self._wait_s()
        if wait_s == 0:
            self._wake_reader()
        elif wait_s is not None and self._timer is None:
            self._timer = self._loop.call_later(wait_s, self._is_due)

    def _is_due(self) -> None:
        self._timer = None
        self._wake_reader()

    def _wake_reader(self) -> None:
        reader = self._reader
        self._reader = None
        if reader and not reader.done():
            reader.set_result(None)

    def _wait_s(self) -> float | None:
        """Return the seconds until the next response may be read, or None if none is buffered."""
        if not self._events:
            return 0.0 if self._has_ended else None
        if self._events[0][1] is None:
            return 0.0
        return max(0.0, self._due - self._loop.time()) if self._flow.pace else 0.0

    def _take(self) -> Event:
        event, delta = self._events.pop(0)  # cheap, since the list is no longer than the window
        self._taken += 1
        if delta is not None and not delta.HasField("prompt_logprobs"):
            event = self._merge(event, delta)
        # Grant half a window at a time, for few grants that are early enough for a fast reader.
        if self._taken >= max(1, self._window // 2) and not self._has_ended:
            self._grant(self._taken)
            self._taken = 0
        return event

    def _merge(self, event: Event, first: inference_pb2.Delta) -> Event:
        """Merge an event with the buffered deltas of the same sample that directly follow it."""
        tokens = first.num_tokens
        merged = [event]
        for following, delta in self._events:
            if delta is None or delta.sample != first.sample:
                break
            if tokens + delta.num_tokens > self._flow.coalesce_tokens:
                break
            if delta.reasoning or delta.tool_calls:  # only the first merged delta may carry them
                break
            if delta.HasField("prompt_logprobs"):
                break
            tokens += delta.num_tokens
            merged.append(following)
            if tokens >= self._flow.coalesce_tokens:
                break

        del self._events[: len(merged) - 1]
        self._taken += len(merged) - 1
        if self._flow.pace:
            self._due = self._loop.time() + tokens / self._flow.pace
        return merge_deltas(merged)


class _Watched(NamedTuple):
    """An answer whose stream is watched."""

    tokens: Callable[[], int] | None
    """Returns how many tokens another engine must prefill, or None for a stream that waits."""
    adapter: str
    """Name of the answer's adapter (empty for the base model)."""


class StreamWatchdog:
    """Ends the streams of one engine that should move to another engine.

    Args:
        loss: returns the error of all streams if the engine is lost, else None.
        delay: returns the error of a stream if another engine would continue it sooner than the
            next worker, else None. It gets the number of tokens to prefill, with those of streams
            that move before, and the name of the adapter.
    """

    def __init__(
        self,
        loss: Callable[[], ServiceError | None],
        delay: Callable[[int, str], ServiceError | None],
    ) -> None:
        self._loss = loss
        self._delay = delay
        self._streams: dict[Source, _Watched] = {}
        self._check_at: float | None = None

    def watch(
        self, stream: Source, tokens: Callable[[], int] | None = None, adapter: str = ""
    ) -> None:
        """Watch a stream, and end it with an error when it should move.

        Args:
            stream: the stream.
            tokens: returns the number of tokens that another engine must prefill, which grows as
                the answer does. None if the stream waits for the engine's next worker, however
                long that takes.
            adapter: name of the answer's adapter (empty for the base model).
        """
        self._streams[stream] = _Watched(tokens, adapter)
        self._arm()

    def forget(self, stream: Source) -> None:
        """Stop watching a stream that has ended or is no longer read."""
        self._streams.pop(stream, None)

    def check(self) -> None:
        """End the streams that should move now, each with an error of its own."""
        moving = 0
        with failures_logged("end streams of a lost engine"):
            for stream, watched in tuple(self._streams.items()):
                error = self._loss()
                if error is None and watched.tokens:
                    tokens = moving + watched.tokens()
                    error = self._delay(tokens, watched.adapter)
                    if error is not None:
                        moving = tokens
                if error is not None:
                    self.forget(stream)
                    stream.end(error)

    def _arm(self) -> None:
        if self._check_at is None:
            loop = asyncio.get_running_loop()
            self._check_at = loop.time() + CHECK_INTERVAL_S
            loop.call_at(self._check_at, self._check, self._check_at)

    def _check(self, planned: float) -> None:
        self._check_at = None
        now = asyncio.get_running_loop().time()
        # If this process itself was paused, the reports of that time are not yet read.
        if now - planned <= CHECK_INTERVAL_S:
            self.check()
        if self._streams:
            self._arm()
