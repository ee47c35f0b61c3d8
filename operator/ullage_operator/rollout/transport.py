"""In which order TLS towards engines is turned on or off: pure.

Engines that speak TLS and engines in plaintext serve at the same time while one kind replaces the
other. Routers are replaced before, by ones that speak both, and afterwards, by ones that speak the
new one alone: a router that also takes plaintext cannot tell an engine from a stranger.
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
    """Return whether some engines speak TLS and others do not.

    Args:
        services: a service as it is declared and as its stable engines are.
        stateful_sets: live ones of its engines.
    """
    modes = {service.spec.tls.engines is not None for service in services}
    modes |= {engine_tls_secret(item) is not None for item in serving_sets(stateful_sets)}
    return len(modes) > 1


def speak_both(deployment: Manifest | None) -> bool:
    """Return whether the routers of a Deployment, or those that replace them, speak both."""
    return _kept_tls(deployment) is not None


def _kept_tls(deployment: Manifest | None) -> EngineTLSSpec | None:
    annotations = (deployment or {}).get("metadata", {}).get("annotations") or {}
    try:
        kept = json.loads(annotations[MIXED_ENGINE_TLS])
        fields = (kept["secretName"], kept["routerSecretName"], kept["serverName"])
    except (KeyError, TypeError, ValueError):  # none, or not the operator's
        return None
    return EngineTLSSpec(secret_name=fields[0], router_secret_name=fields[1], server_name=fields[2])


def all_speak_both(deployment: Manifest | None) -> bool:
    """Return whether every router speaks both: none is left that does not."""
    if deployment is None or not speak_both(deployment):
        return False
    size = int(deployment["spec"].get("replicas", 1))
    return workload_of("router", size, deployment).settled


def with_engine_tls(service: Service, stable: Service, deployment: Manifest | None) -> Service:
    """Return a service whose routers have what TLS towards all of its engines takes.

    Args:
        stable: the service with its stable engines.
        deployment: live one of the routers; while the last engines with TLS end, nothing else
            knows how to speak it.
    """
    engines = service.spec.tls.engines or stable.spec.tls.engines or _kept_tls(deployment)
    tls = msgspec.structs.replace(service.spec.tls, engines=engines)
    spec = msgspec.structs.replace(service.spec, tls=tls)
    return msgspec.structs.replace(service, spec=spec)
