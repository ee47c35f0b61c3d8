"""Reads a request and sends its reply over ASGI, with limits on the request's body."""

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    answers_full,
    bodies_full,
    body_too_large,
    content_type_not_supported,
    kept_headers_too_large,
    length_required,
)
from ullage_router.files.documents import Documents
from ullage_router.http.limits import BodyRoom, HTTPLimits
from ullage_router.http.long_bodies import (
    LONG_BODY_BYTES,
    BodyTurn,
    LongBodies,
)

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Switch = Callable[[Callable[..., asyncio.Protocol], bytes], None]
"""Gives a connection to another protocol, as `SWITCH` describes."""

JSON = "application/json"
"""The required content type of a body.

This keeps foreign web pages out, because browsers let a page send text and forms, but not JSON, to
any server without a CORS preflight.
"""
REFUSAL = "ullage.refusal"
"""Key in the ASGI scope under which the connection stores a bad request's ServiceError."""
BATCH_TENANT = "ullage.batch_tenant"
"""Key in the ASGI scope of a batch's requests, for the tenant that owns the batch."""
UPLOAD = "ullage.upload"
"""Key in the ASGI scope of requests whose body may take longer than `body_timeout_s`.

The connection then bounds the rate of the body instead (`min_upload_bytes_per_s`).
"""
SWITCH = "ullage.switch"
"""Key in the ASGI scope of requests that ask for a WebSocket, for the function that switches to it.

It takes a function that returns the protocol, and the head of the response.
"""
MAX_DISCARDED_BYTES = 64 << 10
"""Maximum bytes of an unread body to discard. If the body is longer, the connection closes."""
_OF_MESSAGES = frozenset(
    {b"authorization", b"x-session-id", b"x-ullage-timeout", b"traceparent", b"tracestate"}
)
"""Headers of a WebSocket's handshake that hold for each of its messages.

Others, such as a request id or an idempotency key, name a single request.
"""
MAX_OF_MESSAGES_BYTES = 4 << 10
"""Maximum total size of these headers in bytes."""


PIECE_BYTES = 64 << 10
"""Maximum bytes of a complete reply that are passed to the server at a time."""


def without_slash(path: str) -> str:
    """Return the path without trailing slashes, which some clients' base URLs add."""
    return path.rstrip("/") or path


class Body:
    """A request body that drops its reference to the bytes once they have been taken.

    Attributes:
        num_bytes: Size of the body in bytes, with the texts of the files that it names.
        documents: The files that the body names, or None if the service stores none.
    """

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self.documents: Documents | None = None
        self._data = data

    def peek(self) -> bytes:
        """Return the bytes, which stay here. Call this before `take`."""
        return self._data

    def take(self) -> bytes:
        """Return the bytes, and drop this object's reference to them. Call this only once."""
        data = self._data
        del self._data
        return data


