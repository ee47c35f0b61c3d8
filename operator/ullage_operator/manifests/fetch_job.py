"""Builds the Jobs that download models into shared claims before engines need them.

A Job's name contains a hash of its pod template. The template of a Job is immutable, so a changed
template needs a new Job.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from ullage_operator.api import naming
from ullage_operator.api.overlay import over_template
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.builder import Builder
from ullage_operator.manifests.engine_choice import engine_image
from ullage_operator.manifests.engine_env import ENGINE_ENV, s3_env, s3_store
from ullage_operator.manifests.manifests import from_operator
from ullage_operator.manifests.pod_fields import (
    account_name,
    container_security,
    pod_defaults,
    port,
)
from ullage_operator.manifests.volumes import cache_volumes, scratch_volume

Manifest = dict[str, Any]

DEADLINE_S = 6 * 3600
"""Time limit in seconds for all attempts of a Job: enough to download 700 GB at 32 MB/s."""
RETRIES = 3
KEPT_S = 3600
"""Seconds for which Kubernetes keeps a finished Job."""
MISUSE = 2
"""Exit status if the model source can never be downloaded, so that retrying is pointless."""
_OF_PLACEMENT = (
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "tolerations",
    "volumes",
)
_OF_CONTAINER = ("name", "env", "envFrom", "volumeMounts")
_NO_SIDECAR = {
    "istio": ("sidecar.istio.io/inject", "false"),
    "linkerd": ("linkerd.io/inject", "disabled"),
}
"""Pod annotations that disable the injection of a sidecar, by service mesh."""


class SharedCache(NamedTuple):
    """A shared claim into which a Job downloads a service's model."""

    claim: str
    source: str
    pools: tuple[str, ...]
    """Pools whose engines read their model from the claim."""
    store: str = ""
    """Digest of the bucket's endpoint (empty if the source alone identifies the model)."""


def shared_caches(service: Service) -> list[SharedCache]:
    """Return the claims that a spec asks to pre-fill with its model, without duplicates."""
    pools: dict[str, list[str]] = {}
    for name, pool in service.spec.pools.items():
        cache = pool.model_cache
        if cache.warm and cache.claim_name:
            pools.setdefault(cache.claim_name, []).append(name)
    source = service.spec.model.source
    return [
        SharedCache(claim, source, tuple(names), s3_store(service, service.spec.pools[names[0]]))
        for claim, names in pools.items()
    ]


def fetch_job(service: Service, cache: SharedCache, settings: Settings) -> Manifest:
    """Build the Job that downloads a model into a claim and verifies it there."""
    pool_name = cache.pools[0]
    pool = service.spec.pools[pool_name]
    match = naming.selector(service.name, naming.FETCHER, pool_name)
    own = {
        "metadata": {"labels": match, **_outside_mesh(settings)},
        "spec": _pod_spec(service, pool, cache, settings),
    }

    spec = {
        "backoffLimit": RETRIES,
        "activeDeadlineSeconds": DEADLINE_S,
        "ttlSecondsAfterFinished": KEPT_S,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": naming.ENGINE,
                        "operator": "In",
                        "values": [MISUSE],
                    },
                },
                # A pod that a node failure or a drain ended does not count as a failed try.
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": over_template(_given(pool), own),
    }

    name = naming.fetch_name(service.name, _digest([cache.claim, spec]))
    job = Builder(service, naming.FETCHER, pool_name).object("batch/v1", "Job", name, spec)
    job["metadata"]["annotations"] = {
        naming.FETCH_CLAIM: cache.claim,
        naming.FETCH_SOURCE: cache.source,
        **({naming.FETCH_STORE: cache.store} if cache.store else {}),
    }
    return job


def fetch_policy(service: Service, settings: Settings) -> Manifest:
    """Build the NetworkPolicy that lets only the operator connect to pods that download models."""
    match = naming.selector(service.name, naming.FETCHER)
    rules = {"ingress": [from_operator(naming.PROBE_PORT, settings)]}
    name = naming.fetcher_name(service.name)
    return Builder(service, naming.FETCHER).network_policy(name, match, rules)


def _pod_spec(service: Service, pool: PoolSpec, cache: SharedCache, settings: Settings) -> Manifest:
    container = {
        "name": naming.ENGINE,
        "image": engine_image(service.spec, settings),
        "imagePullPolicy": settings.image_pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-engine"],
        "args": [
            "fetch",
            "--source",
            cache.source,
            "--port",
            str(naming.PROBE_PORT),
            "--report",
            "/dev/termination-log",
        ],
        "env": [
            *(each for each in ENGINE_ENV if each["name"] == "HF_HOME"),
            *s3_env(service, pool),
        ],
        "ports": [port("probe", naming.PROBE_PORT)],
        "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "cache", "mountPath": naming.CACHE_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    return {
        "serviceAccountName": account_name(service, naming.engine_name(service.name)),
        **pod_defaults(service, settings, 0),
        "terminationGracePeriodSeconds": 30,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [*cache_volumes(service, pool), scratch_volume("tmp")],
    }


def _outside_mesh(settings: Settings) -> Manifest:
    """Return the annotation that keeps a service mesh from injecting its sidecar into the pod.

    A sidecar would keep the pod from ever finishing. Without a mesh, the `annotations` field is
    omitted, because API servers drop empty maps and the difference would look like drift.
    """
    return {"annotations": dict([_NO_SIDECAR[settings.mesh]])} if settings.mesh else {}


def _given(pool: PoolSpec) -> Manifest:
    """Return the fields that a Job copies from a pool's pod template.

    These are scheduling fields and the environment of the engine. Sidecars are omitted, because
    they would keep the Job from finishing.
    """
    spec = pool.pod_template.get("spec", {})
    containers = [
        _only(each, _OF_CONTAINER)
        for each in spec.get("containers", ())
        if each["name"] == naming.ENGINE
    ]
    return {"spec": _only(spec, _OF_PLACEMENT) | ({"containers": containers} if containers else {})}


def _only(section: Manifest, names: Iterable[str]) -> Manifest:
    return {name: section[name] for name in names if name in section}


def _digest(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]
