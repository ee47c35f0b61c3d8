"""Lets concurrent identical requests share one generation if their answer is deterministic.

The first request starts the generation immediately. Requests that arrive shortly afterwards may
join it, and get its events from the beginning. The generation runs in a task of its own, so it
continues until the last request has left. Each request reads the generation's event log at its own
pace.
"""

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CoalesceSection
from ullage_common.wire.errors import ServiceError
from ullage_router.call import (
    Call,
    DecisionLog,
    Event,
    Handler,
    ResponseStream,
    timed_out,
)
from ullage_router.policy.decision import Decision

JOIN_S = 1.0
"""Minimum time in seconds for which other requests may join a generation without a first token."""
MAX_LOG_BYTES = 1 << 20
"""Maximum size in bytes of the event log that is kept for late joiners and slow readers.

This is several times the size of a long answer.
"""
MAX_UNREAD_BYTES = 64 << 10
"""Maximum number of bytes by which the engine may be ahead of the fastest reader."""

EVENT_OVERHEAD_BYTES = 48
"""Bytes that an event of a `FinishedAnswer` takes in addition to its serialized form."""
OVERHEAD_BYTES = 2048
"""Estimate of the bytes of a `FinishedAnswer` besides its messages, such as its decision."""


def is_deterministic(request: inference_pb2.GenerateRequest) -> bool:
    """Return whether repeating the request yields the same text (greedy, seeded or beam search)."""
    sampling = request.sampling
    is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
    return is_greedy or sampling.HasField("seed") or request.samples.HasField("beam")


def key_of(request: inference_pb2.GenerateRequest, asker: str) -> bytes:
    """Return a digest that is equal for requests that may share a generation.

    The digest covers every field of the request except its id, including fields that future
    versions may add.

    Args:
        asker: identifies the client. Clients with different values never share a generation.
    """
    anonymous = inference_pb2.GenerateRequest()
    anonymous.CopyFrom(request)
    anonymous.request_id = ""
    digest = hashlib.blake2b(anonymous.SerializeToString(deterministic=True), digest_size=16)
    digest.update(b"\0" + asker.encode())
    return digest.digest()


class Coalescer:
    """Lets identical deterministic requests to this router share a generation.

    It tracks the generations that requests may join.

    joined
        number of requests that joined another request's generation
    """

    def __init__(self, section: CoalesceSection) -> None:
        self._section = section
        self._open: dict[bytes, SharedGeneration] = {}
        self.joined = 0

    def __len__(self) -> int:
        return len(self._open)

    async def share(self, call: Call, proceed: Handler) -> ResponseStream:
        """Return the call's answer, which may be shared with identical calls.

        Args:
            proceed: starts a generation. Its answer is closed once all requests have left.

        Raises:
            ServiceError: `proceed` failed. All requests that share the answer get the error.
        """
        if not is_deterministic(call.request):
            return await proceed(call)
        reader = self._find(call, proceed).join(call)
        try:
            await reader.begin()
        except BaseException:
            reader.close()
            raise
        return reader

    def _find(self, call: Call, proceed: Handler) -> "SharedGeneration":
        tenant = "" if self._section.across_tenants else call.tenant.name
        rules = call.tenant.rules
        # Streams and whole answers do not share: a stream is paced and waits for slow readers.
        asker = f"{tenant} {rules.max_tokens} {rules.tokens_per_second} {call.is_streamed}"
        key = key_of(call.request, asker)
        shared = self._open.get(key)
        if shared and shared.is_joinable and call.deadline.at <= shared.call.deadline.at:
            self.joined += 1
            return shared

        own = SharedGeneration(call, self._section.window)
        self._open[key] = own
        own.run(proceed, lambda: self._remove(key, own))
        return own

    def _remove(self, key: bytes, ended: "SharedGeneration") -> None:
        if self._open.get(key) is ended:
            del self._open[key]