class Request:
    """One request, whose body may still be arriving.

    Attributes:
        method: The method, such as `GET`.
        path: The path, percent-decoded and without the query.
        headers: Values by lower-case name. The values of a repeated name are joined by commas.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        limits: HTTPLimits,
        room: BodyRoom,
        replies: BodyRoom | None = None,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._limits = limits
        self._room = room
        self._replies = replies or BodyRoom(limits.max_kept_bytes)
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Mapping[str, str] = _merged(scope["headers"])

        self._is_read = False
        self._has_failed = False
        self._taken_bytes = 0
        self._kept_bytes = 0
        self._turn: BodyTurn | None = None
        """The turn in which a long body is received, or None."""
        self._handled: BodyTurn | None = None
        """The turn in which a long body is converted to a prompt, or None."""
        self._tenant = ""

    @property
    def local_address(self) -> str:
        """The server's address (empty for a Unix socket)."""
        server = self._scope.get("server")
        return str(server[0]) if server else ""

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the query. Of a repeated parameter, this has the last value."""
        return dict(parse_qsl(self._scope.get("query_string", b"").decode("latin-1")))

    @property
    def batch_tenant(self) -> str | None:
        """The tenant of the batch to which the request belongs, or None for other requests."""
        return self._scope.get(BATCH_TENANT)

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS, so that a certificate identifies the server."""
        return self._scope.get("scheme") == "https"

    @property
    def refusal(self) -> ServiceError | None:
        """The error found in the request's bytes, or None if there is no error so far."""
        return self._scope.get(REFUSAL)

    @property
    def switch(self) -> Switch | None:
        """The function that switches to a WebSocket, or None if the request does not ask for it."""
        return self._scope.get(SWITCH)

    def for_messages(self) -> Callable[[Receive], "Request"]:
        """Return a function that makes POST requests of the messages on this request's WebSocket.

        The function takes a message's `receive`, and its caller must close the request. It shares
        this request's limits and memory budgets, and keeps only the few headers that hold for each
        message, since WebSockets are open for long.

        Raises:
            ServiceError: The headers are too long to be kept.
        """
        kept = [pair for pair in self._scope["headers"] if pair[0] in _OF_MESSAGES]
        if sum(len(name) + len(value) for name, value in kept) > MAX_OF_MESSAGES_BYTES:
            names = ", ".join(sorted(name.decode() for name in _OF_MESSAGES))
            raise kept_headers_too_large(names, MAX_OF_MESSAGES_BYTES)
        scope = {
            "type": "http",
            "method": "POST",
            "path": without_slash(self.path),
            "headers": [
                *kept,
                (b"content-type", JSON.encode()),
                (b"transfer-encoding", b"chunked"),
            ],
            "server": self._scope.get("server"),
            "scheme": self._scope.get("scheme"),
        }
        return partial(_message_request, scope, self._limits, self._room, self._replies)

    @property
    def ends_connection(self) -> bool:
        """Whether the connection must close with the reply.

        The connection must close if the rest of the body is too long to discard or has an unknown
        length. It must also close if the client expects `100 Continue`, because such a client may
        or may not send its body after a refusal.
        """
        if self._is_read:
            return False

        headers = self.headers
        return (
            self._has_failed
            or "transfer-encoding" in headers
            or "expect" in headers
            or int(headers.get("content-length", 0)) > MAX_DISCARDED_BYTES
        )

    def end_turn(self) -> None:
        """End a long body's turn, so that another body may be received or converted.

        Call this method when the body has been converted to a prompt, when it is certain that it
        will not be converted, or when the request waits for anything outside this router. The
        parsed values remain in memory until `release`.
        """
        if self._turn:
            self._room.long_bodies.give_back(self._turn)
            self._turn = None
        if self._handled:
            self._room.handled.give_back(self._handled)
            self._handled = None

    def charge(self, num_bytes: int, tenant: str = "") -> None:
        """Reserve memory for text that the request brings along in addition to its body.

        Args:
            num_bytes: Size of the text in bytes.
            tenant: The tenant to whom the memory is charged, if no body was read before.

        Raises:
            ServiceError: There is not enough memory for it.
        """
        self._tenant = self._tenant or tenant
        if not self._room.take(num_bytes, self._tenant):
            raise bodies_full()
        self._taken_bytes += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Reserve memory for parts of the reply until the reply is sent.

        Raises:
            ServiceError: There is not enough memory for them.
        """
        if not self._replies.take(num_bytes, self._tenant):
            raise answers_full()
        self._kept_bytes += num_bytes

    async def bring(self, num_bytes: int) -> None:
        """Reserve memory for texts of files, and wait for a turn if they make the body long.

        Raises:
            ServiceError: There is not enough memory for the texts.
        """
        self.charge(num_bytes)
        if self._taken_bytes <= LONG_BODY_BYTES:
            return
        self.end_turn()  # the turn of the body alone is too small
        await self._wait_to_handle(self._taken_bytes)

    @property
    def limits(self) -> HTTPLimits:
        """The limits on each connection and on all connections."""
        return self._limits

    @property
    def max_body_bytes(self) -> int:
        """The maximum size of a body in bytes, with the texts that it brings along."""
        return self._limits.max_body_bytes

    def release(self, kept_bytes: int = 0) -> None:
        """End the body's turn if it has one, and release the memory reserved for the body.

        Args:
            kept_bytes: Number of bytes that stay reserved until the reply is complete, for parts of
                the body that the reply needs.
        """
        self.end_turn()
        kept = min(kept_bytes, self._taken_bytes)
        self._room.give_back(self._taken_bytes - kept, self._tenant)
        self._taken_bytes = kept

    def close(self) -> None:
        """Release all memory of the request and its reply."""
        self.release()
        self._replies.give_back(self._kept_bytes, self._tenant)
        self._kept_bytes = 0

    async def read_json(self, tenant: str = "") -> Body:
        """Check that the content type is JSON, then read the body as `read` does.

        Args:
            tenant: The tenant to whom the body's memory is charged until the body is released.

        Raises:
            ServiceError: The content type is not JSON, or `read` failed.
        """
        self._check_length(self._limits.max_body_bytes)
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != JSON:
            self._has_failed = True
            raise content_type_not_supported(kind)
        return Body(await self._read_whole(tenant))

    async def read(self, tenant: str = "") -> bytes:
        """Read the body.

        Args:
            tenant: The tenant to whom the body's memory is charged until the body is released.

        Raises:
            ServiceError: The body is missing, too large, malformed or late, or there is not enough
                memory for it.
        """
        self._check_length(self._limits.max_body_bytes)
        return await self._read_whole(tenant)

    async def pieces(self, tenant: str, limit: int) -> AsyncGenerator[bytes]:
        """Yield the pieces of a body that may be too long for the memory, as they arrive.

        The client is read no faster than the caller takes the pieces.

        Args:
            tenant: The tenant to whom the memory of each piece is charged.
            limit: Maximum size of the body in bytes.

        Raises:
            ServiceError: The body is missing, too large, malformed or too slow, or there is not
                enough memory for a piece.
        """
        self._check_length(limit)
        self._tenant = tenant
        self._scope[UPLOAD] = True
        self._has_failed = True  # until the whole body has arrived
        num_bytes = 0
        has_more = True
        while has_more:
            part, has_more = await self._receive_part(num_bytes, limit)
            num_bytes += len(part)
            try:
                yield part
            finally:
                self.release()
        self._has_failed = False
        self._is_read = True

    async def _read_whole(self, tenant: str) -> bytes:
        """Read the body, and end the turn of a long body if reading fails."""
        try:
            body = await self._read(tenant)
        except ServiceError:
            self._has_failed = True
            self.end_turn()
            raise
        self._is_read = True
        return body

    def _check_length(self, limit: int) -> None:
        """Check that there is a body, and that its declared length is within the limit.

        Raises:
            ServiceError: There is no body, or it is too large.
        """
        declared = self.headers.get("content-length")
        if declared is None and "transfer-encoding" not in self.headers:
            raise length_required()
        if declared is not None and int(declared) > limit:
            self._has_failed = True
            raise body_too_large(f"{int(declared)} bytes", limit)

    async def _read(self, tenant: str) -> bytes:
        # A list of parts could have an entry a byte. BytesIO returns its value without a copy.
        buffer = io.BytesIO()
        has_more = True
        limit = self._limits.max_body_bytes
        self._tenant = tenant
        while has_more:
            part, has_more = await self._receive_part(buffer.tell(), limit)
            if not (has_more or buffer.tell()):  # the whole body came at once, as most do
                if len(part) > LONG_BODY_BYTES:
                    await self._wait_to_handle(len(part))
                return part

            buffer.write(part)
            if buffer.tell() > LONG_BODY_BYTES:
                await self._read_long(buffer, has_more)
                break
        return buffer.getvalue()

    async def _read_long(self, buffer: io.BytesIO, has_more: bool) -> None:
        """Read the rest of a long body when its turn comes, then wait for the turn to parse it."""
        bodies = self._room.long_bodies
        limit = self._limits.max_body_bytes
        size = int(self.headers.get("content-length", limit))
        try:
            turn = self._turn = await bodies.take(size, self._tenant)
            while has_more:
                async with asyncio.timeout(None) as timeout:
                    with bodies.awaited(turn, timeout):
                        part, has_more = await self._receive_part(buffer.tell(), limit)
                buffer.write(part)
                turn.add(len(part))

            bodies.shrink(turn, buffer.tell())
        except TimeoutError as error:
            raise bodies_full() from error
        await self._wait_to_handle(buffer.tell())

    async def _wait_to_handle(self, num_bytes: int) -> None:
        """Wait for the turn in which a long body is converted to a prompt.

        Raises:
            ServiceError: No turn was free in time.
        """
        try:
            self._handled = await self._room.handled.take(num_bytes, self._tenant)
        except TimeoutError as error:
            raise bodies_full() from error

    async def _receive_part(self, num_before: int, limit: int) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether another part follows.

        The part's memory is charged to the tenant.

        Args:
            num_before: Number of bytes in the earlier parts.
            limit: Maximum size of the body in bytes.

        Raises:
            ServiceError: The body is malformed or too large, or there is not enough memory for it.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        if self.refusal:
            raise self.refusal

        part: bytes = message["body"]
        if num_before + len(part) > limit:
            raise body_too_large(f"more than {limit} bytes", limit)
        if not self._room.take(len(part), self._tenant):
            raise bodies_full()
        self._taken_bytes += len(part)
        return part, message["more_body"]


def _message_request(
    scope: Scope, limits: HTTPLimits, room: BodyRoom, replies: BodyRoom, receive: Receive
) -> Request:
    return Request(dict(scope), receive, limits, room, replies)


class Reply:
    """The reply to a request.

    A caller sends the reply either with `whole`, or with `start`, any number of `piece` calls, and
    `end`.
    """

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._start: Message | None = None
        self._nudge: asyncio.Task[None] | None = None
        self.headers: Headers = []
        """Headers to send in addition to the endpoint's headers."""
        self.has_begun = False
        self.is_complete = False

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the reply, whose last piece may still be unread when this returns."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        assert self._start is not None
        self.is_complete = True
        await self._send(self._start)
        # The server would copy a long body, and the copy would outlast the request's memory.
        place = 0
        while len(body) - place > PIECE_BYTES:
            piece = body[place : place + PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            place += PIECE_BYTES
        await self._send({"type": "http.response.body", "body": body[place:]})

    def start(self, status: int, headers: Headers) -> None:
        """Set the status and headers, which are sent with the first part of the body."""
        if self._request.ends_connection:
            headers = [*headers, (b"connection", b"close")]
        if self.headers:
            headers = [*headers, *self.headers]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self.has_begun = True

    async def piece(self, data: bytes) -> None:
        """Send a part of the body once the client has read enough of the earlier parts."""
        message = {"type": "http.response.body", "body": data, "more_body": True}
        if self._nudge is None and self._start is None:
            await self._send(message)
        else:
            await self._write(message)

    def nudge(self, data: bytes) -> None:
        """Send an optional part of the body, such as a keep-alive comment, without waiting.

        If this part is still unsent when the next part is sent, the next part replaces it. A client
        that still has other data to read does not need this part.
        """
        if not self.is_complete and (self._nudge is None or self._nudge.done()):
            message = {"type": "http.response.body", "body": data, "more_body": True}
            self._nudge = asyncio.create_task(self._write_now(message))

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        self.is_complete = True
        await self._write({"type": "http.response.body", "body": data})

    async def _write(self, message: Message) -> None:
        if self._nudge is not None:
            self._nudge.cancel()
            self._nudge = None
        await self._write_now(message)

    async def _write_now(self, message: Message) -> None:
        if self._start is not None:
            await self._send(self._start)
            self._start = None
        await self._send(message)


Endpoint = Callable[[Request, Reply], Awaitable[None]]
"""A function that answers a request."""
Routes = Mapping[str, Mapping[str, Endpoint]]
"""Endpoints by path and HTTP method."""


def asgi(serve: Endpoint, limits: HTTPLimits) -> ASGIApp:
    """Return an ASGI application that calls `serve` to answer each request.

    The server cancels the application's task when the client disconnects.
    """
    room = BodyRoom(
        limits.max_held_bytes,
        long_bodies=LongBodies(limits.max_long_bytes, limits.max_long_bytes // 2),
        handled=LongBodies(limits.max_handled_bytes, limits.max_handled_bytes),
    )

    replies = BodyRoom(limits.max_kept_bytes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, limits, room, replies)
        try:
            await serve(request, Reply(request, send))
        except asyncio.CancelledError:
            return  # the client has disconnected, or the server stops: nobody would read an error
        finally:
            request.close()

    return app


def _merged(headers: Headers) -> dict[str, str]:
    """Return header values by name, with the values of a repeated name joined by commas."""
    merged: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        merged[name] = f"{merged[name]}, {value}" if name in merged else value
    return merged
