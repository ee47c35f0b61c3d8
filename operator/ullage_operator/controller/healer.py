"""Observes the health of engines and nodes, and restarts unhealthy pods.

`ullage_operator.policy.restarts` decides which pods to restart.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from ullage_operator.api.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterPostponed,
    ClusterRefused,
    OperatorError,
    Temporary,
)
from ullage_operator.api.naming import NODE, POD
from ullage_operator.api.spec import Service
from ullage_operator.controller.headroom_streams import HeadroomStreams, StreamTimes
from ullage_operator.kube.cache import ServiceKey
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import EventRecorder
from ullage_operator.planning.observed import Observed
from ullage_operator.policy.engine_health import stream_targets
from ullage_operator.policy.lost_nodes import doubtful_nodes, is_lost
from ullage_operator.policy.restarts import (
    Restart,
    RestartEvent,
    recent_restarts,
    refused_restart_note,
    restart_history,
    restart_note,
)

_logger = logging.getLogger(__name__)


class Healer:
    """Monitors the health of engine pods, and restarts the pods that the policy selects.

    Args:
        cluster: the Kubernetes API.
        recorder: records an Event for each restart.
        wake: called with a service that should be reconciled.
        times: intervals of the headroom streams.
    """

    def __init__(
        self,
        cluster: Cluster,
        recorder: EventRecorder,
        wake: Callable[[ServiceKey], None],
        times: StreamTimes,
    ) -> None:
        self._cluster = cluster
        self._recorder = recorder
        self._streams: HeadroomStreams[ServiceKey] = HeadroomStreams(wake, times)
        self._events: dict[ServiceKey, list[RestartEvent]] = {}
        """Restarts since this operator started. A cached status may lack the latest ones."""

    async def close(self) -> None:
        await self._streams.close()

    def forget(self, key: ServiceKey) -> None:
        """Stop monitoring a deleted service."""
        self._streams.follow(key, {})
        self._events.pop(key, None)

    def drop(self) -> None:
        """Stop monitoring all services. Their statuses still record their past restarts."""
        self._streams.drop()
        self._events.clear()

    async def observe(self, key: ServiceKey, service: Service, observed: Observed) -> Observed:
        """Add the engines' memory pressure and health, and the lost nodes, to `observed`."""
        healing = service.spec.healing
        self._streams.follow(key, stream_targets(observed.pods, healing.min_health))
        return dataclasses.replace(
            observed,
            pressure_levels=self._streams.pressure_levels(key),
            engine_health=self._streams.engine_health(key),
            restarts=self._recent(key, observed),
            lost_nodes=await self._lost(doubtful_nodes(observed.pods, observed.now)),
        )

    def _recent(self, key: ServiceKey, observed: Observed) -> list[RestartEvent]:
        events = {(each.pod, each.at): each for each in restart_history(observed.status)}
        events |= {(each.pod, each.at): each for each in self._events.get(key, ())}
        recent = recent_restarts(events.values(), observed.now)
        if key in self._events:
            self._events[key] = recent
        return sorted(recent, key=lambda each: each.at)

    async def _lost(self, nodes: Iterable[str]) -> frozenset[str]:
        """Return which of the given nodes are lost (empty if the operator may not read nodes)."""
        return frozenset([name for name in nodes if await self._is_lost(name)])

    async def _is_lost(self, name: str) -> bool:
        try:
            return is_lost(await self._cluster.get(NODE, "", name))
        except OperatorError as error:
            _logger.debug("node %s: %s", name, error)
            return False

    async def restart_pods(
        self,
        key: ServiceKey,
        manifest: Mapping[str, Any],
        restarts: Iterable[Restart],
        now: datetime,
    ) -> None:
        """Delete the given pods, so that their StatefulSets recreate them.

        A pod that may not be deleted, for example because of an admission policy, does not hold up
        the other pods.

        The caller must first write the status that counts these restarts. Otherwise they would go
        uncounted if the operator crashed in between.

        Raises:
            Temporary: Kubernetes refused to delete a pod. All others are deleted.
        """
        refusal: Temporary | None = None
        for restart in restarts:
            if not restart.by_force:
                whole_s = now.replace(microsecond=0)  # the status has whole seconds
                event = RestartEvent(restart.pod.pool, restart.pod.name, restart.reason, whole_s)
                self._events.setdefault(key, []).append(event)

            meta = {"name": restart.pod.name, "namespace": key.namespace, "uid": restart.pod.uid}
            pod = {"apiVersion": POD.api_version, "kind": POD.name, "metadata": meta}
            try:
                await self._cluster.delete(pod, grace_s=restart.grace_s)
            except ClusterConflict:
                continue  # a newer pod has its name already
            except (ClusterDenied, ClusterPostponed, ClusterRefused) as error:
                _logger.error("%s: pod %s cannot be deleted: %s", key, restart.pod.name, error)
                self._recorder.record(manifest, [refused_restart_note(restart, str(error))])
                least_s = error.delay_s if isinstance(error, Temporary) else 0.0
                refusal = Temporary(f"pod {restart.pod.name} cannot be deleted: {error}", least_s)
                continue

            _logger.warning(
                "%s: pod %s: %s: %s", key, restart.pod.name, restart.reason, restart.message
            )
            self._recorder.record(manifest, [restart_note(restart)])

        if refusal is not None:
            raise refusal
