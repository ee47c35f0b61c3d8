"""A request and its reply over ASGI: the head, a body within bounds, and the way out."""

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    bodies_full,
    body_too_large,
    content_type_not_supported,
    invalid_head,
    length_required,
    malformed,
)
from ullage_router.http.long_bodies import (
    LONG_BODY_BYTES,
    MAX_HANDLED_BYTES,
    MAX_LONG_BYTES,
    LongBodies,
    Turn,
)

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"
"""The type that a body must have: a page may send others to any server without being asked."""
REFUSAL = "ullage.refusal"
"""Key of a scope: the ServiceError that the connection found in the request's bytes."""
MAX_DISCARDED_BYTES = 64 << 10
"""Size of an unread body that is read and discarded; for a longer one the connection is closed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a connection and of all connections of a server; bytes and seconds."""

    max_head_bytes: int = 64 << 10
    """Request line and headers."""
    max_headers: int = 100
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 256 << 20
    """Bytes of bodies that arrive or wait to become prompts, on all connections together."""
    max_long_bytes: int = MAX_LONG_BYTES
    max_handled_bytes: int = MAX_HANDLED_BYTES
    max_connections: int = 20_000
    max_age_s: float = 600.0
    """Age at which a connection ends with its reply, so that clients spread over routers."""
    head_timeout_s: float = 10.0
    """Seconds from a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Seconds from the end of the headers to the end of the body."""
    idle_timeout_s: float = 75.0
    """Seconds between two requests."""
    stall_timeout_s: float = 60.0
    """Seconds for which a client may take nothing of what it is sent."""
    linger_s: float = 2.0
    """A connection closed on a client that still sends may lose the reply on its way; so what
    follows a refused request is read and thrown away for so long."""


@dataclass(slots=True)
class BodyRoom:
    """Memory for bodies that arrive and have not become prompts, on all connections of a server.

    limit: bytes for all; one tenant gets at most half of them.
    """

    limit: int
    taken: int = 0
    long_bodies: LongBodies = field(default_factory=LongBodies)
    """Turns of those that arrive."""
    handled: LongBodies = field(
        default_factory=lambda: LongBodies(MAX_HANDLED_BYTES, MAX_HANDLED_BYTES)
    )
    """Turns of those that become prompts."""
    _of_tenants: dict[str, int] = field(default_factory=dict)

    def take(self, size: int, tenant: str) -> bool:
        """False, and nothing is taken, where that much is not free."""
        of_tenant = self._of_tenants.get(tenant, 0) + size
        if self.taken + size > self.limit or (tenant and of_tenant > self.limit // 2):
            return False
        self.taken += size
        if tenant:
            self._of_tenants[tenant] = of_tenant
        return True

    def give_back(self, size: int, tenant: str) -> None:
        self.taken -= size
        if tenant and size:
            self._of_tenants[tenant] -= size
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]


