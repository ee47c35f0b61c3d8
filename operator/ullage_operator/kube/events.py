"""Writes Kubernetes Events (events.k8s.io/v1) about an LLMService.

What cannot be written is logged and dropped, for nothing depends on an Event.
"""

import asyncio
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import OperatorError
from ullage_operator.conditions.events import EventNote, clipped
from ullage_operator.kube.client import Cluster

Manifest = dict[str, Any]

API_VERSION = "events.k8s.io/v1"
KIND = "Event"
CONTROLLER = f"{naming.GROUP}/operator"
REPEAT_S = 360.0
"""A decision that is taken again within this time, such as a repair of what somebody keeps
changing, gets no second Event."""
MAX_REMEMBERED = 4096
"""Newest decisions, of all services, that are known when they repeat."""
TIMEOUT_S = 5.0
"""Longest that a reconciliation waits for its Events to be written."""

_logger = logging.getLogger(__name__)


class EventRecorder:
    """Writes the Events of all services."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._instance = os.environ.get("POD_NAME") or socket.gethostname()
        self._recorded_at: OrderedDict[tuple[str, EventNote], datetime] = OrderedDict()

    async def record(self, service: Mapping[str, Any], notes: Iterable[EventNote]) -> None:
        """Writes one Event a note; returns soon, whether that succeeds or not."""
        now = datetime.now(UTC)
        uid = str(service["metadata"].get("uid", ""))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for note in notes:
                    if self._is_new(uid, note, now):
                        await self._cluster.apply(event_of(service, note, now, self._instance))
                        self._remember(uid, note, now)
        except (OperatorError, TimeoutError) as error:
            name = service["metadata"]["name"]
            _logger.warning("Events of %s not written: %s", name, str(error) or "no answer")

    def _is_new(self, uid: str, note: EventNote, now: datetime) -> bool:
        previous = self._recorded_at.get((uid, note))
        return previous is None or (now - previous).total_seconds() >= REPEAT_S

    def _remember(self, uid: str, note: EventNote, now: datetime) -> None:
        self._recorded_at[uid, note] = now
        self._recorded_at.move_to_end((uid, note))
        if len(self._recorded_at) > MAX_REMEMBERED:
            self._recorded_at.popitem(last=False)


def event_of(service: Mapping[str, Any], note: EventNote, now: datetime, instance: str) -> Manifest:
    """The Event that says `note` of a service.

    Args:
        service: the LLMService that it is about.
        now: in UTC.
        instance: name of this operator's pod or host.
    """
    meta = service["metadata"]
    regarding = {key: meta[key] for key in ("name", "namespace", "uid") if key in meta}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": f"{meta['name'][:200]}.{abs(hash((note, now))):016x}",
            "namespace": meta["namespace"],
        },
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "action": note.action,
        "reason": note.reason,
        "regarding": {"apiVersion": naming.API_VERSION, "kind": naming.KIND, **regarding},
        "note": clipped(note.message),
        "type": "Warning" if note.warning else "Normal",
    }
