"""What engines run, as far as a change of it is rolled out: the part of a spec that is remembered.

A release is plain data: the image that is really used, and every section of the spec that engine
pods are made of. What is remembered of the stable engines is laid over the present spec, so that
all else in the spec (replicas, routing, tenants) holds for them at once, and a field that a newer
operator knows takes its default instead of looking like a change.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ullage_operator.settings import Settings
from ullage_operator.spec import Service, Spec

Release = dict[str, Any]

SECTIONS = (
    "image",
    "model",
    "device",
    "memory",
    "batching",
    "limits",
    "degrade",
    "allowFaultInjection",
)
"""Not tickets, tls, service accounts and pull secrets: both sides must have the same of these."""
_MERGED = ("model", "memory", "batching", "limits", "degrade", "parallelism", "modelCache")
"""Sections with fields of the API; other maps are filled by people."""
NOT_OF_A_POOL = ("replicas", "autoscaling")


def release_of(service: Service, settings: Settings) -> Release:
    """What the engines of a spec run."""
    spec = _plain(service)
    image = service.spec.image or settings.engine_image
    chosen = {name: spec[name] for name in SECTIONS} | {"image": image}
    pools = {name: _without(pool, NOT_OF_A_POOL) for name, pool in spec["pools"].items()}
    return chosen | {"pools": pools}


def overlaid(wanted: Release, known: Mapping[str, Any]) -> Release:
    """`known`, in the form of `wanted`: what only one of them has does not count.

    Pools that `known` lacks are new and have nothing that could be kept.
    """
    made = {name: _merged(name, wanted[name], known.get(name, wanted[name])) for name in SECTIONS}
    pools = known.get("pools", {})
    kept = {
        name: {
            key: _merged(key, value, pools.get(name, {}).get(key, value))
            for key, value in own.items()
        }
        for name, own in wanted["pools"].items()
    }
    return made | {"pools": kept}


def _merged(name: str, wanted: Any, known: Any) -> Any:
    """A section with the fields that the present spec has; all else as it is known."""
    if name in _MERGED and wanted and known:
        return {field: known.get(field, value) for field, value in wanted.items()}
    return known


def is_same(wanted: Release, known: Mapping[str, Any]) -> bool:
    """Whether nothing was edited: the pools are the same, and no field that both have differs."""
    return wanted["pools"].keys() == known["pools"].keys() and overlaid(wanted, known) == wanted


def changed_pools(wanted: Release, known: Release) -> list[str]:
    """Pools whose engines differ; all where a section that they share does."""
    if any(wanted[name] != known[name] for name in SECTIONS):
        return list(wanted["pools"])
    return [name for name, own in wanted["pools"].items() if own != known["pools"][name]]


def with_release(service: Service, release: Release) -> Service:
    """The service with other engines."""
    spec = _plain(service)
    pools = {name: pool | release["pools"][name] for name, pool in spec["pools"].items()}
    chosen = {name: release[name] for name in SECTIONS}
    made = msgspec.convert(spec | chosen | {"pools": pools}, Spec, dec_hook=_decoded)
    return msgspec.structs.replace(service, spec=made)


def revision_of(release: Mapping[str, Any]) -> str:
    """A short name that changes with the release."""
    text = json.dumps(release, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _plain(service: Service) -> dict[str, Any]:
    """As it is read back from JSON, so that what was kept equals what is kept."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(service.spec, enc_hook=_encoded))
    return made


def _encoded(value: Any) -> Any:
    return int(value) if isinstance(value, int) else float(value)


def _decoded(kind: type[Any], value: Any) -> Any:
    return kind(value)


def _without(section: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}
