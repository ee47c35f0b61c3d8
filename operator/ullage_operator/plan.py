"""The decision: from what is wanted and what exists to what must be done. Pure.

`plan` serves the operator, which applies it to the cluster, and `ullage up`, which runs the same
pods as processes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from ullage_operator import naming
from ullage_operator.canary import (
    Rolling,
    Seen,
    finding,
    marked,
    roll,
    rollout_objects,
    rollout_status,
    router_file,
)
from ullage_operator.conditions import (
    PROGRESSING,
    Finding,
    Workload,
    findings,
    observe,
    render,
)
from ullage_operator.headroom import Headroom, Vitals
from ullage_operator.healing import Past, Verdict, decide
from ullage_operator.manifests import (
    engine_objects,
    pool_objects,
    router_objects,
)
from ullage_operator.monitoring import monitoring_objects
from ullage_operator.rollout import WAITING, Stage
from ullage_operator.scaler_objects import scaler_objects, without_replicas
from ullage_operator.scaling import (
    NOTHING,
    Decided,
    left_to_others,
    live_replicas,
    may_sleep,
    pool_scaling,
    resized,
    scaled,
    scaling_finding,
)
from ullage_operator.settings import Settings
from ullage_operator.spec import Service
from ullage_operator.surroundings import surroundings
from ullage_operator.treatment import (
    held_troubles,
    node_wait_s,
    patients,
    policy_of,
    told,
)
from ullage_operator.trials import Trial
from ullage_operator.trouble import (
    Trouble,
    is_counted,
    pool_of,
    restarts,
    stable_in_s,
    troubles,
)
from ullage_operator.unmade import Made, look_again_s, unmade

Manifest = dict[str, Any]
LiveObject = dict[str, Any]


class ObjectKey(NamedTuple):
    """Identity of an object of a service; no two of its kinds share a name in different groups."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What exists, as far as one service is concerned."""

    now: datetime
    """In UTC."""
    objects: Mapping[ObjectKey, LiveObject] = field(default_factory=dict)
    """Live objects that the service owns, by kind and name."""
    pods: Sequence[LiveObject] = ()
    """Pods of the service, for the reasons why they are stuck."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes of these pods that do not answer, as far as the operator may ask for nodes."""
    headroom: Headroom = field(default_factory=dict)
    """By pool, of the engines that report to the operator."""
    vitals: Mapping[str, Vitals] = field(default_factory=dict)
    """What the operator hears of engines, by the pods' uid."""
    cut_off: frozenset[str] = frozenset()
    """Pools with engines that are silent to the operator and that no router reaches either."""
    past: Sequence[Past] = ()
    """Pods that were made anew in the last hour."""
    serves: frozenset[str] = frozenset()
    """Optional kinds that the cluster serves, such as PodMonitor."""
    missing: tuple[str, ...] = ()
    """Rights that the operator lacks, each as `verb resource in namespace`."""
    unapplied: tuple[Trouble, ...] = ()
    """Why objects could not be written."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """The service's present status."""
    is_remembered: bool = True
    """Whether what is remembered of its rollout can be seen."""
    steering: str = ""
    """The annotation by which people steer its rollout."""
    trials: Sequence[Trial] = ()
    """What routers counted of a canary, as far as they were asked."""
    decided: Decided = NOTHING
    """How many engines pools should have, where the operator decides."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in order: apply, delete, write the status."""

    apply: tuple[Manifest, ...]
    delete: tuple[LiveObject, ...]
    status: Manifest
    rolling: Rolling
    verdict: Verdict
    """Pods to make anew, once the status that tells of it is written."""
    again_s: float | None = None
    """When to look again, though nothing may have changed by then."""


def plan(service: Service, observed: Observed, settings: Settings) -> Plan:
    """Everything that should exist, what should no longer, and what to report."""
    service = scaled(service, observed.objects, observed.decided)
    rolling = roll(service, seen_of(observed), settings)
    wanted = wanted_objects(service, rolling, observed, settings)
    keys = {key_of(item) for item in wanted}
    unwanted = [item for key, item in observed.objects.items() if key not in keys]
    unwanted = unwanted if rolling.is_known else []
    verdict = verdict_of(service, observed)
    status = status_of(service, rolling, observed, verdict)
    waits = _waits(service, verdict, observed)
    if rolling.look_again_s is not None:
        waits.append(rolling.look_again_s)
    again_s = min(waits, default=None)
    return Plan(tuple(wanted), tuple(unwanted), status, rolling, verdict, again_s)


def retold(service: Service, decided: Plan, observed: Observed) -> Manifest:
    """The status once the plan was carried out, as far as it could be."""
    service = scaled(service, observed.objects, observed.decided)
    return status_of(service, decided.rolling, observed, decided.verdict)


