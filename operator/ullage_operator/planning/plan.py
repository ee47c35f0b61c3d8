"""Plans what the operator does for a declared service, given the objects that already exist.

The operator applies a plan to the cluster. `ullage up` runs the same pods as processes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.diagnosis import stable_in_s, unmounted_recheck_s
from ullage_operator.conditions.missing_pods import missing_pods_due_s, refusal_due_s
from ullage_operator.manifests.exposure import exposure_objects
from ullage_operator.manifests.manifests import engine_objects, router_objects, without_replicas
from ullage_operator.manifests.monitoring import monitoring_objects
from ullage_operator.planning.engine_objects import (
    all_engines,
    fetch_objects,
    held_keys,
    outdated_engines,
    outdated_followers,
    paused_scalers,
    resized_engines,
    states_of_caches,
)
from ullage_operator.planning.model_caches import RECHECK_S, waiting_pools
from ullage_operator.planning.observed import (
    ObjectKey,
    Observed,
    is_owned_by,
    key_of,
    stable_pods,
    unreported_workloads,
)
from ullage_operator.planning.rollout_observation import lacks_room, observe_rollout, seeks_room
from ullage_operator.planning.status import status_of, workload_pods
from ullage_operator.planning.template_checks import template_conflicts
from ullage_operator.policy.lost_nodes import node_wait_s
from ullage_operator.policy.pool_sizes import live_replicas, with_replicas
from ullage_operator.policy.restarts import RestartDecision, decide_restarts, engine_pods
from ullage_operator.rollout.objects import router_file, with_stop_said
from ullage_operator.rollout.plan import RolloutPlan, plan_rollout
from ullage_operator.rollout.release import release_of
from ullage_operator.rollout.replacement import RouterRoll, roll_routers
from ullage_operator.rollout.state import initial, load
from ullage_operator.rollout.transport import with_engine_tls

Manifest = dict[str, Any]
LiveObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The actions that the operator takes for one service.

    They are carried out in order: objects are applied, objects are deleted, the status is written,
    and then pods are restarted.
    """

    apply: tuple[Manifest, ...]
    delete: tuple[LiveObject, ...]
    status: Manifest
    rollout: RolloutPlan
    healing: RestartDecision
    """Pods to restart once the status that counts these restarts has been written."""
    recheck_s: float | None = None
    """Maximum number of seconds until the next reconciliation, or None for no limit."""


def plan(service: Service, observed: Observed, settings: Settings) -> ServicePlan:
    """Plan one step towards the declared service.

    Args:
        service: the declared service.
        observed: the live objects and measurements.
        settings: the operator's own settings.

    Returns:
        The objects to apply and to delete, the status to write, and the pods to restart.

    Raises:
        InvalidManifest: a pod template sets a field that the operator itself sets. Templates of
            releases that engines already run are not checked. In those, the operator's fields take
            precedence.
    """
    if problems := list(dict.fromkeys(template_conflicts(service, settings))):
        raise InvalidManifest(problems)

    service = with_replicas(service, observed.objects, observed.scaling)
    caches = states_of_caches(service, observed)
    seen = replace(
        observe_rollout(service.name, observed),
        is_edited=is_edited(service, observed),
        fetching=waiting_pools(caches),
    )

    rollout = plan_rollout(service, seen, settings)
    routers = router_roll(service, rollout, observed, settings)
    rollout = replace(
        rollout,
        router_waits=routers.is_waiting,
        router_rolls=routers.is_rolling,
        seeks_room=seeks_room(service, rollout.progress, observed),
        lacks_room=lacks_room(observed),
    )

    desired = wanted_objects(service, rollout, routers, observed, settings)
    kept = {key_of(item) for item in [*desired, *routers.held]} | held_keys(service, rollout)
    # Kubernetes itself removes a Job that filled its claim.
    kept |= {ObjectKey("Job", state.job) for state in caches if not state.is_wanted}

    # Only objects that the service owns are deleted. Another object, for example one with copied
    # labels, is adopted if it is wanted.
    obsolete = [
        item
        for key, item in observed.objects.items()
        if key not in kept and is_owned_by(item, service.uid) and rollout.is_known
    ]
    obsolete += outdated_followers(service, desired, observed.pods)
    obsolete += outdated_engines(service, rollout, desired, observed)

    healing = restart_decision(service, observed)
    status = status_of(service, rollout, observed, healing)

    waits = _recheck_times_s(service, healing, observed)
    if any(state.is_unfinished for state in caches):
        waits.append(RECHECK_S)
    if rollout.look_again_s is not None:
        waits.append(rollout.look_again_s)
    recheck_s = min(waits, default=None)

    return ServicePlan(tuple(desired), tuple(obsolete), status, rollout, healing, recheck_s)


def plan_sizes(service: Service, observed: Observed, settings: Settings) -> ServicePlan:
    """Return a plan that only resizes a service's pools.

    The operator falls back to this plan if no complete spec of the service is known.
    """
    service = with_replicas(service, observed.objects, observed.scaling)
    target = release_of(service, settings)

    # The rollout does not advance. The plan only needs its present state for the status.
    seen = observe_rollout(service.name, observed)
    state = load(seen.stored_state, target) or initial(target, observed.now)
    tried = [pool for pool in service.spec.pools if _has_canary(service, pool, observed)]
    weight = observed.status.get("rollout", {}).get("weight", 0)
    rollout = RolloutPlan(state, service, service, tuple(tried), weight, is_known=False)

    healing = restart_decision(service, observed)
    status = status_of(service, rollout, observed, healing)
    sizes = [
        *resized_engines(service, service.spec.pools, observed),
        *paused_scalers(service, observed),
    ]
    recheck_s = min(_recheck_times_s(service, healing, observed), default=None)

    return ServicePlan(tuple(sizes), (), status, rollout, healing, recheck_s)


