"""What engines and routers request by default, and how a spec's own amounts lie over that."""

from collections.abc import Callable
from typing import Any

import pytest

from ullage_common.config.engine import ModelSection
from ullage_operator.manifests.resources import model_bytes
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
Resources = dict[str, dict[str, str]]


def resources(plan: ServicePlan, kind: str) -> Resources:
    [workload] = [item for item in plan.apply if item["kind"] == kind]
    [container] = workload["spec"]["template"]["spec"]["containers"]
    amounts: Resources = container["resources"]
    return amounts


@pytest.mark.parametrize(("device", "memory"), [("CPU", "1792Mi"), ("CUDA", "9984Mi")])
def test_no_engine_is_best_effort(make_plan: MakePlan, device: str, memory: str) -> None:
    amounts = resources(make_plan(device=device), "StatefulSet")
    assert amounts["requests"] == {"cpu": "250m", "memory": memory}
    assert "memory" not in amounts.get("limits", {})


@pytest.mark.parametrize(
    ("source", "more", "gigabytes"),
    [
        ("hf://org/Llama-3.1-8B-Instruct", {}, 16),
        ("hf://org/Llama-3.1-8B-Instruct", {"dtype": "float32"}, 32),
        ("hf://org/Llama-3.1-8B-Instruct", {"quantization": "fp8"}, 8.5),
        ("hf://org/Llama-3.1-8B-Instruct", {"quantization": "int4"}, 5),
        ("hf://org/Mixtral-8x7B-v0.1", {}, 112),
        ("hf://org/Qwen2.5-0.5B", {}, 1),
        ("file:///models/llama-8b.Q4_K_M.gguf", {}, 4.5),
        ("hf://org/gpt-oss-20b-MXFP4", {}, 11.25),
        ("hf://openai/gpt-oss-20b", {}, 11.25),
        ("hf://openai/gpt-oss-120b", {}, 67.5),
        ("hf://org/gpt-oss-20b-BF16", {}, 40),
        ("hf://org/Llama-70B-AWQ", {}, 39.375),
        ("pkg://smol/SmolLM2-135M-Instruct.Q4_1.gguf", {}, 0.0759375),
        ("file:///models/current", {}, 0),
        ("hf://org/phi-3-4bit-b12", {}, 0),
    ],
)
def test_weights_are_estimated_from_the_model(
    source: str, more: dict[str, Any], gigabytes: float
) -> None:
    model = ModelSection(source=source, name="chat", **more)
    assert model_bytes(model) == pytest.approx(gigabytes * 1e9)


def test_requests_grow_with_the_model_its_ranks_and_host_memory(make_plan: MakePlan) -> None:
    model = {"source": "hf://org/Llama-3.1-70B-Instruct", "name": "llama"}
    four = {
        "gpus": 4,
        "parallelism": {"tensor": 2, "pipeline": 2},
        "memory": {"hostKV": "8Gi", "tiers": {"host": {"size": "2Gi"}}},
    }
    plan = make_plan(model=model, pools={"single": four})
    requests = resources(plan, "StatefulSet")["requests"]
    assert requests["cpu"] == "1"
    # 140 GB of weights, 8 + 2 GiB of KV, and the processes of one server and four workers.
    assert requests["memory"] == "145Gi"
    standby = {"single": four | {"standbyWorker": True}}
    plan = make_plan(model=model, pools=standby)
    assert resources(plan, "StatefulSet")["requests"]["memory"] == "145Gi"


@pytest.mark.parametrize(("has_standby", "memory"), [(False, "18176Mi"), (True, "19200Mi")])
def test_vllm_requests_memory_for_a_standby_worker(
    make_plan: MakePlan, has_standby: bool, memory: str
) -> None:
    plan = make_plan(engine="VLLM", pools={"single": {"gpus": 1, "standbyWorker": has_standby}})
    assert resources(plan, "StatefulSet")["requests"]["memory"] == memory


