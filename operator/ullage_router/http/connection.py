"""One HTTP/1.1 connection: its requests are answered one after another, in their order."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from ullage_router.http.messages import Reply, Request
from ullage_router.http.reader import BodyRoom, Limits, Phase, RequestReader
from ullage_rpc.errors import ServiceError

# A client that sends requests without waiting for answers is read no further than this.
MAX_PIPELINED = 16
# What one client may leave unread before its answer waits: here, and again in the kernel.
WRITE_BUFFER_BYTES = 16 << 10
# A thousand requests at once must not keep a turn of the event loop, and with it the tokens of
# others and the engines' reports, for as long as all of them take.
BEGUN_PER_TURN = 16

log = logging.getLogger(__name__)


class Handler(Protocol):
    """Answers requests."""

    async def serve(self, request: Request, reply: Reply) -> None:
        """Cancelled when the client goes."""

    def check(self, request: Request) -> None:
        """Raises ServiceError when a request whose head arrived need not send its body."""

    def refuse(self, request: Request, reply: Reply, error: ServiceError) -> None:
        """Answers what could not be read as a request."""


@dataclass(slots=True)
class Hub:
    """What all connections of a server share."""

    handler: Handler
    limits: Limits
    connections: set["Connection"] = field(default_factory=set)
    is_leaving: bool = False
    """Clients are told to take another connection for their next request."""
    is_draining: bool = False
    """No connection is taken any more."""
    common_headers: bytes = b""
    room: BodyRoom = field(init=False)
    _to_begin: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.room = BodyRoom(self.limits.max_held_bytes)

    def begin(self, start: Callable[[], None]) -> None:
        """Has a request begun, after those before it, a few in each turn of the event loop."""
        self._to_begin.append(start)
        if len(self._to_begin) == 1:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for _ in range(min(BEGUN_PER_TURN, len(self._to_begin))):
            self._to_begin.popleft()()
        if self._to_begin:
            asyncio.get_running_loop().call_soon(self._begin_some)


class Connection(asyncio.Protocol):
    """Reads requests, has them answered and notices when the client goes.

    deadline: when `expire` is due, on the event loop's clock; None while a request is answered.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(hub.limits, hub.room, self._received)
        self._waiting: deque[tuple[Request, ServiceError | None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_busy = False
        """A request is being answered, or about to be."""
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._unflushed: list[bytes] = []
        self._unflushed_bytes = 0
        self._unsent = 0
        self._unsent_since = 0.0
        self._is_reading = True
        self.deadline: float | None = None
        self.is_closing = False

    @property
    def common_headers(self) -> bytes:
        return self._hub.common_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        hub = self._hub
        if len(hub.connections) >= hub.limits.max_connections or hub.is_draining:
            transport.abort()
            return
        self.is_closing = hub.is_leaving
        hub.connections.add(self)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        _tune(transport.get_extra_info("socket"))
        self.deadline = self._loop.time() + hub.limits.head_timeout_s

    def data_received(self, data: bytes) -> None:
        if not self._is_reading:  # what follows a refused request
            return
        before = self._reader.phase
        error = self._reader.feed(data)
        if error is None and before is not Phase.BODY and self._reader.phase is Phase.BODY:
            error = self._welcome(self._reader.request)
        if error is not None:
            self._refuse(error)
        self._set_deadline(before)
        self._next()
        if len(self._waiting) > MAX_PIPELINED and self._transport:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.is_closing = True
        self._reader.drop()
        self._hub.room.give_back(sum(len(r.body) for r, error in self._waiting if error is None))
        self._waiting.clear()
        self._release()
        if self._task:
            self._task.cancel()
        elif not self._is_busy:
            self._hub.connections.discard(self)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        self._release()

    @property
    def is_full(self) -> bool:
        return self._drained is not None

    def write(self, data: bytes) -> None:
        """Sends at the end of this turn of the event loop, together with what else is written in
        it; nothing when the client has gone."""
        if not self._unflushed:
            self._loop.call_soon(self._flush)
        self._unflushed.append(data)
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes > WRITE_BUFFER_BYTES:  # so that `drain` sees it
            self._flush()

    def _flush(self) -> None:
        pieces, self._unflushed, self._unflushed_bytes = self._unflushed, [], 0
        if pieces and self._transport:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    async def drain(self) -> None:
        """Waits until the client has taken most of what it was sent."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def leave(self) -> None:
        """Closes after the next answer, which says so, and not under a request on its way."""
        self.is_closing = True

    def retire(self) -> None:
        """Closes the connection, after the answer that is being given."""
        self.is_closing = True
        if not self._is_busy and self._reader.phase is Phase.IDLE:
            self.close()

    def close(self) -> None:
        """Sends what was written and closes."""
        self._flush()
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()

    def tick(self, now: float) -> None:
        """Ends what takes too long."""
        if self._has_stalled(now):
            log.info("client does not read", extra={"unsent_bytes": self._unsent})
            self.abort()
        elif self.deadline is not None and now >= self.deadline:
            self._expire()

    def _has_stalled(self, now: float) -> bool:
        unsent = self._transport.get_write_buffer_size() if self._transport else 0
        if unsent != self._unsent or not unsent:
            self._unsent, self._unsent_since = unsent, now
        return now - self._unsent_since >= self._hub.limits.stall_timeout_s

    def _expire(self) -> None:
        self.deadline = None
        if self._is_reading and self._reader.phase is not Phase.IDLE:
            self._refuse(self._reader.late())
            self._next()
        else:
            self.close()

    def _set_deadline(self, before: Phase) -> None:
        """Times each phase from its beginning: bytes that trickle in win no time.

        A request that comes while another is answered has its time afterwards.
        """
        phase = self._reader.phase
        if not (self._is_busy or phase is Phase.IDLE or phase is before):
            self.deadline = self._loop.time() + self._span_s(phase)

    def _span_s(self, phase: Phase) -> float:
        limits = self._hub.limits
        return {
            Phase.IDLE: limits.idle_timeout_s,
            Phase.HEAD: limits.head_timeout_s,
            Phase.BODY: limits.body_timeout_s,
        }[phase]

    def _refuse(self, error: ServiceError) -> None:
        """Reads no further; the client is told when those before it were answered."""
        self._is_reading = False
        self._reader.drop()
        self._waiting.append((self._reader.request, error))

    def _received(self, request: Request) -> None:
        self._waiting.append((request, None))

    def _welcome(self, request: Request) -> ServiceError | None:
        """What is wrong with a request whose body is still to come."""
        try:
            self._hub.handler.check(request)
        except ServiceError as error:
            return error
        if request.expects_leave and not self._is_busy and not self._waiting:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _next(self) -> None:
        """Begins with the next request where none is being answered."""
        if self._is_busy or not self._waiting:
            return
        request, error = self._waiting.popleft()
        reply = Reply(self, request)
        if error is None:
            self.deadline = None
            self._is_busy = True
            self._hub.begin(lambda: self._begin(request, reply))
        else:
            reply.is_kept_alive = False
            self._hub.handler.refuse(request, reply, error)
            self._linger()

    def _begin(self, request: Request, reply: Reply) -> None:
        self._hub.room.give_back(len(request.body))
        if self._transport:
            self._task = self._loop.create_task(self._serve(request, reply))
        else:  # the client went while its request waited
            self._is_busy = False
            self._hub.connections.discard(self)

    def _linger(self) -> None:
        """Closes when the client has had time to read what it was told."""
        self.is_closing = True
        self._is_reading = False
        self.deadline = self._loop.time() + self._hub.limits.linger_s

    async def _serve(self, request: Request, reply: Reply) -> None:
        try:
            await self._hub.handler.serve(request, reply)
        except asyncio.CancelledError:
            pass  # the client has gone, or the server ends: there is nobody to tell
        except Exception:
            log.exception("request failed", extra={"path": request.path})
        finally:
            self._task = None
            self._is_busy = False
            self._served(reply)

    def _served(self, reply: Reply) -> None:
        if self._transport is None:
            self._hub.connections.discard(self)
        elif not reply.is_complete:  # the client must not take a part for the whole
            self._transport.abort()
        elif not reply.is_kept_alive or self.is_closing:
            self.close()
        else:
            self._go_on()

    def _go_on(self) -> None:
        assert self._transport
        self.deadline = self._loop.time() + self._span_s(self._reader.phase)
        if len(self._waiting) <= MAX_PIPELINED and not self._transport.is_reading():
            self._transport.resume_reading()
        self._next()

    def _release(self) -> None:
        drained, self._drained = self._drained, None
        if drained and not drained.done():
            drained.set_result(None)


def _tune(sock: socket.socket) -> None:
    """Tokens leave at once, and what a client does not read stays here, where it is bounded."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
