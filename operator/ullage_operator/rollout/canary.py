"""A rollout in terms of Kubernetes: observations become facts, its state becomes objects. Pure."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
import yaml

from ullage_operator.api import naming
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import Condition, timestamp, workload_of
from ullage_operator.manifests.config_files import to_yaml
from ullage_operator.manifests.engine_choice import may_be_vllm
from ullage_operator.manifests.manifests import Builder, pool_objects
from ullage_operator.policy.pool_sizes import left_to_others, may_sleep
from ullage_operator.rollout.analysis import (
    Analysis,
    CanarySample,
    Outcome,
    Variant,
    analyze,
    sample_name,
    sum_samples,
)
from ullage_operator.rollout.falls import EngineReport, Falls, counted, total
from ullage_operator.rollout.stages import (
    PAUSED,
    RENEWALS,
    ROLLING_OUT,
    TRYING,
    WAITING,
    RolloutCommand,
    RolloutFacts,
    RolloutProgress,
    RolloutStage,
    advance,
    weight_of,
)
from ullage_operator.rollout.state import (
    Release,
    RolloutState,
    alike_pools,
    changed_pools,
    changes_answers,
    dump,
    has_other_image_only,
    initial,
    load,
    missing,
    release_of,
    revision_of,
    shared_hash,
    unreadable,
    with_release,
)
from ullage_operator.rollout.transport import all_speak_both, are_mixed, speak_both

Manifest = dict[str, Any]

ROLLOUT_HEALTHY = "RolloutHealthy"
LOOK_AGAIN_S = 10.0
"""While a rollout goes on."""
ROOM_WAIT_S = 60.0
"""Time for which a canary waits for additional room before it replaces stable engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutObservation:
    """The existing objects and counts that a service's rollout depends on."""

    now: datetime
    stateful_sets: Mapping[str, Manifest]
    """Live ones of the service, by name."""
    stored_state: str | None
    """The text that was kept; None: nothing was."""
    is_state_readable: bool = True
    """Whether what was kept can be seen at all."""
    may_begin: bool = True
    """Whether other services' rollouts leave room for one that nobody's edit asks for."""
    may_yield: bool = True
    """Whether the service's next pod gets the place that another one of it frees."""
    routers: Manifest | None = None
    """Live Deployment of the routers."""
    has_ending_routers: bool = False
    """Whether routers that were replaced still have requests."""
    is_edited: bool = True
    """Whether somebody has edited the service since its status was last written."""
    annotation: str = ""
    """The service's annotation by which people steer the rollout."""
    samples: Sequence[CanarySample] = ()
    """Routers' counts of both sides."""
    unanswered: Sequence[str] = ()
    """Addresses of routers that did not tell their counts, and why."""
    problem: str = ""
    """Problem of the canary's pods; empty when there is none."""
    is_stuck: bool = False
    """Whether waiting helps nothing against that problem."""
    roomless_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which a canary's pods have found no room that an engine of their pool would leave
    to them, by pool."""
    fetching: Mapping[str, str] = field(default_factory=dict)
    """Why engines that have not begun wait for their model, by pool."""
    engines: Sequence[EngineReport] = ()
    """Restarts and worker losses of the engines of both sides."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The engines of a service at one moment of its rollout."""

    state: RolloutState
    stable: Service
    """The service with the stable engines."""
    canary: Service
    """The service with the canary's."""
    pools: tuple[str, ...]
    """Pools that have a canary now."""
    weight: int
    """Requests of a hundred for the canary."""
    held: tuple[str, ...] = ()
    """Pools whose stable engines stay as they are, though this operator makes other pods."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Stable engines whose place the canary has, by pool."""
    has_mixed_engines: bool = False
    """Whether some engines speak TLS and others plaintext, so that routers must speak both."""
    router_waits: bool = False
    """Whether the operator's new routers wait until fewer services are being rolled out."""
    router_rolls: bool = False
    """Whether routers are being replaced."""
    seeks_room: bool = False
    """Whether its canary, or its engines after it, have no node yet."""
    lacks_room: bool = False
    """Whether one of its engines finds no room."""
    is_known: bool = True
    """Whether the decided state is known; otherwise only the number of engines may change."""

    @property
    def progress(self) -> RolloutProgress:
        return self.state.progress

    @property
    def look_again_s(self) -> float | None:
        """Seconds after which the plan must be made again though nothing was seen to change; None:
        never."""
        is_quiet = self.progress.stage in (RolloutStage.STABLE, RolloutStage.ROLLED_BACK)
        waits = self.progress.reason == WAITING or self.progress.renewal == ROLLING_OUT
        return None if is_quiet and not waits else LOOK_AGAIN_S


