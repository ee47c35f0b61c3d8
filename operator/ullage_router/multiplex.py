"""One stream to an engine that carries all calls to it; plain calls where an engine has none.

A gRPC call costs a Python process several hundred microseconds whatever it carries. On one
stream the requests, cancellations and tokens of many calls that are there at one moment share a
message. Calls stay apart: each has its tag, its time limit and its window, so that a slow reader
holds up only itself, and the loss of the stream reaches each as the loss of its own call would.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine

import grpc
from google.rpc import status_pb2

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_router.answer import read
from ullage_router.flow import Buffer, Event, Flow
from ullage_rpc.errors import ServiceError, from_status

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
OPENING_TIMEOUT_S = 5.0
# A message is full with so much, or with one request: less than the longest that gRPC takes.
MAX_BATCH_BYTES = 4 << 20

Request = inference_pb2.GenerateRequest
Message = inference_pb2.MultiplexRequest
Answer = inference_pb2.MultiplexResponse
Metadata = tuple[tuple[str, str], ...]

log = logging.getLogger(__name__)


class Lost(Exception):
    """The stream ended; the message says why."""


class Multiplexer:
    """The stream to one engine, opened again whenever it is lost.

    Args:
        stub: of the engine.
        address: of the engine, for logs.
    """

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub, address: str) -> None:
        self._stub = stub
        self._address = address
        self._line: _Line | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._is_retired = False

    @property
    def is_open(self) -> bool:
        """Calls can be begun."""
        return self._line is not None

    def start(self) -> None:
        """Opens the stream as soon as the engine can be reached."""
        if self._task is None or self._task.done():
            self._tried.clear()
            self._task = asyncio.create_task(self._keep(), name=f"multiplex {self._address}")

    def retire(self) -> None:
        """Begins no more calls and ends with those it has."""
        self._is_retired = True
        if self._line:
            self._line.retire()
            self._line = None

    async def open(self) -> None:
        """Returns when the stream is open, or the engine turned out to have none."""
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                await self._tried.wait()

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def call(self, request: Request, timeout_s: float, metadata: Metadata, flow: Flow) -> "Tagged":
        """Begins a call; the stream must be open."""
        assert self._line, "the stream is not open"
        return self._line.call(request, timeout_s, metadata, flow)

    async def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._is_retired:
            try:
                if not await self._follow():
                    return
                backoff_s = FIRST_BACKOFF_S
            except Lost as lost:
                extra = {"engine": self._address, "reason": str(lost)}
                log.info("stream to the engine lost", extra=extra)
            except Exception:  # a bug here must not end the way to a working engine
                log.exception("stream to the engine lost", extra={"engine": self._address})
            self._tried.set()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _follow(self) -> bool:
        """Serves one stream to its end; False when the engine has no such streams."""
        stream = self._stub.Multiplex(wait_for_ready=True)
        await stream.initial_metadata()
        if stream.done():
            if await stream.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise Lost(await stream.details())
            self._tried.set()
            return False
        line = _Line(stream)
        self._line = None if self._is_retired else line
        self._tried.set()
        try:
            await line.run()
        finally:
            self._line = None
            stream.cancel()
            line.break_off()
        return True


class _Line:
    """One stream as long as it lives."""

    def __init__(self, stream: grpc.aio.StreamStreamCall[Message, Answer]) -> None:
        self._stream = stream
        self._calls: dict[int, Tagged] = {}
        self._last_tag = 0
        self._outbox: deque[Message] = deque()
        self._batch_bytes = 0
        self._has_news = asyncio.Event()
        self._is_retired = False

    def call(self, request: Request, timeout_s: float, metadata: Metadata, flow: Flow) -> "Tagged":
        self._last_tag += 1
        tag = self._last_tag
        window = flow.responses * max(1, request.samples.n)  # samples are not joined
        call = Tagged(self, tag, timeout_s, flow, window)
        self._calls[tag] = call
        size = request.ByteSize()
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
        if tag in self._calls:
            self._next_message().grants.add(tag=tag, responses=responses)

    def cancel(self, tag: int) -> None:
        if self._calls.pop(tag, None):
            self._next_message().cancelled_tags.append(tag)
            self._close_if_done()

    def retire(self) -> None:
        """Ends with the last of its calls."""
        self._is_retired = True
        self._close_if_done()

    def break_off(self) -> None:
        """Every call ends as one whose connection broke."""
        for call in list(self._calls.values()):
            call.end(_broken())
        self._calls.clear()

    async def run(self) -> None:
        """Raises Lost when the stream ends."""
        sending = asyncio.create_task(self._send_all(), name="multiplex sender")
        try:
            while isinstance(answer := await self._stream.read(), Answer):
                self._deliver(answer)
        except grpc.aio.AioRpcError as error:
            raise Lost(error.details() or error.code().name) from error
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            raise Lost("the engine cancelled it") from error  # gRPC says both with one exception
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        raise Lost("the engine closed it")

    def _deliver(self, answer: Answer) -> None:
        calls = self._calls
        for event in answer.events:
            tag = event.tag
            if tag not in calls:  # cancelled while this was under way
                continue
            response = event.response
            kind = response.WhichOneof("event")
            if kind is not None or event.HasField("response"):
                calls[tag].buffer.put(response, kind)
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
            await self._has_news.wait()
            self._batch_bytes = 0
            message = self._outbox.popleft()
            if not self._outbox:
                self._has_news.clear()
            await self._stream.write(message)

    def _next_message(self) -> Message:
        if not self._outbox:
            self._outbox.append(Message())
            self._has_news.set()
        return self._outbox[-1]


class Tagged:
    """A call on a stream."""

    def __init__(self, line: _Line, tag: int, timeout_s: float, flow: Flow, window: int) -> None:
        self._line = line
        self._tag = tag
        self.buffer = Buffer(flow, window, self._grant)
        """What came and was not read."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._expire)

    def read(self) -> Coroutine[None, None, Event | None]:
        return self.buffer.read()

    def cancel(self) -> None:
        self._timer.cancel()
        self._line.cancel(self._tag)

    def end(self, error: ServiceError | None) -> None:
        self._timer.cancel()
        self.buffer.end(error)

    def _grant(self, responses: int) -> None:
        self._line.grant(self._tag, responses)

    def _expire(self) -> None:
        self._line.cancel(self._tag)
        self.buffer.end(_late())


