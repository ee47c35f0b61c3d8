"""The observations that a rollout depends on. Pure."""

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
    """The existing objects and counts that a service's rollout depends on."""

    now: datetime
    stateful_sets: Mapping[str, Manifest]
    """Live StatefulSets of the service, by name."""
    stored_state: str | None
    """The stored text of the rollout's state, or None without one."""
    is_state_readable: bool = True
    """Whether the operator can read the stored state of the rollout."""
    may_begin: bool = True
    """Whether the rollout queue admits a rollout that starts without an edit of the service."""
    may_yield: bool = True
    """Whether the service's next pod would get the resources that another of its pods frees."""
    routers: Manifest | None = None
    """The routers' live Deployment."""
    has_ending_routers: bool = False
    """Whether replaced routers still terminate."""
    is_edited: bool = True
    """Whether somebody has edited the service since its status was last written."""
    annotation: str = ""
    """Value of the service's annotation with a command for the rollout."""
    samples: Sequence[CanarySample] = ()
    """Request counts of the canary and of the stable engines, from the routers."""
    unanswered: Sequence[str] = ()
    """Addresses of routers that did not answer with their counts, each with the reason."""
    problem: str = ""
    """Problem of the canary's pods (empty without one)."""
    is_stuck: bool = False
    """Whether waiting cannot solve the problem of the canary's pods."""
    roomless_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which a canary's pods have been unschedulable, by pool.

    Only pools with an engine that would free enough resources for the canary are included.
    """
    fetching: Mapping[str, str] = field(default_factory=dict)
    """Reason why the first engines of a pool wait for their model, by pool."""
    engines: Sequence[EngineReport] = ()
    """Restarts and worker losses of the canary's and the stable engines."""


def canary_name(service: Service, pool: str) -> str:
    return naming.pool_name(service.name, naming.canary_pool(pool))


def has_ready_engine(observation: RolloutObservation, name: str) -> bool:
    return workload_of(name, 0, observation.stateful_sets.get(name)).ready > 0


def is_canary_ready(observation: RolloutObservation, name: str, revision: str) -> bool:
    """Return whether all of a canary's engines are ready and no engine has another revision."""
    return is_made_of(observation, name, revision) and has_ready_engine(observation, name)


def is_settled(observation: RolloutObservation, name: str, size: int, revision: str) -> bool:
    workload = workload_of(name, size, observation.stateful_sets.get(name))
    is_full = workload.settled and workload.ready >= size
    return is_full and is_made_of(observation, name, revision)


def is_made_of(observation: RolloutObservation, name: str, revision: str) -> bool:
    """Return whether all pods of a StatefulSet, ready or not, have the given revision."""
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
