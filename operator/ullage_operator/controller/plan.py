"""Plans the actions for a declared service from the objects that exist. Pure.

The operator applies a plan to the cluster; `ullage up` runs the same pods as processes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ullage_common.config.engine import follower_place
from ullage_common.wire.fingerprint import Fingerprint
from ullage_operator.api import naming
from ullage_operator.api.errors import InvalidManifest, Problem
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
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
from ullage_operator.conditions.diagnosis import (
    diagnose,
    is_unmounted,
    stable_in_s,
    unmounted_recheck_s,
)
from ullage_operator.conditions.missing_pods import (
    PROGRESSING,
    WorkloadPods,
    lacking_workloads,
    missing_pods,
    missing_pods_due_s,
)
from ullage_operator.conditions.placement import fits_place_of, roomless_s
from ullage_operator.conditions.pod_problem import PodProblem, Warnings
from ullage_operator.conditions.pods import (
    is_counted,
    is_follower,
    is_placed,
    is_router,
    pool_of,
    restart_count,
)
from ullage_operator.controller.model_caches import (
    RECHECK_S,
    CacheState,
    FetchObservation,
    cache_states,
    cache_status,
    caches_condition,
    waiting_pools,
)
from ullage_operator.manifests.exposure import exposure_objects, route_condition
from ullage_operator.manifests.fetch_job import fetch_job, fetch_policy
from ullage_operator.manifests.manifests import (
    KEDA_PAUSED,
    engine_objects,
    followers,
    pool_objects,
    router_objects,
    scaler_objects,
    with_pause,
    without_replicas,
)
from ullage_operator.manifests.monitoring import monitoring_objects
from ullage_operator.manifests.template_checks import template_conflicts
from ullage_operator.policy.engine_health import (
    FRESH_S,
    SILENT_S,
    EngineHealth,
    PressureLevels,
    boost_off_engines,
    worker_restarts,
)
from ullage_operator.policy.lost_nodes import node_wait_s
from ullage_operator.policy.pool_sizes import (
    NO_DECISIONS,
    ScalingDecisions,
    canary_places,
    left_to_others,
    live_replicas,
    may_sleep,
    resized,
    stop_annotation,
    was_stopped,
    with_replicas,
)
from ullage_operator.policy.restarts import (
    RestartDecision,
    RestartEvent,
    decide_restarts,
    deferred_problems,
    engine_pods,
    restarts_status,
)
from ullage_operator.policy.scaling_status import SCALED_OBJECT, pool_scaling, scaling_condition
from ullage_operator.rollout.analysis import CanarySample
from ullage_operator.rollout.falls import EngineReport
from ullage_operator.rollout.objects import (
    rollout_objects,
    router_file,
    with_revision,
    with_stop_said,
)
from ullage_operator.rollout.observation import RolloutObservation
from ullage_operator.rollout.plan import RolloutPlan, plan_rollout
from ullage_operator.rollout.rolls import RouterRoll, pods_to_replace, roll_routers
from ullage_operator.rollout.stages import (
    MODEL_FETCHING,
    PAUSED,
    PROMOTED,
    QUEUED,
    RENEWALS,
    ROUTERS_FIRST,
    WAITING,
    RolloutProgress,
    RolloutStage,
)
from ullage_operator.rollout.state import initial, load, release_of
from ullage_operator.rollout.status import rollout_condition, rollout_status
from ullage_operator.rollout.transport import with_engine_tls

Manifest = dict[str, Any]
LiveObject = dict[str, Any]


ROUTER_WAITS = "the operator's new routers wait until fewer services are being rolled out"
SEEK = timedelta(minutes=10)
"""Time for which other services' rollouts wait for one that finds no room for its pods."""
_OF_PODS = ("ConfigMap", "StatefulSet")
"""Kinds of a pool's objects that its pods are made of: each reads the configuration it was made
for."""


INVALID_SPEC = "InvalidSpec"
"""Reason of conditions of a service whose declared spec cannot be carried out."""
_GOES_ON = ". Until that is corrected, the spec before it goes on"


