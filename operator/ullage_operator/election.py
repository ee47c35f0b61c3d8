"""Keeps the lead, or waits for it: the Lease's state machine acted out against the API server."""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ullage_operator.cluster import Cluster
from ullage_operator.errors import ClusterConflict, ClusterDenied, OperatorError
from ullage_operator.kinds import LEASE
from ullage_operator.lease import Candidacy, Object, claim, release

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


class Lead:
    """Whether this process leads, and for how long at least."""

    def __init__(self, candidacy: Candidacy) -> None:
        self.candidacy = candidacy

    def left_s(self) -> float:
        """For how many seconds from now this process may write."""
        return self.candidacy.leads_for_s(time.monotonic())


class Election:
    """Stands for election until closed.

    Args:
        cluster: where the Lease is.
        lead: is kept up to date.
        where: the Lease's namespace and name.
        gained: called when this process begins to lead.
        lost: called when it no longer does.
    """

    def __init__(
        self,
        cluster: Cluster,
        lead: Lead,
        where: tuple[str, str],
        gained: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._lead = lead
        self._where = where
        self._gained = gained
        self._lost = lost
        self._leads = False
        self._told = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._stand(), name="leader election")

    async def close(self) -> None:
        """Gives the lead up, so that another need not wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        led = self._lead.left_s() > 0
        self._lead.candidacy = self._lead.candidacy.resigned()
        if led:
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
        now_s = time.monotonic()
        self._lead.candidacy = self._lead.candidacy.saw(lease, now_s)
        if not self._lead.candidacy.may_take(now_s):
            return
        wanted = claim(self._lead.candidacy, lease, self._where, datetime.now(UTC))
        write = self._cluster.create if lease is None else self._cluster.replace
        taken = await write(wanted)
        self._lead.candidacy = self._lead.candidacy.took(taken, now_s, time.monotonic())
        self._told = ""

    async def _release(self) -> None:
        lease = await self._cluster.get(LEASE, *self._where)
        if lease is not None and is_of(lease, self._lead.candidacy.identity):
            await self._cluster.replace(release(lease, self._where, datetime.now(UTC)))
            _logger.info("gave up the lead")

    def _explain(self, error: Exception) -> None:
        if isinstance(error, ClusterConflict):
            return  # another was faster
        where = "/".join(self._where)
        said = f"the lease {where} cannot be had: {error or 'no answer in time'}"
        if isinstance(error, ClusterDenied):
            said = f"missing permission: {error.verb} {LEASE.qualified} in {self._where[0]}"
        if said != self._told:
            self._told = said
            _logger.error("%s", said)

    def _notice(self) -> None:
        leads = self._lead.left_s() > 0
        if leads == self._leads:
            return
        self._leads = leads
        if leads:
            _logger.info("leads, by the lease %s", "/".join(self._where))
            self._gained()
        else:
            _logger.error("no longer leads: writes nothing until it does again")
            self._lost()


def is_of(lease: Object, identity: str) -> bool:
    return bool((lease.get("spec") or {}).get("holderIdentity") == identity)
