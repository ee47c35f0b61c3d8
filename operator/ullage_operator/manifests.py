"""Every Kubernetes object of a service but its pods: pure builders of plain data."""

from typing import Any

from ullage_operator import naming
from ullage_operator.configs import engine_config, router_config, to_yaml
from ullage_operator.pools import Pool
from ullage_operator.settings import VERSION, Settings
from ullage_operator.spec import Service
from ullage_operator.templates import engine_template, router_template

Manifest = dict[str, Any]


def router_objects(service: Service, settings: Settings, rollout_file: str) -> list[Manifest]:
    """The router and all that belongs to it, in the order to apply.

    Args:
        rollout_file: what it reads while it runs; a change restarts nothing.
    """
    name = naming.router_name(service.name)
    config = to_yaml(router_config(service))
    match = naming.selector(service.name, naming.ROUTER)
    deployment = {
        "replicas": service.spec.router.replicas,
        "selector": {"matchLabels": match},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": router_template(service, config, settings),
    }
    is_secure = service.spec.tls.router is not None
    ports = [
        service_port("http", naming.HTTP_PORT, "https" if is_secure else "http"),
        service_port("grpc", naming.GRPC_PORT, grpc_protocol(is_secure)),
    ]
    policy = {
        "ingress": [
            from_anywhere(naming.HTTP_PORT, naming.GRPC_PORT),
            from_operator(naming.METRICS_PORT, settings),  # what it scales and judges canaries by
            *from_scrapers(service),
        ]
    }
    build = Builder(service, naming.ROUTER)
    return [
        build.account(name),
        build.config_map(name, naming.ROUTER_CONFIG, config, {naming.ROLLOUT_FILE: rollout_file}),
        build.object("v1", "Service", name, {"selector": match, "ports": ports}),
        build.network_policy(name, match, policy),
        build.disruption_budget(name, match),
        build.object("apps/v1", "Deployment", name, deployment),
    ]


def engine_objects(service: Service, settings: Settings) -> list[Manifest]:
    """What the engines of all pools share."""
    name = naming.engine_name(service.name)
    match = naming.selector(service.name, naming.ENGINE)
    routers = {"podSelector": {"matchLabels": naming.selector(service.name, naming.ROUTER)}}
    tickets = service.spec.tickets
    clients: list[Manifest] = [{"podSelector": {}}] if tickets and tickets.required else []
    asking = {"from": [routers, *clients], "ports": [policy_port(naming.GRPC_PORT)]}
    operator = from_operator(naming.PROBE_PORT, settings)
    policy = {"ingress": [asking, operator, *from_scrapers(service)]}
    build = Builder(service, naming.ENGINE)
    return [build.account(name), build.network_policy(name, match, policy)]


def pool_objects(
    service: Service, pool_name: str, pool: Pool, settings: Settings
) -> list[Manifest]:
    """One pool: configuration, headless Service, disruption budget and StatefulSet."""
    name = naming.pool_name(service.name, pool_name)
    config = to_yaml(engine_config(service, pool_name, pool, settings))
    match = naming.selector(service.name, naming.ENGINE, pool_name)
    headless = {
        # Only ready pods have addresses: publishNotReadyAddresses stays at its default, false.
        "clusterIP": "None",
        "selector": match,
        "ports": [
            service_port(
                "grpc", naming.GRPC_PORT, grpc_protocol(service.spec.tls.engines is not None)
            )
        ],
    }
    stateful_set = {
        "serviceName": name,
        "replicas": pool.replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": match},
        "template": engine_template(service, pool_name, pool, config, settings),
    }
    build = Builder(service, naming.ENGINE, pool_name)
    return [
        build.config_map(name, naming.ENGINE_CONFIG, config),
        build.object("v1", "Service", name, headless),
        build.disruption_budget(name, match),
        build.object("apps/v1", "StatefulSet", name, stateful_set),
    ]


class Builder:
    """Builds objects with the metadata of one component."""

    def __init__(self, service: Service, component: str, pool: str | None = None) -> None:
        self._service = service
        self._labels = naming.labels(service.name, component, VERSION, pool)

    def metadata(self, name: str) -> Manifest:
        owners = owner_references(self._service)
        return {
            "name": name,
            "namespace": self._service.namespace,
            "labels": self._labels,
            **({"ownerReferences": owners} if owners else {}),
        }

    def object(self, api_version: str, kind: str, name: str, spec: Manifest) -> Manifest:
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": self.metadata(name),
            "spec": spec,
        }

    def config_map(
        self, name: str, key: str, text: str, more: dict[str, str] | None = None
    ) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self.metadata(name),
            "data": {key: text, **(more or {})},
        }

    def account(self, name: str) -> Manifest:
        annotations = self._service.spec.service_account.annotations
        return {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": self.metadata(name) | ({"annotations": annotations} if annotations else {}),
            "automountServiceAccountToken": False,
        }

    def disruption_budget(self, name: str, match: dict[str, str]) -> Manifest:
        # maxUnavailable and not minAvailable: a single replica must not block a node's drain.
        spec = {
            "maxUnavailable": 1,
            "selector": {"matchLabels": match},
            # A pod that does not serve is no loss, and must not hold up a drain either.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        return self.object("policy/v1", "PodDisruptionBudget", name, spec)

    def network_policy(self, name: str, match: dict[str, str], rules: Manifest) -> Manifest:
        spec = {"podSelector": {"matchLabels": match}, "policyTypes": ["Ingress"], **rules}
        return self.object("networking.k8s.io/v1", "NetworkPolicy", name, spec)


def owner_references(service: Service) -> list[Manifest]:
    """Makes the garbage collector delete the object with its service; none outside Kubernetes."""
    owner = {
        "apiVersion": naming.API_VERSION,
        "kind": naming.KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return [owner] if service.uid else []


def grpc_protocol(is_secure: bool) -> str:
    """What a mesh or gateway is told; h2c is HTTP/2 in plaintext."""
    return "https" if is_secure else "kubernetes.io/h2c"


def service_port(name: str, number: int, protocol: str) -> Manifest:
    return {
        "name": name,
        "port": number,
        "targetPort": name,
        "protocol": "TCP",
        "appProtocol": protocol,
    }


def policy_port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}


def from_operator(number: int, settings: Settings) -> Manifest:
    """It follows the engines' headroom and asks routers for measures, and for nothing else."""
    pods, own = {"matchLabels": naming.operator_selector()}, settings.namespace
    namespaces = {"matchLabels": {naming.NAMESPACE_LABEL: own}} if own else {}
    return {
        "from": [{"namespaceSelector": namespaces, "podSelector": pods}],
        "ports": [policy_port(number)],
    }


def from_scrapers(service: Service) -> list[Manifest]:
    """Who may read metrics; no rule where that is nobody, for an empty list is everybody."""
    peers = service.spec.observability.metrics_from
    return [{"from": peers, "ports": [policy_port(naming.METRICS_PORT)]}] if peers else []


def from_anywhere(*ports: int) -> Manifest:
    return {"ports": [policy_port(number) for number in ports]}
