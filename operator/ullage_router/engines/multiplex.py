"""Multiplexes all requests to an engine over one gRPC stream.

In a Python process, every separate RPC costs several hundred microseconds, regardless of its size.
On a shared stream, one message can carry the requests, cancellations or tokens of many calls. The
calls remain independent. Each call has its own tag, time limit and window, so a slow reader delays
only its own call. If the stream is lost, each call fails as if its own connection had been lost.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import grpc
from google.rpc import status_pb2

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.errors import ServiceError, from_status
from ullage_router.engines.flow_control import FlowControl, ReceiveBuffer

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
OPENING_TIMEOUT_S = 5.0
MAX_BATCH_BYTES = 128 << 10
"""Maximum total size of the calls in one message, in bytes.

A request that is larger is sent in a message of its own. Since every field takes at least two
bytes, this limit also keeps messages within the engine's limit on the number of fields.
"""
CALL_BYTES = 64
"""Estimated bytes that a call adds to a message, in addition to its request."""

Request = inference_pb2.GenerateRequest
Message = inference_pb2.MultiplexRequest
Response = inference_pb2.MultiplexResponse
Metadata = tuple[tuple[str, str], ...]

log = logging.getLogger(__name__)


class StreamLost(Exception):
    """Raised when the stream to an engine has ended. The message states the reason."""


class StreamLoss:
    """The loss of one stream, which fails many calls but counts as a single failure."""

    def __init__(self) -> None:
        self._counted: set[str] = set()

    def is_first(self, account: str) -> bool:
        """Return whether `account` has not counted the loss yet, and mark the loss as counted.

        A lost stream fails many calls. Each of these calls asks before it counts the loss, so every
        account counts it only once.

        Args:
            account: what the loss is counted for, such as `breaker` or `retries`.
        """
        is_first = account not in self._counted
        self._counted.add(account)
        return is_first


class ConnectionBroken(ServiceError):
    """Raised for every call on a stream that was lost."""

    def __init__(self, loss: StreamLoss) -> None:
        message = "the connection to the engine broke"
        super().__init__(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", message)
        self.loss = loss
        """The stream's loss, which is shared by the errors of all its calls."""


