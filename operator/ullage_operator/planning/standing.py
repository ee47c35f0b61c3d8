"""Chooses which spec the operator applies: the declared one or the last valid one.

An invalid edit has no effect. The operator reports the invalid fields and keeps scaling, waking and
healing the service according to the last valid spec. That spec is saved in the ConfigMap that
stores the state of the rollout, with hashes instead of the values of environment variables.

Services managed by an older operator may have no saved spec. The operator then only changes the
number of pods, based on the autoscaling fields that it can read.
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import starmap
from typing import Any

from ullage_operator.api import naming, schema
from ullage_operator.api.bases import NO_BASES, Bases
from ullage_operator.api.errors import InvalidManifest, Problem
from ullage_operator.api.parsing import parse_filled, parse_stored, service_of, to_spec
from ullage_operator.api.renames import dropped_fields, remedy, upgraded
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service, Spec
from ullage_operator.planning.observed import LiveObject, Manifest, ObjectKey, Observed, key_of
from ullage_operator.planning.plan import ServicePlan, plan, plan_sizes
from ullage_operator.policy.pool_sizes import live_replicas
from ullage_operator.rollout.sealing import sealed_section, unsealed_section

_logger = logging.getLogger(__name__)

_SEALED = ("pools", "router")
"""Sections of a spec whose environment variables are hashed in the kept spec."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Declared:
    """A parsed service, or the problems that prevent its spec from being applied."""

    service: Service | None
    """The parsed service, or None if its spec cannot be applied."""
    problems: tuple[Problem, ...] = ()
    """Problems that prevent the operator from applying the spec."""
    filled: tuple[str, ...] = ()
    """Fields for which the cluster's installed CRD has no default."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The service in the form in which the operator applies it.

    If the declared service is invalid, its spec is replaced with the last valid one, or with one
    that is reconstructed from the live objects.
    """

    service: Service
    is_partial: bool = False
    """Whether only the sizes of pools are known, so that everything else stays unchanged."""


def read(manifest: Mapping[str, Any], settings: Settings, bases: Bases = NO_BASES) -> Declared:
    """Parse a declared service, and check that the operator can plan it.

    Args:
        bases: the base specs in the service's namespace that the service refers to.
    """
    if dropped := dropped_fields(manifest):
        return Declared(None, tuple(starmap(_dropped, dropped.items())))
    try:
        service, filled = parse_filled(manifest, bases)
        plan(service, Observed(now=_EPOCH), settings)
    except InvalidManifest as error:
        return Declared(None, error.problems)
    except Exception as error:
        # An unforeseen error must not stop the operator from carrying out the kept spec.
        _logger.exception("a spec passed all checks but cannot be planned")
        text = f"cannot be carried out: {error!r}; correct the last edit"
        return Declared(None, (Problem("spec", text),))
    return Declared(service, filled=tuple(filled))


def _dropped(path: str, value: Any) -> Problem:
    advice = remedy(path, value)
    return Problem(path, f"was dropped by the API server; {advice}, and apply the manifest again")


def standing(
    manifest: Mapping[str, Any], declared: Declared, observed: Observed, settings: Settings
) -> Standing | None:
    """Return the service with the spec to reconcile, or None if there is none.

    A valid declared spec takes precedence. Otherwise, the saved spec is used. If that is unusable,
    the live pools are only resized.
    """
    if declared.service:
        return Standing(declared.service)
    kept = _kept(manifest, observed)

    # A newer operator may refuse a kept spec, and the value of a variable may be gone with the pods
    # that had it.
    with contextlib.suppress(InvalidManifest, KeyError):
        spec = to_spec(_unsealed(kept, manifest, observed))
        service = service_of(manifest["metadata"], spec)
        plan(service, Observed(now=_EPOCH), settings)
        return Standing(service)

    pools = _live_pools(manifest, observed)
    if not pools:
        return None
    with contextlib.suppress(InvalidManifest, KeyError):
        spec = to_spec(_without_templates(kept))
        return Standing(service_of(manifest["metadata"], spec), is_partial=True)
    return Standing(_salvaged(manifest, pools, observed), is_partial=True)


def plan_standing(stands: Standing, observed: Observed, settings: Settings) -> ServicePlan:
    """Return the plan for the spec that the operator applies."""
    if stands.is_partial:
        return plan_sizes(stands.service, observed, settings)
    return _with_kept_spec(plan(stands.service, observed, settings), stands.service)


def _with_kept_spec(planned: ServicePlan, service: Service) -> ServicePlan:
    """Return a plan that also saves the service's spec next to the state of its rollout."""
    key = ObjectKey("ConfigMap", naming.rollout_name(service.name))
    kept = {naming.KEPT_SPEC: dump(service.spec)}
    objects = (
        {**item, "data": item["data"] | kept} if key_of(item) == key else item
        for item in planned.apply
    )
    return replace(planned, apply=tuple(objects))


def dump(spec: Spec) -> str:
    """Serialise a spec as text for a ConfigMap.

    The values of environment variables are replaced with hashes. They may be secrets, and more
    people may be allowed to read ConfigMaps than services.
    """
    document = to_api(spec)
    document |= {name: sealed_section(document[name]) for name in _SEALED}
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _kept(manifest: Mapping[str, Any], observed: Observed) -> dict[str, Any]:
    """Return the saved spec, or an empty dict if none was saved.

    Fields that were added by a newer CRD get their defaults.
    """
    name = naming.rollout_name(manifest["metadata"]["name"])
    data = observed.objects.get(ObjectKey("ConfigMap", name), {}).get("data") or {}
    definition = schema.load_schema()["properties"]["spec"]
    try:
        kept = json.loads(data.get(naming.KEPT_SPEC, ""))
    except ValueError:
        return {}
    if not isinstance(kept, dict):
        return {}
    kept = upgraded(kept)
    schema.fill(definition, kept)
    return kept


