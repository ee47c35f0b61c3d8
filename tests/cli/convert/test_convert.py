"""`ullage convert`: manifests for other servers' configurations, and settings that are lost."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ullage_cli.convert.source import SourceDocument
from ullage_cli.main import main
from ullage_cli.manifest_draft import Draft
from ullage_cli.vllm_arguments import threshold_percent
from ullage_operator.api.parsing import parse

KSERVE = """\
apiVersion: serving.kserve.io/v1alpha2
kind: LLMInferenceService
metadata:
  name: chat
  namespace: prod
  labels: {team: search}
  resourceVersion: "12"
spec:
  model:
    uri: hf://org/Chat-7B
    name: org/Chat-7B
    lora:
      maxRank: 32
      adapters:
        - {name: tone, uri: "hf://org/tone"}
  replicas: 2
  parallelism: {tensor: 2, data: 3}
  scaling: {minReplicas: 2, maxReplicas: 8}
  router:
    scheduler: {}
    route: {http: {spec: {timeout: 5s}}}
    gateway: {refs: [{name: front, namespace: infra}]}
  tracing: {exporterEndpoint: "http://collector:4317", samplerArg: "0.25"}
  template:
    nodeSelector: {gpu: l40s}
    shareProcessNamespace: true
    containers:
      - name: main
        image: vllm/vllm-openai:v0.19.0
        args: ["--max-model-len=8192", "--enforce-eager", "--chat-template", "/t.jinja"]
        env:
          - {name: HF_HUB_OFFLINE, value: "1"}
          - {name: VLLM_LOGGING_LEVEL, value: DEBUG}
          - {name: VLLM_ADDITIONAL_ARGS, value: "--dtype half --max-num-seqs 32"}
        resources:
          requests: {cpu: "4", memory: 32Gi}
          limits: {cpu: "8", memory: 64Gi, nvidia.com/gpu: "2"}
        livenessProbe: {httpGet: {path: /health, port: 8000}}
      - name: sidecar
        image: busybox
  kvCacheOffloading:
    cpu: 10Gi
    secondary:
      - fileSystem: {emptyDir: {size: 100Gi}}
  prefill: {replicas: 2}
"""

VALUES = """\
servingEngineSpec:
  runtimeClassName: nvidia
  vllmApiKey: very-secret-key
  modelSpec:
    - name: chat
      repository: vllm/vllm-openai
      tag: latest
      modelURL: org/Chat-7B
      modelRevision: v2
      replicaCount: 2
      requestCPU: 6
      requestMemory: 16Gi
      requestGPU: 1
      pvcStorage: 50Gi
      pvcAccessMode: [ReadWriteOnce]
      vllmConfig:
        enableChunkedPrefill: false
        maxModelLen: 16384
        tensorParallelSize: 1
        gpuMemoryUtilization: 0.9
        extraArgs: ["--trust-remote-code", "--max-num-seqs", "32", "--no-such-thing", "1"]
        v1: 1
      lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "20", logLevel: DEBUG}
      hf_token: hf_very_secret
      tolerations: [{key: gpu, operator: Exists}]
      keda: {enabled: true, minReplicaCount: 1, maxReplicaCount: 4, pollingInterval: 15}
    - name: plain
      modelURL: /models/plain
      env: [{name: A, value: b}]
      hf_token: {secretName: hub, secretKey: token}
routerSpec: {replicaCount: 2, routingLogic: session}
"""


def run(capsys: pytest.CaptureFixture[str], *inputs: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The manifests that a conversion prints, all valid, and the lines about lost settings."""
    assert main(["convert", *inputs]) == 0
    out, err = capsys.readouterr()
    documents = list(yaml.safe_load_all(out))
    for document in documents:
        parse(document)
    lost = [line.removeprefix("no counterpart: ") for line in err.splitlines()]
    comments = " ".join(line.strip("# ") for line in out.splitlines() if line.startswith("#"))
    for line in lost:
        assert line.split(": ")[0] in comments, line
    return documents, lost


def names(lost: list[str]) -> set[str]:
    return {line.split(": ")[0] for line in lost}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(text: str) -> str:
        path = tmp_path / "input.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make


