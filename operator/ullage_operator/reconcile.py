"""Observe, plan, act: the one function that every event leads to."""

import dataclasses
import logging
import random
from typing import Any, NamedTuple

from ullage_operator.act import Acted, Actor, Replaced
from ullage_operator.cluster import Cluster
from ullage_operator.errors import ClusterDenied, InvalidManifest, Permanent, Temporary
from ullage_operator.events import transitions
from ullage_operator.healer import Healer
from ullage_operator.kinds import SERVICE
from ullage_operator.measures import Measures
from ullage_operator.metrics import ReconcileMetrics
from ullage_operator.plan import Observed, Plan, plan, retold, seen_of
from ullage_operator.publisher import Publisher
from ullage_operator.recall import is_measured
from ullage_operator.scaler import Followed, Scaler, router_addresses
from ullage_operator.scaling import scaled, scaled_here, scaling_notes
from ullage_operator.settings import Settings
from ullage_operator.spec import Service, parse_stored
from ullage_operator.status import failed_status, observe
from ullage_operator.store import Denied, ServiceKey, Store
from ullage_operator.treatment import silent_pools

Object = dict[str, Any]
_logger = logging.getLogger(__name__)
_LEAST_WAIT_S = 1.0
_MOST_TRIES = 7
"""That count: after them it is tried about once a minute."""


class Outcome(NamedTuple):
    """How one look at a service went."""

    result: str
    status: Object
    """To report."""
    decided: Plan | None = None
    """What is still to be done once the status is written."""
    again_s: float | None = None
    """After how many seconds to look again at the latest."""


