"""Converts the helm values of vLLM's production-stack, with a service for each model."""

from typing import Any

from ullage_cli.convert.pods import (
    set_device,
    set_env,
    set_metadata,
    set_mounts,
    set_pod_fields,
    set_resources,
)
from ullage_cli.convert.source import SourceDocument, set_if_valid
from ullage_cli.manifest_draft import Draft, service_name
from ullage_cli.vllm_arguments import (
    POOL,
    Argument,
    multiply_by_data_ranks,
    read_tokens,
    set_model_name,
    set_reasoning_default,
    source_uri,
    translate,
)
from ullage_operator.api.errors import LocalFailure

MODELS = "servingEngineSpec.modelSpec"

_CLAIM_FOLDER = "file:///data/"
"""Folder at which the chart mounts a model's claim, as a source."""

_OPTIONS = {
    "enableChunkedPrefill": "enable_chunked_prefill",
    "maxModelLen": "max_model_len",
    "dtype": "dtype",
    "tensorParallelSize": "tensor_parallel_size",
    "pipelineParallelSize": "pipeline_parallel_size",
    "maxNumSeqs": "max_num_seqs",
    "maxNumBatchedTokens": "max_num_batched_tokens",
    "gpuMemoryUtilization": "gpu_memory_utilization",
    "maxLoras": "max_loras",
    "runner": "runner",
    "convert": "convert",
}
"""vLLM's names of the fields of `vllmConfig`."""

_IMAGE = "Ullage has its own engine images (spec.image replaces them)"
_LMCACHE = "Ullage keeps KV in tiers of its own (memory.tiers)"
_TOOLS = "the router finds the format of tool calls from the model's chat template"
_RAY = "set nodes of the pool, with all GPUs of an engine in gpus"

_MODEL_REASONS = {
    "repository": _IMAGE,
    "tag": _IMAGE,
    "imagePullPolicy": _IMAGE,
    "lmcacheConfig": _LMCACHE,
    "enableTool": _TOOLS,
    "toolCallParser": _TOOLS,
    "chatTemplate": "put the template into the model's folder, as chat_template.jinja",
    "chatTemplateConfigMap": "put the template into the model's folder, as chat_template.jinja",
    "raySpec": _RAY,
    "pvcAccessMode": "each pod has a claim of its own, ReadWriteOnce",
    "pvcMatchLabels": "name a storageClassName, or an existing claim (modelCache.claimName)",
    "keda": "only the numbers of replicas and triggers have counterparts (autoscaling)",
    "vllmConfig": "neither a field of Ullage nor an argument of vLLM's engine",
    "requestGPUMem": "engines take whole GPUs, or MIG slices by gpuResourceName",
    "requestGPUMemPercentage": "engines take whole GPUs, or MIG slices by gpuResourceName",
    "requestGPUCores": "engines take whole GPUs, or MIG slices by gpuResourceName",
}

_OTHER_REASONS = {
    "routerSpec": "Ullage has its own router (spec.router)",
    "cacheserverSpec": _LMCACHE,
    "loraController": "list adapters in spec.adapters",
    "loraAdapters": "list adapters in spec.adapters",
    "sharedStorage": "name a claim in modelCache of the pool",
    "sharedPvcStorage": "name a claim in modelCache of the pool",
    "servingEngineSpec.vllmApiKey": (
        "make keys with ullage key new, and name their Secret in spec.tenants.secretName"
    ),
    "servingEngineSpec.securityContext": "pods comply with the restricted profile",
    "servingEngineSpec.containerSecurityContext": "pods comply with the restricted profile",
    "servingEngineSpec.startupProbe": "Ullage's pods have probes of their own",
    "servingEngineSpec.livenessProbe": "Ullage's pods have probes of their own",
    "servingEngineSpec.readinessProbe": "Ullage's pods have probes of their own",
}


