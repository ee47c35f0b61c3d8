"""Pod templates of engines and routers, with their volumes and the Secrets they mount: pure
builders of plain data.

Both run as an ordinary user without privileges on a read-only root file system, and write to
emptyDir volumes.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.errors import Problem
from ullage_operator.api.overlay import conflicts, over_template, overlap
from ullage_operator.api.pod_rules import template_problems
from ullage_operator.api.sections import USER, PoolSpec, canonical
from ullage_operator.api.spec import S3Spec, Service, Settings, claim_of, image_of
from ullage_operator.autoscaling import may_sleep
from ullage_operator.healing import HUNG_GRACE_S
from ullage_operator.manifests.config_files import digest
from ullage_operator.manifests.engine_choice import engine_image, may_be_vllm
from ullage_operator.manifests.resources import (
    CACHE_LIMIT,
    cache_bytes,
    engine_resources,
    kv_file_bytes,
    kv_holders,
    router_resources,
)

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MountedSecret:
    """A Secret as a folder; never mounted by file, or the kubelet would not follow its changes."""

    volume: str
    secret: str
    path: str


def router_secrets(service: Service) -> list[MountedSecret]:
    tenants = service.spec.tenants
    tls = service.spec.tls
    secrets = []
    if tenants:
        secrets.append(MountedSecret("keys", tenants.secret_name, naming.KEYS_DIR))
    if tls.router:
        secrets.append(MountedSecret("tls", tls.router.secret_name, naming.TLS_DIR))
        if ca := tls.router.client_ca_secret_name:
            secrets.append(MountedSecret("client-ca", ca, naming.CLIENT_CA_DIR))
    if tls.engines:
        name = tls.engines.router_secret_name or tls.engines.secret_name
        secrets.append(MountedSecret("engine-tls", name, naming.ENGINE_TLS_DIR))
    return [*secrets, *step_secrets(service), *ticket_secrets(service)]


def step_secrets(service: Service) -> list[MountedSecret]:
    """What routers show to the other services of their cascade."""
    cascade = service.spec.cascade
    secrets = []
    for index, step in enumerate(cascade.steps if cascade else ()):
        if step.tls:
            name = f"{index}-tls"
            path = f"{naming.STEPS_DIR}/{name}"
            secrets.append(MountedSecret(f"step-{name}", step.tls.secret_name, path))
        if step.key_secret_name:
            name = f"{index}-key"
            path = f"{naming.STEPS_DIR}/{name}"
            secrets.append(MountedSecret(f"step-{name}", step.key_secret_name, path))
    return secrets


ENGINE_TLS_VOLUME = "tls"
"""Volume of the certificate that engines serve with."""


def engine_secrets(service: Service) -> list[MountedSecret]:
    tls = service.spec.tls.engines
    volume = ENGINE_TLS_VOLUME
    path = naming.ENGINE_TLS_DIR
    secrets = [MountedSecret(volume, tls.secret_name, path)] if tls else []
    return [*secrets, *ticket_secrets(service)]


def ticket_secrets(service: Service) -> list[MountedSecret]:
    """What routers sign with and engines verify by."""
    tickets = service.spec.tickets
    return [MountedSecret("tickets", tickets.secret_name, naming.TICKETS_DIR)] if tickets else []


def secret_volumes(service: Service, secrets: Iterable[MountedSecret]) -> list[Manifest]:
    # With fsGroup only the pod's group may read the files; without it root owns them, so all may.
    mode = 0o444 if service.spec.security_context.fs_group is None else 0o440
    return [
        {"name": s.volume, "secret": {"secretName": s.secret, "defaultMode": mode}} for s in secrets
    ]


def secret_mounts(secrets: Iterable[MountedSecret]) -> list[Manifest]:
    return [{"name": s.volume, "mountPath": s.path, "readOnly": True} for s in secrets]


def engine_volumes(service: Service, pool_name: str, pool: PoolSpec) -> list[Manifest]:
    return [
        config_volume(naming.pool_name(service.name, pool_name)),
        # In memory: weights there outlive a worker, so that its restart takes seconds.
        memory_volume("run"),
        *cache_volumes(service, pool),
        *kv_volumes(pool),
        scratch_volume("tmp"),
        memory_volume("shm", shm_size(service, pool)),
        *adapter_volumes(service, pool),
        *claim_volumes(service),
        *image_volumes(service),
        *secret_volumes(service, engine_secrets(service)),
    ]


def engine_mounts(service: Service, pool: PoolSpec) -> list[Manifest]:
    return [
        {"name": "config", "mountPath": naming.CONFIG_DIR, "readOnly": True},
        {"name": "run", "mountPath": naming.RUN_DIR},
        {"name": "cache", "mountPath": naming.CACHE_DIR},
        *kv_mounts(pool),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *adapter_mounts(pool),
        *claim_mounts(service),
        *image_mounts(service),
        *secret_mounts(engine_secrets(service)),
    ]


def adapter_volumes(service: Service, pool: PoolSpec) -> list[Manifest]:
    """Return the volume of the adapters file, as a folder, since the kubelet updates no single
    mounted file."""
    if not pool.memory.max_loras:
        return []
    return [{"name": "adapters", "configMap": {"name": naming.engine_name(service.name)}}]


def adapter_mounts(pool: PoolSpec) -> list[Manifest]:
    if not pool.memory.max_loras:
        return []
    return [{"name": "adapters", "mountPath": naming.ADAPTERS_DIR, "readOnly": True}]


CACHE_VOLUME = "cache"


def cache_volumes(service: Service, pool: PoolSpec) -> list[Manifest]:
    """Return the volumes for downloads and compiled kernels.

    Pods share them only where the spec names a place. Where each pod has its own claim, which its
    StatefulSet mounts, there are none.
    """
    cache = pool.model_cache
    if cache.claim_template:
        return []
    limit = cache.size_limit
    if limit is None and (size := cache_bytes(service, pool)):
        limit = f"{CACHE_LIMIT * size >> 20}Mi"
    return [storage_volume(CACHE_VOLUME, cache.claim_name, cache.host_path, limit)]


def volume_claim_templates(pool: PoolSpec) -> list[Manifest]:
    """Return the volumeClaimTemplates of a pool's StatefulSet."""
    template = pool.model_cache.claim_template
    if template is None:
        return []
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": canonical(template.size)}},
    }
    if template.storage_class_name is not None:
        spec["storageClassName"] = template.storage_class_name
    return [{"metadata": {"name": CACHE_VOLUME}, "spec": spec}]


