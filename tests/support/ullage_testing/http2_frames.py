"""HTTP/2 frames of gRPC calls, right ones and wrong ones."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ullage_testing.byte_fuzz import Mutator

_GRPC_ERRORS = ("Invalid encoding", "ExecuteBatchError raised in core")
"""Beginnings of errors that gRPC itself logs: metadata that is not UTF-8, which it hands on, and an
answer to a client that has gone."""
_GRPC_LOGGER = "grpc._cython.cygrpc"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM = 1
ACK = 1
END_HEADERS = 4
PADDED = 8
HAS_PRIORITY = 32


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame. Its length may differ from the length of its payload."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    length: int | None = None

    def encoded(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        head = (length & 0xFFFFFF).to_bytes(3) + bytes([self.kind & 255, self.flags & 255])
        return head + (self.stream & 0xFFFFFFFF).to_bytes(4) + self.payload


def number(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """Encode an integer as HPACK has it (RFC 7541, 5.1)."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([first | value])
    encoded = bytearray([first | most])
    value -= most
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def fields(pairs: Mapping[str, str]) -> bytes:
    """Encode header fields, none of them indexed."""
    block = b""
    for name, value in pairs.items():
        for text in (b"\0", number(len(name), 7), name.encode(), number(len(value), 7)):
            block += text
        block += value.encode()
    return block


def call_fields(path: str, **more: str) -> bytes:
    """Encode the header fields of a call."""
    return fields(
        {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "router",
            "te": "trailers",
            "content-type": "application/grpc",
            **more,
        }
    )


def message(payload: bytes) -> bytes:
    """Put gRPC's five bytes before a message."""
    return b"\0" + len(payload).to_bytes(4) + payload


def call(stream: int, block: bytes, body: bytes) -> list[Frame]:
    """Return the frames of a call with one message."""
    return [
        Frame(HEADERS, END_HEADERS, stream, block),
        Frame(DATA, END_STREAM, stream, message(body)),
    ]


def conversation(path: str, body: bytes) -> list[Frame]:
    """Return the frames of a client that makes calls in all the ways that HTTP/2 has."""
    block = call_fields(path)
    half = len(block) // 2
    data = message(body)
    priority = (3).to_bytes(4) + b"\x10"
    return [
        Frame(SETTINGS, 0, 0, bytes.fromhex("000300000064000400010000")),
        Frame(SETTINGS, ACK, 0, b""),
        *call(1, block, body),
        Frame(HEADERS, 0, 3, block[:half]),
        Frame(CONTINUATION, END_HEADERS, 3, block[half:]),
        Frame(DATA, 0, 3, data[:7]),
        Frame(PING, 0, 0, b"12345678"),
        Frame(DATA, PADDED | END_STREAM, 3, b"\x04" + data[7:] + bytes(4)),
        Frame(WINDOW_UPDATE, 0, 0, (1 << 16).to_bytes(4)),
        Frame(WINDOW_UPDATE, 0, 3, (1 << 16).to_bytes(4)),
        Frame(HEADERS, END_HEADERS | HAS_PRIORITY, 5, priority + block),
        Frame(PRIORITY, 0, 5, priority),
        Frame(RST_STREAM, 0, 5, (8).to_bytes(4)),
        *call(7, call_fields(path, authorization="Bearer x", **{"grpc-timeout": "5S"}), body),
        Frame(GOAWAY, 0, 0, (7).to_bytes(4) + bytes(4)),
    ]


class FrameMutator:
    """Makes connections wrong: frames that are lost, repeated, moved or changed.

    Args:
        frames: of one right connection.
        mutator: changes bytes.
    """

    def __init__(self, frames: Iterable[Frame], mutator: Mutator) -> None:
        self._frames = list(frames)
        self._mutator = mutator
        self._rng = mutator.rng
        self._changes: tuple[Callable[[list[Frame]], None], ...] = (
            self._lose,
            self._repeat,
            self._move,
            self._change_kind,
            self._change_flags,
            self._change_stream,
            self._change_length,
            self._change_payload,
            self._change_payload,
        )

    def connections(self, count: int) -> Iterator[bytes]:
        """Yield the bytes of wrong connections. Of a fifth the bytes are wrong, not the frames."""
        for _ in range(count):
            if self._rng.random() < 0.2:
                yield self._mutator.mutated()
                continue
            frames = list(self._frames)
            for _ in range(self._rng.choice((1, 1, 2, 4))):
                self._rng.choice(self._changes)(frames)
            yield PREFACE + b"".join(frame.encoded() for frame in frames)

    def _lose(self, frames: list[Frame]) -> None:
        del frames[self._place(frames)]

    def _repeat(self, frames: list[Frame]) -> None:
        at = self._place(frames)
        frames[at:at] = frames[at : at + 1] * self._rng.choice((1, 3, 200, 1000))

    def _move(self, frames: list[Frame]) -> None:
        frame = frames.pop(self._place(frames))
        frames.insert(self._place([*frames, frame]), frame)

    def _change_kind(self, frames: list[Frame]) -> None:
        at = self._place(frames)
        frames[at] = replace(frames[at], kind=self._rng.choice((*range(11), 255)))

    def _change_flags(self, frames: list[Frame]) -> None:
        at = self._place(frames)
        frames[at] = replace(frames[at], flags=frames[at].flags ^ (1 << self._rng.randrange(8)))

    def _change_stream(self, frames: list[Frame]) -> None:
        at = self._place(frames)
        streams = (0, 1, 2, 3, 5, 9, 11, 1 << 30, (1 << 31) - 1, 1 << 31)
        frames[at] = replace(frames[at], stream=self._rng.choice(streams))

    def _change_length(self, frames: list[Frame]) -> None:
        at = self._place(frames)
        real = len(frames[at].payload)
        lengths = (0, max(0, real - 1), real + 1, real + 9, 1 << 14, (1 << 14) + 1, (1 << 24) - 1)
        frames[at] = replace(frames[at], length=self._rng.choice(lengths))

    def _change_payload(self, frames: list[Frame]) -> None:
        at = self._place(frames)
        frames[at] = replace(frames[at], payload=self._mutator.changed(frames[at].payload))

    def _place(self, frames: list[Frame]) -> int:
        return self._rng.randrange(len(frames)) if frames else 0


@contextlib.contextmanager
def without_grpc_errors() -> Iterator[None]:
    """Drop the errors that gRPC itself logs: pytest would keep megabytes of them."""

    def is_ours(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_GRPC_ERRORS)

    logger = logging.getLogger(_GRPC_LOGGER)
    logger.addFilter(is_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_ours)