class Body:
    """The bytes of a body, which its reader takes out, so that nobody else keeps them meanwhile."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self._data = data

    def take(self) -> bytes:
        """Return the bytes; call it once."""
        data = self._data
        del self._data
        return data


class Request:
    """One request, whose body may still be arriving.

    method, path
        the path percent-decoded and without the query
    headers
        by name in lower case; values of a name that came twice are joined by commas
    refusal
        the error of the request's bytes; None: none so far
    """

    def __init__(self, scope: Scope, receive: Receive, limits: Limits, room: BodyRoom) -> None:
        self._scope = scope
        self._receive = receive
        self._limits = limits
        self._room = room
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Mapping[str, str] = _merged(scope["headers"])
        self._is_read = False
        self._has_failed = False
        self._taken_bytes = 0
        self._turn: Turn | None = None
        """Its turn among long bodies that arrive, where it is one."""
        self._handled: Turn | None = None
        """Its turn among those that become prompts."""
        self._tenant = ""

    @property
    def local_address(self) -> str:
        """The address at which the connection came in; empty where it is a Unix socket."""
        server = self._scope.get("server")
        return str(server[0]) if server else ""

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS, so that a certificate tells the client who answers."""
        return self._scope.get("scheme") == "https"

    @property
    def refusal(self) -> ServiceError | None:
        return self._scope.get(REFUSAL)

    @property
    def ends_connection(self) -> bool:
        """Whether too much of the body is still to come to be thrown away.

        A client that waits for leave to send its body may send it or not after a refusal.
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
        """End the turn of a long body once this one is a prompt, never will be, or waits for others
        than this router.

        The values made of the body still take its room, until that is released.
        """
        if self._turn:
            self._room.long_bodies.give_back(self._turn)
            self._turn = None
        if self._handled:
            self._room.handled.give_back(self._handled)
            self._handled = None

    def release(self) -> None:
        """Give back the room of a body that its reader does not need any more."""
        self.end_turn()
        self._room.give_back(self._taken_bytes, self._tenant)
        self._taken_bytes = 0

    async def read_json(self, tenant: str = "") -> Body:
        """Read a body whose content type is JSON; see `read`.

        Raises:
            ServiceError: the content type is another one, or `read` raises it.
        """
        self._check_length()
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != JSON:
            self._has_failed = True
            raise content_type_not_supported(kind)
        return Body(await self._read_whole(tenant))

    async def read(self, tenant: str = "") -> bytes:
        """Read the body.

        Args:
            tenant: the owner of the body's room until the body is released.

        Raises:
            ServiceError: there is none, it is too large, malformed or late, or there is no room.
        """
        self._check_length()
        return await self._read_whole(tenant)

    async def _read_whole(self, tenant: str) -> bytes:
        """Read a body whose declared length is possible."""
        try:
            body = await self._read(tenant)
        except ServiceError:
            self._has_failed = True
            self.end_turn()
            raise
        self._is_read = True
        return body

    def _check_length(self) -> None:
        """Raise ServiceError if there is no body, or if its declared length is too large."""
        limit = self._limits.max_body_bytes
        declared = self.headers.get("content-length")
        if declared is None and "transfer-encoding" not in self.headers:
            raise length_required()
        if declared is not None and int(declared) > limit:
            self._has_failed = True
            raise body_too_large(f"{int(declared)} bytes", limit)

    async def _read(self, tenant: str) -> bytes:
        # A list of pieces could have one for each byte. The buffer hands its bytes out uncopied.
        buffer = io.BytesIO()
        has_more = True
        self._tenant = tenant
        while has_more:
            part, has_more = await self._receive_part(buffer.tell())
            if not (has_more or buffer.tell()):
                return part
            buffer.write(part)
            if buffer.tell() > LONG_BODY_BYTES:
                await self._read_long(buffer, has_more)
                break
        return buffer.getvalue()

    async def _read_long(self, buffer: io.BytesIO, has_more: bool) -> None:
        """Read the rest of a long body in its turn; then wait until few others are becoming
        prompts."""
        bodies = self._room.long_bodies
        size = int(self.headers.get("content-length", self._limits.max_body_bytes))
        try:
            turn = self._turn = await bodies.take(size, self._tenant)
            while has_more:
                async with asyncio.timeout(None) as timeout:
                    with bodies.awaited(turn, timeout):
                        part, has_more = await self._receive_part(buffer.tell())
                buffer.write(part)
                turn.add(len(part))
            bodies.shrink(turn, buffer.tell())
            self._handled = await self._room.handled.take(buffer.tell(), self._tenant)
        except TimeoutError as error:
            raise bodies_full() from error

    async def _receive_part(self, num_before: int) -> tuple[bytes, bool]:
        """Return the next part of the body, which takes room, and whether more is to come.

        Args:
            num_before: bytes that came before.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        if self.refusal:
            raise self.refusal
        part: bytes = message["body"]
        limit = self._limits.max_body_bytes
        if num_before + len(part) > limit:
            raise body_too_large(f"more than {limit} bytes", limit)
        if not self._room.take(len(part), self._tenant):
            raise bodies_full()
        self._taken_bytes += len(part)
        return part, message["more_body"]


