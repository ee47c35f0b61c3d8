"""Builds every Kubernetes object of a service except its pods, as plain data. Pure.

Where KEDA scales a pool, its ScaledObject is among them. It scales the pool's StatefulSet by the
used share of each engine's KV memory: engines report it as the metric ullage_kv_used_ratio, and
KEDA asks Prometheus for it.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

from ullage_common.config.engine import GroupSection
from ullage_common.process.config_file import Strict
from ullage_operator.api import naming
from ullage_operator.api.sections import AutoscalingSpec, Pace, PoolSpec, to_api
from ullage_operator.api.settings import VERSION, Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.config_files import (
    adapters_file,
    digest,
    document,
    engine_config,
    router_config,
    to_yaml,
)
from ullage_operator.manifests.engine_pod import engine_template, follower_template
from ullage_operator.manifests.router_pod import router_template
from ullage_operator.manifests.volumes import volume_claim_templates
from ullage_operator.policy.pool_sizes import KEDA, autoscaling_of
from ullage_operator.policy.scaling_status import SCALED_OBJECT

Manifest = dict[str, Any]


MIXED_ENGINE_TLS = f"{naming.GROUP}/mixed-engine-tls"
"""Annotation of a Deployment of routers that call engines in plaintext beside TLS: the section
`tls.engines` that they speak TLS by, which the spec may no longer have."""


def router_objects(
    service: Service, settings: Settings, rollout_file: str, accepts_plaintext: bool = False
) -> list[Manifest]:
    """Return the router and its accompanying objects, in the order to apply.

    Args:
        rollout_file: the file that routers read while they run; a change restarts nothing.
        accepts_plaintext: whether some engines speak TLS and others plaintext.
    """
    name = naming.router_name(service.name)
    config = to_yaml(document(router_config(service, accepts_plaintext)))
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
            {"ports": [policy_port(naming.HTTP_PORT), policy_port(naming.GRPC_PORT)]},  # to anybody
            from_operator(naming.METRICS_PORT, settings),  # what it scales and judges canaries by
            *from_scrapers(service, settings),
        ]
    }

    build = Builder(service, naming.ROUTER)
    workload = build.object("apps/v1", "Deployment", name, deployment)
    if accepts_plaintext:
        engines = json.dumps(to_api(service.spec.tls.engines), sort_keys=True)
        workload["metadata"]["annotations"] = {MIXED_ENGINE_TLS: engines}

    return [
        build.account(name),
        build.config_map(name, naming.ROUTER_CONFIG, config, {naming.ROLLOUT_FILE: rollout_file}),
        router_service(service, ports),
        build.network_policy(name, match, policy),
        *build.disruption_budget(name, {"matchLabels": match}, service.spec.router.most_replicas),
        workload,
    ]


def router_service(service: Service, ports: list[Manifest]) -> Manifest:
    """Return the Service by which clients reach the routers.

    Fields that the spec does not set are left out: the API server fills them in, and others may set
    them.
    """
    given = service.spec.router.service
    asked = as_asked(given)
    for name in ("annotations", "labels"):
        del asked[name]
    if given.type == "ClusterIP":
        del asked["type"]

    name = naming.router_name(service.name)
    match = naming.selector(service.name, naming.ROUTER)
    build = Builder(service, naming.ROUTER)
    manifest = build.service(name, {"selector": match, "ports": ports, **asked})
    meta = manifest["metadata"] | {"labels": given.labels | manifest["metadata"]["labels"]}
    if given.annotations:
        meta |= {"annotations": given.annotations}
    return {**manifest, "metadata": meta}


def engine_objects(
    service: Service, settings: Settings, *, with_adapters: bool = False
) -> list[Manifest]:
    """Return the objects that the engines of all pools share.

    Args:
        with_adapters: whether running engines have slots for adapters, though the spec has none.
    """
    name = naming.engine_name(service.name)
    match = naming.selector(service.name, naming.ENGINE)
    routers = {"podSelector": {"matchLabels": naming.selector(service.name, naming.ROUTER)}}
    tickets = service.spec.tickets
    clients: list[Manifest] = [{"podSelector": {}}] if tickets and tickets.required else []
    has_peers = any(pool.memory.tiers.remote for pool in service.spec.pools.values())
    peers: list[Manifest] = [{"podSelector": {"matchLabels": match}}] if has_peers else []
    asking = {"from": [routers, *peers, *clients], "ports": [policy_port(naming.GRPC_PORT)]}
    operator = from_operator(naming.PROBE_PORT, settings)
    policy = {"ingress": [asking, operator, *from_scrapers(service, settings)]}
    build = Builder(service, naming.ENGINE)
    objects = [build.account(name), build.network_policy(name, match, policy)]
    if with_adapters or service.spec.serves_adapters:
        objects.append(build.config_map(name, naming.ADAPTERS_FILE, adapters_file(service)))
    return objects


def pool_objects(
    service: Service, pool_name: str, pool: PoolSpec, settings: Settings
) -> list[Manifest]:
    """Return one pool's ConfigMap, headless Service, PodDisruptionBudget and StatefulSet."""
    name = naming.pool_name(service.name, pool_name)
    config = to_yaml(document(engine_config(service, pool_name, pool, settings)))
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

    template = engine_template(service, pool_name, pool, config, settings)
    group: list[Manifest] = []
    if pool.nodes > 1:
        follower = follower_template(service, pool_name, pool, config, settings)
        revision = digest(json.dumps([template, follower], sort_keys=True))
        template, follower = (of_group(each, revision) for each in (template, follower))
        group = group_objects(service, pool_name, pool, follower)

    stateful_set = {
        "serviceName": naming.pool_name(service.name, naming.group_pool(pool_name))
        if group
        else name,
        "replicas": pool.replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": match},
        "template": template,
        **disks(pool_name, pool),
    }

    build = Builder(service, naming.ENGINE, pool_name)
    return [
        build.config_map(name, naming.ENGINE_CONFIG, config),
        build.service(name, headless),
        *build.disruption_budget(
            name, budget_selector(service, pool_name, pool), max_engines(pool)
        ),
        build.object("apps/v1", "StatefulSet", name, stateful_set),
        *group,
    ]


