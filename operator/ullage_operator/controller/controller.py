"""Connects the informers, which fill the cache, to the queue of services to reconcile.

An event only indicates that a service may have changed, so a service is never queued twice. If a
service changes while it is being reconciled, it is reconciled again afterwards.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry

from ullage_common.process import tracing
from ullage_operator.api.naming import WATCHED, Kind
from ullage_operator.api.settings import Settings
from ullage_operator.controller.apply import Applier
from ullage_operator.controller.autoscaler import Autoscaler
from ullage_operator.controller.headroom_streams import StreamTimes
from ullage_operator.controller.healer import Healer
from ullage_operator.controller.reconciler import Reconciler, ReconcileTimes
from ullage_operator.controller.rollout_queue import RolloutQueue
from ullage_operator.kube.cache import Cache, Scope, ServiceKey
from ullage_operator.kube.client import Cluster, unlimited
from ullage_operator.kube.connection import ApiConnection
from ullage_operator.kube.events import EventRecorder
from ullage_operator.kube.informer import Informers, WatchMetrics, WatchTimes
from ullage_operator.kube.leader_election import Lead, LeaderElection, own_identity
from ullage_operator.kube.lease import Candidacy, Times
from ullage_operator.metric_names import LEADER, RECONCILE, RECONCILE_SECONDS

_logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

_AT_ONCE = 16
_GAP_S = 0.2
_BACKOFF_FIRST_S = 1.0
_BACKOFF_MOST_S = 60.0
_SUCCESSES = frozenset({"ok", "gone", "yielded"})


class WorkQueue(Generic[Key]):
    """Runs `work(key)` for every key that was added.

    If `work` raises an exception, the key is retried with a backoff that doubles from 1 s to 60 s.
    At most 16 keys are processed at once, in the order of their events. Two runs of the same key
    are at least 0.2 s apart, so that a burst of events triggers only one run.

    Args:
        work: processes a key. It returns the seconds until the key's next run, or None if no run is
            due.
    """

    def __init__(self, work: Callable[[Key], Awaitable[float | None]]) -> None:
        self._work = work
        self._dirty: dict[Key, asyncio.Event] = {}
        self._workers: dict[Key, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def add(self, key: Key) -> None:
        """Queue a key for a run."""
        if key not in self._workers:
            self._dirty[key] = asyncio.Event()
            self._workers[key] = asyncio.create_task(self._serve(key), name=f"reconcile {key}")
        self._dirty[key].set()

    def keys(self) -> list[Key]:
        return list(self._workers)

    async def close(self) -> None:
        """Cancel all runs, and wait until they have stopped."""
        await asyncio.gather(*self._cancelled(), return_exceptions=True)

    def drop(self) -> None:
        """Cancel all runs and drop all queued keys."""
        self._cancelled()

    def _cancelled(self) -> list[asyncio.Task[None]]:
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        self._workers.clear()
        self._dirty.clear()
        return workers

    async def _serve(self, key: Key) -> None:
        dirty = self._dirty[key]
        backoff_s = _BACKOFF_FIRST_S
        me = asyncio.current_task()
        delay_s: float | None = 0.0
        # Code that catches a cancellation for its own timeout may lose this task's cancellation.
        while self._workers.get(key) is me and (delay_s is not None or dirty.is_set()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s or None):
                    await dirty.wait()

            try:
                async with self._slots:
                    dirty.clear()
                    delay_s = await self._work(key)
                    backoff_s = _BACKOFF_FIRST_S
            except Exception:
                # A bug must neither end the operator nor be repeated in a tight loop.
                _logger.exception("reconciling %s failed", key)
                delay_s = backoff_s
                backoff_s = min(_BACKOFF_MOST_S, 2 * backoff_s)
            await asyncio.sleep(_GAP_S)

        if self._workers.get(key) is me:
            del self._workers[key], self._dirty[key]


class OperatorMetrics:
    """Metrics on leadership, and on the results and durations of reconciliations."""

    def __init__(self, registry: CollectorRegistry, left_s: Callable[[], float]) -> None:
        self.total = RECONCILE.register(registry)
        self.seconds = RECONCILE_SECONDS.register(registry)
        LEADER.register(registry).set_function(lambda: float(left_s() > 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command-line options of the operator."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch (empty for all)."""
    lease: tuple[str, str] | None = None
    """Namespace and name of the Lease for leader election, or None without leader election."""
    name: str = "default/ullage-operator"
    """Name of the operator, shared by all replicas of the same Helm release."""
    election_times: Times = field(default_factory=Times)
    reconcile_times: ReconcileTimes = field(default_factory=ReconcileTimes)
    watch_times: WatchTimes = field(default_factory=WatchTimes)
    stream_times: StreamTimes = field(default_factory=StreamTimes)


