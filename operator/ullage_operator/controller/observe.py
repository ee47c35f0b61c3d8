"""Collects the observed state of a service from the cache."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import Problem
from ullage_operator.api.naming import CONFIG_MAP, JOB, OWNED, STATEFUL_SET
from ullage_operator.conditions.conditions import DEGRADED, READY, Condition, render
from ullage_operator.kube.cache import Cache, ServiceKey
from ullage_operator.planning.model_caches import FetchObservation
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.status import INVALID_SPEC

Object = dict[str, Any]


def observe(cache: Cache, service: Object) -> Observed:
    """Return the part of a service's observed state that comes from the cache.

    Callers add the measurements, for example the health of engines.
    """
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
        is_rollout_readable=all(
            cache.sees(kind, key.namespace) for kind in (CONFIG_MAP, STATEFUL_SET)
        ),
        status=service.get("status", {}),
        rollout_annotation=(service["metadata"].get("annotations") or {}).get(naming.ROLLOUT, ""),
    )


def belongs(obj: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Return whether an object with the operator's labels belongs to this service.

    An object without an owner belongs to the service, which adopts it. An object with another
    owner, for example a deleted service with the same name, does not belong to the service.
    """
    owners = obj["metadata"].get("ownerReferences") or ()
    return not owners or any(owner["uid"] == service["metadata"]["uid"] for owner in owners)


def is_of_workload(
    pod: Mapping[str, Any], owned: Iterable[Mapping[str, Any]], service: str
) -> bool:
    """Return whether a workload of the service created a pod that has the service's labels.

    Other pods, for example manual copies or those of a copied StatefulSet, may have the same
    labels. The operator does not count, delete or monitor such pods.

    Args:
        pod: the pod.
        owned: the objects of the service.
        service: the name of the service.
    """
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    controllers = (each for each in meta.get("ownerReferences") or () if each.get("controller"))
    owner: Mapping[str, Any] = next(controllers, {})
    match owner:
        case {"kind": "StatefulSet", "uid": uid}:
            name = naming.pool_name(service, labels.get(naming.POOL_LABEL, ""))
            sets = (obj["metadata"] for obj in owned if obj["kind"] == "StatefulSet")
            return any((each["name"], each.get("uid")) == (name, uid) for each in sets)
        case {"kind": "ReplicaSet", "name": name}:
            # The operator may not list ReplicaSets, so it compares the name from their Deployment.
            template_hash = labels.get("pod-template-hash", "")
            return bool(name == f"{naming.router_name(service)}-{template_hash}")
    return False


def is_of_job(pod: Mapping[str, Any], owned: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a Job of the service created a pod."""
    jobs = {obj["metadata"].get("uid") for obj in owned if obj["kind"] == "Job"}
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") in jobs for owner in owners)


def is_leaving(obj: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Return whether an object is a leftover of a deleted service with the same name."""
    kind = naming.KIND
    name = service["metadata"]["name"]
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["kind"] == kind and owner["name"] == name for owner in owners)


def failed_status(manifest: Object, observed: Observed, problems: Iterable[Problem]) -> Object:
    """Return the status of a service whose declared spec is invalid and that is not serving yet.

    Only the Ready and Degraded conditions and the observed generation are updated.
    """
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
