"""Converts KServe's LLMInferenceService."""

import shlex
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
    DEFAULT_LORA_RANK,
    POOL,
    multiply_by_data_ranks,
    read_tokens,
    set_model_name,
    set_reasoning_default,
    translate,
)
from ullage_operator.api.errors import LocalFailure

KIND = "LLMInferenceService"
GROUP = "serving.kserve.io/"
MAIN = "main"
"""Name of the container that serves, in KServe's pods."""

ARGUMENTS_ENV = "VLLM_ADDITIONAL_ARGS"
"""Variable with more options of vLLM, which KServe's own template reads."""

_SCRIPT = "c"
"""Option with which a shell takes a script."""

_COMMAND = frozenset({"vllm", "serve", "python", "python3", "vllm.entrypoints.openai.api_server"})
"""Words with which a command starts vLLM's server."""

_MODEL_FOLDERS = "/mnt/"
"""Folder of KServe's pods that has the model, at /mnt/models."""

SCHEMES = ("hf://", "pvc://", "s3://", "oci://")

_ENGINE = "Ullage has its own engine images (spec.image replaces them)"
_PROBES = "Ullage's pods have probes of their own"
_DISAGGREGATED = (
    "Ullage's engines compute prompts in chunks between decodes; add a pool with role: Large for "
    "long prompts"
)
_SCHEDULER = "Ullage's router places requests by memory and prefix itself (spec.routing)"
_NODES = "set nodes of the pool, with all GPUs of an engine in gpus"

_REASONS = {
    "prefill": _DISAGGREGATED,
    "worker": _NODES,
    "baseRefs": "convert the configurations that it names as well, to LLMServiceBases (baseRefs)",
    "router.scheduler": _SCHEDULER,
    "router.route": "Ullage makes an HTTPRoute if spec.router.gateway.parentRefs names Gateways",
    "router.gateway": "name the Gateways in spec.router.gateway.parentRefs",
    "router.ingress": "an Ingress of your own can send requests to the router's Service",
    "scaling.wva": "Ullage scales by KV, queue and TTFT itself (autoscaling of the pool)",
    "scaling.keda": "only triggers have a counterpart (autoscaling.keda of the pool)",
    "storageInitializer": "engines download models themselves, to modelCache of the pool",
    "parallelism.dataRPCPort": "each data-parallel rank becomes an engine of its own",
    "parallelism.dataLocal": "each data-parallel rank becomes an engine of its own",
    "kvCacheOffloading.evictionPolicy": "blocks leave the tiers least recently used first",
    "workload.kvCacheOffloading.evictionPolicy": "blocks leave the tiers least recently used first",
    "model.lora.maxCpuAdapters": "adapters are loaded from their files",
    "model.confidential": "encrypted models are not read; decrypt the model first",
    "rolloutStrategy.maxSurge": "spec.rollout.surge is Auto, Always or Never",
    "tracing.exporter": "spans go by OTLP",
    "tracing.sampler": "a client's traceparent decides for its own trace",
}


def convert(document: dict[str, Any]) -> Draft:
    """Return an LLMService that serves what an LLMInferenceService serves.

    Raises:
        LocalFailure: the model has no source that Ullage reads, or the document is malformed.
    """
    whole = SourceDocument(document)
    for name in ("apiVersion", "kind", "status"):
        whole.take(name)
    metadata = whole.section("metadata")
    spec = whole.section("spec")

    name = str(metadata.take("name", ""))
    draft = Draft(service_name(name))
    if service_name(name) != name:
        draft.reasons["metadata.name"] = f"from {name!r}, which is too long or has other characters"
    for field in ("namespace", "labels", "annotations"):
        if value := metadata.take(field):
            draft.set(f"metadata.{field}", value)
    metadata.lose_rest(draft, {"": "the cluster sets it"})

    _set_model(draft, spec, name)
    _set_parallelism(draft, spec)
    _set_pod(draft, spec.section("template"))
    _set_scale(draft, spec)
    # Samples have this section in spec.workload, too.
    _set_tiers(draft, spec)
    _set_tiers(draft, spec, "workload.")
    _set_router(draft, spec)
    set_metadata(
        draft,
        {"labels": spec.take("labels"), "annotations": spec.take("annotations")},
        spec.path,
    )
    set_device(draft)

    spec.lose_rest(draft, _REASONS)
    whole.lose_rest(draft, {})
    return draft


def _set_model(draft: Draft, spec: SourceDocument, name: str) -> None:
    uri = str(spec.take("model.uri", ""))
    if not uri.startswith(SCHEMES):
        raise LocalFailure(
            f"spec.model.uri {uri!r}: Ullage reads {', '.join(SCHEMES)}; copy the model to one of "
            "them, and name that"
        )
    draft.set("spec.model.source", uri)
    set_model_name(draft, str(spec.take("model.name", name)))

    for field, path in (("maxAdapters", "maxLoras"), ("maxRank", "maxLoraRank")):
        if value := spec.take(f"model.lora.{field}"):
            draft.set(f"spec.memory.{path}", value)
    rank = draft.get("spec.memory.maxLoraRank") or DEFAULT_LORA_RANK
    adapters = []
    for adapter in spec.items("model.lora.adapters"):
        adapters.append(
            {"name": adapter.take("name", ""), "source": adapter.take("uri", ""), "rank": rank}
        )
        adapter.lose_rest(draft, {})
    if adapters:
        reason = "each rank is the highest allowed one; write the adapter's own rank"
        draft.set("spec.adapters", adapters, reason)