class Controller:
    """Runs the operator's informers, work queue and workers.

    A standby operator also watches the cluster, but does not write, so that it can take over
    immediately.
    """

    def __init__(
        self,
        options: Options,
        settings: Settings,
        registry: CollectorRegistry,
        connection: ApiConnection,
        stop: asyncio.Event,
    ) -> None:
        watching = WatchMetrics(registry)
        names = dict.fromkeys(options.namespaces) or [""]
        scopes = [Scope(kind, namespace) for namespace in names for kind in WATCHED]
        lead = Lead(Candidacy(own_identity(), options.election_times))
        self._left_s = lead.left_s if options.lease else unlimited
        pod = os.environ.get("POD_NAME") or socket.gethostname()
        self._tracer = tracing.start_tracing(
            settings.tracing, "ullage-operator", {"service.instance.id": pod}
        )
        self._metrics = OperatorMetrics(registry, self._left_s)
        self._cluster = Cluster(self._left_s, connection, self._on_missing)
        self.cache = Cache(scopes, self._wake)
        self._informers = Informers(
            connection, self._cluster, scopes, self.cache, watching, stop, options.watch_times
        )
        watching.count([kind.name for kind in WATCHED], self.cache.counts)
        self._recorder = EventRecorder(self._cluster)
        self._healer = Healer(self._cluster, self._recorder, self._wake, options.stream_times)
        self._scaler = Autoscaler[ServiceKey](self._wake)
        applier = Applier(self._cluster, self.cache, self._recorder)
        self._reconciler = Reconciler(
            self._cluster,
            self.cache,
            applier,
            self._healer,
            self._scaler,
            RolloutQueue(settings.max_rollouts, self._wake),
            settings,
            options.reconcile_times,
            options.name,
        )
        self._queue: WorkQueue[ServiceKey] = WorkQueue(self._reconcile)
        self._election = options.lease and LeaderElection(
            self._cluster, lead, options.lease, self._on_gained, self._on_lost
        )

    @property
    def leads(self) -> bool:
        return self._left_s() > 0

    def start(self) -> None:
        self._informers.start()
        if self._election:
            self._election.start()

    async def close(self) -> None:
        await self._informers.close()
        await self._queue.close()
        await self._healer.close()
        await self._scaler.close()
        await self._reconciler.close()
        await self._recorder.close()
        if self._election:
            # The lead is released last, because all writes before need it.
            await self._election.close()
        if self._tracer:
            await asyncio.to_thread(self._tracer.close)

    @property
    def silent_s(self) -> float:
        """Return for how many seconds the quietest watch has received no data."""
        return self._informers.silent_s

    async def _reconcile(self, key: ServiceKey) -> float | None:
        """Reconcile a service, and return the seconds until its next reconciliation."""
        result = "bug"
        began = time.time()
        try:
            with self._metrics.seconds.time():
                result, delay_s = await self._reconciler.reconcile(key)
        finally:
            self._metrics.total.labels(result=result).inc()
            if self._tracer:
                span = self._tracer.span("reconcile", start_unix_s=began)
                names = {"k8s.namespace.name": key.namespace, "ullage.service": key.name}
                span.set({**names, "ullage.result": result})
                span.end(error="" if result in _SUCCESSES else result)
        return delay_s

    def _on_missing(self, kind: Kind, namespace: str) -> None:
        self._informers.sweep(kind, namespace)

    def _on_gained(self) -> None:
        if self.cache.complete:
            for key in self.cache.services():
                self._queue.add(key)

    def _on_lost(self) -> None:
        self._queue.drop()
        self._reconciler.drop()
        self._recorder.drop()

    def _wake(self, key: ServiceKey) -> None:
        if self.leads:
            self._queue.add(key)
