"""A WebSocket connection (RFC 6455) with limits on time, size and memory, after its handshake."""

import asyncio
import base64
import binascii
import codecs
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping

from wsproto.connection import Connection, ConnectionType
from wsproto.connection import ConnectionState as FrameState
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import generate_accept_token

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import draining, late, malformed, upgrade_required
from ullage_router.http.connection import PARSED_BYTES, ConnectionState, UnsentBytes
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import PIECE_BYTES, Message, Reply, Request

VERSION = "13"
"""The only version of the protocol, as `sec-websocket-version` has it."""
KEY_BYTES = 16
STOPPING = "the server stops; connect again"
"""The reason of a close frame."""
TOO_MANY_FRAMES = "too many small frames; send a message in one frame"
FRAMES_PER_STEP = 16
"""Maximum number of frames of one connection that are parsed before those of another one."""
MAX_SMALL_FRAMES = 256
"""Number of control frames and small fragments of messages that a connection may send at once."""
SMALL_FRAMES_PER_S = 2.0
"""Number of further ones that a connection may send per second."""
BYTES_PER_FRAME = 64
"""Mean size of a message's fragments in bytes above which their number is not limited."""
HELD_BYTES = 64 << 10
"""Number of received bytes that await the connection's reader, above which reading pauses."""
HELD_PARTS = 32
"""Number of received parts that await the connection's reader, above which reading pauses."""

log = logging.getLogger(__name__)


def open_websocket(
    request: Request,
    reply: Reply,
    ping_s: float,
    farewell: str,
    serve: Callable[["WebSocket"], Coroutine[None, None, None]],
) -> None:
    """Accept the handshake in a request, whose connection then carries WebSocket messages.

    A new task serves the connection, so that nothing keeps the request and its headers in memory.

    Args:
        request: The request.
        reply: The reply to the request, which is complete afterwards.
        ping_s: Seconds of silence after which the client gets a ping, or 0 for no pings.
        farewell: The message to send before the connection closes because of its age.
        serve: Reads and answers the messages.

    Raises:
        ServiceError: The request is no valid handshake, or the server stops.
    """
    switch = request.switch
    if switch is None:
        raise upgrade_required()
    head = _accepting_head(request.headers)

    def begin(transport: asyncio.Transport, connections: ConnectionState) -> WebSocket:
        if connections.is_draining:
            raise draining()
        socket = WebSocket(transport, connections, ping_s, farewell)
        socket.start(serve)
        return socket

    switch(begin, head)
    reply.has_begun = reply.is_complete = True


def _accepting_head(headers: Mapping[str, str]) -> bytes:
    """Return the response that accepts a handshake.

    Raises:
        ServiceError: The handshake is invalid.
    """
    if headers.get("sec-websocket-version") != VERSION:
        raise upgrade_required()
    key = headers.get("sec-websocket-key", "")
    try:
        size = len(base64.b64decode(key, validate=True))
    except (binascii.Error, ValueError):
        size = 0
    if size != KEY_BYTES:
        raise malformed(f"sec-websocket-key is {key[:60]!r}; send {KEY_BYTES} bytes in Base64")

    lines = (
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-accept: " + generate_accept_token(key.encode()),
    )
    return b"\r\n".join(lines) + b"\r\n\r\n"