class ObjectKey(NamedTuple):
    """Identity of an object of a service; no two of its kinds share a name in different groups."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The existing objects and measures that one service's plan depends on."""

    now: datetime
    """The time of the observation, in UTC."""
    objects: Mapping[ObjectKey, LiveObject] = field(default_factory=dict)
    """Live objects that the service owns, by kind and name."""
    pods: Sequence[LiveObject] = ()
    """Pods of the service, for the reasons why they are stuck."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes of these pods that do not answer, as far as the operator may ask for nodes."""
    warnings: Warnings = field(default_factory=dict)
    """Newest warnings about pods that do not start and workloads without pods, by uid."""
    pressure_levels: PressureLevels = field(default_factory=dict)
    """Memory pressure of the engines that report to the operator, by pool."""
    engine_health: Mapping[str, EngineHealth] = field(default_factory=dict)
    """Health of the engines that report to the operator, by the pods' uid."""
    unreachable_pools: frozenset[str] = frozenset()
    """Pools with engines that are silent to the operator and that no router reaches either."""
    restarts: Sequence[RestartEvent] = ()
    """Restarts of engine pods in the last hour."""
    serves: frozenset[str] = frozenset()
    """Optional kinds that the cluster serves, such as PodMonitor."""
    unlisted: tuple[str, ...] = ()
    """Kinds that are served and cannot be listed, with the reason."""
    missing_rights: tuple[str, ...] = ()
    """Rights that the operator lacks, each as `verb resource in namespace`."""
    unapplied: tuple[PodProblem, ...] = ()
    """Problems with objects that could not be written."""
    refused: tuple[Problem, ...] = ()
    """Why the declared spec is not carried out, so that an earlier one still is."""
    undefined: tuple[str, ...] = ()
    """Fields without a default in the cluster's definition of LLMService."""
    challenger: str = ""
    """Another operator that watches the service, too, and leaves it to this one."""
    fetches: FetchObservation = field(default_factory=FetchObservation)
    """Observations of the Jobs that fetch models into shared claims."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """The service's present status."""
    is_rollout_readable: bool = True
    """Whether the ConfigMap with its rollout's state can be read."""
    may_begin_rollout: bool = True
    """Whether other services' rollouts leave room for one that nobody's edit asks for."""
    may_yield: bool = True
    """Whether its next pod gets the place that another one of it frees."""
    rollout_annotation: str = ""
    """The annotation by which people steer its rollout."""
    canary_samples: Sequence[CanarySample] = ()
    """Samples of a canary from the routers that answered."""
    unanswered: tuple[str, ...] = ()
    """Addresses of routers that did not answer when they were asked for samples, and why."""
    scaling: ScalingDecisions = NO_DECISIONS
    """Numbers of engines that pools should have, where the operator decides."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The actions for one service, in order: apply, delete, write the status."""

    apply: tuple[Manifest, ...]
    delete: tuple[LiveObject, ...]
    status: Manifest
    rollout: RolloutPlan
    healing: RestartDecision
    """Pods to restart, once the status that counts the restarts is written."""
    recheck_s: float | None = None
    """Seconds until the next reconciliation if nothing changes; None for no such bound."""


