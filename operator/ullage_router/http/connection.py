"""Extends uvicorn's HTTP/1.1 connection with limits on time, size and memory."""

import asyncio
import enum
import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast
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
from ullage_router.errors import head_too_large, internal, late, malformed, slow_upload
from ullage_router.http.heads import head_error, unknown_version
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import (
    REFUSAL,
    SWITCH,
    UPLOAD,
    ASGIApp,
    Headers,
    Message,
    Scope,
)

MAX_PIPELINED = 16
"""Number of pipelined requests that may wait for earlier replies before parsing stops."""
PARSED_BYTES = 4 << 10
"""Maximum bytes passed to the parser at a time. More bytes could contain many requests."""
WRITE_BUFFER_BYTES = 16 << 10
"""Number of unsent reply bytes above which a sender waits until the client has read more.

This process and the kernel may each buffer this many bytes.
"""
STARTED_PER_TURN = 16
"""Maximum number of requests that start in one iteration of the event loop.

Starting a thousand requests at once would delay other requests' tokens and the engines' reports.
"""
FRAMES_PER_TURN = 64
"""Number of frames of all WebSockets that are parsed in one iteration of the event loop.

A frame takes about 25 us.
"""
FRAMING_BYTES_PER_BYTE = 8
"""Allowed bytes of chunk framing per byte of body. A one-byte chunk has five bytes of framing."""
EVENTS_PER_TURN = 1024
"""Maximum number of headers and body chunks parsed per connection and event loop iteration."""
_UPGRADE = frozenset({b"connection", b"upgrade", b"http2-settings"})

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """What the client is expected to send next. In CLOSED, received bytes are discarded."""

    OPENED = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    IDLE = enum.auto()
    CLOSED = enum.auto()


class ServedConnection(Protocol):
    """A client's connection, as the server sees it."""

    def leave(self) -> None:
        """Close the connection soon, after the answer to the current request."""

    def shutdown(self) -> None:
        """Close the connection, after the answer to the current request."""

    def abort(self) -> None:
        """Close the connection immediately, and discard unsent bytes."""

    def tick(self, now: float) -> None:
        """Enforce the connection's time limits at this time of the event loop."""


class UnsentBytes:
    """Measures for how long a client has read nothing of the bytes written to its connection.

    Args:
        now: The event loop's time.
    """

    def __init__(self, now: float) -> None:
        self._written_bytes = 0
        """Total number of bytes written to the connection."""
        self._sent_bytes = 0
        """Number of written bytes that the kernel had accepted at the last look."""
        self._sent_at = now
        """Time of the last look that saw progress: bytes were sent, or none were left to send."""

    def count(self, num_bytes: int) -> None:
        """Count bytes that are written to the connection."""
        self._written_bytes += num_bytes

    def stalled_s(self, unsent_bytes: int, now: float) -> float:
        """Return the seconds for which the client has read nothing.

        Only sent bytes show that a client reads. Further requests do not.

        Args:
            unsent_bytes: Number of written bytes that the kernel has not accepted yet.
            now: The event loop's time.
        """
        sent_bytes = self._written_bytes - unsent_bytes
        if sent_bytes != self._sent_bytes or not unsent_bytes:
            self._sent_bytes = sent_bytes
            self._sent_at = now
        return now - self._sent_at


class CallQueue:
    """Runs calls in their order, with a limited amount of work per event loop iteration.

    Args:
        most: Amount of work after which the next call waits for the next iteration.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: deque[Callable[[], int]] = deque()
        self._is_due = False

    def add(self, call: Callable[[], int]) -> None:
        """Schedule a call, which returns the amount of its work, after all earlier calls."""
        self._calls.append(call)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_due = False
        work = 0
        try:
            while self._calls and work < self._most:
                work += self._calls.popleft()()
        finally:
            if self._calls:
                self._schedule()


class ConnectionState(ServerState):
    """The state shared by all of a server's connections.

    Attributes:
        limits: The limits on connections.
        timeouts_s: Seconds that each phase of a connection may take.
        is_leaving: Whether responses tell clients to use a new connection for the next request.
        is_draining: Whether new connections are refused.
        starts: Calls that start requests. The work is the number of requests.
        frames: Calls that parse frames of WebSockets. The work is the number of frames.
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
        self.starts = CallQueue(STARTED_PER_TURN)
        self.frames = CallQueue(FRAMES_PER_TURN)