class Reconciler:
    """Makes the cluster what services declare, one service at a time."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        settings: Settings,
        metrics: ReconcileMetrics,
        resync_s: float,
        publisher: Publisher,
        healer: Healer,
        scaler: Scaler[ServiceKey],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._publisher = publisher
        self._healer = healer
        self._actor = Actor(cluster, store, publisher)
        self._settings = settings
        self._metrics = metrics
        self._resync_s = resync_s
        self._measures = Measures()
        self._scaler = scaler
        self._failures: dict[ServiceKey, int] = {}
        """Tries in a row of which something is to be tried again."""
        self._parsed: dict[ServiceKey, tuple[str, int, Service]] = {}

    async def reconcile(self, key: ServiceKey) -> float | None:
        """Brings one service a step nearer; answers when to look again, None for never."""
        result, again_s = "bug", None
        with self._metrics.seconds.time():
            try:
                result, again_s = await self._step(key)
            except Temporary as error:
                _logger.warning("%s: will try again: %s", key, error)
                result = "temporary"
                return self._backoff_s(key, error.delay_s)
            except Permanent as error:
                _logger.error("%s: its status cannot be written: %s", key, error)
                result = "permanent"
            finally:
                self._metrics.total.labels(result=result).inc()
        if result != "temporary":
            self._failures.pop(key, None)
        if result != "gone":
            # Each at another time, or a thousand services would all be looked at at once.
            resync_s = self._resync_s * random.uniform(0.8, 1.0)
            return max(_LEAST_WAIT_S, min(resync_s, again_s or resync_s))
        self._forget(key)
        return None

    def _backoff_s(self, key: ServiceKey, least_s: float) -> float:
        """Seconds until the next try, which double while nothing else is seen to change."""
        self._failures[key] = tries = min(self._failures.get(key, 0) + 1, _MOST_TRIES)
        return max(least_s, 2.0 ** (tries - 1) * random.uniform(0.8, 1.0))

    def drop(self) -> None:
        """Forgets all: another operator leads, and what it does is not seen here."""
        self._parsed.clear()
        self._failures.clear()
        self._healer.drop()
        self._measures.drop()
        self._scaler.drop()

    def _forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._parsed.pop(key, None)
        self._failures.pop(key, None)
        self._healer.forget(key)
        self._measures.forget(key)
        self._scaler.forget(key)

    async def _step(self, key: ServiceKey) -> tuple[str, float | None]:
        """The result, and after how many seconds to look again at the latest."""
        manifest = self._store.service(key)
        if manifest is None or "deletionTimestamp" in manifest["metadata"]:
            return "gone", None  # what it owned is the garbage collector's
        observed = await self._measured(key, observe(self._store, manifest))
        try:
            result, status, decided, again_s = await self._pursue(key, manifest, observed)
        except Replaced:
            return "gone", None
        if status != observed.status:
            await self._report(key, manifest, status)
            before, after = observed.status.get("conditions", ()), status["conditions"]
            notes = transitions(before, after) + scaling_notes(observed.status, status)
            await self._publisher.tell(manifest, notes)
        if decided is not None:
            await self._healer.treat(key, manifest, decided.verdict.cures, observed.now)
        return result, again_s

    async def _measured(self, key: ServiceKey, observed: Observed) -> Observed:
        """With what routers count, where a canary is being judged."""
        if not is_measured(seen_of(observed).remembered):
            return observed
        trials = await self._measures.trials(key, observed.pods)
        return dataclasses.replace(observed, trials=trials)

    async def _doubted(self, service: Service, observed: Observed) -> Observed:
        """With what routers hear of engines that the operator does not hear."""
        pools = silent_pools(observed.vitals.values(), service.spec.healing.silent_after)
        if not pools:
            return observed
        cut_off = await self._measures.cut_off(observed.pods, pools, observed.now)
        return dataclasses.replace(observed, cut_off=cut_off)

    async def close(self) -> None:
        await self._measures.close()

    async def _report(self, key: ServiceKey, manifest: Object, status: Object) -> None:
        try:
            written = await self._cluster.apply_status(manifest, status)
        except ClusterDenied as error:
            denied = Denied(error.verb, f"{SERVICE.qualified}/status", key.namespace)
            _logger.error("%s: missing permission: %s", key, denied)
            raise
        if written is not None:
            self._store.written(written)

    async def _pursue(self, key: ServiceKey, manifest: Object, observed: Observed) -> Outcome:
        """Plans and acts; answers how that went and the status to report."""
        generation = manifest["metadata"]["generation"]
        try:
            service = self._service(key, manifest)
            observed = await self._healer.examine(key, service, observed)
            observed = await self._doubted(service, observed)
            observed = self._sized(key, service, observed)
            decided = plan(service, observed, self._settings)
            acted = await self._actor.act(key, manifest, decided, observed)
        except InvalidManifest as error:
            _logger.error("%s: invalid: %s", key, error)
            message = "; ".join(map(str, error.problems))
            return Outcome("invalid", failed_status(observed, generation, "InvalidSpec", message))
        after = self._after(manifest, observed, acted)
        status = decided.status if after == observed else retold(service, decided, after)
        again_s = decided.again_s
        if acted.delayed:
            wait_s = self._backoff_s(key, acted.delay_s)
            again_s = min(wait_s, again_s or wait_s)
        return Outcome(acted.result, status, decided, again_s)

    def _after(self, manifest: Object, observed: Observed, acted: Acted) -> Observed:
        """With what was written, which no watch will tell, and what could not be."""
        return dataclasses.replace(
            observed,
            objects=observe(self._store, manifest).objects,
            missing=(*observed.missing, *map(str, acted.denied)),
            unapplied=acted.troubles,
        )

    def _sized(self, key: ServiceKey, service: Service, observed: Observed) -> Observed:
        """With what is decided about the size of its pools."""
        policies = scaled_here(service)
        routers, leaving = router_addresses(observed.pods if policies else ())
        followed = Followed(policies, routers, leaving)
        pools = scaled(service, observed.objects, observed.decided).spec.pools
        current = {name: pool.replicas for name, pool in pools.items()}
        decided = self._scaler.follow(key, followed, current)
        return dataclasses.replace(observed, decided=decided)

    def _service(self, key: ServiceKey, manifest: Object) -> Service:
        """The parsed service; checking a spec takes longer than all the rest, so once is enough."""
        meta = manifest["metadata"]
        known = self._parsed.get(key)
        if known is None or known[:2] != (meta["uid"], meta["generation"]):
            known = (meta["uid"], meta["generation"], parse_stored(manifest))
            self._parsed[key] = known
        return known[2]
