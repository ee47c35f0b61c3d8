"""Which engine computes in a pool's pods, and what pods with vLLM have beside the others."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from ullage_common.config.engine import (
    OWNED_VLLM_ARGS,
    AdapterSection,
    AdaptersFile,
    EngineConfig,
)
from ullage_engine.model_loader.source import IMAGE_ROOT
from ullage_operator.api import naming
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse, parse_stored
from ullage_operator.api.settings import CUDA_ENGINE_IMAGE, ENGINE_IMAGE, Settings
from ullage_operator.manifests.engine_choice import expected_engine
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan, plan

Make = Callable[..., dict[str, Any]]
MakePlan = Callable[..., ServicePlan]
MODEL = {"source": "pvc://weights/llama", "name": "llama"}
ADAPTERS = [
    {"name": "sql", "source": "hf://org/sql-lora@main", "rank": 16},
    {"name": "law", "source": "pvc://tuned/law", "rank": 8},
    {"name": "old", "source": "pvc://weights/old", "rank": 8},
]
VLLM: dict[str, Any] = {
    "engine": "VLLM",
    "model": MODEL,
    "adapters": ADAPTERS,
    "vllm": {"args": {"enforce_eager": True, "hf_overrides": {"rope": 2}, "block_size": 32}},
}


def find(plan: ServicePlan, kind: str, name: str = "demo-single") -> dict[str, Any]:
    [item] = [o for o in plan.apply if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return item


def engine_config(plan: ServicePlan) -> EngineConfig:
    text = find(plan, "ConfigMap")["data"]["engine.yaml"]
    return msgspec.convert(yaml.safe_load(text), EngineConfig)


def pod_spec(plan: ServicePlan) -> dict[str, Any]:
    pod: dict[str, Any] = find(plan, "StatefulSet")["spec"]["template"]["spec"]
    return pod


def container(plan: ServicePlan) -> dict[str, Any]:
    [engine] = pod_spec(plan)["containers"]
    return dict(engine)


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        ({"adapters": [ADAPTERS[0] | {"rank": 17}]}, "spec.adapters[0].rank", "maxLoraRank 16"),
        ({"memory": {"maxLoras": 0}}, "spec.memory.maxLoras", "leaves no slot"),
        ({"adapterClaims": ["other"]}, "spec.adapters[1].source", "is on claim tuned"),
        (
            {"engine": "Native", "adapters": [], "memory": {"maxLoras": 1}},
            "spec.memory.maxLoras",
            "native",
        ),
    ],
)
def test_adapters_that_engines_have_no_room_for_are_refused_by_field(
    manifest: Make, spec: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse(manifest(**{"engine": "VLLM", "model": MODEL, "adapters": ADAPTERS, **spec}))
    [problem] = caught.value.problems
    assert problem.path == path
    assert message in problem.message


def test_engines_read_which_engine_they_are_and_its_adapters(make_plan: MakePlan) -> None:
    plan = make_plan(**VLLM)
    config = engine_config(plan)
    assert config.engine == "vllm"
    assert config.vllm.args == VLLM["vllm"]["args"]
    # Not in the configuration, whose change replaces pods.
    assert (config.adapters, config.max_loras) == ((), 8)
    mount = {m["name"]: m["mountPath"] for m in container(plan)["volumeMounts"]}["adapters"]
    assert config.adapters_file == f"{mount}/adapters.yaml"
    [volume] = [v for v in pod_spec(plan)["volumes"] if v["name"] == "adapters"]
    text = find(plan, "ConfigMap", volume["configMap"]["name"])["data"]["adapters.yaml"]
    file = msgspec.convert(yaml.safe_load(text), AdaptersFile)
    assert file.adapters == tuple(AdapterSection(**adapter) for adapter in ADAPTERS)

    plain = engine_config(make_plan())
    assert (plain.engine, plain.vllm.args, plain.max_loras) == ("auto", {}, 0)
    assert plain.adapters_file is None
    assert "adapters" not in [volume["name"] for volume in pod_spec(make_plan())["volumes"]]
    assert plain.batching.prefill_chunk_tokens is None


IMAGE = "registry.example:5000/models/llama:1"
DIGEST = "registry.example/models/llama@sha256:" + 64 * "a"


@pytest.mark.parametrize("policy", [None, "Always", "Never"])
@pytest.mark.parametrize("reference", [IMAGE, DIGEST])
def test_a_model_in_an_image_is_a_volume_that_the_node_pulls(
    make_plan: MakePlan, reference: str, policy: str | None
) -> None:
    spec: dict[str, Any] = {"imagePullSecrets": [{"name": "registry"}]}
    if policy:
        spec["modelPullPolicy"] = policy
    source = f"oci://{reference}#weights/llama"
    plan = make_plan(model=MODEL | {"source": source}, **spec)
    pod = pod_spec(plan)
    [volume] = [each for each in pod["volumes"] if "image" in each]
    expected = {"reference": reference} | ({"pullPolicy": policy} if policy else {})
    assert volume["image"] == expected
    [mount] = [m for m in container(plan)["volumeMounts"] if m["name"] == volume["name"]]
    assert (mount["mountPath"], mount["readOnly"]) == (str(IMAGE_ROOT), True)
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert engine_config(plan).model.source == source
    kubernetes_validate.validate(find(plan, "StatefulSet"), "1.35", strict=True)


@pytest.mark.parametrize(
    "spec",
    [
        {"model": MODEL | {"source": "oci://llama:1"}},
        {"model": MODEL | {"source": "oci://registry.example/Llama:1#"}},
        {"model": MODEL | {"source": "oci://registry.example/llama@sha256:abc"}},
        {"engine": "VLLM", "adapters": [ADAPTERS[0] | {"source": f"oci://{IMAGE}"}]},
        {"modelPullPolicy": "Sometimes"},
    ],
)
def test_images_that_no_node_could_pull_are_refused(manifest: Make, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifest):
        parse(manifest(**spec))


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_engines_read_buckets_by_the_environment_of_aws(make_plan: MakePlan) -> None:
    model = MODEL | {"source": "s3://models/llama-8b"}
    s3 = {"endpoint": "http://minio.storage:9000", "region": "eu-west-1", "secretName": "models"}
    plan = make_plan(model=model, s3=s3)
    env = env_of(container(plan))
    assert env["ULLAGE_S3_CACHE"].startswith(f"{naming.CACHE_DIR}/")
    assert env["AWS_ENDPOINT_URL_S3"] == "http://minio.storage:9000"
    assert env["AWS_REGION"] == "eu-west-1"
    assert "AWS_NO_SIGN_REQUEST" not in env
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert env[name] == {"secretKeyRef": {"name": "models", "key": name}}
    token = {"name": "models", "key": "AWS_SESSION_TOKEN", "optional": True}
    assert env["AWS_SESSION_TOKEN"] == {"secretKeyRef": token}
    kubernetes_validate.validate(find(plan, "StatefulSet"), "1.35", strict=True)

    identity = env_of(container(make_plan(model=model)))
    assert [name for name in identity if name.startswith("AWS_")] == []
    public = env_of(container(make_plan(model=model, s3={"anonymous": True})))
    assert public["AWS_NO_SIGN_REQUEST"] == "true"
    assert [name for name in env_of(container(make_plan())) if "S3" in name] == []


def test_a_pod_template_may_set_what_engines_read_buckets_by(make_plan: MakePlan) -> None:
    own = {"name": "engine", "env": [{"name": "AWS_REGION", "value": "eu-north-1"}]}
    pools = {"single": {"podTemplate": {"spec": {"containers": [own]}}}}
    model = MODEL | {"source": "s3://models/m.gguf"}
    plan = make_plan(model=model, s3={"region": "eu-west-1"}, pools=pools)
    assert env_of(container(plan))["AWS_REGION"] == "eu-north-1"


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
@pytest.mark.parametrize("s3", [{"anonymous": True}, {"secretName": "models"}])
def test_keys_of_a_pod_template_are_mixed_with_no_others(
    make_plan: MakePlan, s3: dict[str, Any], name: str
) -> None:
    own = {"name": "engine", "env": [{"name": name, "value": "own"}]}
    pools = {"single": {"podTemplate": {"spec": {"containers": [own]}}}}
    model = MODEL | {"source": "s3://models/m.gguf"}
    env = env_of(container(make_plan(model=model, s3=s3, pools=pools)))
    assert {key: env[key] for key in env if key.startswith("AWS_")} == {name: "own"}


def test_followers_fetch_with_the_same_credentials(make_plan: MakePlan) -> None:
    model = MODEL | {"source": "s3://models/llama-8b"}
    pools = {"large": {"gpus": 4, "nodes": 2}}
    made = make_plan(engine="VLLM", model=model, s3={"secretName": "models"}, pools=pools).apply
    pods = [item["spec"]["template"]["spec"] for item in made if item["kind"] == "StatefulSet"]
    assert len(pods) > 1
    assert all("AWS_ACCESS_KEY_ID" in env_of(pod["containers"][0]) for pod in pods)


def test_routers_do_not_read_what_engines_compute_with(make_plan: MakePlan) -> None:
    plain, vllm = (
        find(make_plan(**spec), "ConfigMap", "demo-router")["data"]["router.yaml"]
        for spec in ({"model": MODEL}, VLLM)
    )
    assert plain == vllm


def test_claims_of_adapters_are_mounted_once_each(make_plan: MakePlan) -> None:
    pod = pod_spec(make_plan(**VLLM))
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = {
        mount["mountPath"]: claims[mount["name"]]
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] in claims
    }
    assert mounts == {"/models/weights": "weights", "/models/tuned": "tuned"}


@pytest.mark.parametrize("name", sorted(OWNED_VLLM_ARGS))
def test_arguments_that_ullage_sets_are_refused_with_the_field_to_set(
    manifest: Make, make_plan: MakePlan, stored: Make, name: str
) -> None:
    wrong: dict[str, Any] = {"vllm": {"args": {name: 1}}}
    with pytest.raises(InvalidManifest) as refusal:
        make_plan(**wrong)
    message = str(refusal.value)
    assert message.startswith(f"spec.vllm: args.{name} is not yours to set; instead use ")
    # An API server cannot look into the map, so the operator refuses what it has stored.
    with pytest.raises(InvalidManifest, match=f"args.{name} is not yours to set"):
        parse_stored(stored(**wrong))


def test_the_field_to_set_is_called_as_in_the_api(make_plan: MakePlan) -> None:
    with pytest.raises(InvalidManifest, match=r"args\.max_model_len .* use model\.maxModelLen"):
        make_plan(vllm={"args": {"max_model_len": 4096}})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("hf_token", "HF_TOKEN in the environment (podTemplate's env, from a Secret)"),
        ("kv_offloading_size", "memory.tiers"),
        ("kv_transfer_config", "memory.tiers"),
        ("max_num_scheduled_tokens", "batching.prefillChunkTokens"),
        ("data_parallel_rank", "replicas of the pool"),
        ("decode_context_parallel_size", "parallelism.tensor and parallelism.pipeline"),
        ("watermark", "memory.thresholdPercent and memory.safetyReserve"),
    ],
)
def test_secrets_and_what_goes_past_the_ledger_are_refused(
    make_plan: MakePlan, name: str, instead: str
) -> None:
    with pytest.raises(InvalidManifest) as refusal:
        make_plan(vllm={"args": {name: "x"}})
    expected = f"spec.vllm: args.{name} is not yours to set; instead use {instead}"
    assert str(refusal.value) == expected


@pytest.mark.parametrize("name", ["max-model-len", "--seed", "a b", ""])
def test_what_cannot_be_an_argument_is_refused(make_plan: MakePlan, name: str) -> None:
    with pytest.raises(InvalidManifest, match=f"spec.vllm: args.{name} is not an argument of vLLM"):
        make_plan(vllm={"args": {name: 1}})


LORA = {"adapters": ADAPTERS[:1]}


@pytest.mark.parametrize(
    ("spec", "image"),
    [
        ({}, "vllm"),
        ({"device": "CUDA"}, "vllm"),
        ({"device": "CPU"}, "native"),
        ({"device": "CPU", **LORA}, "vllm"),
        ({"engine": "VLLM", "device": "CPU"}, "vllm"),
        ({"engine": "Native"}, "native"),
        ({"engine": "VLLM", "image": "own"}, "own"),
        ({"engine": "Native", "image": "own"}, "own"),
        ({"model": MODEL | {"quantization": "Int8"}}, "native"),
        ({"model": MODEL | {"quantization": "FP8"}}, "vllm"),
        ({"model": MODEL | {"deterministic": True}}, "native"),
        ({"memory": {"hostKV": "1Gi"}}, "native"),
        ({"memory": {"hostKV": "1Gi"}, "pools": {"large": {"memory": {"hostKV": 0}}}}, "vllm"),
    ],
)
def test_pods_run_the_image_that_has_their_engine(
    manifest: Make, spec: dict[str, Any], image: str
) -> None:
    settings = Settings(engine_image="native", cuda_engine_image="", vllm_engine_image="vllm")
    made = plan(parse(manifest(**spec)), Observed(now=datetime.now(UTC)), settings)
    assert pod_spec(made)["containers"][0]["image"] == image


@pytest.mark.parametrize("engine", ["Auto", "Native", "VLLM"])
def test_without_an_image_for_vllm_the_device_decides(make_plan: MakePlan, engine: str) -> None:
    for device, image in (
        ("CPU", ENGINE_IMAGE),
        ("CUDA", CUDA_ENGINE_IMAGE),
        ("Auto", CUDA_ENGINE_IMAGE),
    ):
        made = make_plan(engine=engine, device=device)
        assert pod_spec(made)["containers"][0]["image"] == image


def test_an_operator_with_one_engine_image_gives_it_to_all(manifest: Make) -> None:
    settings = Settings.from_env({"ULLAGE_ENGINE_IMAGE": "r.example/engine:1"})
    made = plan(parse(manifest(device="CUDA")), Observed(now=datetime.now(UTC)), settings)
    assert pod_spec(made)["containers"][0]["image"] == "r.example/engine:1"


def test_the_manifest_for_gpus_that_people_read_first_has_an_image_with_cuda() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    [block] = [
        each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "gpus:" in each
    ]
    made = plan(parse(yaml.safe_load(block)), Observed(now=datetime.now(UTC)), Settings())
    sets = [item for item in made.apply if item["kind"] == "StatefulSet"]
    images = [item["spec"]["template"]["spec"]["containers"][0]["image"] for item in sets]
    assert images == [CUDA_ENGINE_IMAGE] * 2


def test_no_default_image_is_in_a_public_registry() -> None:
    settings = Settings()
    images = (settings.engine_image, settings.cuda_engine_image, settings.router_image)
    assert all(image.startswith("localhost/") for image in images)


def environment(plan: ServicePlan) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in pod_spec(plan)["containers"][0]["env"]}


def test_vllm_keeps_what_it_compiles_and_asks_nobody(make_plan: MakePlan) -> None:
    source = {"source": "pvc://weights/llama", "name": "llama"}
    env = environment(make_plan(engine="VLLM", model=source))
    assert env["VLLM_CACHE_ROOT"] == "/var/cache/ullage/vllm"
    assert env["HOME"] == "/var/cache/ullage/home"
    assert (env["VLLM_NO_USAGE_STATS"], env["HF_HUB_OFFLINE"]) == ("1", "1")
    assert "HF_HUB_OFFLINE" not in environment(make_plan(**VLLM))  # an adapter is of the hub
    native = environment(make_plan(engine="Native", model=source))
    assert native.keys().isdisjoint({"HOME", "VLLM_CACHE_ROOT", "HF_HUB_OFFLINE"})


def test_a_pod_template_sets_vllms_environment_otherwise(make_plan: MakePlan) -> None:
    own = [{"name": "HF_HUB_OFFLINE", "value": "0"}, {"name": "HOME", "value": "/home"}]
    template = {"spec": {"containers": [{"name": "engine", "env": own}]}}
    env = environment(make_plan(engine="VLLM", pools={"single": {"podTemplate": template}}))
    assert (env["HF_HUB_OFFLINE"], env["HOME"]) == ("0", "/home")
    assert env["VLLM_CACHE_ROOT"] == "/var/cache/ullage/vllm"


@pytest.mark.parametrize(
    ("engine", "pool", "size"),
    [
        ("Native", {"gpus": 4}, "1Gi"),
        ("VLLM", {"gpus": 4}, "2Gi"),
        ("Auto", {}, "1280Mi"),
        ("VLLM", {"gpus": 4, "shmSize": "8Gi"}, "8Gi"),
    ],
)
def test_shared_memory_grows_with_vllms_ranks(
    make_plan: MakePlan, engine: str, pool: dict[str, Any], size: str
) -> None:
    pod = pod_spec(make_plan(engine=engine, pools={"single": pool}))
    [shm] = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": size}
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in mounts


UNSERVED = "the native engine does not serve the model"
IMAGE = "set vllmEngineImage or spec.image"
ELSE_IMAGE = f"the native engine serves no adapters: {IMAGE}"
INT8 = {"model": MODEL | {"quantization": "Int8"}}
NOT_INT8 = (
    "vLLM refuses model.quantization: only the native engine has int8; with vLLM set fp8, or use a "
    "quantised checkpoint"
)


@pytest.mark.parametrize(
    ("spec", "on_cuda", "has_vllm", "expected"),
    [
        ({"engine": "Native"}, None, None, "native: engine is native"),
        ({"engine": "VLLM"}, None, None, "vllm: engine is vllm"),
        (
            {"engine": "VLLM"},
            True,
            False,
            f"vllm: engine is vllm, which HERE does not have: {IMAGE}",
        ),
        ({}, True, True, "vllm: vLLM is installed and the device is a CUDA GPU"),
        ({}, True, False, "native: vLLM is not installed, in HERE"),
        ({}, True, None, "vllm if HERE has vLLM, else native"),
        ({}, False, None, f"vllm if HERE has vLLM and {UNSERVED}, else native"),
        ({}, False, True, f"vllm if {UNSERVED}, else native"),
        ({}, None, True, f"vllm if a GPU is present or {UNSERVED}, else native"),
        (INT8, True, True, f"native: {NOT_INT8}"),
        (INT8, None, None, f"native: {NOT_INT8}"),
        (INT8, True, False, "native: vLLM is not installed, in HERE"),
        (
            {"memory": {"hostKV": "1Gi"}},
            True,
            True,
            "native: vLLM refuses memory.hostKV: vLLM recomputes preempted requests; set 0, "
            "or choose the native engine",
        ),
        (LORA, False, None, f"vllm if HERE has vLLM; {ELSE_IMAGE} if it does not"),
        (LORA, None, None, f"vllm if HERE has vLLM; {ELSE_IMAGE} if it does not"),
        (
            LORA,
            True,
            False,
            "native, which serves no adapters: set vllmEngineImage or spec.image (vLLM is not "
            "installed, in HERE)",
        ),
        (LORA, False, True, f"vllm: {UNSERVED}: it serves no adapters"),
    ],
)
def test_what_is_not_known_is_said_so(
    manifest: Make, spec: dict[str, Any], on_cuda: bool, has_vllm: bool, expected: str
) -> None:
    service = parse(manifest(**spec)).spec
    pool = service.pools["single"]
    line = expected_engine(service, pool, on_cuda=on_cuda, has_vllm=has_vllm, place="HERE")
    assert line == expected