def plan_rollout(
    service: Service, observation: RolloutObservation, settings: Settings
) -> RolloutPlan:
    """Advance the rollout by one step, and return the engines that serve."""
    target = release_of(service, settings)
    state = load(observation.stored_state, target, observation.stateful_sets.values())
    if state is None and (held := _held_progress(service, observation, target)):
        is_mixed = _has_mixed_engines(service, service, observation, held)
        return RolloutPlan(
            RolloutState(held, target),
            service,
            service,
            (),
            0,
            has_mixed_engines=is_mixed,
            is_known=False,
        )

    state = state or initial(target, observation.now)
    state = _with_falls(service, observation, state)
    outdated = outdated_pools(service, observation, state, settings)
    facts = rollout_facts(service, observation, state, target, settings, outdated)
    after = advance(state.progress, facts, service.spec.rollout)
    if after.seen != observation.annotation:
        after = dataclasses.replace(after, seen=observation.annotation)

    changed = changed_pools(target, state.release)
    planned = _plan_of(service, state.then(after, target), changed, observation)
    is_due = after.stage is RolloutStage.PROMOTING or after.renewal == ROLLING_OUT
    return planned if is_due else dataclasses.replace(planned, held=outdated)


def _held_progress(
    service: Service, observation: RolloutObservation, target: Release
) -> RolloutProgress | None:
    """The progress that holds everything where a lost state matters; None where it does not."""
    revision = revision_of(target)
    if not observation.is_state_readable:
        return unreadable(revision, observation.now)
    names = [naming.pool_name(service.name, pool) for pool in service.spec.pools]
    live = {
        name: observation.stateful_sets[name] for name in names if name in observation.stateful_sets
    }
    return missing(service.name, live, revision, observation.annotation, observation.now)


def _plan_of(
    service: Service, state: RolloutState, changed: Sequence[str], observation: RolloutObservation
) -> RolloutPlan:
    progress = state.progress
    stable = with_release(service, state.release) if changed else service
    sizes = {name: pool.replicas for name, pool in service.spec.pools.items()}

    if progress.stage in TRYING:
        pools = tuple(name for name in changed if sizes[name])
    elif (
        progress.stage is RolloutStage.PROMOTING and progress.canary
    ):  # until stable engines took over
        pools = tuple(
            name for name in sizes if _canary_name(service, name) in observation.stateful_sets
        )
    else:
        pools = ()

    canary = service if progress.stage in TRYING else stable
    places = places_of(service, progress, pools)
    tried = sum(canary_size(service, name, places) for name in pools)
    share = tried / (tried + sum(sizes[n] - places.get(n, 0) for n in pools)) if tried else 0.0
    weight = weight_of(progress, service.spec.rollout.weight_steps, share) if pools else 0

    return RolloutPlan(
        state,
        stable,
        canary,
        pools,
        weight,
        places=places,
        has_mixed_engines=_has_mixed_engines(service, stable, observation, progress),
    )


def _has_mixed_engines(
    service: Service, stable: Service, observation: RolloutObservation, progress: RolloutProgress
) -> bool:
    """Return whether some engines speak TLS and others plaintext.

    During a replacement of stable engines, all objects may be of one kind while some pods are still
    of the other.
    """
    if are_mixed((service, stable), observation.stateful_sets.values()):
        return True
    is_moving = progress.stage is RolloutStage.PROMOTING or progress.is_held
    return is_moving and speak_both(observation.routers)


