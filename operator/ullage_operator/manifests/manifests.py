"""Builds the objects of routers and engines around their pod templates."""

import json
from collections.abc import Iterable
from typing import Any

from ullage_common.config.engine import GroupSection
from ullage_operator.api import naming
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.builder import Builder, as_asked
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
from ullage_operator.policy.pool_sizes import autoscaling_of

Manifest = dict[str, Any]

MIXED_ENGINE_TLS = f"{naming.GROUP}/mixed-engine-tls"
"""Annotation of a router Deployment that calls engines both in plaintext and with TLS.

The value is the `tls.engines` section that routers use for TLS, which the spec may no longer
contain.
"""


def router_objects(
    service: Service, settings: Settings, rollout_file: str, accepts_plaintext: bool = False
) -> list[Manifest]:
    """Return the routers' Deployment and its related objects, in the order to apply them.

    Args:
        rollout_file: the text of the file that running routers reload. Changing this file does not
            restart routers.
        accepts_plaintext: whether routers must support both TLS and plaintext, because some engines
            use one and some the other.
    """
    name = naming.router_name(service.name)
    config = to_yaml(document(router_config(service, accepts_plaintext)))
    match = naming.selector(service.name, naming.ROUTER)

    deployment = {
        "replicas": service.spec.router.replicas,
        "selector": {"matchLabels": match},
        "strategy": router_strategy(service),
        "template": router_template(service, config, settings),
    }

    is_secure = service.spec.tls.router is not None
    ports = [
        service_port("http", naming.HTTP_PORT, "https" if is_secure else "http"),
        service_port("grpc", naming.GRPC_PORT, grpc_protocol(is_secure)),
    ]
    policy = {
        "ingress": [
            # Anybody may call the serving ports.
            {"ports": [policy_port(naming.HTTP_PORT), policy_port(naming.GRPC_PORT)]},
            # The operator scales pools and judges canaries by the routers' counts.
            from_operator(naming.METRICS_PORT, settings),
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


def router_strategy(service: Service) -> Manifest:
    """Return how the Deployment replaces routers.

    A claim of files may be attached to one node at a time, so that a new router can start only when
    the old one has ended.
    """
    files = service.spec.router.files
    if files and files.claim_name:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def router_service(service: Service, ports: list[Manifest]) -> Manifest:
    """Return the Service through which clients reach the routers.

    Fields that the spec does not set are omitted, so that the API server or other controllers can
    set them.
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
        with_adapters: whether running engines have slots for adapters even though the spec lists
            no adapters.
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
    """Return the StatefulSet fields for a pool's volume claim templates (empty without templates).

    A canary's claims are deleted along with it, because the engines that replace the canary have
    claims of their own.
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

    If one pod of an engine is missing, all of the engine's pods are unready. A budget of one
    unavailable pod therefore protects the pods of all other engines, while the incomplete engine's
    unready pods may still be evicted.
    """
    if pool.nodes == 1:
        return {"matchLabels": naming.selector(service.name, naming.ENGINE, pool_name)}
    names = [pool_name, naming.group_pool(pool_name)]
    members = {"key": naming.POOL_LABEL, "operator": "In", "values": names}
    return {"matchLabels": naming.service_selector(service.name), "matchExpressions": [members]}


def of_group(template: Manifest, revision: str) -> Manifest:
    """Return a multi-pod engine's pod template with an annotation that contains its revision.

    The leader and the followers of an engine must have the same revision.
    """
    annotations = template["metadata"].get("annotations", {}) | {naming.GROUP_REVISION: revision}
    return {**template, "metadata": {**template["metadata"], "annotations": annotations}}


def group_objects(
    service: Service, pool_name: str, pool: PoolSpec, template: Manifest
) -> list[Manifest]:
    """Return the objects of engines that span several pods.

    They are the followers' StatefulSet, a Service that resolves leaders even before they are ready,
    and the NetworkPolicies between the pods of an engine.

    Args:
        template: the pod template of the followers.
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
        # The operator deletes followers once their leader has the new revision, so that no engine
        # loses its followers before its turn.
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
    """Return a pool's maximum number of engines."""
    scaling = autoscaling_of(pool)
    return max(pool.replicas, scaling.max_replicas if scaling else 0)


def followers(pool: PoolSpec) -> int:
    """Return the total number of followers across a pool's engines."""
    return pool.replicas * (pool.nodes - 1)


def grpc_protocol(is_secure: bool) -> str:
    """Return the appProtocol that tells meshes and gateways to use HTTP/2 (h2c without TLS)."""
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
    """Return the NetworkPolicy rule that lets the operator call a port."""
    pods = {"matchLabels": naming.operator_selector()}
    own = settings.namespace
    namespaces = {"matchLabels": {naming.NAMESPACE_LABEL: own}} if own else {}
    return {
        "from": [{"namespaceSelector": namespaces, "podSelector": pods}],
        "ports": [policy_port(number)],
    }


def from_scrapers(service: Service, settings: Settings) -> list[Manifest]:
    """Return the NetworkPolicy rule for the pods that may read metrics.

    If no pods are permitted, there is no rule, because an empty list of peers would permit
    everybody.
    """
    peers = service.spec.observability.metrics_from
    if peers is None and settings.metrics_namespace:
        labels = {naming.NAMESPACE_LABEL: settings.metrics_namespace}
        peers = [{"namespaceSelector": {"matchLabels": labels}}]
    return [{"from": peers, "ports": [policy_port(naming.METRICS_PORT)]}] if peers else []


def without_replicas(objects: Iterable[Manifest], kind: str = "StatefulSet") -> list[Manifest]:
    """Return the manifests without `replicas` on the workload that another controller scales."""
    return [
        {**item, "spec": {k: v for k, v in item["spec"].items() if k != "replicas"}}
        if item["kind"] == kind
        else item
        for item in objects
    ]
