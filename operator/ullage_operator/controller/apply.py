"""Carries out plans: applies missing or drifted objects, and deletes those that left the plan.

It also gathers from the cache all observations that a service's plan depends on, and words the
status of a service that cannot be served as it is declared.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterPostponed,
    ClusterRefused,
    ClusterUnavailable,
    Problem,
)
from ullage_operator.api.naming import CONFIG_MAP, JOB, OWNED, kind_of
from ullage_operator.api.overlay import merge_key
from ullage_operator.conditions.conditions import DEGRADED, READY, Condition, render
from ullage_operator.conditions.events import EventNote, clipped, transitions
from ullage_operator.conditions.pod_problem import PodProblem
from ullage_operator.kube.cache import Cache, Denied, ServiceKey, is_created
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import EventRecorder
from ullage_operator.planning.model_caches import FetchObservation
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.planning.status import INVALID_SPEC
from ullage_operator.policy.engine_health import boost_notes, worker_restart_notes
from ullage_operator.policy.scaling_status import scaling_notes

Object = dict[str, Any]

APPLIED_HASH = f"{naming.GROUP}/applied-hash"
"""Annotation with a hash of the configuration that an object was last applied with: it changes when
a field leaves the configuration, which the fields of the live object do not show."""
MAX_NAMED = 3
"""Number of objects that a condition names."""

_logger = logging.getLogger(__name__)


def observe(cache: Cache, service: Object) -> Observed:
    """Gather the observations that the plan of `service` depends on."""
    key = ServiceKey(service["metadata"]["namespace"], service["metadata"]["name"])
    owned = [obj for obj in cache.owned(key) if belongs(obj, service)]
    optional = [kind for kind in OWNED if kind.optional]
    return Observed(
        now=datetime.now(UTC),
        objects={key_of(obj): obj for obj in owned},
        pods=[pod for pod in cache.pods(key) if is_of_workload(pod, owned, key.name)],
        fetches=FetchObservation(
            sees_jobs=cache.sees(JOB, key.namespace),
            pods=[pod for pod in cache.pods(key) if is_of_job(pod, owned)],
        ),
        serves=frozenset(kind.name for kind in optional if cache.serves(kind, key.namespace)),
        missing_rights=tuple(map(str, cache.missing(key.namespace))),
        unlisted=tuple(cache.unlisted(key.namespace)),
        is_rollout_readable=cache.sees(CONFIG_MAP, key.namespace),
        status=service.get("status", {}),
        rollout_annotation=(service["metadata"].get("annotations") or {}).get(naming.ROLLOUT, ""),
    )


def belongs(obj: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Whether an object with the operator's labels is this service's.

    One that lost its owner is taken back; one of another owner, such as of a deleted service of
    the same name, is not.
    """
    owners = obj["metadata"].get("ownerReferences") or ()
    return not owners or any(owner["uid"] == service["metadata"]["uid"] for owner in owners)


def is_of_workload(
    pod: Mapping[str, Any], owned: Iterable[Mapping[str, Any]], service: str
) -> bool:
    """Return whether a workload of the service created a pod that has the service's labels.

    Copies of pods and pods of other workloads may have the labels, too. The operator neither counts
    nor deletes those, and does not ask for their health.

    Args:
        owned: the objects of the service.
        service: the name of the service.
    """
    meta = pod["metadata"]
    controllers = (each for each in meta.get("ownerReferences") or () if each.get("controller"))
    owner: Mapping[str, Any] = next(controllers, {})
    match owner:
        case {"kind": "StatefulSet", "uid": uid}:
            sets = (obj["metadata"] for obj in owned if obj["kind"] == "StatefulSet")
            return any(each.get("uid") == uid for each in sets)
        case {"kind": "ReplicaSet", "name": name}:
            # The operator may not list ReplicaSets, so it compares the name from their Deployment.
            template_hash = (meta.get("labels") or {}).get("pod-template-hash", "")
            return bool(name == f"{naming.router_name(service)}-{template_hash}")
    return False


def is_of_job(pod: Mapping[str, Any], owned: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a Job of the service created a pod."""
    jobs = {obj["metadata"].get("uid") for obj in owned if obj["kind"] == "Job"}
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") in jobs for owner in owners)


def is_leaving(obj: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Whether an object is left over from a deleted service of the same name."""
    kind = naming.KIND
    name = service["metadata"]["name"]
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["kind"] == kind and owner["name"] == name for owner in owners)