def places_of(service: Service, progress: RolloutProgress, pools: Iterable[str]) -> dict[str, int]:
    """Return, by pool, the number of stable engines that a canary replaces."""
    rollout = service.spec.rollout
    sizes = {name: service.spec.pools[name].replicas for name in pools if name in progress.replaces}
    return {
        name: min(rollout.canary_replicas, rollout.most_unavailable(size))
        for name, size in sizes.items()
    }


def canary_size(service: Service, pool: str, places: Mapping[str, int]) -> int:
    """Return the number of a canary's engines in a pool."""
    wanted = min(service.spec.rollout.canary_replicas, service.spec.pools[pool].replicas)
    return places.get(pool, wanted)


def crowded_pools(
    service: Service, observation: RolloutObservation, tried: Iterable[str]
) -> tuple[str, ...]:
    """Return the pools whose canary is to replace stable engines."""
    surge = service.spec.rollout.surge
    if surge == "always":
        return ()
    roomless = observation.roomless_s if observation.may_yield else {}
    return tuple(
        name
        for name in tried
        # The operator must not shrink a pool whose size another controller sets.
        if not left_to_others(service.spec.pools[name], {})
        and (surge == "never" or roomless.get(name, 0.0) >= ROOM_WAIT_S)
    )


def rollout_facts(
    service: Service,
    observation: RolloutObservation,
    state: RolloutState,
    target: Release,
    settings: Settings,
    outdated: Sequence[str],
) -> RolloutFacts:
    progress = state.progress
    release = state.release
    changed = changed_pools(target, release)
    sizes = {name: pool.replicas for name, pool in service.spec.pools.items()}
    tried = [name for name in changed if sizes[name]]
    revision = state.revision(target)
    analyses = [analysis_of(service, observation, progress, is_last) for is_last in (False, True)]

    is_serving = any(_ready(observation, naming.pool_name(service.name, name)) for name in sizes)
    with_canary = [n for n in sizes if _canary_name(service, n) in observation.stateful_sets]
    places = places_of(service, progress, with_canary)

    return RolloutFacts(
        now=observation.now,
        target=revision,
        is_serving=is_serving,
        # Where nothing serves there is nothing to protect, and the image may be what helps.
        may_begin=observation.may_begin
        or not is_serving
        or not _is_of_many(service, observation, target, release),
        is_bridged=bool(progress.canary)
        and any(_ready(observation, _canary_name(service, name)) for name in sizes),
        is_reachable=not are_mixed(
            (service, with_release(service, release)), observation.stateful_sets.values()
        )
        or (all_speak_both(observation.routers) and not observation.has_ending_routers),
        fetching=next((why for n, why in observation.fetching.items() if n in changed), ""),
        linger=timedelta(seconds=2 * settings.dns_lag_s),
        can_canary=bool(tried) and release["model"]["name"] == target["model"]["name"],
        needs_canary=service.spec.rollout.strategy == "canary" or changes_answers(target, release),
        is_canary_ready=all(
            _is_canary_ready(observation, _canary_name(service, n), revision) for n in tried
        ),
        restarts=total(progress.falls, is_canary=True),
        problem=observation.problem,
        is_stuck=observation.is_stuck,
        like_stable=alike_pools(target, release),
        crowded=crowded_pools(service, observation, tried),
        is_outdated=bool(outdated),
        may_renew=observation.may_begin or not is_serving,
        may_yield=observation.may_yield,
        is_settled=not outdated
        and all(
            _is_settled(
                observation,
                naming.pool_name(service.name, name),
                size - places.get(name, 0),
                progress.stable,
            )
            for name, size in sizes.items()
        ),
        analysis=analyses[0],
        final_analysis=analyses[1],
        command=command_of(observation.annotation, progress, revision),
    )