class SharedGeneration:
    """A generation that several requests share, with its event log and its readers.

    Args:
        call: the first request.
        window_s: seconds during which other requests may join after the first event.
        keeps_all: whether to keep all events, so that requests may join as long as there are
            readers, and `finished_answer` can return the answer at the end.
    """

    def __init__(self, call: Call, window_s: float, *, keeps_all: bool = False) -> None:
        self._keeps_all = keeps_all
        self._is_finished = False
        self._window_s = window_s
        self._longest_s = max(JOIN_S, window_s)
        # Each request keeps its own deadlines. A generation that others may join for a moment
        # outlasts all of them that have the same limit.
        deadline = call.deadline.later(0.0 if keeps_all else self._longest_s)
        decisions = DecisionLog(call.decisions.latest)
        self.call = replace(call, decisions=decisions, deadline=deadline)
        self.leader = call
        self.accepted: inference_pb2.Accepted | None = None
        self.error: BaseException | None = None
        self._started = time.monotonic()
        self._readers: set[_Reader] = set()
        self._places = Counter[int]()
        """Number of readers by the index of their next event."""
        self._log: deque[Event] = deque()
        self._dropped = 0
        """Number of events that have been dropped from the start of the log."""
        self._log_bytes = 0
        self._written = 0
        """Total bytes of all events so far, including dropped events."""
        self._changed = asyncio.Event()
        self._may_go_on = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_joinable(self) -> bool:
        """Return whether a new request may join the generation.

        The request must still be able to get the complete answer, and must get it about as soon as
        if it had started its own generation.
        """
        limit_s = self._longest_s if self.accepted is None else self._window_s
        is_whole = not self._dropped and self.error is None
        if self._keeps_all:
            return is_whole and bool(self._readers)
        return is_whole and bool(self._readers) and self._age_s <= limit_s

    def finished_answer(self) -> "FinishedAnswer | None":
        """Return the answer, or None unless the generation is complete and all events are kept."""
        is_whole = not self._dropped and self.error is None
        if self.accepted is None or not (self._is_finished and is_whole):
            return None
        request_id = self.leader.record.request_id
        return FinishedAnswer(self.accepted, self._log, self.call.decisions.latest, request_id)

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._started

    def run(self, start: Handler, on_end: Callable[[], None]) -> None:
        """Start the generation in a background task."""
        self._task = asyncio.create_task(self._run(start, on_end), name="generation")

    def join(self, call: Call) -> "_Reader":
        """Add a reader for a call that shares the answer."""
        reader = _Reader(self, call)
        self._readers.add(reader)
        self._places[reader.place] += 1
        self.call.deadline.add_follower(call.deadline)
        return reader

    def leave(self, reader: "_Reader") -> None:
        """Remove a reader, and end the generation if this was its last reader."""
        self._readers.discard(reader)
        self._places[reader.place] -= 1
        self.call.deadline.remove_follower(reader.deadline)
        self._may_go_on.set()
        if not self._readers and self._task:
            self._task.cancel()

    async def wait_for_change(self) -> None:
        """Wait until an event arrives, the generation ends, or a reader's deadline passes."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all readers that are waiting for a change."""
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    def read(self, place: int) -> Event | None:
        """Return the event at the given index of the log, or None if it has not arrived yet.

        Raises:
            ServiceError: the event was dropped because the reader was too slow.
        """
        if place < self._dropped:
            raise _too_slow()
        index = place - self._dropped
        return self._log[index] if index < len(self._log) else None

    def on_read(self, place: int) -> None:
        """Note that a reader has read an event, so that a paused generation may continue.

        Events that every reader has read are dropped once no more requests may join. A thousand
        readers may share an answer, so this looks at none but the one that has advanced.

        Args:
            place: the index of the event.
        """
        self._may_go_on.set()
        self._places[place + 1] += 1
        self._places[place] -= 1
        if not self._places[place]:
            del self._places[place]
        if self._age_s > self._longest_s and not self._keeps_all:
            while self._log and not self._places[self._dropped]:
                self._drop()

    async def _run(self, start: Handler, on_end: Callable[[], None]) -> None:
        try:
            answer = await start(self.call)
            try:
                await self._follow(answer)
                self._is_finished = True
            finally:
                answer.close()
        except Exception as error:  # every reader must get the error
            self.error = error
        except asyncio.CancelledError:  # raised by `start`, too, if it waits for a cancelled task
            self.error = RuntimeError("it was cancelled")
            raise
        finally:
            on_end()
            self.notify()

    async def _follow(self, answer: ResponseStream) -> None:
        self.accepted = answer.accepted
        self.notify()
        events = answer.events()
        try:
            async for event in events:
                self._append(event)
                while self._is_ahead():
                    self._may_go_on.clear()
                    await self._may_go_on.wait()
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    def _append(self, event: Event) -> None:
        self._log.append(event)
        self._log_bytes += event.ByteSize()
        self._written += event.ByteSize()
        while self._log_bytes > MAX_LOG_BYTES and len(self._log) > 1:
            self._drop()
        self.notify()

    def _drop(self) -> None:
        self._log_bytes -= self._log.popleft().ByteSize()
        self._dropped += 1

    def _is_ahead(self) -> bool:
        fastest = max((reader.bytes_read for reader in self._readers), default=self._written)
        return self._written - fastest > MAX_UNREAD_BYTES


