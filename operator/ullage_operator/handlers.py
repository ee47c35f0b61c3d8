"""kopf's part: the operator's life from its start to its end, and its health.

What happens in the cluster is not told by kopf but by `ullage_operator.watch`: kopf's watch tells
no deletion that fell into a gap of its history, and one that is refused ends the operator.
"""

from collections.abc import Callable
from typing import Any

import kopf

from ullage_operator.controller import Controller
from ullage_operator.transport import connection


class Handlers:
    """The operator's kopf handlers; `make` builds what runs between start and stop."""

    def __init__(self, make: Callable[[], Controller]) -> None:
        self._make = make
        self._controller: Controller | None = None

    def register(self, registry: kopf.OperatorRegistry) -> None:
        kopf.on.login(registry=registry)(self.log_in)
        kopf.on.startup(registry=registry)(self.start)
        kopf.on.cleanup(registry=registry)(self.stop)
        kopf.on.probe(registry=registry, id="services")(self.services)
        kopf.on.probe(registry=registry, id="complete")(self.complete)
        kopf.on.probe(registry=registry, id="leads")(self.leads)

    async def log_in(self, **_: Any) -> kopf.ConnectionInfo:
        return connection()

    async def start(self, **_: Any) -> None:
        self._controller = self._make()
        self._controller.start()

    async def stop(self, **_: Any) -> None:
        if self._controller is not None:
            await self._controller.close()

    async def services(self, **_: Any) -> int:
        """How many LLMServices the operator knows."""
        return 0 if self._controller is None else len(self._controller.store.services())

    async def complete(self, **_: Any) -> bool:
        """Whether the operator has seen all that is there."""
        return self._controller is not None and self._controller.store.complete

    async def leads(self, **_: Any) -> bool:
        """Whether this operator acts, or stands by."""
        return self._controller is not None and self._controller.leads