@pytest.mark.parametrize(
    ("file", "more", "gigabytes"),
    [
        # A checkpoint of 140 GB is made of the file, and is in memory twice while it is written.
        ("Llama-3.1-70B.Q4_K_M.gguf", {}, 280),
        ("Llama-3.1-70B.Q4_K_M.gguf", {"dtype": "Float32"}, 560),
        # Its parts become one file of 39.4 GB in the same memory.
        ("Llama-3.1-70B.Q4_K_M-00001-of-00002.gguf", {}, 319.375),
        ("Llama-3.1-70B.Q4_K_M.gguf", {"quantization": "FP8"}, 280),
        ("Llama-3.1-70B", {}, 0),
        ("current.gguf", {}, 2 * 8 * 1.024**3),
        ("current", {}, 0),
    ],
)
def test_with_vllm_only_checkpoints_made_of_gguf_files_stay_in_memory(
    make_plan: MakePlan, file: str, more: dict[str, Any], gigabytes: float
) -> None:
    model = {"source": f"file:///models/{file}", "name": "llama", **more}
    requests = resources(make_plan(model=model, engine="VLLM"), "StatefulSet")["requests"]
    mib = int(requests["memory"].removesuffix("Mi").removesuffix("Gi"))
    mib *= 1024 if requests["memory"].endswith("Gi") else 1
    least = gigabytes * 1e9 / 2**20 + 1536 + 256
    assert least <= mib < least + 128


def test_with_vllm_on_a_cpu_a_checkpoint_is_beside_the_weights(make_plan: MakePlan) -> None:
    model = {"source": "file:///models/llama-8b.Q4_K_M.gguf", "name": "llama"}
    common = {"model": model, "engine": "VLLM", "device": "CPU"}
    plan = make_plan(**common)
    assert resources(plan, "StatefulSet")["requests"]["memory"] == "32384Mi"
    budget = {"deviceBytes": "40Gi"}
    plan = make_plan(**common, memory=budget)
    assert resources(plan, "StatefulSet")["requests"]["memory"] == "58112Mi"


def test_weights_of_unknown_size_count_by_the_gpus_they_are_meant_for(make_plan: MakePlan) -> None:
    model = {"source": "hf://deepseek-ai/DeepSeek-V3", "name": "deepseek"}
    eight = {"gpus": 8, "parallelism": {"tensor": 8, "pipeline": 1}}
    plan = make_plan(model=model, pools={"single": eight})
    # 64 GiB of weights, the host tier, and the processes of one server and eight workers.
    assert resources(plan, "StatefulSet")["requests"]["memory"] == "74496Mi"


def test_on_a_cpu_the_budget_is_requested(make_plan: MakePlan) -> None:
    plan = make_plan(device="CPU", memory={"deviceBytes": "6Gi", "safetyReserve": "1Gi"})
    assert resources(plan, "StatefulSet")["requests"]["memory"] == "7936Mi"


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        (
            {},
            {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        ),
        (
            {"limits": {"cpu": "8"}},
            {"requests": {"memory": "256Mi"}, "limits": {"cpu": "8", "memory": "1Gi"}},
        ),
        (
            {"requests": {"memory": "5Gi"}},
            {"requests": {"cpu": "250m", "memory": "5Gi"}},
        ),
        (
            {"limits": {"memory": "128Mi"}},
            {"requests": {"cpu": "250m"}, "limits": {"memory": "128Mi"}},
        ),
    ],
)
def test_a_routers_own_resources_hold_and_the_rest_are_defaults(
    make_plan: MakePlan, own: Resources, merged: Resources
) -> None:
    plan = make_plan(router={"resources": own})
    assert resources(plan, "Deployment") == merged


def test_a_volume_whose_root_is_right_is_not_walked(make_plan: MakePlan) -> None:
    for item in make_plan().apply:
        if item["kind"] in ("StatefulSet", "Deployment"):
            context = item["spec"]["template"]["spec"]["securityContext"]
            assert context["fsGroupChangePolicy"] == "OnRootMismatch"
