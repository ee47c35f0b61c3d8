"""Pod templates of engines and routers: pure builders of plain data.

Both run as an ordinary user without privileges on a read-only root; what they write goes to
emptyDir volumes.
"""

import math
from collections.abc import Mapping
from typing import Any

from ullage_operator import naming
from ullage_operator.configs import digest
from ullage_operator.pools import Placing, Pool
from ullage_operator.quantity import canonical
from ullage_operator.scaling import may_sleep
from ullage_operator.secrets import router_secrets, secret_mounts, secret_volumes
from ullage_operator.settings import Settings
from ullage_operator.spec import Service
from ullage_operator.volumes import config_volume, engine_mounts, engine_volumes, scratch_volume

Manifest = dict[str, Any]

USER = 65532
PRE_STOP_S = 15
"""Until nobody sends new work to a pod that ends, once its address is withdrawn."""
LAST_MARGIN_S = 15
"""For the last messages and the end of the process, after the drain."""
ENGINE_ENV: tuple[Manifest, ...] = (
    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "HF_HOME", "value": f"{naming.CACHE_DIR}/huggingface"},
    # Kernels are compiled once; the home directory cannot be written.
    {"name": "TRITON_CACHE_DIR", "value": f"{naming.CACHE_DIR}/triton"},
)
START_PERIOD_S = 5

DEFAULT_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}
ROUTER_RESOURCES = {
    "requests": {"cpu": "250m", "memory": "256Mi"},
    "limits": {"memory": "1Gi"},
}


def engine_template(
    service: Service, pool_name: str, pool: Pool, config: str, settings: Settings
) -> Manifest:
    runtime = {"runtimeClassName": pool.runtime_class_name} if pool.runtime_class_name else {}
    spec = {
        "serviceAccountName": naming.engine_name(service.name),
        **pod_defaults(service, settings, engine_pre_stop_s(settings)),
        **placement(pool, naming.selector(service.name, naming.ENGINE, pool_name)),
        **runtime,
        "containers": [engine_container(service, pool, settings)],
        "volumes": engine_volumes(service, pool_name, pool),
    }
    meta = metadata(service, naming.ENGINE, pool_name, pool, config)
    return {"metadata": meta, "spec": spec}


def engine_container(service: Service, pool: Pool, settings: Settings) -> Manifest:
    is_secure = service.spec.tls.engines is not None
    failures = math.ceil(pool.start_timeout / START_PERIOD_S)  # until then it fetches and loads
    return {
        "name": naming.ENGINE,
        "image": service.spec.image or settings.engine_image,
        "imagePullPolicy": settings.image_pull_policy,
        # The last lines of a container that ended tell the service's conditions why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-engine"],
        "args": [
            "--config",
            f"{naming.CONFIG_DIR}/{naming.ENGINE_CONFIG}",
            "--engine-id",
            "$(POD_NAME)",
        ],
        "env": [*ENGINE_ENV, *pool.env],
        **({"envFrom": pool.env_from} if pool.env_from else {}),
        "ports": [
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            port("probe", naming.PROBE_PORT),
        ],
        "resources": engine_resources(service, pool),
        "securityContext": container_security(),
        "startupProbe": grpc_probe("readiness", START_PERIOD_S, failures, is_secure),
        "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
        # Lenient: a busy engine is not a dead one.
        "livenessProbe": grpc_probe("liveness", 10, 10, is_secure),
        "lifecycle": {"preStop": {"sleep": {"seconds": engine_pre_stop_s(settings)}}},
        "volumeMounts": engine_mounts(service, pool),
    }


def engine_resources(service: Service, pool: Pool) -> Manifest:
    """The pool's own resources, and its GPUs unless it computes on the CPU.

    GPUs are limits, by which the DCGM exporter, too, tells whose they are.
    """
    resources = amounts(pool.resources)
    if service.spec.device != "cpu":
        resources.setdefault("limits", {})[pool.gpu_resource_name] = str(pool.gpus)
    return resources


def amounts(resources: Mapping[str, Mapping[str, int | str]]) -> Manifest:
    """As the API server stores them, so that what is applied equals what is read."""
    return {
        kind: {name: canonical(amount) for name, amount in by_name.items()}
        for kind, by_name in resources.items()
    }


def router_template(service: Service, config: str, settings: Settings) -> Manifest:
    router, secrets = service.spec.router, router_secrets(service)
    container = {
        "name": naming.ROUTER,
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        # The last lines of a container that ended tell the service's conditions why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-router"],
        "args": ["--config", f"{naming.CONFIG_DIR}/{naming.ROUTER_CONFIG}"],
        "ports": [
            port("http", naming.HTTP_PORT),
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            *probe_ports(service.spec.tls.router is not None),
        ],
        "resources": amounts(router.resources) or ROUTER_RESOURCES,
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
        **pod_defaults(service, settings, PRE_STOP_S),
        "terminationGracePeriodSeconds": grace_s(service, PRE_STOP_S) + held_s(service),
        **placement(router, naming.selector(service.name, naming.ROUTER)),
        "containers": [container],
        "volumes": [
            config_volume(naming.router_name(service.name)),
            scratch_volume("tmp"),
            *secret_volumes(secrets),
        ],
    }
    return {
        "metadata": metadata(service, naming.ROUTER, None, router, config),
        "spec": spec,
    }


def metadata(
    service: Service, component: str, pool_name: str | None, placing: Placing, config: str
) -> Manifest:
    # Without the version: an operator's update must not restart every engine by a label.
    return {
        "labels": placing.pod_labels | naming.selector(service.name, component, pool_name),
        "annotations": placing.pod_annotations | {naming.CONFIG_HASH: digest(config)},
    }


def pod_defaults(service: Service, settings: Settings, pre_stop_s: int) -> Manifest:
    """What pods of both kinds have in common, as Pod Security's restricted profile asks."""
    secrets = [secret.name for secret in service.spec.image_pull_secrets]
    pulled = [{"name": name} for name in dict.fromkeys([*secrets, *settings.image_pull_secrets])]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(service, pre_stop_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"imagePullSecrets": pulled} if pulled else {}),
    }


def placement(placing: Placing, match: dict[str, str]) -> Manifest:
    """Where pods run; `match` are the labels by which they are spread."""
    wanted = {
        "nodeSelector": placing.node_selector,
        "tolerations": placing.tolerations,
        "affinity": placing.affinity,
        "priorityClassName": placing.priority_class_name,
    }
    spread = placing.topology_spread_constraints or [DEFAULT_SPREAD]
    constraints = [{**each, "labelSelector": {"matchLabels": match}} for each in spread]
    given = {name: value for name, value in wanted.items() if value}
    return given | {"topologySpreadConstraints": constraints}


def engine_pre_stop_s(settings: Settings) -> int:
    """Routers know engines by DNS, which withdraws an address late, and tells one that takes its
    place late: until then the engine that ends must serve."""
    return PRE_STOP_S + math.ceil(settings.dns_lag_s)


def grace_s(service: Service, pre_stop_s: int) -> int:
    """Seconds until an ending pod is killed: engines and routers drain for one whole request."""
    return pre_stop_s + math.ceil(service.spec.limits.request_timeout) + LAST_MARGIN_S


def held_s(service: Service) -> int:
    """Seconds that a router may hold a request before it is answered."""
    sleeps = any(map(may_sleep, service.spec.pools.values()))
    return math.ceil(service.spec.routing.wake.timeout) if sleeps else 0


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
