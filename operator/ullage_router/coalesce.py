"""Identical deterministic requests in flight share one generation.

The first one starts at once; others join it in its first moments and are sent what it sent so far.
The generation runs in a task of its own, so it ends when the last of its requests has left and not
when the first does. Each request reads at its own pace from the generation's log of events.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_router.answer import Answer, Begin, Call, Event, timed_out
from ullage_router.config import CoalesceSection
from ullage_rpc.errors import ServiceError

JOIN_S = 1.0
"""Until its first token, at most this long, a generation takes others whatever the window."""
MAX_LOG_BYTES = 1 << 20
"""Kept of an answer for those who join or read slowly; several times the longest usual answer."""
MAX_UNREAD_BYTES = 64 << 10
"""How far the engine may be ahead of the fastest reader."""


def is_deterministic(request: inference_pb2.GenerateRequest) -> bool:
    """Whether the same request gives the same text again: greedy, seeded or a beam search."""
    sampling = request.sampling
    is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
    return is_greedy or sampling.HasField("seed") or request.samples.HasField("beam")


def key_of(request: inference_pb2.GenerateRequest, asker: str) -> bytes:
    """The same for requests that may share: every field but the id counts, also future ones.

    Args:
        asker: what sets those apart who may not share.
    """
    anonymous = inference_pb2.GenerateRequest()
    anonymous.CopyFrom(request)
    anonymous.request_id = ""
    digest = hashlib.blake2b(anonymous.SerializeToString(deterministic=True), digest_size=16)
    digest.update(b"\0" + asker.encode())
    return digest.digest()


class Coalescer:
    """The generations that others may join; this router's, as many as are in flight at most.

    joined
        requests that shared the generation of another
    """

    def __init__(self, section: CoalesceSection) -> None:
        self._section = section
        self._open: dict[bytes, _Generation] = {}
        self.joined = 0

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, call: Call, start: Begin) -> Answer:
        """The answer to the call, its own or a shared one.

        Args:
            start: generates; its answer is closed when nobody wants it any more.

        Raises:
            ServiceError: as `start`, for everybody who shares it.
        """
        if not (self._section.enabled and is_deterministic(call.request)):
            return await start(call)
        reader = self._find(call, start).join(call)
        try:
            await reader.begin()
        except BaseException:
            reader.close()
            raise
        return reader

    def _find(self, call: Call, start: Begin) -> "_Generation":
        tenant = "" if self._section.across_tenants else call.record.tenant
        rules = call.visit.rules
        # A whole answer is neither paced nor held up by a slow reader, as a stream is.
        asker = f"{tenant} {rules.max_tokens} {rules.tokens_per_second} {call.is_streamed}"
        key = key_of(call.request, asker)
        found = self._open.get(key)
        if found and found.is_joinable and call.deadline <= found.call.deadline:
            self.joined += 1
            call.record.coalesced_with = found.call.record.request_id
            return found
        made = _Generation(call, self._section.window)
        self._open[key] = made
        made.run(start, lambda: self._forget(key, made))
        return made

    def _forget(self, key: bytes, ended: "_Generation") -> None:
        if self._open.get(key) is ended:
            del self._open[key]


class _Generation:
    """One generation, its log and its readers.

    Args:
        call: the first to ask for it.
        window_s: how long others may join it once it has sent something.
    """

    def __init__(self, call: Call, window_s: float) -> None:
        self._window_s = window_s
        self._longest_s = max(JOIN_S, window_s)
        # So it outlasts all who join with the same limit; each of them watches its own.
        timeout_s = call.timeout_s + self._longest_s
        self.call = replace(
            call, record=replace(call.record, degraded=[], trail=[]), timeout_s=timeout_s
        )
        self.accepted: inference_pb2.Accepted | None = None
        self.error: BaseException | None = None
        self._began = time.monotonic()
        self._readers: set[_Reader] = set()
        self._log: deque[Event] = deque()
        self._dropped = 0  # events before those of the log
        self._log_bytes = 0
        self._written = 0  # bytes of all events so far
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_joinable(self) -> bool:
        """Whether a newcomer would get all of it, about as soon as by itself."""
        limit_s = self._longest_s if self.accepted is None else self._window_s
        is_whole = not self._dropped and self.error is None
        return is_whole and bool(self._readers) and self._age_s <= limit_s

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._began

    def run(self, start: Begin, on_end: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._run(start, on_end), name="generation")

    def join(self, call: Call) -> "_Reader":
        reader = _Reader(self, call)
        self._readers.add(reader)
        return reader

    def leave(self, reader: "_Reader") -> None:
        """The generation ends when its last reader leaves."""
        self._readers.discard(reader)
        self._room.set()
        if not self._readers and self._task:
            self._task.cancel()

    async def news(self) -> None:
        """Returns when something was said, or a reader's time is over."""
        await self._news.wait()

    def wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def read(self, place: int) -> Event | None:
        """The event of this number from 0; None when there is none yet.

        Raises:
            ServiceError: it was dropped, since the reader was too slow.
        """
        if place < self._dropped:
            raise _too_slow()
        index = place - self._dropped
        return self._log[index] if index < len(self._log) else None

    def took(self) -> None:
        """A reader went on: the engine may, too, and what nobody can need is dropped."""
        self._room.set()
        if self._age_s > self._longest_s:
            while self._dropped < min(reader.place for reader in self._readers):
                self._drop()

    async def _run(self, start: Begin, on_end: Callable[[], None]) -> None:
        try:
            answer = await start(self.call)
            try:
                await self._follow(answer)
            finally:
                answer.close()
        except Exception as error:  # whatever it is, all readers must be told
            self.error = error
        finally:
            on_end()
            self.wake()

    async def _follow(self, answer: Answer) -> None:
        self.accepted = answer.accepted
        self.wake()
        events = answer.events()
        try:
            async for event in events:
                self._append(event)
                while self._is_ahead():
                    self._room.clear()
                    await self._room.wait()
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    def _append(self, event: Event) -> None:
        self._log.append(event)
        self._log_bytes += event.ByteSize()
        self._written += event.ByteSize()
        while self._log_bytes > MAX_LOG_BYTES and len(self._log) > 1:
            self._drop()
        self.wake()

    def _drop(self) -> None:
        self._log_bytes -= self._log.popleft().ByteSize()
        self._dropped += 1

    def _is_ahead(self) -> bool:
        fastest = max((reader.bytes_read for reader in self._readers), default=self._written)
        return self._written - fastest > MAX_UNREAD_BYTES


