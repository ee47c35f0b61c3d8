"""kopf's part: which watches are open, and which service each event is about.

No handler acts. An event of an LLMService, or of an object that one owns, says that the service
wants a look; the work queue then reconciles it. Only kopf's event handlers are used: they leave no
annotation and no finalizer, so that nothing of the operator stays in the way once it is gone.
"""

from collections.abc import Mapping
from typing import Any

import kopf

from ullage_operator.cluster import Cluster, connection
from ullage_operator.metrics import ReconcileMetrics
from ullage_operator.naming import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    owned_selector,
    pod_selector,
)
from ullage_operator.reconcile import Reconciler, ServiceKey
from ullage_operator.settings import Settings
from ullage_operator.workqueue import WorkQueue

WATCHED = (
    ("", "v1", "configmaps"),
    ("", "v1", "serviceaccounts"),
    ("", "v1", "services"),
    ("apps", "v1", "deployments"),
    ("apps", "v1", "statefulsets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
    ("policy", "v1", "poddisruptionbudgets"),
)
"""What services own, beside PodMonitors, which many clusters do not know."""


class Handlers:
    """The operator's kopf handlers and what they share while it runs."""

    def __init__(self, settings: Settings, metrics: ReconcileMetrics, resync_s: float) -> None:
        self._settings = settings
        self._metrics = metrics
        self._resync_s = resync_s
        self._cluster: Cluster | None = None
        self._queue: WorkQueue[ServiceKey] | None = None

    def register(self, registry: kopf.OperatorRegistry) -> None:
        kopf.on.login(registry=registry)(self.log_in)
        kopf.on.startup(registry=registry)(self.start)
        kopf.on.cleanup(registry=registry)(self.stop)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self.service_changed)
        for group, version, plural in WATCHED:
            kopf.on.event(group, version, plural, registry=registry)(self.owned_changed)
        kopf.on.event("", "v1", "pods", registry=registry)(self.pod_changed)

    async def log_in(self, **_: Any) -> kopf.ConnectionInfo:
        return connection()

    async def start(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        # Watches that no server or middlebox ends by itself may die unnoticed; bound them.
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 10
        settings.networking.request_timeout = 30
        settings.posting.enabled = False
        for group, version, plural in WATCHED:
            key = (group, version, plural)
            settings.watching.label_selectors[key] = owned_selector()
        settings.watching.label_selectors["", "v1", "pods"] = pod_selector()
        self._cluster = Cluster()
        reconciler = Reconciler(self._cluster, self._settings, self._metrics, self._resync_s)
        self._queue = WorkQueue(reconciler.reconcile)

    async def stop(self, **_: Any) -> None:
        if self._queue is not None:
            await self._queue.close()
        if self._cluster is not None:
            await self._cluster.close()

    async def service_changed(self, namespace: str | None, name: str, **_: Any) -> None:
        self._look_at(namespace, name)

    async def owned_changed(self, namespace: str | None, meta: Mapping[str, Any], **_: Any) -> None:
        for owner in meta.get("ownerReferences", ()):
            if owner["apiVersion"] == API_VERSION and owner["kind"] == KIND:
                self._look_at(namespace, owner["name"])

    async def pod_changed(self, namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        self._look_at(namespace, labels["app.kubernetes.io/instance"])

    def _look_at(self, namespace: str | None, name: str) -> None:
        assert self._queue is not None, "kopf runs the startup handler before any other"
        assert namespace is not None, "all that is watched lives in a namespace"
        self._queue.add(ServiceKey(namespace, name))
