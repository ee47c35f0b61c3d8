"""One HTTP/1.1 connection: uvicorn's protocol, within bounds of time, size and memory."""

import asyncio
import enum
import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import head_too_large, internal, late, malformed
from ullage_router.http.heads import head_error, unknown_version
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import REFUSAL, ASGIApp, Headers, Message, Scope

MAX_PIPELINED = 16
"""Number of requests that wait for the reply to another, after which nothing more is parsed."""
PARSED_BYTES = 4 << 10
"""Bytes parsed at a time, so that few requests come out of what one read brought."""
WRITE_BUFFER_BYTES = 16 << 10
"""Bytes that one client may leave unread before its reply waits: here, and again in the kernel."""
STARTED_PER_TURN = 16
"""A thousand requests at once must not keep a turn of the event loop, and with it the tokens of
others and the engines' reports, for as long as all of them take."""
FRAMING_BYTES_PER_BYTE = 8
"""A chunk of one byte needs five others around it."""
EVENTS_PER_TURN = 1024
"""Headers and pieces of bodies that are taken from one connection before others have their turn."""
_UPGRADE = frozenset({b"connection", b"upgrade", b"http2-settings"})

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """What a client is to send next; CLOSED: what it sends is read and thrown away."""

    OPENED = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    IDLE = enum.auto()
    CLOSED = enum.auto()


class ConnectionState(ServerState):
    """The state that all connections of a server share.

    is_leaving
        responses ask clients to take another connection for their next request
    is_draining
        no connection is taken any more
    """

    def __init__(self, limits: HTTPLimits) -> None:
        super().__init__()
        self.limits = limits
        self.timeouts_s = {
            Phase.OPENED: limits.head_timeout_s,
            Phase.HEAD: limits.head_timeout_s,
            Phase.BODY: limits.body_timeout_s,
            Phase.IDLE: limits.idle_timeout_s,
            Phase.CLOSED: limits.linger_s,
        }
        self.is_leaving = False
        self.is_draining = False
        self._starts: deque[Callable[[], None]] = deque()

    def start_soon(self, start: Callable[[], None]) -> None:
        """Start a request after those before it, a few in each turn of the event loop."""
        self._starts.append(start)
        if len(self._starts) == 1:
            asyncio.get_running_loop().call_soon(self._start_some)

    def _start_some(self) -> None:
        try:
            for _ in range(min(STARTED_PER_TURN, len(self._starts))):
                self._starts.popleft()()
        finally:
            if self._starts:
                asyncio.get_running_loop().call_soon(self._start_some)


class Cycle(RequestResponseCycle):
    """A request and its reply.

    The head of a reply leaves with the first part of its body, and parts that come in one turn of
    the event loop leave together. Headers are those of this program, so uvicorn's two expressions
    for each of them are left out: 12 us a request.

    is_framed: whether the client understands chunks; HTTP/1.0 ends a body with the connection.
    """

    is_framed = True
    task: asyncio.Task[None] | None = None
    _head = b""
    _held = b""
    """Parts that leave at the end of this turn."""
    _is_flush_due = False

    async def run_asgi(self, app: ASGIApp) -> None:  # type: ignore[override]
        self.task = asyncio.current_task()
        # Replies to a pipeline of requests that nobody reads would fill the memory.
        await self.flow.drain()
        if not self.disconnected:
            await super().run_asgi(app)  # type: ignore[arg-type]

    async def send(self, message: Message) -> None:  # type: ignore[override]
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._head = self._make_head(message["status"], message["headers"])
            self.response_started = True
            self.waiting_for_100_continue = False
            return
        body = message["body"]
        has_more = message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            body = b""
        elif self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body += b"" if has_more else b"0\r\n\r\n"
        data = self._held + self._head + body
        self._head = self._held = b""
        if has_more and len(data) < WRITE_BUFFER_BYTES:
            self._held = data
            if not self._is_flush_due:
                self._is_flush_due = True
                asyncio.get_running_loop().call_soon(self._flush)
            return
        if data:
            self.transport.write(data)
        if not has_more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _flush(self) -> None:
        self._is_flush_due = False
        data = self._held
        self._held = b""
        if data and not self.disconnected:
            self.transport.write(data)

    def _make_head(self, status: int, headers: Headers) -> bytes:
        lines = [b"%b: %b\r\n" % pair for pair in (*self.default_headers, *headers)]
        if (b"connection", b"close") in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        has_length = any(name == b"content-length" for name, _ in headers)
        self.chunked_encoding = self.is_framed and not has_length
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        if head.count(b"\n") != len(lines) + 2:
            raise ValueError(f"a header has a line break: {head!r}")
        return head


