"""The HTTP server: listens, keeps time for its connections and drains them."""

import asyncio
import contextlib
import email.utils
import socket
import ssl
import time

from ullage_router.http.connection import Connection, Handler, Hub
from ullage_router.http.reader import Limits

BACKLOG = 2048
TICK_S = 0.5
HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 2.0


class HTTPServer:
    """Serves HTTP/1.1 on sockets that are bound already.

    Args:
        handler: answers requests.
        limits: of each connection.
    """

    def __init__(self, handler: Handler, limits: Limits | None = None) -> None:
        self._hub = Hub(handler, limits or Limits())
        self._server: asyncio.Server | None = None
        self._clock: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._hub.connections)

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Takes connections from now on.

        Args:
            context: of TLS; None: plaintext.
        """
        self._tick()
        self._clock = asyncio.create_task(self._keep_time(), name="http clock")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._hub),
            sock=listener,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if context else None,
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S if context else None,
        )

    async def leave(self, within_s: float) -> None:
        """Sends clients elsewhere while their requests are still served; returns when all went."""
        self._hub.is_leaving = True
        for connection in list(self._hub.connections):
            connection.leave()
        await self._all_closed(within_s)

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections and returns when those open have had their answers.

        Args:
            grace_s: after which the rest is cut off.
        """
        self._hub.is_draining = True
        if self._server:
            self._server.close()
        for connection in list(self._hub.connections):
            connection.retire()
        if not await self._all_closed(grace_s):
            for connection in list(self._hub.connections):
                connection.abort()
            await self._all_closed(grace_s)
        if self._clock:
            self._clock.cancel()

    async def _all_closed(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._hub.connections:  # noqa: ASYNC110 - asked once, at the end
                    await asyncio.sleep(0.01)
        return not self._hub.connections

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        date = email.utils.formatdate(time.time(), usegmt=True)
        self._hub.common_headers = f"date: {date}\r\n".encode()
        now = asyncio.get_running_loop().time()
        for connection in list(self._hub.connections):
            connection.tick(now)