def plan(service: Service, observed: Observed, settings: Settings) -> ServicePlan:
    """Return the objects to apply, the objects to delete, and the status.

    Raises:
        InvalidManifest: a pod template sets a field that the operator itself sets. Templates of
            releases that engines run are not checked: the operator's fields win there.
    """
    if problems := list(dict.fromkeys(template_conflicts(service, settings))):
        raise InvalidManifest(problems)
    service = with_replicas(service, observed.objects, observed.scaling)
    caches = states_of_caches(service, observed)
    seen = replace(
        observe_rollout(observed),
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
    keys = {key_of(item) for item in [*desired, *routers.held]} | held_keys(service, rollout)
    # Kubernetes itself removes a Job that filled its claim.
    keys |= {ObjectKey("Job", state.job) for state in caches if not state.is_wanted}

    # An object without an owner, or with copied labels, is adopted if it is wanted, and never
    # deleted.
    obsolete = [
        item
        for key, item in observed.objects.items()
        if key not in keys and is_owned_by(item, service.uid)
    ]
    obsolete = obsolete if rollout.is_known else []
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
    """Return the plan of a service that changes only the sizes of its pools."""
    service = with_replicas(service, observed.objects, observed.scaling)
    target = release_of(service, settings)
    seen = observe_rollout(observed)
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


def is_owned_by(item: LiveObject, uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == uid for owner in owners)


def status_after(service: Service, plan: ServicePlan, observed: Observed) -> Manifest:
    """Return the status after the plan was carried out, or the part of it that could be."""
    service = with_replicas(service, observed.objects, observed.scaling)
    return status_of(service, plan.rollout, observed, plan.healing)


def restart_decision(service: Service, observed: Observed) -> RestartDecision:
    """Decides which pods to restart."""
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
    """Return the seconds until healing wants to decide again, a pod becomes stable or has been
    lacking for too long, or a node is to be asked for."""
    stable = (stable_in_s(pod, observed.now) for pod in observed.pods)
    nodes = (node_wait_s(pod, observed.now) for pod in observed.pods)
    unmounted = (unmounted_recheck_s(pod, observed.now) for pod in observed.pods)
    unmade_s = missing_pods_due_s(workload_pods(service, observed), observed.status, observed.now)
    waits = (healing.recheck_s, unmade_s, *stable, *nodes, *unmounted)
    return [max(1.0, wait) for wait in waits if wait is not None]


def is_edited(service: Service, observed: Observed) -> bool:
    """Return whether the service was edited since its status was last written."""
    return bool(observed.status.get("observedGeneration") != service.generation)


def router_roll(
    service: Service, rollout: RolloutPlan, observed: Observed, settings: Settings
) -> RouterRoll:
    """Return the router's objects; a template that the operator itself changed waits for its
    turn."""
    is_mixed = rollout.has_mixed_engines
    file = _router_file(service, rollout, observed)
    routers = observed.objects.get(ObjectKey("Deployment", naming.router_name(service.name)))
    routed = with_engine_tls(service, rollout.stable, routers) if is_mixed else service
    is_mixed = routed.spec.tls.engines is not None and is_mixed
    return roll_routers(
        router_objects(routed, settings, file, accepts_plaintext=is_mixed),
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
    """Return the objects of a service in the order to apply.

    The rollout's state comes first, since every later step relies on it; then engines, so that a
    router can resolve its targets when it starts.
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


def states_of_caches(service: Service, observed: Observed) -> list[CacheState]:
    """Return the state of each claim that the spec asks to warm."""
    objects = list(observed.objects.values())
    return cache_states(service, objects, observed.fetches, observed.status, observed.now)


def fetch_objects(service: Service, observed: Observed, settings: Settings) -> list[Manifest]:
    """Return the Jobs that fetch models into shared claims, and their NetworkPolicy."""
    caches = states_of_caches(service, observed) if settings.on_kubernetes else []
    if not caches:
        return []
    jobs = [fetch_job(service, state.cache, settings) for state in caches if state.is_wanted]
    return [fetch_policy(service, settings), *jobs]


def unbegun_pools(service: Service, rollout: RolloutPlan, observed: Observed) -> dict[str, str]:
    """Return the pools whose first engines wait for their model, with the reasons."""
    if rollout.stable.spec.model.source != service.spec.model.source:
        return {}
    waiting = waiting_pools(states_of_caches(service, observed))
    keys = {
        name: ObjectKey("StatefulSet", naming.pool_name(service.name, name)) for name in waiting
    }
    return {name: why for name, why in waiting.items() if keys[name] not in observed.objects}


def left_to_router_scaler(
    service: Service, objects: Iterable[Manifest], observed: Observed
) -> list[Manifest]:
    """Return the router's objects; the HorizontalPodAutoscaler keeps the number of pods."""
    key = ObjectKey("Deployment", naming.router_name(service.name))
    live = live_replicas(observed.objects.get(key))
    is_left = service.spec.router.autoscaling is not None and live == service.spec.router.replicas
    return without_replicas(objects, "Deployment") if is_left else list(objects)


def all_engines(
    service: Service, rollout: RolloutPlan, observed: Observed, settings: Settings
) -> list[Manifest]:
    """Return the rollout's state, the canary's engines and the stable ones."""
    objects = rollout_objects(service, rollout, settings)
    # Running pods keep their mounts until they are replaced.
    had_adapters = rollout.stable.spec.serves_adapters
    objects += engine_objects(service, settings, with_adapters=had_adapters)

    unbegun = unbegun_pools(service, rollout, observed)
    for name, pool in rollout.stable.spec.pools.items():
        manifests = pool_objects(rollout.stable, name, pool, settings)
        if name in unbegun:
            objects += [item for item in manifests if item["kind"] != "StatefulSet"]
            continue

        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        if left_to_others(pool, observed.objects.get(key), service.spec.stop):
            manifests = without_replicas(manifests)
        manifests = with_revision(service, manifests, rollout.progress.stable)

        places = rollout.places.get(name, 0)
        manifests = [without_places(item, pool, places) for item in manifests]
        if service.spec.stop:
            manifests = [with_stop(item) for item in manifests]
        if name in rollout.held:
            held = held_keys(service, rollout) & observed.objects.keys()
            manifests = [item for item in manifests if key_of(item) not in held]
            manifests += resized_engines(service, (name,), observed, places)

        objects += manifests
        objects += scaler_objects(service, name, pool, observed.serves)
    return objects


def with_stop(item: Manifest) -> Manifest:
    """Return an object of a pool, with the stop annotation if it is a StatefulSet."""
    if item["kind"] != "StatefulSet":
        return item
    annotations = item["metadata"].get("annotations", {}) | stop_annotation(True)
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}}


