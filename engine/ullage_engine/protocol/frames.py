"""Messages on the Unix stream between an engine's two processes: each follows its own length.

A message costs one system call to send; what has come since the last look costs the worker two
(poll, and a read for each 64 KiB) and the server's event loop one. No thread stands between them.
"""

import math
import select
import socket
import struct
from collections import deque

READ_BYTES = 64 << 10
"""Most bytes that are read at once."""
_LENGTH = struct.Struct("<I")
SEND_BUFFER_BYTES = 4 << 20
"""Bytes that either end may send before the other one reads, so that a busy worker finds a long
prompt whole. The kernel gives at most `net.core.wmem_max`."""


def framed(message: bytes) -> bytes:
    """Return a message as it goes on the stream."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts what comes on a stream into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take what came; return the messages that are whole with it."""
        pending = self._pending
        pending += data
        messages = []
        start = 0
        while len(pending) - start >= _LENGTH.size:
            first = start + _LENGTH.size
            end = first + _LENGTH.unpack_from(pending, start)[0]
            if end > len(pending):
                break
            messages.append(bytes(pending[first:end]))
            start = end
        del pending[:start]
        return messages


class BlockingLink:
    """One end of a connected stream, for a process that waits for nothing else.

    Args:
        connected: the socket; it is closed with the link.
        send_timeout_s: longest time for which the other end may read nothing.
    """

    def __init__(self, connected: socket.socket, send_timeout_s: float) -> None:
        seconds, fraction = divmod(send_timeout_s, 1.0)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._frames = Frames()
        self._messages: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        """Send a message; waits while the other end has too much to read.

        Raises:
            OSError: it is gone, or has read nothing for too long.
        """
        self._socket.sendall(framed(message))

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message; None if none came in time.

        Raises:
            OSError: the other end is gone, and everything before was returned.
        """
        while not self._messages:
            if not self._poll.poll(math.ceil(timeout_s * 1000)):
                return None
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("the other process has closed the stream")
            self._messages.extend(self._frames.feed(data))
        return self._messages.popleft()

    def close(self) -> None:
        self._socket.close()


def connect(path: str, send_timeout_s: float) -> BlockingLink:
    """Connects to the process that listens at `path`.

    Raises:
        OSError: nobody does.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        raise
    return BlockingLink(connected, send_timeout_s)
