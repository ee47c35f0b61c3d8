"""Applies plans: writes missing or drifted objects, and deletes objects no longer in the plan."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterPostponed,
    ClusterRefused,
    ClusterUnavailable,
)
from ullage_operator.api.naming import kind_of
from ullage_operator.conditions.events import EventNote, clipped, transitions
from ullage_operator.conditions.pod_problem import APPLY_FAILED, PodProblem
from ullage_operator.controller.drift import has_drifted, was_edited, with_applied_hash
from ullage_operator.controller.observe import belongs, is_leaving
from ullage_operator.kube.cache import Cache, Denied, ServiceKey, is_created
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import EventRecorder
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.policy.engine_health import boost_notes, worker_restart_notes
from ullage_operator.policy.scaling_status import scaling_notes

Object = dict[str, Any]

MAX_NAMED = 3
"""Maximum number of objects that a condition mentions by name."""
APPLY_DELAYED = "ApplyDelayed"
_logger = logging.getLogger(__name__)


class Replaced(Exception):
    """Raised if the service was deleted or recreated while its objects were being written."""


@dataclass(frozen=True, slots=True)
class AppliedChanges:
    """The objects that one reconciliation wrote, each as `Kind name`."""

    created: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """Objects in which edits by other clients were reverted."""
    deleted: list[str] = field(default_factory=list)

    def on_applied(self, desired: Object, before: Object | None, after: Object) -> None:
        """Record an applied object.

        Args:
            desired: the manifest, annotated with its applied hash.
            before: the previous live object, or None if it did not exist.
            after: the live object that the API server returned.
        """
        if before is None:
            self.created.append(object_name(desired))
        elif _version(before) != _version(after):  # equal if the drift was only in notation
            names = self.repaired if was_edited(desired, before) else self.updated
            names.append(object_name(desired))

    def notes(self, is_new: bool) -> list[EventNote]:
        """Return an Event note for each kind of change that occurred, with the changed objects.

        The kinds are objects created, updated, repaired and deleted.

        Args:
            is_new: whether the service is new. The creation of its objects is then not reported.
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
    """Return an object's kind and name, as `Kind name`."""
    return f"{obj['kind']} {obj['metadata']['name']}"


def _version(obj: Mapping[str, Any]) -> Any:
    return obj["metadata"].get("resourceVersion")


@dataclass(slots=True)
class ApplyResult:
    """The result of applying a plan."""

    service: str
    changes: AppliedChanges = field(default_factory=AppliedChanges)
    denied: dict[Denied, None] = field(default_factory=dict)
    """Missing permissions that prevented some of the plan's writes."""
    refused: list[str] = field(default_factory=list)
    """Errors of writes that would fail again if retried."""
    delayed: list[str] = field(default_factory=list)
    """Errors of writes that may succeed if retried."""
    delay_s: float = 0.0
    """Seconds until the next retry."""
    engine_problems: dict[str, PodProblem] = field(default_factory=dict)
    """Errors of writes of StatefulSets, by pool. A canary is treated as a separate pool."""
    _unwritten_config_maps: set[str] = field(default_factory=set)

    @property
    def result(self) -> str:
        """Return the value of the metric label `result` that describes how the writes went."""
        if self.refused or self.delayed:
            return "temporary" if self.delayed else "permanent"
        return "denied" if self.denied else "ok"

    @property
    def problems(self) -> tuple[PodProblem, ...]:
        """Return a single problem that lists the failed writes (empty if none failed)."""
        messages = [*self.refused, *self.delayed]
        if not messages:
            return ()
        more = f"; and {len(messages) - MAX_NAMED} more" if len(messages) > MAX_NAMED else ""
        reason = APPLY_FAILED if self.refused else APPLY_DELAYED
        return (PodProblem("", reason, "; ".join(messages[:MAX_NAMED]) + more, blocks=False),)

    def must_wait(self, obj: Object, live: Object | None, *, is_unwanted: bool = False) -> bool:
        """Return whether an object must wait for a ConfigMap that could not be written.

        Otherwise new pods would start with the outdated configuration and would never be replaced.
        All workloads and all deletions also wait for the ConfigMap that stores the state of the
        rollout.

        Args:
            obj: the object to write or delete.
            live: the live object, or None if it does not exist.
            is_unwanted: whether the object is to be deleted.
        """
        is_workload = obj["kind"] in ("StatefulSet", "Deployment")
        if naming.rollout_name(self.service) in self._unwritten_config_maps:
            return is_workload or is_unwanted
        if not is_workload:
            return False
        is_other = live is None or _config_hash(obj) != _config_hash(live)
        return is_other and obj["metadata"]["name"] in self._unwritten_config_maps

    def on_unseen(self, obj: Object) -> None:
        """Record an object that was skipped because the operator cannot watch its kind.

        If it is a ConfigMap, workloads that depend on it must wait.
        """
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
        reason = APPLY_DELAYED
        if isinstance(error, ClusterRefused):
            text = text + _remedy(obj)
            reason = APPLY_FAILED
            self.refused.append(text)
        else:
            self.delayed.append(text)
            self.delay_s = max(self.delay_s, error.delay_s)
        if obj["kind"] == "StatefulSet":
            self.engine_problems[_pool_of(obj)] = PodProblem("", reason, text, blocks=False)

    def log(self, key: ServiceKey) -> None:
        for missing in self.denied:
            _logger.error("%s: missing permission: %s; other objects are applied", key, missing)
        for text in self.refused:
            _logger.error("%s: refused: %s; other objects are applied", key, text)
        for text in self.delayed:
            _logger.warning("%s: will retry: %s; other objects are applied", key, text)


