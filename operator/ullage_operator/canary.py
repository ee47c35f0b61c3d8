"""A rollout in terms of Kubernetes: what is seen becomes facts, the state becomes objects. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec

from ullage_operator import naming
from ullage_operator.conditions import Finding, observe, timestamp
from ullage_operator.configs import to_yaml
from ullage_operator.judgement import Limits, Outcome, Verdict, judge
from ullage_operator.manifests import Builder, pool_objects
from ullage_operator.recall import Memory, begun, kept_text, lost, recalled, unseen
from ullage_operator.release import (
    Release,
    changed_pools,
    release_of,
    revision_of,
    with_release,
)
from ullage_operator.rollout import (
    TRYING,
    WAITING,
    Command,
    Facts,
    Policy,
    Stage,
    State,
    advance,
    weight_of,
)
from ullage_operator.settings import Settings
from ullage_operator.spec import Service
from ullage_operator.trials import Trial, name_of, together

Manifest = dict[str, Any]

ROLLOUT_HEALTHY = "RolloutHealthy"
LOOK_AGAIN_S = 10.0
"""While a rollout goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What exists, as far as a rollout is concerned."""

    now: datetime
    stateful_sets: Mapping[str, Manifest]
    """Live ones of the service, by name."""
    remembered: str | None
    """The text that was kept; None: nothing was."""
    is_remembered: bool = True
    """Whether what was kept can be seen at all."""
    annotation: str = ""
    """Of the service: what somebody wants."""
    trials: Sequence[Trial] = ()
    """What routers counted."""
    trouble: str = ""
    """What is wrong with the canary's pods."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Of containers in the canary's pods, by its pool."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """A rollout at one moment."""

    memory: Memory
    stable: Service
    """The service with the stable engines."""
    canary: Service
    """The service with the canary's."""
    pools: tuple[str, ...]
    """Pools that have a canary now."""
    weight: int
    """Requests of a hundred for the canary."""
    is_known: bool = True
    """What was decided is known; otherwise only the number of engines may change."""

    @property
    def state(self) -> State:
        return self.memory.state

    @property
    def is_trying(self) -> bool:
        return self.state.stage in TRYING

    @property
    def look_again_s(self) -> float | None:
        """When something may have to be done though nothing was seen to change."""
        is_quiet = self.state.stage in (Stage.STABLE, Stage.ROLLED_BACK)
        return None if is_quiet and self.state.reason != WAITING else LOOK_AGAIN_S


def roll(service: Service, seen: Seen, settings: Settings) -> Rolling:
    """Takes the rollout one step on."""
    wanted = release_of(service, settings)
    memory = recalled(seen.remembered, wanted)
    if memory is None and (held := _held(service, seen, wanted)):
        return Rolling(Memory(held, wanted), service, service, (), 0, is_known=False)
    memory = memory or begun(wanted, seen.now)
    facts = facts_of(service, seen, memory, wanted)
    after = advance(memory.state, facts, policy_of(service, settings))
    if after.seen != seen.annotation:
        after = dataclasses.replace(after, seen=seen.annotation)
    changed = changed_pools(wanted, memory.release)
    return _rolling(service, memory.then(after, wanted), changed, seen)


def _held(service: Service, seen: Seen, wanted: Release) -> State | None:
    """Nothing is remembered: a state that holds all where that is a loss."""
    revision = revision_of(wanted)
    if not seen.is_remembered:
        return unseen(revision, seen.now)
    names = [naming.pool_name(service.name, pool) for pool in service.spec.pools]
    live = {name: seen.stateful_sets[name] for name in names if name in seen.stateful_sets}
    return lost(service.name, live, revision, seen.annotation, seen.now)


