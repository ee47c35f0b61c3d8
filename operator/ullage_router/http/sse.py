"""Writes one answer: a JSON body, or server-sent events that end with [DONE] whatever happens."""

import asyncio

import msgspec

from ullage_router.errors import http_status
from ullage_router.http.answers import JSON
from ullage_router.http.errors import decision_lines, envelope, error_headers
from ullage_router.http.messages import Headers, Reply
from ullage_router.stats import Record
from ullage_rpc.errors import ServiceError

_encode = msgspec.json.Encoder().encode
KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One server-sent event; JSON has no line break in it."""
    return b"data: " + data + b"\n\n"


class Writer:
    """The answer's way out; a slow client makes it wait, and with it the engine's stream.

    Args:
        input_field: what the endpoint calls the prompt, for errors.
        keepalive_s: silence after which a stream gets a comment; 0: never.
    """

    def __init__(
        self, reply: Reply, record: Record, input_field: str, keepalive_s: float = 0.0
    ) -> None:
        self._reply = reply
        self._record = record
        self._input_field = input_field
        self._keepalive_s = keepalive_s
        self._is_streaming = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def whole(self, answer: JSON) -> None:
        """A complete answer."""
        self._body(200, _encode(answer), [])

    def start_stream(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._reply.start(200, headers, decision_lines(self._record))
        self._is_streaming = True
        if self._keepalive_s:
            self._sent_at = self._loop.time()
            self._timer = self._loop.call_later(self._keepalive_s, self._keep_alive)

    def stop(self) -> None:
        """Nothing more is sent unless somebody asks for it."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _keep_alive(self) -> None:
        """Sends a comment where nothing was sent for long enough."""
        now = self._loop.time()
        if now - self._sent_at >= self._keepalive_s:
            self._reply.nudge(KEEPALIVE)
            self._sent_at = now
        due = self._sent_at + self._keepalive_s
        self._timer = self._loop.call_at(due, self._keep_alive)

    async def events(self, data: bytes) -> None:
        """Events of a stream."""
        self._sent_at = self._loop.time()
        await self._reply.piece(data)

    def end_stream(self, last: bytes = b"") -> None:
        self._reply.end(last + DONE)

    def error(self, error: ServiceError) -> None:
        """The error as a response, or as an event where the answer has begun."""
        body = envelope(error, self._input_field)
        if self._is_streaming:
            self.end_stream(event(body))
        else:
            self._body(http_status(error), body, error_headers(error))

    def _body(self, status: int, body: bytes, headers: Headers) -> None:
        all_headers = [(b"content-type", b"application/json"), *headers]
        self._reply.whole(status, all_headers, body, decision_lines(self._record))
