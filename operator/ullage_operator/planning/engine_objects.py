"""Plans which engine objects to apply or resize, and which engine pods to delete."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ullage_common.config.engine import follower_place
from ullage_operator.api import naming
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.pods import is_follower, pool_of
from ullage_operator.manifests.fetch_job import fetch_job, fetch_policy
from ullage_operator.manifests.keda import KEDA_PAUSED, scaler_objects, with_pause
from ullage_operator.manifests.manifests import (
    engine_objects,
    followers,
    pool_objects,
    without_replicas,
)
from ullage_operator.planning.model_caches import CacheState, cache_states, waiting_pools
from ullage_operator.planning.observed import ObjectKey, Observed, key_of
from ullage_operator.policy.pool_sizes import (
    canary_places,
    left_to_others,
    live_replicas,
    resized,
    stop_annotation,
    was_stopped,
)
from ullage_operator.policy.scaling_status import SCALED_OBJECT
from ullage_operator.rollout.objects import rollout_objects, with_revision
from ullage_operator.rollout.plan import RolloutPlan
from ullage_operator.rollout.replacement import pods_to_replace

Manifest = dict[str, Any]
LiveObject = dict[str, Any]

_HELD_KINDS = ("ConfigMap", "StatefulSet")
"""Kinds of a pool's objects that must be updated together.

A pod must read the version of the ConfigMap that matches its StatefulSet's template.
"""


def states_of_caches(service: Service, observed: Observed) -> list[CacheState]:
    """Return the download state of each claim that the spec asks to pre-fill with a model."""
    objects = list(observed.objects.values())
    return cache_states(
        service, objects, observed.fetches, observed.status, observed.now, observed.warnings
    )


def fetch_objects(service: Service, observed: Observed, settings: Settings) -> list[Manifest]:
    """Return the Jobs that download models into shared claims, and their NetworkPolicy."""
    caches = states_of_caches(service, observed) if settings.on_kubernetes else []
    if not caches:
        return []
    jobs = [fetch_job(service, state.cache, settings) for state in caches if state.is_wanted]
    return [fetch_policy(service, settings), *jobs]


def unbegun_pools(service: Service, rollout: RolloutPlan, observed: Observed) -> dict[str, str]:
    """Return the pools that are not created yet because a Job must first download their model.

    The result maps each pool's name to the reason for waiting. A pool that already has a
    StatefulSet does not wait.
    """
    if rollout.stable.spec.model.source != service.spec.model.source:
        return {}

    waiting = waiting_pools(states_of_caches(service, observed))
    keys = {
        name: ObjectKey("StatefulSet", naming.pool_name(service.name, name)) for name in waiting
    }
    return {name: why for name, why in waiting.items() if keys[name] not in observed.objects}


def all_engines(
    service: Service, rollout: RolloutPlan, observed: Observed, settings: Settings
) -> list[Manifest]:
    """Return the ConfigMap with the rollout's state, and the objects of all engines."""
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
    """Return an object of a stopped pool, annotated as stopped if it is a StatefulSet.

    The annotation tells `was_stopped` that the StatefulSet has no replicas because of `spec.stop`.
    """
    if item["kind"] != "StatefulSet":
        return item
    annotations = item["metadata"].get("annotations", {}) | stop_annotation(True)
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}}


def without_places(item: Manifest, pool: PoolSpec, places: int) -> Manifest:
    """Return an object of a pool in which a canary takes the place of some engines.

    A StatefulSet's replicas are reduced by the number of pods that the canary replaces. Any other
    object is returned unchanged.

    Args:
        item: an object of the pool, of any kind.
        pool: the pool.
        places: how many engines of the pool a canary replaces.
    """
    if not places or item["kind"] != "StatefulSet":
        return item
    missing = places * (pool.nodes - 1) if is_follower(item) else places
    return resized(item, item["spec"]["replicas"], missing)


def held_keys(service: Service, rollout: RolloutPlan) -> set[ObjectKey]:
    """Return the keys of objects that must stay unchanged while their pools wait for a rollout."""
    pools = [name for pool in rollout.held for name in (pool, naming.group_pool(pool))]
    names = [naming.pool_name(service.name, pool) for pool in pools]
    return {ObjectKey(kind, name) for kind in _HELD_KINDS for name in names}


def resized_engines(
    service: Service, pools: Iterable[str], observed: Observed, places: int = 0
) -> list[Manifest]:
    """Return the live StatefulSets that have the wrong number of pods, resized as planned.

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
    """Return the live ScaledObjects that must be paused or resumed, with only that change made."""
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
    """Return the follower pods to delete because their leader already has the new revision.

    All pods of an engine must have the same revision. The followers' StatefulSet uses the update
    strategy OnDelete, so the operator must delete outdated followers itself.
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
    """Return the engine pods with an outdated template that the operator should delete now.

    The engine that the StatefulSet controller will replace next on its own is not included.
    """
    wanted = {key_of(item): item for item in desired}
    outdated: list[LiveObject] = []
    for name, pool in service.spec.pools.items():
        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        live = observed.objects.get(key)
        # Until the new template is applied, no pod can have its revision.
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
    """Return the revision that a pod or template shares with its engine's other pods.

    The result is empty for single-pod engines.
    """
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get(naming.GROUP_REVISION, ""))
