"""Names, labels and annotations of a service's objects, and the kinds that the operator handles.

Other modules import these names from this module instead of defining their own.
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
"""Field manager under which the operator sets `replicas` on existing workloads."""
CONFIG_HASH = f"{GROUP}/config-hash"
"""Pod annotation: a hash of the configuration. When the hash changes, the pods are replaced."""
ROLLOUT = f"{GROUP}/rollout"
"""LLMService annotation by which users control the service's rollout, for example `pause`."""
REVISION = f"{GROUP}/revision"
"""StatefulSet annotation: the revision that its pods should have."""
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""StatefulSet or Deployment annotation: a hash of the applied pod template.

The hash of the live template would differ, because the API server adds defaults to the template.
"""
SHARED_HASH = f"{GROUP}/shared-hash"
"""StatefulSet annotation: a hash of the engine pods' fields that are not part of a release."""
CANARY_PLACES = f"{GROUP}/canary-places"
"""StatefulSet annotation: how many of its engines are currently replaced by canary engines.

The StatefulSet's `replicas` excludes these engines, although they still count towards the pool's
size.
"""
STOPPED = f"{GROUP}/stopped"
"""StatefulSet annotation: marks a StatefulSet that `spec.stop` has scaled to zero.

Its replicas therefore do not show how many engines the pool should have once it is restarted.
"""
GROUP_REVISION = f"{GROUP}/group-revision"
"""Pod annotation: a hash of an engine's pod templates. All pods of an engine have the same hash."""
POOL_LABEL = f"{GROUP}/pool"
FETCH_CLAIM = f"{GROUP}/fetch-claim"
"""Job annotation: the persistent volume claim into which the Job downloads a model."""
FETCH_SOURCE = f"{GROUP}/fetch-source"
"""Job annotation: the source of the model that the Job downloads."""
FETCH_STORE = f"{GROUP}/fetch-store"
"""Job annotation: a digest of the bucket's endpoint (absent if the source needs none)."""
STATEFUL_SET_REVISION = "controller-revision-hash"
"""Label of a StatefulSet's pods: the controller revision from which a pod was created."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that Kubernetes sets on every namespace. Its value is the namespace's name."""

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
"""Folder with the TLS files and API key of each cascade step, for example `0-tls` and `0-key`."""
ADAPTERS_DIR = "/etc/ullage-adapters"
PROMPTS_DIR = "/etc/ullage-prompts"
"""Folder with the prompts that routers replay to compare the answers of a canary."""
CACHE_DIR = "/var/cache/ullage"
KV_DIR = "/var/lib/ullage/kv"
FILES_DIR = "/var/lib/ullage/files"
"""Default folder of the KV file tier."""
MODEL_IMAGE_DIR = "/model-image"
CLAIM_ROOT = "/models"
"""Mount point for the claim of a `pvc://` source. The engine looks for the model there."""

ENGINE_CONFIG = "engine.yaml"
ADAPTERS_FILE = "adapters.yaml"
"""File that lists the LoRA adapters. All engines reload the file whenever it changes."""
ROUTER_CONFIG = "router.yaml"
ROLLOUT_FILE = "rollout.yaml"
"""File in the ConfigMap of the router's configuration. Routers reload the file when it changes."""
ROLLOUT_STATE = "state.json"
KEPT_SPEC = "spec.json"
"""File with the last valid spec, in the ConfigMap that stores the rollout's state."""

_CANARY = "-next"
"""Suffix that marks a pool's canary in object names and labels.

The suffix is short, because a StatefulSet's name plus a hash must fit into 63 characters.
"""

_GROUP = "-group"
"""Suffix that marks a pool's followers in object names, if engines span several pods."""

ROUTER = "router"
ENGINE = "engine"
FOLLOWER = "follower"
"""Component label of pods that run part of a multi-pod engine but have no server."""
FETCHER = "fetcher"
"""Component label of pods whose Job downloads a model into a shared claim."""
OPERATOR = "operator"


def router_name(service: str) -> str:
    """Return the name of the router's Deployment, Service, ConfigMap and other objects."""
    return f"{service}-router"