def storage_volume(
    name: str, claim: str | None, host_path: str | None, size_limit: int | str | None
) -> Manifest:
    """A volume on a disk: of a claim or the node, else one that goes with the pod, of at most
    `size_limit`."""
    if claim:
        return {"name": name, "persistentVolumeClaim": {"claimName": claim}}
    if host_path:
        return {"name": name, "hostPath": {"path": host_path, "type": "Directory"}}
    bound = {} if size_limit is None else {"sizeLimit": canonical(size_limit)}
    return {"name": name, "emptyDir": bound}


KV_VOLUME = "kv"


def kv_volumes(pool: PoolSpec) -> list[Manifest]:
    """Return the volume of the file tier; none where the pod template mounts one at its folder."""
    file = pool.memory.tiers.file
    if file is None or not kv_mounts(pool):
        return []
    limit = f"{kv_file_bytes(file.size) >> 20}Mi"
    return [storage_volume(KV_VOLUME, file.claim_name, file.host_path, limit)]


def kv_mounts(pool: PoolSpec) -> list[Manifest]:
    file = pool.memory.tiers.file
    if file is None or (kv_holders(pool) and not (file.claim_name or file.host_path)):
        return []
    return [{"name": KV_VOLUME, "mountPath": file.folder}]


def config_volume(config_map: str) -> Manifest:
    return {"name": "config", "configMap": {"name": config_map}}


def memory_volume(name: str, size_limit: int | str | None = None) -> Manifest:
    bound = {} if size_limit is None else {"sizeLimit": canonical(size_limit)}
    return {"name": name, "emptyDir": {"medium": "Memory", **bound}}


def scratch_volume(name: str) -> Manifest:
    return {"name": name, "emptyDir": {}}