def test_kserve(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    [manifest], lost = run(capsys, write(KSERVE))
    assert manifest["metadata"] == {
        "name": "chat",
        "namespace": "prod",
        "labels": {"team": "search"},
    }
    spec = manifest["spec"]
    pool = spec["pools"]["single"]
    assert spec["model"] == {
        "source": "hf://org/Chat-7B",
        "name": "org/Chat-7B",
        "maxModelLen": 8192,
        "dtype": "Float16",
    }
    assert spec["adapters"] == [{"name": "tone", "source": "hf://org/tone", "rank": 32}]
    assert spec["replicas"] == 6
    assert (pool["gpus"], pool["parallelism"]) == (2, {"tensor": 2, "pipeline": 1})
    assert pool["resources"]["limits"] == {"cpu": "8", "memory": "64Gi"}
    assert pool["autoscaling"] == {"minReplicas": 6, "maxReplicas": 24}
    assert spec["batching"] == {"maxSequences": 32}
    assert spec["vllm"]["args"] == {"enforce_eager": True}
    assert spec["engine"] == "VLLM"
    assert spec["memory"]["tiers"] == {"host": {"size": "10Gi"}, "file": {"size": "100Gi"}}
    assert spec["router"]["gateway"]["parentRefs"] == [{"name": "front", "namespace": "infra"}]
    assert spec["observability"]["tracing"]["samplePercent"] == "25"
    template = pool["podTemplate"]["spec"]
    assert template["nodeSelector"] == {"gpu": "l40s"}
    assert template["containers"][0]["env"] == [{"name": "HF_HUB_OFFLINE", "value": "1"}]

    main_container = "spec.template.containers[0]"
    assert names(lost) == {
        "--chat-template",
        "metadata.resourceVersion",
        f"{main_container}.env[VLLM_LOGGING_LEVEL]",
        f"{main_container}.image",
        f"{main_container}.livenessProbe",
        "spec.template.containers[1].image",
        "spec.template.shareProcessNamespace",
        "spec.router.scheduler",
        "spec.router.route",
        "spec.prefill",
    }


def test_kserve_without_gpus_is_served_on_a_cpu(
    capsys: pytest.CaptureFixture[str], write: Any
) -> None:
    text = "\n".join(
        [
            "apiVersion: serving.kserve.io/v1alpha1",
            "kind: LLMInferenceService",
            "metadata: {name: 0-very-long-name-that-has-more-than-forty-characters}",
            "spec: {model: {uri: 'hf://org/m'}, template: {containers: [{name: main}]}}",
        ]
    )
    [manifest], lost = run(capsys, write(text))
    assert not lost
    assert manifest["spec"]["device"] == "CPU"
    assert manifest["metadata"]["name"] == "very-long-name-that-has-more-than-forty"


def test_production_stack(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    assert main(["convert", write(VALUES)]) == 0
    out, err = capsys.readouterr()
    assert "secret-key" not in out + err
    assert "hf_very_secret" not in out + err

    (chat, plain), lost = run(capsys, write(VALUES))
    spec = chat["spec"]
    pool = spec["pools"]["single"]
    assert spec["model"] == {
        "source": "hf://org/Chat-7B@v2",
        "name": "org/Chat-7B",
        "maxModelLen": 16_384,
    }
    assert spec["batching"] == {"prefillChunkTokens": 0, "maxSequences": 32}
    assert spec["memory"]["thresholdPercent"] == 90
    assert spec["memory"]["prefixCache"] is True
    assert spec["memory"]["tiers"]["host"] == {"size": "20Gi"}
    assert spec["vllm"]["args"] == {"trust_remote_code": True}
    assert (spec["replicas"], spec["router"]["replicas"], pool["gpus"]) == (2, 2, 1)
    assert pool["modelCache"] == {"claimTemplate": {"size": "50Gi"}}
    assert pool["autoscaling"] == {"minReplicas": 1, "maxReplicas": 4}
    assert pool["podTemplate"]["spec"]["runtimeClassName"] == "nvidia"
    assert pool["podTemplate"]["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]

    assert plain["spec"]["model"]["source"] == "file:///models/plain"
    assert plain["spec"]["device"] == "CPU"
    [engine] = plain["spec"]["pools"]["single"]["podTemplate"]["spec"]["containers"]
    assert [variable["name"] for variable in engine["env"]] == ["HF_TOKEN", "A"]

    model = "servingEngineSpec.modelSpec[0]"
    assert names(lost) == {
        "--no-such-thing",
        f"{model}.hf_token",
        f"{model}.repository",
        f"{model}.tag",
        f"{model}.pvcAccessMode",
        f"{model}.vllmConfig.v1",
        f"{model}.lmcacheConfig.logLevel",
        f"{model}.keda.pollingInterval",
        "servingEngineSpec.vllmApiKey",
        "routerSpec.routingLogic",
    }


def test_gpus_that_are_not_one_for_each_rank(
    capsys: pytest.CaptureFixture[str], write: Any
) -> None:
    for count, said in (("0.5", "0.5 of a GPU"), ("8", "8 GPUs for 1 ranks")):
        text = VALUES.replace("requestGPU: 1", f"requestGPU: {count}")
        manifests, lost = run(capsys, write(text))
        assert manifests[0]["spec"]["pools"]["single"]["gpus"] == 1
        assert any(said in line for line in lost), lost


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"])
def test_parts_of_gpus_are_gpus(
    capsys: pytest.CaptureFixture[str], write: Any, resource: str
) -> None:
    text = KSERVE.replace('nvidia.com/gpu: "2"', f'{resource}: "1"').replace("tensor: 2, ", "")
    [manifest], lost = run(capsys, write(text))
    pool = manifest["spec"]["pools"]["single"]
    assert (pool["gpus"], pool["gpuResourceName"]) == (1, resource)
    assert "device" not in manifest["spec"]
    assert not any(resource in line for line in lost)


def test_a_type_of_gpu_is_the_resource(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    text = VALUES.replace("requestGPU: 1", "requestGPU: 1\n      requestGPUType: example.com/card")
    chat = run(capsys, write(text))[0][0]
    assert chat["spec"]["pools"]["single"]["gpuResourceName"] == "example.com/card"
    assert "device" not in chat["spec"]


@pytest.mark.parametrize("resource", ["habana.ai/gaudi", "gpu.intel.com/i915", "aws.amazon.com/x"])
def test_other_devices_are_lost_and_never_become_a_cpu(
    capsys: pytest.CaptureFixture[str], write: Any, resource: str
) -> None:
    text = KSERVE.replace("nvidia.com/gpu", resource).replace("tensor: 2, ", "")
    [manifest], lost = run(capsys, write(text))
    pool = manifest["spec"]["pools"]["single"]
    assert "device" not in manifest["spec"]
    assert pool["resources"]["limits"] == {"cpu": "8", "memory": "64Gi"}
    assert f"spec.template.containers[0].resources.limits.{resource}" in names(lost)


def test_a_command_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "vllm serve Qwen/Qwen3-8B -tp 2 --served-model-name qwen q --max-model-len 32K "
        "--kv-cache-dtype fp8 --gpu-memory-utilization 0.92 --enable-lora --max-lora-rank 64 "
        "--lora-modules sql=org/sql --no-enable-prefix-caching --reasoning-parser qwen3 "
        "--enable-auto-tool-choice --tool-call-parser hermes --api-key secret --port 9000 "
        "--hf-overrides '{\"a\": 1}' --seed 7 -O3 --quantization awq"
    )
    [manifest], lost = run(capsys, "--", *shlex.split(command))
    spec = manifest["spec"]
    assert manifest["metadata"]["name"] == "qwen3-8b"
    assert spec["model"] == {
        "source": "hf://Qwen/Qwen3-8B",
        "name": "qwen",
        "maxModelLen": 32_768,
        "kvDtype": "FP8",
        "quantization": "Auto",
    }
    assert spec["pools"]["single"] == {"parallelism": {"tensor": 2, "pipeline": 1}, "gpus": 2}
    assert spec["memory"] == {
        "thresholdPercent": 92,
        "maxLoras": 1,
        "maxLoraRank": 64,
        "prefixCache": False,
    }
    assert spec["adapters"] == [{"name": "sql", "source": "hf://org/sql", "rank": 64}]
    assert spec["prompts"] == {"reasoning": "Think"}
    assert spec["vllm"]["args"] == {"hf_overrides": {"a": 1}, "optimization_level": 3}
    assert names(lost) == {
        "--served-model-name q",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--api-key",
        "--port",
        "--seed",
    }
    assert "secret" not in " ".join(lost)


def test_data_parallel_ranks_multiply_replicas(
    capsys: pytest.CaptureFixture[str], write: Any
) -> None:
    text = VALUES.replace('"--trust-remote-code"', '"-dp", "3"')
    chat = run(capsys, write(text))[0][0]
    assert chat["spec"]["replicas"] == 6
    pool = chat["spec"]["pools"]["single"]
    assert pool["autoscaling"] == {"minReplicas": 3, "maxReplicas": 12}

    text = KSERVE.replace("data: 3", "").replace("--enforce-eager", "--data-parallel-size=2")
    [manifest], _ = run(capsys, write(text))
    assert manifest["spec"]["replicas"] == 4

    [manifest], _ = run(capsys, "--", "vllm", "serve", "m/m", "-dp", "4")
    assert manifest["spec"]["replicas"] == 4


def test_experts_over_data_parallel_ranks_are_refused(
    capsys: pytest.CaptureFixture[str], write: Any
) -> None:
    path = write(KSERVE.replace("data: 3", "data: 3, expert: true"))
    commands = (["--", "vllm", "serve", "m/m", "-dp", "2", "--enable-expert-parallel"], [path])
    for words in commands:
        assert main(["convert", *words]) == 2
        assert "each engine of Ullage needs the whole model" in capsys.readouterr().err


@pytest.mark.parametrize("is_first", [True, False])
def test_chunked_prefill_stays_off(
    capsys: pytest.CaptureFixture[str], write: Any, is_first: bool
) -> None:
    options = [["--no-enable-chunked-prefill"], ["--max-num-batched-tokens", "8192"]]
    words = options[0] + options[1] if is_first else options[1] + options[0]
    [manifest], lost = run(capsys, "--", "vllm", "serve", "m/m", *words)
    assert manifest["spec"]["batching"] == {"prefillChunkTokens": 0}
    assert [line for line in lost if "batched" in line and "chunked prefill is off" in line]

    text = VALUES.replace("maxModelLen: 16384", "maxNumBatchedTokens: 8192")
    (chat, _), lost = run(capsys, write(text))
    assert chat["spec"]["batching"]["prefillChunkTokens"] == 0
    assert any(line.split(": ")[0].endswith("maxNumBatchedTokens") for line in lost)


def test_options_with_several_values_keep_all(capsys: pytest.CaptureFixture[str]) -> None:
    words = "vllm serve --cudagraph-capture-sizes 1 2 4 --ignore-patterns a* b* --model org/m"
    [manifest], lost = run(capsys, "--", *words.split())
    assert not lost
    spec = manifest["spec"]
    assert spec["model"]["source"] == "hf://org/m"
    assert spec["vllm"]["args"] == {
        "cudagraph_capture_sizes": [1, 2, 4],
        "ignore_patterns": ["a*", "b*"],
    }


def test_the_option_that_names_the_model_wins(capsys: pytest.CaptureFixture[str]) -> None:
    words = "vllm serve org/a --model org/b"
    [manifest], lost = run(capsys, "--", *words.split())
    assert manifest["spec"]["model"]["source"] == "hf://org/b"
    assert names(lost) == {"org/a"}


def test_words_that_nothing_explains_are_named(
    capsys: pytest.CaptureFixture[str], write: Any
) -> None:
    text = KSERVE.replace("--enforce-eager", 'stray", "/mnt/models')
    _, lost = run(capsys, write(text))
    assert "spec.template.containers[0].args stray" in names(lost)
    assert "/mnt/models" not in " ".join(lost)


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password"])
def test_plain_secrets_are_never_printed(
    capsys: pytest.CaptureFixture[str], write: Any, name: str
) -> None:
    text = VALUES.replace("{name: A, value: b}", f"{{name: {name}, value: hidden-value}}")
    path = write(text)
    assert main(["convert", path]) == 0
    out, err = capsys.readouterr()
    assert "hidden-value" not in out + err
    assert f"servingEngineSpec.modelSpec[1].env[{name}]" in names(run(capsys, path)[1])


@pytest.mark.parametrize(
    ("words", "name", "explanation"),
    [
        ("--config c.yaml", "--config", "convert the options in this file, too"),
        ("-dpl 2", "-dpl", "replicas"),
        ("-dcp 2", "-dcp", "parallelism"),
        ("-dpn 1", "-dpn", "replicas"),
        ("--hf-overrides.a.b 1", "--hf-overrides.a.b", "in full: --hf-overrides JSON"),
        ("--max-model-len auto", "--max-model-len auto", "left out"),
        ("--max-model-len -1", "--max-model-len -1", "left out"),
        ("--quantization gguf", "--quantization gguf", "left out"),
    ],
)
def test_explanations_of_lost_options(
    capsys: pytest.CaptureFixture[str], words: str, name: str, explanation: str
) -> None:
    [manifest], lost = run(capsys, "--", "vllm", "serve", "m/m", *words.split())
    assert manifest["spec"]["model"]["source"] == "hf://m/m"
    assert names(lost) == {name}
    assert explanation in lost[0]


def test_arguments_from_elsewhere_are_named(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    variable = 'value: "--dtype half --max-num-seqs 32"'
    source = "valueFrom: {configMapKeyRef: {name: a, key: b}}"
    _, lost = run(capsys, write(KSERVE.replace(variable, source)))
    assert "spec.template.containers[0].env[VLLM_ADDITIONAL_ARGS]" in names(lost)


@pytest.mark.parametrize(("policy", "expected"), [("", ["all", "gpu"]), ("override", ["gpu"])])
def test_tolerations_of_all_models_are_kept(
    capsys: pytest.CaptureFixture[str], write: Any, policy: str, expected: list[str]
) -> None:
    shared = "  tolerations: [{key: all, operator: Exists}]\n  modelSpec:"
    text = VALUES.replace("  modelSpec:", shared)
    if policy:
        own = "      tolerations:"
        text = text.replace(own, f"      tolerationsPolicy: {policy}\n{own}")
    (chat, plain), lost = run(capsys, write(text))

    def keys(manifest: dict[str, Any]) -> list[str]:
        spec = manifest["spec"]["pools"]["single"]["podTemplate"]["spec"]
        return [each["key"] for each in spec["tolerations"]]

    assert keys(chat) == expected
    assert keys(plain) == ["all"]
    assert not any("tolerations" in line for line in lost)


def test_meanings_that_differ_have_comments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "vllm serve /m/Chat.gguf --gpu-memory-utilization 0.955"
    assert main(["convert", "--", *words.split()]) == 0
    out = " ".join(line.strip(" #") for line in capsys.readouterr().out.splitlines())
    assert "vLLM's clients request it as /m/Chat.gguf; they need this name name: m/Chat" in out
    assert "thoughts stay in content; write Auto to split them reasoning: " in out

    [manifest], _ = run(capsys, "--", *words.split())
    spec = manifest["spec"]
    assert spec["memory"]["thresholdPercent"] == 95
    assert spec["prompts"] == {"reasoning": "None"}


@pytest.mark.parametrize("percent", range(1, 101))
def test_whole_percents_keep_their_value(percent: int) -> None:
    assert threshold_percent(str(percent / 100)) == percent


def test_a_model_on_the_claim_of_a_chart(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    text = VALUES.replace("modelURL: org/Chat-7B", "modelURL: /data/models/chat")
    (chat, _), lost = run(capsys, write(text))
    assert "modelCache" not in chat["spec"]["pools"]["single"]
    assert "servingEngineSpec.modelSpec[0].pvcStorage" in names(lost)

    text = text.replace("pvcStorage: 50Gi", "pvcExistingClaimName: files")
    chat = run(capsys, write(text))[0][0]
    assert chat["spec"]["model"]["source"] == "pvc://files/models/chat"


def test_a_model_that_is_off_is_stopped(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    text = VALUES.replace("    - name: plain", "    - name: plain\n      enabled: false")
    (chat, plain), _ = run(capsys, write(text))
    assert "stop" not in chat["spec"]
    assert plain["spec"]["stop"] is True


def test_the_older_command_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = "python -m vllm.entrypoints.openai.api_server --model /m/llama --dtype bfloat16"
    [manifest], lost = run(capsys, "--", *words.split())
    assert not lost
    assert manifest["spec"]["model"]["source"] == "file:///m/llama"
    assert manifest["spec"]["model"]["dtype"] == "BFloat16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("vllm bench latency", "only vllm serve can be converted"),
        ("vllm serve --dtype half", "names no model"),
        ("vllm serve m/m --dtype int8", "--dtype int8: not served; use one of auto"),
        ("vllm serve m/m --max-model-len many", "'many' is not a whole number"),
        ("vllm serve m/m --gpu-memory-utilization 3", "not a share of memory"),
        ("vllm serve m/m --max-model-len", "--max-model-len: needs one value"),
        ("vllm serve m/m --lora-modules x", "write NAME=PATH"),
        ("vllm serve m/m --max-model-len 1", "the result is not valid: spec.model.maxModelLen"),
    ],
)
def test_commands_that_cannot_be_converted(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert main(["convert", "--", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Pod\napiVersion: v1\n", "has nothing to convert (kinds: Pod)"),
        ("", "has nothing to convert (kinds: none)"),
        ("servingEngineSpec: {}\n", "servingEngineSpec.modelSpec: the values have no model"),
        ("servingEngineSpec: {modelSpec: [1]}\n", "is not a list of mappings"),
        ("servingEngineSpec: {modelSpec: [{name: a}]}\n", "modelSpec[0].modelURL: missing"),
        (KSERVE.replace("hf://org/Chat-7B", "gs://b/m"), "spec.model.uri 'gs://b/m': Ullage reads"),
        (KSERVE.replace("replicas: 2", "replicas: many"), "a field has another type"),
    ],
)
def test_files_that_cannot_be_converted(
    capsys: pytest.CaptureFixture[str], write: Any, text: str, said: str
) -> None:
    path = write(text)
    assert main(["convert", path]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}: ")
    assert said in err


def test_lists_and_standard_input(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    listed = {"kind": "List", "items": [yaml.safe_load(KSERVE)] * 2}
    documents, _ = run(capsys, write(yaml.safe_dump(listed)))
    assert len(documents) == 2


LEAVES = st.recursive(
    st.integers() | st.just({}) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abcd"), LEAVES), st.lists(st.sampled_from("abcd")))
def test_no_field_of_a_source_is_lost_silently(document: dict[str, Any], taken: list[str]) -> None:
    source = SourceDocument(document)
    for name in taken:
        source.take(f"a.{name}")
        source.take(name)
    draft = Draft("x")
    source.lose_rest(draft, {})
    expected = set(leaves(document, taken))
    assert names(draft.lost) == expected


def leaves(document: dict[str, Any], taken: list[str]) -> list[str]:
    rest = {name: value for name, value in document.items() if name not in taken}
    if isinstance(rest.get("a"), dict) and set(rest["a"]) & set(taken):
        rest["a"] = {name: value for name, value in rest["a"].items() if name not in taken}
        if not rest["a"]:
            del rest["a"]

    def walk(section: dict[str, Any], path: str) -> list[str]:
        paths = []
        for name, value in section.items():
            own = path + name
            paths += walk(value, own + ".") if isinstance(value, dict) and value else [own]
        return paths

    return walk(rest, "")


def test_comments_never_change_a_manifest() -> None:
    draft = Draft("x")
    draft.set(
        "spec.model.source", "hf://a/b", "a reason\nwith a line: break and a very " + "x" * 99
    )
    draft.set("spec.model.name", "yes")
    draft.set("spec.slo", {"ttftP95": "1s"}, "why")
    draft.lose("field", "because: #")
    assert yaml.safe_load(draft.text()) == draft.document
