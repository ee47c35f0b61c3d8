"""Manifests with one mistake each: where it is, and what is said about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ullage_kubeapi.trial import with_roles

BIG = {"role": "Large"}
ONE = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}
SINGLE = "pools.single."
NOBODY = {"observability.metricsFrom": [{}]}
SLO_RULE = "ttftP95 must not exceed e2eP95"


@dataclass(frozen=True)
class Wrong:
    """One mistake."""

    changes: Mapping[str, Any]
    """Values by path below spec, or below metadata for `metadata.name`."""
    field: str
    """Where it is told."""
    text: str
    """What `ullage plan` says of it; of a rule, what the API server says, too."""
    is_rule: bool = False


def rule(
    field: str, text: str, changes: Mapping[str, Any] | None = None, value: Any = None
) -> Wrong:
    """What a CEL rule refuses; without `changes`, `value` at the field itself."""
    return Wrong(changes or {field: value}, spec_path(field), text, is_rule=True)


def form(field: str, value: Any, text: str) -> Wrong:
    """What the schema refuses at the field itself."""
    return Wrong({field: value}, spec_path(field), text)


def spec_path(field: str) -> str:
    return field if field.startswith("metadata.") else f"spec.{field}".rstrip(".")


def manifest(wrong: Wrong, name: str = "wrong") -> dict[str, Any]:
    """A manifest that is right but for the one mistake."""
    model = {"source": "file:///m", "name": "m"}
    document: dict[str, Any] = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": {"model": model, "pools": {"single": {}}},
    }
    for path, value in wrong.changes.items():
        steps = path.split(".") if path.startswith("metadata.") else ["spec", *path.split(".")]
        put(document, steps, value)
    spec = document["spec"]
    if isinstance(spec["pools"], dict) and not any(
        "role" in str(each) for each in wrong.changes.items()
    ):
        spec["pools"] = with_roles(spec["pools"])
    return document


def put(node: dict[str, Any], steps: list[str], value: Any) -> None:
    for step in steps[:-1]:
        node = node.setdefault(step, {})
    if value is None:
        node.pop(steps[-1], None)
    else:
        node[steps[-1]] = value


LEVELS = "degrade.pressureLevels"
MILD = {"belowPercent": 50}
STRICT = {"belowPercent": 10}
TENANTS = {"secretName": "keys"}
STEP = {"service": "small"}

PACE = {"tenants": TENANTS | {"defaults": {"tokensPerSecond": 0}}}
HEAVY = {"tenants": TENANTS | {"defaults": {"weight": "100.5"}}}
TWINS = [{"name": "a"}, {"name": "a"}]
OTHER = {"address": "small.example:9000"}
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "gpu"}
ADAPTER = {"name": "a", "source": "file:///a", "rank": 8}

LONG_STEP = {"stepDuration": "2h", "maxWait": "1h"}

UNKNOWN = [
    form("memory.threshold", 0.85, "unknown field; write thresholdPercent: 85 instead"),
    form("router.nodeSelector", {"a": "b"}, "write podTemplate.spec.nodeSelector instead"),
    form("gpus", 4, "unknown field; the fields here are adapterClaims, adapters, allow"),
    form("memory.tresholdPercent", 50, "unknown field; did you mean thresholdPercent?"),
    form("memory.tiers.file.folder", "/kv", "unknown field; the fields here are claimName"),
    form("memory.tiers.remote.peers", ["a:1"], "unknown field; the fields here are copy, deadline"),
    form("model.quantisation", "int8", "unknown field; did you mean quantization?"),
    form("pools.single.replica", 1, "unknown field; did you mean replicas?"),
    form("pools.other.podtemplate", {}, "unknown field; did you mean podTemplate?"),
    form("routing.queue.maxrequests", 1, "unknown field; did you mean maxRequests?"),
    form("pools.single.modelCache.pvc", "c", "unknown field; the fields here are claimName"),
    form("observability.podMonitor.labls", {}, "unknown field; did you mean labels?"),
]

FORMS = [
    form("engine", "vllm", "must be one of Auto, Native, VLLM, not 'vllm'; write VLLM"),
    Wrong(
        {"adapters": [{"name": "a", "source": "file:///a"}]},
        "spec.adapters[0].rank",
        "required field is missing. Rank of the adapter's matrices",
    ),
    form("model.name", None, "required field is missing. Name that clients put"),
    form("model.source", None, "required field is missing. Address of the model"),
    form("model.name", "a b", "must match"),
    form("model.dtype", "int8", "must be one of Auto, Float32, BFloat16, Float16, not 'int8'"),
    form("model.quantization", "int2", "must be one of Auto, None, Int8, Int4, FP8, W8A8"),
    form("model.kvDtype", "int8", "must be one of Auto, FP8, not 'int8'"),
    form("model.maxModelLen", 8, "must be at least 16, not 8"),
    form("model.maxModelLen", "8k", "must be of type integer, not '8k'"),
    form("device", "gpu", "must be one of Auto, CUDA, CPU, not 'gpu'"),
    form("image", "", ""),
    form("allowFaultInjection", "yes", "must be of type boolean, not 'yes'"),
    form("router.replicas", 0, "must be at least 1, not 0"),
    form("router.replicas", 101, "must be at most 100, not 101"),
    form("router.resources.limits.memory", "1GB", "must be a quantity"),
    form("replicas", -1, "must be at least 0, not -1"),
    form("pools.single.role", "large", "must be one of Standard, Large, Overflow, not 'large'"),
    form("pools.single.replicas", -1, "must be at least 0, not -1"),
    form("pools.single.replicas", "2", "must be of type integer, not '2'"),
    form("pools.single.gpus", 65, "must be at most 64, not 65"),
    form("pools.single.gpuResourceName", "gpu", "must match"),
    form("pools.single.microBatches", 0, "must be at least 1, not 0"),
    form("pools.single.nccl.NCCL_DEBUG", 1, "must be of type string, not 1"),
    form("pools.single.resources.requests.cpu", "two", "must be a quantity"),
    form("pools.single.podTemplate.spec.containers", {}, "must be of type array, not {}"),
    form("pools.single.shmSize", "0", "must be a quantity above 0"),
    form("rollout.surge", "Maybe", "must be one of Auto, Always, Never, not 'Maybe'"),
    form("rollout.maxUnavailable", 0, "must be at least 1, not 0"),
    form("rollout.maxUnavailable", "0%", "must be a number such as 2 or a percentage such as 25%"),
    form("rollout.maxUnavailable", "2", "must be a number such as 2 or a percentage such as 25%"),
    Wrong(
        {"pools.single.autoscaling": {"maxReplicas": 4, "provider": "hpa"}},
        "spec.pools.single.autoscaling.provider",
        "must be one of Ullage, KEDA, not 'hpa'",
    ),
    Wrong(
        {SINGLE + "autoscaling": {"maxReplicas": 4, "targets": {"kvUtilizationPercent": 1}}},
        "spec.pools.single.autoscaling.targets.kvUtilizationPercent",
        "must be at least 5, not 1",
    ),
    form("pools.single.startTimeout", "half an hour", "must be a duration"),
    form("pools.single.modelCache.hostPath", "models", "must match"),
    form("pools.single.modelCache.claimName", "Models", "must match"),
    form("pools.single.modelCache.claimTemplate.size", "0", "must be a quantity above 0"),
    Wrong(
        {"pools.single.modelCache.claimTemplate": {"storageClassName": "fast"}},
        "spec.pools.single.modelCache.claimTemplate.size",
        "required field is missing. Storage that each claim requests",
    ),
    form(
        "pools.single.persistentVolumeClaimRetentionPolicy.whenScaled",
        "Keep",
        "must be one of Retain, Delete, not 'Keep'",
    ),
    Wrong(
        {"pools.single.resourceClaims": [{"name": "gpu"}]},
        "spec.pools.single.resourceClaims[0].resourceClaimTemplateName",
        "required field is missing. ResourceClaimTemplate of this namespace",
    ),
    form("securityContext.runAsUser", 0, "must be at least 1, not 0"),
    form("securityContext.fsGroup", "root", "must be of type integer, not 'root'"),
    form("serviceAccount.name", "Mine", "must match"),
    form("s3.endpoint", "minio.storage:9000", "must match"),
    form("s3.secretName", "Keys", "must match"),
    form("pools.single.podTemplate.metadata.labels.team", "a b", "must match"),
    form("memory.thresholdPercent", 85.5, "must be a whole number, not 85.5"),
    form("memory.thresholdPercent", 0, "must be at least 1, not 0"),
    form("memory.adapterPercent", 101, "must be at most 100, not 101"),
    form("pools.single.memory.thresholdPercent", 150, "must be at most 100, not 150"),
    form("pools.single.memory.adapterPercent", 0, "must be at least 1, not 0"),
    form("memory.maxKV", "20Gb", "must be a quantity such as 512Mi"),
    form("memory.maxKV", -1, "must be at least 0, not -1"),
    form("memory.sessionIdle", "5 minutes", "must be a duration such as 10s"),
    form("memory.prefixCache", 1, "must be of type boolean, not 1"),
    form("memory", [], "must be of type object, not []"),
    form("memory.tiers.host.size", "1GB", "must be a quantity such as 512Mi"),
    form("memory.tiers.file.size", "0", "must be a quantity above 0"),
    form("memory.tiers.file.path", "kv", "must match"),
    form("memory.tiers.file.claimName", "KV", "must match"),
    form("memory.tiers.remote.copy", "yes", "must be of type boolean, not 'yes'"),
    form("routing.largeRequestTokens", 0, "must be at least 1, not 0"),
    form("routing.largeRequestKV", "0Gi", "must be a quantity above 0"),
    form("routing.queue.maxRequests", 100001, "must be at most 100000"),
    form("routing.queue.timeout", "10", "must be a duration such as 10s"),
    form("routing.rungs.reject.maxRetryDelay", 30, "must be a duration such as 10s"),
    form("routing.placement.retries.percent", 200, "must be at most 100, not 200"),
    form("routing.placement.retries.perSecond", 0.5, 'a number such as 2 or, in quotes, "0.5"'),
    form("routing.placement.retries.perSecond", "1e3", "must be a number such as 2 or"),
    form("routing.rungs.shrinkContext.maxDroppedPercent", 0, "must be at least 1, not 0"),
    form("routing.rungs.shrinkOutput.minPercent", 0, "must be at least 1, not 0"),
    form("prompts.compress.thresholdPercent", 0, "must be at least 10, not 0"),
    form("prompts.compress.percent", 91, "must be at most 90, not 91"),
    form("degrade.throttling.batchStepPercent", 0, "must be at least 5, not 0"),
    form("degrade.throttling.minBatchPercent", 0, "must be at least 5, not 0"),
    form("healing.minHealthPercent", 101, "must be at most 100, not 101"),
    form("rollout.thresholds.ttftPercent", 99, "must be at least 100, not 99"),
    form("rollout.thresholds.perplexityPercent", 99, "must be at least 100, not 99"),
    form("rollout.answers.prompts", "All", "must be one of ConfigMap, Sampled, not 'All'"),
    form("prompts.compress.method", "zip", "must be one of Extractive, None"),
    form("batching.maxSequences", 0, "must be at least 1, not 0"),
    form("limits.maxOutputTokens", 0, "must be at least 1, not 0"),
    form("degrade.hysteresisPercent", 90, "must be at most 50, not 90"),
    Wrong({"tenants": {}}, "spec.tenants.secretName", "required field is missing. Secret with"),
    form("rollout.strategy", "blue", "must be one of"),
    form("slo.errorPercent", 0.5, "must be a number such as 2 or, in quotes"),
    form("slo.e2eP95", 20, "must be a duration such as 10s"),
    form("observability.logLevel", "trace", "must be one of Debug, Info, Warning, Error"),
    form("observability.podMonitor.interval", "15", "must be a duration such as 10s"),
    Wrong({"routing.ladder": ["wait"]}, "spec.routing.ladder[0]", "must be one of"),
    Wrong(
        {"router.podTemplate.spec.containers": [{"name": "router", "env": [{"value": "x"}]}]},
        "spec.router.podTemplate.spec.containers[0].env[0].name",
        "required field is missing",
    ),
    Wrong(
        {LEVELS: [{}]}, "spec.degrade.pressureLevels[0].belowPercent", "required field is missing"
    ),
    Wrong(
        {SINGLE + "podTemplate.spec.volumes": [{"emptyDir": {}}]},
        "spec.pools.single.podTemplate.spec.volumes[0].name",
        "required field is missing",
    ),
]

SCALE = SINGLE + "autoscaling"


def scaling(field: str, text: str, **given: Any) -> Wrong:
    """What a rule refuses of pool single's autoscaling."""
    return rule(f"{SCALE}.{field}", text, {SCALE: {"maxReplicas": 4} | given})