def _set_parallelism(draft: Draft, spec: SourceDocument) -> None:
    ranks = {
        "tensor": spec.take("parallelism.tensor", 1),
        "pipeline": spec.take("parallelism.pipeline", 1),
    }
    if ranks != {"tensor": 1, "pipeline": 1}:
        draft.set(f"{POOL}.parallelism", ranks)
        draft.set(f"{POOL}.gpus", ranks["tensor"] * ranks["pipeline"])
    if spec.take("parallelism.expert"):
        draft.set("spec.vllm.args.enable_expert_parallel", True)
        draft.set("spec.engine", "VLLM", "only vLLM reads spec.vllm.args")


def _set_pod(draft: Draft, pod: SourceDocument) -> None:
    containers = pod.items("containers")
    main = [each for each in containers if each.take("name", MAIN) == MAIN]
    for container in main[:1]:
        _set_container(draft, container)
    for container in containers:
        if container not in main[:1]:
            container.lose_rest(draft, {"": "the engine runs alone; add it to podTemplate"})

    set_pod_fields(draft, pod)
    pod.lose_rest(
        draft,
        {
            "": "add it to podTemplate of the pool if the engines need it",
            "securityContext": "pods comply with the restricted profile",
        },
    )


def _set_container(draft: Draft, container: SourceDocument) -> None:
    variables = container.take("env", [])
    more = [each for each in variables if each.get("name") == ARGUMENTS_ENV]
    tokens = [*container.take("command", []), *container.take("args", [])]
    for variable in more:
        if "valueFrom" in variable:
            name = container.name_of(f"env[{ARGUMENTS_ENV}]")
            draft.lose(name, "its value is elsewhere (valueFrom); convert those options, too")
        tokens += shlex.split(str(variable.get("value", "")))

    # The command names the model's folder in KServe's pods, which the manifest's source replaces.
    positional, arguments = read_tokens([str(token) for token in tokens])
    if any(each.name == _SCRIPT for each in arguments):
        name = container.name_of("command")
        draft.lose(name, "a shell script; convert its command with ullage convert -- vllm serve")
    for text in positional:
        if text not in _COMMAND and not text.startswith(_MODEL_FOLDERS):
            name = container.name_of(f"args {text}")
            draft.lose(name, "it is no option of vLLM; spec.model.source names the model")
    translate(draft, [each for each in arguments if each.name not in ("model", _SCRIPT)])

    set_resources(draft, container.take("resources", {}), container.name_of("resources"))
    set_env(draft, [each for each in variables if each not in more], container.name_of("env"))
    set_mounts(draft, container.take("volumeMounts", []), container.name_of("volumeMounts"))
    container.lose_rest(
        draft,
        {
            "image": _ENGINE,
            "imagePullPolicy": _ENGINE,
            "livenessProbe": _PROBES,
            "readinessProbe": _PROBES,
            "startupProbe": _PROBES,
            "ports": "the router listens on 8000 (HTTP) and 9000 (gRPC)",
            "securityContext": "containers comply with the restricted profile",
            "terminationMessagePolicy": "Ullage sets it",
            "terminationMessagePath": "Ullage sets it",
        },
    )


def _set_scale(draft: Draft, spec: SourceDocument) -> None:
    draft.data_ranks = int(spec.take("parallelism.data", draft.data_ranks))
    draft.set("spec.replicas", int(spec.take("replicas", 1)))

    least = spec.take("scaling.minReplicas")
    most = spec.take("scaling.maxReplicas")
    if most is not None:
        scaling: dict[str, Any] = {"minReplicas": least or 1, "maxReplicas": most}
        triggers = spec.take("scaling.keda.triggers")
        if triggers:
            scaling |= {"provider": "KEDA", "keda": {"triggers": triggers}}
        set_if_valid(draft, spec.name_of("scaling"), f"{POOL}.autoscaling", scaling)
    elif least is not None:
        draft.lose(spec.name_of("scaling.minReplicas"), "autoscaling needs maxReplicas, too")
    multiply_by_data_ranks(draft)
    set_reasoning_default(draft)

    if value := spec.take("rolloutStrategy.maxUnavailable"):
        set_if_valid(
            draft,
            spec.name_of("rolloutStrategy.maxUnavailable"),
            "spec.rollout.maxUnavailable",
            value,
        )


def _set_tiers(draft: Draft, spec: SourceDocument, prefix: str = "") -> None:
    section = f"{prefix}kvCacheOffloading"
    if size := spec.take(f"{section}.cpu"):
        draft.set("spec.memory.tiers.host.size", size)
    tiers = spec.items(f"{section}.secondary")
    for tier in tiers:
        size = tier.take("fileSystem.emptyDir.size")
        claim = tier.take("fileSystem.pvc.ref.name")
        if draft.get("spec.memory.tiers.file") is None and (size or claim):
            file = {"size": size} if size else {"claimName": claim}
            reason = "" if size else "its files take at most 2Gi; set size"
            draft.set("spec.memory.tiers.file", file, reason)
        elif size or claim:
            draft.lose(tier.path, "Ullage has one tier of files, memory.tiers.file")
        tier.lose_rest(draft, {"": "name a claim (claimName), or leave it out for a folder"})


def _set_router(draft: Draft, spec: SourceDocument) -> None:
    if refs := spec.take("router.gateway.refs"):
        draft.set("spec.router.gateway.parentRefs", refs)
    if endpoint := spec.take("tracing.exporterEndpoint"):
        draft.set("spec.observability.tracing.endpoint", endpoint)
    share = spec.take("tracing.samplerArg")
    if share is not None and endpoint:
        percent = f"{float(share) * 100:g}"
        draft.set("spec.observability.tracing.samplePercent", percent)
