"""Builds the pod templates of engines, and of followers if an engine spans several pods."""

import math
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.engine_choice import engine_image
from ullage_operator.manifests.engine_env import ENGINE_ENV, group_env, s3_env, user_env, vllm_env
from ullage_operator.manifests.pod_fields import (
    PRE_STOP_S,
    account_name,
    completed,
    container_security,
    grpc_probe,
    http_probe,
    killing,
    metadata,
    pod_defaults,
    port,
)
from ullage_operator.manifests.resources import engine_resources
from ullage_operator.manifests.volumes import (
    KV_VOLUME,
    engine_mounts,
    engine_secrets,
    engine_volumes,
)

Manifest = dict[str, Any]

START_PERIOD_S = 5
"""Seconds between startup probes."""
FOLLOWER_START_S = 120
"""Startup timeout of a follower's process in seconds (short, because it imports few modules)."""


def engine_template(
    service: Service, pool_name: str, pool: PoolSpec, config: str, settings: Settings
) -> Manifest:
    """Return the engines' pod template: the operator's fields merged over the spec's template."""
    own = own_engine(service, pool_name, pool, config, settings)
    return completed(pool.pod_template, own, settings)


def own_engine(
    service: Service, pool_name: str, pool: PoolSpec, config: str, settings: Settings
) -> Manifest:
    """Return the pod template fields that the operator sets for engines."""
    spec = {
        "serviceAccountName": account_name(service, naming.engine_name(service.name)),
        **pod_defaults(service, settings, engine_pre_stop_s(settings)),
        "containers": [engine_container(service, pool, settings)],
        "volumes": engine_volumes(service, pool_name, pool),
        **claims_of_pods(pool),
    }
    match = naming.selector(service.name, naming.ENGINE, pool_name)
    return {"metadata": metadata(match, config), "spec": spec}


def engine_container(service: Service, pool: PoolSpec, settings: Settings) -> Manifest:
    """Return the manifest of an engine's container."""
    # The kubelet's probes support neither the service's TLS nor that of a mesh.
    is_secure = service.spec.tls.engines is not None or bool(settings.mesh)
    # The startup probe covers the time in which the engine fetches and loads its model.
    failures = math.ceil(pool.start_timeout / START_PERIOD_S)

    return {
        "name": naming.ENGINE,
        "image": engine_image(service.spec, settings),
        "imagePullPolicy": settings.image_pull_policy,
        # The service's conditions quote the last log lines of a container that ended.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-engine"],
        "args": [
            "--config",
            f"{naming.CONFIG_DIR}/{naming.ENGINE_CONFIG}",
            "--engine-id",
            "$(POD_NAME)",
        ],
        "env": [
            *ENGINE_ENV,
            *user_env(service, pool, settings),
            *group_env(pool),
            *s3_env(service, pool),
            *vllm_env(service, pool, settings),
        ],
        "ports": [
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            port("probe", naming.PROBE_PORT),
        ],
        "resources": engine_resources(service, pool, settings) | claims_of_container(pool),
        "securityContext": container_security(),
        "startupProbe": killing(grpc_probe("readiness", START_PERIOD_S, failures, is_secure)),
        "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
        # Liveness is lenient, because a busy engine may answer late.
        "livenessProbe": killing(grpc_probe("liveness", 10, 10, is_secure)),
        "lifecycle": {"preStop": {"sleep": {"seconds": engine_pre_stop_s(settings)}}},
        "volumeMounts": engine_mounts(service, pool),
    }


def claims_of_pods(pool: PoolSpec) -> Manifest:
    """Return the resourceClaims of a pool's pods (empty if they use resource limits instead)."""
    claims = [
        {"name": each.name, "resourceClaimTemplateName": each.resource_claim_template_name}
        for each in pool.resource_claims
    ]
    return {"resourceClaims": claims} if claims else {}


def claims_of_container(pool: PoolSpec) -> Manifest:
    """Return the pod's resource claims that the engine's container uses."""
    claims = [
        {"name": each.name, **({"request": each.request} if each.request else {})}
        for each in pool.resource_claims
    ]
    return {"claims": claims} if claims else {}


def follower_template(
    service: Service, pool_name: str, pool: PoolSpec, config: str, settings: Settings
) -> Manifest:
    """Return the pod template of followers, which run the vLLM workers of a multi-pod engine.

    A follower runs a worker instead of the server, and has its own probes. It has no serving ports,
    no Secrets and no KV file tier.
    """
    leader = own_engine(service, pool_name, pool, config, settings)
    [container] = leader["spec"]["containers"]
    of_server = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
    of_leaders = {KV_VOLUME, *(secret.volume for secret in engine_secrets(service))}

    leaders = naming.pool_name(service.name, naming.group_pool(pool_name))
    host = (
        f"{naming.pool_name(service.name, pool_name)}-{{group}}.{leaders}.{service.namespace}.svc"
    )
    index = "metadata.labels['apps.kubernetes.io/pod-index']"

    follower = {key: value for key, value in container.items() if key not in of_server} | {
        "command": ["python", "-m", "ullage_engine.vllm_worker"],
        "args": [
            "--follow",
            "--config",
            f"{naming.CONFIG_DIR}/{naming.ENGINE_CONFIG}",
            "--index",
            "$(POD_INDEX)",
            "--leader",
            host,
        ],
        "env": [
            {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            *container["env"],
        ],
        "volumeMounts": [m for m in container["volumeMounts"] if m["name"] not in of_leaders],
        **follower_probes(),
    }

    match = naming.selector(service.name, naming.FOLLOWER, naming.group_pool(pool_name))
    volumes = [v for v in leader["spec"]["volumes"] if v["name"] not in of_leaders]
    spec = leader["spec"] | {"containers": [follower], "volumes": volumes}
    own = {"metadata": metadata(match, config), "spec": spec}
    return completed(pool.pod_template, own, settings)


def engine_pre_stop_s(settings: Settings) -> int:
    """Return the seconds for which a terminating engine continues to serve.

    Routers discover engines through DNS, which lags behind when an engine terminates and when its
    replacement becomes ready.
    """
    return PRE_STOP_S + math.ceil(settings.dns_lag_s)


def follower_probes() -> Manifest:
    """Return the port and probes of a follower.

    A follower is ready while all pods of its engine exist and are working. A follower that hangs is
    killed.
    """
    failures = math.ceil(FOLLOWER_START_S / START_PERIOD_S)
    return {
        "ports": [port("probe", naming.PROBE_PORT)],
        "startupProbe": killing(http_probe("/healthz", START_PERIOD_S, failures, "probe")),
        "readinessProbe": http_probe("/readyz", 2, 2, "probe"),
        "livenessProbe": killing(http_probe("/healthz", 10, 6, "probe")),
    }