def verdict_of(service: Service, observed: Observed) -> Verdict:
    """Which pods to make anew."""
    return decide(
        policy_of(service.spec.healing),
        patients(stable_pods(observed), observed.vitals, observed.lost_nodes, observed.now),
        observed.past,
        observed.now,
        observed.cut_off,
    )


def _waits(service: Service, verdict: Verdict, observed: Observed) -> list[float]:
    """When healing wants to decide again, a pod becomes stable or has been lacking for too long, or
    a node is to be asked for."""
    stable = (stable_in_s(pod, observed.now) for pod in observed.pods)
    nodes = (node_wait_s(pod, observed.now) for pod in observed.pods)
    unmade_s = look_again_s(made(service, observed), observed.status, observed.now)
    waits = (verdict.again_s, unmade_s, *stable, *nodes)
    return [max(1.0, wait) for wait in waits if wait is not None]


def wanted_objects(
    service: Service, rolling: Rolling, observed: Observed, settings: Settings
) -> list[Manifest]:
    """What is remembered first, for nothing may be done that is not; then engines, so that a
    router finds its targets' names when it starts."""
    if rolling.is_known:
        objects = all_engines(service, rolling, observed, settings)
    else:
        objects = engine_objects(service, settings) + held_engines(service, observed)
    objects += router_objects(service, settings, _router_file(service, rolling, observed))
    return objects + monitoring_objects(service, observed.serves)


def all_engines(
    service: Service, rolling: Rolling, observed: Observed, settings: Settings
) -> list[Manifest]:
    """What is remembered, the canary's engines and the stable ones."""
    objects = rollout_objects(service, rolling, settings) + engine_objects(service, settings)
    for name, pool in rolling.stable.spec.pools.items():
        made = pool_objects(rolling.stable, name, pool, settings)
        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        if left_to_others(pool, observed.objects.get(key)):
            made = without_replicas(made)
        objects += marked(made, rolling.state.stable)
        objects += scaler_objects(service, name, pool, observed.serves)
    return objects


def held_engines(service: Service, observed: Observed) -> list[Manifest]:
    """StatefulSets as they are, where nothing but the number of their pods may change."""
    made = []
    for name, pool in service.spec.pools.items():
        live = observed.objects.get(ObjectKey("StatefulSet", naming.pool_name(service.name, name)))
        if live is None or left_to_others(pool, live) or live_replicas(live) == pool.replicas:
            continue
        made.append(resized(live, pool.replicas))
    return made


def _router_file(service: Service, rolling: Rolling, observed: Observed) -> str:
    """What routers read of the rollout: as it is, where it is not known what it should be."""
    key = ObjectKey("ConfigMap", naming.router_name(service.name))
    told = observed.objects.get(key, {}).get("data", {}).get(naming.ROLLOUT_FILE)
    return router_file(rolling) if rolling.is_known or told is None else str(told)


def seen_of(observed: Observed) -> Seen:
    """What a rollout has to know of what exists."""
    kept = next((obj for key, obj in observed.objects.items() if _is_kept(key)), {})
    pods = canary_pods(observed)
    wrong = troubles(pods, observed.now, observed.lost_nodes)
    counts: dict[str, int] = {}
    for pod in pods:
        if "deletionTimestamp" not in pod["metadata"]:
            counts[pool_of(pod)] = counts.get(pool_of(pod), 0) + restarts(pod)
    return Seen(
        now=observed.now,
        stateful_sets={
            key.name: obj for key, obj in observed.objects.items() if key.kind == "StatefulSet"
        },
        remembered=kept.get("data", {}).get(naming.ROLLOUT_STATE),
        is_remembered=observed.is_remembered,
        annotation=observed.steering,
        trials=observed.trials,
        trouble=str(wrong[0]) if wrong else "",
        restarts=counts,
    )


def _is_kept(key: ObjectKey) -> bool:
    return key.kind == "ConfigMap" and key.name.endswith(naming.rollout_name(""))


def is_canary(pod: LiveObject) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return naming.is_canary_pool(labels.get(naming.POOL_LABEL, ""))


def canary_pods(observed: Observed) -> list[LiveObject]:
    return [pod for pod in observed.pods if is_canary(pod)]


def stable_pods(observed: Observed) -> list[LiveObject]:
    """All but a canary's, whose troubles are the rollout's and make nothing unready."""
    return [pod for pod in observed.pods if not is_canary(pod)]


def key_of(item: LiveObject) -> ObjectKey:
    return ObjectKey(item["kind"], item["metadata"]["name"])


