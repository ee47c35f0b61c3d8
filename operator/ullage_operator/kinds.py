"""The kinds of Kubernetes objects that the operator reads or makes: the only table of them."""

from typing import NamedTuple

from ullage_operator import naming

MONITORING_API = "monitoring.coreos.com/v1"


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
        """Of an object or, without a name, of all in a namespace; of all namespaces for ""."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


def _owned(api_version: str, name: str, plural: str, optional: bool = False) -> Kind:
    return Kind(api_version, name, plural, naming.owned_selector(), optional)


SERVICE = Kind(naming.API_VERSION, naming.KIND, naming.PLURAL)
POD = Kind("v1", "Pod", "pods", naming.pod_selector())
EVENT = Kind("events.k8s.io/v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
CONFIG_MAP = _owned("v1", "ConfigMap", "configmaps")
OWNED = (
    CONFIG_MAP,
    _owned("v1", "Service", "services"),
    _owned("v1", "ServiceAccount", "serviceaccounts"),
    _owned("apps/v1", "Deployment", "deployments"),
    _owned("apps/v1", "StatefulSet", "statefulsets"),
    _owned("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    _owned("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _owned("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", optional=True),
    _owned("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", optional=True),
    _owned(MONITORING_API, "PodMonitor", "podmonitors", optional=True),
    _owned(MONITORING_API, "PrometheusRule", "prometheusrules", optional=True),
)
"""Every kind that a plan may hold."""
WATCHED = (SERVICE, POD, *OWNED)

_BY_NAME = {(kind.api_version, kind.name): kind for kind in (*WATCHED, EVENT, LEASE)}


def kind_of(api_version: str, name: str) -> Kind:
    """The kind of an object that the operator handles; any other is a bug."""
    return _BY_NAME[api_version, name]
