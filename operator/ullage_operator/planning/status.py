"""Builds a service's status from its plan and observations."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ullage_common.wire.fingerprint import Fingerprint
from ullage_operator.api import naming
from ullage_operator.api.errors import Problem
from ullage_operator.api.spec import Service
from ullage_operator.conditions.adapters import Reports, adapters_condition, adapters_status
from ullage_operator.conditions.conditions import (
    Condition,
    Workload,
    cluster_conditions,
    contested,
    outdated_definition,
    render,
    service_conditions,
    workload_of,
)
from ullage_operator.conditions.consistency import EngineNumerics, consistency_condition
from ullage_operator.conditions.diagnosis import diagnose, is_unmounted
from ullage_operator.conditions.missing_pods import (
    PROGRESSING,
    WorkloadPods,
    lacking_workloads,
    missing_pods,
    refusal_due_s,
    refused_pods,
)
from ullage_operator.conditions.pod_problem import PodProblem
from ullage_operator.conditions.pods import is_counted, pool_of, restart_count
from ullage_operator.manifests.exposure import route_condition
from ullage_operator.planning.engine_objects import states_of_caches, unbegun_pools
from ullage_operator.planning.model_caches import (
    cache_status,
    caches_condition,
    unstarted_fetches,
)
from ullage_operator.planning.observed import (
    ObjectKey,
    Observed,
    is_canary,
    stable_pods,
    unreported_workloads,
)
from ullage_operator.planning.rollout_observation import canary_problems
from ullage_operator.policy.engine_health import boost_off_engines, worker_restarts
from ullage_operator.policy.pool_sizes import may_sleep
from ullage_operator.policy.restarts import RestartDecision, deferred_problems, restarts_status
from ullage_operator.policy.scaling_status import pool_scaling, scaling_condition
from ullage_operator.rollout.plan import RolloutPlan
from ullage_operator.rollout.stages import (
    MODEL_FETCHING,
    PAUSED,
    QUEUED,
    RENEWALS,
    ROUTERS_FIRST,
    WAITING,
    RolloutStage,
)
from ullage_operator.rollout.status import rollout_condition, rollout_status

Manifest = dict[str, Any]

ROUTER_WAITS = "the operator's new routers wait until fewer services are being rolled out"
INVALID_SPEC = "InvalidSpec"
"""Condition reason for a service whose declared spec cannot be applied."""
_KEEPS_SPEC = ". Until that is corrected, the operator carries out the previous spec"


def status_of(
    service: Service, rollout: RolloutPlan, observed: Observed, healing: RestartDecision
) -> Manifest:
    """Return a service's complete `status` section."""
    name = naming.router_name(service.name)
    deployment = observed.objects.get(ObjectKey("Deployment", name))
    router = workload_of("router", service.spec.router.replicas, deployment)
    pools = workloads(service, observed)
    serving = [with_canary_engines(service, pool, rollout, observed) for pool in pools.values()]

    conditions = service_conditions(
        router,
        serving,
        service_problems(service, rollout, observed, healing),
        canary_problems(observed),
        rollout_progress_condition(rollout) or fetching_condition(service, rollout, observed),
        was_progressing(observed.status),
        is_stopped=service.spec.stop,
    )
    conditions.append(rollout_condition(rollout))
    conditions += consistency_condition(engine_numerics(observed))

    adapters = [each.name for each in service.spec.adapters]
    reports = adapter_reports(observed)
    conditions += adapters_condition(adapters, reports)

    conditions += cluster_conditions(observed.serves, observed.missing_rights, observed.unlisted)
    conditions += outdated_definition(observed.undefined)
    conditions += contested(observed.challenger)

    caches = states_of_caches(service, observed)
    conditions += caches_condition(caches)
    conditions += scaling_condition(service, observed.scaling, observed.serves)
    route = observed.objects.get(ObjectKey(naming.HTTP_ROUTE, name))
    conditions += route_condition(service, observed.serves, route)

    restarts = restarts_status(observed.restarts, healing.restarts, observed.now)
    host = f"{name}.{service.namespace}.svc"
    return {
        "observedGeneration": service.generation,
        "endpoint": f"{'https' if service.spec.tls.router else 'http'}://{host}:{naming.HTTP_PORT}",
        "grpcEndpoint": f"{host}:{naming.GRPC_PORT}",
        "engines": f"{sum(p.ready for p in serving)}/{sum(p.desired for p in serving)}",
        **scale_status(service, pools),
        "router": {"replicas": router.exist, "readyReplicas": router.ready},
        "pools": {
            pool_name: pool_status(service, pool_name, workload, observed)
            | cache_status(pool_name, caches)
            for pool_name, workload in pools.items()
        },
        **({"adapters": adapters_status(adapters, reports)} if adapters else {}),
        **({"healing": {"restarts": restarts}} if restarts else {}),
        "rollout": rollout_status(service, rollout),
        "conditions": render(
            conditions, observed.status.get("conditions", ()), service.generation, observed.now
        ),
    }