class Reply:
    """The one reply to a request; `whole`, or `start`, `piece` any number of times and `end`."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._start: Message | None = None
        self._nudge: asyncio.Task[None] | None = None
        self.headers: Headers = []
        """Headers beside those of the endpoint."""
        self.has_begun = False
        self.is_complete = False

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """The reply in one write."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        assert self._start is not None
        self.is_complete = True
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})

    def start(self, status: int, headers: Headers) -> None:
        """Set the head, which is sent with the first part of the body."""
        if self._request.ends_connection:
            headers = [*headers, (b"connection", b"close")]
        if self.headers:
            headers = [*headers, *self.headers]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self.has_begun = True

    async def piece(self, data: bytes) -> None:
        """A part of the body; waits until the client has taken enough of those before it."""
        message = {"type": "http.response.body", "body": data, "more_body": True}
        if self._nudge is None and self._start is None:
            await self._send(message)
        else:
            await self._write(message)

    def nudge(self, data: bytes) -> None:
        """Send a part that is of no use to a client which has others to read."""
        if not self.is_complete and (self._nudge is None or self._nudge.done()):
            message = {"type": "http.response.body", "body": data, "more_body": True}
            self._nudge = asyncio.create_task(self._write_now(message))

    async def end(self, data: bytes = b"") -> None:
        """The last part."""
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
"""Answers requests."""
Routes = Mapping[str, Mapping[str, Endpoint]]
"""Endpoints by path and method."""


def asgi(serve: Endpoint, limits: Limits) -> ASGIApp:
    """An ASGI application; its task is cancelled when the client goes."""
    room = BodyRoom(
        limits.max_held_bytes,
        long_bodies=LongBodies(limits.max_long_bytes, limits.max_long_bytes // 2),
        handled=LongBodies(limits.max_handled_bytes, limits.max_handled_bytes),
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, limits, room)
        try:
            await serve(request, Reply(request, send))
        except asyncio.CancelledError:
            return  # the client has gone, or the server ends: nobody would read an error
        finally:
            request.release()

    return app


def _merged(headers: Headers) -> dict[str, str]:
    """Return values by name; values of one name are joined by commas."""
    merged: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        merged[name] = f"{merged[name]}, {value}" if name in merged else value
    return merged


def unknown_version(version: str) -> ServiceError:
    message = f"HTTP/{version} is not spoken here; 1.1 is"
    return invalid_head("HTTP_VERSION_NOT_SUPPORTED", message)


_RARE = frozenset({b"transfer-encoding", b"content-encoding", b"expect"})


def head_error(version: str, headers: Headers) -> ServiceError | None:
    """Return the error in a head, which a proxy may read in another way than we do; None: there is
    none."""
    if version not in ("1.0", "1.1"):
        return unknown_version(version)
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        return malformed("it has no Host header" if not hosts else "it has several Host headers")
    if _RARE.isdisjoint(names):
        return None
    for name, value in headers:
        if name == b"transfer-encoding":
            if version == "1.0":
                return malformed("HTTP/1.0 has no Transfer-Encoding")
            if value.lower() != b"chunked":
                return invalid_head(
                    "TRANSFER_ENCODING_NOT_SUPPORTED",
                    f"transfer-encoding is {_shown(value)}; possible: chunked",
                )
        elif name == b"content-encoding" and value.lower() != b"identity":
            return invalid_head(
                "CONTENT_ENCODING_NOT_SUPPORTED",
                f"content-encoding is {_shown(value)}; send the body as it is",
            )
        elif name == b"expect" and value.lower() != b"100-continue":
            return invalid_head(
                "EXPECTATION_FAILED", f"expect is {_shown(value)}; possible: 100-continue"
            )
    return None


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:60])