def failed_status(manifest: Object, observed: Observed, problems: Iterable[Problem]) -> Object:
    """Return the status of a service that has never been carried out as declared; measures stay."""
    generation = manifest["metadata"]["generation"]
    message = "; ".join(map(str, problems))
    findings = [
        Condition(kind, kind == DEGRADED, INVALID_SPEC, message) for kind in (READY, DEGRADED)
    ]
    previous = observed.status.get("conditions", ())
    conditions = render(findings, previous, generation, observed.now)
    types = {condition["type"] for condition in conditions}
    kept = [dict(condition) for condition in previous if condition["type"] not in types]
    return {
        **observed.status,
        "observedGeneration": generation,
        "conditions": [*conditions, *kept],
    }


def with_applied_hash(desired: Mapping[str, Any]) -> Object:
    """Return `desired` with its hash as an annotation."""
    meta = desired["metadata"]
    text = json.dumps(desired, sort_keys=True, separators=(",", ":"))
    applied_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    annotations = meta.get("annotations", {}) | {APPLIED_HASH: applied_hash}
    return {**desired, "metadata": {**meta, "annotations": annotations}}


def has_drifted(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether `desired`, with its applied hash, must be applied again.

    Fields that `desired` does not name are others' business, and empty ones that are not there are
    no drift. A quantity that the API server has rewritten looks drifted; applying it again changes
    nothing.
    """
    return not _is_within(desired, live)


def was_edited(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a drifted object was applied with this very configuration and edited by others."""
    applied_hash = desired["metadata"]["annotations"][APPLIED_HASH]
    return bool((live["metadata"].get("annotations") or {}).get(APPLIED_HASH) == applied_hash)


_FLAGS = frozenset({"hostIPC", "hostNetwork", "hostPID", "readOnly", "stdin", "stdinOnce", "tty"})
"""Fields of pods that are not kept where they are false. Others are: they may default to true."""


def _is_dropped(name: str, value: Any) -> bool:
    """Whether the API server may keep no such value of a field."""
    return value in ("", [], None) or (value is False and name in _FLAGS)


def _is_within(desired: Any, live: Any) -> bool:
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return all(
            _is_within(value, live[name]) if name in live else _is_dropped(name, value)
            for name, value in desired.items()
        )
    if isinstance(desired, list) and isinstance(live, list):
        key = merge_key(desired, live)
        if key is not None:
            items = {item[key]: item for item in live}
            return all(_is_within(item, items.get(item[key])) for item in desired)
        return len(desired) == len(live) and all(map(_is_within, desired, live))
    return bool(desired == live)


class Replaced(Exception):
    """Raised when the service was deleted, or created again, while its objects were written."""


@dataclass(frozen=True, slots=True)
class AppliedChanges:
    """The objects that one reconciliation wrote, each as `Kind name`."""

    created: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """Objects that somebody else had edited."""
    deleted: list[str] = field(default_factory=list)

    def on_applied(self, desired: Object, before: Object | None, after: Object) -> None:
        """Record an object that was applied.

        Args:
            desired: with its applied hash.
            before: the live object, if there was one.
            after: the live object as the API server answered.
        """
        if before is None:
            self.created.append(object_name(desired))
        elif _version(before) != _version(after):  # the API server may rewrite what it is given
            names = self.repaired if was_edited(desired, before) else self.updated
            names.append(object_name(desired))

    def notes(self, is_new: bool) -> list[EventNote]:
        """Return one note for all objects of each sort of change.

        Args:
            is_new: of the service: that its objects are created goes without saying.
        """
        changes = (
            ("Created", "Create", () if is_new else self.created),
            ("Updated", "Apply", self.updated),
            ("DriftRepaired", "Apply", self.repaired),
            ("Deleted", "Delete", self.deleted),
        )
        return [
            EventNote(reason, action, ", ".join(names))
            for reason, action, names in changes
            if names
        ]


def object_name(obj: Mapping[str, Any]) -> str:
    """Return `Kind name`."""
    return f"{obj['kind']} {obj['metadata']['name']}"


def _version(obj: Mapping[str, Any]) -> Any:
    return obj["metadata"].get("resourceVersion")


@dataclass(slots=True)
class ApplyResult:
    """The outcome of carrying out a plan."""

    service: str
    changes: AppliedChanges = field(default_factory=AppliedChanges)
    denied: dict[Denied, None] = field(default_factory=dict)
    """Rights that were missing for some of the plan."""
    refused: list[str] = field(default_factory=list)
    """Problems that stay until somebody changes something."""
    delayed: list[str] = field(default_factory=list)
    """Problems that a later try may solve."""
    delay_s: float = 0.0
    """Seconds until delayed objects may be tried again."""
    _unwritten_config_maps: set[str] = field(default_factory=set)

    @property
    def result(self) -> str:
        """The outcome's label in metrics."""
        if self.refused or self.delayed:
            return "temporary" if self.delayed else "permanent"
        return "denied" if self.denied else "ok"

    @property
    def problems(self) -> tuple[PodProblem, ...]:
        """One problem for all objects that could not be written."""
        messages = [*self.refused, *self.delayed]
        if not messages:
            return ()
        more = f"; and {len(messages) - MAX_NAMED} more" if len(messages) > MAX_NAMED else ""
        reason = "ApplyFailed" if self.refused else "ApplyDelayed"
        return (PodProblem("", reason, "; ".join(messages[:MAX_NAMED]) + more, blocks=False),)

    def must_wait(self, obj: Object, live: Object | None) -> bool:
        """Whether pods must wait for a configuration, or a rollout for the state that it keeps.

        Pods created before their configuration would read another, and nothing would replace them.

        Args:
            live: the object as it is; its pods have the configuration that it names.
        """
        if obj["kind"] not in ("StatefulSet", "Deployment"):
            return False
        if naming.rollout_name(self.service) in self._unwritten_config_maps:
            return True
        is_other = live is None or _config_hash(obj) != _config_hash(live)
        return is_other and obj["metadata"]["name"] in self._unwritten_config_maps

    def on_unseen(self, obj: Object) -> None:
        """Record an object that is not written because its kind cannot be watched."""
        if obj["kind"] == "ConfigMap":
            self._unwritten_config_maps.add(obj["metadata"]["name"])

    def on_failed(
        self,
        obj: Object,
        error: ClusterDenied | ClusterRefused | ClusterPostponed,
        live: Object | None = None,
    ) -> None:
        """Record an object that could not be written or deleted."""
        if obj["kind"] == "ConfigMap" and _is_awaited(obj, live):
            self._unwritten_config_maps.add(obj["metadata"]["name"])
        if isinstance(error, ClusterDenied):
            resource = kind_of(obj["apiVersion"], obj["kind"]).qualified
            self.denied[Denied(error.verb, resource, obj["metadata"]["namespace"])] = None
            return
        text = f"{object_name(obj)}: {clipped(str(error))}"
        if isinstance(error, ClusterRefused):
            self.refused.append(text + _remedy(obj))
        else:
            self.delayed.append(text)
            self.delay_s = max(self.delay_s, error.delay_s)

    def log(self, key: ServiceKey) -> None:
        for missing in self.denied:
            _logger.error("%s: missing permission: %s; the rest goes on", key, missing)
        for text in self.refused:
            _logger.error("%s: refused: %s; the rest goes on", key, text)
        for text in self.delayed:
            _logger.warning("%s: will try again: %s; the rest goes on", key, text)


class Applier:
    """Carries out plans, and writes services' status and Events."""

    def __init__(self, cluster: Cluster, cache: Cache, recorder: EventRecorder) -> None:
        self._cluster = cluster
        self._cache = cache
        self._recorder = recorder

    async def report(self, key: ServiceKey, manifest: Object, status: Object) -> None:
        """Write a service's status, and an Event for each change of its conditions and sizes."""
        try:
            written = await self._cluster.apply_status(manifest, status)
        except ClusterDenied as error:
            denied = Denied(error.verb, f"{naming.SERVICE.qualified}/status", key.namespace)
            _logger.error("%s: missing permission: %s", key, denied)
            raise
        if written is not None:
            self._cache.written(written)
        previous = manifest.get("status", {})
        notes = transitions(previous.get("conditions", ()), status["conditions"])
        notes += scaling_notes(previous, status) + worker_restart_notes(previous, status)
        notes += boost_notes(previous, status)
        self._recorder.record(manifest, notes)

    async def apply(
        self, key: ServiceKey, manifest: Object, plan: ServicePlan, observed: Observed
    ) -> ApplyResult:
        """Apply and delete as many of the plan's objects as possible.

        Raises:
            Replaced: the service is no longer the one that was planned for.
        """
        result = ApplyResult(key.name)
        desired = [(obj, False) for obj in map(with_applied_hash, plan.apply)]
        unwanted = [(obj, True) for obj in plan.delete]
        try:
            for obj, is_unwanted in [*desired, *unwanted]:
                # An object of a kind that is not watched is never written blindly.
                if not self._cache.sees(kind_of(obj["apiVersion"], obj["kind"]), key.namespace):
                    result.on_unseen(obj)
                    continue
                live = observed.objects.get(key_of(obj))
                if result.must_wait(obj, live):
                    continue
                self._check_current(key, manifest)
                try:
                    if is_unwanted:
                        await self._delete(key, obj, result.changes)
                    else:
                        await self._apply(key, manifest, obj, live, result.changes)
                except (ClusterDenied, ClusterRefused, ClusterPostponed) as error:
                    result.on_failed(obj, error, live)
        finally:
            is_new = "conditions" not in manifest.get("status", {})
            self._recorder.record(manifest, result.changes.notes(is_new))
        result.log(key)
        return result

    async def _delete(self, key: ServiceKey, obj: Object, changes: AppliedChanges) -> None:
        await self._cluster.delete(obj)
        changes.deleted.append(object_name(obj))
        _logger.info("%s: deleted %s", key, object_name(obj))

    async def _apply(
        self,
        key: ServiceKey,
        manifest: Object,
        desired: Object,
        live: Object | None,
        changes: AppliedChanges,
    ) -> None:
        if live is None:
            applied = await self._create(manifest, desired)
        elif has_drifted(desired, live):
            applied = await self._update(desired, live)
        else:
            return
        self._cache.written(applied)
        changes.on_applied(desired, live, applied)
        _logger.info("%s: applied %s", key, object_name(desired))

    async def _create(self, manifest: Object, desired: Object) -> Object:
        """Make an object that the cache lacks, or take back one that is the service's."""
        try:
            return await self._cluster.create(desired)
        except ClusterConflict:
            meta = desired["metadata"]
            kind = kind_of(desired["apiVersion"], desired["kind"])
            live = await self._cluster.get(kind, meta["namespace"], meta["name"])
            if live is None:
                raise
        check_owner(live, manifest)
        return await self._update(desired, live)

    async def _update(self, desired: Object, live: Object) -> Object:
        if is_created(live["metadata"].get("managedFields") or ()):
            live = await self._cluster.claim_fields(live)
        if leaves_replicas(desired):
            await self._cluster.keep_replicas(live)
        return await self._cluster.apply(desired)

    def _check_current(self, key: ServiceKey, manifest: Object) -> None:
        """Raise Replaced for a service that is gone, before anything is written for it."""
        present = self._cache.service(key)
        if present is None or present["metadata"]["uid"] != manifest["metadata"]["uid"]:
            raise Replaced


def check_owner(live: Object, manifest: Object) -> None:
    """Refuses to take over an object of the same name that is not this service's.

    Raises:
        ClusterUnavailable: it is of a deleted service of this name.
        ClusterRefused: it is another's.
    """
    if live["metadata"].get("ownerReferences") and belongs(live, manifest):
        return
    if is_leaving(live, manifest):
        raise ClusterUnavailable(f"{object_name(live)} of the deleted service still ends", 1.0)
    raise ClusterRefused(
        "it exists and is not this service's: delete it, or name the LLMService otherwise"
    )


def _remedy(obj: Object) -> str:
    """Names the part of the manifest that a workload's pods come from; empty for other objects."""
    if obj["kind"] not in ("StatefulSet", "Deployment"):
        return ""
    pool = naming.stable_pool(obj["metadata"]["labels"].get(naming.POOL_LABEL, ""))
    return f"; its pods are made of {f'spec.pools.{pool}' if pool else 'spec.router'}: correct it"


def _is_awaited(config_map: Object, live: Object | None) -> bool:
    """Return whether pods must wait for a ConfigMap, because it keeps the spec for later edits."""
    if live is None:
        return True
    before = live.get("data") or {}
    data = config_map.get("data") or {}
    return any(before.get(name) != data[name] for name in data if name != naming.KEPT_SPEC)


def _config_hash(obj: Object) -> Any:
    """Return the fingerprint of the configuration that a workload's pods start with."""
    annotations = obj["spec"]["template"]["metadata"].get("annotations") or {}
    return annotations.get(naming.CONFIG_HASH)


def leaves_replicas(obj: Object) -> bool:
    """Return whether another controller sets the number of pods of the object."""
    return obj["kind"] in ("StatefulSet", "Deployment") and "replicas" not in obj["spec"]