def convert(values: dict[str, Any]) -> list[Draft]:
    """Return an LLMService for each model of a chart's values.

    Fields that belong to no model are recorded as lost in the first service.

    Raises:
        LocalFailure: the values have no model, or are malformed.
    """
    whole = SourceDocument(values)
    shared = {
        field: whole.take(f"servingEngineSpec.{field}")
        for field in ("runtimeClassName", "schedulerName", "tolerations", "env", "imagePullSecrets")
    }
    models = whole.items(MODELS)
    if not models:
        raise LocalFailure(f"{MODELS}: the values have no model; give the values of a release")

    drafts = [_convert_model(model, shared) for model in models]
    replicas = whole.take("routerSpec.replicaCount")
    for draft in drafts:
        if replicas is not None:
            draft.set("spec.router.replicas", replicas)
    whole.lose_rest(drafts[0], _OTHER_REASONS)
    return drafts


def _convert_model(model: SourceDocument, shared: dict[str, Any]) -> Draft:
    name = str(model.take("name", ""))
    url = str(model.take("modelURL", ""))
    if not url:
        raise LocalFailure(f"{model.name_of('modelURL')}: missing; name the model")

    draft = Draft(service_name(name or url))
    source = source_uri(url)
    revision = model.take("modelRevision")
    if revision and source.startswith("hf://"):
        source = f"{source}@{revision}"
    elif revision:
        draft.lose(model.name_of("modelRevision"), "only models of the hub have revisions")
    draft.set("spec.model.source", source)
    set_model_name(draft, url)

    _set_options(draft, model)
    _set_resources(draft, model)
    set_device(draft)
    _set_pod(draft, model, shared)
    _set_cache(draft, model)
    _set_scale(draft, model)
    multiply_by_data_ranks(draft)
    set_reasoning_default(draft)
    model.lose_rest(draft, _MODEL_REASONS)
    return draft


def _set_options(draft: Draft, model: SourceDocument) -> None:
    for field, option in _OPTIONS.items():
        value = model.take(f"vllmConfig.{field}")
        if value is not None:
            path = model.name_of(f"vllmConfig.{field}")
            translate(draft, [Argument(option, value, path)])

    caches = model.take("vllmConfig.enablePrefixCaching")
    if caches is not None:
        draft.set("spec.memory.prefixCache", bool(caches))
    else:
        reason = "the chart turns it off unless enablePrefixCaching is true; write false for that"
        draft.set("spec.memory.prefixCache", True, reason)

    positional, arguments = read_tokens([str(e) for e in model.take("vllmConfig.extraArgs", [])])
    translate(draft, arguments)
    for text in positional:
        draft.lose(model.name_of(f"vllmConfig.extraArgs {text}"), "it is no option of vLLM")
    if model.take("enableLoRA"):
        translate(draft, [Argument("enable_lora", True, model.name_of("enableLoRA"))])


def _set_resources(draft: Draft, model: SourceDocument) -> None:
    requests = {"cpu": model.take("requestCPU"), "memory": model.take("requestMemory")}
    limits = {"cpu": model.take("limitCPU"), "memory": model.take("limitMemory")}
    kind = str(model.take("requestGPUType", "nvidia.com/gpu"))
    gpus = model.take("requestGPU")
    if gpus is not None:
        limits[kind] = gpus
    asked = {
        name: {resource: amount for resource, amount in amounts.items() if amount is not None}
        for name, amounts in (("requests", requests), ("limits", limits))
    }
    set_resources(draft, {name: each for name, each in asked.items() if each}, model.path, kind)
    set_resources(draft, model.take("resources", {}), model.name_of("resources"), kind)