class _Reader:
    """One request's view of a shared generation, with its own request id and deadline."""

    def __init__(self, generation: SharedGeneration, call: Call) -> None:
        self.accepted = inference_pb2.Accepted()
        self.place = 0
        self.bytes_read = 0
        self.deadline = call.deadline
        self._generation = generation
        self._call = call
        self.output_tokens = 0
        self._adopt_decision()
        loop = asyncio.get_running_loop()
        remaining_s = max(0.0, call.deadline.remaining_s)
        self._alarm = loop.call_later(remaining_s, generation.notify)
        self._is_closed = False

    async def begin(self) -> None:
        """Wait for the first token of the shared generation.

        Raises:
            ServiceError: the generation failed.
        """
        generation = self._generation
        try:
            while generation.accepted is None and generation.error is None:
                await generation.wait_for_change()
        finally:
            self._adopt_decision()  # a client that leaves pays for a prompt that was sent, too

        if generation.accepted is None:
            raise self._error()
        self.accepted.CopyFrom(generation.accepted)
        self.accepted.request_id = self._call.record.request_id

    async def events(self) -> AsyncGenerator[Event, None]:
        while True:
            event = await self._next()
            self.output_tokens = _tokens_after(self.output_tokens, event)
            yield event
            if event.HasField("finished"):
                return

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._alarm.cancel()
            self._generation.leave(self)

    async def _next(self) -> Event:
        while (event := self._generation.read(self.place)) is None:
            if self._generation.error:
                raise self._error()
            if self._call.deadline.remaining_s <= 0:
                return timed_out(self.accepted, self.output_tokens)
            await self._generation.wait_for_change()

        self._generation.on_read(self.place)
        self.place += 1
        self.bytes_read += event.ByteSize()
        return event

    def _error(self) -> BaseException:
        """Return a copy of the generation's error for this reader.

        If several tasks raised the same exception object, it would accumulate all of their
        tracebacks.
        """
        error = self._generation.error
        if not isinstance(error, ServiceError):
            return RuntimeError(f"the shared generation failed: {error!r}")
        return ServiceError(
            error.code,
            error.reason,
            error.message,
            metadata=error.metadata,
            retry_after_s=error.retry_after_s,
        )

    def _adopt_decision(self) -> None:
        """Copy the generation's admission decision to this request, which shares its answer."""
        generation = self._generation
        call = self._call
        leader = "" if generation.leader is call else generation.leader.record.request_id
        call.decisions.adopt(generation.call.decisions.latest, coalesced_with=leader)


class FinishedAnswer:
    """A complete answer that later requests may get, in the few bytes of its serialized events.

    Args:
        accepted: the engine's Accepted message.
        events: the events of the answer.
        decision: the decision about the request that generated the answer.
        request_id: id of that request.

    num_bytes
        size of the answer in memory, in bytes
    """

    def __init__(
        self,
        accepted: inference_pb2.Accepted,
        events: Iterable[Event],
        decision: Decision,
        request_id: str,
    ) -> None:
        self._accepted = accepted.SerializeToString()
        # Messages from an engine share memory with all others that arrived together with them.
        self._events = tuple(event.SerializeToString() for event in events)
        self._decision = decision
        self._request_id = request_id
        size = len(self._accepted) + sum(map(len, self._events))
        self.num_bytes = size + len(self._events) * EVENT_OVERHEAD_BYTES + OVERHEAD_BYTES

    def read(self, call: Call) -> ResponseStream:
        """Return the answer as a stream for another call."""
        call.decisions.adopt(self._decision, coalesced_with=self._request_id)
        accepted = inference_pb2.Accepted.FromString(self._accepted)
        accepted.request_id = call.record.request_id
        return _Replay(accepted, self._events)


class _Replay:
    """A stream of the events of a finished answer."""

    def __init__(self, accepted: inference_pb2.Accepted, events: Iterable[bytes]) -> None:
        self.accepted = accepted
        self.output_tokens = 0
        self._events = events

    async def events(self) -> AsyncGenerator[Event, None]:
        for serialized in self._events:
            event = Event.FromString(serialized)
            self.output_tokens = _tokens_after(self.output_tokens, event)
            yield event

    def close(self) -> None:
        """Do nothing, since nothing is being generated."""


def _tokens_after(output_tokens: int, event: Event) -> int:
    """Return the number of an answer's tokens after an event, given the number before it."""
    if event.HasField("finished"):
        return event.finished.usage.completion_tokens
    return output_tokens + event.delta.num_tokens


def _too_slow() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_READER",
        f"this answer is shared and its reader fell more than {MAX_LOG_BYTES} bytes behind; "
        "read faster, or send another seed to get your own answer",
    )
