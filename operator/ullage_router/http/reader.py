"""From a connection's bytes to requests, within bounds: the parser is llhttp, through httptools."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote

import grpc
import httptools

from ullage_router.http.messages import Request
from ullage_rpc.errors import ServiceError

MAX_HEADERS = 100
# A chunk of one byte needs five others around it.
FRAMING_BYTES_PER_BYTE = 8
_UPGRADE = frozenset({b"upgrade", b"connection", b"http2-settings"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may ask for; bytes and seconds."""

    max_head_bytes: int = 64 << 10
    """Request line and headers."""
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 256 << 20
    """Of bodies that are not served yet, on all connections of a server together."""
    max_connections: int = 20_000
    head_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """From the end of the headers to the end of the body."""
    idle_timeout_s: float = 75.0
    """Between two requests."""
    stall_timeout_s: float = 60.0
    """For a client that takes nothing of what it is sent."""
    linger_s: float = 2.0
    """A connection closed on a client that still sends may lose the answer on its way; so what
    follows a refused request is read and thrown away for so long."""


class Phase(Enum):
    """Where in a request the connection is."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


@dataclass(slots=True)
class BodyRoom:
    """Memory for bodies that are not served yet, of all connections of a server.

    taken: of at most `most` bytes.
    """

    most: int
    taken: int = 0

    def take(self, size: int) -> bool:
        """False, and nothing is taken, where that much is not free."""
        has_room = self.taken + size <= self.most
        self.taken += size if has_room else 0
        return has_room

    def give_back(self, size: int) -> None:
        self.taken -= size


class RequestReader:
    """Callbacks of the parser.

    Args:
        limits: of sizes.
        room: that bodies take; who is told of a request gives its body's back.
        on_request: told every complete request.
    """

    def __init__(
        self, limits: Limits, room: BodyRoom, on_request: Callable[[Request], None]
    ) -> None:
        self._limits = limits
        self._room = room
        self._on_request = on_request
        self._parser = httptools.HttpRequestParser(self)
        self.phase = Phase.IDLE
        self.request = Request("", "")
        """The request that is being read."""
        self._error: ServiceError | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._body_bytes = 0
        self._fed = 0

    def feed(self, data: bytes) -> ServiceError | None:
        """Reads on; what is wrong with the bytes, after which no more must be fed."""
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._refeed(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            return self._error or _malformed(str(error))
        self._check_overhead()
        return self._error

    def late(self) -> ServiceError:
        """What a client is told whose request does not become complete."""
        what, limit_s = "body", self._limits.body_timeout_s
        if self.phase is Phase.HEAD:
            what, limit_s = "request's head", self._limits.head_timeout_s
        return ServiceError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "REQUEST_TIMEOUT",
            f"the {what} did not arrive within {limit_s:g} s; send it at once",
        )

    def on_message_begin(self) -> None:
        self.phase = Phase.HEAD
        self.request = Request("", "")
        self._url, self._headers = b"", []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is Phase.HEAD:  # trailers are not read
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.phase = Phase.BODY
        self._fed = 0
        size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
        if size > self._limits.max_head_bytes or len(self._headers) > MAX_HEADERS:
            self._fail(_head_too_large(self._limits.max_head_bytes))
        elif not self._parser.should_upgrade():
            self._read_head()

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.max_body_bytes:
            self._fail(self._too_large(f"more than {self._limits.max_body_bytes} bytes"))
        elif self._error is None and not self._room.take(len(data)):
            self._fail(_no_room())
        elif self._error is None:
            self._body += data

    def on_message_complete(self) -> None:
        if self._error is not None or self._parser.should_upgrade():
            return
        self.phase = Phase.IDLE
        self._fed = 0
        self.request.body, self._body = bytes(self._body), bytearray()
        self._on_request(self.request)

    def drop(self) -> None:
        """Gives the room back of a body that will not become complete."""
        self._room.give_back(len(self._body))
        self._body = bytearray()

    def _read_head(self) -> None:
        parser, request = self._parser, self.request
        request.method = parser.get_method().decode("latin-1")
        request.has_chunks = parser.get_http_version() != "1.0"
        request.is_kept_alive = parser.should_keep_alive()
        request.headers = headers = _merged(self._headers)
        request.has_length = "content-length" in headers or "transfer-encoding" in headers
        try:
            request.path = _path(self._url)
        except ValueError:
            self._fail(_malformed("its target is not a URL"))
        if "host" not in headers and request.has_chunks:
            self._fail(_malformed("it has no Host header"))
        self._check_length(headers.get("content-length", ""))
        self._check_expectation(headers.get("expect", ""))

    def _check_length(self, declared: str) -> None:
        if declared.isdecimal() and int(declared) > self._limits.max_body_bytes:
            self._fail(self._too_large(f"{int(declared)} bytes"))

    def _check_expectation(self, expected: str) -> None:
        if not expected or self._error is not None:
            return
        if expected.lower() == "100-continue":
            self.request.expects_leave = True
        else:
            self._fail(_expectation_failed(expected))

    def _refeed(self, rest: bytes) -> ServiceError | None:
        """Reads a request anew without its wish for another protocol, which there is none of.

        The parser takes what follows such a head for that protocol, also the body of a client that
        only offers HTTP/2.
        """
        method, url = self._parser.get_method(), self._url
        if method == b"CONNECT":
            self._fail(_malformed("it asks for a tunnel"))
            return self._error
        lines = [b"%b %b HTTP/1.1" % (method, url)]
        lines += (b"%b: %b" % pair for pair in self._headers if pair[0].lower() not in _UPGRADE)
        self._parser = httptools.HttpRequestParser(self)
        return self.feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _check_overhead(self) -> None:
        """Bounds what the parser keeps and what frames the body."""
        most = self._limits.max_head_bytes
        if self.phase is Phase.HEAD and self._fed > most:
            self._fail(_head_too_large(most))
        if self.phase is Phase.BODY and self._fed > most + FRAMING_BYTES_PER_BYTE * max(
            self._body_bytes, 1
        ):
            self._fail(_malformed("its chunks are mostly framing"))

    def _fail(self, error: ServiceError) -> None:
        self._error = self._error or error

    def _too_large(self, size: str) -> ServiceError:
        return ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "BODY_TOO_LARGE",
            f"the body has {size}; send at most {self._limits.max_body_bytes}",
            metadata={"field": "body"},
        )


def _merged(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _path(url: bytes) -> str:
    """Raises ValueError when it is no URL."""
    if url[:1] != b"/":
        try:
            url = httptools.parse_url(url).path or b"/"
        except httptools.HttpParserInvalidURLError as error:
            raise ValueError(str(error)) from error
    path = url.partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


def _malformed(what: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_REQUEST",
        f"this is no HTTP/1.1 request: {what}",
    )


def _head_too_large(most: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "HEADERS_TOO_LARGE",
        f"request line and headers are too long; send at most {most} bytes and "
        f"{MAX_HEADERS} headers",
    )


def _no_room() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "BODIES_FULL",
        "requests that arrive fill the memory for their bodies; retry",
        retry_after_s=1,
    )


def _expectation_failed(expected: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "EXPECTATION_FAILED",
        f"expect is {expected[:60]!r}; possible: 100-continue",
    )