def claims_of(service: Service) -> list[str]:
    """Return the claims of the model and of adapters, the model's first; each once."""
    claims = (claim_of(service.spec.model.source), *(service.spec.adapter_claims or ()))
    return list(dict.fromkeys(filter(None, claims)))


def claim_volume_names(service: Service) -> dict[str, str]:
    """Return the names of the volumes by the claims."""
    return {claim: f"models-{i}" if i else "models" for i, claim in enumerate(claims_of(service))}


def claim_volumes(service: Service) -> list[Manifest]:
    return [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, name in claim_volume_names(service).items()
    ]


def claim_mounts(service: Service) -> list[Manifest]:
    return [
        {"name": name, "mountPath": f"{naming.CLAIM_ROOT}/{claim}", "readOnly": True}
        for claim, name in claim_volume_names(service).items()
    ]


MODEL_IMAGE = "model-image"


def image_volumes(service: Service) -> list[Manifest]:
    """Return the image volume of the model, which needs Kubernetes 1.31.

    Nodes pull it like containers' images, with the pod's own pull secrets.
    """
    reference = image_of(service.spec.model.source)
    policy = service.spec.model_pull_policy
    if not reference:
        return []
    image = {"reference": reference, **({"pullPolicy": policy} if policy else {})}
    return [{"name": MODEL_IMAGE, "image": image}]


def image_mounts(service: Service) -> list[Manifest]:
    if not image_of(service.spec.model.source):
        return []
    return [{"name": MODEL_IMAGE, "mountPath": naming.MODEL_IMAGE_DIR, "readOnly": True}]


PRE_STOP_S = 15
"""Seconds until nobody sends new work to a pod that ends, once its address is withdrawn."""
LAST_MARGIN_S = 15
"""Seconds for the last messages and the end of the process, after the drain."""
ENGINE_ENV: tuple[Manifest, ...] = (
    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "HF_HOME", "value": f"{naming.CACHE_DIR}/huggingface"},
    # Kernels are compiled once; the home directory cannot be written.
    {"name": "TRITON_CACHE_DIR", "value": f"{naming.CACHE_DIR}/triton"},
)
START_PERIOD_S = 5
FOLLOWER_START_S = 120
"""Seconds until a follower's process answers; it imports nothing that is large."""
SHM_BYTES = 1 << 30
VLLM_SHM_BYTES = 256 << 20
"""Shared memory for each GPU's rank, above the ring buffer of ten 24 MiB chunks by which it answers
vLLM's scheduler."""

DEFAULT_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}


def template_conflicts(service: Service, settings: Settings) -> Iterator[Problem]:
    """Yield the fields of pod templates that are not allowed or that the operator itself sets."""
    router = service.spec.router.pod_template
    places = {"spec.router": router}
    places |= {f"spec.pools.{n}": pool.pod_template for n, pool in service.spec.pools.items()}
    problems = [
        problem
        for place, template in places.items()
        for problem in template_problems(template, f"{place}.podTemplate")
    ]
    if problems:
        yield from problems
        return

    if router:
        yield from conflicts(router, own_router(service, "", settings), "spec.router.podTemplate")
    for name, pool in service.spec.pools.items():
        if settings.on_kubernetes:
            yield from kv_folder_problems(service, name, pool)
        if pool.pod_template:
            own = own_engine(service, name, pool, "", settings)
            yield from conflicts(pool.pod_template, own, f"spec.pools.{name}.podTemplate")


def kv_folder_problems(service: Service, pool_name: str, pool: PoolSpec) -> Iterator[Problem]:
    """Yield why the folder of a pool's file tier cannot be where it is to be."""
    file = pool.memory.tiers.file
    if file is None:
        return
    is_own = pool.memory.tiers != service.spec.memory.tiers
    path = f"spec.{f'pools.{pool_name}.' if is_own else ''}memory.tiers.file.path"
    others = [m["mountPath"] for m in engine_mounts(service, pool) if m["name"] != KV_VOLUME]
    if overlaps := overlap(file.folder, others):
        yield Problem(
            path,
            f"{file.folder} {overlaps}, which is the operator's own; choose another folder, or "
            f"leave path out for {naming.KV_DIR}",
        )
    for mount in kv_holders(pool):
        if mount.get("readOnly"):
            yield Problem(
                path,
                f"{file.folder} lies in {mount['mountPath']}, which podTemplate mounts readOnly; "
                "leave readOnly out there",
            )


