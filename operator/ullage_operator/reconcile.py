"""Observe, plan, act: the one function that every event leads to."""

import logging
from typing import Any, NamedTuple

from ullage_operator.cluster import Cluster
from ullage_operator.drift import has_drifted, stamped
from ullage_operator.errors import (
    ClusterRefused,
    ClusterUnavailable,
    InvalidManifest,
    Permanent,
    Temporary,
)
from ullage_operator.events import Deeds, named, transitions
from ullage_operator.metrics import ReconcileMetrics
from ullage_operator.plan import Observed, Plan, key_of, plan
from ullage_operator.publisher import Publisher
from ullage_operator.settings import Settings
from ullage_operator.spec import parse
from ullage_operator.status import belongs, failed_status, gather, is_leaving

Object = dict[str, Any]
_logger = logging.getLogger(__name__)


class ServiceKey(NamedTuple):
    """Which LLMService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Reconciler:
    """Makes the cluster what services declare, one service at a time."""

    def __init__(
        self, cluster: Cluster, settings: Settings, metrics: ReconcileMetrics, resync_s: float
    ) -> None:
        self._cluster = cluster
        self._publisher = Publisher(cluster)
        self._settings = settings
        self._metrics = metrics
        self._resync_s = resync_s

    async def reconcile(self, key: ServiceKey) -> float | None:
        """Brings one service a step nearer; answers when to look again, None for never."""
        result = "bug"
        with self._metrics.seconds.time():
            try:
                result = await self._step(key)
            except Temporary as error:
                _logger.warning("%s: will try again: %s", key, error)
                result = "temporary"
                return error.delay_s
            except Permanent as error:
                _logger.error("%s: its status cannot be written: %s", key, error)
                result = "permanent"
            finally:
                self._metrics.total.labels(result=result).inc()
        return None if result == "gone" else self._resync_s

    async def _step(self, key: ServiceKey) -> str:
        manifest = await self._cluster.service(*key)
        if manifest is None or "deletionTimestamp" in manifest["metadata"]:
            return "gone"  # what it owned is the garbage collector's
        observed = await gather(self._cluster, manifest)
        result, status = await self._pursue(key, manifest, observed)
        if status != observed.status:
            await self._cluster.apply_status(manifest, status)
            before, after = observed.status.get("conditions", ()), status["conditions"]
            await self._publisher.tell(manifest, transitions(before, after))
        return result

    async def _pursue(
        self, key: ServiceKey, manifest: Object, observed: Observed
    ) -> tuple[str, Object]:
        """Plans and acts; answers how that went and the status to report."""
        generation = manifest["metadata"]["generation"]
        try:
            decided = plan(parse(manifest), observed, self._settings)
            await self._act(key, manifest, decided, observed)
        except InvalidManifest as error:
            _logger.error("%s: invalid: %s", key, error)
            message = "; ".join(map(str, error.problems))
            return "invalid", failed_status(observed, generation, "InvalidSpec", message)
        except Permanent as error:
            _logger.error("%s: refused: %s", key, error)
            return "permanent", failed_status(observed, generation, "ApplyFailed", str(error))
        return "ok", decided.status

    async def _act(
        self, key: ServiceKey, manifest: Object, decided: Plan, observed: Observed
    ) -> None:
        deeds = Deeds()
        try:
            for obj in map(stamped, decided.apply):
                found = observed.objects.get(key_of(obj))
                if found is None:
                    await self._check_free(manifest, obj)
                if found is None or has_drifted(obj, found):
                    deeds.applied(obj, found, await self._cluster.apply(obj))
                    _logger.info("%s: applied %s", key, named(obj))
            for gone in decided.delete:
                await self._cluster.delete(gone)
                deeds.deleted.append(named(gone))
                _logger.info("%s: deleted %s", key, named(gone))
        finally:
            await self._publisher.tell(manifest, deeds.notes())

    async def _check_free(self, manifest: Object, obj: Object) -> None:
        """Refuses to take over an object of the same name that is not this service's."""
        meta = obj["metadata"]
        found = await self._cluster.get(
            obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"]
        )
        if found is None or (found["metadata"].get("ownerReferences") and belongs(found, manifest)):
            return
        what = f"{obj['kind']} {meta['name']}"
        if is_leaving(found, manifest):
            raise ClusterUnavailable(f"{what} of the deleted service is not collected yet", 1.0)
        raise ClusterRefused(
            f"{what} exists and is not this service's: delete it, or name the LLMService otherwise"
        )
