"""Leader election: acquires and renews a Lease on the API server, or stands by."""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ullage_operator.api.errors import ClusterConflict, ClusterDenied, OperatorError
from ullage_operator.api.naming import LEASE
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.lease import Candidacy, claim, is_of, release

Object = dict[str, Any]

SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_RELEASE_S = 3.0
_logger = logging.getLogger(__name__)


def own_namespace(served: list[str]) -> str:
    """Return the namespace of this pod. Outside a cluster, return the first served namespace."""
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    except OSError:
        return served[0] if served else "default"


def own_identity() -> str:
    """Return an identity that is unique to this process, even across restarts of its pod."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4()}"


def boot_s() -> float:
    """Return the seconds since boot, including time during which the machine was suspended.

    Leases age during that time, too.
    """
    # Only Linux has this clock. On other systems an operator runs only for development.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lead:
    """The leadership of this process, which expires unless it is renewed."""

    def __init__(self, candidacy: Candidacy) -> None:
        self.candidacy = candidacy

    def left_s(self) -> float:
        """Return the seconds for which this process may still write."""
        return self.candidacy.leads_for_s(boot_s())


class LeaderElection:
    """Participates in the leader election until it is closed.

    Args:
        cluster: the cluster with the Lease.
        lead: the leadership to update.
        where: the namespace and name of the Lease.
        on_gained: called when this process becomes the leader.
        on_lost: called when this process stops being the leader.
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
        """Name of the leader that was last logged."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._stand(), name="leader election")

    async def close(self) -> None:
        """Release the Lease, so that another operator need not wait until it expires."""
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
                _logger.warning("the lease was not released, so it expires by itself: %s", error)

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
            _logger.info("released the lease")

    def _stand_by(self, record: Mapping[str, Any]) -> None:
        holder = record.get("holderIdentity", "")
        if holder != self._holder:
            self._holder = holder
            _logger.info("stands by: %s leads, by the lease %s", holder, "/".join(self._where))

    def _explain(self, error: Exception) -> None:
        if isinstance(error, ClusterConflict):
            return  # another operator was faster
        where = "/".join(self._where)
        message = f"the lease {where} cannot be taken: {str(error) or 'no answer in time'}"
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
            _logger.error("no longer leads, so it writes nothing until it leads again")
            self._on_lost()