class _Reader:
    """One request's view of a generation: an Answer with its own id, usage and time limit."""

    def __init__(self, generation: _Generation, call: Call) -> None:
        self.accepted = inference_pb2.Accepted()
        self.place = 0
        self.bytes_read = 0
        self._generation = generation
        self._call = call
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(max(0.0, call.remaining_s), generation.wake)
        self._is_closed = False

    async def begin(self) -> None:
        """Returns when the first token is there.

        Raises:
            ServiceError: there will be none.
        """
        generation = self._generation
        while generation.accepted is None and generation.error is None:
            await generation.news()
        self._learn()
        if generation.accepted is None:
            raise self._error()
        self._call.record.ttft_s = time.monotonic() - self._call.record.arrived
        self.accepted.CopyFrom(generation.accepted)
        self._call.record.revision = self.accepted.revision
        self.accepted.request_id = self._call.record.request_id

    async def events(self) -> AsyncGenerator[Event, None]:
        record = self._call.record
        while True:
            event = await self._next()
            if event.HasField("finished"):
                record.output_tokens = event.finished.usage.completion_tokens
                yield event
                return
            record.output_tokens += event.delta.num_tokens
            yield event

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._alarm.cancel()
            self._generation.leave(self)

    async def _next(self) -> Event:
        while (event := self._generation.read(self.place)) is None:
            if self._generation.error:
                raise self._error()
            if self._call.remaining_s <= 0:
                return timed_out(self.accepted.prompt_tokens, self._call.record.output_tokens)
            await self._generation.news()
        self.place += 1
        self.bytes_read += event.ByteSize()
        self._generation.took()
        return event

    def _error(self) -> BaseException:
        """One of its own: an exception that several tasks raise collects all their frames."""
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

    def _learn(self) -> None:
        """Takes over what was decided about the generation."""
        own, shared = self._call.record, self._generation.call.record
        for name in ("prompt_tokens", "predicted_bytes", "action", "route", "reason", "engine"):
            setattr(own, name, getattr(shared, name))
        own.degraded, own.trail = list(shared.degraded), list(shared.trail)
        own.queued_s = shared.queued_s


def _too_slow() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_READER",
        f"this answer is shared and its reader fell more than {MAX_LOG_BYTES} bytes behind; "
        "read faster, or send another seed to have it alone",
    )