class Multiplexer:
    """Keeps a Multiplex stream to one engine open, reopening it whenever it is lost.

    Args:
        stub: the gRPC stub of the engine's service.
        address: the engine's address, for log messages.
        on_change: called when the stream has been opened or lost.
    """

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceServiceStub,
        address: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._stub = stub
        self._address = address
        self._on_change = on_change
        self.is_missing = False
        """Whether the last attempt found that the engine does not implement Multiplex."""
        self._stream: _Stream | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._is_retired = False

    @property
    def is_open(self) -> bool:
        """Whether the stream is open, so that it accepts new calls."""
        return self._stream is not None

    def start(self) -> None:
        """Start the background task that opens the stream as soon as the engine can be reached."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"multiplex {self._address}")

    def retire(self) -> None:
        """Stop accepting calls, and end the stream once the last running call has finished.

        A stream that is not open yet is not opened any more.
        """
        self._is_retired = True
        if self._stream:
            self._stream.retire()
            self._stream = None
        elif self._task:
            self._task.cancel()

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the stream of a retired multiplexer has ended, for at most `timeout_s`."""
        if self._task:
            await asyncio.wait([self._task], timeout=timeout_s)

    async def open(self) -> None:
        """Wait until the stream is open or an attempt has failed, for at most OPENING_TIMEOUT_S."""
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                await self._tried.wait()

    async def close(self) -> None:
        """Close the stream, which ends all of its calls."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def call(
        self, request: Request, timeout_s: float, metadata: Metadata, flow: FlowControl
    ) -> "StreamCall":
        """Start a call on the stream, which must be open."""
        assert self._stream, "the stream is not open"
        return self._stream.call(request, timeout_s, metadata, flow)

    async def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        last_reason = ""
        while not self._is_retired:
            was_opened = False
            try:
                stream = await self._open()
                was_opened = True
                await self._serve(stream)
            except StreamLost as lost:
                if self._is_retired:
                    return
                reason = str(lost)
                if was_opened or reason != last_reason:
                    extra = {"engine": self._address, "reason": reason}
                    log.info("stream to the engine lost", extra=extra)
                last_reason = reason
            except Exception:  # a bug here must not cut off a working engine
                log.exception("stream to the engine lost", extra={"engine": self._address})

            self._tried.set()
            backoff_s = FIRST_BACKOFF_S if was_opened else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _open(self) -> "_Stream":
        call = self._stub.Multiplex(wait_for_ready=True)
        try:
            await call.initial_metadata()
        except asyncio.CancelledError:
            call.cancel()  # it would wait for the engine as long as the channel is open
            raise
        if call.done():
            self.is_missing = await call.code() is grpc.StatusCode.UNIMPLEMENTED
            raise StreamLost(await call.details())
        self.is_missing = False
        return _Stream(call)

    async def _serve(self, stream: "_Stream") -> None:
        """Run calls on the stream until the stream ends.

        Raises:
            StreamLost: always, with the reason.
        """
        self._stream = None if self._is_retired else stream
        self._tried.set()
        try:
            self._on_change()
            await stream.run()
        finally:
            self._stream = None
            stream.break_off()
            self._on_change()


class _Stream:
    """An open stream to an engine, with its running calls and the messages yet to be sent."""

    def __init__(self, stream: grpc.aio.StreamStreamCall[Message, Response]) -> None:
        self._stream = stream
        self._calls: dict[int, StreamCall] = {}
        self._last_tag = 0
        self._outbox: deque[Message] = deque()
        self._batch_bytes = 0
        self._has_messages = asyncio.Event()
        self._is_retired = False

    def call(
        self, request: Request, timeout_s: float, metadata: Metadata, flow: FlowControl
    ) -> "StreamCall":
        """Start a call, which is sent along with the next message."""
        self._last_tag += 1
        tag = self._last_tag
        window = flow.responses * max(1, request.samples.n)  # tokens of two samples are not joined
        call = StreamCall(self, tag, timeout_s, flow, window)
        self._calls[tag] = call

        size = request.ByteSize() + CALL_BYTES
        self._batch_bytes += size
        if self._outbox and self._batch_bytes > MAX_BATCH_BYTES:
            self._batch_bytes = size
            self._outbox.append(Message())
        self._next_message().calls.add(
            tag=tag,
            request=request,
            timeout_ms=max(1, int(timeout_s * 1000)),
            metadata=dict(metadata),
            window=window,
            coalesce_ms=round(1000 * flow.coalesce_s),
            coalesce_tokens=flow.together,
        )
        return call

    def grant(self, tag: int, responses: int) -> None:
        """Allow the engine to send this many additional responses for a call."""
        if tag in self._calls:
            self._next_message().grants.add(tag=tag, responses=responses)

    def cancel(self, tag: int) -> None:
        """Cancel a call on the engine if the call is still running."""
        if self._calls.pop(tag, None):
            self._next_message().cancelled_tags.append(tag)
            self._close_if_done()

    def retire(self) -> None:
        """End the stream once its last call has finished."""
        self._is_retired = True
        self._close_if_done()

    def break_off(self) -> None:
        """Cancel the stream, and fail all of its calls with a ConnectionBroken error."""
        self._stream.cancel()
        loss = StreamLoss()
        for call in list(self._calls.values()):
            call.end(ConnectionBroken(loss))
        self._calls.clear()

    async def run(self) -> None:
        """Send and receive messages until the stream ends.

        Raises:
            StreamLost: always, with the reason.
        """
        sending = asyncio.create_task(self._send_all(), name="multiplex sender")
        # Without sending, reading must also end, since the engine would get no grants.
        sending.add_done_callback(lambda _: self._stream.cancel())

        try:
            while isinstance(answer := await self._stream.read(), Response):
                self._deliver(answer)
        except grpc.aio.AioRpcError as error:
            raise StreamLost(error.details() or error.code().name) from error
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            if sending.done() and (failure := sending.exception()):
                raise StreamLost(f"sending to the engine failed: {failure!r}") from failure
            # gRPC raises one exception for a cancellation by either side.
            raise StreamLost("the engine cancelled it") from error
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        raise StreamLost("the engine closed it")

    def _deliver(self, answer: Response) -> None:
        calls = self._calls
        for event in answer.events:
            tag = event.tag
            if tag not in calls:  # cancelled while the event was on its way
                continue
            response = event.response
            kind = response.WhichOneof("event")
            if kind is not None or event.HasField("response"):
                calls[tag].put(response, kind)
                if kind != "finished":
                    continue
            else:
                calls[tag].end(_error(event.status))
            del calls[tag]
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_retired and not self._calls:
            self._stream.cancel()

    async def _send_all(self) -> None:
        while True:
            await self._has_messages.wait()
            message = self._outbox.popleft()
            if not self._outbox:
                self._batch_bytes = 0
                self._has_messages.clear()
            await self._stream.write(message)

    def _next_message(self) -> Message:
        if not self._outbox:
            self._outbox.append(Message())
            self._has_messages.set()
        return self._outbox[-1]


class StreamCall(ReceiveBuffer):
    """A Generate call on a shared stream, with a time limit and a buffer for its responses."""

    def __init__(
        self, stream: _Stream, tag: int, timeout_s: float, flow: FlowControl, window: int
    ) -> None:
        super().__init__(flow, window, partial(stream.grant, tag))
        self._stream = stream
        self._tag = tag
        self._ends_at = self._loop.time() + timeout_s
        self._deadline = self._loop.call_later(min(timeout_s, flow.stall_s), self._check_time)

    def cancel(self) -> None:
        """Cancel the call on the engine."""
        self._deadline.cancel()
        self._stream.cancel(self._tag)

    def end(self, error: ServiceError | None = None) -> None:
        """Mark the end of the responses. Buffered responses can still be read."""
        self._deadline.cancel()
        super().end(error)

    def _check_time(self) -> None:
        """Fail the call if its time limit has passed or its reader has waited too long.

        Otherwise, schedule the next check for the earliest time at which the call could fail.
        Individual responses therefore need no timer.
        """
        now = self._loop.time()
        stalls_at = min(self._waiting_since, now) + self._flow.stall_s
        check_at = min(self._ends_at, stalls_at)
        if now < check_at:
            self._deadline = self._loop.call_at(check_at, self._check_time)
            return
        self._stream.cancel(self._tag)
        self.end(_late())


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error(status: bytes) -> ServiceError | None:
    """Return the error that a serialised gRPC status contains, or None if the status is OK."""
    parsed = status_pb2.Status.FromString(status)
    return from_status(parsed) if parsed.code else None


def _late() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the engine did not finish in time"
    )