def _has_canary(service: Service, pool: str, observed: Observed) -> bool:
    name = naming.pool_name(service.name, naming.canary_pool(pool))
    return ObjectKey("StatefulSet", name) in observed.objects


def status_after(service: Service, plan: ServicePlan, observed: Observed) -> Manifest:
    """Return the status to write after the plan was fully or partly applied."""
    service = with_replicas(service, observed.objects, observed.scaling)
    return status_of(service, plan.rollout, observed, plan.healing)


def restart_decision(service: Service, observed: Observed) -> RestartDecision:
    """Decide which engine pods to restart now, and which to restart later.

    Pods of a canary are excluded, because the rollout handles them.
    """
    return decide_restarts(
        service.spec.healing,
        engine_pods(
            stable_pods(observed), observed.engine_health, observed.lost_nodes, observed.now
        ),
        observed.restarts,
        observed.now,
        observed.unreachable_pools,
    )


def _recheck_times_s(service: Service, healing: RestartDecision, observed: Observed) -> list[float]:
    """Return the delays, in seconds, after which the plan may change even without an event.

    For example, a restart may become due, a pod may become stable, a missing pod may become a
    problem, or a node may need another check.
    """
    stable = (stable_in_s(pod, observed.now) for pod in observed.pods)
    nodes = (node_wait_s(pod, observed.now) for pod in observed.pods)
    unmounted = (unmounted_recheck_s(pod, observed.now) for pod in observed.pods)
    missing_s = missing_pods_due_s(workload_pods(service, observed), observed.status, observed.now)
    # The Events of workloads whose wait is over have just been read.
    refused = (refusal_due_s(each, observed.now) for each in unreported_workloads(observed))
    refusals = filter(None, refused)
    waits = (healing.recheck_s, missing_s, *stable, *nodes, *unmounted, *refusals)
    return [max(1.0, wait) for wait in waits if wait is not None]


def is_edited(service: Service, observed: Observed) -> bool:
    """Return whether the service was edited since its status was last written."""
    return bool(observed.status.get("observedGeneration") != service.generation)


def router_roll(
    service: Service, rollout: RolloutPlan, observed: Observed, settings: Settings
) -> RouterRoll:
    """Decide which router objects to apply now.

    A pod template that changed only because the operator was upgraded waits for the service's turn
    in the rollout queue.
    """
    file = _router_file(service, rollout, observed)
    deployment = observed.objects.get(ObjectKey("Deployment", naming.router_name(service.name)))

    # While some engines speak TLS and others plaintext, routers must speak both.
    is_mixed = rollout.has_mixed_engines
    routed = with_engine_tls(service, rollout.stable, deployment) if is_mixed else service
    accepts_plaintext = routed.spec.tls.engines is not None and is_mixed

    return roll_routers(
        router_objects(routed, settings, file, accepts_plaintext=accepts_plaintext),
        observed.objects,
        is_edited(service, observed),
        observed.may_begin_rollout,
    )


def wanted_objects(
    service: Service,
    rollout: RolloutPlan,
    routers: RouterRoll,
    observed: Observed,
    settings: Settings,
) -> list[Manifest]:
    """Return a service's objects, in the order in which to apply them.

    The state of the rollout comes first, because every later step depends on it. Engines come
    before routers, so that a router can resolve its targets when it starts.
    """
    if rollout.is_known:
        objects = all_engines(service, rollout, observed, settings)
    else:
        objects = engine_objects(service, settings)
        objects += resized_engines(service, service.spec.pools, observed)
        objects += paused_scalers(service, observed)
    objects += left_to_router_scaler(service, routers.objects, observed)
    objects += exposure_objects(service, observed.serves)
    objects += fetch_objects(service, observed, settings)
    return objects + monitoring_objects(service, observed.serves, settings)


def left_to_router_scaler(
    service: Service, objects: Iterable[Manifest], observed: Observed
) -> list[Manifest]:
    """Return the router's objects, without `replicas` if a HorizontalPodAutoscaler sets it.

    Applying a Deployment with `replicas` would interfere with the autoscaler.
    """
    key = ObjectKey("Deployment", naming.router_name(service.name))
    live = live_replicas(observed.objects.get(key))
    is_left = service.spec.router.autoscaling is not None and live == service.spec.router.replicas
    return without_replicas(objects, "Deployment") if is_left else list(objects)


def _router_file(service: Service, rollout: RolloutPlan, observed: Observed) -> str:
    """Return the rollout file that the routers read.

    While the state of the rollout is unknown, the live file is kept, except for the field that
    marks a stopped service.
    """
    key = ObjectKey("ConfigMap", naming.router_name(service.name))
    live_file = observed.objects.get(key, {}).get("data", {}).get(naming.ROLLOUT_FILE)
    if rollout.is_known or live_file is None:
        return router_file(rollout)
    return with_stop_said(str(live_file), service.spec.stop)