class Applier:
    """Applies plans, and writes the status and Events of services."""

    def __init__(self, cluster: Cluster, cache: Cache, recorder: EventRecorder) -> None:
        self._cluster = cluster
        self._cache = cache
        self._recorder = recorder

    async def report(self, key: ServiceKey, manifest: Object, status: Object) -> None:
        """Write a service's status, and emit an Event for each changed condition or pool size."""
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
        """Apply and delete the plan's objects, continuing after objects that fail.

        Raises:
            Replaced: the service was deleted or recreated since it was planned.
        """
        result = ApplyResult(key.name)
        desired = [(obj, False) for obj in map(with_applied_hash, plan.apply)]
        unwanted = [(obj, True) for obj in plan.delete]

        try:
            for obj, is_unwanted in [*desired, *unwanted]:
                # Without a watch of the kind, the operator does not know the live object.
                if not self._cache.sees(kind_of(obj["apiVersion"], obj["kind"]), key.namespace):
                    result.on_unseen(obj)
                    continue
                live = observed.objects.get(key_of(obj))
                if result.must_wait(obj, live, is_unwanted=is_unwanted):
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
        """Create an object that is missing from the cache, or update it if it exists after all.

        An existing object must belong to the service.
        """
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
        """Check that the service still exists, so that nothing is written for a deleted service.

        Raises:
            Replaced: the service was deleted or recreated.
        """
        present = self._cache.service(key)
        if present is None or present["metadata"]["uid"] != manifest["metadata"]["uid"]:
            raise Replaced


def check_owner(live: Object, manifest: Object) -> None:
    """Check that an existing object belongs to this service.

    Raises:
        ClusterUnavailable: the object is left over from a deleted service of the same name, and
            Kubernetes has not begun to delete it.
        ClusterPostponed: Kubernetes is deleting such an object, which may take long.
        ClusterRefused: the object belongs to another owner.
    """
    if live["metadata"].get("ownerReferences") and belongs(live, manifest):
        return
    if is_leaving(live, manifest):
        message = "the one of the deleted service still exists"
        if "deletionTimestamp" not in live["metadata"]:
            raise ClusterUnavailable(f"{object_name(live)}: {message}", 1.0)
        finalizers = ", ".join(live["metadata"].get("finalizers") or ())
        waits = f", and waits for its finalizers {finalizers}" if finalizers else ""
        raise ClusterPostponed(f"{message}{waits}", 1.0)
    raise ClusterRefused("it exists and is not this service's: delete it, or rename the LLMService")


def _remedy(obj: Object) -> str:
    """Return a hint about which spec section to correct (empty for objects without pods)."""
    if obj["kind"] not in ("StatefulSet", "Deployment"):
        return ""
    pool = naming.stable_pool(_pool_of(obj))
    return f"; correct {f'spec.pools.{pool}' if pool else 'spec.router'}, which describes its pods"


def _pool_of(obj: Object) -> str:
    return str((obj["metadata"].get("labels") or {}).get(naming.POOL_LABEL, ""))


def _is_awaited(config_map: Object, live: Object | None) -> bool:
    """Return whether pods must wait until a ConfigMap has been written.

    If only the operator's copy of the last valid spec changed, pods need not wait, because they do
    not read it.
    """
    if live is None:
        return True
    before = live.get("data") or {}
    data = config_map.get("data") or {}
    return any(before.get(name) != data[name] for name in data if name != naming.KEPT_SPEC)


def _config_hash(obj: Object) -> Any:
    """Return the hash of the configuration that a workload's pods start with."""
    annotations = obj["spec"]["template"]["metadata"].get("annotations") or {}
    return annotations.get(naming.CONFIG_HASH)


def leaves_replicas(obj: Object) -> bool:
    """Return whether another controller, such as an autoscaler, manages the object's replicas."""
    return obj["kind"] in ("StatefulSet", "Deployment") and "replicas" not in obj["spec"]
