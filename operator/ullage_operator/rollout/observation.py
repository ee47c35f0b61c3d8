"""Defines the observations from which a rollout is planned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import workload_of
from ullage_operator.rollout.analysis import CanarySample
from ullage_operator.rollout.falls import EngineReport

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutObservation:
    """The live objects, request counts and engine reports from which a rollout is planned."""

    now: datetime
    stateful_sets: Mapping[str, Manifest]
    """The service's live StatefulSets, by name."""
    stored_state: str | None
    """The rollout's state as stored in its ConfigMap, or None if there is none."""
    is_state_readable: bool = True
    """Whether the operator sees the stored state of the rollout, and the StatefulSets."""
    may_begin: bool = True
    """Whether the rollout queue lets the service start a rollout not triggered by an edit."""
    may_yield: bool = True
    """Whether resources freed by one of the service's pods would go to its next pod."""
    routers: Manifest | None = None
    """The routers' live Deployment."""
    has_ending_routers: bool = False
    """Whether replaced routers are still terminating."""
    is_edited: bool = True
    """Whether the service has been edited since its status was last written."""
    annotation: str = ""
    """Value of the service's annotation that controls the rollout, for example `pause`."""
    samples: Sequence[CanarySample] = ()
    """Request counts of the canary and of the stable engines, from the routers."""
    unanswered: Sequence[str] = ()
    """Addresses of routers that did not respond with their counts, each with the reason."""
    problem: str = ""
    """Problem of the canary's pods (empty without one)."""
    is_stuck: bool = False
    """Whether the problem of the canary's pods will not resolve by itself."""
    is_refused: bool = False
    """Whether the API server refuses a StatefulSet of the stable revision."""
    roomless_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which a canary's pods have been unschedulable, by pool.

    Only pools where stopping a stable engine would free enough resources are included.
    """
    fetching: Mapping[str, str] = field(default_factory=dict)
    """Why a pool's first engines are waiting for their model to be downloaded, by pool."""
    engines: Sequence[EngineReport] = ()
    """Restarts and worker losses of the canary's and the stable engines."""


def canary_name(service: Service, pool: str) -> str:
    return naming.pool_name(service.name, naming.canary_pool(pool))


def has_ready_engine(observation: RolloutObservation, name: str) -> bool:
    return workload_of(name, 0, observation.stateful_sets.get(name)).ready > 0


def is_canary_ready(observation: RolloutObservation, name: str, revision: str) -> bool:
    """Return whether a canary has a ready engine and all of its pods have the given revision."""
    return is_made_of(observation, name, revision) and has_ready_engine(observation, name)


def is_settled(observation: RolloutObservation, name: str, size: int, revision: str) -> bool:
    workload = workload_of(name, size, observation.stateful_sets.get(name))
    is_full = workload.settled and workload.ready >= size
    return is_full and is_made_of(observation, name, revision)


def is_made_of(observation: RolloutObservation, name: str, revision: str) -> bool:
    """Return whether all pods of a StatefulSet have the given revision, ready or not."""
    if (live := observation.stateful_sets.get(name)) is None:
        return False
    made_of = (live["metadata"].get("annotations") or {}).get(naming.REVISION)
    return made_of == revision and workload_of(name, live["spec"].get("replicas", 1), live).settled


def canary_engines(
    service: Service, observation: RolloutObservation, revision: str
) -> list[EngineReport]:
    """Return a canary's engines that have the given revision."""
    engines = []
    for engine in observation.engines:
        name = naming.pool_name(service.name, engine.pool)
        if not naming.is_canary_pool(engine.pool) or not is_made_of(observation, name, revision):
            continue
        # Pods and StatefulSets have separate watches, so a pod of an earlier canary may still be in
        # the cache.
        made_of = observation.stateful_sets[name].get("status", {}).get("updateRevision", "")
        if not made_of or engine.pod_revision in ("", made_of):
            engines.append(engine)
    return engines


def stable_engines(observation: RolloutObservation) -> list[EngineReport]:
    """Return the engines that do not belong to a canary."""
    return [each for each in observation.engines if not naming.is_canary_pool(each.pool)]
