"""Sets containers' CPU, memory and disk resources, from the spec or by default.

A node under pressure evicts or kills containers without resource requests first.
Every container therefore requests CPU and memory, and engines that fetch their model also request
ephemeral storage. Engines have no limits by default: their host memory is estimated, and a wrong
estimate must not kill them.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from ullage_common.config.engine import ModelSection, default_host_tier
from ullage_operator.api import naming
from ullage_operator.api.overlay import lies_in
from ullage_operator.api.quantities import amount, canonical
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.engine_choice import is_vllm

Amounts = dict[str, dict[str, str]]
"""Quantities by `requests` or `limits`, then by resource name."""

_MIB = 1 << 20
_SERVER_BYTES = 512 * _MIB
"""Host memory of an engine's server, and of the process from which native workers are forked."""
_WORKER_BYTES = 1024 * _MIB
"""Host memory of a worker, excluding weights: Python, torch and the device context."""
_UNKNOWN_WEIGHTS_BYTES = 8192 * _MIB
"""Assumed size of the weights per GPU if the model's size is unknown. Few models are smaller."""
_ROUNDING_BYTES = 128 * _MIB
_COMPILED_BYTES = 2048 * _MIB
"""Bytes of compiled kernels, graphs and tokenizer files in a cache, in addition to the weights."""
CACHE_LIMIT = 4
"""Ratio of the size limit of a pod's own cache to the expected size of its content.

The content's size is only estimated from the model's name. A repository may contain its weights
twice, and its main branch may change.
"""
_KV_MARGIN_BYTES = 64 * _MIB
_WORKER_MILLICPU = 250
_ROUTER: Amounts = {
    "requests": {"cpu": "250m", "memory": "256Mi"},
    "limits": {"memory": "1Gi"},
}
_PARAMETERS = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([mb])(?![a-z0-9])")
"""Matches a parameter count in lower case, for example 135m, 7b, 0.5b or 8x7b."""
_BLOCKS = re.compile(r"(?<![a-z0-9])i?q(\d)(?:_|\b)")
"""Matches the quantization format of a GGUF file, such as Q4_K_M (4 bits plus scales)."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
"""Matches a shard of a split GGUF file. Joining shards for vLLM takes additional memory."""
_BITS = (
    # gpt-oss is published as MXFP4 and does not say so in its name.
    (re.compile(r"int4|awq|gptq|mxfp4|4-?bit|gpt-oss(?!.*fp?16)"), 4.5),
    (re.compile(r"int8|fp8|w8a8|8-?bit"), 8.5),
)
_DTYPE_BITS = {"float32": 32.0}
_QUANTIZED_BITS = {"int4": 5.0, "int8": 8.5, "fp8": 8.5, "w8a8": 8.5}


def engine_resources(service: Service, pool: PoolSpec, settings: Settings) -> Amounts:
    """Return a pool's resources: its own settings, its GPUs, and defaults for unset fields.

    GPUs are requested as limits, which the DCGM exporter also uses to attribute GPUs to pods. Pools
    on the CPU and pools with device claims get no GPU limits.
    """
    size = _engine_bytes(service, pool, vllm=is_vllm(service.spec, pool, settings))
    requests = {"cpu": f"{_WORKER_MILLICPU * pool.gpus_per_pod}m", "memory": f"{size // _MIB}Mi"}
    if disk := cache_bytes(service, pool) + _kv_folder_bytes(pool):
        requests["ephemeral-storage"] = f"{disk // _MIB}Mi"

    resources = _over(pool.resources, {"requests": requests})
    if service.spec.device != "cpu" and not pool.resource_claims:
        resources.setdefault("limits", {})[pool.gpu_resource_name] = str(pool.gpus_per_pod)
    return resources


def cache_bytes(service: Service, pool: PoolSpec) -> int:
    """Return the ephemeral storage, in bytes, that a pod's cache is expected to use.

    The result is 0 if nothing is fetched into the cache, or if the size of the model is unknown.
    """
    cache = pool.model_cache
    model = service.spec.model
    is_elsewhere = cache.claim_name or cache.host_path or cache.claim_template
    if is_elsewhere or not model.source.startswith(("hf://", "s3://")):
        return 0

    weights = math.ceil(_num_parameters(model) * _published_bits(model) / 8)
    size = weights + weights // 10 + _COMPILED_BYTES
    return math.ceil(size / _ROUNDING_BYTES) * _ROUNDING_BYTES if weights else 0


def kv_file_bytes(size: int) -> int:
    """Return the maximum number of bytes that the file tier may use on its volume.

    The margin of one sixteenth plus 64 MiB covers file system overhead, and new files written
    before older ones are removed. A pod that uses more is evicted.
    """
    return size + size // 16 + _KV_MARGIN_BYTES


def _kv_folder_bytes(pool: PoolSpec) -> int:
    """Return the maximum size in bytes of a file tier on the pod's ephemeral storage.

    The result is 0 if there is no such file tier.
    """
    file = pool.memory.tiers.file
    if file is None or file.claim_name or file.host_path or kv_holders(pool):
        return 0
    return math.ceil(kv_file_bytes(file.size) / _MIB) * _MIB


def kv_holders(pool: PoolSpec) -> list[dict[str, Any]]:
    """Return the volume mounts in the pod template that contain the KV file tier's folder.

    Only mounts of the engine's container are considered.
    """
    file = pool.memory.tiers.file
    return _holders(pool.pod_template, naming.ENGINE, file.folder) if file else []


def files_bytes(service: Service) -> int:
    """Return the bytes that uploaded files may take on the ephemeral storage of the router's pod.

    The result is 0 if there are no files, or if they are on a volume of the spec. The margin covers
    uploads that are refused because the store is full, and descriptions of files.
    """
    files = service.spec.router.files
    if files is None or files.claim_name or files_holders(service):
        return 0
    size = files.max_bytes + files.max_bytes // 16 + _KV_MARGIN_BYTES
    return math.ceil(size / _MIB) * _MIB


def files_holders(service: Service) -> list[dict[str, Any]]:
    """Return the volume mounts in the router's pod template that contain the files' folder."""
    router = service.spec.router
    return _holders(router.pod_template, naming.ROUTER, router.files.folder) if router.files else []


def _holders(template: Mapping[str, Any], container_name: str, folder: str) -> list[dict[str, Any]]:
    """Return the volume mounts of a pod template's container that contain a folder."""
    return [
        mount
        for container in template.get("spec", {}).get("containers") or ()
        if container["name"] == container_name
        for mount in container.get("volumeMounts") or ()
        if isinstance(mount, dict) and lies_in(folder, mount.get("mountPath", "-"))
    ]


