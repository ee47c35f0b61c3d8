"""Decides in which order routers and engines switch between TLS and plaintext connections.

During the switch, engines with TLS and engines with plaintext serve at the same time. Routers are
therefore first replaced with routers that support both. After the switch, they are replaced with
routers that support only the new protocol, because a router that accepts plaintext cannot tell an
engine from an impostor.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ullage_operator.api.spec import EngineTLSSpec, Service
from ullage_operator.conditions.conditions import workload_of
from ullage_operator.manifests.manifests import MIXED_ENGINE_TLS
from ullage_operator.rollout.state import engine_tls_secret, serving_sets

Manifest = Mapping[str, Any]


def are_mixed(services: Iterable[Service], stateful_sets: Iterable[Manifest]) -> bool:
    """Return whether some engines use TLS and others do not.

    Args:
        services: the declared service, and the service with its stable engines.
        stateful_sets: the live StatefulSets of its engines.
    """
    modes = {service.spec.tls.engines is not None for service in services}
    modes |= {engine_tls_secret(item) is not None for item in serving_sets(stateful_sets)}
    return len(modes) > 1


def speak_both(deployment: Manifest | None) -> bool:
    """Return whether a Deployment's routers, or their replacements, support TLS and plaintext."""
    return _kept_tls(deployment) is not None


def _kept_tls(deployment: Manifest | None) -> EngineTLSSpec | None:
    annotations = (deployment or {}).get("metadata", {}).get("annotations") or {}
    try:
        kept = json.loads(annotations[MIXED_ENGINE_TLS])
        fields = (kept["secretName"], kept["routerSecretName"], kept["serverName"])
    except (KeyError, TypeError, ValueError):  # no annotation, or somebody else's
        return None
    return EngineTLSSpec(secret_name=fields[0], router_secret_name=fields[1], server_name=fields[2])


def all_speak_both(deployment: Manifest | None) -> bool:
    """Return whether every live router supports both TLS and plaintext."""
    if deployment is None or not speak_both(deployment):
        return False
    size = int(deployment["spec"].get("replicas", 1))
    return workload_of("router", size, deployment).settled


def with_engine_tls(service: Service, stable: Service, deployment: Manifest | None) -> Service:
    """Return the service with the TLS settings that its routers need to reach all of its engines.

    Args:
        stable: the service with its stable engines.
        deployment: the live Deployment of the routers. Its annotation is the only place that still
            has the TLS settings while the last engines with TLS are terminating.
    """
    engines = service.spec.tls.engines or stable.spec.tls.engines or _kept_tls(deployment)
    tls = msgspec.structs.replace(service.spec.tls, engines=engines)
    spec = msgspec.structs.replace(service.spec, tls=tls)
    return msgspec.structs.replace(service, spec=spec)
