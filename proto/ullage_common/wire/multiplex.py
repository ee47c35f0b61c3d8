"""The serving end of `InferenceService.Multiplex`: many Generate calls over one stream.

Each call runs as a task of its own, over the same code as Generate, with a context that has what
such code uses of gRPC's. Responses of all calls that are ready at one moment leave in one message.
A call may be `window` responses ahead of what the router took; then it waits, and no other does
(`ullage_common.wire.flow_control`).

Anybody who reaches an engine can open such a stream. So its open calls are bounded, the work of a
message is done in pieces between which the event loop serves others, and nothing more begins while
nobody reads the answers. A stream whose calls are refused for their tickets, one after the other,
ends.
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Never

import grpc
from google.rpc import code_pb2, status_pb2

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError, from_status, invalid, to_status
from ullage_common.wire.flow_control import SendPace, SendWindow
from ullage_common.wire.request_guard import MAX_CALLS, MAX_REQUEST_BYTES, calls_full

# Responses in one message: it stays far below the longest that gRPC takes.
MAX_BATCH = 256
MAX_REFUSED_TICKETS = 32
"""Calls refused for their tickets, none served between them, behind which a stream ends."""
TURN_CALLS = 16
"""Calls begun or ended at a time, before the event loop serves others."""
TURN_ENTRIES = 2048
"""Entries of a message that are looked at, at a time."""
STATUS_KEY = "grpc-status-details-bin"

Context = grpc.aio.ServicerContext[Any, Any]
Generate = Callable[
    [pb.GenerateRequest, Any], Awaitable[None] | AsyncGenerator[pb.GenerateResponse]
]

log = logging.getLogger(__name__)


async def serve_multiplex(generate: Generate, context: Context) -> None:
    """Serve one stream until the router closes it; then cancel unfinished calls.

    Args:
        generate: the service's method, in either of gRPC's two styles.

    Raises:
        ServiceError: the stream breaks its bounds.
    """
    stream = _Stream(generate)
    sending = asyncio.create_task(stream.send_all(context), name="multiplex sender")
    try:
        # What a router waits for to know that this engine has such streams.
        await context.send_initial_metadata(())
        while isinstance(request := await context.read(), pb.MultiplexRequest):
            await stream.take(request)
    finally:
        sending.cancel()
        await stream.close()
        await asyncio.gather(sending, return_exceptions=True)


class _Stream:
    """The calls of one router."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._calls: dict[int, CallContext] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: list[tuple[int, pb.GenerateResponse | bytes]] = []
        """Tags, each with a response or the status that ends its call."""
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        """Whether the router took most of what was sent."""
        self._refused: ServiceError | None = None
        self._num_refused = 0
        """Calls refused for their tickets since one was served."""

    async def take(self, request: pb.MultiplexRequest) -> None:
        """Begin, widen and cancel calls.

        Raises:
            ServiceError: there are too many calls in the message, or the tickets of too many before
                were refused.
        """
        await self._wait_for_reader()
        self._check_tickets()
        if len(request.calls) > MAX_CALLS:
            message = f"calls has {len(request.calls)} entries; send at most {MAX_CALLS}"
            raise invalid("calls", message, "BODY_TOO_LARGE")
        for num_begun, call in enumerate(request.calls):
            if num_begun and not num_begun % TURN_CALLS:
                await self._give_turn()
                self._check_tickets()
            self._begin(call)

        for num_taken, grant in enumerate(request.grants, 1):
            if context := self._calls.get(grant.tag):
                context.send_window.grant(grant.responses)
            if not num_taken % TURN_ENTRIES:
                await self._give_turn()

        num_cancelled = 0
        for num_taken, tag in enumerate(request.cancelled_tags, 1):
            if context := self._calls.pop(tag, None):
                context.cancel()
                num_cancelled += 1
                if not num_cancelled % TURN_CALLS:
                    await self._give_turn()
            if not num_taken % TURN_ENTRIES:
                await self._give_turn()

    async def send_all(self, context: Context) -> None:
        """Send what calls have ready, as long as the stream lives."""
        while True:
            await self._has_news.wait()
            batch = self._outbox[:MAX_BATCH]
            self._outbox = self._outbox[MAX_BATCH:]
            if not self._outbox:
                self._has_news.clear()
            if len(self._outbox) <= MAX_CALLS:
                self._has_room.set()
            message = pb.MultiplexResponse()
            for tag, news in batch:
                if isinstance(news, bytes):
                    message.events.add(tag=tag, status=news)
                else:
                    message.events.add(tag=tag, response=news)
            await context.write(message)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for num_ended, task in enumerate(tasks, 1):
            task.cancel()
            if not num_ended % TURN_CALLS:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_turn(self) -> None:
        """Let the event loop serve others."""
        await asyncio.sleep(0)
        await self._wait_for_reader()

    async def _wait_for_reader(self) -> None:
        while len(self._outbox) > MAX_CALLS:
            self._has_room.clear()
            await self._has_room.wait()

    def _check_tickets(self) -> None:
        if self._num_refused >= MAX_REFUSED_TICKETS and self._refused is not None:
            raise self._refused

    def _begin(self, call: pb.MultiplexCall) -> None:
        if call.tag in self._calls:  # one of the two must not get the other's tokens
            error = invalid("tag", f"tag {call.tag} is in use; give each call its own")
            self._send_status(call.tag, to_status(error))
            return
        if len(self._tasks) >= MAX_CALLS:
            self._send_status(call.tag, to_status(calls_full()))
            return
        context = CallContext(call, self._send)
        self._calls[call.tag] = context
        task = asyncio.create_task(self._run(call, context), name=f"call {call.tag}")
        self._tasks.add(task)
        context.task = task
        task.add_done_callback(partial(self._forget, context))

    def _forget(self, context: "CallContext", task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        context.task = None  # the error of one that was cancelled has frames with the context

    async def _run(self, call: pb.MultiplexCall, context: "CallContext") -> None:
        status = status_pb2.Status(code=code_pb2.CANCELLED, message="the engine cancelled it")
        try:
            status = await self._outcome(call.request, context)
        finally:
            self._count_refusal(status)
            self._end(call, context, status)

    def _count_refusal(self, status: Any) -> None:
        if status.code == code_pb2.UNAUTHENTICATED:
            self._num_refused += 1
            self._refused = from_status(status)

    def _end(self, call: pb.MultiplexCall, context: "CallContext", status: Any) -> None:
        if self._calls.get(call.tag) is context:
            del self._calls[call.tag]
            context.send_window.end()
            if not (context.send_window.is_finished and not status.code):
                self._send_status(call.tag, status)

    async def _outcome(self, request: pb.GenerateRequest, context: "CallContext") -> Any:
        try:
            _check_size(request)
            result = self._generate(request, context)
            if inspect.isawaitable(result):
                await result
            else:
                await _relay(result, context)
        except Aborted as aborted:
            return aborted.status
        except ServiceError as error:
            return to_status(error)
        except Exception as error:
            log.exception("call failed", extra={"request_id": request.request_id})
            return status_pb2.Status(code=code_pb2.UNKNOWN, message=f"Unexpected {type(error)}")
        return status_pb2.Status()

    def _send(self, tag: int, response: pb.GenerateResponse) -> None:
        self._num_refused = 0
        self._outbox.append((tag, response))
        self._has_news.set()

    def _send_status(self, tag: int, status: Any) -> None:
        self._outbox.append((tag, status.SerializeToString()))
        self._has_news.set()


class Aborted(Exception):
    """A call was ended with a status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.status = status


class CallContext:
    """The part of a gRPC context that the code behind Generate uses, for one call of a stream."""

    def __init__(
        self, call: pb.MultiplexCall, send: Callable[[int, pb.GenerateResponse], None]
    ) -> None:
        self.send_window = SendWindow(call, partial(send, call.tag))
        self._metadata = tuple(call.metadata.items())
        self._deadline = time.monotonic() + call.timeout_ms / 1000 if call.timeout_ms else None
        self.task: asyncio.Task[None] | None = None

    @property
    def pace(self) -> SendPace:
        """How tokens of one sample leave together: those that come faster need not be written one
        by one."""
        return self.send_window.pace

    def write(self, response: pb.GenerateResponse) -> Coroutine[None, None, None]:
        """Send a response; wait for a router that has not taken those before."""
        return self.send_window.write(response)

    def cancel(self) -> None:
        self.send_window.drop()
        if self.task:
            self.task.cancel()

    def time_remaining(self) -> float | None:
        """Seconds; None without a time limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Never:
        """End the call; the details of google.rpc are kept, other trailers are not."""
        for status in _statuses(trailing_metadata):
            raise Aborted(status)
        raise Aborted(status_pb2.Status(code=code.value[0], message=details))


async def _relay(responses: AsyncGenerator[pb.GenerateResponse], context: CallContext) -> None:
    async with contextlib.aclosing(responses):  # its clean-up must not wait for the collector
        async for response in responses:
            await context.write(response)


def _statuses(metadata: Sequence[tuple[str, str | bytes]]) -> Iterator[Any]:
    for key, value in metadata:
        if key == STATUS_KEY and isinstance(value, bytes):
            yield status_pb2.Status.FromString(value)


def _check_size(request: pb.GenerateRequest) -> None:
    """Refuse a request as large as a Generate call would refuse."""
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        message = f"GenerateRequest has {size} bytes; send at most {MAX_REQUEST_BYTES}"
        raise invalid("GenerateRequest", message, "BODY_TOO_LARGE")