def tiers_line(service: Service, pool: PoolSpec, settings: Settings) -> str:
    """Return a short description of the KV tiers of a pool's engines."""
    tiers = pool.memory.tiers
    vllm = is_vllm(service.spec, pool, settings)
    host_bytes = _host_tier_bytes(service, pool, vllm=vllm)
    if not host_bytes:
        return "KV tiers: none"
    host = f"host memory {host_bytes // _MIB} MiB of each pod"
    remote = ["that of the pool's other pods"] if tiers.remote else []
    file = tiers.file
    files = [f"files {file.size // _MIB} MiB in {file.folder}"] if file else []
    return f"KV tiers: {', '.join([host, *remote, *files])}"


def _host_tier_bytes(service: Service, pool: PoolSpec, *, vllm: bool) -> int:
    """Return the maximum memory in bytes that an engine uses for its host tier.

    An engine without a prefix cache has no KV tiers. The same is true of vLLM with pipeline stages
    or several nodes.
    """
    memory = pool.memory
    is_parted = pool.nodes > 1 or pool.parallelism.pipeline > 1
    if not memory.prefix_cache or (vllm and is_parted):
        return 0
    asked = memory.tiers.asked_host_bytes
    if asked is not None:
        return asked
    limit = pool.resources.get("limits", {}).get("memory")
    limit_bytes = None if limit is None else int(amount(limit))
    return default_host_tier(memory, service.spec.device, pool.gpus_per_pod, limit_bytes)


def router_resources(service: Service) -> Amounts:
    """Return the routers' resources: the service's settings, and defaults for unset fields."""
    size = files_bytes(service)
    disk = {"ephemeral-storage": f"{size // _MIB}Mi"} if size else {}
    return _over(service.spec.router.resources, {**_ROUTER, "requests": _ROUTER["requests"] | disk})


