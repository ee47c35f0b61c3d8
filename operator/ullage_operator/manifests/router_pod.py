"""Builds the pod template of routers."""

import math
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.pod_fields import (
    PRE_STOP_S,
    account_name,
    completed,
    container_security,
    grace_s,
    grpc_probe,
    http_probe,
    killing,
    metadata,
    pod_defaults,
    port,
)
from ullage_operator.manifests.resources import router_resources
from ullage_operator.manifests.volumes import (
    config_volume,
    files_mounts,
    files_volumes,
    prompts_mounts,
    prompts_volumes,
    router_secrets,
    scratch_volume,
    secret_mounts,
    secret_volumes,
)
from ullage_operator.policy.pool_sizes import may_sleep

Manifest = dict[str, Any]


def router_template(service: Service, config: str, settings: Settings) -> Manifest:
    """Return the routers' pod template: the operator's fields merged over the spec's template."""
    own = own_router(service, config, settings)
    return completed(service.spec.router.pod_template, own, settings)


def own_router(service: Service, config: str, settings: Settings) -> Manifest:
    """Return the pod template fields that the operator sets for routers."""
    secrets = router_secrets(service)
    container = {
        "name": naming.ROUTER,
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        # The service's conditions quote the last log lines of a container that ended.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-router"],
        "args": ["--config", f"{naming.CONFIG_DIR}/{naming.ROUTER_CONFIG}"],
        "ports": [
            port("http", naming.HTTP_PORT),
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            *probe_ports(service.spec.tls.router is not None),
        ],
        "resources": router_resources(service),
        "securityContext": container_security(),
        **router_probes(service.spec.tls.router is not None),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "volumeMounts": [
            {"name": "config", "mountPath": naming.CONFIG_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *files_mounts(service),
            *prompts_mounts(service),
            *secret_mounts(secrets),
        ],
    }
    spec = {
        "serviceAccountName": account_name(service, naming.router_name(service.name)),
        **pod_defaults(service, settings, PRE_STOP_S),
        "terminationGracePeriodSeconds": grace_s(service, PRE_STOP_S) + held_s(service),
        "containers": [container],
        "volumes": [
            config_volume(naming.router_name(service.name)),
            scratch_volume("tmp"),
            *files_volumes(service),
            *prompts_volumes(service),
            *secret_volumes(service, secrets),
        ],
    }
    match = naming.selector(service.name, naming.ROUTER)
    return {"metadata": metadata(match, config), "spec": spec}


def held_s(service: Service) -> int:
    """Return the seconds for which a router may hold a request while a sleeping pool wakes."""
    sleeps = any(map(may_sleep, service.spec.pools.values()))
    return math.ceil(service.spec.routing.wake.timeout) if sleeps else 0


def probe_ports(is_secure: bool) -> list[Manifest]:
    return [port("probe", naming.PROBE_PORT)] if is_secure else []


def router_probes(is_secure: bool) -> Manifest:
    """Return the probes of a router.

    With TLS, the probes use gRPC on a separate port, because the serving ports may require client
    certificates.
    """
    if is_secure:
        return {
            "startupProbe": killing(grpc_probe("liveness", 1, 60, is_secure)),
            "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
            "livenessProbe": killing(grpc_probe("liveness", 10, 6, is_secure)),
        }
    return {
        "startupProbe": killing(http_probe("/healthz", 1, 60)),
        "readinessProbe": http_probe("/readyz", 2, 2),
        "livenessProbe": killing(http_probe("/healthz", 10, 6)),
    }
