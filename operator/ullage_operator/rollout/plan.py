"""Plans which engines a service should have at a given point in its rollout."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.rollout.facts import canary_size, outdated_pools, places_of, rollout_facts
from ullage_operator.rollout.falls import counted
from ullage_operator.rollout.observation import (
    RolloutObservation,
    canary_engines,
    canary_name,
    stable_engines,
)
from ullage_operator.rollout.release import (
    Release,
    changed_pools,
    release_of,
    revision_of,
    with_release,
)
from ullage_operator.rollout.stages import (
    ROLLING_OUT,
    TRYING,
    WAITING,
    RolloutProgress,
    RolloutStage,
    advance,
    weight_of,
)
from ullage_operator.rollout.state import RolloutState, initial, load, missing, unreadable
from ullage_operator.rollout.transport import are_mixed, speak_both

Manifest = dict[str, Any]

LOOK_AGAIN_S = 10.0
"""Seconds between plans while a rollout is in progress."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The engines that a service should have at one point in its rollout."""

    state: RolloutState
    stable: Service
    """The service, with the engine fields that the stable engines use."""
    canary: Service
    """The service, with the engine fields that the canary uses."""
    pools: tuple[str, ...]
    """Pools that currently have a canary."""
    weight: int
    """Percentage of requests that the canary gets."""
    held: tuple[str, ...] = ()
    """Pools whose stable engines stay as they are, even though this operator's template differs."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Number of stable engines that the canary replaces, by pool."""
    has_mixed_engines: bool = False
    """Whether some engines use TLS and others plaintext, so that routers must support both."""
    router_waits: bool = False
    """Whether new router pods must wait for the service's turn in the rollout queue."""
    router_rolls: bool = False
    """Whether routers are being replaced."""
    seeks_room: bool = False
    """Whether pods of the canary, or of engines after its promotion, are still without a node."""
    lacks_room: bool = False
    """Whether an engine is unschedulable."""
    is_known: bool = True
    """Whether the state of the rollout is known. If not, only the sizes of pools may change."""

    @property
    def progress(self) -> RolloutProgress:
        return self.state.progress

    @property
    def look_again_s(self) -> float | None:
        """Return the seconds after which to plan again even if nothing changes.

        The result is None if a new plan is needed only after a change.
        """
        is_quiet = self.progress.stage in (RolloutStage.STABLE, RolloutStage.ROLLED_BACK)
        waits = self.progress.reason == WAITING or self.progress.renewal == ROLLING_OUT
        return None if is_quiet and not waits else LOOK_AGAIN_S


def plan_rollout(
    service: Service, observation: RolloutObservation, settings: Settings
) -> RolloutPlan:
    """Advance the rollout by one step, and return the engines that should run now."""
    target = release_of(service, settings)
    state = None
    if observation.is_state_readable:
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
    """Return progress that keeps engines unchanged if the rollout's state is lost or unreadable.

    Return None if the rollout can proceed.
    """
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
    elif progress.stage is RolloutStage.PROMOTING and progress.canary:
        # The canary serves until the stable engines have taken over.
        pools = tuple(
            name for name in sizes if canary_name(service, name) in observation.stateful_sets
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
    """Return whether some engines use TLS and others plaintext.

    It is not enough to compare the StatefulSets. While stable engines are being replaced, their
    pods may differ even if all StatefulSets agree.
    """
    if are_mixed((service, stable), observation.stateful_sets.values()):
        return True
    is_moving = progress.stage is RolloutStage.PROMOTING or progress.is_held
    return is_moving and speak_both(observation.routers)


def _with_falls(
    service: Service, observation: RolloutObservation, state: RolloutState
) -> RolloutState:
    """Return the state, updated with the crashes that engines report during a canary trial."""
    progress = state.progress
    if progress.stage not in TRYING:
        return state
    falls = counted(
        progress.falls,
        canary_engines(service, observation, progress.canary),
        stable_engines(observation),
    )
    return dataclasses.replace(state, progress=dataclasses.replace(progress, falls=falls))
