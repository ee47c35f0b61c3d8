"""Engine releases: the part of a spec that determines engine pods, as plain data.

A release contains the resolved image and every section of the spec that engine pods depend on. The
operator merges the stable engines' release over the current spec. All other fields of the spec
(replicas, routing, tenants) therefore take effect immediately. A field that a newer operator adds
takes its default and does not look like a change.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ullage_common.config.engine import ProfilingSection
from ullage_operator.api.parsing import to_spec
from ullage_operator.api.pool_defaults import with_pod_template
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.sections import USER, SecurityContext
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.engine_choice import engine_image

Release = dict[str, Any]
ENGINE_TLS = "engineTLS"
"""Key of `tls.engines` in a release.

While this field is being changed, engines with TLS and engines with plaintext serve at the same
time, and routers must support both.
"""
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
"""Sections of the spec that a release contains.

Adapters are excluded, because engines load and unload them while serving. Tickets, service accounts
and pull secrets are excluded, because stable engines and the canary must share them.
"""
SAME_ANSWERS = ("batching", "limits", ENGINE_TLS)
"""Sections that affect the speed, number and transport of responses, but not their content."""
SECRET_NAME = "secretName"
_SIZES = ("engine", "model", "device", "memory")
"""Sections that determine engines' default CPU and memory requests."""
_MERGED = ("model", "vllm", "memory", "batching", "limits", "degrade", "parallelism", "modelCache")
_MERGED_BELOW = ("tiers", "host", "remote", "file")
"""Sections whose fields are defined by the API. All other maps have user-defined keys."""
NOT_OF_A_POOL = ("role", "replicas", "autoscaling", "persistentVolumeClaimRetentionPolicy")


def release_of(service: Service, settings: Settings) -> Release:
    """Return the release that a service's spec describes."""
    spec = to_api(service.spec)
    spec[ENGINE_TLS] = spec["tls"]["engines"]
    chosen = {name: spec[name] for name in SECTIONS}
    chosen["image"] = engine_image(service.spec, settings)
    pools = {name: _of_release(pool) for name, pool in spec["pools"].items()}
    return chosen | {"pools": pools}


def _of_release(pool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pool that belong to a release, because they affect its engines.

    `modelCache.warm` is left out, like the fields in `NOT_OF_A_POOL`.
    """
    cache = _without(pool["modelCache"], ("warm",))
    return _without(pool, NOT_OF_A_POOL) | {"modelCache": cache}


def shared_hash(service: Service) -> str:
    """Return a hash of the engine pod settings that are not part of a release, to detect edits.

    Unset fields are skipped, so that a field added by a newer operator does not look like an edit.
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
    """Return the user and group IDs of pods (empty if all are defaults)."""
    chosen = [context.run_as_user, context.run_as_group, context.fs_group]
    return [] if chosen == [USER] * len(chosen) else chosen


def overlaid(target: Release, release: Mapping[str, Any]) -> Release:
    """Return an older release, converted to have exactly the fields and pools of `target`.

    Values come from `release`. Fields and pools that it lacks are new, and come from `target`.
    Those that `target` lacks are dropped.
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
    """Return the previous value of a section or field, converted to the fields of `target`.

    In sections that are merged field by field, fields without a previous value keep the value in
    `target`, and fields that `target` lacks are dropped. Any other value is returned unchanged.
    """
    if name == ENGINE_TLS and target and value_before:  # its other fields concern only routers
        return {**target, SECRET_NAME: value_before[SECRET_NAME]}
    if name in (*_MERGED, *_MERGED_BELOW) and target and value_before:
        return {
            field: _merged(field, value, value_before.get(field, value))
            if field in _MERGED_BELOW
            else value_before.get(field, value)
            for field, value in target.items()
        }
    return value_before


def is_same(target: Release, release: Mapping[str, Any]) -> bool:
    """Return whether two releases have the same pools and are equal in all fields they share."""
    return target["pools"].keys() == release["pools"].keys() and overlaid(target, release) == target


def changed_pools(target: Release, release: Release) -> list[str]:
    """Return the pools whose engines differ, or all pools if a shared section differs."""
    if any(target[name] != release[name] for name in SECTIONS):
        return list(target["pools"])
    return [name for name, own in target["pools"].items() if own != release["pools"][name]]


def alike_pools(target: Release, release: Release) -> tuple[str, ...]:
    """Return the pools whose engines request the same resources in both releases."""
    if any(target[name] != release[name] for name in _SIZES):
        return ()
    pools = release["pools"]
    return tuple(name for name, own in target["pools"].items() if own == pools[name])


def changes_answers(target: Release, release: Release) -> bool:
    """Return whether engines of two releases may respond differently to the same request."""
    sections = [name for name in SECTIONS if name not in SAME_ANSWERS]
    pools = release["pools"]
    return any(target[name] != release[name] for name in sections) or any(
        own != pools[name] for name, own in target["pools"].items()
    )


def has_other_image_only(target: Release, release: Release) -> bool:
    """Return whether two releases differ only in their image."""
    is_other = bool(target["image"] != release["image"])
    return is_other and not changed_pools(target | {"image": release["image"]}, release)


def with_release(service: Service, release: Release) -> Service:
    """Return the service with the engine-related fields of its spec taken from a release."""
    spec = to_api(service.spec)
    pools = {name: pool | release["pools"][name] for name, pool in spec["pools"].items()}
    chosen = {name: release[name] for name in SECTIONS if name != ENGINE_TLS}
    chosen["tls"] = spec["tls"] | {"engines": release[ENGINE_TLS]}
    return msgspec.structs.replace(service, spec=to_spec(spec | chosen | {"pools": pools}))


def revision_of(release: Mapping[str, Any]) -> str:
    """Return the revision of a release: a short hash."""
    return _hash(release)


def _hash(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _without(section: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}