class Cycle(RequestResponseCycle):
    """Handles one HTTP request and writes its reply, in place of uvicorn's own class.

    A reply's headers are sent together with the first part of the body. Parts of the body that are
    written in the same event loop iteration are combined. All headers are written by this program,
    so the two regular expressions that uvicorn checks on each header are skipped. This saves 12 us
    per request.
    """

    is_framed = True
    """Whether the client supports chunked bodies.

    HTTP/1.0 clients do not, so the end of the body is marked by closing the connection.
    """
    task: asyncio.Task[None] | None = None
    _head = b""
    _held = b""
    """Parts of the reply that are sent at the end of this event loop iteration."""
    _is_flush_due = False

    async def run_asgi(self, app: ASGIApp) -> None:  # type: ignore[override]
        """Run the application once the client has read the connection's earlier replies."""
        self.task = asyncio.current_task()
        # Without this wait, unread replies to pipelined requests would fill the memory.
        await self.flow.drain()
        if not self.disconnected:
            await super().run_asgi(app)  # type: ignore[arg-type]

    async def send(self, message: Message) -> None:  # type: ignore[override]
        """Write the application's ASGI message to the connection."""
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
            # A line break in a value would let the value add headers.
            raise ValueError(f"a header has a line break: {head!r}")
        return head


class Flow(FlowControl):
    """Flow control that resumes reading only after all received bytes are parsed.

    uvicorn's own flow control would resume reading after each reply to a pipelined request, and
    each read may return another 256 KiB of requests.
    """

    unparsed = b""
    """Bytes that were received but not yet parsed."""

    def resume_reading(self) -> None:
        """Resume reading, unless there are unparsed bytes."""
        if not self.unparsed:
            super().resume_reading()