def _is_of_many(
    service: Service, observation: RolloutObservation, target: Release, release: Release
) -> bool:
    """Return whether a change reaches many services: another default image, or an edited base."""
    is_of_a_base = bool(service.spec.base_refs) and not observation.is_edited
    is_of_the_operator = not service.spec.image and has_other_image_only(target, release)
    return is_of_a_base or is_of_the_operator


def outdated_pools(
    service: Service, observation: RolloutObservation, state: RolloutState, settings: Settings
) -> tuple[str, ...]:
    """Return the pools whose stable engines this operator makes of another pod template than the
    one that was applied, though nobody's edit asks for it.

    Routers read an edit of what both sides share at once, so engines must not wait with it. Any
    other edit of a service that waits for its turn does not give it one.
    """
    edit_hash = shared_hash(service)
    is_changed = bool(changed_pools(release_of(service, settings), state.release))
    stable = with_release(service, state.release) if is_changed else service
    outdated = []
    for name, pool in stable.spec.pools.items():
        live = observation.stateful_sets.get(naming.pool_name(service.name, name), {})
        annotations = live.get("metadata", {}).get("annotations") or {}
        # What an older operator applied without these hashes cannot be told from an edit.
        if annotations.get(naming.SHARED_HASH) != edit_hash:
            continue
        applied_hash = annotations.get(naming.TEMPLATE_HASH)
        if applied_hash != _pool_template_hash(stable, name, pool, settings):
            outdated.append(name)
    return tuple(outdated)


def _pool_template_hash(service: Service, name: str, pool: PoolSpec, settings: Settings) -> str:
    objects = pool_objects(service, name, pool, settings)
    return next(template_hash(item) for item in objects if item["kind"] == "StatefulSet")


def template_hash(workload: Manifest) -> str:
    """Return the hash of a workload's pod template, as the operator builds it."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def analysis_of(
    service: Service,
    observation: RolloutObservation,
    progress: RolloutProgress,
    is_last: bool,
) -> Analysis:
    """Return the analysis of the routers' counts in the present step."""
    canary, stable, routers = sum_samples(
        observation.samples, sample_name(progress.canary, progress.step)
    )
    engines = canary_engines(service, observation, progress.canary)
    has_silent = any(not engine.is_fresh for engine in engines)
    canary = _with_restarts(canary, progress.falls, is_canary=True, engines=engines)
    stable = _with_restarts(
        stable, progress.falls, is_canary=False, engines=stable_engines(observation)
    )
    if not routers and not canary.restarts:
        outcome = Outcome.FAIL if is_last else Outcome.WAIT
        message = unmeasured(observation.unanswered)
        return Analysis(outcome, "NotMeasured", message, "routers to take up its weight")

    analysis = analyze(canary, stable, service.spec.rollout, is_last)
    if analysis.outcome is Outcome.PASS and has_silent and not is_last:
        waits_for = "the canary's engines to tell the operator how often they fell"
        waits_for += unheard([engine.trouble for engine in engines if engine.trouble])
        return Analysis(Outcome.WAIT, "NotMeasured", analysis.message, waits_for)
    return analysis


_IN_A_MESH = "a mesh's sidecars must leave it alone, which the chart's value mesh sees to"


def unmeasured(unanswered: Sequence[str]) -> str:
    """Return the message that no router's counts are known, with the cause and the remedy."""
    message = "no router has reported what it counted"
    if not unanswered:
        return message
    return (
        f"{message}, for the operator has no answer of {unanswered[0]}; let it reach port "
        f"{naming.METRICS_PORT} of routers: {_IN_A_MESH} (docs/mesh.md)"
    )


def unheard(troubles: Sequence[str]) -> str:
    """Return the message why the operator hears no engine, with the remedy; empty without
    troubles."""
    if not troubles:
        return ""
    return (
        f", which has no answer of {troubles[0]}; let it reach port {naming.PROBE_PORT} of "
        f"engines: {_IN_A_MESH} (docs/mesh.md)"
    )


