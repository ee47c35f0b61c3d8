"""Derives the facts that decide how a rollout advances from observations of the cluster."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.manifests import pool_objects
from ullage_operator.policy.pool_sizes import left_to_others
from ullage_operator.rollout.analysis import (
    Analysis,
    Outcome,
    Variant,
    analyze,
    sample_name,
    sum_samples,
)
from ullage_operator.rollout.falls import EngineReport, Falls, total
from ullage_operator.rollout.observation import (
    RolloutObservation,
    canary_engines,
    canary_name,
    has_ready_engine,
    is_canary_ready,
    is_settled,
    stable_engines,
)
from ullage_operator.rollout.release import (
    Release,
    alike_pools,
    changed_pools,
    changes_answers,
    has_other_image_only,
    release_of,
    shared_hash,
    with_release,
)
from ullage_operator.rollout.stages import RolloutCommand, RolloutFacts, RolloutProgress
from ullage_operator.rollout.state import RolloutState
from ullage_operator.rollout.transport import all_speak_both, are_mixed

Manifest = dict[str, Any]

ROOM_WAIT_S = 60.0
"""Seconds for which a canary waits for free nodes before it takes the place of stable engines."""
_IN_A_MESH = "the sidecars of a mesh must not intercept it, so set the chart's value mesh"


def places_of(service: Service, progress: RolloutProgress, pools: Iterable[str]) -> dict[str, int]:
    """Return the number of stable engines that a canary replaces, by pool."""
    rollout = service.spec.rollout
    sizes = {name: service.spec.pools[name].replicas for name in pools if name in progress.replaces}
    return {
        name: min(rollout.canary_replicas, rollout.most_unavailable(size))
        for name, size in sizes.items()
    }


def canary_size(service: Service, pool: str, places: Mapping[str, int]) -> int:
    """Return the number of engines that a canary has in a pool."""
    wanted = min(service.spec.rollout.canary_replicas, service.spec.pools[pool].replicas)
    return places.get(pool, wanted)


def crowded_pools(
    service: Service, observation: RolloutObservation, tried: Iterable[str]
) -> tuple[str, ...]:
    """Return the pools whose canary replaces stable engines instead of running next to them.

    This happens for lack of free nodes, or because `surge` is `never`.
    """
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

    is_serving = any(
        has_ready_engine(observation, naming.pool_name(service.name, name)) for name in sizes
    )
    with_canary = [n for n in sizes if canary_name(service, n) in observation.stateful_sets]
    places = places_of(service, progress, with_canary)

    return RolloutFacts(
        now=observation.now,
        target=revision,
        is_serving=is_serving,
        # If nothing serves, there is nothing to protect, and the new image may be the remedy.
        may_begin=observation.may_begin
        or not is_serving
        or not _is_of_many(service, observation, target, release),
        is_bridged=bool(progress.canary)
        and any(has_ready_engine(observation, canary_name(service, name)) for name in sizes),
        is_reachable=not are_mixed(
            (service, with_release(service, release)), observation.stateful_sets.values()
        )
        or (all_speak_both(observation.routers) and not observation.has_ending_routers),
        fetching=next((why for n, why in observation.fetching.items() if n in changed), ""),
        linger=timedelta(seconds=2 * settings.dns_lag_s),
        can_canary=bool(tried) and release["model"]["name"] == target["model"]["name"],
        needs_canary=service.spec.rollout.strategy == "canary" or changes_answers(target, release),
        is_canary_ready=all(
            is_canary_ready(observation, canary_name(service, n), revision) for n in tried
        ),
        restarts=total(progress.falls, is_canary=True),
        problem=observation.problem,
        is_stuck=observation.is_stuck,
        is_refused=observation.is_refused,
        like_stable=alike_pools(target, release),
        crowded=crowded_pools(service, observation, tried),
        is_outdated=bool(outdated),
        may_renew=observation.may_begin or not is_serving,
        may_yield=observation.may_yield,
        is_settled=not outdated
        and all(
            is_settled(
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
    """Return whether a change rolls out many services at once.

    Such a change is a new default image or an edited base.
    """
    is_of_a_base = bool(service.spec.base_refs) and not observation.is_edited
    is_of_the_operator = not service.spec.image and has_other_image_only(target, release)
    return is_of_a_base or is_of_the_operator


def outdated_pools(
    service: Service, observation: RolloutObservation, state: RolloutState, settings: Settings
) -> tuple[str, ...]:
    """Return the pools whose pod template changed only because the operator was upgraded.

    A pool is excluded if an edit changed a setting that its stable engines and its canary share.
    Routers apply such an edit immediately, so the engines must not wait in the rollout queue
    either. An edit of other settings does not let a waiting service skip the queue.
    """
    edit_hash = shared_hash(service)
    is_changed = bool(changed_pools(release_of(service, settings), state.release))
    stable = with_release(service, state.release) if is_changed else service
    outdated = []
    for name, pool in stable.spec.pools.items():
        live = observation.stateful_sets.get(naming.pool_name(service.name, name), {})
        annotations = live.get("metadata", {}).get("annotations") or {}
        # Without these hashes, the template of an older operator looks the same as an edit.
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
    """Analyse the requests that routers have counted during the current rollout step."""
    counts = sum_samples(observation.samples, sample_name(progress.canary, progress.step))
    engines = canary_engines(service, observation, progress.canary)
    has_silent = any(not engine.is_fresh for engine in engines)
    canary = _with_restarts(counts.canary, progress.falls, is_canary=True, engines=engines)
    stable = _with_restarts(
        counts.stable, progress.falls, is_canary=False, engines=stable_engines(observation)
    )
    if not counts.routers and not canary.restarts:
        outcome = Outcome.FAIL if is_last else Outcome.WAIT
        message = unmeasured(observation.unanswered)
        return Analysis(outcome, "NotMeasured", message, "routers to take up its weight")

    analysis = analyze(canary, stable, service.spec.rollout, is_last, counts.answers)
    if analysis.outcome is Outcome.PASS and has_silent and not is_last:
        waits_for = "the canary's engines to report their restarts to the operator"
        waits_for += unheard([engine.trouble for engine in engines if engine.trouble])
        return Analysis(Outcome.WAIT, "NotMeasured", analysis.message, waits_for)
    return analysis


def unmeasured(unanswered: Sequence[str]) -> str:
    """Return a message that says why no router has reported request counts, and how to fix this."""
    message = "no router has reported what it counted"
    if not unanswered:
        return message
    return (
        f"{message}, because the operator gets no answer from {unanswered[0]}; let it reach port "
        f"{naming.METRICS_PORT} of routers: {_IN_A_MESH} (docs/guide/mesh.md)"
    )


def unheard(troubles: Sequence[str]) -> str:
    """Return a hint on why engines do not report to the operator and how to fix this.

    It is appended to the message about what the analysis waits for. It is empty without errors.
    """
    if not troubles:
        return ""
    return (
        f", which gets no answer from {troubles[0]}; let it reach port {naming.PROBE_PORT} of "
        f"engines: {_IN_A_MESH} (docs/guide/mesh.md)"
    )


def _with_restarts(
    counts: Variant, falls: Falls, *, is_canary: bool, engines: Sequence[EngineReport]
) -> Variant:
    """Return the request counts of the canary or the stable engines, with their reported restarts.

    If an engine does not report, for example because a mesh blocks the operator, the routers'
    restart count is used if it is higher.
    """
    own = total(falls, is_canary)
    are_fresh = bool(engines) and all(engine.is_fresh for engine in engines)
    return dataclasses.replace(counts, restarts=own if are_fresh else max(own, counts.restarts))


def command_of(annotation: str, progress: RolloutProgress, revision: str) -> RolloutCommand:
    """Return the rollout command in an annotation of the form `word` or `word:revision`.

    `promote` and `abort` without a revision are executed once, when the operator first sees them.
    With a revision, they are executed whenever that revision is being tried. `pause` applies for as
    long as the annotation exists.
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
