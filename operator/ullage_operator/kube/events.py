"""Writes Kubernetes Events (events.k8s.io/v1) about an LLMService.

Nothing depends on Events, so reconciliations do not wait for them. Writes are rate-limited, and an
Event that cannot be written is logged and dropped.
"""

import asyncio
import logging
import os
import socket
from collections import OrderedDict, deque
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
"""Seconds during which a repetition of a change is not reported by another Event.

Changes repeat, for example, if another client keeps editing an object that the operator keeps
repairing.
"""
MAX_REMEMBERED = 4096
"""Number of recent Events, across all services, that are remembered to detect repetitions."""
MAX_WAITING = 10_000
"""Maximum number of queued Events. Further Events are dropped."""
MAX_BURST = 100
"""Number of Events that may be written in a burst, without rate limiting."""
RATE = 10.0
"""Sustained rate of Events per second, once the burst is used up."""
CLOSE_S = 2.0
"""Maximum number of seconds that the operator spends on writing its last Events on shutdown."""

_logger = logging.getLogger(__name__)


class EventRecorder:
    """Writes the Events of all services one at a time. Callers must `close` it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._instance = os.environ.get("POD_NAME") or socket.gethostname()
        self._recorded_at: OrderedDict[tuple[str, EventNote], datetime] = OrderedDict()
        self._waiting: deque[Manifest] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._credit = float(MAX_BURST)
        self._credited_s = 0.0

    def record(self, service: Mapping[str, Any], notes: Iterable[EventNote]) -> None:
        """Queue one Event for each note."""
        now = datetime.now(UTC)
        uid = str(service["metadata"].get("uid", ""))
        for note in notes:
            if not self._is_new(uid, note, now):
                continue
            self._remember(uid, note, now)
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(event_of(service, note, now, self._instance))
            else:
                _logger.warning("%s: Event dropped: %s", service["metadata"]["name"], note.message)
        if self._waiting and (self._writer is None or self._writer.done()):
            self._writer = asyncio.create_task(self._write_all(), name="events")

    def drop(self) -> None:
        """Drop all queued Events, because another operator is the leader now."""
        self._waiting.clear()

    async def close(self) -> None:
        """Write queued Events for at most `CLOSE_S`, and drop the rest."""
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=CLOSE_S)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _write_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._wait_s())
            if not self._waiting:
                return
            event = self._waiting.popleft()
            self._credit -= 1.0
            try:
                await self._cluster.create(event)
            except OperatorError as error:
                name = event["regarding"]["name"]
                _logger.warning("Event of %s not written: %s", name, error)
            except Exception:  # a bug must not end the Events of all services
                _logger.exception("Event not written: %s", event["note"])

    def _wait_s(self) -> float:
        """Return the seconds until the next Event may be written."""
        now_s = asyncio.get_running_loop().time()
        earned = RATE * (now_s - self._credited_s)
        self._credit = min(float(MAX_BURST), self._credit + earned)
        self._credited_s = now_s
        return max(0.0, (1.0 - self._credit) / RATE)

    def _is_new(self, uid: str, note: EventNote, now: datetime) -> bool:
        previous = self._recorded_at.get((uid, note))
        # A time in the future is from before the clock was set back.
        return previous is None or not 0 <= (now - previous).total_seconds() < REPEAT_S

    def _remember(self, uid: str, note: EventNote, now: datetime) -> None:
        self._recorded_at[uid, note] = now
        self._recorded_at.move_to_end((uid, note))
        if len(self._recorded_at) > MAX_REMEMBERED:
            self._recorded_at.popitem(last=False)


def event_of(service: Mapping[str, Any], note: EventNote, now: datetime, instance: str) -> Manifest:
    """Return an Event about a service.

    Args:
        service: the LLMService.
        note: the reason, action and message.
        now: the current time, in UTC.
        instance: the name of this operator's pod or host.
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
