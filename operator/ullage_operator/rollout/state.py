"""The state of a rollout that is kept between reconciliations: its progress and releases.

The state is stored as text in a ConfigMap. If it is lost, the operator cannot tell a stable
revision from one that was rolled back. It then leaves engines unchanged and reports the lost state,
instead of rolling out a revision that was never analysed.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from ullage_operator.api import naming
from ullage_operator.api.renames import upgraded
from ullage_operator.conditions.pods import is_follower
from ullage_operator.manifests.volumes import ENGINE_TLS_VOLUME
from ullage_operator.rollout.release import (
    ENGINE_TLS,
    SECRET_NAME,
    Release,
    changed_pools,
    is_same,
    overlaid,
    revision_of,
)
from ullage_operator.rollout.sealing import hashed_values, sealed, sealed_widely, unsealed
from ullage_operator.rollout.stages import (
    TRYING,
    RolloutCommand,
    RolloutProgress,
    RolloutStage,
    initial_progress,
)

_TIMES = ("since", "unready_since", "unserved_since", "settled_since")


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The stored state of a rollout: its progress, and the releases that the progress refers to."""

    progress: RolloutProgress
    release: Release
    """Release of the stable engines."""
    tried: Release | None = None
    """Release of the revision that is being tried or has failed, or None if there is none."""

    def revision(self, target: Release) -> str:
        """Return the revision of `target`, reusing the stored revision if this state contains it.

        A revision is a hash of all fields. A newer operator with an additional field would compute
        a different revision for the same release, and would therefore retry a failed release.
        """
        if not changed_pools(target, self.release):
            return self.progress.stable
        other = _other(self.progress)
        return other if other and self.tried == target else revision_of(target)

    def then(self, progress: RolloutProgress, target: Release) -> "RolloutState":
        """Return this state with new progress.

        Only the releases that the new progress refers to are kept: the stable release, and the one
        that is being tried or has failed.

        Args:
            progress: the new progress.
            target: the release that the spec requests.
        """
        revision = self.revision(target)
        other = _other(progress)
        releases = {_other(self.progress): self.tried, revision: target}
        release = target if progress.stable == revision else self.release
        return RolloutState(progress, release, releases.get(other) if other else None)


def _other(progress: RolloutProgress) -> str:
    """Return the revision that is being tried or has failed (empty if there is none)."""
    other = progress.canary or progress.failed
    return "" if other == progress.stable else other


def load(
    text: str | None, target: Release, live: Iterable[Mapping[str, Any]] = ()
) -> RolloutState | None:
    """Parse the state from text that `dump` wrote. Return None if it cannot be read.

    The releases are converted to have the same fields as the target.

    Args:
        text: the stored text, or None if there is none.
        target: the release that the spec requests.
        live: the service's StatefulSets. Their pod templates contain the values of the environment
            variables that the text contains only as hashes.
    """
    try:
        kept = json.loads(text or "")
        if ENGINE_TLS not in kept["release"]:
            kept["release"][ENGINE_TLS] = _live_engine_tls(target, live)
        progress = msgspec.convert(kept["state"], RolloutProgress)
        tried = kept.get("tried")
        tried = tried and upgraded(tried)
        if tried is not None and is_same(sealed_widely(target), sealed_widely(tried)):
            tried = target
        values = dict(hashed_values([target, *live]))
        return RolloutState(
            progress, overlaid(target, unsealed(upgraded(kept["release"]), values)), tried
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _live_engine_tls(target: Release, live: Iterable[Mapping[str, Any]]) -> Any:
    """Return the live `tls.engines` setting, which older operators did not store."""
    secrets = [engine_tls_secret(item) for item in serving_sets(live) if not _is_of_canary(item)]
    if not secrets or (target[ENGINE_TLS] or {}).get(SECRET_NAME) in secrets:
        return target[ENGINE_TLS]
    return {SECRET_NAME: secrets[0]} if secrets[0] else None


def serving_sets(stateful_sets: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a service's StatefulSets, except those of followers, which do not accept requests."""
    return [item for item in stateful_sets if not is_follower(item)]


def engine_tls_secret(stateful_set: Mapping[str, Any]) -> str | None:
    """Return the Secret with the certificate of a StatefulSet's engines, or None for plaintext."""
    pod = stateful_set["spec"].get("template", {}).get("spec", {})
    volumes = pod.get("volumes") or ()
    named = (each["secret"]["secretName"] for each in volumes if each["name"] == ENGINE_TLS_VOLUME)
    return next(named, None)


def _is_of_canary(item: Mapping[str, Any]) -> bool:
    labels = item["metadata"].get("labels") or {}
    return naming.is_canary_pool(str(labels.get(naming.POOL_LABEL, "")))


def initial(target: Release, now: datetime) -> RolloutState:
    """Return the state of a new service, whose release counts as stable."""
    return RolloutState(initial_progress(revision_of(target), now), target)


def is_canary_running(text: str | None) -> bool:
    """Return whether a canary is receiving requests, according to the stored text."""
    try:
        return bool(json.loads(text or "")["state"]["stage"] == RolloutStage.CANARY)
    except (ValueError, KeyError, TypeError):
        return False


def dump(state: RolloutState) -> str:
    """Serialise a state as text, including decisions but not measurements.

    The values of environment variables are replaced with hashes. They may be secrets, and more
    people may be allowed to read ConfigMaps than services.
    """
    progress = state.progress
    fields = dataclasses.asdict(progress)
    if progress.stage in TRYING and not progress.is_held:
        del fields["reason"], fields["message"]
    if not progress.falls:
        del fields["falls"]
    fields |= {name: fields[name].isoformat() for name in _TIMES if fields[name]}
    document = {"state": fields, "release": sealed(state.release)}
    if state.tried is not None:
        document["tried"] = sealed(state.tried)
    return json.dumps(document, sort_keys=True, indent=1)


def unreadable(target: str, now: datetime) -> RolloutProgress:
    """Return progress that leaves engines unchanged while the operator cannot see their state."""
    message = (
        "the state of the rollout cannot be read: engines stay unchanged until the operator may "
        "list and watch ConfigMaps and StatefulSets"
    )
    return RolloutProgress(
        "", now, canary=target, is_held=True, reason="MemoryUnseen", message=message
    )


def missing(
    name: str, live: Mapping[str, Mapping[str, Any]], target: str, annotation: str, now: datetime
) -> RolloutProgress | None:
    """Return progress that leaves engines unchanged, because the rollout's state was lost.

    The result is None if the engines already run the revision that the spec requests, or if the
    annotation promotes that revision.

    Args:
        name: the name of the service.
        live: the StatefulSets of its pools, by name.
        target: the revision that the spec requests.
        annotation: the annotation by which users control the rollout.
        now: the current time, in UTC.
    """
    running = {_revision(item) for item in live.values()} - {"", target}
    if not running or annotation == f"{RolloutCommand.PROMOTE}:{target}":
        return None
    others = " and ".join(sorted(running))
    message = (
        f"the state of the rollout is lost with ConfigMap {naming.rollout_name(name)}: engines run "
        f"revision {others} and the spec asks for {target}, which may have failed. They stay "
        "unchanged until the ConfigMap is restored, the spec asks for their revision or annotation "
        f"{naming.ROLLOUT}={RolloutCommand.PROMOTE}:{target} rolls {target} out"
    )
    stable = sorted(running)[0]
    return RolloutProgress(
        stable, now, canary=target, is_held=True, reason="MemoryLost", message=message
    )


def _revision(item: Mapping[str, Any]) -> str:
    return str((item["metadata"].get("annotations") or {}).get(naming.REVISION, ""))
