"""A request as it was read, and the answer's way out: status, headers, framing, backpressure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

Headers = list[tuple[bytes, bytes]]

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_CHUNKED = b"transfer-encoding: chunked\r\n"
_CLOSE = b"connection: close\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Request:
    """One request, complete."""

    method: str
    path: str
    """Percent-decoded, without the query."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case; values of a name that came twice are joined by commas."""
    body: bytes = b""
    is_kept_alive: bool = True
    """The client wants to use the connection again."""
    has_chunks: bool = True
    """The client understands chunked answers: it speaks HTTP/1.1."""
    has_length: bool = False
    """The client said how long the body is, or sent it in chunks."""
    expects_leave: bool = False
    """The client waits to be told that its body is welcome."""


class Outlet(Protocol):
    """What an answer is written to."""

    @property
    def common_headers(self) -> bytes:
        """Header lines of every reply."""

    @property
    def is_closing(self) -> bool:
        """The connection ends with this reply, whatever the client wants."""

    @property
    def is_full(self) -> bool:
        """The client does not take what it is sent."""

    def write(self, data: bytes) -> None:
        """Sends, or keeps what the client does not take yet."""

    async def drain(self) -> None:
        """Waits for a client that does not take what it is sent."""


class Reply:
    """The one answer to a request; `whole`, or `start`, `piece` any number of times and `end`."""

    def __init__(self, outlet: Outlet, request: Request) -> None:
        self._outlet = outlet
        self._has_body = request.method != "HEAD"
        self._has_chunks = request.has_chunks
        self.is_kept_alive = request.is_kept_alive
        """The connection can be used for another request afterwards."""
        self.has_begun = False
        self.is_complete = False
        self._head = b""

    def whole(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """The answer in one write.

        Args:
            lines: more headers, as they are sent.
        """
        length = b"content-length: %d\r\n" % len(body)
        self.has_begun = self.is_complete = True
        head = self._make_head(status, headers, length + lines)
        self._outlet.write(head + body if self._has_body else head)

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """The head of an answer whose length is not known; sent with the first piece.

        Args:
            lines: more headers, as they are sent.
        """
        if not self._has_chunks:  # the end of the connection is the end of the reply
            self.is_kept_alive = False
        framing = _CHUNKED if self._has_chunks else b""
        self._head = self._make_head(status, headers, framing + lines)
        self.has_begun = True

    async def piece(self, data: bytes) -> None:
        """A part of the body; returns when the client has taken enough of those before it."""
        self._outlet.write(self._take_head() + self._frame(data))
        await self._outlet.drain()

    def nudge(self, data: bytes) -> None:
        """A part that is of no use to a client which has others to read."""
        if not (self.is_complete or self._outlet.is_full):
            self._outlet.write(self._take_head() + self._frame(data))

    def end(self, data: bytes = b"") -> None:
        """The last part."""
        last = _LAST_CHUNK if self._has_chunks and self._has_body else b""
        self.is_complete = True
        self._outlet.write(self._take_head() + self._frame(data) + last)

    def _frame(self, data: bytes) -> bytes:
        if not self._has_body or not data:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._has_chunks else data

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def _make_head(self, status: int, headers: Headers, more: bytes) -> bytes:
        lines = [_STATUS_LINES[status], self._outlet.common_headers, more]
        for name, value in headers:
            if name == b"connection":
                self.is_kept_alive = False
            else:
                lines += (name, b": ", value, b"\r\n")
        if self._outlet.is_closing:
            self.is_kept_alive = False
        if not self.is_kept_alive:
            lines.append(_CLOSE)
        lines.append(b"\r\n")
        return b"".join(lines)
