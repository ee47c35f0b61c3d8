"""The operator at work: the watches that fill the store, and the queue that they wake."""

from collections.abc import Sequence

from ullage_operator.cluster import Cluster
from ullage_operator.healer import Healer
from ullage_operator.kinds import WATCHED
from ullage_operator.metrics import ReconcileMetrics, WatchMetrics
from ullage_operator.publisher import Publisher
from ullage_operator.reconcile import Reconciler
from ullage_operator.settings import Settings
from ullage_operator.store import Scope, ServiceKey, Store
from ullage_operator.watch import Watches
from ullage_operator.workqueue import WorkQueue

_MAX_RECHECK_S = 60.0


class Controller:
    """Everything that runs between the operator's start and its end.

    Args:
        namespaces: which to serve; all where there are none.
        settings: the operator's.
        metrics: of reconciliations.
        watching: metrics of the watches.
        resync_s: how often to look at every service though nothing has changed.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        settings: Settings,
        metrics: ReconcileMetrics,
        watching: WatchMetrics,
        resync_s: float,
    ) -> None:
        names = dict.fromkeys(namespaces) or [""]
        scopes = [Scope(kind, namespace) for namespace in names for kind in WATCHED]
        self._cluster = Cluster()
        self.store = Store(scopes, self._wake)
        recheck_s = min(resync_s, _MAX_RECHECK_S)
        self._watches = Watches(self._cluster, scopes, self.store, watching, recheck_s)
        watching.count([kind.name for kind in WATCHED], self.store.counts)
        publisher = Publisher(self._cluster)
        self._healer = Healer(self._cluster, publisher, self._wake)
        self._reconciler = Reconciler(
            self._cluster, self.store, settings, metrics, resync_s, publisher, self._healer
        )
        self._queue: WorkQueue[ServiceKey] = WorkQueue(self._reconciler.reconcile)

    def start(self) -> None:
        self._watches.start()

    async def close(self) -> None:
        await self._watches.close()
        await self._queue.close()
        await self._healer.close()
        await self._reconciler.close()
        await self._cluster.close()

    def _wake(self, key: ServiceKey) -> None:
        self._queue.add(key)
