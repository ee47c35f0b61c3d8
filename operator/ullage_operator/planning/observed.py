"""Defines the observations from which the operator plans a service."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from ullage_operator.api import naming
from ullage_operator.api.errors import Problem
from ullage_operator.conditions.missing_pods import WorkloadPods
from ullage_operator.conditions.pod_problem import PodProblem, Warnings
from ullage_operator.conditions.pods import pool_of
from ullage_operator.planning.model_caches import FetchObservation
from ullage_operator.policy.engine_health import EngineHealth, PressureLevels
from ullage_operator.policy.pool_sizes import NO_DECISIONS, ScalingDecisions
from ullage_operator.policy.restarts import RestartEvent
from ullage_operator.rollout.analysis import CanarySample

Manifest = dict[str, Any]
LiveObject = dict[str, Any]


class ObjectKey(NamedTuple):
    """The kind and name of a service's object.

    The key has no API group, because the kinds of a service's objects have distinct names.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The live objects and measurements from which the operator plans one service."""

    now: datetime
    """The time of the observation, in UTC."""
    objects: Mapping[ObjectKey, LiveObject] = field(default_factory=dict)
    """Live objects that the service owns, by kind and name."""
    pods: Sequence[LiveObject] = ()
    """Pods of the service."""
    lost_nodes: frozenset[str] = frozenset()
    """Unresponsive nodes with pods of the service (empty if the operator may not read nodes)."""
    warnings: Warnings = field(default_factory=dict)
    """Latest warning Events about pods that fail to start and workloads without pods, by uid."""
    pressure_levels: PressureLevels = field(default_factory=dict)
    """Memory pressure of the engines that report to the operator, by pool."""
    engine_health: Mapping[str, EngineHealth] = field(default_factory=dict)
    """Health of the engines that report to the operator, by the pods' uid."""
    unreachable_pools: frozenset[str] = frozenset()
    """Pools with engines that neither report to the operator nor are reachable by any router."""
    restarts: Sequence[RestartEvent] = ()
    """Restarts of engine pods in the last hour."""
    serves: frozenset[str] = frozenset()
    """Optional kinds that the cluster serves, for example PodMonitor."""
    unlisted: tuple[str, ...] = ()
    """Kinds that the cluster serves but the operator cannot list, each with the reason."""
    missing_rights: tuple[str, ...] = ()
    """Permissions that the operator lacks, each as `verb resource in namespace`."""
    unapplied: tuple[PodProblem, ...] = ()
    """Problems with objects that could not be written."""
    unwritten_engines: Mapping[str, PodProblem] = field(default_factory=dict)
    """Errors of the last writes of StatefulSets, by pool. A canary is a separate pool."""
    refused: tuple[Problem, ...] = ()
    """Problems with the declared spec, if the operator falls back to the last valid spec."""
    undefined: tuple[str, ...] = ()
    """Fields for which the cluster's installed CRD has no default."""
    challenger: str = ""
    """Name of another operator that watches the service but leaves managing it to this operator."""
    fetches: FetchObservation = field(default_factory=FetchObservation)
    """Observations of the Jobs that download models into shared claims."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """The current status of the service."""
    is_rollout_readable: bool = True
    """Whether the operator sees the ConfigMap with the rollout's state, and the StatefulSets."""
    may_begin_rollout: bool = True
    """Whether the rollout queue lets the service start a rollout not triggered by an edit."""
    may_yield: bool = True
    """Whether resources freed by one of the service's pods would go to its next pod."""
    rollout_annotation: str = ""
    """Value of the service's annotation that controls the rollout, for example `pause`."""
    canary_samples: Sequence[CanarySample] = ()
    """Request counts of a canary and of its baseline, from the routers that responded."""
    unanswered: tuple[str, ...] = ()
    """Addresses of routers that did not respond when asked for request counts, with the reasons."""
    scaling: ScalingDecisions = NO_DECISIONS
    """Decisions about the number of engines, for pools that the operator scales."""


def is_owned_by(item: LiveObject, uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid for owner in owners)


def is_canary(item: Mapping[str, Any]) -> bool:
    """Return whether a pod or a StatefulSet belongs to a canary."""
    labels = item["metadata"].get("labels") or {}
    return naming.is_canary_pool(labels.get(naming.POOL_LABEL, ""))


def canary_pods(observed: Observed) -> list[LiveObject]:
    return [pod for pod in observed.pods if is_canary(pod)]


def stable_pods(observed: Observed) -> list[LiveObject]:
    """Return all pods that do not belong to a canary.

    A canary's pods are left out because they do not affect the service's readiness.
    """
    return [pod for pod in observed.pods if not is_canary(pod)]


def unreported_workloads(observed: Observed) -> list[WorkloadPods]:
    """Return the StatefulSets of canaries and followers, each with its number of pods."""
    counts = Counter(map(pool_of, observed.pods))
    workloads = [
        (item, (item["metadata"].get("labels") or {}).get(naming.POOL_LABEL, ""))
        for key, item in observed.objects.items()
        if key.kind == "StatefulSet"
    ]
    return [
        WorkloadPods(item, counts[pool], 0)
        for item, pool in workloads
        if naming.stable_pool(pool) != pool
    ]


def key_of(item: LiveObject) -> ObjectKey:
    return ObjectKey(item["kind"], item["metadata"]["name"])
