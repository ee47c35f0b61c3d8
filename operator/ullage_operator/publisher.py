"""Writes Events; what cannot be written is logged and forgotten, for nothing depends on it."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ullage_operator.cluster import Cluster
from ullage_operator.errors import OperatorError
from ullage_operator.events import Note, Recorder

LONGEST_S = 5.0

_logger = logging.getLogger(__name__)


class Publisher:
    """Tells the decisions about services."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._recorder = Recorder(os.environ.get("POD_NAME") or socket.gethostname())

    async def tell(self, service: Mapping[str, Any], notes: Iterable[Note]) -> None:
        """Returns soon, whether they could be written or not."""
        now = datetime.now(UTC)
        events = [e for note in notes if (e := self._recorder.record(service, note, now))]
        try:
            async with asyncio.timeout(LONGEST_S):
                for event in events:
                    await self._cluster.apply(event)
        except (OperatorError, TimeoutError) as error:
            name = service["metadata"]["name"]
            _logger.warning("Events of %s not written: %s", name, error or "no answer")
