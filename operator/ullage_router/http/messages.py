"""A request and its reply over ASGI: the head, a body within bounds, and the way out."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    bodies_full,
    body_too_large,
    invalid_head,
    length_required,
    malformed,
)
from ullage_router.http.long_bodies import LONG_BODY_BYTES, MAX_HANDLED_BYTES, LongBodies

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

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
    max_connections: int = 20_000
    max_age_s: float = 600.0
    """Age at which a connection ends with its reply, so that the client comes to another process.
    """
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


class Request:
    """One request, whose body may be still to come.

    method, path
        the path percent-decoded and without the query
    headers
        by name in lower case; values of a name that came twice are joined by commas
    refusal
        what is wrong with the request's bytes; None: nothing so far
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
        self._turn_bytes = 0
        """Bytes of its turn among long bodies that arrive; 0: it has none."""
        self._handled_bytes = 0
        """Bytes of its turn among those that become prompts; 0: it has none."""
        self._tenant = ""

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

    def release(self) -> None:
        """Give back the room for the body, which whoever reads it does not need any more."""
        self._room.give_back(self._taken_bytes, self._tenant)
        self._taken_bytes = 0
        if self._turn_bytes:
            self._room.long_bodies.give_back(self._turn_bytes, self._tenant)
            self._turn_bytes = 0
        if self._handled_bytes:
            self._room.handled.give_back(self._handled_bytes, self._tenant)
            self._handled_bytes = 0

    async def read(self, tenant: str = "") -> bytes:
        """The body.

        Args:
            tenant: in whose share of the room for bodies it is until it is released.

        Raises:
            ServiceError: there is none, it is too large, malformed or late, or there is no room.
        """
        headers, limits = self.headers, self._limits
        declared = headers.get("content-length")
        if declared is None and "transfer-encoding" not in headers:
            raise length_required()
        try:
            if declared is not None and int(declared) > limits.max_body_bytes:
                raise body_too_large(f"{int(declared)} bytes", limits.max_body_bytes)
            body = await self._read(tenant)
        except ServiceError:
            self._has_failed = True
            raise
        self._is_read = True
        return body

    async def _read(self, tenant: str) -> bytes:
        limit = self._limits.max_body_bytes
        body = bytearray()  # a list of pieces could have one for each byte
        has_more = True
        self._tenant = tenant
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            if self.refusal:
                raise self.refusal
            part: bytes = message["body"]
            has_more = message["more_body"]
            if len(body) + len(part) > limit:
                raise body_too_large(f"more than {limit} bytes", limit)
            if not self._room.take(len(part), tenant):
                raise bodies_full()
            self._taken_bytes += len(part)
            if len(body) + len(part) > LONG_BODY_BYTES and not self._turn_bytes:
                await self._wait_to_arrive()
            if not (has_more or body):
                return part
            body += part
        if self._turn_bytes:
            await self._wait_to_be_handled(len(body))
        return bytes(body)

    async def _wait_to_arrive(self) -> None:
        """Receive nothing until few other long bodies are here."""
        size = int(self.headers.get("content-length", self._limits.max_body_bytes))
        try:
            await self._room.long_bodies.take(size, self._tenant)
        except TimeoutError as error:
            raise bodies_full() from error
        self._turn_bytes = size

    async def _wait_to_be_handled(self, size: int) -> None:
        """Wait until few other long bodies are becoming prompts."""
        try:
            await self._room.handled.take(size, self._tenant)
        except TimeoutError as error:
            raise bodies_full() from error
        self._handled_bytes = size


class Reply:
    """The one reply to a request; `whole`, or `start`, `piece` any number of times and `end`."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._start: Message | None = None
        self._nudge: asyncio.Task[None] | None = None
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
        """The head; sent with the first part of the body."""
        if self._request.ends_connection:
            headers = [*headers, (b"connection", b"close")]
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
        """Sends a part that is of no use to a client which has others to read."""
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
    room = BodyRoom(limits.max_held_bytes)

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
    """Return values by name; those of one name are joined by commas."""
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
    """Returns the error in a head, which a proxy may read in another way than we do; None: there is
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
