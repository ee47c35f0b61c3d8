"""Keeps the lead, or waits for it: the Lease's state machine acted out against the API server.

Who leads, of several operators: a pure state machine over a coordination.k8s.io Lease.

No two clocks are compared. Everybody measures, on a clock of its own that never goes back, since
when the record has not changed; a record that stays so for its whole duration is dead. A leader
stops writing well before: `renew_deadline_s` after it *began* its last successful renewal. What is
between the two, a third of the duration, is for clocks that run at different speeds and for writes
that are on their way.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ullage_operator.api.errors import ClusterConflict, ClusterDenied, OperatorError
from ullage_operator.api.naming import LEASE
from ullage_operator.kube.client import Cluster

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Times:
    """How long a lead lasts without renewal, in seconds."""

    duration_s: float = 15.0

    @property
    def renew_deadline_s(self) -> float:
        """After which a leader that could not renew writes no more."""
        return self.duration_s * 2 / 3

    @property
    def retry_s(self) -> float:
        """Between two attempts to lead, or to go on leading."""
        return self.duration_s * 2 / 15


@dataclass(frozen=True, slots=True)
class Candidacy:
    """What one operator knows of the lead."""

    identity: str
    times: Times = Times()
    record: Object | None = None
    """The Lease's spec as last seen."""
    since_s: float = 0.0
    """When it was first seen to be so."""
    renewed_s: float | None = None
    """When the last renewal that succeeded was begun; None for who does not lead."""

    def leads_for_s(self, now_s: float) -> float:
        """For how many seconds from now this operator may write; 0 for who does not lead."""
        if self.renewed_s is None:
            return 0.0
        return max(0.0, self.renewed_s + self.times.renew_deadline_s - now_s)

    def saw(self, lease: Mapping[str, Any] | None, now_s: float) -> "Candidacy":
        """After the Lease was read; None where there is none."""
        record = None if lease is None else dict(lease.get("spec") or {})
        if record == self.record:
            return self
        is_mine = record is not None and record.get("holderIdentity") == self.identity
        renewed_s = self.renewed_s if is_mine else None
        return replace(self, record=record, since_s=now_s, renewed_s=renewed_s)

    def may_take(self, now_s: float) -> bool:
        """Whether to write the Lease: it is ours, nobody's, or of somebody who is gone."""
        record = self.record or {}
        holder = record.get("holderIdentity") or ""
        if holder in ("", self.identity):
            return True
        lasts_s = record.get("leaseDurationSeconds") or self.times.duration_s
        return now_s >= self.since_s + lasts_s

    def took(self, lease: Mapping[str, Any], begun_s: float, now_s: float) -> "Candidacy":
        """After the API server has taken the Lease that names us, asked for at `begun_s`."""
        record = dict(lease["spec"])
        return replace(self, record=record, since_s=now_s, renewed_s=begun_s)

    def resigned(self) -> "Candidacy":
        return replace(self, renewed_s=None)


def claim(
    candidacy: Candidacy, lease: Object | None, where: tuple[str, str], now: datetime
) -> Object:
    """The Lease that names this operator; with the resourceVersion of the one that was read."""
    before = (lease or {}).get("spec") or {}
    is_mine = before.get("holderIdentity") == candidacy.identity
    spec = {
        "holderIdentity": candidacy.identity,
        "leaseDurationSeconds": max(1, round(candidacy.times.duration_s)),
        "acquireTime": before.get("acquireTime") if is_mine else micro_time(now),
        "renewTime": micro_time(now),
        "leaseTransitions": (before.get("leaseTransitions") or 0) + (not is_mine and bool(before)),
    }
    return lease_with(lease, where, spec)


def release(lease: Object, where: tuple[str, str], now: datetime) -> Object:
    """The Lease that anybody may take at once."""
    spec = lease["spec"] | {
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "renewTime": micro_time(now),
    }
    return lease_with(lease, where, spec)


def lease_with(lease: Object | None, where: tuple[str, str], spec: Object) -> Object:
    """Return the Lease of a spec, with the resourceVersion of the one that was read."""
    namespace, name = where
    meta = {"namespace": namespace, "name": name}
    if lease is not None:
        meta["resourceVersion"] = lease["metadata"]["resourceVersion"]
    return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}


