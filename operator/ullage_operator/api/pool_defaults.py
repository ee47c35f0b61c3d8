"""Defaults of pools that the CRD cannot express, because they depend on other fields."""

from collections.abc import Mapping
from typing import Any, get_args

from ullage_common.config.router import PoolRole

_ROLES: tuple[PoolRole, ...] = get_args(PoolRole)
"""Pool roles in order of preference."""


def with_pool_defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with the replicas, memory and GPUs of every pool filled in.

    The result lists the pools in order of preference.
    """
    memory = spec.get("memory", {})
    names = ordered_pools(spec)
    complete = {}
    for name in names:
        pool = spec["pools"][name]
        takes_gpus = role_of(pool) == "large" and device_of(spec) != "cpu"
        complete[name] = (
            {"replicas": spec["replicas"] if name == names[0] else 1}
            | with_pod_template(pool)
            | _rank_grid(pool, 4 if takes_gpus else 1)
            | {"memory": memory | pool.get("memory", {})}
        )
    router = with_pod_template(spec.get("router", {}))
    return {**spec, "router": router, "pools": complete}


def ordered_pools(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of a spec's pools in order of preference. The first pool is the default."""
    pools = spec.get("pools", {})
    return sorted(pools, key=lambda name: (_ROLES.index(role_of(pools[name])), name))


def role_of(pool: Mapping[str, Any]) -> PoolRole:
    """Return a pool's role, spelled as in configuration files."""
    role = str(pool.get("role", _ROLES[0])).lower()
    return next((each for each in _ROLES if each == role), _ROLES[0])


def with_pod_template(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pool or router section after removing empty values from its pod template.

    Templates that differ only in empty values therefore yield the same release, and trigger no
    rollout.
    """
    given = section.get("podTemplate")
    if not given:
        return dict(section)
    metadata = {name: each for name, each in given.get("metadata", {}).items() if each}
    parts = (given | {"metadata": metadata}).items()
    return {**section, "podTemplate": {name: each for name, each in parts if each}}


def device_of(spec: Mapping[str, Any]) -> str:
    return str(spec.get("device", "")).lower()


def _rank_grid(pool: Mapping[str, Any], default_gpus: int) -> dict[str, Any]:
    """Return a pool's GPU count and parallelism, deriving whichever is missing from the other.

    The CRD has no default for these fields, because one schema covers pools of every name.
    """
    parallelism = pool.get("parallelism")
    if parallelism is None:
        gpus = pool.get("gpus", default_gpus)
        side = 2 if gpus == 4 else 1
        return {"gpus": gpus, "parallelism": {"tensor": side, "pipeline": side}}
    return {"gpus": pool.get("gpus", parallelism["tensor"] * parallelism["pipeline"])}