class Plain:
    """A Generate call of its own, read ahead as far as its window allows."""

    def __init__(self, stream: grpc.aio.UnaryStreamCall[Request, Event], flow: Flow) -> None:
        self._stream = stream
        self._room = asyncio.Semaphore(flow.window)
        self._buffer = Buffer(flow, flow.window, self._grant)
        self._task = asyncio.create_task(self._pump())

    def read(self) -> Coroutine[None, None, Event | None]:
        return self._buffer.read()

    def cancel(self) -> None:
        self._stream.cancel()
        self._task.cancel()

    def end(self, error: ServiceError) -> None:
        self._buffer.end(error)

    async def _pump(self) -> None:
        try:
            while True:
                await self._room.acquire()
                event = await read(self._stream)
                if event is None:
                    break
                self._buffer.put(event, event.WhichOneof("event"))
            self._buffer.end()
        except ServiceError as error:
            self._buffer.end(error)
        except BaseException:  # its channel was closed, or there is a bug: the reader must be told
            self._buffer.end(_broken())
            raise

    def _grant(self, responses: int) -> None:
        for _ in range(responses):
            self._room.release()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error(status: bytes) -> ServiceError | None:
    """None: the call ended without a last word and without an error."""
    told = status_pb2.Status.FromString(status)
    return from_status(told) if told.code else None


def _broken() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "the connection to the engine broke"
    )


def _late() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the engine was not done in time"
    )