def engine_template(
    service: Service, pool_name: str, pool: PoolSpec, config: str, settings: Settings
) -> Manifest:
    own = own_engine(service, pool_name, pool, config, settings)
    return completed(pool.pod_template, own, settings)


def router_template(service: Service, config: str, settings: Settings) -> Manifest:
    own = own_router(service, config, settings)
    return completed(service.spec.router.pod_template, own, settings)


def completed(given: Manifest, own: Manifest, settings: Settings) -> Manifest:
    """Return a spec's pod template with the operator's fields merged over it.

    Its pods are spread over nodes and reachable past the cluster's mesh, unless the template says
    otherwise.
    """
    meta = own["metadata"]
    said = given.get("metadata", {}).get("annotations") or {}
    passing = {name: value for name, value in mesh_annotations(settings) if name not in said}
    own = {**own, "metadata": {**meta, "annotations": meta["annotations"] | passing}}
    spread = given.get("spec", {}).get("topologySpreadConstraints", [DEFAULT_SPREAD])
    # A constraint without a selector would count no pods.
    counted = {"labelSelector": {"matchLabels": own["metadata"]["labels"]}}
    constraints = {"topologySpreadConstraints": [counted | each for each in spread]}
    return over_template(given, {**own, "spec": own["spec"] | (constraints if spread else {})})


_PORTS_PAST_MESH = {
    "istio": "traffic.sidecar.istio.io/excludeInboundPorts",
    "linkerd": "config.linkerd.io/skip-inbound-ports",
}
"""Annotations by which a mesh's sidecar leaves ports of a pod alone."""


