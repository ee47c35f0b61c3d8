"""The server side of `InferenceService.Multiplex`: many Generate calls over one stream.

Each call runs as a separate task with the same code as a Generate RPC. The call's context provides
the parts of gRPC's context that this code uses. All responses that are ready at the same time are
sent in one message. A call may be up to `window` responses ahead of the router. After that, only
this call waits, and other calls continue (see `ullage_common.wire.flow_control`).

Anyone who can reach an engine can open a stream. Each stream therefore has a limit on open calls. A
message's entries are processed in small batches, so that the event loop can serve other streams in
between. New calls do not begin while too many responses are unread. A stream ends after too many
consecutive calls with refused tickets.
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

MAX_BATCH = 256
"""Maximum number of responses in one message, which keeps messages far below gRPC's size limit."""
MAX_REFUSED_TICKETS = 32
"""A stream ends after this many consecutive calls with refused tickets."""
TURN_CALLS = 16
"""Number of calls to begin or end before yielding to the event loop."""
TURN_ENTRIES = 2048
"""Number of message entries to read before yielding to the event loop."""
STATUS_KEY = "grpc-status-details-bin"

Context = grpc.aio.ServicerContext[Any, Any]
Generate = Callable[
    [pb.GenerateRequest, Any], Awaitable[None] | AsyncGenerator[pb.GenerateResponse]
]

log = logging.getLogger(__name__)


async def serve_multiplex(generate: Generate, context: Context) -> None:
    """Serve one stream until the router closes it, then cancel unfinished calls.

    Args:
        generate: the service's Generate method, as a coroutine or as an async generator.
        context: gRPC's context of the stream.

    Raises:
        ServiceError: the stream exceeds its limits.
    """
    # The metadata shows the router that the engine serves the method.
    await context.send_initial_metadata(())
    stream = _Stream(generate)
    sending = asyncio.create_task(stream.send_all(context), name="multiplex sender")
    receiving = asyncio.create_task(stream.take_all(context), name="multiplex receiver")
    try:
        # If the sender fails, no call can be answered any more, so the stream ends.
        await asyncio.wait({receiving, sending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (receiving, sending):
            if task.done():
                task.result()
    finally:
        receiving.cancel()
        sending.cancel()
        await stream.close()
        await asyncio.gather(receiving, sending, return_exceptions=True)


class _Stream:
    """The Generate calls that one router sends over one stream."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._calls: dict[int, CallContext] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: list[tuple[int, pb.GenerateResponse | bytes]] = []
        """Queue of entries to send, each a call's tag with a response or a serialized status."""
        self._has_news = asyncio.Event()
        """Set while the outbox has entries."""
        self._has_room = asyncio.Event()
        """Set while the outbox is short enough for more calls."""
        self._refused: ServiceError | None = None
        """The error of the latest refused ticket."""
        self._num_refused = 0
        """Number of calls with refused tickets since a call was last served."""

    async def take_all(self, context: Context) -> None:
        """Process messages until the router closes the stream.

        Raises:
            ServiceError: see `take`.
        """
        while isinstance(request := await context.read(), pb.MultiplexRequest):
            await self.take(request)

    async def take(self, request: pb.MultiplexRequest) -> None:
        """Process a message: begin new calls, widen the windows of open calls, and cancel calls.

        Raises:
            ServiceError: the message has too many calls, or too many earlier tickets were refused.
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
        """Send the responses that calls have put into the outbox, in batches, until cancelled."""
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
        """Cancel all calls of the stream, and wait until they have ended."""
        tasks = list(self._tasks)
        for num_ended, task in enumerate(tasks, 1):
            task.cancel()
            if not num_ended % TURN_CALLS:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_turn(self) -> None:
        """Let other tasks run, and wait until the router has read enough of the responses."""
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
        if call.tag in self._calls:  # otherwise one call would get the other's tokens
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
        context.task = None  # breaks a cycle: a cancelled task's traceback holds the context

    async def _run(self, call: pb.MultiplexCall, context: "CallContext") -> None:
        status = status_pb2.Status(code=code_pb2.CANCELLED, message="the engine cancelled the call")
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
    """Raised by `CallContext.abort` to end a call with a status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.status = status


class CallContext:
    """The context of one call in a stream, with the parts of gRPC's context that Generate uses."""

    def __init__(
        self, call: pb.MultiplexCall, send: Callable[[int, pb.GenerateResponse], None]
    ) -> None:
        self.send_window = SendWindow(call, partial(send, call.tag))
        self._metadata = tuple(call.metadata.items())
        self._deadline = time.monotonic() + call.timeout_ms / 1000 if call.timeout_ms else None
        self.task: asyncio.Task[None] | None = None

    @property
    def pace(self) -> SendPace:
        """Pace at which responses are sent. Producers can adapt the size of their batches to it."""
        return self.send_window.pace

    def write(self, response: pb.GenerateResponse) -> Coroutine[None, None, None]:
        """Send a response, but wait while too many earlier responses are unread."""
        return self.send_window.write(response)

    def cancel(self) -> None:
        """Cancel the call, because the router no longer wants its answer."""
        self.send_window.drop()
        if self.task:
            self.task.cancel()

    def time_remaining(self) -> float | None:
        """Return the seconds until the call's deadline, or None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the call."""
        return self._metadata

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Never:
        """Abort the call with a status. Only the google.rpc details in the trailers are kept."""
        for status in _statuses(trailing_metadata):
            raise Aborted(status)
        raise Aborted(status_pb2.Status(code=code.value[0], message=details))


async def _relay(responses: AsyncGenerator[pb.GenerateResponse], context: CallContext) -> None:
    async with contextlib.aclosing(responses):  # cleans up now, not at garbage collection
        async for response in responses:
            await context.write(response)


def _statuses(metadata: Sequence[tuple[str, str | bytes]]) -> Iterator[Any]:
    for key, value in metadata:
        if key == STATUS_KEY and isinstance(value, bytes):
            yield status_pb2.Status.FromString(value)


def _check_size(request: pb.GenerateRequest) -> None:
    """Refuse a request that exceeds the size limit, which is the same as for a Generate RPC."""
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        message = f"GenerateRequest has {size} bytes; send at most {MAX_REQUEST_BYTES}"
        raise invalid("GenerateRequest", message, "BODY_TOO_LARGE")