def disks(pool_name: str, pool: PoolSpec) -> Manifest:
    """Return the StatefulSet fields of its pods' claim templates; empty without them.

    A canary's claims are deleted with it, since the engines that follow it have claims of their
    own.
    """
    templates = volume_claim_templates(pool)
    if not templates:
        return {}
    policy = pool.persistent_volume_claim_retention_policy
    whens = {"whenDeleted": policy.when_deleted, "whenScaled": policy.when_scaled}
    if naming.is_canary_pool(pool_name):
        whens = dict.fromkeys(whens, "delete")
    return {
        "volumeClaimTemplates": templates,
        "persistentVolumeClaimRetentionPolicy": {
            name: word.capitalize() for name, word in whens.items()
        },
    }


def budget_selector(service: Service, pool_name: str, pool: PoolSpec) -> Manifest:
    """Return the selector of a pool's PodDisruptionBudget, which covers all pods of its engines.

    If one pod of a group is away, none of the group is ready. So a budget of one pod protects all
    other groups and lets the rest of this group go, since pods that are not ready may be evicted.
    """
    if pool.nodes == 1:
        return {"matchLabels": naming.selector(service.name, naming.ENGINE, pool_name)}
    names = [pool_name, naming.group_pool(pool_name)]
    members = {"key": naming.POOL_LABEL, "operator": "In", "values": names}
    return {"matchLabels": naming.service_selector(service.name), "matchExpressions": [members]}


def of_group(template: Manifest, revision: str) -> Manifest:
    """Return a pod template with the revision of the group that its pods are of."""
    annotations = template["metadata"].get("annotations", {}) | {naming.GROUP_REVISION: revision}
    return {**template, "metadata": {**template["metadata"], "annotations": annotations}}


