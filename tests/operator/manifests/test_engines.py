"""Which engine computes in a pool's pods, and what pods with vLLM have beside the others."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import yaml

from ullage_common.config.engine import OWNED_VLLM_ARGS, AdapterSection, EngineConfig
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.spec import parse_stored
from ullage_operator.controller.plan import ServicePlan

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


def test_engines_read_which_engine_they_are_and_its_adapters(make_plan: MakePlan) -> None:
    config = engine_config(make_plan(**VLLM))
    assert config.engine == "vllm"
    assert config.vllm.args == VLLM["vllm"]["args"]
    assert config.adapters == tuple(AdapterSection(**adapter) for adapter in ADAPTERS)
    plain = engine_config(make_plan())
    assert (plain.engine, plain.vllm.args, plain.adapters) == ("auto", {}, ())
    assert plain.batching.prefill_chunk_tokens is None


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
    assert message.startswith(f"spec.vllm: args.{name} is not yours to set; set ")
    # An API server cannot look into the map, so the operator refuses what it has stored.
    with pytest.raises(InvalidManifest, match=f"args.{name} is not yours to set"):
        parse_stored(stored(**wrong))


def test_the_field_to_set_is_called_as_in_the_api(make_plan: MakePlan) -> None:
    with pytest.raises(InvalidManifest, match=r"args\.max_model_len .* set model\.maxModelLen "):
        make_plan(vllm={"args": {"max_model_len": 4096}})


@pytest.mark.parametrize("name", ["max-model-len", "--seed", "a b", ""])
def test_what_cannot_be_an_argument_is_refused(make_plan: MakePlan, name: str) -> None:
    with pytest.raises(InvalidManifest, match=f"spec.vllm: args.{name} is no argument of vLLM"):
        make_plan(vllm={"args": {name: 1}})
