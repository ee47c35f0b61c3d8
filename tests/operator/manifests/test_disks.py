"""Where fetched models lie: a disk of each pod's own, or the node's, of which pods request room."""

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.quantities import parse_bytes
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.diagnosis import diagnose_pod
from ullage_operator.conditions.placement import fits_place_of
from ullage_operator.manifests.manifests import pool_objects
from ullage_operator.planning.plan import ServicePlan

Make = Callable[..., dict[str, Any]]
MakePlan = Callable[..., ServicePlan]
DISK = {"modelCache": {"claimTemplate": {"size": "300Gi", "storageClassName": "fast"}}}
LLAMA = {"source": "hf://org/Llama-3.1-70B-Instruct", "name": "llama"}
GB = 10**9


def stateful_sets(objects: Any) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "StatefulSet"}


def cache_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in spec["template"]["spec"]["volumes"] if each["name"] == "cache"]


def test_each_pod_has_a_disk_of_its_own(make_plan: MakePlan) -> None:
    made = make_plan(model=LLAMA, pools={"single": DISK})
    spec = stateful_sets(made.apply)["demo-single"]
    [template] = spec["volumeClaimTemplates"]
    assert template == {
        "metadata": {"name": "cache"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "300Gi"}},
            "storageClassName": "fast",
        },
    }
    assert not cache_of(spec)
    container = spec["template"]["spec"]["containers"][0]
    assert {"name": "cache", "mountPath": naming.CACHE_DIR} in container["volumeMounts"]
    assert "ephemeral-storage" not in container["resources"]["requests"]
    policy = spec["persistentVolumeClaimRetentionPolicy"]
    assert policy == {"whenDeleted": "Delete", "whenScaled": "Retain"}
    for item in made.apply:
        kubernetes_validate.validate(item, "1.35", strict=True)


def test_followers_have_disks_too(make_plan: MakePlan) -> None:
    wide = DISK | {"gpus": 4, "nodes": 2}
    made = stateful_sets(make_plan(engine="VLLM", pools={"large": wide}).apply)
    disks = [spec.get("volumeClaimTemplates") for spec in made.values()]
    assert len(made) == 3
    assert disks.count(None) == 1
    assert (
        made["demo-large-group"]["volumeClaimTemplates"]
        == (made["demo-large"]["volumeClaimTemplates"])
    )


def test_the_disks_of_a_canary_end_with_it(manifest: Make) -> None:
    keep = {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain"}}
    service = parse(manifest(pools={"single": DISK | keep}))
    pool = service.spec.pools["single"]
    for name, word in (("single", "Retain"), (naming.canary_pool("single"), "Delete")):
        [spec] = stateful_sets(pool_objects(service, name, pool, Settings())).values()
        assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == word


def test_without_disks_nothing_is_said_of_them(make_plan: MakePlan) -> None:
    for spec in stateful_sets(make_plan().apply).values():
        assert not {"volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"} & set(spec)


def room(plan: ServicePlan) -> tuple[int | None, int | None]:
    """What an engine requests of its node's disk, and the limit of its cache."""
    spec = stateful_sets(plan.apply)["demo-single"]
    requests = spec["template"]["spec"]["containers"][0]["resources"]["requests"]
    [cache] = cache_of(spec)
    asked = requests.get("ephemeral-storage")
    limit = cache.get("emptyDir", {}).get("sizeLimit")
    return asked and parse_bytes(asked), limit and parse_bytes(limit)


def test_a_model_that_is_fetched_has_room_on_its_node(make_plan: MakePlan) -> None:
    asked, limit = room(make_plan(model=LLAMA))
    assert asked is not None
    assert limit is not None
    assert 154 * GB <= asked <= 157 * GB
    assert limit == 4 * asked


@given(
    billions=st.integers(1, 900),
    named=st.sampled_from([("", 16), ("-FP8", 8.5), ("-AWQ", 4.5)]),
    quantization=st.sampled_from(["Auto", "Int8", "Int4"]),
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_request_holds_the_files_whatever_is_made_of_them(
    make_plan: MakePlan, billions: int, named: tuple[str, float], quantization: str
) -> None:
    """Weights that are rounded at load are fetched as they are published."""
    suffix, bits = named
    model = {"source": f"hf://org/m-{billions}B{suffix}", "name": "m", "quantization": quantization}
    asked, limit = room(make_plan(engine="Native", model=model))
    files = billions * GB * bits / 8
    assert asked is not None
    assert limit is not None
    assert files < asked < 1.2 * files + 3 * GB
    assert limit > 2 * asked


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ({"source": "hf://org/current", "name": "m"}, {}),
        ({"source": "pvc://models/llama-70b", "name": "m"}, {}),
        ({"source": "file:///models/llama-70b", "name": "m"}, {}),
        (LLAMA, {"claimName": "shared"}),
        (LLAMA, {"hostPath": "/models"}),
    ],
)
def test_what_is_unknown_or_lies_elsewhere_takes_no_room(
    make_plan: MakePlan, model: dict[str, Any], cache: dict[str, Any]
) -> None:
    assert room(make_plan(model=model, pools={"single": {"modelCache": cache}})) == (None, None)