class Flow(FlowControl):
    """Reads on only where all that was read is parsed.

    uvicorn reads on with each reply to a pipeline, and each read brings up to 256 KiB of requests.
    """

    unparsed = b""

    def resume_reading(self) -> None:
        if not self.unparsed:
            super().resume_reading()


class HTTPConnection(HttpToolsProtocol):
    """Adds to uvicorn's protocol: bounds, time limits, refusals in their order, cancellation.

    Cycles write to it and close it as if it were their transport, so that it knows what clients
    have taken, and how a connection must be closed.
    """

    flow: Flow
    cycle: Cycle

    def __init__(
        self,
        config: Config,
        server_state: ConnectionState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared = server_state
        self._limits = server_state.limits
        self._answered: Cycle | None = None
        """The cycle that is being answered, or about to be."""
        self._opened = self.loop.time()
        self._phase = Phase.OPENED
        self._phase_began = self._opened
        """Begins anew with the reply to the request before."""
        self._ticked_at = self._opened
        self._budget = self._limits.max_head_bytes
        """Bytes that may come before the head ends, or before more of the body does."""
        self._num_events = 0
        """Number of headers and pieces of bodies in this turn of the event loop."""
        self._is_closing = False
        self._written_bytes = 0
        self._sent_bytes = 0
        self._sent_at = self._opened

    # The event loop's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if self._shared.is_draining or len(self.connections) >= self._limits.max_connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        _tune(transport.get_extra_info("socket"))
        super().connection_made(transport)
        self.flow = Flow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is None:  # it was not let in
            return
        self._discard()
        self.pipeline.clear()
        if self._answered:
            self._answered.disconnected = True
        super().connection_lost(exc)
        # uvicorn tells only an application that waits for it, in a task more for each request.
        if self._answered and self._answered.task:
            self._answered.task.cancel()
        # uvicorn's cycles refer to this connection. References back would keep both, with the
        # bodies, until the garbage collector runs, which stops every request.
        self._answered = None
        self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.flow.unparsed:  # reading stops one read late under TLS
            self.flow.unparsed += data
        else:
            self._parse(data)

    # The server's calls.

    def leave(self) -> None:
        """Closes after the next reply, which says so, and not under a request on its way."""
        if self._answered:
            self._answered.keep_alive = False

    def shutdown(self) -> None:
        """Close the connection, after the reply that is being given."""
        self.leave()
        is_quiet = self._phase in (Phase.OPENED, Phase.IDLE) and not self.flow.unparsed
        if is_quiet and not self._answered:
            self.close()

    def abort(self) -> None:
        self.transport.abort()

    def tick(self, now: float) -> None:
        """End all that is past its time limit."""
        unsent_bytes = self.transport.get_write_buffer_size()
        sent_bytes = self._written_bytes - unsent_bytes
        # Replies to what it goes on sending are no sign that a client reads.
        if sent_bytes != self._sent_bytes or not unsent_bytes:
            self._sent_bytes = sent_bytes
            self._sent_at = now
        if now - self._sent_at >= self._limits.stall_timeout_s:
            log.info("client does not read", extra={"unsent_bytes": unsent_bytes})
            self.abort()
            return
        is_body = self._phase is Phase.BODY
        if is_body and self.flow.read_paused:  # the body waits here, and not for its client
            self._phase_began += now - max(self._ticked_at, self._phase_began)
        self._ticked_at = now
        if self._answered and not (is_body and self._answered is self.cycle):
            return
        if now - self._phase_began < self._shared.timeouts_s[self._phase]:
            return
        if is_body:
            self._refuse(late("body", self._limits.body_timeout_s))
        elif self._phase is Phase.HEAD:
            self._refuse(late("request's head", self._limits.head_timeout_s))
        elif self._phase is Phase.CLOSED:
            self.transport.close()
        else:
            self.close()

    # A cycle's calls.

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        cycle = self._answered
        if cycle and cycle.response_started and not cycle.response_complete:
            self.abort()  # a part must not be taken for the whole
            return
        self._is_closing = True
        if self._phase not in (Phase.BODY, Phase.CLOSED):
            self.transport.close()
        # The kernel resets a connection that is closed on bytes that nobody read, and a client
        # that still sends loses the reply on its way.
        self._discard()
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._answered = None
        if self._is_closing:
            return
        self._phase_began = self.loop.time()
        if self.pipeline:
            self._answer(cast(Cycle, self.pipeline.pop()[0]))
        if self.flow.read_paused:
            self.loop.call_soon(self._parse_on)

    # From bytes to requests.

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_began = self.loop.time()

    def _discard(self) -> None:
        self._enter(Phase.CLOSED)
        self.flow.unparsed = b""

    def _parse_on(self) -> None:
        if not self._is_closing:
            self._parse(self.flow.unparsed)

    def _parse(self, data: bytes) -> None:
        """Parse until too many requests wait or the turn has had its share; keep the rest, and read
        nothing more."""
        start = 0
        step = min(PARSED_BYTES, self._limits.max_head_bytes)
        self._num_events = 0
        while start < len(data) and len(self.pipeline) < MAX_PIPELINED:
            if self._phase is Phase.CLOSED:
                return
            if self._num_events >= EVENTS_PER_TURN:
                self.loop.call_soon(self._parse_on)
                break
            start += self._feed(data[start : start + step])
        self.flow.unparsed = data[start:]
        if self.flow.unparsed:
            self.flow.pause_reading()
        elif self._phase is not Phase.BODY or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _feed(self, data: bytes) -> int:
        """Parse some bytes; how many."""
        self._budget -= len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._phase is not Phase.CLOSED:
                self._withdraw_upgrade()
            return int(upgrade.args[0])
        except httptools.HttpParserCallbackError:
            log.exception("a request's head could not be read")
            self._refuse(internal())
        except httptools.HttpParserError as error:
            is_http2 = "PRI" in str(error)  # a client that knows the server to speak HTTP/2
            self._refuse(unknown_version("2") if is_http2 else malformed(str(error)))
        if self._budget < 0:
            if self._phase is Phase.HEAD:
                self._refuse(head_too_large(self._limits.max_head_bytes, self._limits.max_headers))
            elif self._phase is Phase.BODY:
                self._refuse(malformed("its chunks are mostly framing"))
        return len(data)

    def _withdraw_upgrade(self) -> None:
        """Parse a head again without its offer to speak another protocol.

        The parser takes what follows such a head for that protocol, also the body of a client that
        only offers HTTP/2, as Java's does.
        """
        method = self.parser.get_method()
        version = self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(malformed("it asks for a tunnel"))
            return
        lines = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in _UPGRADE]
        if any(n == b"connection" and b"close" in value.lower() for n, value in self.headers):
            lines.append(b"connection: close\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines)))

    def on_message_begin(self) -> None:
        if self._phase is not Phase.CLOSED:
            super().on_message_begin()
            self._enter(Phase.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header of a head; drop a trailer, which follows a body's last chunk.

        Neither this server nor a proxy checks trailers as it checks heads. The first header above
        the limit is kept, so that the head is refused.
        """
        self._num_events += 1
        if self._phase is Phase.HEAD and len(self.headers) <= self._limits.max_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._phase is Phase.CLOSED:
            return
        version = self.parser.get_http_version()
        scope = cast(Scope, self.scope)
        scope["method"] = self.parser.get_method().decode("latin-1")
        if error := self._head_error(version):
            self._refuse(error)
            return
        if self.parser.should_upgrade():  # comes again without the offer
            return
        url = self.url
        if not url.startswith(b"/") and url != b"*":  # with a scheme and a host
            try:
                url = httptools.parse_url(url).path or b"/"
            except httptools.HttpParserInvalidURLError:
                self._refuse(malformed("its address cannot be read"))
                return
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("ascii")
        scope["http_version"] = version
        scope["raw_path"] = raw_path
        scope["path"] = unquote(path) if "%" in path else path
        scope["query_string"] = query
        is_framed = version == "1.1"
        is_old = self.loop.time() - self._opened > self._limits.max_age_s
        is_ending = is_old or self._shared.is_leaving or not self.parser.should_keep_alive()
        cycle = self._new_cycle(is_framed and not is_ending)
        cycle.is_framed = is_framed
        cycle.waiting_for_100_continue = is_framed and self.expect_100_continue
        self._budget = self._limits.max_head_bytes
        self._enter(Phase.BODY)

    def _head_error(self, version: str) -> ServiceError | None:
        limits = self._limits
        headers = self.headers
        size = len(self.url)
        if self._budget < 0:  # else it came in few bytes
            size += sum(len(name) + len(value) for name, value in headers)
        if size > limits.max_head_bytes or len(headers) > limits.max_headers:
            return head_too_large(limits.max_head_bytes, limits.max_headers)
        return head_error(version, headers)

    def on_body(self, body: bytes) -> None:
        self._num_events += 1
        if self._phase is Phase.BODY:
            # Framing is paid by the piece before it, and trailers, which are kept until they end,
            # by none.
            budget = self._budget + FRAMING_BYTES_PER_BYTE * len(body)
            self._budget = min(budget, self._limits.max_head_bytes)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase is Phase.BODY:
            self._budget = self._limits.max_head_bytes
            self._enter(Phase.IDLE)
            super().on_message_complete()

    # From requests to replies.

    def _new_cycle(self, is_kept_alive: bool) -> Cycle:
        """Has the request whose head was parsed last answered, after those before it."""
        self.cycle = cycle = Cycle(
            scope=self.scope,
            transport=cast(asyncio.Transport, self),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=is_kept_alive,
            on_response=self.on_response_complete,
        )
        if self._answered:
            self.pipeline.appendleft((cycle, self.app))
        else:
            self._answer(cycle)
        return cycle

    def _refuse(self, error: ServiceError) -> None:
        """Has the application answer with an error, in its turn, and reads no further."""
        phase = self._phase
        if phase is Phase.CLOSED:
            return
        self._discard()
        if phase is not Phase.BODY:
            if phase is not Phase.HEAD:
                super().on_message_begin()
            scope = cast(Scope, self.scope)
            scope.setdefault("method", "GET")
            scope["path"] = ""
            self._new_cycle(is_kept_alive=False)
        cast(Scope, self.cycle.scope)[REFUSAL] = error
        self.cycle.keep_alive = self.cycle.more_body = False
        self.cycle.message_event.set()
        if self.cycle.response_complete:
            self.close()

    def _answer(self, cycle: Cycle) -> None:
        self._answered = cycle
        self._shared.start_soon(partial(self._start, cycle))

    def _start(self, cycle: Cycle) -> None:
        if not cycle.disconnected:
            if self._shared.is_leaving:
                cycle.keep_alive = False
            self._start_asgi_task(cycle, self.app)


def _tune(sock: socket.socket) -> None:
    """Tokens leave at once, and what a client does not read stays here, where it is bounded."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
