"""Volumes of engine pods and where they are mounted: pure builders of plain data."""

from collections.abc import Mapping
from typing import Any

from ullage_operator import naming
from ullage_operator.pools import ModelCache, Pool
from ullage_operator.quantity import canonical
from ullage_operator.secrets import engine_secrets, secret_mounts, secret_volumes
from ullage_operator.spec import Service

Manifest = dict[str, Any]


def engine_volumes(service: Service, pool_name: str, pool: Pool) -> list[Manifest]:
    return [
        config_volume(naming.pool_name(service.name, pool_name)),
        # In memory: weights there outlive a worker, so that its restart takes seconds.
        memory_volume("run"),
        cache_volume(pool.model_cache),
        scratch_volume("tmp"),
        memory_volume("shm", pool.shm_size),
        *claim_volumes(service),
        *secret_volumes(engine_secrets(service)),
        *map(given_volume, pool.volumes),
    ]


def engine_mounts(service: Service, pool: Pool) -> list[Manifest]:
    return [
        {"name": "config", "mountPath": naming.CONFIG_DIR, "readOnly": True},
        {"name": "run", "mountPath": naming.RUN_DIR},
        {"name": "cache", "mountPath": naming.CACHE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *claim_mounts(service),
        *secret_mounts(engine_secrets(service)),
        *pool.volume_mounts,
    ]


def given_volume(volume: Mapping[str, Any]) -> Manifest:
    """A pool's own volume, with its size as the API server stores it."""
    folder = volume.get("emptyDir", {})
    if "sizeLimit" not in folder:
        return dict(volume)
    return {**volume, "emptyDir": folder | {"sizeLimit": canonical(folder["sizeLimit"])}}


def cache_volume(cache: ModelCache) -> Manifest:
    """Downloads and compiled kernels; shared by pods only where the spec names a place for it."""
    if cache.claim_name:
        return {"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache.host_path:
        return {"name": "cache", "hostPath": {"path": cache.host_path, "type": "Directory"}}
    bound = {} if cache.size_limit is None else {"sizeLimit": canonical(cache.size_limit)}
    return {"name": "cache", "emptyDir": bound}


def config_volume(config_map: str) -> Manifest:
    return {"name": "config", "configMap": {"name": config_map}}


def memory_volume(name: str, size_limit: int | str | None = None) -> Manifest:
    bound = {} if size_limit is None else {"sizeLimit": canonical(size_limit)}
    return {"name": name, "emptyDir": {"medium": "Memory", **bound}}


def scratch_volume(name: str) -> Manifest:
    return {"name": name, "emptyDir": {}}


def claim_of(service: Service) -> str:
    """The claim of a `pvc://claim/path` source, or nothing."""
    scheme, _, rest = service.spec.model.source.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else ""


def claim_volumes(service: Service) -> list[Manifest]:
    claim = claim_of(service)
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return [volume] if claim else []


def claim_mounts(service: Service) -> list[Manifest]:
    claim = claim_of(service)
    mount = {"name": "models", "mountPath": f"{naming.CLAIM_ROOT}/{claim}", "readOnly": True}
    return [mount] if claim else []
