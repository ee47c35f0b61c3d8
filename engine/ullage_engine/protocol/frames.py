"""Message framing on the Unix socket between server and worker: a length, then the message.

Sending a message takes one system call. Receiving all waiting messages takes two system calls in
the worker (a poll, and a read for each 64 KiB), and one in the server's event loop. Neither process
needs a thread for this.
"""

import math
import select
import socket
import struct
from collections import deque

READ_BYTES = 64 << 10
"""Maximum number of bytes in one read."""
SEND_BUFFER_BYTES = 4 << 20
"""Number of bytes that either end may send before the other end reads.

So a whole long prompt can wait in the buffer for a busy worker. The kernel allows at most
`net.core.wmem_max`.
"""

_LENGTH = struct.Struct("<I")
"""Length of a message, little-endian."""


def framed(message: bytes) -> bytes:
    """Return a message prefixed with its length."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Splits the bytes of a stream into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the messages that they complete."""
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
        connected: the socket, which is closed with the link.
        send_timeout_s: maximum time in seconds that a send waits for the other end to read.
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
        """Send a message, waiting while the send buffer is full.

        Raises:
            OSError: the other end is gone, or has read nothing for too long.
        """
        self._socket.sendall(framed(message))

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None if no message came in time.

        Raises:
            OSError: the other end is gone, and all of its messages were returned.
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
    """Connect to the process that listens at `path`.

    Raises:
        OSError: no process listens there.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        raise
    return BlockingLink(connected, send_timeout_s)
