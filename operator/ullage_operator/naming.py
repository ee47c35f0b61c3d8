"""Names, labels and keys: the only place that spells them."""

from collections.abc import Mapping

GROUP = "serving.ullage.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMService"
PLURAL = "llmservices"

FIELD_MANAGER = "ullage-operator"
SCALE_MANAGER = "ullage-operator-scale"
"""Of replicas that others set."""
CONFIG_HASH = f"{GROUP}/config-hash"
"""Pod annotation; a changed configuration changes it, and so rolls the pods."""
ROLLOUT = f"{GROUP}/rollout"
"""Annotation of an LLMService by which people steer its rollout."""
REVISION = f"{GROUP}/revision"
"""Annotation of a StatefulSet: which revision its pods are to be of."""
POOL_LABEL = f"{GROUP}/pool"
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Which every namespace has, with its name."""

HTTP_PORT = 8000
GRPC_PORT = 9000
METRICS_PORT = 9090
PROBE_PORT = 8081
"""Health without TLS, which the kubelet does not speak; engines tell their headroom there too."""

RUN_DIR = "/run/ullage"
CONFIG_DIR = "/etc/ullage"
KEYS_DIR = "/etc/ullage-keys"
TICKETS_DIR = "/etc/ullage-tickets"
TLS_DIR = "/etc/ullage-tls"
CLIENT_CA_DIR = "/etc/ullage-client-ca"
ENGINE_TLS_DIR = "/etc/ullage-engine-tls"
CACHE_DIR = "/var/cache/ullage"
CLAIM_ROOT = "/models"
"""Where the claim of a `pvc://` source is mounted; the engine looks there."""

ENGINE_CONFIG = "engine.yaml"
ROUTER_CONFIG = "router.yaml"
ROLLOUT_FILE = "rollout.yaml"
"""Beside the router's configuration; read again whenever it changes."""
ROLLOUT_STATE = "state.json"

_CANARY = "-next"
"""Short: with a hash behind it, a StatefulSet's name must fit into 63 characters."""

ROUTER = "router"
ENGINE = "engine"
OPERATOR = "operator"


def router_name(service: str) -> str:
    """The router's Deployment, Service, ConfigMap, ServiceAccount and policies."""
    return f"{service}-router"


def pool_name(service: str, pool: str) -> str:
    """A pool's StatefulSet, headless Service, ConfigMap and disruption budget."""
    return f"{service}-{pool}"


def canary_pool(pool: str) -> str:
    """What a pool's canary is called wherever a pool is.

    No pool's name has a dash, and none is `next`: pool `next` of service `chat-single` would have
    the objects of the canary of `chat`'s pool `single`.
    """
    return f"{pool}{_CANARY}"


def is_canary_pool(pool: str) -> bool:
    return pool.endswith(_CANARY)


def rollout_name(service: str) -> str:
    """The ConfigMap that remembers how far a rollout has come."""
    return f"{service}-rollout"


def engine_name(service: str) -> str:
    """What all engine pods share: ServiceAccount, NetworkPolicy and PodMonitor."""
    return f"{service}-engine"


def selector(service: str, component: str, pool: str | None = None) -> dict[str, str]:
    """Labels that select the pods of a component; they never change."""
    labels = {
        "app.kubernetes.io/name": "ullage",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/component": component,
    }
    return labels | ({POOL_LABEL: pool} if pool else {})


def labels(service: str, component: str, version: str, pool: str | None = None) -> dict[str, str]:
    """Labels of every object of a component."""
    return selector(service, component, pool) | {
        "app.kubernetes.io/version": version,
        "app.kubernetes.io/part-of": "ullage",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def operator_selector() -> dict[str, str]:
    """Labels of the operator's own pods, as the chart sets them, whatever they are called."""
    return {
        "app.kubernetes.io/part-of": "ullage",
        "app.kubernetes.io/component": OPERATOR,
    }


def owned_selector() -> str:
    """Label selector of everything that the operator made."""
    return f"app.kubernetes.io/managed-by={FIELD_MANAGER}"


def instance_selector(service: str) -> str:
    """Label selector of a service's objects and pods, of every component."""
    return f"app.kubernetes.io/name=ullage,app.kubernetes.io/instance={service}"


def pod_selector() -> str:
    """Label selector of the pods of all services."""
    return f"app.kubernetes.io/name=ullage,app.kubernetes.io/component in ({ENGINE},{ROUTER})"


def selector_text(match: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(match.items()))
