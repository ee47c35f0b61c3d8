"""What a plan asks for, done: applies what is missing or has drifted, deletes what is unwanted."""

import logging
from typing import Any

from ullage_operator.cluster import Cluster
from ullage_operator.drift import has_drifted, stamped
from ullage_operator.errors import ClusterDenied, ClusterRefused, ClusterUnavailable
from ullage_operator.events import Deeds, named
from ullage_operator.kinds import kind_of
from ullage_operator.plan import Observed, Plan, key_of
from ullage_operator.publisher import Publisher
from ullage_operator.status import belongs, is_leaving
from ullage_operator.store import Denied, ServiceKey, Store

Object = dict[str, Any]
_logger = logging.getLogger(__name__)


class Replaced(Exception):
    """The service was deleted, or made anew, while its objects were being written."""


class Actor:
    """Carries out plans."""

    def __init__(self, cluster: Cluster, store: Store, publisher: Publisher) -> None:
        self._cluster = cluster
        self._store = store
        self._publisher = publisher

    async def act(
        self, key: ServiceKey, manifest: Object, decided: Plan, observed: Observed
    ) -> list[Denied]:
        """Applies and deletes; answers which rights were missing for some of it.

        Raises:
            Replaced: the service is no longer the one that was planned for.
        """
        deeds, denied = Deeds(), dict[Denied, None]()
        todo = [(obj, False) for obj in map(stamped, decided.apply)]
        try:
            for obj, is_unwanted in [*todo, *((obj, True) for obj in decided.delete)]:
                try:
                    await self._treat(key, manifest, obj, is_unwanted, observed, deeds)
                except ClusterDenied as error:
                    resource = kind_of(obj["apiVersion"], obj["kind"]).qualified
                    denied[Denied(error.verb, resource, key.namespace)] = None
        finally:
            await self._publisher.tell(manifest, deeds.notes())
        for each in denied:
            _logger.error("%s: missing permission: %s; the rest goes on", key, each)
        return list(denied)

    async def _treat(
        self,
        key: ServiceKey,
        manifest: Object,
        obj: Object,
        is_unwanted: bool,
        observed: Observed,
        deeds: Deeds,
    ) -> None:
        if not self._store.sees(kind_of(obj["apiVersion"], obj["kind"]), key.namespace):
            return  # never written blindly; the missing right is told already
        self._check_current(key, manifest)
        if is_unwanted:
            await self._cluster.delete(obj)
            deeds.deleted.append(named(obj))
            _logger.info("%s: deleted %s", key, named(obj))
            return
        found = observed.objects.get(key_of(obj))
        if found is None:
            await self._check_free(manifest, obj)
        if found is None or has_drifted(obj, found):
            if found is not None and leaves_replicas(obj):
                await self._cluster.keep_replicas(found)
            written = await self._cluster.apply(obj)
            self._store.written(written)
            deeds.applied(obj, found, written)
            _logger.info("%s: applied %s", key, named(obj))

    def _check_current(self, key: ServiceKey, manifest: Object) -> None:
        """Stops a run whose service is gone, lest it makes objects that nobody wants."""
        present = self._store.service(key)
        if present is None or present["metadata"]["uid"] != manifest["metadata"]["uid"]:
            raise Replaced

    async def _check_free(self, manifest: Object, obj: Object) -> None:
        """Refuses to take over an object of the same name that is not this service's."""
        meta = obj["metadata"]
        kind = kind_of(obj["apiVersion"], obj["kind"])
        found = await self._cluster.get(kind, meta["namespace"], meta["name"])
        if found is None or (found["metadata"].get("ownerReferences") and belongs(found, manifest)):
            return
        if is_leaving(found, manifest):
            raise ClusterUnavailable(f"{named(obj)} of the deleted service still ends", 1.0)
        raise ClusterRefused(
            f"{named(obj)} exists and is not this service's: "
            "delete it, or name the LLMService otherwise"
        )


def leaves_replicas(obj: Object) -> bool:
    """Whether somebody else sets how many pods the object has."""
    return bool(obj["kind"] == "StatefulSet" and "replicas" not in obj["spec"])