def group_objects(
    service: Service, pool_name: str, pool: PoolSpec, template: Manifest
) -> list[Manifest]:
    """Return the objects of engines that span several pods.

    They are the followers' StatefulSet, the Service by which followers resolve their leaders before
    these are ready, and the NetworkPolicy that lets them talk.

    Args:
        template: of the followers.
    """
    group = naming.group_pool(pool_name)
    name = naming.pool_name(service.name, group)
    match = naming.selector(service.name, naming.FOLLOWER, group)
    leaders = naming.selector(service.name, naming.ENGINE, pool_name)
    members = [{"podSelector": {"matchLabels": labels}} for labels in (leaders, match)]
    rendezvous = {
        "clusterIP": "None",
        "selector": leaders,
        "publishNotReadyAddresses": True,
        "ports": [{"name": "join", "port": GroupSection().join_port, "protocol": "TCP"}],
    }
    stateful_set = {
        "serviceName": name,
        "replicas": followers(pool),
        "podManagementPolicy": "Parallel",
        # The operator deletes the followers of a leader that is of the new revision, so that no
        # engine loses its followers before it is its turn.
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": match},
        "template": template,
        **disks(pool_name, pool),
    }
    build = Builder(service, naming.FOLLOWER, group)
    # vLLM and NCCL choose their ports freely.
    policy = {"ingress": [{"from": members}]}
    return [
        build.service(name, rendezvous),
        build.network_policy(f"{name}-leaders", leaders, policy),
        build.network_policy(name, match, policy),
        build.object("apps/v1", "StatefulSet", name, stateful_set),
    ]


def max_engines(pool: PoolSpec) -> int:
    """Return the number of engines that a pool may have."""
    scaling = autoscaling_of(pool)
    return max(pool.replicas, scaling.max_replicas if scaling else 0)