def micro_time(now: datetime) -> str:
    """RFC 3339 in microseconds, as Leases have it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_RELEASE_S = 3.0
_logger = logging.getLogger(__name__)


def own_namespace(served: list[str]) -> str:
    """The pod's namespace; outside of a cluster the first that is served."""
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    except OSError:
        return served[0] if served else "default"


def own_identity() -> str:
    """Names this process and no other, though its pod were restarted."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4()}"


def boot_s() -> float:
    """Seconds since the machine started, those of its suspension too: a lead ages meanwhile."""
    # Only Linux has it; elsewhere an operator runs for development.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lead:
    """Whether this process leads, and for how long at least."""

    def __init__(self, candidacy: Candidacy) -> None:
        self.candidacy = candidacy

    def left_s(self) -> float:
        """For how many seconds from now this process may write."""
        return self.candidacy.leads_for_s(boot_s())


class LeaderElection:
    """Stands for election until closed.

    Args:
        cluster: where the Lease is.
        lead: is kept up to date.
        where: the Lease's namespace and name.
        on_gained: called when this process begins to lead.
        on_lost: called when it no longer does.
    """

    def __init__(
        self,
        cluster: Cluster,
        lead: Lead,
        where: tuple[str, str],
        on_gained: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._lead = lead
        self._where = where
        self._on_gained = on_gained
        self._on_lost = on_lost
        self._leads = False
        self._reported = ""
        self._holder = ""
        """Whose lead was logged last."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._stand(), name="leader election")

    async def close(self) -> None:
        """Give the lead up, so that another need not wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        was_leading = self._lead.left_s() > 0
        self._lead.candidacy = self._lead.candidacy.resigned()
        if was_leading:
            try:
                async with asyncio.timeout(_RELEASE_S):
                    await self._release()
            except (OperatorError, TimeoutError) as error:
                _logger.warning("the lead was not given up, and ends by itself: %s", error)

    async def _stand(self) -> None:
        times = self._lead.candidacy.times
        while True:
            left_s = self._lead.left_s()
            try:
                async with asyncio.timeout(left_s or times.renew_deadline_s):
                    await self._attempt()
            except (OperatorError, TimeoutError) as error:
                self._explain(error)
            except Exception:
                _logger.exception("leader election failed")
            self._notice()
            await asyncio.sleep(min(times.retry_s, self._lead.left_s() or times.retry_s))
            self._notice()

    async def _attempt(self) -> None:
        lease = await self._cluster.get(LEASE, *self._where)
        now_s = boot_s()
        self._lead.candidacy = self._lead.candidacy.saw(lease, now_s)
        if not self._lead.candidacy.may_take(now_s):
            self._stand_by((lease or {}).get("spec") or {})
            return
        wanted = claim(self._lead.candidacy, lease, self._where, datetime.now(UTC))
        write = self._cluster.create_lease if lease is None else self._cluster.replace
        taken = await write(wanted)
        self._lead.candidacy = self._lead.candidacy.took(taken, now_s, boot_s())
        self._reported = ""

    async def _release(self) -> None:
        lease = await self._cluster.get(LEASE, *self._where)
        if lease is not None and is_of(lease, self._lead.candidacy.identity):
            await self._cluster.replace(release(lease, self._where, datetime.now(UTC)))
            _logger.info("gave up the lead")

    def _stand_by(self, record: Mapping[str, Any]) -> None:
        holder = record.get("holderIdentity", "")
        if holder != self._holder:
            self._holder = holder
            _logger.info("stands by: %s leads, by the lease %s", holder, "/".join(self._where))

    def _explain(self, error: Exception) -> None:
        if isinstance(error, ClusterConflict):
            return  # another was faster
        where = "/".join(self._where)
        message = f"the lease {where} cannot be had: {str(error) or 'no answer in time'}"
        if isinstance(error, ClusterDenied):
            message = f"missing permission: {error.verb} {LEASE.qualified} in {self._where[0]}"
        if message != self._reported:
            self._reported = message
            _logger.error("%s", message)

    def _notice(self) -> None:
        leads = self._lead.left_s() > 0
        if leads == self._leads:
            return
        self._leads = leads
        self._holder = ""
        if leads:
            _logger.info("leads, by the lease %s", "/".join(self._where))
            self._on_gained()
        else:
            _logger.error("no longer leads: writes nothing until it does again")
            self._on_lost()


def is_of(lease: Object, identity: str) -> bool:
    return bool((lease.get("spec") or {}).get("holderIdentity") == identity)