def _with_restarts(
    counts: Variant, falls: Falls, *, is_canary: bool, engines: Sequence[EngineReport]
) -> Variant:
    """Return a side's counts with the restarts that its engines report.

    If an engine is silent, as in a mesh that keeps the operator out, the routers' higher count is
    used.
    """
    own = total(falls, is_canary)
    are_fresh = bool(engines) and all(engine.is_fresh for engine in engines)
    return dataclasses.replace(counts, restarts=own if are_fresh else max(own, counts.restarts))


def command_of(annotation: str, progress: RolloutProgress, revision: str) -> RolloutCommand:
    """What an annotation `word` or `word:revision` says now.

    A word by itself is acted on once, when it is first seen; one with a revision as often as that
    revision is tried. `pause` holds as long as it is there.
    """
    word, _, about = annotation.partition(":")
    if about and about != revision:
        return RolloutCommand.NONE
    if word == RolloutCommand.PAUSE:
        return RolloutCommand.PAUSE
    is_new = bool(about) or annotation != progress.seen
    return (
        RolloutCommand(word)
        if is_new and word in (RolloutCommand.PROMOTE, RolloutCommand.ABORT)
        else RolloutCommand.NONE
    )


def rollout_objects(service: Service, plan: RolloutPlan, settings: Settings) -> list[Manifest]:
    """Return the ConfigMap with the state, which comes first, and the canary's engines."""
    name = naming.rollout_name(service.name)
    text = dump(plan.state)
    kept = Builder(service, naming.ENGINE).config_map(name, naming.ROLLOUT_STATE, text)
    objects = [kept]
    for pool_name in plan.pools:
        pool = plan.canary.spec.pools[pool_name]
        size = canary_size(service, pool_name, plan.places)
        few = msgspec.structs.replace(pool, replicas=size)
        canary_objects = pool_objects(plan.canary, naming.canary_pool(pool_name), few, settings)
        objects += with_revision(plan.canary, canary_objects, plan.progress.canary)
    return objects


def with_revision(service: Service, objects: Iterable[Manifest], revision: str) -> list[Manifest]:
    """Return pool objects whose StatefulSets carry the hashes of revision, spec and template."""
    hashes = {naming.REVISION: revision, naming.SHARED_HASH: shared_hash(service)}
    return [
        _with_hashes(item, hashes) if item["kind"] == "StatefulSet" else item for item in objects
    ]


def _with_hashes(item: Manifest, hashes: Mapping[str, str]) -> Manifest:
    own = {**hashes, naming.TEMPLATE_HASH: template_hash(item)}
    annotations = item["metadata"].get("annotations", {}) | own
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}}


def router_file(plan: RolloutPlan) -> str:
    """Return the file by which routers know the canary's engines, and the adapters of sleeping
    engines (`ullage_router.rollout`)."""
    progress = plan.progress
    name = plan.stable.name
    spec = plan.stable.spec
    document: Manifest = {"revision": progress.stable} | _stop_said(spec.stop)
    if may_be_vllm(spec) and any(map(may_sleep, spec.pools.values())):
        document["adapters"] = [adapter.name for adapter in spec.adapters]
    if plan.pools:
        pools = [
            {
                "name": pool,
                "targets": [
                    f"{naming.pool_name(name, naming.canary_pool(pool))}:{naming.GRPC_PORT}"
                ],
            }
            for pool in plan.pools
        ]
        document["canary"] = {
            "revision": progress.canary,
            "weight": plan.weight,
            "step": progress.step,
            "pools": pools,
        }
    return to_yaml(document)


def _stop_said(is_stopped: bool) -> Manifest:
    # Routers of an older image do not have this field, so it is set only where it is needed.
    return {"stopped": True} if is_stopped else {}


def with_stop_said(text: str, is_stopped: bool) -> str:
    """Return a routers' file in which only the stop of the service changes."""
    document = yaml.safe_load(text)
    kept = {name: value for name, value in document.items() if name != "stopped"}
    changed = kept | _stop_said(is_stopped)
    return text if changed == document else to_yaml(changed)