def followers(pool: PoolSpec) -> int:
    """Return the number of followers of all engines of a pool."""
    return pool.replicas * (pool.nodes - 1)


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

    def service(self, name: str, spec: Manifest) -> Manifest:
        """Return a Service, dual-stack where the cluster has IPv4 and IPv6."""
        return self.object("v1", "Service", name, {"ipFamilyPolicy": "PreferDualStack", **spec})

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

    def disruption_budget(self, name: str, selector: Manifest, most: int) -> list[Manifest]:
        """Return the PodDisruptionBudget that stops drains from ending several pods at once; none
        without pods.

        Args:
            selector: of their pods.
            most: engines or routers that there may be.
        """
        if most < 2:
            return []
        # maxUnavailable and not minAvailable: a last replica must not block a node's drain.
        spec = {
            "maxUnavailable": 1,
            "selector": selector,
            # A pod that does not serve is no loss, and must not hold up a drain either.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        return [self.object("policy/v1", "PodDisruptionBudget", name, spec)]

    def network_policy(self, name: str, match: dict[str, str], rules: Manifest) -> Manifest:
        spec = {"podSelector": {"matchLabels": match}, "policyTypes": ["Ingress"], **rules}
        return self.object("networking.k8s.io/v1", "NetworkPolicy", name, spec)


def owner_references(service: Service) -> list[Manifest]:
    """Make the garbage collector delete the object with its service; none outside Kubernetes."""
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
    """appProtocol for meshes and gateways; h2c is HTTP/2 in plaintext."""
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
    """Allow the operator to follow the engines' headroom and ask routers for measures, and nothing
    else."""
    pods = {"matchLabels": naming.operator_selector()}
    own = settings.namespace
    namespaces = {"matchLabels": {naming.NAMESPACE_LABEL: own}} if own else {}
    return {
        "from": [{"namespaceSelector": namespaces, "podSelector": pods}],
        "ports": [policy_port(number)],
    }


def from_scrapers(service: Service, settings: Settings) -> list[Manifest]:
    """Allow those who may read metrics; no rule where that is nobody, for an empty list is
    everybody."""
    peers = service.spec.observability.metrics_from
    if peers is None and settings.metrics_namespace:
        labels = {naming.NAMESPACE_LABEL: settings.metrics_namespace}
        peers = [{"namespaceSelector": {"matchLabels": labels}}]
    return [{"from": peers, "ports": [policy_port(naming.METRICS_PORT)]}] if peers else []


KEDA_API = "keda.sh/v1alpha1"
KEDA_PAUSED = "autoscaling.keda.sh/paused-replicas"
"""Annotation that makes KEDA scale to its value and then pause until it is removed."""
METRIC = "ullage_kv_used_ratio"
POLL_S = 10
_NEVER = "1000000"
"""Requests from which on activity alone would ask for another engine."""


def scaler_objects(
    service: Service, pool_name: str, pool: PoolSpec, serves: Collection[str]
) -> list[Manifest]:
    """Return the ScaledObject of a pool; none unless KEDA scales it."""
    scaling = autoscaling_of(pool)
    if scaling is None:
        return []
    name = naming.pool_name(service.name, pool_name)
    build = Builder(service, naming.ENGINE, pool_name)
    if scaling.provider == KEDA and SCALED_OBJECT in serves:
        spec = scaled_object(service, pool_name, scaling)
        scaler = build.object(KEDA_API, SCALED_OBJECT, name, spec)
        if service.spec.stop:
            scaler["metadata"] |= {"annotations": {KEDA_PAUSED: "0"}}
        return [scaler]
    return []


def with_pause(live: Manifest, is_stopped: bool) -> Manifest:
    """Return the manifest that changes only the pause of a live ScaledObject."""
    kept = ("name", "namespace", "labels", "annotations", "ownerReferences")
    meta = {name: live["metadata"][name] for name in kept if name in live["metadata"]}
    annotations = dict(meta.get("annotations") or {})
    annotations.pop(KEDA_PAUSED, None)
    if is_stopped:
        annotations[KEDA_PAUSED] = "0"
    return {**live, "metadata": meta | {"annotations": annotations}}


def without_replicas(objects: Iterable[Manifest], kind: str = "StatefulSet") -> list[Manifest]:
    """Return the manifests, those of one kind without replicas, which another controller sets."""
    return [
        {**item, "spec": {k: v for k, v in item["spec"].items() if k != "replicas"}}
        if item["kind"] == kind
        else item
        for item in objects
    ]


def rules(pace: Pace) -> Manifest:
    """Return KEDA's scaling rules: the policy that lets more pods change holds, as with the
    operator's own."""
    period = max(1, round(pace.period))
    policies = [{"type": "Pods", "value": pace.pods, "periodSeconds": period}]
    if pace.percent:
        policies.append({"type": "Percent", "value": pace.percent, "periodSeconds": period})
    window = round(pace.window)
    return {"stabilizationWindowSeconds": window, "selectPolicy": "Max", "policies": policies}


def scaled_object(service: Service, pool_name: str, scaling: AutoscalingSpec) -> Manifest:
    name = naming.pool_name(service.name, pool_name)
    pods = f'namespace="{service.namespace}",pod=~"{name}-[0-9]+"'
    routers = f'namespace="{service.namespace}",pod=~"{naming.router_name(service.name)}-.+"'
    cold_starts = f'ullage_router_wanted_requests{{{routers},pool="{pool_name}"}}'
    running = f"ullage_requests_running{{{pods}}} + ullage_requests_waiting{{{pods}}}"
    activity = f"(sum({running}) or vector(0)) + (sum({cold_starts}) or vector(0))"
    threshold = f"{scaling.targets.kv_utilization:g}"
    behavior = {"scaleUp": rules(scaling.scale_up), "scaleDown": rules(scaling.scale_down)}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
        "pollingInterval": POLL_S,
        "cooldownPeriod": round(scaling.idle_after),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [
            # Memory says how many; whether any, requests do, for cached prefixes take memory too.
            trigger(scaling, f"sum({METRIC}{{{pods}}}) or vector(0)", threshold, _NEVER),
            trigger(scaling, activity, _NEVER, "0"),
            *own_triggers(scaling),
        ],
    }


def own_triggers(scaling: AutoscalingSpec) -> list[Manifest]:
    """Return the additional triggers of a spec, in KEDA's form."""
    return [as_asked(each) for each in scaling.keda.triggers] if scaling.keda else []


def as_asked(section: Strict) -> Manifest:
    """Return a section with Kubernetes' own field names, without unset fields."""
    asked = to_api(section).items()
    return {name: value for name, value in asked if value is not None}


def trigger(scaling: AutoscalingSpec, query: str, threshold: str, activation: str) -> Manifest:
    login = scaling.keda.authentication_ref if scaling.keda else None
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": scaling.prometheus_url,
            "query": query,
            "threshold": threshold,
            "activationThreshold": activation,
        },
        **({"authenticationRef": to_api(login)} if login else {}),
    }