class HTTPConnection(HttpToolsProtocol):
    """A client's HTTP/1.1 connection, which adds limits on size and time to uvicorn's protocol.

    Error replies are sent in the order of the requests, and the running request is cancelled if the
    client disconnects. Each request is answered by a `Cycle`, which writes through the connection
    instead of the socket. The connection therefore knows how many bytes the client has read, and
    can close without losing a reply.
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
        """The request that is being answered, or the next one to be answered."""

        self._opened = self.loop.time()
        self._phase = Phase.OPENED
        self._phase_began = self._opened
        """Time at which the current phase began. Reset when the previous reply ends."""
        self._ticked_at = self._opened

        self._budget = self._limits.max_head_bytes
        """Bytes of headers or chunk framing that may still arrive before the request is refused."""
        self._num_events = 0
        """Number of headers and body chunks parsed in this event loop iteration."""

        self._is_closing = False
        self._unsent = UnsentBytes(self._opened)

    # The event loop's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or abort it if too many connections are open."""
        transport = cast(asyncio.Transport, transport)
        if self._shared.is_draining or len(self.connections) >= self._limits.max_connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        _tune(transport.get_extra_info("socket"))
        super().connection_made(transport)
        self.flow = Flow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request that is being answered, and drop all other requests."""
        if self.transport is None:  # the connection was refused
            return

        self._discard()
        self.pipeline.clear()
        if self._answered:
            self._answered.disconnected = True
        super().connection_lost(exc)

        # uvicorn only notifies an application that waits for the disconnect, which takes another
        # task for each request. Cancellation needs no task.
        if self._answered and self._answered.task:
            self._answered.task.cancel()

        self._unlink()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or buffer them while reading is paused."""
        if self.flow.unparsed:  # under TLS, reading stops one read late
            self.flow.unparsed += data
        else:
            self._parse(data)

    # The server's calls.

    def leave(self) -> None:
        """Close the connection after the next reply, which carries `connection: close`.

        An idle connection stays open, because a request may already be in transit.
        """
        if self._answered:
            self._answered.keep_alive = False

    def shutdown(self) -> None:
        """Close the connection after the current reply."""
        self.leave()
        is_quiet = self._phase in (Phase.OPENED, Phase.IDLE) and not self.flow.unparsed
        if is_quiet and not self._answered:
            self.close()

    def abort(self) -> None:
        """Close the connection immediately, and discard unsent bytes."""
        self.transport.abort()

    def tick(self, now: float) -> None:
        """Enforce the connection's time limits.

        Args:
            now: The event loop's time.
        """
        unsent_bytes = self.transport.get_write_buffer_size()
        if self._unsent.stalled_s(unsent_bytes, now) >= self._limits.stall_timeout_s:
            log.info("client does not read", extra={"unsent_bytes": unsent_bytes})
            self.abort()
            return

        is_body = self._phase is Phase.BODY
        if is_body and self.flow.read_paused:  # the server is slow, not the client: stop the clock
            self._phase_began += now - max(self._ticked_at, self._phase_began)
        self._ticked_at = now

        if self._answered and not (is_body and self._answered is self.cycle):
            return
        if now - self._phase_began < self._shared.timeouts_s[self._phase]:
            return

        if is_body:
            limits = self._limits
            is_upload = UPLOAD in self.cycle.scope
            slow = slow_upload(limits.min_upload_bytes_per_s)
            self._refuse(slow if is_upload else late("body", limits.body_timeout_s))
        elif self._phase is Phase.HEAD:
            self._refuse(late("request's head", self._limits.head_timeout_s))
        elif self._phase is Phase.CLOSED:
            self.transport.close()
        else:
            self.close()

    # A cycle's calls.

    def write(self, data: bytes) -> None:
        """Write bytes to the socket, and count them."""
        self._unsent.count(len(data))
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether the connection is closing, so that no more replies can be written."""
        return self._is_closing

    def close(self) -> None:
        """Close the connection without losing a reply that was already sent."""
        cycle = self._answered
        if cycle and cycle.response_started and not cycle.response_complete:
            self.abort()  # the client must not mistake a part for the whole reply
            return

        self._is_closing = True
        if self._phase not in (Phase.BODY, Phase.CLOSED):
            self.transport.close()
        # In BODY or CLOSED the client may still send. The kernel resets a connection that is
        # closed with unread bytes, and the client then loses the reply.
        self._discard()
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Answer the next pipelined request, if there is one, and continue parsing."""
        self._answered = None
        if self._is_closing:
            return

        self._phase_began = self.loop.time()
        if self.pipeline:
            self._answer(cast(Cycle, self.pipeline.pop()[0]))
        if self.flow.read_paused:
            self.loop.call_soon(self._parse_on)

    def _unlink(self) -> None:
        """Drop the references to the last request.

        uvicorn's cycles refer to this connection. References back would keep both alive, along with
        the bodies, until the garbage collector runs, which stalls every request.
        """
        self._answered = None
        self.cycle = None  # type: ignore[assignment]
        if self.scope:
            cast(Scope, self.scope).pop(SWITCH, None)

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
        """Parse received bytes until a limit is reached.

        At most MAX_PIPELINED requests may wait, and at most about EVENTS_PER_TURN headers and body
        chunks are parsed per event loop iteration. If bytes remain, they are kept, and reading
        pauses until they are parsed.
        """
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
        """Feed bytes to the parser, and return how many of the bytes were consumed."""
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
            is_http2 = "PRI" in str(error)  # the preface of HTTP/2 with prior knowledge
            self._refuse(unknown_version("2") if is_http2 else malformed(str(error)))

        if self._budget < 0:
            if self._phase is Phase.HEAD:
                self._refuse(head_too_large(self._limits.max_head_bytes, self._limits.max_headers))
            elif self._phase is Phase.BODY:
                self._refuse(malformed("its chunks are mostly framing"))
        return len(data)

    def _withdraw_upgrade(self) -> None:
        """Parse a request head again without its Upgrade headers.

        After a head with an Upgrade header, the parser expects data in the protocol that the header
        names. However, some clients, such as Java's, merely offer HTTP/2 and continue with an
        HTTP/1.1 body.
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
        is_websocket = _asks_for_websocket(method, version, self.headers)
        self._feed(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines)))
        if is_websocket and self._phase is Phase.IDLE:
            cast(Scope, self.scope)[SWITCH] = self._switch

    def _switch(
        self,
        begin: Callable[[asyncio.Transport, ConnectionState], asyncio.Protocol],
        head: bytes,
    ) -> None:
        """Give the socket to another protocol, which then serves the client in this one's place.

        The task of the request that is being answered ends on its own.

        Args:
            begin: Returns the protocol.
            head: The response that tells the client.

        Raises:
            ServiceError: The client has sent more than its request, or `begin` failed.
        """
        cycle = self._answered
        is_alone = self._phase is Phase.IDLE and not (self.pipeline or self.flow.unparsed)
        if cycle is None or self._is_closing or not is_alone:
            raise malformed("more bytes follow an Upgrade before its answer")

        transport = self.transport
        protocol = begin(transport, self._shared)
        self.connections.discard(self)
        self.connections.add(protocol)  # type: ignore[arg-type]
        transport.set_protocol(protocol)
        transport.write(head)

        # uvicorn would answer a failure of the task as that of an HTTP request.
        cycle.response_started = cycle.response_complete = cycle.disconnected = True
        self._is_closing = True
        self._unlink()
        self.parser = None  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        """Start reading the head of a new request."""
        if self._phase is not Phase.CLOSED:
            super().on_message_begin()
            self._enter(Phase.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a request header, and ignore trailers, which follow the last chunk of a body.

        Trailers are ignored because neither this server nor a proxy checks them as it checks
        headers. One header beyond the limit is stored, so that the head is refused later.
        """
        self._num_events += 1
        if self._phase is Phase.HEAD and len(self.headers) <= self._limits.max_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head of a request, and queue the reply."""
        if self._phase is Phase.CLOSED:
            return

        version = self.parser.get_http_version()
        scope = cast(Scope, self.scope)
        scope["method"] = self.parser.get_method().decode("latin-1")
        if error := self._head_error(version):
            self._refuse(error)
            return
        if self.parser.should_upgrade():  # `_withdraw_upgrade` parses the head again
            return

        url = self.url
        if not url.startswith(b"/") and url != b"*":  # absolute form, with a scheme and a host
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
        if self._budget < 0:  # otherwise the headers came in fewer bytes than the limit
            size += sum(len(name) + len(value) for name, value in headers)
        if size > limits.max_head_bytes or len(headers) > limits.max_headers:
            return head_too_large(limits.max_head_bytes, limits.max_headers)
        return head_error(version, headers)

    def on_body(self, body: bytes) -> None:
        """Append received bytes to the body of the current request."""
        self._num_events += 1
        if self._phase is Phase.BODY:
            # A piece of the body pays for the framing that follows it. Trailers get no budget,
            # since the parser keeps them until they end.
            budget = self._budget + FRAMING_BYTES_PER_BYTE * len(body)
            self._budget = min(budget, self._limits.max_head_bytes)
            if UPLOAD in self.cycle.scope:  # each byte buys time for the next ones
                bought_s = len(body) / self._limits.min_upload_bytes_per_s
                self._phase_began = min(self.loop.time(), self._phase_began + bought_s)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the current request, and get ready for the head of the next one."""
        if self._phase is Phase.BODY:
            self._budget = self._limits.max_head_bytes
            self._enter(Phase.IDLE)
            super().on_message_complete()

    # From requests to replies.

    def _new_cycle(self, is_kept_alive: bool) -> Cycle:
        """Queue the request whose head was just parsed. It is answered after all earlier ones."""
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
        """Stop reading, and have the application send an error after the earlier replies."""
        phase = self._phase
        if phase is Phase.CLOSED:
            return

        self._discard()
        if phase is not Phase.BODY:  # no cycle has begun for this request
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
        self._shared.starts.add(partial(self._start, cycle))

    def _start(self, cycle: Cycle) -> int:
        if not cycle.disconnected:
            if self._shared.is_leaving:
                cycle.keep_alive = False
            self._start_asgi_task(cycle, self.app)
        return 1


def _asks_for_websocket(method: bytes, version: bytes, headers: Headers) -> bool:
    """Return whether a request asks for a WebSocket (RFC 6455, section 4.2.1)."""
    asked = {
        token.strip().lower()
        for name, value in headers
        if name in (b"upgrade", b"connection")
        for token in value.split(b",")
    }
    return method == b"GET" and version == b"1.1" and {b"websocket", b"upgrade"} <= asked


def _tune(sock: socket.socket) -> None:
    """Set socket options so that tokens are sent immediately and the kernel buffers little data.

    The remaining unsent bytes stay in this process, which can limit how many accumulate.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