def without_places(item: Manifest, pool: PoolSpec, places: int) -> Manifest:
    """Return an object of a pool without the engines that a canary replaces."""
    if not places or item["kind"] != "StatefulSet":
        return item
    missing = places * (pool.nodes - 1) if is_follower(item) else places
    return resized(item, item["spec"]["replicas"], missing)


def held_keys(service: Service, rollout: RolloutPlan) -> set[ObjectKey]:
    """Return the keys of objects that stay as they are while their pools wait for a roll."""
    pools = [name for pool in rollout.held for name in (pool, naming.group_pool(pool))]
    names = [naming.pool_name(service.name, pool) for pool in pools]
    return {ObjectKey(kind, name) for kind in _OF_PODS for name in names}


def resized_engines(
    service: Service, pools: Iterable[str], observed: Observed, places: int = 0
) -> list[Manifest]:
    """Return live StatefulSets in which only the number of pods may change.

    Args:
        places: how many engines of each pool a canary replaces.
    """
    resized_sets = []
    for name in pools:
        pool = service.spec.pools[name]
        sizes = {
            name: (pool.replicas, places),
            naming.group_pool(name): (followers(pool), places * (pool.nodes - 1)),
        }
        for part, (size, missing) in sizes.items():
            key = ObjectKey("StatefulSet", naming.pool_name(service.name, part))
            live = observed.objects.get(key)
            is_stopped = service.spec.stop
            if live is None or left_to_others(pool, live, is_stopped):
                continue
            present = (live_replicas(live), canary_places(live), was_stopped(live))
            if present != (size, missing, is_stopped):
                resized_sets.append(resized(live, size, missing, is_stopped))
    return resized_sets


def paused_scalers(service: Service, observed: Observed) -> list[Manifest]:
    """Return KEDA's objects as they are, where only a stop is to begin or to end."""
    scalers = []
    for name in service.spec.pools:
        key = ObjectKey(SCALED_OBJECT, naming.pool_name(service.name, name))
        live = observed.objects.get(key)
        if live is None:
            continue
        annotations = live["metadata"].get("annotations") or {}
        if (KEDA_PAUSED in annotations) is not service.spec.stop:
            scalers.append(with_pause(live, service.spec.stop))
    return scalers


