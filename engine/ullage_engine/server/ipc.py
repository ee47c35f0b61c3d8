"""The server's end of the wire to its worker: a ZeroMQ PAIR, one msgpack message a frame."""

import asyncio
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ullage_engine.messages import ToServer, ToWorker

# Longest path of a Unix socket, less the terminating zero.
MAX_PATH_BYTES = 107
_PREFIX = "worker-"


class EndpointError(Exception):
    """The socket cannot be made; one line naming server.run_dir."""


def endpoint(run_dir: Path, number: int) -> str:
    """Where the worker with this number connects; sockets of its ranks have longer names."""
    return f"ipc://{run_dir}/{_PREFIX}{number}.ipc"


def clear_endpoints(run_dir: Path) -> None:
    """Removes what workers that were killed left behind. Call it while there is none."""
    for path in run_dir.glob(f"{_PREFIX}*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


class ServerLink:
    """One worker's connection; a new worker gets a new link, so nothing of an old one arrives.

    Messages to the worker are queued without limit and never block: there are at most a few for
    each open request.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        path = endpoint.removeprefix("ipc://")
        if len(path.encode()) > MAX_PATH_BYTES:
            raise EndpointError(f"server.run_dir: {path} is longer than a socket's path may be")
        self._socket: zmq.asyncio.Socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise EndpointError(f"server.run_dir: cannot make {path}: {error}") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._outbox: asyncio.Queue[ToWorker] = asyncio.Queue()
        self.sending = asyncio.create_task(self._send_all())
        """Done only when it failed: then nothing reaches the worker any more."""

    def post(self, message: ToWorker) -> None:
        """Queues a message; it is lost if the worker dies before taking it."""
        self._outbox.put_nowait(message)

    async def receive(self) -> ToServer:
        """The next message.

        Raises:
            msgspec.MsgspecError: the worker sent something that is not a message.
        """
        return self._decoder.decode(await self._socket.recv())

    async def close(self) -> None:
        self.sending.cancel()
        await asyncio.gather(self.sending, return_exceptions=True)
        self._socket.close()

    async def _send_all(self) -> None:
        while True:
            message = await self._outbox.get()
            await self._socket.send(self._encoder.encode(message))