def _set_pod(draft: Draft, model: SourceDocument, shared: dict[str, Any]) -> None:
    token = model.take("hf_token")
    if isinstance(token, dict):
        reference = {"name": token.get("secretName"), "key": token.get("secretKey")}
        variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}
        set_env(draft, [variable], model.name_of("hf_token"))
    elif token:
        secret = "put the token into a Secret, and name it in podTemplate's env as HF_TOKEN"
        draft.lose(model.name_of("hf_token"), secret)

    set_env(draft, shared["env"] or [], "servingEngineSpec.env")
    set_env(draft, model.take("env", []), model.name_of("env"))
    tolerations = list(model.take("tolerations", []))
    if model.take("tolerationsPolicy", "append") != "override":
        tolerations = [*(shared["tolerations"] or []), *tolerations]
    placement = {
        "runtimeClassName": model.take("runtimeClassName") or shared["runtimeClassName"],
        "schedulerName": model.take("schedulerName") or shared["schedulerName"],
        "tolerations": tolerations,
    }
    for field, value in placement.items():
        if value:
            path = f"{POOL}.podTemplate.spec.{field}"
            set_if_valid(draft, model.name_of(field), path, value)

    if terms := model.take("nodeSelectorTerms"):
        required = {"nodeSelectorTerms": terms}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        path = f"{POOL}.podTemplate.spec.affinity"
        set_if_valid(draft, model.name_of("nodeSelectorTerms"), path, affinity)
    for extra, field in (("extraVolumes", "volumes"), ("initContainers", "initContainers")):
        if value := model.take(extra):
            path = f"{POOL}.podTemplate.spec.{field}"
            set_if_valid(draft, model.name_of(extra), path, value)
    set_pod_fields(draft, model)
    set_mounts(draft, model.take("extraVolumeMounts", []), model.name_of("extraVolumeMounts"))

    metadata = {
        "labels": (model.take("labels") or {}) | (model.take("podLabels") or {}),
        "annotations": (model.take("annotations") or {}) | (model.take("podAnnotations") or {}),
    }
    set_metadata(draft, metadata, model.path)
    secrets = [each["name"] for each in shared["imagePullSecrets"] or []]
    if own_secret := model.take("imagePullSecret"):
        secrets.append(own_secret)
    if secrets:
        draft.set("spec.imagePullSecrets", [{"name": each} for each in dict.fromkeys(secrets)])
    if size := model.take("shmSize"):
        draft.set(f"{POOL}.shmSize", size)


def _set_cache(draft: Draft, model: SourceDocument) -> None:
    claim = model.take("pvcExistingClaimName")
    size = model.take("pvcStorage")
    storage_class = model.take("storageClass") or model.take("pvcStorageClass")
    source = draft.get("spec.model.source")
    if claim and source.startswith(_CLAIM_FOLDER):
        path = source.removeprefix(_CLAIM_FOLDER)
        reason = "the chart mounts this claim at /data"
        draft.set("spec.model.source", f"pvc://{claim}/{path}", reason)
    elif size and source.startswith(_CLAIM_FOLDER):
        draft.lose(
            model.name_of("pvcStorage"),
            "the model is on the chart's claim, mounted at /data; name that claim in "
            "spec.model.source (pvc://CLAIM/PATH)",
        )
    elif claim:
        draft.set(f"{POOL}.modelCache.claimName", claim)
    elif size and not isinstance(size, dict):
        template = {"size": size} | ({"storageClassName": storage_class} if storage_class else {})
        draft.set(
            f"{POOL}.modelCache.claimTemplate", template, "each pod has a claim of its own here"
        )
    elif size:
        draft.lose(model.name_of("pvcStorage"), "without a claim, the cache is in the pod anyway")

    host = model.take("lmcacheConfig.cpuOffloadingBufferSize")
    disk = model.take("lmcacheConfig.diskOffloadingBufferSize")
    is_on = model.take("lmcacheConfig.enabled")
    if is_on and host:
        draft.set("spec.memory.tiers.host.size", f"{host}Gi", "as cpuOffloadingBufferSize, in GB")
    if is_on and disk:
        draft.set("spec.memory.tiers.file.size", f"{disk}Gi", "as diskOffloadingBufferSize, in GB")


def _set_scale(draft: Draft, model: SourceDocument) -> None:
    replicas = model.take("replicaCount")
    if replicas is not None:
        draft.set("spec.replicas", replicas)
    if model.take("enabled", True) is False:
        draft.set("spec.stop", True, "enabled is false; remove this to serve the model")
    if not model.take("keda.enabled"):
        return
    least = model.take("keda.minReplicaCount", 1)
    most = model.take("keda.maxReplicaCount")
    if most is not None:
        scaling: dict[str, Any] = {"minReplicas": least, "maxReplicas": most}
        if triggers := model.take("keda.triggers"):
            scaling |= {"provider": "KEDA", "keda": {"triggers": triggers}}
        set_if_valid(draft, model.name_of("keda"), f"{POOL}.autoscaling", scaling)