def test_what_the_pool_says_of_its_disk_holds(make_plan: MakePlan) -> None:
    pool = {
        "modelCache": {"sizeLimit": "1Ti"},
        "resources": {"requests": {"ephemeral-storage": "10Gi"}},
    }
    assert room(make_plan(model=LLAMA, pools={"single": pool})) == (10 << 30, 1 << 40)


def test_files_of_kv_are_requested_beside_the_model(make_plan: MakePlan) -> None:
    tiers = {"memory": {"tiers": {"file": {"size": "32Gi"}}}}
    asked, _ = room(make_plan(pools={"single": tiers}))
    assert asked == (34 << 30) + (64 << 20)
    both, _ = room(make_plan(model=LLAMA, pools={"single": tiers}))
    model, _ = room(make_plan(model=LLAMA))
    assert model is not None
    assert both == asked + model
    tiers["memory"]["tiers"]["file"] |= {"claimName": "kv"}  # type: ignore[operator]
    assert room(make_plan(pools={"single": tiers})) == (None, None)


@pytest.mark.parametrize(
    ("missing", "fits"), [("nvidia.com/gpu", True), ("ephemeral-storage", False)]
)
def test_engines_that_requested_no_disk_leave_their_place_unless_it_is_what_is_missing(
    missing: str, fits: bool
) -> None:
    """Those of an earlier operator, whose upgrade on a full node would give up otherwise."""
    message = f"0/1 nodes are available: 1 Insufficient {missing}."

    def pod(**requests: str) -> dict[str, Any]:
        amounts = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "1", **requests}}
        condition = {"type": "PodScheduled", "status": "False", "message": message}
        containers = [{"name": "engine", "resources": amounts}]
        return {"spec": {"containers": containers}, "status": {"conditions": [condition]}}

    canary = pod(**{"ephemeral-storage": "150Gi"})
    assert fits_place_of(canary, pod()) == fits
    assert fits_place_of(canary, canary)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            'Usage of EmptyDir volume "cache" exceeds the limit "596Gi". ',
            "raise spec.pools.single.modelCache.sizeLimit, or give each pod a disk",
        ),
        (
            "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi.",
            "set spec.pools.single.resources.requests.ephemeral-storage",
        ),
    ],
)
def test_an_eviction_for_the_disk_says_what_to_set(said: str, remedy: str) -> None:
    meta = {"name": "demo-single-0", "labels": {naming.POOL_LABEL: "single"}}
    status = {"phase": "Failed", "reason": "Evicted", "message": said}
    problem = diagnose_pod({"metadata": meta, "spec": {}, "status": status}, None)  # type: ignore[arg-type]
    assert problem is not None
    assert problem.message.startswith(f"{said.strip()}; {remedy}")