def _rolling(service: Service, memory: Memory, changed: Sequence[str], seen: Seen) -> Rolling:
    state = memory.state
    stable = with_release(service, memory.release) if changed else service
    sizes = {name: pool.replicas for name, pool in service.spec.pools.items()}
    if state.stage in TRYING:
        pools = tuple(name for name in changed if sizes[name])
    elif state.stage is Stage.PROMOTING and state.canary:  # until stable engines took over
        pools = tuple(name for name in sizes if _canary_name(service, name) in seen.stateful_sets)
    else:
        pools = ()
    canary = service if state.stage in TRYING else stable
    most = service.spec.rollout.canary_replicas
    tried = sum(min(most, sizes[name]) for name in pools)
    share = tried / (tried + sum(sizes[name] for name in pools)) if tried else 0.0
    weight = weight_of(state, _steps(service), share) if pools else 0
    return Rolling(memory, stable, canary, pools, weight)


def facts_of(service: Service, seen: Seen, memory: Memory, wanted: Release) -> Facts:
    state, release = memory.state, memory.release
    changed = changed_pools(wanted, release)
    sizes = {name: pool.replicas for name, pool in service.spec.pools.items()}
    tried = [name for name in changed if sizes[name]]
    revision = memory.revision(wanted)
    verdicts = [verdict_of(service, seen, state, is_last) for is_last in (False, True)]
    return Facts(
        now=seen.now,
        wanted=revision,
        is_serving=any(_ready(seen, naming.pool_name(service.name, name)) for name in sizes),
        is_bridged=bool(state.canary)
        and any(_ready(seen, _canary_name(service, name)) for name in sizes),
        can_canary=bool(tried) and release["model"]["name"] == wanted["model"]["name"],
        is_canary_ready=all(_tried(seen, _canary_name(service, n), revision) for n in tried),
        restarts=restarts_of(service, seen, revision),
        trouble=seen.trouble,
        is_settled=all(
            _settled(seen, naming.pool_name(service.name, name), size, state.stable)
            for name, size in sizes.items()
        ),
        verdict=verdicts[0],
        last_verdict=verdicts[1],
        command=command_of(seen.annotation, state, revision),
    )


def verdict_of(
    service: Service,
    seen: Seen,
    state: State,
    is_last: bool,
) -> Verdict:
    """What the routers' counts of the present step say."""
    canary, stable, routers = together(seen.trials, name_of(state.canary, state.step))
    restarts = restarts_of(service, seen, state.canary)
    canary = dataclasses.replace(canary, restarts=max(canary.restarts, restarts))
    if not routers and not restarts:
        outcome = Outcome.FAIL if is_last else Outcome.WAIT
        return Verdict(outcome, "NotMeasured", "no router has told what it counted")
    thresholds = service.spec.rollout.thresholds
    limits = Limits(
        service.spec.rollout.min_requests,
        thresholds.error_rate,
        thresholds.ttft_ratio,
        thresholds.e2e_ratio,
        thresholds.restarts,
    )
    return judge(canary, stable, limits, is_last)


def command_of(annotation: str, state: State, revision: str) -> Command:
    """What an annotation `word` or `word:revision` says now.

    A word by itself is acted on once, when it is first seen; one with a revision as often as that
    revision is tried. `pause` holds as long as it is there.
    """
    word, _, about = annotation.partition(":")
    if about and about != revision:
        return Command.NONE
    if word == Command.PAUSE:
        return Command.PAUSE
    is_new = bool(about) or annotation != state.seen
    return Command(word) if is_new and word in (Command.PROMOTE, Command.ABORT) else Command.NONE


def policy_of(service: Service, settings: Settings) -> Policy:
    spec = service.spec.rollout
    return Policy(
        is_canary=spec.strategy == "canary",
        steps=_steps(service),
        step=timedelta(seconds=spec.step_duration),
        max_wait=timedelta(seconds=spec.max_wait),
        start_deadline=timedelta(seconds=spec.start_deadline),
        linger=timedelta(seconds=2 * settings.dns_lag_s),
        restarts=spec.thresholds.restarts,
        auto_rollback=spec.auto_rollback,
        is_paused=spec.paused,
    )


def _steps(service: Service) -> tuple[int, ...]:
    return tuple(sorted(service.spec.rollout.weight_steps))


