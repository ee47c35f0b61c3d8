"""Names, labels and annotations of a service's objects, and the kinds of Kubernetes objects.

No other module spells these names.
"""

from collections.abc import Mapping
from typing import NamedTuple

GROUP = "serving.ullage.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMService"
PLURAL = "llmservices"

FIELD_MANAGER = "ullage-operator"
SCALE_MANAGER = "ullage-operator-scale"
"""Field manager of replicas that others set."""
CONFIG_HASH = f"{GROUP}/config-hash"
"""Pod annotation: a hash of the configuration. A changed hash replaces the pods."""
ROLLOUT = f"{GROUP}/rollout"
"""Annotation of an LLMService with a command to its rollout."""
REVISION = f"{GROUP}/revision"
"""Annotation of a StatefulSet: the revision that its pods should have."""
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Annotation of a StatefulSet or a Deployment: a hash of the applied pod template.

The live template differs, because the API server adds defaults.
"""
SHARED_HASH = f"{GROUP}/shared-hash"
"""Annotation of a StatefulSet: a hash of the fields of engine pods outside their release."""
CANARY_PLACES = f"{GROUP}/canary-places"
"""Annotation of a StatefulSet: the number of its engines that a canary replaces.

They are missing from its replicas, but still belong to the pool.
"""
STOPPED = f"{GROUP}/stopped"
"""Annotation of a StatefulSet that `spec.stop` has scaled to zero.

Its number of pods is therefore not the number of engines that the pool should have later.
"""
GROUP_REVISION = f"{GROUP}/group-revision"
"""Pod annotation: a hash of the templates of an engine's pods. Only pods with equal hashes join."""
POOL_LABEL = f"{GROUP}/pool"
FETCH_CLAIM = f"{GROUP}/fetch-claim"
"""Annotation of a Job: the claim that it fetches a model into."""
FETCH_SOURCE = f"{GROUP}/fetch-source"
"""Annotation of a Job: the model that it fetches."""
FETCH_STORE = f"{GROUP}/fetch-store"
"""Annotation of a Job: a digest of the bucket's endpoint (absent if the source needs none)."""
STATEFUL_SET_REVISION = "controller-revision-hash"
"""Label of a StatefulSet's pods with the revision that Kubernetes created them from."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label with the namespace's name, which every namespace has."""

HTTP_PORT = 8000
GRPC_PORT = 9000
METRICS_PORT = 9090
PROBE_PORT = 8081
"""Port of the kubelet's health checks, without TLS. Engines also report headroom there."""

RUN_DIR = "/run/ullage"
CONFIG_DIR = "/etc/ullage"
KEYS_DIR = "/etc/ullage-keys"
TICKETS_DIR = "/etc/ullage-tickets"
TLS_DIR = "/etc/ullage-tls"
CLIENT_CA_DIR = "/etc/ullage-client-ca"
ENGINE_TLS_DIR = "/etc/ullage-engine-tls"
STEPS_DIR = "/etc/ullage-steps"
"""Folder of the cascade's steps, with a folder by index for each: `0-tls` and `0-key`."""
ADAPTERS_DIR = "/etc/ullage-adapters"
CACHE_DIR = "/var/cache/ullage"
KV_DIR = "/var/lib/ullage/kv"
"""Default folder of the KV file tier."""
MODEL_IMAGE_DIR = "/model-image"
CLAIM_ROOT = "/models"
"""Folder where the claim of a `pvc://` source is mounted and the engine looks for the model."""

ENGINE_CONFIG = "engine.yaml"
ADAPTERS_FILE = "adapters.yaml"
"""File with the LoRA adapters, which all engines read again whenever it changes."""
ROUTER_CONFIG = "router.yaml"
ROLLOUT_FILE = "rollout.yaml"
"""File next to the router's configuration, which routers read again whenever it changes."""
ROLLOUT_STATE = "state.json"
KEPT_SPEC = "spec.json"
"""File next to the rollout's state, with the last valid spec."""

_CANARY = "-next"
"""Suffix of a canary's pool.

It is short, because the name of a StatefulSet and a hash together may have 63 characters.
"""

_GROUP = "-group"
"""Suffix of the followers' pool, for engines that span several pods."""

ROUTER = "router"
ENGINE = "engine"
FOLLOWER = "follower"
"""A pod without a server, of an engine that spans several pods."""
FETCHER = "fetcher"
"""A pod of a Job that fetches a model into a shared claim."""
OPERATOR = "operator"


def router_name(service: str) -> str:
    """Return the name of the router's Deployment, Service, ConfigMap and further objects."""
    return f"{service}-router"


def pool_name(service: str, pool: str) -> str:
    """Return the name of a pool's StatefulSet, Service, ConfigMap and PodDisruptionBudget."""
    return f"{service}-{pool}"


def canary_pool(pool: str) -> str:
    """Return the name of a pool's canary, which takes the pool's place in names and labels.

    The name is unambiguous because no pool has a dash in its name or is called `next`. Otherwise
    pool `next` of service `chat-single` would share object names with the canary of pool `single`
    of `chat`.
    """
    return f"{pool}{_CANARY}"


