"""What a plan asks for, done: applies what is missing or has drifted, deletes what is unwanted."""

import logging
from dataclasses import dataclass, field
from typing import Any

from ullage_operator import naming
from ullage_operator.cluster import Cluster
from ullage_operator.drift import has_drifted, stamped
from ullage_operator.errors import (
    ClusterDenied,
    ClusterPostponed,
    ClusterRefused,
    ClusterUnavailable,
)
from ullage_operator.events import Deeds, clipped, named
from ullage_operator.kinds import kind_of
from ullage_operator.plan import Observed, Plan, key_of
from ullage_operator.publisher import Publisher
from ullage_operator.status import belongs, is_leaving
from ullage_operator.store import Denied, ServiceKey, Store
from ullage_operator.trouble import Trouble

Object = dict[str, Any]
_logger = logging.getLogger(__name__)
MOST_TOLD = 3
"""Objects that a condition names."""


class Replaced(Exception):
    """The service was deleted, or made anew, while its objects were being written."""


@dataclass(slots=True)
class Acted:
    """What became of a plan."""

    service: str
    denied: dict[Denied, None] = field(default_factory=dict)
    """Rights that were missing for some of it."""
    refused: list[str] = field(default_factory=list)
    """What cannot be done until somebody changes something."""
    delayed: list[str] = field(default_factory=list)
    """What may be done later."""
    delay_s: float = 0.0
    _unwritten: set[str] = field(default_factory=set)
    """ConfigMaps."""

    @property
    def result(self) -> str:
        if self.refused or self.delayed:
            return "temporary" if self.delayed else "permanent"
        return "denied" if self.denied else "ok"

    @property
    def troubles(self) -> tuple[Trouble, ...]:
        """One for all objects that could not be written."""
        told = [*self.refused, *self.delayed]
        if not told:
            return ()
        more = f"; and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
        reason = "ApplyFailed" if self.refused else "ApplyDelayed"
        return (Trouble("", reason, "; ".join(told[:MOST_TOLD]) + more, blocks=False),)

    def holds(self, obj: Object, found: Object | None) -> bool:
        """Whether pods must wait for a configuration, or a rollout for what remembers it.

        Made before their configuration they would read another, and nothing would make them anew.

        Args:
            found: the object as it is; its pods have the configuration that it names.
        """
        if obj["kind"] not in ("StatefulSet", "Deployment"):
            return False
        if naming.rollout_name(self.service) in self._unwritten:
            return True
        is_other = found is None or _config_of(obj) != _config_of(found)
        return is_other and obj["metadata"]["name"] in self._unwritten

    def skipped(self, obj: Object) -> None:
        """An object of a kind that is not seen is never written blindly; why is told already."""
        if obj["kind"] == "ConfigMap":
            self._unwritten.add(obj["metadata"]["name"])

    def failed(self, obj: Object, error: ClusterDenied | ClusterRefused | ClusterPostponed) -> None:
        """An object could not be treated."""
        if obj["kind"] == "ConfigMap":
            self._unwritten.add(obj["metadata"]["name"])
        if isinstance(error, ClusterDenied):
            resource = kind_of(obj["apiVersion"], obj["kind"]).qualified
            self.denied[Denied(error.verb, resource, obj["metadata"]["namespace"])] = None
            return
        text = f"{named(obj)}: {clipped(str(error))}"
        if isinstance(error, ClusterRefused):
            self.refused.append(text)
        else:
            self.delayed.append(text)
            self.delay_s = max(self.delay_s, error.delay_s)

    def log(self, key: ServiceKey) -> None:
        for missing in self.denied:
            _logger.error("%s: missing permission: %s; the rest goes on", key, missing)
        for text in self.refused:
            _logger.error("%s: refused: %s; the rest goes on", key, text)
        for text in self.delayed:
            _logger.warning("%s: will try again: %s; the rest goes on", key, text)


class Actor:
    """Carries out plans."""

    def __init__(self, cluster: Cluster, store: Store, publisher: Publisher) -> None:
        self._cluster = cluster
        self._store = store
        self._publisher = publisher

    async def act(
        self, key: ServiceKey, manifest: Object, decided: Plan, observed: Observed
    ) -> Acted:
        """Applies and deletes, as much of it as can be done.

        Raises:
            Replaced: the service is no longer the one that was planned for.
        """
        deeds, acted = Deeds(), Acted(key.name)
        todo = [(obj, False) for obj in map(stamped, decided.apply)]
        try:
            for obj, is_unwanted in [*todo, *((obj, True) for obj in decided.delete)]:
                if not self._store.sees(kind_of(obj["apiVersion"], obj["kind"]), key.namespace):
                    acted.skipped(obj)
                    continue
                if acted.holds(obj, observed.objects.get(key_of(obj))):
                    continue
                try:
                    await self._treat(key, manifest, obj, is_unwanted, observed, deeds)
                except (ClusterDenied, ClusterRefused, ClusterPostponed) as error:
                    acted.failed(obj, error)
        finally:
            await self._publisher.tell(manifest, deeds.notes())
        acted.log(key)
        return acted

    async def _treat(
        self,
        key: ServiceKey,
        manifest: Object,
        obj: Object,
        is_unwanted: bool,
        observed: Observed,
        deeds: Deeds,
    ) -> None:
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
            "it exists and is not this service's: delete it, or name the LLMService otherwise"
        )


def _config_of(obj: Object) -> Any:
    """The fingerprint of the configuration that a workload's pods are made for."""
    notes = obj["spec"]["template"]["metadata"].get("annotations") or {}
    return notes.get(naming.CONFIG_HASH)


def leaves_replicas(obj: Object) -> bool:
    """Whether somebody else sets how many pods the object has."""
    return bool(obj["kind"] == "StatefulSet" and "replicas" not in obj["spec"])
