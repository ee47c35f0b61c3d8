"""State of a rollout that is kept between reconciliations: releases, and the progress. Pure.

A release is what engines run, as plain data: the image that is really used, and every section of
the spec that engine pods are made of. The release of the stable engines is laid over the present
spec, so that all else in the spec (replicas, routing, tenants) holds for them at once, and a field
that a newer operator knows takes its default instead of looking like a change.

The state is kept as text in a ConfigMap. Without it the operator cannot tell a stable revision from
one that was rolled back: it then leaves engines as they are and says so, rather than rolling out
what nobody has analysed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from ullage_common.config.engine import ProfilingSection
from ullage_operator.api import naming
from ullage_operator.api.parsing import to_spec
from ullage_operator.api.pool_defaults import with_pod_template
from ullage_operator.api.renames import upgraded
from ullage_operator.api.sections import USER, SecurityContext, to_api
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.pods import is_follower
from ullage_operator.manifests.engine_choice import engine_image
from ullage_operator.manifests.volumes import ENGINE_TLS_VOLUME
from ullage_operator.rollout.stages import (
    TRYING,
    RolloutCommand,
    RolloutProgress,
    RolloutStage,
    initial_progress,
)

Release = dict[str, Any]

ENGINE_TLS = "engineTLS"
"""Name of `tls.engines` in a release: engines of both kinds serve while it changes, since routers
speak both then."""
SECTIONS = (
    "image",
    "engine",
    "vllm",
    "adapterClaims",
    "model",
    "modelPullPolicy",
    "s3",
    "device",
    "memory",
    "batching",
    "limits",
    "degrade",
    "allowFaultInjection",
    ENGINE_TLS,
)
"""Not adapters, which engines load and unload while they serve.

Not tickets, service accounts and pull secrets: both sides must have the same of these."""
SAME_ANSWERS = ("batching", "limits", ENGINE_TLS)
"""Sections that say how fast, how much and by which way engines answer, and not what."""
_SECRET = "secretName"
_SIZES = ("engine", "model", "device", "memory")
"""Sections by which engines ask for CPU and memory where their pool does not say how much."""
_MERGED = ("model", "vllm", "memory", "batching", "limits", "degrade", "parallelism", "modelCache")
_MERGED_BELOW = ("tiers", "host", "remote", "file")
"""Sections with fields of the API, and those in them; other maps are filled by people."""
NOT_OF_A_POOL = ("role", "replicas", "autoscaling", "persistentVolumeClaimRetentionPolicy")


def release_of(service: Service, settings: Settings) -> Release:
    """Return the release that a service's spec asks for."""
    spec = to_api(service.spec)
    spec[ENGINE_TLS] = spec["tls"]["engines"]
    chosen = {name: spec[name] for name in SECTIONS}
    chosen["image"] = engine_image(service.spec, settings)
    pools = {name: _of_release(pool) for name, pool in spec["pools"].items()}
    return chosen | {"pools": pools}


