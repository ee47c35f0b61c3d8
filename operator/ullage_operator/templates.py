"""Pod templates of engines and routers: pure builders of plain data.

Both run as an ordinary user without privileges on a read-only root; what they write goes to
emptyDir volumes.
"""

import math
from typing import Any

from ullage_operator import naming
from ullage_operator.configs import digest
from ullage_operator.secrets import (
    engine_secrets,
    router_secrets,
    secret_mounts,
    secret_volumes,
)
from ullage_operator.settings import Settings
from ullage_operator.spec import Pool, Service

Manifest = dict[str, Any]

USER = 65532
PRE_STOP_S = 15
"""Until no router sends new work to a pod that ends."""
LAST_MARGIN_S = 15
"""For the last messages and the end of the process, after the drain."""
START_PERIOD_S = 5
START_FAILURES = 360
"""Half an hour to fetch and load a model."""

ROUTER_RESOURCES = {
    "requests": {"cpu": "250m", "memory": "256Mi"},
    "limits": {"memory": "1Gi"},
}


def engine_template(
    service: Service, pool_name: str, pool: Pool, config: str, settings: Settings
) -> Manifest:
    volumes = [
        config_volume(naming.pool_name(service.name, pool_name)),
        # In memory: weights there outlive a worker, so that its restart takes seconds.
        memory_volume("run"),
        scratch_volume("cache"),
        scratch_volume("tmp"),
        *claim_volumes(service),
        *([memory_volume("shm")] if pool.gpus > 1 else []),
        *secret_volumes(engine_secrets(service)),
    ]
    spec = {
        "serviceAccountName": naming.engine_name(service.name),
        **pod_defaults(service, naming.ENGINE, pool_name),
        **({"nodeSelector": pool.node_selector} if pool.node_selector else {}),
        **({"tolerations": pool.tolerations} if pool.tolerations else {}),
        "containers": [engine_container(service, pool, settings)],
        "volumes": volumes,
    }
    return template(service, naming.ENGINE, pool_name, config, settings, spec)


def engine_container(service: Service, pool: Pool, settings: Settings) -> Manifest:
    is_secure = service.spec.tls.engines is not None
    return {
        "name": naming.ENGINE,
        "image": service.spec.image or settings.engine_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["ullage-engine"],
        "args": [
            "--config",
            f"{naming.CONFIG_DIR}/{naming.ENGINE_CONFIG}",
            "--engine-id",
            "$(POD_NAME)",
        ],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "HF_HOME", "value": f"{naming.CACHE_DIR}/huggingface"},
            # Kernels are compiled once; the home directory cannot be written.
            {"name": "TRITON_CACHE_DIR", "value": f"{naming.CACHE_DIR}/triton"},
        ],
        "ports": [
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            *probe_ports(is_secure),
        ],
        "resources": engine_resources(service, pool),
        "securityContext": container_security(),
        "startupProbe": grpc_probe("readiness", START_PERIOD_S, START_FAILURES, is_secure),
        "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
        # Lenient: a busy engine is not a dead one.
        "livenessProbe": grpc_probe("liveness", 10, 10, is_secure),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "volumeMounts": [
            {"name": "config", "mountPath": naming.CONFIG_DIR, "readOnly": True},
            {"name": "run", "mountPath": naming.RUN_DIR},
            {"name": "cache", "mountPath": naming.CACHE_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
            *claim_mounts(service),
            *([{"name": "shm", "mountPath": "/dev/shm"}] if pool.gpus > 1 else []),
            *secret_mounts(engine_secrets(service)),
        ],
    }


def engine_resources(service: Service, pool: Pool) -> Manifest:
    """The pool's own resources, and its GPUs unless it computes on the CPU.

    Amounts are text, as the API server stores them, so that what is applied equals what is read.
    """
    resources = {
        kind: {name: str(amount) for name, amount in amounts.items()}
        for kind, amounts in pool.resources.items()
    }
    if service.spec.device != "cpu":
        resources.setdefault("limits", {})["nvidia.com/gpu"] = str(pool.gpus)
    return resources


def router_template(service: Service, config: str, settings: Settings) -> Manifest:
    secrets = router_secrets(service)
    container = {
        "name": naming.ROUTER,
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["ullage-router"],
        "args": ["--config", f"{naming.CONFIG_DIR}/{naming.ROUTER_CONFIG}"],
        "ports": [
            port("http", naming.HTTP_PORT),
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            *probe_ports(service.spec.tls.router is not None),
        ],
        "resources": ROUTER_RESOURCES,
        "securityContext": container_security(),
        **router_probes(service.spec.tls.router is not None),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "volumeMounts": [
            {"name": "config", "mountPath": naming.CONFIG_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *secret_mounts(secrets),
        ],
    }
    spec = {
        "serviceAccountName": naming.router_name(service.name),
        **pod_defaults(service, naming.ROUTER),
        "containers": [container],
        "volumes": [
            config_volume(naming.router_name(service.name)),
            scratch_volume("tmp"),
            *secret_volumes(secrets),
        ],
    }
    return template(service, naming.ROUTER, None, config, settings, spec)


def template(
    service: Service,
    component: str,
    pool: str | None,
    config: str,
    settings: Settings,
    spec: Manifest,
) -> Manifest:
    # Without the version: an operator's update must not restart every engine by a label.
    return {
        "metadata": {
            "labels": naming.selector(service.name, component, pool),
            "annotations": {naming.CONFIG_HASH: digest(config)},
        },
        "spec": spec,
    }


def pod_defaults(service: Service, component: str, pool: str | None = None) -> Manifest:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(service),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": naming.selector(service.name, component, pool)},
            }
        ],
    }


def grace_s(service: Service) -> int:
    """Seconds until an ending pod is killed: engines and routers drain for one whole request."""
    return PRE_STOP_S + math.ceil(service.spec.limits.request_timeout) + LAST_MARGIN_S


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def probe_ports(is_secure: bool) -> list[Manifest]:
    return [port("probe", naming.PROBE_PORT)] if is_secure else []


def router_probes(is_secure: bool) -> Manifest:
    """Over HTTP; with TLS on a port of their own, since clients may need a certificate."""
    if is_secure:
        return {
            "startupProbe": grpc_probe("liveness", 1, 60, is_secure),
            "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
            "livenessProbe": grpc_probe("liveness", 10, 6, is_secure),
        }
    return {
        "startupProbe": http_probe("/healthz", 1, 60),
        "readinessProbe": http_probe("/readyz", 2, 2),
        "livenessProbe": http_probe("/healthz", 10, 6),
    }


def grpc_probe(service: str, period_s: int, failures: int, is_secure: bool) -> Manifest:
    number = naming.PROBE_PORT if is_secure else naming.GRPC_PORT
    return {
        "grpc": {"port": number, "service": service},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def http_probe(path: str, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def config_volume(config_map: str) -> Manifest:
    return {"name": "config", "configMap": {"name": config_map}}


def memory_volume(name: str) -> Manifest:
    return {"name": name, "emptyDir": {"medium": "Memory"}}


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