SCALING = (
    scaling("minReplicas", "minReplicas must not exceed maxReplicas", minReplicas=5),
    scaling("warmSpares", "warmSpares must not exceed maxReplicas", warmSpares=5),
    scaling("warmSpares", "a pool with warm spares never sleeps", warmSpares=1, minReplicas=0),
    scaling(
        "warmSpares",
        "only provider Ullage keeps warm spares",
        warmSpares=1,
        provider="KEDA",
        prometheusURL="http://prometheus:9090",
    ),
    scaling("prometheusURL", "KEDA queries metrics", provider="KEDA"),
    scaling("keda", "keda is for provider KEDA", keda={}),
    rule(
        "router.autoscaling.minReplicas",
        "minReplicas must not exceed maxReplicas",
        {"router.autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
    ),
    scaling("targets.queueWait", "from 10ms to 10m", targets={"queueWait": "0s"}),
    scaling("scaleUp.window", "such as 0s", scaleUp={"window": "2h"}),
    scaling("scaleUp.period", "such as 15s", scaleUp={"period": "0s"}),
    scaling("scaleDown.window", "such as 5m", scaleDown={"window": "2h"}),
    scaling("scaleDown.period", "such as 1m", scaleDown={"period": "1h"}),
    scaling("idleAfter", "from 1s to 24h", idleAfter="100ms"),
    rule("routing.wake.timeout", "from 1s to 1h", value="2h"),
    rule("routing.rungs.reject.maxRetryDelay", "from 1s to 30s", value="31s"),
    rule("routing.rungs.reject.minRetryDelay", "from 1s to 30s", value="900ms"),
    rule("observability.podMonitor.interval", "must be at least 1s", value="10ms"),
    rule("routing.idempotency.ttl", "ttl must be above 0, such as 10m", value="0s"),
    rule("routing.responses.ttl", "ttl must be above 0, such as 1h", value="0s"),
)
"""About the size of pools."""

SERVICE = (
    rule("router.files", "files are in the folder of one router", value={}),
    rule(
        "router.files",
        "files are in the folder of one router",
        {"router": {"replicas": 1, "files": {}, "autoscaling": {"maxReplicas": 2}}},
    ),
    rule(
        "router.files.ttl",
        "ttl must be at least 1m",
        {"router": {"replicas": 1, "files": {"ttl": "1s"}}},
    ),
    rule("router.service.loadBalancerClass", "is only for load balancers", value="x"),
    rule("router.service.loadBalancerSourceRanges", "are only for load", value=["10.0.0.0/8"]),
    rule("router.service.externalTrafficPolicy", "clients outside the cluster", value="Local"),
)
"""About the routers' Service."""

RULES = [
    rule("metadata.name", "name must be at most 40 characters", value="d" * 41),
    rule("metadata.name", "name must be lower-case letters", value="1demo"),
    rule(
        "pools",
        "a pool's name must have at most 46",
        {"metadata.name": "d" * 40, "pools.huge123": {}},
    ),
    rule("pools", "no pool takes ordinary requests", {"pools": {"huge": {"role": "Overflow"}}}),
    rule("pools", "two pools have the same role", {"pools": {"a": {}, "b": {"role": "Standard"}}}),
    rule("pools", "two pools have the same role", {"pools": dict.fromkeys("ab", BIG)}),
    rule(
        "pools.single.resources",
        "must not name gpuResourceName",
        value={"limits": {"nvidia.com/gpu": 2}},
    ),
    rule("pools", "names of pools must be at most 20", {"pools.a-b": {}}),
    rule("pools", "are names of the operator's own objects", {"pools.engine": {}}),
    rule("pools", "rename the pool", {"pools.next": {}}),
    rule("pools.single.gpus", "gpus must equal parallelism.tensor *", value=2),
    rule(
        "pools.huge.gpus",
        "gpus must equal",
        {"pools.huge": {"gpus": 3, "parallelism": {"tensor": 2}}},
    ),
    rule(
        "pools.huge.parallelism",
        "must not exceed 64 GPUs",
        {"pools.huge": {"parallelism": {"tensor": 16, "pipeline": 8}}},
    ),
    rule("pools.single.startTimeout", "from 10s to 24h, such as 30m", value="5s"),
    rule("pools.single.nccl", "nccl sets variables", value={"PATH": "/"}),
    rule("pools.single.nccl", "nccl sets no variables", value={"NCCL_NET_PLUGIN": "x"}),
    rule(
        "pools.single.modelCache",
        "modelCache is one of",
        value={"claimName": "c", "sizeLimit": "1Gi"},
    ),
    rule(
        "pools.single.modelCache.warm",
        "modelCache.warm fetches into a claim",
        {"pools.single.modelCache": {"warm": True}, "model.source": "hf://a/b"},
    ),
    rule(
        "pools",
        "modelCache.warm fetches only models of hf:// and s3://",
        {"pools.single.modelCache": {"claimName": "c", "warm": True}},
    ),
    rule(
        "device",
        "engines have no GPUs that pods could claim",
        {"device": "CPU", "pools.single.resourceClaims": [CLAIM]},
    ),
    rule("pools.single.resourceClaims", "two items have one name", value=[CLAIM, CLAIM]),
    rule(
        "serviceAccount.annotations",
        "annotate your own account",
        {"serviceAccount": {"name": "mine", "annotations": {"a": "b"}}},
    ),
    rule(
        "pools.single.podTemplate.metadata.labels",
        "are the operator's own keys",
        value={"app.kubernetes.io/name": "x"},
    ),
    rule(
        "router.podTemplate.metadata.annotations",
        "are the operator's own keys",
        value={"serving.ullage.dev/x": "y"},
    ),
    rule("pools.single.podTemplate.spec.volumes", "two items have one name", value=TWINS),
    rule(
        "serviceAccount.annotations", "are the operator's own", value={"serving.ullage.dev/x": "y"}
    ),
    rule("model.source", "source must be hf://", value="/m.gguf"),
    rule("model.source", "source of the hub is hf://org/name", value="hf://org/name/file.gguf"),
    rule("model.source", "takes an absolute path", value="file://m"),
    rule("model.source", "source of a claim is pvc://claim/path", value="pvc://Claim/path"),
    rule("model.source", "source of a package is", value="pkg://a-b/model.gguf"),
    rule("model.source", "source of an image is", value="oci://llama:1"),
    rule("model.source", "source of a bucket is s3://bucket/prefix", value="s3://Models/llama"),
    rule(
        "s3.anonymous",
        "with the credentials of secretName or anonymously",
        {"s3.secretName": "keys", "s3.anonymous": True},
    ),
    rule(
        "model.quantization",
        "quantization W8A8 needs a calibrated model",
        {"model.source": "pkg://p/m.gguf", "model.quantization": "W8A8"},
    ),
    rule(
        "model.deterministic",
        "sums over more than 2 tensor ranks",
        {"model.deterministic": True, "pools.large": {"gpus": 4, "parallelism": {"tensor": 4}}},
    ),
    rule(
        "model.quantization",
        "only the native engine, which serves no adapters, has this",
        {"engine": "VLLM", "model.quantization": "Int4"},
    ),
    rule(
        "model.deterministic",
        "results of vLLM, which alone serves adapters, depend on the rest",
        {"engine": "VLLM", "model.deterministic": True},
    ),
    rule("memory.hostKV", "vLLM, which alone", {"engine": "VLLM", "memory": {"hostKV": "1Gi"}}),
    rule(
        "memory.hostKV",
        "set hostKV of the service and of every pool to 0",
        {"adapters": [ADAPTER], "pools.single": {"memory": {"hostKV": "1Gi"}}},
    ),
    rule(
        "memory.tiers.host.size",
        "remote and file pass their blocks through host memory",
        {"memory.tiers": {"host": {"size": 0}, "file": {}}},
    ),
    rule(
        "pools.single.memory.tiers.host.size",
        "set host.size, such as 256Mi, or leave both out",
        {"pools.single": {"memory": {"tiers": {"host": {"size": "0"}, "remote": {}}}}},
    ),
    rule("memory.tiers.remote.deadline", "from 10ms to 1m, such as 1s", value="1ms"),
    rule(
        "memory.tiers.file",
        "leave claimName or hostPath out",
        value={"claimName": "kv", "hostPath": "/kv"},
    ),
    rule(
        "memory.tiers",
        "with tickets.required clients reach the ports",
        {
            "tickets": {"secretName": "t", "required": True},
            "pools.single": {"memory": {"tiers": {"remote": {}}}},
        },
    ),
    rule(
        "model.quantization",
        "which serves no adapters",
        {"adapters": [ADAPTER], "model.quantization": "Int8"},
    ),
    rule(
        "model.deterministic",
        "or engine to Native without adapters",
        {"adapters": [ADAPTER], "model.deterministic": True},
    ),
    rule(
        "engine",
        "only vLLM computes on several nodes",
        {"engine": "Auto", "pools.large": {"gpus": 4, "nodes": 2}},
    ),
    rule(
        "pools.large.nodes",
        "each of an engine's nodes has an equal part",
        {"engine": "VLLM", "pools.large": {"gpus": 4, "nodes": 3}},
    ),
    rule(
        "pools.large.autoscaling.provider",
        "KEDA scales leaders without",
        {
            "engine": "VLLM",
            "pools.large": {
                "gpus": 4,
                "nodes": 2,
                "autoscaling": {
                    "maxReplicas": 2,
                    "provider": "KEDA",
                    "prometheusURL": "http://prometheus:9090",
                },
            },
        },
    ),
    rule(
        "pools",
        "a pool with several nodes must have at most 40",
        {"metadata.name": "n" * 36, "engine": "VLLM", "pools.large": {"gpus": 4, "nodes": 2}},
    ),
    rule("adapters", "native engine serves no", {"engine": "Native", "adapters": [ADAPTER]}),
    rule("adapters", "must not have the model's name", value=[ADAPTER | {"name": "m"}]),
    rule("adapters", "two adapters have one name", value=[ADAPTER, ADAPTER]),
    rule(
        "adapters",
        "an adapter cannot be an image",
        value=[ADAPTER | {"source": "oci://registry.example/a:1"}],
    ),
    rule(
        "adapters[0].source",
        "source must be hf://",
        {"adapters": [ADAPTER | {"source": "/a"}]},
    ),
    rule(
        "routing.largeRequestTokens",
        "must not exceed model.maxModelLen",
        {"model.maxModelLen": 4096, "pools.large": ONE},
    ),
    rule("routing.rungs.route.pools", "must name pools of this service", value=["huge"]),
    rule("routing.rungs.route.pools", "must name each pool once", value=["single", "single"]),
    rule(
        "routing.rungs.reject.minRetryDelay",
        "must not exceed reject.maxRetryDelay",
        {"routing.rungs.reject": {"minRetryDelay": "9s", "maxRetryDelay": "3s"}},
    ),
    Wrong(
        {"router.cors.allowedOrigins": ["chat.example.com"]},
        "spec.router.cors.allowedOrigins[0]",
        "an origin is a scheme, a host",
        is_rule=True,
    ),
    rule("routing.ladder", "ladder must name each rung once", value=["Queue", "Queue"]),
    rule("routing.ladder", "nothing is tried after Reject", value=["Reject", "Queue"]),
    rule("routing.queue.aging", "aging must be above 0", value="0s"),
    rule("routing.queue.timeout", "timeout must be above 0", value="0s"),
    rule("routing.placement.breaker", "pause must be above 0 and at most", value={"pause": "2m"}),
    rule("routing.prefill.window", "window must be at most 10s", value="11s"),
    rule("routing.coalesce.window", "window must be above 0 and at most 10s", value="0s"),
    rule("batching.prefillChunkTokens", "must be 0 (no chunking) or at least 16", value=8),
    rule("limits.requestTimeout", "requestTimeout must be above 0", value="0s"),
    rule("limits.requestTimeout", "must not exceed totalTimeout", value="11m"),
    rule("limits.totalTimeout", "totalTimeout must be at most 24h", value="24h1s"),
    rule("limits.stepDeadline", "stepDeadline must be at least 1s", value="10ms"),
    rule("streaming.coalesceWindow", "coalesceWindow must be at most 1s", value="2s"),
    rule(LEVELS, "pressureLevels must differ in belowPercent", value=[MILD, MILD]),
    rule(
        LEVELS,
        "must not allow longer outputs",
        value=[MILD | {"maxOutputTokens": 10}, STRICT | {"maxOutputTokens": 20}],
    ),
    rule(
        LEVELS,
        "must not allow a higher temperature",
        value=[MILD | {"maxTemperature": "0.5"}, STRICT | {"maxTemperature": 1}],
    ),
    rule(LEVELS, "a higher top_p", value=[STRICT | {"maxTopP": "0.9"}, MILD | {"maxTopP": "0.8"}]),
    rule(
        LEVELS,
        "larger batches",
        value=[STRICT | {"batchPercent": 100}, MILD | {"batchPercent": 80}],
    ),
    rule("cascade.steps", "name this service itself", value=[{"service": "wrong"}]),
    rule("cascade.steps", "must name each service once", value=[STEP, STEP]),
    rule("cascade.steps", "own engines once", value=[{"own": True}, STEP, {"own": True}]),
    rule("cascade.steps", "must name another service", value=[{"own": True}]),
    rule(
        "cascade.steps[0]",
        "tls and keySecretName are for other services",
        {"cascade.steps": [{"own": True, "keySecretName": "key"}, STEP]},
    ),
    rule(
        "cascade.steps[0]",
        "exactly one of service, address",
        {"cascade.steps": [STEP | {"own": True}]},
    ),
    rule(
        "cascade.fallback",
        "name another step before it",
        {"cascade.steps": [{"own": True}, STEP], "cascade.fallback": {}},
    ),
    rule(
        "cascade.fallback",
        "fallback needs a sign of high load",
        {"cascade.steps": [STEP], "cascade.fallback": {"pressureLevel": 0, "queuedRequests": 0}},
    ),
    rule(
        "tenants.named",
        "set anonymous to Allow",
        {"tenants": TENANTS | {"named": [{"name": "anonymous"}]}},
    ),
    rule(
        "tenants.named[0].name",
        "choose another",
        {"tenants": TENANTS | {"named": [{"name": "other"}]}},
    ),
    rule(
        "tenants.named[0].priority",
        "priority must not exceed maxPriority",
        {"tenants": TENANTS | {"named": [{"name": "a", "priority": 5, "maxPriority": 1}]}},
    ),
    rule("tickets.ttl", "ttl must be from 100ms", {"tickets": {"secretName": "t", "ttl": "2m"}}),
    rule("degrade.pressureLevels[0].maxTopP", "from 0.01 to 1", {LEVELS: [MILD | {"maxTopP": 0}]}),
    rule(
        "degrade.pressureLevels[0].maxTemperature",
        "at most 2",
        {LEVELS: [MILD | {"maxTemperature": "2.5"}]},
    ),
    Wrong(HEAVY, "spec.tenants.defaults.weight", "a number from 0.01 to 100"),
    Wrong(PACE, "spec.tenants.defaults.tokensPerSecond", "a number of at least 0.1"),
    form("streaming.tokensPerSecond", "100000.5", "a number of at most 100000"),
    rule("slo.errorPercent", "errorPercent must be at most 100", value=101),
    rule("rollout.thresholds.errorPercent", "errorPercent must be at most 100", value="100.1"),
    rule(
        "observability.tracing.samplePercent",
        "samplePercent must be at most 100",
        {"observability.tracing": {"endpoint": "http://c:4317", "samplePercent": 200}},
    ),
    rule("tenants.named", "two tenants have one name", {"tenants": TENANTS | {"named": TWINS}}),
    rule("cascade.steps", "must name each address once", value=[OTHER, OTHER]),
    rule("healing.silentAfter", "must be at least 30s", value="10s"),
    rule("healing.backoff", "first must be at most max", value={"first": "2h", "max": "1m"}),
    *SCALING,
    *SERVICE,
    rule("rollout.thresholds.agreementPercent", "must be at most 100", value="100.1"),
    rule(
        "rollout.answers.configMapName",
        "prompts ConfigMap goes with configMapName",
        {"rollout": {"answers": {"prompts": "ConfigMap"}}},
    ),
    rule(
        "rollout.answers.configMapName",
        "Sampled goes without",
        {"rollout": {"answers": {"prompts": "Sampled", "configMapName": "questions"}}},
    ),
    rule("rollout.weightSteps", "name each weight once", value=[10, 30, 30]),
    rule("rollout.weightSteps", "the smallest first", value=[30, 10]),
    rule("rollout.weightSteps", "must rise", value=[10, 60, 30]),
    rule("rollout.weightSteps", "must rise", value=[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]),
    rule("rollout.stepDuration", "must not exceed rollout.maxWait", {"rollout": LONG_STEP}),
    rule(
        "rollout.maxWait",
        "must be at least 3m",
        {"rollout": {"stepDuration": "1s", "maxWait": "4s"}},
    ),
    rule("tls", "tls encrypts nothing by itself", value={}),
    rule("slo.ttftP95", SLO_RULE, {"slo": {"ttftP95": "30s"}}),
    rule("slo.ttftP95", SLO_RULE, {"slo": {"e2eP95": "5s"}}),
    rule(
        "observability.tracing.endpoint",
        "endpoint is a URL such as http://collector:4318",
        {"observability.tracing.endpoint": "collector:4317"},
    ),
    rule("observability.metricsFrom[0]", "namespaceSelector, podSelector or both", NOBODY),
]

TABLE = [*UNKNOWN, *FORMS, *RULES]
