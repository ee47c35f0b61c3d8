"""Length-prefixed messages on the Unix socket between server and worker.

Sending a message takes one system call. To receive all pending messages, the worker makes two
system calls (a poll, and a read for each 64 KiB) and the server's event loop makes one. Neither
process needs a thread for this.
"""

import math
import select
import socket
import struct
from collections import deque

READ_BYTES = 64 << 10
"""Maximum number of bytes in one read."""
SEND_BUFFER_BYTES = 4 << 20
"""Size of each socket's send buffer: bytes that can be sent before the other process reads.

The buffer can therefore hold an entire long prompt while the worker is busy. The kernel caps its
size at `net.core.wmem_max`.
"""

_LENGTH = struct.Struct("<I")
"""Format of the length prefix: a little-endian 32-bit unsigned integer."""


def framed(message: bytes) -> bytes:
    """Return a message prefixed with its length."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the messages that are now complete."""
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
    """One end of a socket connection, for a process that may block while it waits for messages.

    Args:
        connected: the connected socket. Closing the link closes it.
        send_timeout_s: maximum time in seconds that a send blocks until the other process reads.
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
        """Send a message, blocking while the send buffer is full.

        Raises:
            OSError: the other process has closed the socket, or has read nothing for too long.
        """
        self._socket.sendall(framed(message))

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None if none arrives within `timeout_s` seconds.

        Raises:
            OSError: the other process has closed the socket, and no message is left to return.
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
    """Connect to the process that listens on the Unix socket `path`.

    Raises:
        OSError: no process is listening on the socket.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(path)
    except OSError:
        connected.close()
        raise
    return BlockingLink(connected, send_timeout_s)
