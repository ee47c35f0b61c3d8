"""Runs the operator as a kopf program, and reports its health."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import kopf
from aiohttp import web

from ullage_common.process.addresses import listen
from ullage_operator.kube.cache import Cache
from ullage_operator.kube.connection import ApiConnection
from ullage_operator.kube.informer import keep_signals

log = logging.getLogger(__name__)

_RETRY_S = 2.0
_SILENT_S = 900.0
"""Seconds without data from a watch after which the operator reports itself unhealthy."""


class PortTaken(Exception):
    """Raised if the port for health probes cannot be bound."""


class Runnable(Protocol):
    """Protocol of the component that `Operator` starts, monitors and closes."""

    cache: Cache

    @property
    def leads(self) -> bool: ...

    @property
    def silent_s(self) -> float: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


class Operator:
    """Runs the operator as handlers of a kopf program.

    Args:
        make: builds the `Runnable` from the connection to the API server and an event that is set
            when the operator must stop.
    """

    def __init__(self, make: Callable[[ApiConnection, asyncio.Event], Runnable]) -> None:
        self._make = make
        self._connection = ApiConnection()
        self._stop = asyncio.Event()
        self._running: Runnable | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether all existing objects have been listed. A standby can be ready, too."""
        return self._running is not None and self._running.cache.complete

    async def run(self, host: str | None, probes_port: int) -> None:
        """Run until SIGINT or SIGTERM.

        Args:
            host: the address of the probes, or None for all addresses.
            probes_port: the port of the probes.

        Raises:
            PortTaken: the port for the probes cannot be bound.
        """
        try:
            listener = listen(host, probes_port)
        except OSError as error:
            raise PortTaken(error.strerror) from error
        probes = web.Application()
        probes.add_routes([web.get("/healthz", self.health)])
        runner = web.AppRunner(probes, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        try:
            await self._run_kopf()
        finally:
            # The connection closes last, because kopf may still read the API after its cleanup
            # handlers.
            await self._connection.close()
            await runner.cleanup()

    async def _run_kopf(self) -> None:
        registry = kopf.OperatorRegistry()
        self.register(registry)
        settings = kopf.OperatorSettings()
        settings.scanning.disabled = True  # informers watch, each with a kopf operator of its own
        settings.posting.enabled = False
        # The operator waits for an API server that is unavailable at its start.
        settings.networking.error_backoffs = itertools.repeat(_RETRY_S)
        try:
            await kopf.operator(
                registry=registry,
                settings=settings,
                standalone=True,
                clusterwide=True,
                stop_flag=self._stop,
            )
        except Exception as error:
            # kopf closes its session at the end even while its first scan of the API still runs.
            if not self._stop.is_set():
                raise
            log.info("kopf was stopped while it started: %r", error)

    def register(self, registry: kopf.OperatorRegistry) -> None:
        kopf.on.login(registry=registry)(self.log_in)
        kopf.on.startup(registry=registry)(self.start)
        kopf.on.cleanup(registry=registry)(self.close)

    async def log_in(self, **_: Any) -> kopf.AiohttpSession:
        return await self._connection.kopf_session()

    async def start(self, **_: Any) -> None:
        keep_signals(self._stop)
        self._running = self._make(self._connection, self._stop)
        self._running.start()

    async def close(self, **_: Any) -> None:
        if self._running is not None:
            await self._running.close()

    async def health(self, _: web.Request) -> web.Response:
        """Respond to a health check, with status 500 if the watches have been silent too long.

        The body contains the number of LLMServices, whether all objects have been listed, and
        whether this operator is the leader.
        """
        running = self._running
        silent_s = running.silent_s if running else 0.0
        is_alive = silent_s <= _SILENT_S
        facts = {
            "services": len(running.cache.services()) if running else 0,
            "complete": self.is_ready,
            "leads": running is not None and running.leads,
            "watches": "alive" if is_alive else f"no data for {silent_s:.0f} s",
        }
        return web.json_response(facts, status=200 if is_alive else 500)
