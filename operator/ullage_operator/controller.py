"""The operator at work: the watches that fill the store, and the queue that they wake."""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from ullage_operator.cluster import Cluster, unlimited
from ullage_operator.election import Election, Lead, own_identity
from ullage_operator.healer import Healer
from ullage_operator.kinds import WATCHED
from ullage_operator.lease import Candidacy, Times
from ullage_operator.metrics import LeadMetrics, ReconcileMetrics, WatchMetrics
from ullage_operator.publisher import Publisher
from ullage_operator.reconcile import Reconciler
from ullage_operator.scaler import Scaler
from ullage_operator.settings import Settings
from ullage_operator.store import Scope, ServiceKey, Store
from ullage_operator.watch import Watches
from ullage_operator.workqueue import WorkQueue

_MAX_RECHECK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    namespaces: tuple[str, ...] = ()
    """Which to serve; all where there are none."""
    resync_s: float = 300.0
    """How often to look at every service though nothing has changed."""
    lease: tuple[str, str] | None = None
    """Namespace and name of the Lease by which operators elect one; None to act alone."""
    times: Times = field(default_factory=Times)


class Controller:
    """Everything that runs between the operator's start and its end.

    An operator that does not lead watches, so that it can take over at once, and writes nothing.
    """

    def __init__(self, options: Options, settings: Settings, registry: CollectorRegistry) -> None:
        metrics, watching = ReconcileMetrics(registry), WatchMetrics(registry)
        names = dict.fromkeys(options.namespaces) or [""]
        scopes = [Scope(kind, namespace) for namespace in names for kind in WATCHED]
        lead = Lead(Candidacy(own_identity(), options.times))
        self._left_s = lead.left_s if options.lease else unlimited
        LeadMetrics(registry, self._left_s)
        self._cluster = Cluster(self._left_s)
        self.store = Store(scopes, self._wake)
        recheck_s = min(options.resync_s, _MAX_RECHECK_S)
        self._watches = Watches(self._cluster, scopes, self.store, watching, recheck_s)
        watching.count([kind.name for kind in WATCHED], self.store.counts)
        publisher = Publisher(self._cluster)
        self._healer = Healer(self._cluster, publisher, self._wake)
        self._scaler = Scaler[ServiceKey](self._wake)
        self._reconciler = Reconciler(
            self._cluster,
            self.store,
            settings,
            metrics,
            options.resync_s,
            publisher,
            self._healer,
            self._scaler,
        )
        self._queue: WorkQueue[ServiceKey] = WorkQueue(self._reconciler.reconcile)
        self._election = options.lease and Election(
            self._cluster, lead, options.lease, self._gained, self._lost
        )

    @property
    def leads(self) -> bool:
        return self._left_s() > 0

    def start(self) -> None:
        self._watches.start()
        if self._election:
            self._election.start()

    async def close(self) -> None:
        await self._watches.close()
        await self._queue.close()
        await self._healer.close()
        await self._scaler.close()
        await self._reconciler.close()
        if self._election:
            await self._election.close()  # last: until here all that was written had to be
        await self._cluster.close()

    def _gained(self) -> None:
        if self.store.complete:
            for key in self.store.services():
                self._queue.add(key)

    def _lost(self) -> None:
        self._queue.drop()
        self._reconciler.drop()

    def _wake(self, key: ServiceKey) -> None:
        if self.leads:
            self._queue.add(key)
