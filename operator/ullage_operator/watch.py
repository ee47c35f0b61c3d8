"""Keeps the store what the cluster is: one list and one endless watch for each scope.

A watch that ends is resumed where it was; one whose history is gone is listed anew, which also
tells what was deleted meanwhile. Failures are retried ever more slowly, with jitter, so that a
thousand watches do not fall upon an API server that has just come back.
"""

import asyncio
import logging
import math
import random
from collections.abc import Sequence

from ullage_operator.cluster import Cluster, Event, Object
from ullage_operator.errors import (
    ClusterDenied,
    ClusterForgets,
    KindAbsent,
    OperatorError,
    Temporary,
)
from ullage_operator.metrics import WatchMetrics
from ullage_operator.store import Scope, Store

_FIRST_S, _MOST_S = 0.2, 30.0
_HEALTHY_S = 10.0
"""A watch that lived so long, or told something, has not failed in vain: retries begin anew."""
_logger = logging.getLogger(__name__)


class Backoff:
    """Delays that double up to a bound, each a random share of between half and all of it."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def next_s(self, at_least_s: float = 0.0) -> float:
        bound_s, self._next_s = self._next_s, min(_MOST_S, 2 * self._next_s)
        return max(at_least_s, bound_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        self._next_s = _FIRST_S


class Watches:
    """The watches of all scopes.

    Args:
        cluster: where to watch.
        scopes: what to watch.
        store: what to fill.
        metrics: counts restarts.
        recheck_s: how often to look whether a kind that was absent or denied no longer is.
    """

    def __init__(
        self,
        cluster: Cluster,
        scopes: Sequence[Scope],
        store: Store,
        metrics: WatchMetrics,
        recheck_s: float,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._metrics = metrics
        self._recheck_s = recheck_s
        self._scopes = scopes
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(scope), name=f"watch {scope.kind.qualified}")
            for scope in self._scopes
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, scope: Scope) -> None:
        backoff, revision = Backoff(), ""
        loop = asyncio.get_running_loop()
        while True:
            begun_s, known = loop.time(), math.inf
            try:
                revision = revision or await self._list(scope)
                known = self._store.revision(scope)
                revision = await self._follow(scope, revision)
                reason, at_least_s = "ended", 0.0
            except Exception as error:
                reason, at_least_s = self._failed(scope, error)
                revision = self._resume(scope, revision, error)
            self._metrics.restarts.labels(kind=scope.kind.name, reason=reason).inc()
            if loop.time() - begun_s > _HEALTHY_S or self._store.revision(scope) > known:
                backoff.reset()
            await asyncio.sleep(backoff.next_s(at_least_s))

    def _resume(self, scope: Scope, revision: str, error: Exception) -> str:
        """Where to watch on; nothing where only a new list can tell what is there."""
        is_lost = isinstance(error, ClusterForgets | KindAbsent | ClusterDenied)
        if is_lost or not revision or not isinstance(error, Temporary):
            return ""
        return str(self._store.revision(scope))

    async def _list(self, scope: Scope) -> str:
        objects: list[Object] = []
        revision = ""
        async for page, version in self._cluster.pages(*scope):
            objects += page
            revision = version
        self._store.listed(scope, objects, revision)
        return revision

    async def _follow(self, scope: Scope, revision: str) -> str:
        """Until the watch ends; answers up to where it came."""
        async for event in self._cluster.watch(*scope, revision):
            self._take(scope, event)
        return str(self._store.revision(scope)) if revision.isdecimal() else ""

    def _take(self, scope: Scope, event: Event) -> None:
        if event.type in ("ADDED", "MODIFIED"):
            self._store.changed(scope, event.object)
        elif event.type == "DELETED":
            self._store.deleted(scope, event.object)
        elif event.type == "BOOKMARK":
            self._store.reached(scope, event.object["metadata"]["resourceVersion"])

    def _failed(self, scope: Scope, error: Exception) -> tuple[str, float]:
        """Why, in a word, and after how many seconds at least to try again."""
        kind, where = scope.kind, scope.namespace or "all namespaces"
        match error:
            case ClusterForgets():
                return "forgotten", 0.0
            case KindAbsent():
                if self._store.absent(scope) and not kind.optional:
                    _logger.warning("%s; will look again", error)
                return "absent", self._recheck_s
            case ClusterDenied():
                if self._store.denied(scope, error.verb):
                    message = "missing permission: %s %s in %s; the rest goes on"
                    _logger.error(message, error.verb, kind.qualified, where)
                return "denied", self._recheck_s
            case Temporary():
                _logger.warning("watching %s in %s: %s", kind.qualified, where, error)
                return "unavailable", error.delay_s
            case OperatorError():
                _logger.error("watching %s in %s: %s", kind.qualified, where, error)
                return "refused", self._recheck_s
        # A bug must not leave the operator deaf to a kind.
        _logger.exception("watching %s in %s failed", kind.qualified, where, exc_info=error)
        return "bug", _HEALTHY_S
