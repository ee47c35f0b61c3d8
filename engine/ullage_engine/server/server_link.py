"""The server's end of its link to one worker: a Unix stream of msgpack messages.

`protocol/frames.py` describes the stream.
"""

import asyncio
import socket
from collections import deque
from pathlib import Path

import msgspec

from ullage_engine.protocol.frames import READ_BYTES, SEND_BUFFER_BYTES, Frames, framed
from ullage_engine.protocol.messages import ToServer, ToWorker

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket, without the terminating zero."""
_PREFIX = "worker-"


class EndpointError(Exception):
    """The worker's socket cannot be created; the message is one line naming server.run_dir."""


def endpoint(run_dir: Path, number: int) -> str:
    """Return the path of the socket of the worker with this number. Sockets of its ranks have
    longer names.
    """
    return f"{run_dir}/{_PREFIX}{number}.ipc"


def clear_endpoints(run_dir: Path) -> None:
    """Remove sockets that killed workers left behind. Call it while there is no worker."""
    for path in run_dir.glob(f"{_PREFIX}*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


class ServerLink:
    """The connection to one worker. Each worker has its own link, so no message of an old one
    arrives.

    Messages to the worker are queued without limit and never block, since there are only a few for
    each open request.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._listener = _listener(path)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        """The connection, once the worker has made it."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._unsent = bytearray()
        self._frames = Frames()
        self._messages: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Has an exception once messages no longer reach a worker that lives."""
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def post(self, message: ToWorker) -> None:
        """Send or queue a message, which is lost if the worker dies before it reads it."""
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
            msgspec.MsgspecError: the worker sent something that is not a message.
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
        except OSError:  # the worker is gone again
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
        if not data:  # the worker is gone, which its process shows
            self._loop.remove_reader(connected.fileno())
            return
        self._messages.extend(self._frames.feed(data))
        if self._messages and self._reader is not None:
            reader = self._reader
            self._reader = None
            if not reader.done():
                reader.set_result(None)

    def _write(self, connected: socket.socket) -> None:
        """Send as much as the worker's buffer takes, and the rest when it takes more."""
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
    """Return a socket that one worker may connect to.

    Raises:
        EndpointError: the socket cannot be made.
    """
    if len(path.encode()) > MAX_PATH_BYTES:
        raise EndpointError(f"server.run_dir: {path} is longer than a socket's path may be")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        listener.bind(path)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise EndpointError(f"server.run_dir: cannot make {path}: {error}") from error
    return listener