def _unsealed(
    kept: Mapping[str, Any], manifest: Mapping[str, Any], observed: Observed
) -> dict[str, Any]:
    """Return the saved spec, replacing hashes with the values of environment variables.

    Raises:
        KeyError: the value for a hash is in neither the declared spec nor a live workload.
    """
    workloads = (
        item for key, item in observed.objects.items() if key.kind in ("Deployment", "StatefulSet")
    )
    sources = [manifest.get("spec"), *workloads]
    return {**kept, **{name: unsealed_section(kept[name], sources) for name in _SEALED}}


def _live_pools(manifest: Mapping[str, Any], observed: Observed) -> dict[str, LiveObject]:
    """Return the StatefulSets of stable engines, by pool."""
    service = manifest["metadata"]["name"]
    pools = {}
    for key, item in observed.objects.items():
        pool = str((item["metadata"].get("labels") or {}).get(naming.POOL_LABEL, ""))
        if key.kind == "StatefulSet" and key.name == naming.pool_name(service, pool):
            pools[pool] = item
    return {pool: item for pool, item in pools.items() if naming.stable_pool(pool) == pool}


def _without_templates(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved spec without its pod templates, which do not affect the sizes of pools.

    Raises:
        KeyError: no spec was saved.
    """
    bare: dict[str, Any] = {"podTemplate": {}}
    pools = {name: pool | bare for name, pool in kept["pools"].items()}
    return {**kept, "pools": pools, "router": kept["router"] | bare}


_READ_ANYHOW = (("stop",), ("tls",), ("healing",), ("router", "replicas"))
"""Paths to spec fields that determine how the operator connects to and handles live pods."""


def _salvaged(
    manifest: Mapping[str, Any], pools: Mapping[str, LiveObject], observed: Observed
) -> Service:
    """Reconstruct a service from its live objects, so that planning leaves them unchanged.

    The result has the live pools with their live sizes. Autoscaling and healing come from whichever
    fields of the declared spec are readable.
    """
    metadata = manifest["metadata"]
    paths: list[Sequence[str]] = [*_READ_ANYHOW]
    paths += [("pools", pool, "autoscaling") for pool in pools]
    spec: Manifest = {
        "model": {"source": "file:///unread", "name": metadata["name"]},
        "pools": {
            pool: {"role": role} | _size_of(metadata["name"], pool, observed)
            for pool, role in _roles_of(manifest, pools).items()
        },
    }
    for path in paths:
        spec = _with_readable(metadata, spec, path, _at(manifest.get("spec"), path))
    return parse_stored({"metadata": metadata, "spec": spec})


def _roles_of(manifest: Mapping[str, Any], pools: Iterable[str]) -> dict[str, str]:
    """Return a role for each live pool.

    A pool gets its declared role if that role is readable and no other pool has it. All remaining
    pools get the role Overflow. If that would leave only Overflow pools, the first one becomes
    Standard.
    """
    roles: dict[str, str] = {}
    for pool in pools:
        role = _at(manifest.get("spec"), ("pools", pool, "role"))
        is_free = role in ("Standard", "Large") and role not in roles.values()
        roles[pool] = role if is_free else "Overflow"
    if set(roles.values()) == {"Overflow"}:
        roles[next(iter(roles))] = "Standard"
    return roles


def _size_of(service: str, pool: str, observed: Observed) -> Manifest:
    """Return a pool's replicas, and the nodes and GPUs per engine, from its StatefulSets."""
    names = (naming.pool_name(service, each) for each in (pool, naming.group_pool(pool)))
    keys = (ObjectKey("StatefulSet", name) for name in names)
    leaders, followers = (live_replicas(observed.objects.get(key)) or 0 for key in keys)
    nodes = followers // leaders + 1 if leaders else 1
    return {"replicas": leaders, "nodes": nodes, "gpus": nodes}


def _with_readable(
    metadata: Mapping[str, Any], spec: Manifest, path: Sequence[str], value: Any
) -> Manifest:
    """Return a spec in which the value at a path is replaced with the declared value.

    If the value as a whole would make the spec invalid, only its valid fields are copied.

    Args:
        metadata: the metadata of the service, which parsing requires.
        spec: the spec to change.
        path: the path of the value in the spec.
        value: the declared value, or None to leave the spec unchanged.
    """
    if value is None:
        return spec
    candidate = _replaced(spec, path, value)
    try:
        parse_stored({"metadata": metadata, "spec": candidate})
        return candidate
    except (InvalidManifest, ValueError):
        pass

    fields = _fields_at(path)
    for name, item in value.items() if isinstance(value, Mapping) else ():
        if name in fields:
            spec = _with_readable(metadata, spec, (*path, name), item)
    return spec


def _fields_at(path: Iterable[str]) -> Mapping[str, Any]:
    """Return the fields that the CRD defines at a path of a spec."""
    section: Mapping[str, Any] = schema.load_schema()["properties"]["spec"]
    for name in path:
        section = schema.fields(section, {name: None}).get(name, {})
    properties: Mapping[str, Any] = section.get("properties", {})
    return properties


def _replaced(section: Any, path: Sequence[str], value: Any) -> Manifest:
    """Return a copy of a section with the value at a path replaced."""
    inner = section if isinstance(section, Mapping) else {}
    first, *rest = path
    return {**inner, first: _replaced(inner.get(first), rest, value) if rest else value}


def _at(section: Any, path: Iterable[str]) -> Any:
    for name in path:
        section = section.get(name) if isinstance(section, Mapping) else None
    return section
