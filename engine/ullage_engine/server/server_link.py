"""The server's end of the connection to a worker: msgpack messages on a Unix socket.

`protocol/frames.py` describes the framing of the messages.
"""

import asyncio
import socket
from collections import deque
from pathlib import Path

import msgspec

from ullage_engine.protocol.frames import READ_BYTES, SEND_BUFFER_BYTES, Frames, framed
from ullage_engine.protocol.messages import ToServer, ToWorker

MAX_PATH_BYTES = 107
"""Maximum length of a Unix socket path in bytes, excluding the terminating null byte."""
_PREFIX = "worker-"


class EndpointError(Exception):
    """Raised if the worker's socket cannot be created.

    The message is one line that names server.run_dir.
    """


def endpoint(run_dir: Path, number: int) -> str:
    """Return the socket path for the worker with this number.

    The sockets of the worker's ranks use this path with a suffix.
    """
    return f"{run_dir}/{_PREFIX}{number}.ipc"


def clear_endpoints(run_dir: Path) -> None:
    """Remove the sockets of killed workers. Call this only while no worker is running."""
    for path in run_dir.glob(f"{_PREFIX}*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


class ServerLink:
    """The connection to one worker.

    Each worker has its own link, so that no stale messages arrive from an earlier worker. Sending
    never blocks. The queue of outgoing messages is unbounded, because each open request has only a
    few messages.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._listener = _listener(path)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        """The connection, or None until the worker has connected."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._unsent = bytearray()
        self._frames = Frames()
        self._messages: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Future that fails when messages can no longer be delivered to a worker that is alive."""
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def post(self, message: ToWorker) -> None:
        """Send or queue a message. It is lost if the worker dies before reading it."""
        try:
            data = framed(self._encoder.encode(message))
        except Exception as error:
            self._fail(error)
            return
        is_waiting = bool(self._unsent)
        self._unsent += data
        if self._socket is not None and not is_waiting:
            self._write(self._socket)

    async def receive(self) -> ToServer:
        """Wait for the next message.

        Raises:
            msgspec.MsgspecError: the worker sent an invalid message.
        """
        while not self._messages:
            self._reader = self._loop.create_future()
            await self._reader
        return self._decoder.decode(self._messages.popleft())

    def close(self) -> None:
        if self.failure.done():
            self.failure.exception()  # The waiter may be gone, and asyncio would log the error.
        self._stop_listening()
        self._path.unlink(missing_ok=True)
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # the worker has gone already
            return
        self._stop_listening()
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connected
        self._loop.add_reader(connected.fileno(), self._read, connected)
        if self._unsent:
            self._write(connected)

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _read(self, connected: socket.socket) -> None:
        try:
            data = connected.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the worker is gone: its process's exit is handled elsewhere
            self._loop.remove_reader(connected.fileno())
            return
        self._messages.extend(self._frames.feed(data))
        if self._messages and self._reader is not None:
            reader = self._reader
            self._reader = None
            if not reader.done():
                reader.set_result(None)

    def _write(self, connected: socket.socket) -> None:
        """Send as much as fits into the socket buffer, and the rest once the buffer has room."""
        try:
            del self._unsent[: connected.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # the worker is gone
            self._unsent.clear()
        except OSError as error:
            self._fail(error)
        if self._unsent and not self.failure.done():
            self._loop.add_writer(connected.fileno(), self._write, connected)
        else:
            self._loop.remove_writer(connected.fileno())

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)


def _listener(path: str) -> socket.socket:
    """Return a listening socket for one worker.

    Raises:
        EndpointError: the socket cannot be created.
    """
    if len(path.encode()) > MAX_PATH_BYTES:
        raise EndpointError(
            f"server.run_dir: {path} is too long for a socket; choose a shorter path"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        listener.bind(path)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise EndpointError(f"server.run_dir: cannot create {path}: {error}") from error
    return listener