def rollout_condition(plan: RolloutPlan) -> Condition:
    progress = plan.progress
    is_well = progress.stage is not RolloutStage.ROLLED_BACK and not progress.is_held
    return Condition(ROLLOUT_HEALTHY, is_well, progress.reason, progress.message)


def rollout_status(service: Service, plan: RolloutPlan) -> Manifest:
    """status.rollout."""
    progress = plan.progress
    is_paused = progress.is_held or progress.reason == PAUSED
    is_renewing = progress.renewal == ROLLING_OUT
    stage = RolloutStage.PROMOTING.value if is_renewing else progress.stage.value
    stage = "Paused" if is_paused and not is_renewing else stage
    step = stage
    if progress.stage is RolloutStage.CANARY:
        count = len(service.spec.rollout.weight_steps)
        step = f"{stage} {plan.weight}% ({progress.step + 1}/{count})"
    return {
        "stage": stage,
        "step": step,
        "weight": plan.weight,
        "stableRevision": progress.stable,
        **({"since": timestamp(progress.since)} if plan.is_known else {}),
        # A renewal's own: the message that is kept is that of the rollback before it.
        "message": RENEWALS[progress.renewal] if is_renewing else progress.message,
        **({"revision": progress.canary} if progress.canary else {}),
        **({"failedRevision": progress.failed} if progress.failed else {}),
    }


def _canary_name(service: Service, pool: str) -> str:
    return naming.pool_name(service.name, naming.canary_pool(pool))


def _ready(observation: RolloutObservation, name: str) -> bool:
    return workload_of(name, 0, observation.stateful_sets.get(name)).ready > 0


def _is_canary_ready(observation: RolloutObservation, name: str, revision: str) -> bool:
    """Whether a canary's engines are ready, and none of another revision is left."""
    return _is_made_of(observation, name, revision) and _ready(observation, name)


def _is_settled(observation: RolloutObservation, name: str, size: int, revision: str) -> bool:
    workload = workload_of(name, size, observation.stateful_sets.get(name))
    is_full = workload.settled and workload.ready >= size
    return is_full and _is_made_of(observation, name, revision)


def _is_made_of(observation: RolloutObservation, name: str, revision: str) -> bool:
    """Whether all pods of a StatefulSet, ready or not, are of a revision."""
    if (live := observation.stateful_sets.get(name)) is None:
        return False
    made_of = (live["metadata"].get("annotations") or {}).get(naming.REVISION)
    return made_of == revision and workload_of(name, live["spec"].get("replicas", 1), live).settled


def _with_falls(
    service: Service, observation: RolloutObservation, state: RolloutState
) -> RolloutState:
    """Return the state with the falls that engines report while a revision is tried."""
    progress = state.progress
    if progress.stage not in TRYING:
        return state
    falls = counted(
        progress.falls,
        canary_engines(service, observation, progress.canary),
        stable_engines(observation),
    )
    return dataclasses.replace(state, progress=dataclasses.replace(progress, falls=falls))


def canary_engines(
    service: Service, observation: RolloutObservation, revision: str
) -> list[EngineReport]:
    """Return a canary's engines that have the revision."""
    engines = []
    for engine in observation.engines:
        name = naming.pool_name(service.name, engine.pool)
        if not naming.is_canary_pool(engine.pool) or not _is_made_of(observation, name, revision):
            continue
        # Pods and StatefulSets have separate watches: a pod of the canary before may still be in
        # the cache.
        made_of = observation.stateful_sets[name].get("status", {}).get("updateRevision", "")
        if not made_of or engine.pod_revision in ("", made_of):
            engines.append(engine)
    return engines


def stable_engines(observation: RolloutObservation) -> list[EngineReport]:
    """Return the engines that are not the canary's."""
    return [each for each in observation.engines if not naming.is_canary_pool(each.pool)]
