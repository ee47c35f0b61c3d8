"""Looks after the engines of all services: hears them, asks for doubtful nodes, deletes pods.

What to do is decided in `ullage_operator.healing`.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from ullage_operator.cluster import Cluster
from ullage_operator.errors import OperatorError
from ullage_operator.healing import HOUR, Cure, Past
from ullage_operator.kinds import NODE, POD
from ullage_operator.plan import Observed
from ullage_operator.publisher import Publisher
from ullage_operator.spec import Service
from ullage_operator.store import ServiceKey
from ullage_operator.streams import HeadroomStreams
from ullage_operator.treatment import doubtful_nodes, is_lost, note_of, remembered, targets

_logger = logging.getLogger(__name__)


class Healer:
    """Watches over engine pods.

    Args:
        wake: called with a service that wants a look.
    """

    def __init__(
        self, cluster: Cluster, publisher: Publisher, wake: Callable[[ServiceKey], None]
    ) -> None:
        self._cluster = cluster
        self._publisher = publisher
        self._streams: HeadroomStreams[ServiceKey] = HeadroomStreams(wake)
        self._past: dict[ServiceKey, list[Past]] = {}
        """What was done since the start: the status that is read may be older."""

    async def close(self) -> None:
        await self._streams.close()

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._streams.follow(key, {})
        self._past.pop(key, None)

    def drop(self) -> None:
        """Forgets all services; what was done to them is in their status."""
        self._streams.drop()
        self._past.clear()

    async def examine(self, key: ServiceKey, service: Service, observed: Observed) -> Observed:
        """`observed` with what is heard of the engines and known of their nodes."""
        healing = service.spec.healing
        self._streams.follow(key, targets(observed.pods, healing.min_health))
        return dataclasses.replace(
            observed,
            headroom=self._streams.headroom(key),
            vitals=self._streams.vitals(key),
            past=self._recent(key, observed),
            lost_nodes=await self._lost(doubtful_nodes(observed.pods, observed.now)),
        )

    def _recent(self, key: ServiceKey, observed: Observed) -> list[Past]:
        known = {(each.pod, each.at): each for each in remembered(observed.status)}
        known |= {(each.pod, each.at): each for each in self._past.get(key, ())}
        recent = [each for each in known.values() if each.at > observed.now - HOUR]
        if key in self._past:
            self._past[key] = recent
        return sorted(recent, key=lambda each: each.at)

    async def _lost(self, nodes: Iterable[str]) -> frozenset[str]:
        """Of these nodes, those that are gone or do not answer; none where asking is forbidden."""
        return frozenset([name for name in nodes if await self._is_lost(name)])

    async def _is_lost(self, name: str) -> bool:
        try:
            return is_lost(await self._cluster.get(NODE, "", name))
        except OperatorError as error:
            _logger.debug("node %s: %s", name, error)
            return False

    async def treat(
        self, key: ServiceKey, manifest: Mapping[str, Any], cures: Iterable[Cure], now: datetime
    ) -> None:
        """Deletes pods; the status that counts them has been written."""
        for cure in cures:
            if not cure.by_force:
                whole_s = now.replace(microsecond=0)  # as the status tells it
                past = Past(cure.pod.pool, cure.pod.name, cure.reason, whole_s)
                self._past.setdefault(key, []).append(past)
            meta = {"name": cure.pod.name, "namespace": key.namespace, "uid": cure.pod.uid}
            pod = {"apiVersion": POD.api_version, "kind": POD.name, "metadata": meta}
            await self._cluster.delete(pod, grace_s=0 if cure.by_force else None)
            _logger.warning("%s: pod %s: %s: %s", key, cure.pod.name, cure.reason, cure.message)
            await self._publisher.tell(manifest, [note_of(cure)])