def model_bytes(model: ModelSection) -> int:
    """Return the estimated size of a model's weights in bytes, from its name and source.

    The result is 0 if neither the name nor the source includes a parameter count.
    """
    return math.ceil(_num_parameters(model) * _bits(model) / 8)


def _num_parameters(model: ModelSection) -> float:
    """Return the parameter count in a model's name or source (0 if there is none)."""
    text = f"{model.source} {model.name}".lower().replace("_", "-")
    counts = [
        int(experts or 1) * float(number) * {"m": 1e6, "b": 1e9}[unit]
        for experts, number, unit in _PARAMETERS.findall(text)
    ]
    return max(counts, default=0.0)


def _bits(model: ModelSection) -> float:
    """Return the number of bits per weight in memory, including quantization scales."""
    if model.quantization in _QUANTIZED_BITS:
        return _QUANTIZED_BITS[model.quantization]
    return _named_bits(model) or _dtype_bits(model)


def _published_bits(model: ModelSection) -> float:
    """Return the number of bits per weight in a model's files, which is 16 for most models."""
    return _named_bits(model) or 16.0


def _named_bits(model: ModelSection) -> float:
    """Return the bits per weight of the format named in a model's name or source, or 0."""
    text = f"{model.source} {model.name}".lower()
    if blocks := _BLOCKS.search(text):
        return float(blocks[1]) + 0.5
    for pattern, bits in _BITS:
        if pattern.search(text):
            return bits
    return 0.0


def _dtype_bits(model: ModelSection) -> float:
    return _DTYPE_BITS.get(model.dtype, 16.0)


def _engine_bytes(service: Service, pool: PoolSpec, *, vllm: bool) -> int:
    """Return the expected host memory of one engine pod, in bytes.

    On a CPU, `deviceBytes`, if set, covers both the weights and the device KV.
    """
    model = service.spec.model
    is_on_cpu = service.spec.device == "cpu"
    weights = pool.memory.device_bytes or model_bytes(model) if is_on_cpu else 0
    unknown = 0 if is_on_cpu else _UNKNOWN_WEIGHTS_BYTES * pool.gpus_per_pod
    if vllm and model.source.endswith(".gguf"):
        # vLLM's checkpoint of the file stays in memory, and exists twice while it is written.
        checkpoint = math.ceil(_num_parameters(model) * _dtype_bits(model) / 8) or unknown
        weights = max(checkpoint, weights) + checkpoint
        if _SPLIT.search(model.source):
            weights += model_bytes(model)
    elif not (vllm or is_on_cpu):
        # Prepared weights stay in memory for a restarted worker.
        weights = model_bytes(model) or unknown
    num_workers = pool.gpus_per_pod + (pool.standby_worker and vllm)
    kv = pool.memory.host_kv + _host_tier_bytes(service, pool, vllm=vllm)
    total = _SERVER_BYTES + _WORKER_BYTES * num_workers + weights + kv
    return math.ceil(total / _ROUNDING_BYTES) * _ROUNDING_BYTES


def _over(given: Mapping[str, Mapping[str, int | str]], defaults: Amounts) -> Amounts:
    """Fill in missing quantities from defaults, and normalise all as the API server does.

    After normalisation, an applied object equals the stored object. A default request is
    skipped if a limit is set, because Kubernetes then uses the limit as the request. A default
    limit is skipped if the request exceeds it, because Kubernetes rejects requests above their
    limits.
    """
    merged: Amounts = {
        kind: {name: canonical(quantity) for name, quantity in by_name.items()}
        for kind, by_name in given.items()
    }
    own_limits = given.get("limits", {})
    own_requests = given.get("requests", {})
    for name, quantity in defaults.get("requests", {}).items():
        if name not in own_limits:
            merged.setdefault("requests", {}).setdefault(name, canonical(quantity))
    for name, quantity in defaults.get("limits", {}).items():
        if name not in own_requests or amount(own_requests[name]) <= amount(quantity):
            merged.setdefault("limits", {}).setdefault(name, canonical(quantity))
    return merged