def group_pool(pool: str) -> str:
    """Return the pool name of the followers of a pool or its canary.

    The Service by which followers find their leaders, and the NetworkPolicy between them, have this
    name too.
    """
    return f"{pool}{_GROUP}"


def stable_pool(pool: str) -> str:
    """Return the pool of the spec to which a pool, its followers or its canary belong."""
    return pool.removesuffix(_GROUP).removesuffix(_CANARY)


def is_canary_pool(pool: str) -> bool:
    return pool.removesuffix(_GROUP).endswith(_CANARY)


def leaders_name(group: str) -> str:
    """Return the name of the StatefulSet of the leaders whose followers are in `group`."""
    return group.removesuffix(_GROUP)


def rollout_name(service: str) -> str:
    """Return the name of the ConfigMap with the state of the rollout."""
    return f"{service}-rollout"


def engine_name(service: str) -> str:
    """Return the name of the objects that all engine pods share.

    They are the ServiceAccount, the NetworkPolicy, the PodMonitor, and the ConfigMap with the LoRA
    adapters.
    """
    return f"{service}-engine"


def fetcher_name(service: str) -> str:
    """Return the name of the NetworkPolicy for pods that fetch models into shared claims."""
    return f"{service}-fetcher"


def fetch_name(service: str, digest: str) -> str:
    """Return the name of a Job that fetches a model into a shared claim."""
    return f"{service}-fetch-{digest}"


def service_selector(service: str) -> dict[str, str]:
    """Return the labels that select the pods of a service. These labels never change."""
    return {"app.kubernetes.io/name": "ullage", "app.kubernetes.io/instance": service}


def selector(service: str, component: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels that select the pods of a component. These labels never change."""
    labels = service_selector(service) | {"app.kubernetes.io/component": component}
    return labels | ({POOL_LABEL: pool} if pool else {})


def labels(service: str, component: str, version: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels of every object of a component."""
    return selector(service, component, pool) | {
        "app.kubernetes.io/version": version,
        "app.kubernetes.io/part-of": "ullage",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def operator_selector() -> dict[str, str]:
    """Return the labels of the operator's own pods, which its chart sets."""
    return {
        "app.kubernetes.io/part-of": "ullage",
        "app.kubernetes.io/component": OPERATOR,
    }


def owned_selector() -> str:
    """Return the label selector of all objects that the operator created."""
    return f"app.kubernetes.io/managed-by={FIELD_MANAGER}"


def pod_selector() -> str:
    """Return the label selector of the pods of all services."""
    components = ",".join((ENGINE, FETCHER, FOLLOWER, ROUTER))
    return f"app.kubernetes.io/name=ullage,app.kubernetes.io/component in ({components})"


def selector_text(match: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(match.items()))


MONITORING_API = "monitoring.coreos.com/v1"
GATEWAY_API = "gateway.networking.k8s.io/v1"
HTTP_ROUTE = "HTTPRoute"
AUTOSCALING_API = "autoscaling/v2"
ROUTER_SCALER = "HorizontalPodAutoscaler"


class Kind(NamedTuple):
    """A kind of Kubernetes objects, and the objects of it that the operator watches."""

    api_version: str
    name: str
    plural: str
    selector: str = ""
    """Label selector of the watched objects (empty for all)."""
    optional: bool = False
    """Whether a cluster may lack the kind."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def qualified(self) -> str:
        """Return the name of the resource in messages, for example statefulsets.apps."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Return the URL path of an object, or of all objects without a name.

        An empty namespace stands for all namespaces.
        """
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


def _owned(api_version: str, name: str, plural: str, optional: bool = False) -> Kind:
    return Kind(api_version, name, plural, owned_selector(), optional)


SERVICE = Kind(API_VERSION, KIND, PLURAL)
BASE = Kind(API_VERSION, "LLMServiceBase", "llmservicebases", optional=True)
POD = Kind("v1", "Pod", "pods", pod_selector())
EVENT = Kind("events.k8s.io/v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
CONFIG_MAP = _owned("v1", "ConfigMap", "configmaps")
JOB = _owned("batch/v1", "Job", "jobs")
OWNED = (
    CONFIG_MAP,
    _owned("v1", "Service", "services"),
    _owned("v1", "ServiceAccount", "serviceaccounts"),
    _owned("apps/v1", "Deployment", "deployments"),
    _owned("apps/v1", "StatefulSet", "statefulsets"),
    JOB,
    _owned("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    _owned("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _owned(GATEWAY_API, HTTP_ROUTE, "httproutes", optional=True),
    _owned(AUTOSCALING_API, ROUTER_SCALER, "horizontalpodautoscalers", optional=True),
    _owned("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", optional=True),
    _owned(MONITORING_API, "PodMonitor", "podmonitors", optional=True),
    _owned(MONITORING_API, "PrometheusRule", "prometheusrules", optional=True),
)
"""Every kind of object that a plan may contain."""
WATCHED = (SERVICE, BASE, POD, *OWNED)

_BY_NAME = {(kind.api_version, kind.name): kind for kind in (*WATCHED, EVENT, LEASE)}


def kind_of(api_version: str, name: str) -> Kind:
    """Return the kind of an object that the operator handles.

    Raises:
        KeyError: the operator does not handle the kind, which is a bug.
    """
    return _BY_NAME[api_version, name]