def service_problems(
    service: Service, rollout: RolloutPlan, observed: Observed, healing: RestartDecision
) -> list[PodProblem]:
    """Return all problems of a service, except those of its canary's pods."""
    pods = workload_pods(service, observed)
    followers = [each for each in unreported_workloads(observed) if not is_canary(each.live)]
    return [
        *refused_edit(observed.refused),
        *observed.unapplied,
        *diagnose(stable_pods(observed), observed.now, observed.lost_nodes, observed.warnings),
        *deferred_problems(healing.deferred),
        *dropped_claims(rollout, observed),
        *missing_pods(pods, observed.status, observed.now, observed.warnings),
        *refused_pods(followers, observed.warnings),
    ]


def refused_edit(problems: Sequence[Problem]) -> list[PodProblem]:
    """Return a problem that reports an invalid edit (empty if the edit is valid).

    In the meantime, the operator keeps applying the previous spec.
    """
    if not problems:
        return []
    message = "; ".join(map(str, problems))
    return [PodProblem("", INVALID_SPEC, f"{message}{_KEEPS_SPEC}", blocks=False)]


def dropped_claims(rollout: RolloutPlan, observed: Observed) -> list[PodProblem]:
    """Return a problem for each pool whose `resourceClaims` the API server dropped.

    API servers that do not support DynamicResourceAllocation remove the claims from pod templates.
    The pods then have no GPUs.
    """
    stable = rollout.stable
    problems = []
    for name, pool in stable.spec.pools.items():
        workload = naming.pool_name(stable.name, name)
        live = observed.objects.get(ObjectKey("StatefulSet", workload))
        if live is None or not pool.resource_claims:
            continue

        annotations = live["metadata"].get("annotations") or {}
        is_applied = annotations.get(naming.REVISION) == rollout.progress.stable
        if is_applied and "resourceClaims" not in live["spec"]["template"]["spec"]:
            message = (
                f"spec.pools.{name}.resourceClaims: the API server drops the claims of pods, "
                "so they have no GPUs; use Kubernetes 1.34, turn DynamicResourceAllocation "
                "on, or leave resourceClaims out, for limits of gpuResourceName"
            )
            problems.append(PodProblem("", "ClaimsDropped", message, blocks=False))
    return problems


def engine_numerics(observed: Observed) -> dict[str, EngineNumerics]:
    """Return each engine's numerics fingerprint, by pod name.

    Engines with different fingerprints may compute different results for the same request. Engines
    that have not served yet are omitted.
    """
    engines = {}
    for pod in observed.pods:
        meta = pod["metadata"]
        health = observed.engine_health.get(meta.get("uid", ""))
        report = health.report if health else None
        if report is None or not (report.fingerprint or report.ready):
            continue

        # The revisions of a canary's StatefulSet are its own, so the pool distinguishes them.
        revision = f"{pool_of(pod)} {meta['labels'].get(naming.STATEFUL_SET_REVISION, '')}"
        engines[meta["name"]] = EngineNumerics(
            naming.stable_pool(pool_of(pod)),
            revision,
            Fingerprint(report.fingerprint, dict(report.fingerprint_facts)),
        )
    return engines


def adapter_reports(observed: Observed) -> Reports:
    """Return the adapter states of ready engines, by pod name."""
    reports = {}
    for pod in observed.pods:
        health = observed.engine_health.get(pod["metadata"].get("uid", ""))
        if health is not None and health.report is not None and health.report.ready:
            reports[pod["metadata"]["name"]] = list(health.report.adapters)
    return reports


def warned_objects(service: Service, observed: Observed) -> list[str]:
    """Return the uids of pods and workloads whose Events may explain why pods do not start."""
    now = observed.now
    lacking = lacking_workloads(workload_pods(service, observed), observed.status, now)
    lacking += [each for each in unreported_workloads(observed) if refusal_due_s(each, now) == 0]
    fetching = unstarted_fetches(observed.objects.values(), observed.fetches, now)
    pods = [pod for pod in observed.pods if is_unmounted(pod, now)]

    # The caller reads the Events of a few only, so neither kind may push out the other.
    workloads = [*(each.live for each in lacking), *fetching]
    objects = [obj for pair in itertools.zip_longest(workloads, pods) for obj in pair if obj]
    return [str(obj["metadata"]["uid"]) for obj in objects if obj["metadata"].get("uid")]


def was_progressing(status: Mapping[str, Any]) -> bool:
    """Return whether the last status reports Progressing as True.

    A status without this condition counts as progressing.
    """
    listed = status.get("conditions", ())
    progressing = (each["status"] == "True" for each in listed if each["type"] == PROGRESSING)
    return next(progressing, True)


