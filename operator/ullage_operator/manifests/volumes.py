"""Builds the volumes of engine and router pods, and chooses the Secrets that they mount."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.quantities import canonical
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.spec import Service, claim_of, image_of
from ullage_operator.manifests.engine_choice import may_be_vllm
from ullage_operator.manifests.resources import (
    CACHE_LIMIT,
    cache_bytes,
    files_bytes,
    files_holders,
    kv_file_bytes,
    kv_holders,
)

Manifest = dict[str, Any]

ENGINE_TLS_VOLUME = "tls"
"""Name of the volume with the certificate that engines present to clients."""
CACHE_VOLUME = "cache"
KV_VOLUME = "kv"
FILES_VOLUME = "files"
MODEL_IMAGE = "model-image"
SHM_BYTES = 1 << 30
VLLM_SHM_BYTES = 256 << 20
"""Shared memory in bytes for each GPU's rank.

It holds the ring buffer of ten 24 MiB chunks through which a rank responds to vLLM's scheduler.
"""


@dataclass(frozen=True, slots=True)
class MountedSecret:
    """A Secret mounted as a folder, because the kubelet does not update one mounted as a file."""

    volume: str
    secret: str
    path: str


def router_secrets(service: Service) -> list[MountedSecret]:
    """Return the Secrets that routers mount."""
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
    """Return the Secrets that routers need to connect to the other services of their cascade."""
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


def engine_secrets(service: Service) -> list[MountedSecret]:
    """Return the Secrets that engines mount."""
    secrets = []
    if tls := service.spec.tls.engines:
        certificate = MountedSecret(ENGINE_TLS_VOLUME, tls.secret_name, naming.ENGINE_TLS_DIR)
        secrets.append(certificate)
    return [*secrets, *ticket_secrets(service)]


def ticket_secrets(service: Service) -> list[MountedSecret]:
    """Return the Secret with the keys for tickets, which routers sign and engines verify."""
    tickets = service.spec.tickets
    return [MountedSecret("tickets", tickets.secret_name, naming.TICKETS_DIR)] if tickets else []


def secret_volumes(service: Service, secrets: Iterable[MountedSecret]) -> list[Manifest]:
    """Return the pod volumes for the given Secrets."""
    # With fsGroup, only the pod's group may read the files. Without it, root owns them, so all
    # users must be able to read them.
    mode = 0o444 if service.spec.security_context.fs_group is None else 0o440
    return [
        {"name": s.volume, "secret": {"secretName": s.secret, "defaultMode": mode}} for s in secrets
    ]


def secret_mounts(secrets: Iterable[MountedSecret]) -> list[Manifest]:
    return [{"name": s.volume, "mountPath": s.path, "readOnly": True} for s in secrets]


def prompts_volumes(service: Service) -> list[Manifest]:
    """Return the volume of the prompts that routers replay to compare answers.

    It is optional, so that a missing ConfigMap does not keep routers from starting.
    """
    answers = service.spec.rollout.answers
    if answers is None or answers.config_map_name is None:
        return []
    return [{"name": "prompts", "configMap": {"name": answers.config_map_name, "optional": True}}]


def prompts_mounts(service: Service) -> list[Manifest]:
    mount = {"name": "prompts", "mountPath": naming.PROMPTS_DIR, "readOnly": True}
    return [mount] if prompts_volumes(service) else []


def files_volumes(service: Service) -> list[Manifest]:
    """Return the volume of uploaded files (empty if the pod template mounts one for them)."""
    files = service.spec.router.files
    if files is None or not files_mounts(service):
        return []
    limit = f"{files_bytes(service) >> 20}Mi"
    return [storage_volume(FILES_VOLUME, files.claim_name, None, limit)]


def files_mounts(service: Service) -> list[Manifest]:
    files = service.spec.router.files
    if files is None or (files_holders(service) and not files.claim_name):
        return []
    return [{"name": FILES_VOLUME, "mountPath": files.folder}]


def engine_volumes(service: Service, pool_name: str, pool: PoolSpec) -> list[Manifest]:
    """Return the volumes of an engine's pod."""
    return [
        config_volume(naming.pool_name(service.name, pool_name)),
        # Weights in this memory survive a worker, so that its restart takes only seconds.
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
    """Return the volume mounts of an engine's container."""
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
    """Return the volume of the adapters file.

    The ConfigMap is mounted as a folder, because the kubelet does not update a file that is mounted
    on its own.
    """
    if not pool.memory.max_loras:
        return []
    return [{"name": "adapters", "configMap": {"name": naming.engine_name(service.name)}}]


def adapter_mounts(pool: PoolSpec) -> list[Manifest]:
    if not pool.memory.max_loras:
        return []
    return [{"name": "adapters", "mountPath": naming.ADAPTERS_DIR, "readOnly": True}]


def cache_volumes(service: Service, pool: PoolSpec) -> list[Manifest]:
    """Return the volumes for downloads and compiled kernels.

    Pods share the volume only if the spec names a claim or a host path. If each pod has its own
    claim, the result is empty, because the StatefulSet then adds the volume itself.
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
    """Return a disk volume: a claim, a host path, or an emptyDir that is deleted with the pod.

    Args:
        name: the name of the volume.
        claim: the PersistentVolumeClaim, if any.
        host_path: the folder of the node, if any.
        size_limit: the size limit of the emptyDir, or None for no limit.
    """
    if claim:
        return {"name": name, "persistentVolumeClaim": {"claimName": claim}}
    if host_path:
        return {"name": name, "hostPath": {"path": host_path, "type": "Directory"}}
    bound = {} if size_limit is None else {"sizeLimit": canonical(size_limit)}
    return {"name": name, "emptyDir": bound}


def kv_volumes(pool: PoolSpec) -> list[Manifest]:
    """Return the file tier's volume (empty if the pod template mounts a volume at its path)."""
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
    """Return the claims of the model and its adapters, model first, without duplicates."""
    claims = (claim_of(service.spec.model.source), *(service.spec.adapter_claims or ()))
    return list(dict.fromkeys(filter(None, claims)))


def claim_volume_names(service: Service) -> dict[str, str]:
    """Return the volume name of each claim."""
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


def image_volumes(service: Service) -> list[Manifest]:
    """Return the image volume of the model, which needs Kubernetes 1.31.

    Nodes pull the image with the pod's pull secrets, just like a container's image.
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


def shm_size(service: Service, pool: PoolSpec) -> int | str:
    """Return the size of /dev/shm: the pool's setting, or enough for ranks to exchange data."""
    if pool.shm_size is not None:
        return pool.shm_size
    ranks = VLLM_SHM_BYTES * pool.gpus_per_pod if may_be_vllm(service.spec) else 0
    return f"{(SHM_BYTES + ranks) >> 20}Mi"