def mesh_annotations(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the annotations by which the operator, outside the mesh, reaches pods inside it.

    The operator connects to pod addresses in plaintext, and only to ports at which nothing can be
    changed.
    """
    if settings.mesh:
        yield _PORTS_PAST_MESH[settings.mesh], f"{naming.PROBE_PORT},{naming.METRICS_PORT}"


def own_engine(
    service: Service, pool_name: str, pool: PoolSpec, config: str, settings: Settings
) -> Manifest:
    """Return the operator's fields of an engine's pod template."""
    spec = {
        "serviceAccountName": account_name(service, naming.engine_name(service.name)),
        **pod_defaults(service, settings, engine_pre_stop_s(settings)),
        "containers": [engine_container(service, pool, settings)],
        "volumes": engine_volumes(service, pool_name, pool),
        **claims_of_pods(pool),
    }
    match = naming.selector(service.name, naming.ENGINE, pool_name)
    return {"metadata": metadata(match, config), "spec": spec}


def engine_container(service: Service, pool: PoolSpec, settings: Settings) -> Manifest:
    # The kubelet's probes support neither the service's TLS nor a mesh's.
    is_secure = service.spec.tls.engines is not None or bool(settings.mesh)
    failures = math.ceil(pool.start_timeout / START_PERIOD_S)  # until then it fetches and loads
    return {
        "name": naming.ENGINE,
        "image": engine_image(service.spec, settings),
        "imagePullPolicy": settings.image_pull_policy,
        # The last lines of a container that ended say why, in the service's conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-engine"],
        "args": [
            "--config",
            f"{naming.CONFIG_DIR}/{naming.ENGINE_CONFIG}",
            "--engine-id",
            "$(POD_NAME)",
        ],
        "env": [
            *ENGINE_ENV,
            *user_env(service, pool, settings),
            *group_env(pool),
            *s3_env(service, pool),
            *vllm_env(service, pool, settings),
        ],
        "ports": [
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            port("probe", naming.PROBE_PORT),
        ],
        "resources": engine_resources(service, pool, settings) | claims_of_container(pool),
        "securityContext": container_security(),
        "startupProbe": killing(grpc_probe("readiness", START_PERIOD_S, failures, is_secure)),
        "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
        # Lenient: a busy engine is not a dead one.
        "livenessProbe": killing(grpc_probe("liveness", 10, 10, is_secure)),
        "lifecycle": {"preStop": {"sleep": {"seconds": engine_pre_stop_s(settings)}}},
        "volumeMounts": engine_mounts(service, pool),
    }


def claims_of_pods(pool: PoolSpec) -> Manifest:
    """Return the resourceClaims of a pool's pods; empty where they ask for devices by limits."""
    claims = [
        {"name": each.name, "resourceClaimTemplateName": each.resource_claim_template_name}
        for each in pool.resource_claims
    ]
    return {"resourceClaims": claims} if claims else {}


def claims_of_container(pool: PoolSpec) -> Manifest:
    """Return the claims of an engine's container among those of its pod."""
    claims = [
        {"name": each.name, **({"request": each.request} if each.request else {})}
        for each in pool.resource_claims
    ]
    return {"claims": claims} if claims else {}


def user_env(service: Service, pool: PoolSpec, settings: Settings) -> list[Manifest]:
    """Return the variable USER for a UID without an account: torch and Triton put the name into
    paths."""
    is_known = service.spec.security_context.run_as_user == USER or not settings.on_kubernetes
    if is_known or "USER" in given_env(pool):
        return []
    return [{"name": "USER", "value": "ullage"}]


def given_env(pool: PoolSpec) -> set[str]:
    """Return the names of environment variables that a pod template gives to engines."""
    return {variable["name"] for variable in _given_variables(pool)}


def _given_variables(pool: PoolSpec) -> list[Manifest]:
    containers = pool.pod_template.get("spec", {}).get("containers", ())
    return [
        variable
        for container in containers
        if container["name"] == naming.ENGINE
        for variable in container.get("env", ())
    ]


def group_env(pool: PoolSpec) -> list[Manifest]:
    """Return environment of pods that are not an engine by themselves."""
    if pool.nodes == 1:
        return []
    revision = f"metadata.annotations['{naming.GROUP_REVISION}']"
    return [
        # The address that vLLM gives to the other nodes.
        {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "ULLAGE_GROUP_REVISION", "valueFrom": {"fieldRef": {"fieldPath": revision}}},
    ]


AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Variables of AWS's SDKs, and keys of a Secret, that are one credential."""


def s3_env(service: Service, pool: PoolSpec) -> list[Manifest]:
    """Return the variables by which engines read buckets, which are those of AWS's SDKs.

    Variables of the pod template come before them. Keys are of one credential, so where the pod
    template has one of them, it has all.
    """
    spec = service.spec
    s3 = spec.s3 or S3Spec()
    if spec.s3 is None and not spec.model.source.startswith("s3://"):
        return []

    given = given_env(pool)
    has_keys = not given.isdisjoint(AWS_KEYS)
    values = {
        "ULLAGE_S3_CACHE": f"{naming.CACHE_DIR}/s3",
        "AWS_ENDPOINT_URL_S3": s3.endpoint,
        "AWS_REGION": s3.region,
        "AWS_NO_SIGN_REQUEST": "true" if s3.anonymous and not has_keys else None,
    }
    env: list[Manifest] = [
        {"name": name, "value": value} for name, value in values.items() if value
    ]
    if s3.secret_name and not has_keys:
        env += _keys_of(s3.secret_name)
    return [variable for variable in env if variable["name"] not in given]


def s3_store(service: Service, pool: PoolSpec) -> str:
    """Return a digest of where engines find the bucket of their model.

    It is empty for AWS where no region is set, and for models that are in no bucket. The address
    itself may be of a Secret.
    """
    if not service.spec.model.source.startswith("s3://"):
        return ""
    env = {each["name"]: each for each in (*s3_env(service, pool), *_given_variables(pool))}
    # Engines find it by the first of these that is not empty.
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        variable = env.get(name, {})
        address = variable.get("value") or json.dumps(variable.get("valueFrom"), sort_keys=True)
        if address != "null":
            return digest(address.rstrip("/"))
    return ""


def _keys_of(secret: str) -> Iterator[Manifest]:
    for key in AWS_KEYS:
        # Only temporary credentials have a token.
        optional = {"optional": True} if key == "AWS_SESSION_TOKEN" else {}
        reference = {"secretKeyRef": {"name": secret, "key": key, **optional}}
        yield {"name": key, "valueFrom": reference}


def follower_template(
    service: Service, pool_name: str, pool: PoolSpec, config: str, settings: Settings
) -> Manifest:
    """Return the pod template of followers, which compute a part of an engine with vLLM.

    It is the engine's template with the follower's worker in place of the server, with its own
    probes, and without ports, Secrets and the KV file tier.
    """
    leader = own_engine(service, pool_name, pool, config, settings)
    [container] = leader["spec"]["containers"]
    of_server = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
    of_leaders = {KV_VOLUME, *(secret.volume for secret in engine_secrets(service))}

    leaders = naming.pool_name(service.name, naming.group_pool(pool_name))
    host = (
        f"{naming.pool_name(service.name, pool_name)}-{{group}}.{leaders}.{service.namespace}.svc"
    )
    index = "metadata.labels['apps.kubernetes.io/pod-index']"

    follower = {key: value for key, value in container.items() if key not in of_server} | {
        "command": ["python", "-m", "ullage_engine.vllm_worker"],
        "args": [
            "--follow",
            "--config",
            f"{naming.CONFIG_DIR}/{naming.ENGINE_CONFIG}",
            "--index",
            "$(POD_INDEX)",
            "--leader",
            host,
        ],
        "env": [
            {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            *container["env"],
        ],
        "volumeMounts": [m for m in container["volumeMounts"] if m["name"] not in of_leaders],
        **follower_probes(),
    }

    match = naming.selector(service.name, naming.FOLLOWER, naming.group_pool(pool_name))
    volumes = [v for v in leader["spec"]["volumes"] if v["name"] not in of_leaders]
    spec = leader["spec"] | {"containers": [follower], "volumes": volumes}
    own = {"metadata": metadata(match, config), "spec": spec}
    return completed(pool.pod_template, own, settings)


def vllm_env(service: Service, pool: PoolSpec, settings: Settings) -> list[Manifest]:
    """Return the environment of vLLM, whose variables a pod template may override.

    It is empty where `ullage up` runs the engine, whose user has their own caches.
    """
    if not settings.on_kubernetes or not may_be_vllm(service.spec):
        return []
    env = {
        # The image's home cannot be written; libraries below vLLM compile kernels into it.
        "HOME": f"{naming.CACHE_DIR}/home",
        # A worker that is started again finds what another compiled.
        "VLLM_CACHE_ROOT": f"{naming.CACHE_DIR}/vllm",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # Later adapters may come from the hub.
    if not pool.memory.max_loras and not service.spec.model.source.startswith("hf://"):
        env["HF_HUB_OFFLINE"] = "1"  # nothing is fetched, so nothing may wait for the hub
    given = given_env(pool)
    return [{"name": name, "value": value} for name, value in env.items() if name not in given]


def shm_size(service: Service, pool: PoolSpec) -> int | str:
    """Return the size of /dev/shm: the pool's, or enough for ranks to exchange data."""
    if pool.shm_size is not None:
        return pool.shm_size
    ranks = VLLM_SHM_BYTES * pool.gpus_per_pod if may_be_vllm(service.spec) else 0
    return f"{(SHM_BYTES + ranks) >> 20}Mi"


def own_router(service: Service, config: str, settings: Settings) -> Manifest:
    """Return the operator's fields of a router's pod template."""
    secrets = router_secrets(service)
    container = {
        "name": naming.ROUTER,
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        # The last lines of a container that ended say why, in the service's conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": ["ullage-router"],
        "args": ["--config", f"{naming.CONFIG_DIR}/{naming.ROUTER_CONFIG}"],
        "ports": [
            port("http", naming.HTTP_PORT),
            port("grpc", naming.GRPC_PORT),
            port("metrics", naming.METRICS_PORT),
            *probe_ports(service.spec.tls.router is not None),
        ],
        "resources": router_resources(service),
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
        "serviceAccountName": account_name(service, naming.router_name(service.name)),
        **pod_defaults(service, settings, PRE_STOP_S),
        "terminationGracePeriodSeconds": grace_s(service, PRE_STOP_S) + held_s(service),
        "containers": [container],
        "volumes": [
            config_volume(naming.router_name(service.name)),
            scratch_volume("tmp"),
            *secret_volumes(service, secrets),
        ],
    }
    match = naming.selector(service.name, naming.ROUTER)
    return {"metadata": metadata(match, config), "spec": spec}


def metadata(match: dict[str, str], config: str) -> Manifest:
    # Without the version: an operator's update must not restart every engine by a label.
    return {"labels": match, "annotations": {naming.CONFIG_HASH: digest(config)}}


def pod_defaults(service: Service, settings: Settings, pre_stop_s: int) -> Manifest:
    """Return the fields that all pods share, as Pod Security's restricted profile asks."""
    secrets = [secret.name for secret in service.spec.image_pull_secrets]
    pulled = [{"name": name} for name in dict.fromkeys([*secrets, *settings.image_pull_secrets])]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(service, pre_stop_s),
        "securityContext": pod_security(service),
        **({"imagePullSecrets": pulled} if pulled else {}),
    }


def account_name(service: Service, own: str) -> str:
    """Return the ServiceAccount of pods: the spec's, or the operator's own for them."""
    return service.spec.service_account.name or own


def pod_security(service: Service) -> Manifest:
    context = service.spec.security_context
    ids = {
        "runAsUser": context.run_as_user,
        "runAsGroup": context.run_as_group,
        "fsGroup": context.fs_group,
    }
    return {
        "runAsNonRoot": True,
        **{name: number for name, number in ids.items() if number is not None},
        # Otherwise each start would change the owner of every file in a model cache.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def engine_pre_stop_s(settings: Settings) -> int:
    """Routers know engines by DNS, which withdraws an address late, and tells one that takes its
    place late: until then the engine that ends must serve."""
    return PRE_STOP_S + math.ceil(settings.dns_lag_s)


def grace_s(service: Service, pre_stop_s: int) -> int:
    """Seconds until an ending pod is killed: engines and routers drain for one whole request."""
    return pre_stop_s + math.ceil(service.spec.limits.total_timeout) + LAST_MARGIN_S


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
    """Return HTTP probes; with TLS on their own port, since clients may need a certificate."""
    if is_secure:
        return {
            "startupProbe": killing(grpc_probe("liveness", 1, 60, is_secure)),
            "readinessProbe": grpc_probe("readiness", 2, 2, is_secure),
            "livenessProbe": killing(grpc_probe("liveness", 10, 6, is_secure)),
        }
    return {
        "startupProbe": killing(http_probe("/healthz", 1, 60)),
        "readinessProbe": http_probe("/readyz", 2, 2),
        "livenessProbe": killing(http_probe("/healthz", 10, 6)),
    }


def follower_probes() -> Manifest:
    """Return the port and probes of a follower.

    A follower is ready while its group is complete and computes, and is killed when it hangs.
    """
    failures = math.ceil(FOLLOWER_START_S / START_PERIOD_S)
    return {
        "ports": [port("probe", naming.PROBE_PORT)],
        "startupProbe": killing(http_probe("/healthz", START_PERIOD_S, failures, "probe")),
        "readinessProbe": http_probe("/readyz", 2, 2, "probe"),
        "livenessProbe": killing(http_probe("/healthz", 10, 6, "probe")),
    }


def killing(probe: Manifest) -> Manifest:
    """Return a probe whose failure kills a container, with a short termination grace period."""
    return {**probe, "terminationGracePeriodSeconds": HUNG_GRACE_S}


def grpc_probe(service: str, period_s: int, failures: int, is_secure: bool) -> Manifest:
    number = naming.PROBE_PORT if is_secure else naming.GRPC_PORT
    return {
        "grpc": {"port": number, "service": service},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def http_probe(path: str, period_s: int, failures: int, port_name: str = "http") -> Manifest:
    return {
        "httpGet": {"path": path, "port": port_name},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
