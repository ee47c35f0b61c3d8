"""The HTTP server: uvicorn's protocol on bound sockets, with time limits and draining."""

import asyncio
import contextlib
import email.utils
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import cast

import uvicorn

from ullage_router.background import failures_logged
from ullage_router.http.connection import ConnectionState, HTTPConnection, ServedConnection
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import Reply, Request, asgi

BACKLOG = 2048
TICK_S = 0.5
"""Seconds between two checks of the connections' time limits."""
TICKED_PER_TURN = 512
"""Maximum number of connections that are checked in one iteration of the event loop."""
HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 2.0


class HTTPServer:
    """Serves HTTP/1.1 on sockets that are already bound.

    uvicorn's own `Server` is not used, because it has no time limit for TLS handshakes and cannot
    send clients to another process before it stops.

    Args:
        serve: Serves the requests.
        limits: Limits on each connection and on all connections, or None for the defaults.
    """

    def __init__(
        self, serve: Callable[[Request, Reply], Awaitable[None]], limits: HTTPLimits | None = None
    ) -> None:
        limits = limits or HTTPLimits()
        self._config = uvicorn.Config(
            asgi(serve, limits),
            http=HTTPConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._config.load()

        self._state = ConnectionState(limits)
        self._server: asyncio.Server | None = None
        self._clock: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """The number of open connections."""
        return len(self._state.connections)

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Start accepting connections.

        Args:
            listener: The bound socket.
            context: The TLS context, or None for plaintext.
        """
        self._set_date()
        self._clock = asyncio.create_task(self._keep_time(), name="http clock")

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HTTPConnection(self._config, self._state, {}, loop),
            sock=listener,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if context else None,
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S if context else None,
        )

    async def leave(self, within_s: float) -> None:
        """Tell clients to reconnect elsewhere, while the server still serves their requests.

        Args:
            within_s: Seconds after which the method returns, even if connections are still open.
        """
        self._state.is_leaving = True
        for connection in self._connections:
            connection.leave()
        await self._all_closed(within_s)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting connections, and wait until all open requests are answered.

        Args:
            grace_s: Seconds after which connections that are still open are aborted.
        """
        self._state.is_leaving = self._state.is_draining = True
        if self._server:
            self._server.close()

        for connection in self._connections:
            connection.shutdown()
        if not await self._all_closed(grace_s):
            for connection in self._connections:
                connection.abort()
            await self._all_closed(grace_s)

        if self._clock:
            self._clock.cancel()

    async def _all_closed(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._is_busy:  # noqa: ASYNC110 - only while the server stops
                    await asyncio.sleep(0.01)
        return not self._is_busy

    @property
    def _connections(self) -> list[ServedConnection]:
        return list(cast(set[ServedConnection], self._state.connections))

    @property
    def _is_busy(self) -> bool:
        return bool(self._state.connections or self._state.tasks)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with failures_logged("http clock"):
                self._set_date()
            await self._tick()

    def _set_date(self) -> None:
        date = email.utils.formatdate(time.time(), usegmt=True)
        self._state.default_headers = [(b"date", date.encode())]

    async def _tick(self) -> None:
        """Enforce the time limits of all connections, with pauses for other work between them."""
        loop = asyncio.get_running_loop()
        all_open = cast(set[ServedConnection], self._state.connections)
        for number, connection in enumerate(self._connections):
            if number and not number % TICKED_PER_TURN:
                await asyncio.sleep(0)
            if connection in all_open:  # others left in a pause
                with failures_logged("time limits of a connection"):
                    connection.tick(loop.time())