def pool_name(service: str, pool: str) -> str:
    """Return the name of a pool's StatefulSet, Service, ConfigMap and PodDisruptionBudget."""
    return f"{service}-{pool}"


def canary_pool(pool: str) -> str:
    """Return the pool name that identifies a pool's canary in object names and labels.

    The name is unambiguous because no pool has a dash in its name or is called `next`. Otherwise
    pool `next` of service `chat-single` would share object names with the canary of pool `single`
    of `chat`.
    """
    return f"{pool}{_CANARY}"


def group_pool(pool: str) -> str:
    """Return the name of a pool's group of followers, as used in object names and labels.

    A canary's followers have a group of their own. The Service through which followers discover
    their leaders has this name, and so does the NetworkPolicy between leaders and followers.
    """
    return f"{pool}{_GROUP}"


def stable_pool(pool: str) -> str:
    """Return a pool's name in the spec by removing the suffixes of canaries and followers."""
    return pool.removesuffix(_GROUP).removesuffix(_CANARY)


def is_canary_pool(pool: str) -> bool:
    return pool.removesuffix(_GROUP).endswith(_CANARY)


def leaders_name(group: str) -> str:
    """Return the name of the leaders' StatefulSet, given the name of the followers' StatefulSet."""
    return group.removesuffix(_GROUP)


def rollout_name(service: str) -> str:
    """Return the name of the ConfigMap that stores the state of the rollout."""
    return f"{service}-rollout"


def engine_name(service: str) -> str:
    """Return the name of the objects that all engine pods share.

    These are the ServiceAccount, the NetworkPolicy, the PodMonitor, and the ConfigMap with the LoRA
    adapters.
    """
    return f"{service}-engine"


def fetcher_name(service: str) -> str:
    """Return the name of the NetworkPolicy for the pods that pre-fill shared model volumes.

    These pods download a model into a PersistentVolumeClaim that engines share.
    """
    return f"{service}-fetcher"


def fetch_name(service: str, digest: str) -> str:
    """Return the name of a Job that downloads a model into a shared PersistentVolumeClaim.

    Args:
        service: the name of the service.
        digest: a hash of the claim and the pod template, because a changed template needs a new
            Job.
    """
    return f"{service}-fetch-{digest}"


def service_selector(service: str) -> dict[str, str]:
    """Return the labels that select a service's pods. These labels never change."""
    return {"app.kubernetes.io/name": "ullage", "app.kubernetes.io/instance": service}


def selector(service: str, component: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels that select a component's pods. These labels never change."""
    labels = service_selector(service) | {"app.kubernetes.io/component": component}
    return labels | ({POOL_LABEL: pool} if pool else {})


def labels(service: str, component: str, version: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels that all objects of a component share."""
    return selector(service, component, pool) | {
        "app.kubernetes.io/version": version,
        "app.kubernetes.io/part-of": "ullage",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def operator_selector() -> dict[str, str]:
    """Return the labels that the operator's Helm chart sets on the operator's own pods."""
    return {
        "app.kubernetes.io/part-of": "ullage",
        "app.kubernetes.io/component": OPERATOR,
    }


def owned_selector() -> str:
    """Return the label selector that matches all objects created by the operator."""
    return f"app.kubernetes.io/managed-by={FIELD_MANAGER}"


def pod_selector() -> str:
    """Return the label selector that matches the pods of all services."""
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
    """A kind of Kubernetes object, with a selector for the objects that the operator watches."""

    api_version: str
    name: str
    plural: str
    selector: str = ""
    """Label selector of the watched objects (empty for all)."""
    optional: bool = False
    """Whether the operator also runs in clusters that do not serve the kind."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def qualified(self) -> str:
        """Return the qualified resource name for messages, for example statefulsets.apps."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Return the URL path of an object, or of the whole collection if no name is given.

        An empty namespace means all namespaces.
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
STATEFUL_SET = _owned("apps/v1", "StatefulSet", "statefulsets")
OWNED = (
    CONFIG_MAP,
    _owned("v1", "Service", "services"),
    _owned("v1", "ServiceAccount", "serviceaccounts"),
    _owned("apps/v1", "Deployment", "deployments"),
    STATEFUL_SET,
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