def _of_release(pool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pool that engines depend on; the warming of their cache is left
    out."""
    cache = _without(pool["modelCache"], ("warm",))
    return _without(pool, NOT_OF_A_POOL) | {"modelCache": cache}


def shared_hash(service: Service) -> str:
    """Return a hash of the engine pods' fields outside their release: it changes with an edit of
    them.

    Unset fields are left out, so that a field that a newer operator adds is no edit.
    """
    spec = service.spec
    tracing = spec.observability.tracing
    profiling = spec.observability.profiling
    fields = {
        "imagePullSecrets": [secret.name for secret in spec.image_pull_secrets],
        "logLevel": spec.observability.log_level,
        "securityContext": _security(spec.security_context),
        "serviceAccount": spec.service_account.name,
        "profiling": [profiling.enabled, profiling.nvtx] if profiling != ProfilingSection() else [],
        "tracing": tracing and [tracing.endpoint, tracing.protocol, tracing.sample_percent / 100],
        "tickets": spec.tickets and [spec.tickets.secret_name, spec.tickets.required],
    }
    return _hash({name: value for name, value in fields.items() if value})


def _security(context: SecurityContext) -> list[int | None]:
    """Return the user and groups of pods; empty where they are the default."""
    chosen = [context.run_as_user, context.run_as_group, context.fs_group]
    return [] if chosen == [USER] * len(chosen) else chosen


def overlaid(target: Release, release: Mapping[str, Any]) -> Release:
    """`release`, in the form of `target`: what only one of them has does not count.

    Pools that `release` lacks are new and have nothing that could be kept.
    """
    sections = {
        name: _merged(name, target[name], release.get(name, target[name])) for name in SECTIONS
    }
    pools = {name: with_pod_template(pool) for name, pool in release.get("pools", {}).items()}
    kept = {
        name: {
            key: _merged(key, value, pools.get(name, {}).get(key, value))
            for key, value in own.items()
        }
        for name, own in target["pools"].items()
    }
    return sections | {"pools": kept}


def _merged(name: str, target: Any, value_before: Any) -> Any:
    """Return a section of a release with the fields of the present spec."""
    if name == ENGINE_TLS and target and value_before:  # the rest of it is the routers'
        return {**target, _SECRET: value_before[_SECRET]}
    if name in (*_MERGED, *_MERGED_BELOW) and target and value_before:
        return {
            field: _merged(field, value, value_before.get(field, value))
            if field in _MERGED_BELOW
            else value_before.get(field, value)
            for field, value in target.items()
        }
    return value_before


def is_same(target: Release, release: Mapping[str, Any]) -> bool:
    """Whether nothing was edited: the pools are the same, and no field that both have differs."""
    return target["pools"].keys() == release["pools"].keys() and overlaid(target, release) == target


def changed_pools(target: Release, release: Release) -> list[str]:
    """Pools whose engines differ; all where a section that they share does."""
    if any(target[name] != release[name] for name in SECTIONS):
        return list(target["pools"])
    return [name for name, own in target["pools"].items() if own != release["pools"][name]]


def alike_pools(target: Release, release: Release) -> tuple[str, ...]:
    """Return the pools whose engines request the same of a node in both releases."""
    if any(target[name] != release[name] for name in _SIZES):
        return ()
    pools = release["pools"]
    return tuple(name for name, own in target["pools"].items() if own == pools[name])


def changes_answers(target: Release, release: Release) -> bool:
    """Whether engines of the two may answer one request differently."""
    sections = [name for name in SECTIONS if name not in SAME_ANSWERS]
    pools = release["pools"]
    return any(target[name] != release[name] for name in sections) or any(
        own != pools[name] for name, own in target["pools"].items()
    )


def has_other_image_only(target: Release, release: Release) -> bool:
    """Whether two releases differ in their image and in nothing else."""
    is_other = bool(target["image"] != release["image"])
    return is_other and not changed_pools(target | {"image": release["image"]}, release)


def with_release(service: Service, release: Release) -> Service:
    """Return the service with the engines of a release."""
    spec = to_api(service.spec)
    pools = {name: pool | release["pools"][name] for name, pool in spec["pools"].items()}
    chosen = {name: release[name] for name in SECTIONS if name != ENGINE_TLS}
    chosen["tls"] = spec["tls"] | {"engines": release[ENGINE_TLS]}
    return msgspec.structs.replace(service, spec=to_spec(spec | chosen | {"pools": pools}))


def revision_of(release: Mapping[str, Any]) -> str:
    """A short name that changes with the release."""
    return _hash(release)


def _hash(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _without(section: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


_TIMES = ("since", "unready_since", "unserved_since", "settled_since")


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The progress of a rollout and the releases that it is about."""

    progress: RolloutProgress
    release: Release
    """Release of the stable engines."""
    tried: Release | None = None
    """Release of the other revision that the state names; None when it names none."""

    def revision(self, target: Release) -> str:
        """What `state` calls the release that the spec asks for.

        A revision's name is of all its fields, and an operator that knows one more would call the
        same release otherwise: what failed would be tried again.
        """
        if not changed_pools(target, self.release):
            return self.progress.stable
        other = _other(self.progress)
        return other if other and self.tried == target else revision_of(target)

    def then(self, progress: RolloutProgress, target: Release) -> "RolloutState":
        """Return the state after a decision about the release that the spec asks for."""
        revision = self.revision(target)
        other = _other(progress)
        releases = {_other(self.progress): self.tried, revision: target}
        release = target if progress.stable == revision else self.release
        return RolloutState(progress, release, releases.get(other) if other else None)


def _other(progress: RolloutProgress) -> str:
    """The revision beside the stable one that a state is about; no state is about two."""
    other = progress.canary or progress.failed
    return "" if other == progress.stable else other


def load(
    text: str | None, target: Release, live: Iterable[Mapping[str, Any]] = ()
) -> RolloutState | None:
    """Return the state of a text that `dump` wrote; None if it cannot be read.

    The releases take the form of the target's spec.

    Args:
        live: the service's StatefulSets, whose pods have the environment that the text only has
            hashes of.
    """
    try:
        kept = json.loads(text or "")
        if ENGINE_TLS not in kept["release"]:
            kept["release"][ENGINE_TLS] = _live_engine_tls(target, live)
        progress = msgspec.convert(kept["state"], RolloutProgress)
        tried = kept.get("tried")
        tried = tried and upgraded(tried)
        if tried is not None and is_same(_sealed_widely(target), _sealed_widely(tried)):
            tried = target
        values = dict(_hashed_values([target, *live]))
        return RolloutState(
            progress, overlaid(target, _unsealed(upgraded(kept["release"]), values)), tried
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _live_engine_tls(target: Release, live: Iterable[Mapping[str, Any]]) -> Any:
    """Return the live `tls.engines`, which older operators did not keep."""
    secrets = [engine_tls_secret(item) for item in serving_sets(live) if not _is_of_canary(item)]
    if not secrets or (target[ENGINE_TLS] or {}).get(_SECRET) in secrets:
        return target[ENGINE_TLS]
    return {_SECRET: secrets[0]} if secrets[0] else None


def serving_sets(stateful_sets: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a service's StatefulSets whose pods take requests; followers take none."""
    return [item for item in stateful_sets if not is_follower(item)]


def engine_tls_secret(stateful_set: Mapping[str, Any]) -> str | None:
    """Return the Secret of the certificate of a StatefulSet's engines; None for plaintext."""
    pod = stateful_set["spec"].get("template", {}).get("spec", {})
    volumes = pod.get("volumes") or ()
    named = (each["secret"]["secretName"] for each in volumes if each["name"] == ENGINE_TLS_VOLUME)
    return next(named, None)


def _is_of_canary(item: Mapping[str, Any]) -> bool:
    labels = item["metadata"].get("labels") or {}
    return naming.is_canary_pool(str(labels.get(naming.POOL_LABEL, "")))


def initial(target: Release, now: datetime) -> RolloutState:
    """The state of a service that has none yet: what it asks for is stable."""
    return RolloutState(initial_progress(revision_of(target), now), target)


def is_canary_running(text: str | None) -> bool:
    """Whether a canary gets requests now, going by what was kept."""
    try:
        return bool(json.loads(text or "")["state"]["stage"] == RolloutStage.CANARY)
    except (ValueError, KeyError, TypeError):
        return False


def dump(state: RolloutState) -> str:
    """Return the text of the state that must outlive the operator: decisions, and no measures.

    More people may read ConfigMaps than services, so the text has hashes for the values of
    environment variables, which may be secrets.
    """
    progress = state.progress
    fields = dataclasses.asdict(progress)
    if progress.stage in TRYING and not progress.is_held:
        del fields["reason"], fields["message"]
    if not progress.falls:
        del fields["falls"]
    fields |= {name: fields[name].isoformat() for name in _TIMES if fields[name]}
    document = {"state": fields, "release": _sealed(state.release)}
    if state.tried is not None:
        document["tried"] = _sealed(state.tried)
    return json.dumps(document, sort_keys=True, indent=1)


_VALUE = "value"
_VALUE_HASH = "valueHash"
_HAS_ENV = "pools"
"""Section of a release in which lists called `env` have environment variables: elsewhere maps are
people's own, such as arguments of vLLM."""


def _sealed(release: Mapping[str, Any]) -> Release:
    """Return a release with hashes for the values of environment variables."""
    return _with_pools(release, lambda pools: _with_lists(pools, _sealed_variable))


def sealed_section(section: Any) -> Any:
    """Return a section of a spec with hashes for the values of environment variables."""
    return _with_lists(section, _sealed_variable)


def unsealed_section(section: Any, sources: Iterable[Any]) -> Any:
    """Return a sealed section with the original values of its environment variables.

    Args:
        sources: where the values of its environment variables may still be.

    Raises:
        KeyError: no source has a value any more.
    """
    values = dict(_hashed_values(list(sources)))
    return _with_maps(section, partial(_unsealed_variable, values))


def _sealed_widely(release: Mapping[str, Any]) -> Release:
    """Return a release with hashes for all values of pools that look like variables: as operators
    kept it that did not ask what a list is called, so that both forms are equal."""
    return _with_pools(release, lambda pools: _with_maps(pools, _sealed_variable))


def _unsealed(release: Mapping[str, Any], values: Mapping[str, str]) -> Release:
    """Return what was sealed, in either form.

    Raises:
        KeyError: nobody has the value any more.
    """
    change = partial(_unsealed_variable, values)
    return _with_pools(release, lambda pools: _with_maps(pools, change))


def _with_pools(release: Mapping[str, Any], change: Callable[[Any], Any]) -> Release:
    return {
        name: change(section) if name == _HAS_ENV else section for name, section in release.items()
    }


def _with_lists(section: Any, change: Callable[[Any], Any]) -> Any:
    """Return a section with every environment variable changed."""
    match section:
        case Mapping():
            return {
                name: [change(variable) for variable in item]
                if name == "env" and isinstance(item, list)
                else _with_lists(item, change)
                for name, item in section.items()
            }
        case list():
            return [_with_lists(item, change) for item in section]
    return section


def _with_maps(section: Any, change: Callable[[Any], Any]) -> Any:
    """Return a section with every map changed."""
    match section:
        case Mapping():
            return change({name: _with_maps(item, change) for name, item in section.items()})
        case list():
            return [_with_maps(item, change) for item in section]
    return section


def _sealed_variable(variable: Any) -> Any:
    match variable:
        case {"name": name, "value": value}:
            kept = {key: item for key, item in variable.items() if key != _VALUE}
            return kept | {_VALUE_HASH: _value_hash(name, value)}
    return variable


def _unsealed_variable(values: Mapping[str, str], variable: Any) -> Any:
    match variable:
        case {"name": _, "valueHash": str(value_hash)}:
            kept = {key: item for key, item in variable.items() if key != _VALUE_HASH}
            return kept | {_VALUE: values[value_hash]}
    return variable


def _hashed_values(section: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of all environment variables of anything, by their hashes.

    Where it is empty, the API server keeps the name alone.
    """
    match section:
        case {"name": name, "value": value}:
            yield _value_hash(name, value), value
        case {"name": name} if len(section) == 1:
            yield _value_hash(name, ""), ""
        case Mapping():
            for item in section.values():
                yield from _hashed_values(item)
        case list() | tuple():
            for item in section:
                yield from _hashed_values(item)


def _value_hash(name: Any, value: Any) -> str:
    return hashlib.sha256(f"{name}={value}".encode()).hexdigest()[:16]


def unreadable(target: str, now: datetime) -> RolloutProgress:
    """The progress of a service whose ConfigMaps cannot be read: nothing is decided."""
    message = (
        "what was decided cannot be read: engines stay as they are until the operator may list and "
        "watch ConfigMaps"
    )
    return RolloutProgress(
        "", now, canary=target, is_held=True, reason="MemoryUnseen", message=message
    )


def missing(
    name: str, live: Mapping[str, Mapping[str, Any]], target: str, annotation: str, now: datetime
) -> RolloutProgress | None:
    """A progress that holds everything, where the state is gone and engines run what is not
    asked for; None where there is nothing to lose.

    Args:
        name: of the service.
        live: its pools' StatefulSets, by name.
    """
    running = {_revision(item) for item in live.values()} - {"", target}
    if not running or annotation == f"{RolloutCommand.PROMOTE}:{target}":
        return None
    others = " and ".join(sorted(running))
    message = (
        f"what was decided is lost with ConfigMap {naming.rollout_name(name)}: engines run "
        f"revision {others} and the spec asks for {target}, which may have failed. They stay as "
        "they are until the ConfigMap is restored, the spec asks for what they run, or annotation "
        f"{naming.ROLLOUT}={RolloutCommand.PROMOTE}:{target} rolls {target} out"
    )
    stable = sorted(running)[0]
    return RolloutProgress(
        stable, now, canary=target, is_held=True, reason="MemoryLost", message=message
    )


def _revision(item: Mapping[str, Any]) -> str:
    return str((item["metadata"].get("annotations") or {}).get(naming.REVISION, ""))
