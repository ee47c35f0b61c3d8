"""Writes one answer: a JSON body, or server-sent events that end with [DONE] whatever happens."""

import msgspec
from starlette.types import Send

from ullage_router.errors import http_status
from ullage_router.http.answers import JSON
from ullage_router.http.errors import Headers, decision_headers, envelope, error_headers
from ullage_router.stats import Record
from ullage_rpc.errors import ServiceError

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One server-sent event; JSON has no line break in it."""
    return b"data: " + data + b"\n\n"


class Writer:
    """The answer's way out; a slow client makes it wait, and with it the engine's stream."""

    def __init__(self, send: Send, record: Record) -> None:
        self._send = send
        self._record = record
        self._is_streaming = False

    async def whole(self, answer: JSON) -> None:
        """A complete answer."""
        await self._body(200, _encode(answer), [])

    async def start_stream(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *decision_headers(self._record),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._is_streaming = True

    async def chunks(self, *chunks: JSON) -> None:
        """Events of a stream, in one write."""
        body = b"".join(event(_encode(chunk)) for chunk in chunks)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_stream(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last + DONE})

    async def error(self, error: ServiceError, more_body: bool = False) -> None:
        """The error as a response, or as an event where the answer has begun."""
        if self._is_streaming:
            await self.end_stream(event(envelope(error)))
        else:
            headers = error_headers(error)
            await self._body(http_status(error), envelope(error), headers, more_body)

    async def finish(self) -> None:
        """The end of a body that was announced to go on."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _body(
        self, status: int, body: bytes, headers: Headers, more_body: bool = False
    ) -> None:
        all_headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *headers,
            *decision_headers(self._record),
        ]
        start = {"type": "http.response.start", "status": status, "headers": all_headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