def outdated_followers(
    service: Service, desired: Iterable[Manifest], pods: Sequence[LiveObject]
) -> list[LiveObject]:
    """Return the followers that cannot join their leader, which already has the wanted revision.

    Their StatefulSet has the update strategy OnDelete, so the operator deletes them.
    """
    wanted = {
        item["metadata"]["name"]: group_revision(item["spec"]["template"])
        for item in desired
        if item["kind"] == "StatefulSet"
    }
    revisions = {
        pod["metadata"]["name"]: group_revision(pod)
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }
    outdated: list[LiveObject] = []
    for pod in filter(is_follower, pods):
        workload, _, index = pod["metadata"]["name"].rpartition("-")
        pool = service.spec.pools.get(naming.stable_pool(pool_of(pod)))
        if pool is None or pool.nodes == 1 or pod["metadata"]["name"] not in revisions:
            continue
        if not index.isdecimal():  # a pod created by hand, with labels of a follower
            continue
        group, _ = follower_place(int(index), pool.nodes)
        leader = f"{naming.leaders_name(workload)}-{group}"
        revision = wanted.get(workload)
        if revision and revisions.get(leader) == revision and group_revision(pod) != revision:
            outdated.append(_pod_to_delete(pod))
    return outdated


def outdated_engines(
    service: Service, rollout: RolloutPlan, desired: Iterable[Manifest], observed: Observed
) -> list[LiveObject]:
    """Return the engines of an older template that a rollout replaces now.

    The one that Kubernetes replaces by itself is not among them.
    """
    wanted = {key_of(item): item for item in desired}
    outdated: list[LiveObject] = []
    for name, pool in service.spec.pools.items():
        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        live = observed.objects.get(key)
        # No pod can have the revision of a template that is still to be applied.
        if live is None or _template_of(wanted.get(key, live)) != _template_of(live):
            continue
        pods = [pod for pod in observed.pods if pool_of(pod) == name and not is_follower(pod)]
        most = service.spec.rollout.most_unavailable(pool.replicas)
        outdated += map(_pod_to_delete, pods_to_replace(live, pods, most))
    return outdated


def _template_of(stateful_set: Manifest) -> Any:
    return (stateful_set["metadata"].get("annotations") or {}).get(naming.TEMPLATE_HASH)


def _pod_to_delete(pod: Mapping[str, Any]) -> LiveObject:
    identity = ("name", "namespace", "uid", "labels")
    meta = {name: pod["metadata"][name] for name in identity}
    return {"apiVersion": naming.POD.api_version, "kind": naming.POD.name, "metadata": meta}


def group_revision(pod: Manifest) -> str:
    """Return the revision of the group that a pod or pod template is of; empty for others."""
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get(naming.GROUP_REVISION, ""))


def _router_file(service: Service, rollout: RolloutPlan, observed: Observed) -> str:
    """Return the rollout file of routers: the live one while its new content is unknown."""
    key = ObjectKey("ConfigMap", naming.router_name(service.name))
    live_file = observed.objects.get(key, {}).get("data", {}).get(naming.ROLLOUT_FILE)
    if rollout.is_known or live_file is None:
        return router_file(rollout)
    return with_stop_said(str(live_file), service.spec.stop)


def observe_rollout(observed: Observed) -> RolloutObservation:
    """Return the observations that the plan of a rollout depends on."""
    kept = next((obj for key, obj in observed.objects.items() if _is_rollout_state(key)), {})
    pods = canary_pods(observed)
    wrong = diagnose(pods, observed.now, observed.lost_nodes, observed.warnings)
    return RolloutObservation(
        now=observed.now,
        stateful_sets={
            key.name: obj for key, obj in observed.objects.items() if key.kind == "StatefulSet"
        },
        stored_state=kept.get("data", {}).get(naming.ROLLOUT_STATE),
        is_state_readable=observed.is_rollout_readable,
        may_begin=observed.may_begin_rollout,
        may_yield=observed.may_yield,
        routers=next(
            (obj for key, obj in observed.objects.items() if key.kind == "Deployment"), None
        ),
        has_ending_routers=any(
            is_router(pod) and "deletionTimestamp" in pod["metadata"] for pod in observed.pods
        ),
        annotation=observed.rollout_annotation,
        samples=observed.canary_samples,
        unanswered=observed.unanswered,
        problem=str(wrong[0]) if wrong else "",
        is_stuck=any(problem.is_stuck for problem in wrong),
        roomless_s=roomless_pools(observed),
        engines=engine_reports(observed),
    )


