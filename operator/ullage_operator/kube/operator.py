"""The operator's life, which kopf drives: its start, its end and its health."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import kopf

from ullage_operator.kube.cache import Cache
from ullage_operator.kube.connection import Connection
from ullage_operator.kube.informer import keep_signals

_RETRY_S = 2.0
_SILENT_S = 900.0
"""A watch that was not begun again for so long is beyond the operator's own help."""


class Runnable(Protocol):
    """What runs between the operator's start and its end."""

    cache: Cache

    @property
    def leads(self) -> bool: ...

    @property
    def silent_s(self) -> float: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


class Operator:
    """The operator's kopf handlers.

    Args:
        make: builds what runs, with the connection to the API server and the event that is set
            when the operator has to end.
    """

    def __init__(self, make: Callable[[Connection, asyncio.Event], Runnable]) -> None:
        self._make = make
        self._connection = Connection()
        self._stop = asyncio.Event()
        self._running: Runnable | None = None

    @property
    def is_ready(self) -> bool:
        """Whether all that exists has been seen, though another operator may lead."""
        return self._running is not None and self._running.cache.complete

    async def run(self, host: str, probes_port: int) -> None:
        """Until SIGINT or SIGTERM."""
        registry = kopf.OperatorRegistry()
        self.register(registry)
        settings = kopf.OperatorSettings()
        settings.scanning.disabled = True  # informers watch, each with a kopf operator of its own
        settings.posting.enabled = False
        # An API server that is away when the operator starts is waited for.
        settings.networking.error_backoffs = itertools.repeat(_RETRY_S)
        await kopf.operator(
            registry=registry,
            settings=settings,
            standalone=True,
            clusterwide=True,
            stop_flag=self._stop,
            liveness_endpoint=f"http://{host}:{probes_port}/healthz",
        )

    def register(self, registry: kopf.OperatorRegistry) -> None:
        kopf.on.login(registry=registry)(self.log_in)
        kopf.on.startup(registry=registry)(self.start)
        kopf.on.cleanup(registry=registry)(self.close)
        for probe in (self.services, self.complete, self.leads, self.watches):
            kopf.on.probe(registry=registry, id=probe.__name__)(probe)

    async def log_in(self, **_: Any) -> kopf.AiohttpSession:
        return await self._connection.kopf_session()

    async def start(self, **_: Any) -> None:
        keep_signals(self._stop)
        self._running = self._make(self._connection, self._stop)
        self._running.start()

    async def close(self, **_: Any) -> None:
        if self._running is not None:
            await self._running.close()
        await self._connection.close()

    async def services(self, **_: Any) -> int:
        """How many LLMServices the operator knows."""
        return 0 if self._running is None else len(self._running.cache.services())

    async def complete(self, **_: Any) -> bool:
        """Whether the operator has seen all that is there."""
        return self.is_ready

    async def leads(self, **_: Any) -> bool:
        """Whether this operator acts, or stands by."""
        return self._running is not None and self._running.leads

    async def watches(self, **_: Any) -> str:
        """Whether every watch is alive; fails /healthz where one is not."""
        silent_s = 0.0 if self._running is None else self._running.silent_s
        if silent_s > _SILENT_S:
            raise kopf.PermanentError(f"a watch has brought nothing for {silent_s:.0f} s")
        return "alive"