def workload_pods(service: Service, observed: Observed) -> list[WorkloadPods]:
    """Return the routers' Deployment and the stable engines' StatefulSets, with their pods."""
    status = observed.status
    live = observed.objects
    pods = Counter(map(pool_of, filter(is_counted, observed.pods)))
    router = live.get(ObjectKey("Deployment", naming.router_name(service.name)))
    workloads_found = [(router, pods[""], status.get("router", {}))]
    for name in service.spec.pools:
        engines = live.get(ObjectKey("StatefulSet", naming.pool_name(service.name, name)))
        workloads_found.append((engines, pods[name], status.get("pools", {}).get(name, {})))
    return [
        WorkloadPods(obj, count, reported.get("replicas"))
        for obj, count, reported in workloads_found
        if obj
    ]


def rollout_progress_condition(rollout: RolloutPlan) -> Condition | None:
    """Return the Progressing condition of a rollout.

    The result is None while all engines have the revision of the spec.
    """
    progress = rollout.progress
    if progress.renewal:
        moves = progress.renewal != PAUSED
        return Condition(PROGRESSING, moves, progress.renewal, RENEWALS[progress.renewal])

    waits_for_people = progress.is_held or progress.reason == PAUSED
    if (
        progress.stage is RolloutStage.STABLE
        and not waits_for_people
        and progress.reason not in (WAITING, QUEUED, ROUTERS_FIRST, MODEL_FETCHING)
    ):
        return Condition(PROGRESSING, True, QUEUED, ROUTER_WAITS) if rollout.router_waits else None

    moves = progress.stage is not RolloutStage.ROLLED_BACK and not waits_for_people
    return Condition(PROGRESSING, moves, progress.reason, progress.message)


def fetching_condition(
    service: Service, rollout: RolloutPlan, observed: Observed
) -> Condition | None:
    """Return the Progressing condition while engines wait for a Job to download their model.

    The result is None if no engine waits.
    """
    unbegun = unbegun_pools(service, rollout, observed)
    messages = [f"pool {name} {why}" for name, why in unbegun.items()]
    return Condition(PROGRESSING, True, MODEL_FETCHING, "; ".join(messages)) if messages else None


def workloads(service: Service, observed: Observed) -> dict[str, Workload]:
    """Return the workload state of each pool's stable engines, by pool."""
    by_pool = {}
    for name, pool in service.spec.pools.items():
        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        workload = workload_of(name, pool.replicas, observed.objects.get(key))
        by_pool[name] = replace(workload, sleeps=may_sleep(pool))
    return by_pool


def with_canary_engines(
    service: Service, pool: Workload, rollout: RolloutPlan, observed: Observed
) -> Workload:
    """Return a pool's workload, with the canary's ready engines added to its ready engines.

    The sum is capped at the desired number of engines.
    """
    if pool.name not in rollout.pools:
        return pool
    name = naming.pool_name(service.name, naming.canary_pool(pool.name))
    canary = workload_of(name, 0, observed.objects.get(ObjectKey("StatefulSet", name)))
    return replace(pool, ready=min(pool.desired, pool.ready + canary.ready))


def scale_status(service: Service, pools: Mapping[str, Workload]) -> Manifest:
    """Return the status fields for the scale subresource, which describe the first pool.

    Kubernetes reads them for `kubectl scale` and for autoscalers.
    """
    first = next(iter(service.spec.pools))
    match = naming.selector(service.name, naming.ENGINE, first)
    return {"replicas": pools[first].exist, "selector": naming.selector_text(match)}


def pool_status(service: Service, pool: str, workload: Workload, observed: Observed) -> Manifest:
    """Return a pool's status for the service's `status.pools`."""
    match = naming.selector(service.name, naming.ENGINE, pool)
    pressure = observed.pressure_levels.get(pool)
    before = observed.status.get("pools", {}).get(pool, {})
    engines = [engine for engine in observed.engine_health.values() if engine.pool == pool]
    # Engines of a sleeping pool report nothing, so the last number must not stay.
    num_hot = before.get("boostOff", 0) if engines or workload.exist else 0
    return {
        "replicas": workload.exist,
        "readyReplicas": workload.ready,
        "restarts": sum(restart_count(pod) for pod in observed.pods if pool_of(pod) == pool),
        "workerRestarts": worker_restarts(engines, before.get("workerRestarts", 0)),
        "boostOff": boost_off_engines(engines, num_hot),
        "selector": naming.selector_text(match),
        **({} if pressure is None else {"pressureLevel": pressure}),
        **pool_scaling(service.spec.pools[pool], observed.scaling.changes.get(pool), before),
    }