def roomless_pools(observed: Observed) -> dict[str, float]:
    """Return, by pool, the seconds for which a canary's pods had no room though an engine of their
    pool would free enough."""
    waits: dict[str, float] = {}
    for pod in canary_pods(observed):
        wait_s = roomless_s(pod, observed.now)
        if wait_s is None:
            continue
        pool = naming.stable_pool(pool_of(pod))
        of_its_kind = naming.group_pool(pool) if is_follower(pod) else pool
        peers = [each for each in observed.pods if pool_of(each) == of_its_kind]
        if any(fits_place_of(pod, peer) for peer in peers):
            waits[pool] = max(wait_s, waits.get(pool, 0.0))
    return waits


def seeks_room(service: Service, progress: RolloutProgress, observed: Observed) -> bool:
    """Return whether a canary that began not long ago, or engines after it, have no node yet."""
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
    """Return whether an engine has found no room for a while, which is not too long to wait for."""
    waits = [roomless_s(pod, observed.now) for pod in observed.pods if pool_of(pod)]
    return any(wait_s is not None and wait_s < SEEK.total_seconds() for wait_s in waits)


def engine_reports(observed: Observed) -> list[EngineReport]:
    """Return the restarts and worker losses of engine pods."""
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
    if is_follower(pod):  # the server that counts workers is its leader's
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


def _is_rollout_state(key: ObjectKey) -> bool:
    return key.kind == "ConfigMap" and key.name.endswith(naming.rollout_name(""))


def is_canary(pod: LiveObject) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return naming.is_canary_pool(labels.get(naming.POOL_LABEL, ""))


def canary_pods(observed: Observed) -> list[LiveObject]:
    return [pod for pod in observed.pods if is_canary(pod)]


def stable_pods(observed: Observed) -> list[LiveObject]:
    """Return all pods but a canary's: its problems are the rollout's and make nothing unready."""
    return [pod for pod in observed.pods if not is_canary(pod)]


def key_of(item: LiveObject) -> ObjectKey:
    return ObjectKey(item["kind"], item["metadata"]["name"])