def status_of(service: Service, rolling: Rolling, observed: Observed, verdict: Verdict) -> Manifest:
    live = observed.objects
    name = naming.router_name(service.name)
    router_live = live.get(ObjectKey("Deployment", name))
    router = observe("router", service.spec.router.replicas, router_live)
    pools = workloads(service, observed)
    wrong = [*observed.unapplied]
    wrong += troubles(stable_pods(observed), observed.now, observed.lost_nodes)
    wrong += held_troubles(verdict.held)
    wrong += unmade(made(service, observed), observed.status, observed.now)
    trying = troubles(canary_pods(observed), observed.now, observed.lost_nodes)
    serving = [bridged(service, pool, rolling, observed) for pool in pools.values()]
    found = findings(router, serving, wrong, trying, change_of(rolling))
    found.append(finding(rolling))
    found += surroundings(observed.serves, observed.missing)
    found += scaling_finding(service, observed.decided, observed.serves)
    host = f"{name}.{service.namespace}.svc"
    return {
        "observedGeneration": service.generation,
        "endpoint": f"{'https' if service.spec.tls.router else 'http'}://{host}:{naming.HTTP_PORT}",
        "grpcEndpoint": f"{host}:{naming.GRPC_PORT}",
        "engines": engines_text(serving),
        "router": {"replicas": router.exist, "readyReplicas": router.ready},
        "pools": {
            pool_name: pool_status(service, pool_name, workload, observed)
            for pool_name, workload in pools.items()
        },
        **healing_status(observed, verdict),
        "rollout": rollout_status(service, rolling),
        "conditions": render(
            found, observed.status.get("conditions", ()), service.generation, observed.now
        ),
    }


def made(service: Service, observed: Observed) -> list[Made]:
    """The router's Deployment and the stable StatefulSets, with their pods."""
    status, live = observed.status, observed.objects
    pods = Counter(map(pool_of, filter(is_counted, observed.pods)))
    router = live.get(ObjectKey("Deployment", naming.router_name(service.name)))
    found = [(router, pods[""], status.get("router", {}))]
    for name in service.spec.pools:
        engines = live.get(ObjectKey("StatefulSet", naming.pool_name(service.name, name)))
        found.append((engines, pods[name], status.get("pools", {}).get(name, {})))
    return [Made(obj, count, told.get("replicas")) for obj, count, told in found if obj]


def change_of(rolling: Rolling) -> Finding | None:
    """How far a rollout is while engines are not, or not all, of what the spec asks for."""
    state = rolling.state
    waits_for_people = state.is_held or state.reason == "Paused"
    if state.stage is Stage.STABLE and not waits_for_people and state.reason != WAITING:
        return None
    moves = state.stage is not Stage.ROLLED_BACK and not waits_for_people
    return Finding(PROGRESSING, moves, state.reason, state.message)


def workloads(service: Service, observed: Observed) -> dict[str, Workload]:
    """The stable engines by pool."""
    found = {}
    for name, pool in service.spec.pools.items():
        key = ObjectKey("StatefulSet", naming.pool_name(service.name, name))
        seen = observe(name, pool.replicas, observed.objects.get(key))
        found[name] = replace(seen, sleeps=may_sleep(pool))
    return found


def bridged(service: Service, pool: Workload, rolling: Rolling, observed: Observed) -> Workload:
    """With the canary's engines, by which routers serve what no stable engine can."""
    if pool.name not in rolling.pools:
        return pool
    name = naming.pool_name(service.name, naming.canary_pool(pool.name))
    canary = observe(name, 0, observed.objects.get(ObjectKey("StatefulSet", name)))
    return replace(pool, ready=min(pool.desired, pool.ready + canary.ready))


def engines_text(pools: Iterable[Workload]) -> str:
    """Engines that serve of those that are asked for, in all pools."""
    counted = list(pools)
    return f"{sum(pool.ready for pool in counted)}/{sum(pool.desired for pool in counted)}"


def pool_status(service: Service, pool: str, workload: Workload, observed: Observed) -> Manifest:
    match = naming.selector(service.name, naming.ENGINE, pool)
    headroom = observed.headroom.get(pool)
    return {
        "replicas": workload.exist,
        "readyReplicas": workload.ready,
        "restarts": sum(restarts(pod) for pod in observed.pods if pool_of(pod) == pool),
        "selector": naming.selector_text(match),
        **({"headroom": headroom.status()} if headroom else {}),
        **size_status(service, pool, observed),
    }


def size_status(service: Service, pool: str, observed: Observed) -> Manifest:
    """How many engines the pool is to have, and why they were changed last."""
    before = observed.status.get("pools", {}).get(pool, {})
    return pool_scaling(service.spec.pools[pool], observed.decided.changes.get(pool), before)


def healing_status(observed: Observed, verdict: Verdict) -> Manifest:
    """Nothing where nothing was made anew for an hour."""
    listed = told(observed.past, verdict.cures, observed.now)
    return {"healing": {"restarts": listed}} if listed else {}