def rollout_objects(service: Service, rolling: Rolling, settings: Settings) -> list[Manifest]:
    """What is remembered, which comes first, and the canary's engines."""
    name = naming.rollout_name(service.name)
    text = kept_text(rolling.memory)
    kept = Builder(service, naming.ENGINE).config_map(name, naming.ROLLOUT_STATE, text)
    objects = [kept]
    most = service.spec.rollout.canary_replicas
    for pool_name in rolling.pools:
        pool = rolling.canary.spec.pools[pool_name]
        few = msgspec.structs.replace(pool, replicas=min(most, pool.replicas))
        made = pool_objects(rolling.canary, naming.canary_pool(pool_name), few, settings)
        objects += marked(made, rolling.state.canary)
    return objects


def marked(objects: Iterable[Manifest], revision: str) -> list[Manifest]:
    """Pool objects whose StatefulSets say of which revision they are."""
    return [_marked(item, revision) if item["kind"] == "StatefulSet" else item for item in objects]


def _marked(item: Manifest, revision: str) -> Manifest:
    annotations = item["metadata"].get("annotations", {}) | {naming.REVISION: revision}
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}}


def router_file(rolling: Rolling) -> str:
    """What routers read to know which engines are the canary's (`ullage_router.canary`)."""
    state, name = rolling.state, rolling.stable.name
    told: Manifest = {"revision": state.stable}
    if rolling.pools:
        pools = [
            {
                "name": pool,
                "targets": [
                    f"{naming.pool_name(name, naming.canary_pool(pool))}:{naming.GRPC_PORT}"
                ],
            }
            for pool in rolling.pools
        ]
        told["canary"] = {
            "revision": state.canary,
            "weight": rolling.weight,
            "step": state.step,
            "pools": pools,
        }
    return to_yaml(told)


def finding(rolling: Rolling) -> Finding:
    state = rolling.state
    is_well = state.stage is not Stage.ROLLED_BACK and not state.is_held
    return Finding(ROLLOUT_HEALTHY, is_well, state.reason, state.message)


def rollout_status(service: Service, rolling: Rolling) -> Manifest:
    """status.rollout."""
    state = rolling.state
    is_paused = state.is_held or state.reason == "Paused"
    stage = "Paused" if is_paused else state.stage.value
    step = stage
    if state.stage is Stage.CANARY:
        count = len(service.spec.rollout.weight_steps)
        step = f"{stage} {rolling.weight}% ({state.step + 1}/{count})"
    return {
        "stage": stage,
        "step": step,
        "weight": rolling.weight,
        "stableRevision": state.stable,
        **({"since": timestamp(state.since)} if rolling.is_known else {}),
        "message": state.message,
        **({"revision": state.canary} if state.canary else {}),
        **({"failedRevision": state.failed} if state.failed else {}),
    }


def _canary_name(service: Service, pool: str) -> str:
    return naming.pool_name(service.name, naming.canary_pool(pool))


def _ready(seen: Seen, name: str) -> bool:
    return observe(name, 0, seen.stateful_sets.get(name)).ready > 0


def _tried(seen: Seen, name: str, revision: str) -> bool:
    """Whether a canary's engines are ready, and none of another revision is left."""
    return _is_made_of(seen, name, revision) and _ready(seen, name)


def _settled(seen: Seen, name: str, size: int, revision: str) -> bool:
    workload = observe(name, size, seen.stateful_sets.get(name))
    is_full = workload.settled and workload.ready >= size
    return is_full and _is_made_of(seen, name, revision)


def _is_made_of(seen: Seen, name: str, revision: str) -> bool:
    """Whether all pods of a StatefulSet, ready or not, are of a revision."""
    if (live := seen.stateful_sets.get(name)) is None:
        return False
    made_of = (live["metadata"].get("annotations") or {}).get(naming.REVISION)
    return made_of == revision and observe(name, live["spec"].get("replicas", 1), live).settled


def restarts_of(service: Service, seen: Seen, revision: str) -> int:
    """Of the canary's pods, as far as they are of that revision."""
    return sum(
        count
        for pool, count in seen.restarts.items()
        if _is_made_of(seen, naming.pool_name(service.name, pool), revision)
    )