def status_of(
    service: Service, rollout: RolloutPlan, observed: Observed, healing: RestartDecision
) -> Manifest:
    live = observed.objects
    name = naming.router_name(service.name)
    router_live = live.get(ObjectKey("Deployment", name))
    router = workload_of("router", service.spec.router.replicas, router_live)
    pools = workloads(service, observed)
    wrong = [*refused_edit(observed.refused), *observed.unapplied]
    about_pods = (observed.now, observed.lost_nodes, observed.warnings)
    wrong += diagnose(stable_pods(observed), *about_pods)
    wrong += deferred_problems(healing.deferred)
    wrong += dropped_claims(rollout, observed)
    pods = workload_pods(service, observed)
    wrong += missing_pods(pods, observed.status, observed.now, observed.warnings)
    trying = diagnose(canary_pods(observed), *about_pods)
    serving = [with_canary_engines(service, pool, rollout, observed) for pool in pools.values()]
    conditions = service_conditions(
        router,
        serving,
        wrong,
        trying,
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
    conditions += route_condition(
        service, observed.serves, live.get(ObjectKey(naming.HTTP_ROUTE, name))
    )
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


def refused_edit(problems: Sequence[Problem]) -> list[PodProblem]:
    """Return the problems of a declared spec while an earlier one is carried out."""
    if not problems:
        return []
    message = "; ".join(map(str, problems))
    return [PodProblem("", INVALID_SPEC, f"{message}{_GOES_ON}", blocks=False)]


def dropped_claims(rollout: RolloutPlan, observed: Observed) -> list[PodProblem]:
    """Return a problem for each pool whose device claims the API server dropped."""
    stable = rollout.stable
    problems = []
    for name, pool in stable.spec.pools.items():
        workload = naming.pool_name(stable.name, name)
        live = observed.objects.get(ObjectKey("StatefulSet", workload))
        if live is None or not pool.resource_claims:
            continue
        annotations = live["metadata"].get("annotations") or {}
        is_taken = annotations.get(naming.REVISION) == rollout.progress.stable
        if is_taken and "resourceClaims" not in live["spec"]["template"]["spec"]:
            message = (
                f"spec.pools.{name}.resourceClaims: the API server keeps no claims of pods, "
                "so they have no GPUs; use Kubernetes 1.34, turn DynamicResourceAllocation "
                "on, or leave resourceClaims out, for limits of gpuResourceName"
            )
            problems.append(PodProblem("", "ClaimsDropped", message, blocks=False))
    return problems


def engine_numerics(observed: Observed) -> dict[str, EngineNumerics]:
    """Return the fingerprints of engines that have served, by the names of their pods."""
    engines = {}
    for pod in observed.pods:
        meta = pod["metadata"]
        health = observed.engine_health.get(meta.get("uid", ""))
        report = health.report if health else None
        if report is None or not (report.fingerprint or report.ready):
            continue
        # A canary's StatefulSet is another one, whose revisions are its own.
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
    """Return the uids of the pods and workloads whose Events may say why pods do not start."""
    pods = [pod for pod in observed.pods if is_unmounted(pod, observed.now)]
    workloads = workload_pods(service, observed)
    lacking = lacking_workloads(workloads, observed.status, observed.now)
    objects = [*pods, *(each.live for each in lacking)]
    return [str(obj["metadata"]["uid"]) for obj in objects if obj["metadata"].get("uid")]


def was_progressing(status: Mapping[str, Any]) -> bool:
    """Return what a service's status says of Progressing; True for one without a status."""
    listed = status.get("conditions", ())
    progressing = (each["status"] == "True" for each in listed if each["type"] == PROGRESSING)
    return next(progressing, True)


def workload_pods(service: Service, observed: Observed) -> list[WorkloadPods]:
    """Return the router's Deployment and the stable StatefulSets, with their pods."""
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
    """Return the condition Progressing of a rollout; None while all engines have the spec's
    revision."""
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
    """Return the condition that engines wait for their model to be fetched; None otherwise."""
    unbegun = unbegun_pools(service, rollout, observed)
    messages = [f"pool {name} {why}" for name, why in unbegun.items()]
    return Condition(PROGRESSING, True, MODEL_FETCHING, "; ".join(messages)) if messages else None


def workloads(service: Service, observed: Observed) -> dict[str, Workload]:
    """Return the stable engines by pool."""
    by_pool = {}
    for name, pool in service.spec.pools.items():
        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        workload = workload_of(name, pool.replicas, observed.objects.get(key))
        by_pool[name] = replace(workload, sleeps=may_sleep(pool))
    return by_pool


def with_canary_engines(
    service: Service, pool: Workload, rollout: RolloutPlan, observed: Observed
) -> Workload:
    """Add the canary's engines, by which routers serve what no stable engine can."""
    if pool.name not in rollout.pools:
        return pool
    name = naming.pool_name(service.name, naming.canary_pool(pool.name))
    canary = workload_of(name, 0, observed.objects.get(ObjectKey("StatefulSet", name)))
    return replace(pool, ready=min(pool.desired, pool.ready + canary.ready))


def scale_status(service: Service, pools: Mapping[str, Workload]) -> Manifest:
    """Return the fields of the scale subresource, which shows the default pool."""
    first = next(iter(service.spec.pools))
    match = naming.selector(service.name, naming.ENGINE, first)
    return {"replicas": pools[first].exist, "selector": naming.selector_text(match)}


def pool_status(service: Service, pool: str, workload: Workload, observed: Observed) -> Manifest:
    match = naming.selector(service.name, naming.ENGINE, pool)
    pressure = observed.pressure_levels.get(pool)
    before = observed.status.get("pools", {}).get(pool, {})
    engines = [engine for engine in observed.engine_health.values() if engine.pool == pool]
    # Of a pool that sleeps nobody reports, and what was is over.
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