class WebSocket(asyncio.Protocol):
    """A client's WebSocket connection, whose messages one task reads and answers one by one.

    The task calls `wait`, then `receive` until the message has ended, then `send` any number of
    times, then `skip`, and starts again. It is cancelled if the client disconnects.

    A message of the client is not read faster than the task takes its parts. Pings and the closing
    handshake are answered at any time.

    Args:
        transport: The connection's transport.
        connections: All connections of the server, and the limits on each.
        ping_s: Seconds of silence after which the client gets a ping, or 0 for no pings.
        farewell: The message to send before the connection closes because of its age.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        connections: ConnectionState,
        ping_s: float,
        farewell: str,
    ) -> None:
        self._transport = transport
        self._connections = connections
        self._limits: HTTPLimits = connections.limits
        self._ping_s = ping_s
        self._farewell = farewell
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._frames = Connection(ConnectionType.SERVER)

        self._unparsed = bytearray()
        """Bytes that were received but not yet passed to the parser."""
        self._has_frames = False
        """Whether the parser may have more frames in the bytes that were passed to it."""
        self._is_parse_due = False
        self._is_reading_paused = False
        self._parts: deque[tuple[bytes, bool]] = deque()
        """Received parts of messages, each with whether more of its message follows."""
        self._held_bytes = 0
        self._is_broken = False
        """Whether the client has sent frames that are not allowed. Further ones are discarded."""
        self._is_in_message = False
        """Whether the last received part was not the last of its message."""
        self._changed = asyncio.Event()
        """Set when a part has arrived, or when the connection is to close."""

        self._is_busy = False
        """Whether a message is being read or answered."""
        self._has_more = False
        """Whether more of the current message is to be taken."""
        self._taken_bytes = 0
        """Number of bytes of the current message that were taken."""
        self._refusal: ServiceError | None = None
        """The error of a message that does not arrive in time, or None."""

        self._writable = asyncio.Event()
        self._writable.set()
        now = self._loop.time()
        self._small_frames = float(MAX_SMALL_FRAMES)
        """Number of control frames and small fragments that may arrive before the next second."""
        self._counted_at = now
        """Time up to which `_small_frames` has grown."""
        self._unsent = UnsentBytes(now)
        self._opened_at = now
        self._idle_since = now
        self._message_since = now
        """Time since which the current message is awaited. The server's own pauses do not count."""
        self._silent_since = now
        """Time at which the last bytes were received or written."""
        self._ticked_at = now
        self._closed_at: float | None = None
        """Time at which this side has begun to close the connection, or None."""

    def start(self, serve: Callable[["WebSocket"], Coroutine[None, None, None]]) -> None:
        """Start the task that reads and answers messages."""
        self._task = task = self._loop.create_task(serve(self))
        self._connections.tasks.add(task)
        task.add_done_callback(self._connections.tasks.discard)

    # The event loop's calls.

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes, and read no more until they are parsed.

        Under TLS, reading stops one read late.
        """
        self._silent_since = self._loop.time()
        if self._is_broken:
            return
        self._unparsed += data
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._parse_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the task that reads and answers."""
        self._connections.connections.discard(self)
        self._drop_received()
        self._unparsed.clear()
        self._writable.set()
        self._cancel()

    def pause_writing(self) -> None:
        """Make senders wait, and read nothing more, because the answers to pings add up, too."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders and the reader go on."""
        self._writable.set()
        self._parse_soon()

    # The server's calls.

    def leave(self) -> None:
        """Do nothing. The connection closes after its next answer, as `wait` decides.

        An idle connection stays open, because a message may already be in transit.
        """

    def shutdown(self) -> None:
        """Close the connection after the answer to the current message, if there is one."""
        if not (self._is_busy or self._parts or self._unparsed or self._has_frames):
            self.close(CloseReason.GOING_AWAY, STOPPING)

    def abort(self) -> None:
        """Close the connection immediately, and discard unsent bytes."""
        self._transport.abort()

    def tick(self, now: float) -> None:
        """Enforce the connection's time limits, and send a ping after a long silence.

        Args:
            now: The event loop's time.
        """
        limits = self._limits
        unsent_bytes = self._transport.get_write_buffer_size()
        if self._unsent.stalled_s(unsent_bytes, now) >= limits.stall_timeout_s:
            log.info("client does not read", extra={"unsent_bytes": unsent_bytes})
            self.abort()
            return
        if self._closed_at is not None:
            if now - self._closed_at >= limits.linger_s:
                self._transport.close()
            return

        if self._parts:  # the server is slow, not the client: stop the clock
            self._message_since += now - self._ticked_at
        self._ticked_at = now
        # A missing pong ends nothing: some clients only answer pings while their program reads.
        if self._ping_s and now - self._silent_since >= self._ping_s:
            self._write(Ping())

        is_late = now - self._message_since >= limits.body_timeout_s
        if self._has_more and not self._parts and is_late:
            self._refusal = late("message", limits.body_timeout_s)
            self._changed.set()
        elif not self._is_busy:
            self._end_idle(now)

    # The calls of the task that reads and answers.

    async def wait(self) -> bool:
        """Wait for the client's next message, and return whether there is one.

        While the server stops, there is none after the first answer.
        """
        has_answered = self._is_busy
        self._is_busy = self._has_more = False
        self._refusal = None
        self._taken_bytes = 0
        self._idle_since = self._loop.time()
        self._end_idle(self._idle_since)
        if has_answered and self._connections.is_leaving:
            self.close(CloseReason.GOING_AWAY, STOPPING)
        while not self._parts and self._is_open:
            self._changed.clear()
            await self._changed.wait()

        self._is_busy = self._has_more = self._is_open
        self._message_since = self._loop.time()
        return self._is_open

    async def receive(self) -> Message:
        """Return the next part of the current message, as an ASGI message.

        Raises:
            ServiceError: The rest of the message does not arrive in time.
        """
        while not self._parts:
            if self._refusal:
                raise self._refusal
            if not self._is_open:
                raise asyncio.CancelledError
            self._changed.clear()
            await self._changed.wait()

        part, self._has_more = self._parts.popleft()
        self._held_bytes -= len(part)
        self._taken_bytes += len(part)
        if self._is_reading_paused and not self._parts:
            self._parse_soon()
        return {"type": "http.request", "body": part, "more_body": self._has_more}

    async def skip(self) -> None:
        """Discard the rest of the current message. Close the connection if it is too long or late.

        A client that still sends a message would otherwise wait for its own next answer.
        """
        while self._has_more and self._is_open:
            if self._refusal:
                self.close(CloseReason.POLICY_VIOLATION, self._refusal.message)
                return
            if self._taken_bytes > self._limits.max_body_bytes:
                most = f"a message has at most {self._limits.max_body_bytes} bytes"
                self.close(CloseReason.MESSAGE_TOO_BIG, most)
                return
            try:
                await self.receive()
            except ServiceError as error:
                assert error is self._refusal

    async def send(self, lines: Iterable[memoryview]) -> None:
        """Send each line as a message, in pieces that the client must read before the next ones.

        Args:
            lines: The UTF-8 bytes of the messages.
        """
        for events in _pieces(lines):
            await self._writable.wait()
            self._write(*events)

    def close(self, code: int, reason: str) -> None:
        """Begin to close the connection, and discard further messages of both sides.

        Args:
            code: The close code.
            reason: The reason, of which at most 123 bytes are sent.
        """
        if not self._is_open:
            return
        self._write(CloseConnection(code, reason))
        self._closed_at = self._loop.time()
        self._drop_received()
        self._changed.set()
        self._parse_soon()

    # From bytes to parts of messages.

    @property
    def _is_open(self) -> bool:
        return self._frames.state is FrameState.OPEN and not self._transport.is_closing()

    @property
    def _is_full(self) -> bool:
        is_much = self._held_bytes > HELD_BYTES or len(self._parts) > HELD_PARTS
        return is_much or not self._writable.is_set()

    def _parse_soon(self) -> None:
        """Schedule the next step of the parser, unless it is scheduled or nothing is to be done."""
        if self._is_reading_paused and not self._is_parse_due:
            self._is_parse_due = True
            self._connections.frames.add(self._parse)

    def _parse(self) -> int:
        """Parse a few received frames, and return their number, or 1 for a part of one.

        If reading is paused, it resumes once all received bytes are parsed.
        """
        self._is_parse_due = False
        if self._transport.is_closing() or (self._is_full and not self._is_broken):
            return 0

        num_frames = 0
        if not self._is_broken:
            if not self._has_frames:
                self._frames.receive_data(bytes(self._unparsed[:PARSED_BYTES]))
                del self._unparsed[:PARSED_BYTES]
            num_frames = self._take_some()

        # The kernel resets a connection that is closed with unread bytes, and the client then loses
        # the close frame. So bytes that must not be parsed are read and discarded.
        if self._is_broken:
            self._unparsed.clear()
            self._has_frames = False
        if self._transport.is_closing():
            return num_frames
        if self._is_broken or not self._is_full:
            if self._unparsed or self._has_frames:
                self._parse_soon()
            else:
                self._is_reading_paused = False
                self._transport.resume_reading()
        return max(num_frames, 1)

    def _take_some(self) -> int:
        """Take at most FRAMES_PER_STEP frames from the parser, and return their number."""
        num_frames = 0
        self._has_frames = True
        for event in self._frames.events():
            num_frames += 1
            self._count(event)
            self._take(event)
            if num_frames == FRAMES_PER_STEP or self._is_full or self._is_broken:
                return num_frames
        self._has_frames = False
        return num_frames

    def _count(self, event: Event) -> None:
        """Count a frame that is small for its cost, and close the connection after too many.

        A fragment of a message pays for itself and others by its size. The last one of a message is
        free, because messages are answered one after the other.
        """
        now = self._loop.time()
        frames = self._small_frames + SMALL_FRAMES_PER_S * (now - self._counted_at)
        self._counted_at = now
        is_free = False
        if isinstance(event, TextMessage):
            frames += len(event.data) / BYTES_PER_FRAME
            is_free = self._is_open and (event.message_finished or not event.frame_finished)
        frames -= not is_free
        self._small_frames = min(frames, MAX_SMALL_FRAMES)
        if frames < 0 and not self._is_broken:
            self._is_broken = True
            self.close(CloseReason.POLICY_VIOLATION, TOO_MANY_FRAMES)

    def _take(self, event: Event) -> None:
        match event:
            case TextMessage():
                self._take_part(event.data.encode(), has_more=not event.message_finished)
            case BytesMessage():
                self.close(CloseReason.UNSUPPORTED_DATA, "messages are JSON; send text frames")
            case Ping():
                self._write(event.response())
            case CloseConnection():
                self._take_close(event)

    def _take_part(self, part: bytes, *, has_more: bool) -> None:
        if not self._is_open:
            return
        is_first = not self._is_in_message
        self._is_in_message = has_more
        if part or is_first or not has_more:
            self._parts.append((part, has_more))
            self._held_bytes += len(part)
            self._changed.set()

    def _take_close(self, event: CloseConnection) -> None:
        """End the connection: the client closes it, has answered its closing, or sent nonsense."""
        if self._frames.state in (FrameState.OPEN, FrameState.LOCAL_CLOSING):
            self._is_broken = True
            self.close(event.code, event.reason or "")
            return
        if self._frames.state is FrameState.REMOTE_CLOSING:
            self._write(event.response())
        self._transport.close()
        self._drop_received()
        self._changed.set()
        self._cancel()  # nobody reads the current answer

    def _drop_received(self) -> None:
        self._parts.clear()
        self._held_bytes = 0

    # From messages to bytes.

    def _write(self, *events: Event) -> None:
        if self._transport.is_closing() or self._closed_at is not None:
            return
        data = b"".join(map(self._frames.send, events))
        self._silent_since = self._loop.time()
        self._unsent.count(len(data))
        self._transport.write(data)

    def _end_idle(self, now: float) -> None:
        """Close a connection that is too old, or on which no message came for too long."""
        limits = self._limits
        if now - self._opened_at >= limits.websocket_max_age_s:
            self._write(TextMessage(self._farewell))
            self.close(CloseReason.GOING_AWAY, "the connection is too old; connect again")
        elif now - self._idle_since >= limits.websocket_idle_timeout_s:
            reason = f"no message came for {limits.websocket_idle_timeout_s:g} s; connect again"
            self.close(CloseReason.GOING_AWAY, reason)

    def _cancel(self) -> None:
        if self._task and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None


def _pieces(lines: Iterable[memoryview]) -> Iterator[list[TextMessage]]:
    """Yield messages in groups of about PIECE_BYTES, and longer ones as fragments."""
    group: list[TextMessage] = []
    num_bytes = 0
    for line in lines:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, max(len(line), 1), PIECE_BYTES):
            piece = line[start : start + PIECE_BYTES]
            is_last = start + PIECE_BYTES >= len(line)
            group.append(TextMessage(decoder.decode(piece, is_last), message_finished=is_last))
            num_bytes += len(piece)
            if num_bytes >= PIECE_BYTES:
                yield group
                group = []
                num_bytes = 0
    if group:
        yield group
