"""Names, labels and annotations of a service's objects, and the table of the kinds of Kubernetes
objects that the operator reads or writes. No other module spells them.
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
"""Pod annotation; a changed configuration changes it, and so rolls the pods."""
ROLLOUT = f"{GROUP}/rollout"
"""Annotation of an LLMService by which people steer its rollout."""
REVISION = f"{GROUP}/revision"
"""Annotation of a StatefulSet: which revision its pods are to be of."""
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Annotation of a StatefulSet or a Deployment: a hash of the pod template that it was applied with,
which the API server completes."""
SHARED_HASH = f"{GROUP}/shared-hash"
"""Annotation of a StatefulSet: a hash of what the spec then said of engine pods outside their
release."""
CANARY_PLACES = f"{GROUP}/canary-places"
"""Annotation of a StatefulSet: how many of its engines a canary has the place of. They are missing
from its replicas and belong to the pool all the same."""
STOPPED = f"{GROUP}/stopped"
"""Annotation of a StatefulSet that `spec.stop` has emptied: its number of pods says nothing of how
many engines its pool is to have later."""
GROUP_REVISION = f"{GROUP}/group-revision"
"""Pod annotation: a hash of the templates of an engine's pods, of which only equals join."""
POOL_LABEL = f"{GROUP}/pool"
FETCH_CLAIM = f"{GROUP}/fetch-claim"
"""Annotation of a Job: the claim that it fetches a model into."""
FETCH_SOURCE = f"{GROUP}/fetch-source"
"""Annotation of a Job: the model that it fetches."""
FETCH_STORE = f"{GROUP}/fetch-store"
"""Annotation of a Job: a digest of the address that it fetches the model from; absent where the
source says enough."""
STATEFUL_SET_REVISION = "controller-revision-hash"
"""Label that Kubernetes gives a StatefulSet's pods: which revision of it they are of."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that every namespace has, with its name."""

HTTP_PORT = 8000
GRPC_PORT = 9000
METRICS_PORT = 9090
PROBE_PORT = 8081
"""Health without TLS, which the kubelet does not speak; engines report their headroom there too."""

RUN_DIR = "/run/ullage"
CONFIG_DIR = "/etc/ullage"
KEYS_DIR = "/etc/ullage-keys"
TICKETS_DIR = "/etc/ullage-tickets"
TLS_DIR = "/etc/ullage-tls"
CLIENT_CA_DIR = "/etc/ullage-client-ca"
ENGINE_TLS_DIR = "/etc/ullage-engine-tls"
STEPS_DIR = "/etc/ullage-steps"
ADAPTERS_DIR = "/etc/ullage-adapters"
"""Folders of a cascade's steps, by their index: `0-tls` and `0-key`."""
CACHE_DIR = "/var/cache/ullage"
KV_DIR = "/var/lib/ullage/kv"
"""Folder of the file tier of KV where a service names none."""
MODEL_IMAGE_DIR = "/model-image"
CLAIM_ROOT = "/models"
"""Folder at which the claim of a `pvc://` source is mounted; the engine looks there."""

ENGINE_CONFIG = "engine.yaml"
ADAPTERS_FILE = "adapters.yaml"
"""File with the LoRA adapters, which all engines read again whenever it changes."""
ROUTER_CONFIG = "router.yaml"
ROLLOUT_FILE = "rollout.yaml"
"""Beside the router's configuration; read again whenever it changes."""
ROLLOUT_STATE = "state.json"
KEPT_SPEC = "spec.json"
"""Beside the rollout's state: the last spec that could be carried out."""

_CANARY = "-next"
"""Short: with a hash behind it, a StatefulSet's name must fit into 63 characters."""

_GROUP = "-group"
"""Ends the names of what an engine has that spans several pods."""

ROUTER = "router"
ENGINE = "engine"
FOLLOWER = "follower"
"""A pod of an engine that spans several, without the engine's server."""
FETCHER = "fetcher"
"""A pod of a Job that fetches a model into a shared claim."""
OPERATOR = "operator"


def router_name(service: str) -> str:
    """The router's Deployment, Service, ConfigMap, ServiceAccount and policies."""
    return f"{service}-router"


def pool_name(service: str, pool: str) -> str:
    """A pool's StatefulSet, headless Service, ConfigMap and disruption budget."""
    return f"{service}-{pool}"


def canary_pool(pool: str) -> str:
    """Return the name of a pool's canary, which takes the pool's place in names and labels.

    The name is unambiguous because no pool has a dash in its name or is called `next`. Otherwise
    pool `next` of service `chat-single` would share object names with the canary of pool `single`
    of `chat`.
    """
    return f"{pool}{_CANARY}"


def group_pool(pool: str) -> str:
    """What the followers of a pool or its canary are called wherever a pool is, as are the Service
    by which they find their leaders and the NetworkPolicy that lets them."""
    return f"{pool}{_GROUP}"


def stable_pool(pool: str) -> str:
    """Return the pool of the spec that a pool, its followers or its canary's pods are of."""
    return pool.removesuffix(_GROUP).removesuffix(_CANARY)


def is_canary_pool(pool: str) -> bool:
    return pool.removesuffix(_GROUP).endswith(_CANARY)


def leaders_name(group: str) -> str:
    """Return the StatefulSet of the leaders of the followers in StatefulSet `group`."""
    return group.removesuffix(_GROUP)


def rollout_name(service: str) -> str:
    """The ConfigMap that remembers how far a rollout has come."""
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
    """Return the labels that select the pods of a service; they never change."""
    return {"app.kubernetes.io/name": "ullage", "app.kubernetes.io/instance": service}


def selector(service: str, component: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels that select the pods of a component; they never change."""
    labels = service_selector(service) | {"app.kubernetes.io/component": component}
    return labels | ({POOL_LABEL: pool} if pool else {})


def labels(service: str, component: str, version: str, pool: str | None = None) -> dict[str, str]:
    """Labels of every object of a component."""
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
    """Label selector of everything that the operator made."""
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
    """One kind, and which of its objects concern the operator."""

    api_version: str
    name: str
    plural: str
    selector: str = ""
    """Label selector of those that are watched; all where it is empty."""
    optional: bool = False
    """Whether clusters without it are complete ones."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def qualified(self) -> str:
        """The resource as messages name it: statefulsets.apps, services."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of an object or, without a name, of all in a namespace; "" is all
        namespaces."""
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
"""Every kind that a plan may hold."""
WATCHED = (SERVICE, BASE, POD, *OWNED)

_BY_NAME = {(kind.api_version, kind.name): kind for kind in (*WATCHED, EVENT, LEASE)}


def kind_of(api_version: str, name: str) -> Kind:
    """The kind of an object that the operator handles; any other is a bug."""
    return _BY_NAME[api_version, name]
