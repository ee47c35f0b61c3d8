"""Serves the console's page and its events.

/console               the page, with console.css and console.js below it
/console/events        server-sent events:
    state                  /stats without the records, sent immediately and then every second
    decisions              records of requests that ended since the last event, oldest first. The
                           first event has the latest records
/console/overload      sends many requests at once, available only for a service on this machine
/v1/chat/completions   for the chat on the page, on a port that does not serve the API
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated

import msgspec

from ullage_common.config.router import ConsoleSection
from ullage_router.errors import console_busy, invalid_head
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import Endpoint, Headers, Message, Reply, Request, Routes, asgi
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord

CONSOLE = "/console"
EVENTS = "/console/events"
OVERLOAD = "/console/overload"
CHAT = "/v1/chat/completions"

STATE_EVERY_S = 1.0
FLUSH_EVERY_S = 0.2
MAX_PENDING = 256
"""Maximum number of request records buffered for one reader of the events.

If there are more, the oldest records are skipped and counted.
"""
MAX_READERS = 16
"""Maximum number of concurrent readers of the console's events."""
SENTENCE = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. "

_TYPES = {"html": b"text/html", "css": b"text/css", "js": b"text/javascript"}
_PAGE_HEADERS: Headers = [
    (b"cache-control", b"no-cache"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]
_EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
_encode = msgspec.json.Encoder().encode


class RecordBuffer:
    """A bounded buffer of request records that have yet to be sent to a particular reader."""

    def __init__(self, latest: Sequence[RequestRecord]) -> None:
        self._pending = deque(latest, MAX_PENDING)
        self._skipped = 0

    def put(self, record: RequestRecord) -> None:
        """Add a record, and drop the oldest one if the buffer is full."""
        self._skipped += len(self._pending) == MAX_PENDING
        self._pending.append(record)

    def take(self) -> dict[str, object] | None:
        """Remove all records, and return them as one event's data, or None if there are none."""
        if not self._pending:
            return None
        taken = {
            "records": [record.as_json() for record in self._pending],
            "skipped": self._skipped,
        }
        self._pending.clear()
        self._skipped = 0
        return taken


class Console:
    """Serves the page and its events, and sends test overloads.

    Args:
        service: The router whose state the page shows.
        section: The configuration of the console.
    """

    def __init__(self, service: RouterService, section: ConsoleSection) -> None:
        self._service = service
        self._is_local = section.local
        tls = service.config.tls.router
        self._has_chat = not (tls and tls.client_ca_dir)
        """Whether the metrics port may serve the chat.

        False if the API requires client certificates, because the metrics port requires none.
        """
        self._readers: set[RecordBuffer] = set()
        self._closing = asyncio.Event()
        self._app: Endpoint | None = None
        self._overload: asyncio.Task[None] | None = None
        service.observers.append(self._on_end)

    def serve_requests(self, app: Endpoint) -> None:
        """Set the endpoint that serves the page's chat requests and the test overloads."""
        self._app = app

    def routes(self) -> Routes:
        """Return the console's routes by path."""
        routes: dict[str, Mapping[str, Endpoint]] = {
            CONSOLE: _page("console.html"),
            f"{CONSOLE}/console.css": _page("console.css"),
            f"{CONSOLE}/console.js": _page("console.js"),
            EVENTS: {"GET": self._send_events},
        }
        if self._has_chat:
            routes[CHAT] = {"POST": self._chat}
        if self._is_local:
            routes[OVERLOAD] = {"POST": self._begin_overload}
        return routes

    def close(self) -> None:
        """End open event streams and the overload, which would otherwise delay the shutdown."""
        self._closing.set()
        if self._overload:
            self._overload.cancel()

    def _on_end(self, record: RequestRecord) -> None:
        for reader in self._readers:
            reader.put(record)

    async def _chat(self, request: Request, reply: Reply) -> None:
        assert self._app
        await self._app(request, reply)

    async def _send_events(self, request: Request, reply: Reply) -> None:
        """Send events until the reader disconnects or the router stops.

        The server aborts the connection of a reader that stops reading.

        Raises:
            ServiceError: There are too many readers.
        """
        self._service.tenants.check_stats(request.headers.get("authorization"))
        if len(self._readers) >= MAX_READERS:
            raise console_busy(f"{MAX_READERS} readers watch this router already; close one")
        reply.start(HTTPStatus.OK, _EVENT_HEADERS)
        async with contextlib.aclosing(self._events()) as events:
            async for data in events:
                await reply.piece(data)
        await reply.end()

    async def _events(self) -> AsyncGenerator[bytes]:
        reader = RecordBuffer(self._service.stats.records)
        self._readers.add(reader)
        loop = asyncio.get_running_loop()
        state_due = loop.time()

        try:
            while not self._closing.is_set():
                data = b""
                if loop.time() >= state_due:
                    state_due = loop.time() + STATE_EVERY_S
                    data += _event(b"state", self._state())
                if decisions := reader.take():
                    data += _event(b"decisions", decisions)

                if data:
                    yield data
                await self._pause(FLUSH_EVERY_S)
        finally:
            self._readers.remove(reader)

    def _state(self) -> dict[str, object]:
        return self._service.snapshot() | {
            "console": {"local": self._is_local, "chat": self._has_chat}
        }

    async def _pause(self, seconds: float) -> None:
        """Wait until `seconds` have passed or the router stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _begin_overload(self, request: Request, reply: Reply) -> None:
        """Start an overload, and reply immediately with the prefix of its request ids."""
        try:
            asked = msgspec.json.decode((await request.read_json()).take(), type=Overload)
        except msgspec.DecodeError as error:
            raise invalid_head("INVALID_ARGUMENT", f"the body is not valid: {error}") from error
        if self._overload and not self._overload.done():
            raise console_busy("an overload is already running; wait until it has ended")

        assert self._app
        prefix = f"overload-{secrets.token_hex(2)}"
        self._overload = asyncio.create_task(
            asked.send(self._app, prefix, request.headers.get("authorization", ""))
        )
        body = _encode({"prefix": prefix, "requests": asked.requests})
        await reply.whole(HTTPStatus.ACCEPTED, [(b"content-type", b"application/json")], body)


class Overload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test overload: many requests that are sent at once, each with a long prompt."""

    requests: Annotated[int, msgspec.Meta(ge=1, le=500)] = 60
    sentences: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 75
    """Number of sentences in each prompt, of about 17 tokens each."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256

    async def send(self, app: Endpoint, prefix: str, authorization: str) -> None:
        """Pass the requests to the app as an HTTP server would, and wait until all are answered."""
        serve = asgi(app, HTTPLimits())

        async def send_one(index: int) -> None:
            prompt = f"Report {index}. " + SENTENCE * self.sentences + "Summarise."
            body = _encode(
                {
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": self.max_tokens,
                    "stream": True,
                }
            )
            headers = {
                "content-type": "application/json",
                "content-length": f"{len(body)}",
                "x-request-id": f"{prefix}-{index}",
            }
            if authorization:
                headers["authorization"] = authorization
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]

            async def receive() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            await serve({"method": "POST", "path": CHAT, "headers": pairs}, receive, _discard)

        await asyncio.gather(*(send_one(index) for index in range(self.requests)))


async def _discard(message: Message) -> None:
    """Discard a part of a reply, because no client reads it."""


def _event(name: bytes, data: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, _encode(data))


def _page(name: str) -> dict[str, Endpoint]:
    """Return the endpoint that serves one of the page's files."""
    body = files("ullage_router.http.console").joinpath(name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]] + b"; charset=utf-8"

    async def endpoint(request: Request, reply: Reply) -> None:
        await reply.whole(HTTPStatus.OK, [(b"content-type", kind), *_PAGE_HEADERS], body)

    return {"GET": endpoint, "HEAD": endpoint}
