"""Extracts what a rollout's plan depends on from all observations of a service."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.spec import Service
from ullage_operator.conditions.diagnosis import diagnose
from ullage_operator.conditions.missing_pods import refused_pods
from ullage_operator.conditions.placement import fits_place_of, roomless_s
from ullage_operator.conditions.pod_problem import PodProblem
from ullage_operator.conditions.pods import (
    is_follower,
    is_placed,
    is_router,
    pool_of,
    restart_count,
)
from ullage_operator.planning.observed import (
    ObjectKey,
    Observed,
    canary_pods,
    is_canary,
    stable_pods,
    unreported_workloads,
)
from ullage_operator.policy.engine_health import FRESH_S, SILENT_S
from ullage_operator.policy.pool_sizes import canary_places
from ullage_operator.rollout.falls import EngineReport
from ullage_operator.rollout.observation import RolloutObservation
from ullage_operator.rollout.stages import PROMOTED, RolloutProgress, RolloutStage

LiveObject = dict[str, Any]

SEEK = timedelta(minutes=10)
"""Maximum time that other services' rollouts wait for a service with unschedulable pods."""


def observe_rollout(service: str, observed: Observed) -> RolloutObservation:
    """Return the observations that are needed to plan a service's rollout.

    Args:
        service: the name of the service.
        observed: all observations of the service. Its objects may include copies that a user made.
    """
    kept = observed.objects.get(ObjectKey("ConfigMap", naming.rollout_name(service)), {})
    unwritten = observed.unwritten_engines.items()
    wrong = canary_problems(observed)
    wrong += [problem for pool, problem in unwritten if naming.is_canary_pool(pool)]
    return RolloutObservation(
        now=observed.now,
        stateful_sets={
            key.name: obj for key, obj in observed.objects.items() if key.kind == "StatefulSet"
        },
        stored_state=kept.get("data", {}).get(naming.ROLLOUT_STATE),
        is_state_readable=observed.is_rollout_readable,
        may_begin=observed.may_begin_rollout,
        may_yield=observed.may_yield,
        routers=observed.objects.get(ObjectKey("Deployment", naming.router_name(service))),
        has_ending_routers=any(
            is_router(pod) and "deletionTimestamp" in pod["metadata"] for pod in observed.pods
        ),
        annotation=observed.rollout_annotation,
        samples=observed.canary_samples,
        unanswered=observed.unanswered,
        problem=str(wrong[0]) if wrong else "",
        is_stuck=any(problem.is_stuck for problem in wrong),
        is_refused=any(
            problem.is_stuck for pool, problem in unwritten if not naming.is_canary_pool(pool)
        ),
        roomless_s=roomless_pools(observed),
        engines=engine_reports(observed),
    )


def canary_problems(observed: Observed) -> list[PodProblem]:
    """Return the problems of a canary's pods, including pods that Kubernetes refuses to create."""
    pods = canary_pods(observed)
    problems = diagnose(pods, observed.now, observed.lost_nodes, observed.warnings)
    workloads = [each for each in unreported_workloads(observed) if is_canary(each.live)]
    refused = refused_pods(workloads, observed.warnings)

    has_place = any(
        canary_places(item) for key, item in observed.objects.items() if key.kind == "StatefulSet"
    )
    if not has_place:
        refused = [_with_surge_remedy(each) for each in refused]
    return [*problems, *refused]


def _with_surge_remedy(problem: PodProblem) -> PodProblem:
    """Return the problem of a canary that a quota refuses, with a hint at `surge`."""
    if "exceeded quota" not in problem.message:
        return problem
    remedy = (
        "raise the quota, or set spec.rollout.surge to Never, so that the canary takes the place "
        "of an engine"
    )
    return replace(problem, message=f"{problem.message}; {remedy}")


def roomless_pools(observed: Observed) -> dict[str, float]:
    """Return how long canary pods have been unschedulable, in seconds, by pool.

    If a pool has several such pods, the longest time counts. A pool is included only if stopping
    one of its stable engines would free enough resources for such a pod.
    """
    waits: dict[str, float] = {}
    for pod in canary_pods(observed):
        wait_s = roomless_s(pod, observed.now)
        if wait_s is None:
            continue

        pool = naming.stable_pool(pool_of(pod))
        peer_pool = naming.group_pool(pool) if is_follower(pod) else pool
        peers = [each for each in observed.pods if pool_of(each) == peer_pool]
        if any(fits_place_of(pod, peer) for peer in peers):
            waits[pool] = max(wait_s, waits.get(pool, 0.0))
    return waits


def seeks_room(service: Service, progress: RolloutProgress, observed: Observed) -> bool:
    """Return whether the service's rollout is still waiting for nodes for its engines.

    These are the canary's engines, or the engines of the revision that was just promoted. After
    `SEEK` (10 minutes), the result is False, so that other services no longer wait for this one.
    """
    if observed.now - progress.since > SEEK:
        return False
    if progress.stage is RolloutStage.STARTING:
        pods = canary_pods(observed)
        return not pods or not all(is_placed(pod) for pod in pods)
    if progress.reason != PROMOTED:
        return False

    leaders = [pod for pod in stable_pods(observed) if pool_of(pod) and not is_follower(pod)]
    placed = sum(is_placed(pod) for pod in leaders)
    return placed < sum(pool.replicas for pool in service.spec.pools.values())


def lacks_room(observed: Observed) -> bool:
    """Return whether any engine pod is unschedulable, but for less than `SEEK` (10 minutes)."""
    waits = [roomless_s(pod, observed.now) for pod in observed.pods if pool_of(pod)]
    return any(wait_s is not None and wait_s < SEEK.total_seconds() for wait_s in waits)


def engine_reports(observed: Observed) -> list[EngineReport]:
    """Return the container restarts and lost workers of each engine pod."""
    engines = [pod for pod in observed.pods if pool_of(pod)]
    present = [pod for pod in engines if "deletionTimestamp" not in pod["metadata"]]
    return [_engine_report(pod, observed) for pod in present]


def _engine_report(pod: LiveObject, observed: Observed) -> EngineReport:
    meta = pod["metadata"]
    uid = str(meta.get("uid", meta["name"]))
    counts = EngineReport(
        uid=uid,
        pool=pool_of(pod),
        pod_revision=str(meta["labels"].get(naming.STATEFUL_SET_REVISION, "")),
        restarts=restart_count(pod),
    )
    if is_follower(pod):  # its leader's server counts worker losses
        return counts

    health = observed.engine_health.get(uid)
    if health is None or health.report is None:
        return replace(counts, is_fresh=False, trouble=health.trouble if health else "")
    return replace(
        counts,
        epoch=health.report.epoch,
        workers_lost=health.report.worker_restarts,
        trouble=health.trouble,
        is_fresh=health.silent_s <= (FRESH_S if is_canary(pod) else SILENT_S),
    )
