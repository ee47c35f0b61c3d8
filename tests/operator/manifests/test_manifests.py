"""Rendered objects are what Kubernetes takes and what the processes read."""

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from ullage_common.config.engine import (
    DegradeLevel,
    DegradeSection,
    EngineConfig,
    ThrottlingSection,
)
from ullage_common.config.router import AffinitySection, RetrySection, RouterConfig
from ullage_engine.memory.pressure import ordered_levels
from ullage_engine.server.worker_env import worker_env
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
FOUR = {"gpus": 4, "parallelism": {"tensor": 2, "pipeline": 2}}
LARGE = {"large": FOUR | {"resources": {"requests": {"cpu": 4}}}}

PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def find(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    [found] = [o for o in plan.apply if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod_spec(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = find(plan, kind, name)["spec"]["template"]["spec"]
    return spec


def container(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    made: dict[str, Any] = pod_spec(plan, kind, name)["containers"][0]
    return made


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize(
    "spec", [{}, {"device": "CPU"}, {"pools": LARGE}], ids=["plain", "cpu", "large"]
)
def test_kubernetes_takes_every_object(
    make_plan: MakePlan, spec: dict[str, Any], version: str
) -> None:
    for item in make_plan(**spec).apply:
        kubernetes_validate.validate(item, version, strict=True)


def test_services_have_addresses_of_both_families_where_the_cluster_has(
    make_plan: MakePlan,
) -> None:
    wide = {"gpus": 4, "nodes": 2}
    made = make_plan(engine="VLLM", pools={"large": wide}).apply
    policies = {
        item["metadata"]["name"]: item["spec"]["ipFamilyPolicy"]
        for item in made
        if item["kind"] == "Service"
    }
    assert len(policies) == 4
    assert set(policies.values()) == {"PreferDualStack"}


def test_pods_listen_at_every_address(make_plan: MakePlan) -> None:
    """Their files name none, which programs of an earlier version read, too."""
    plan = make_plan(tls={"router": {"secretName": "r"}})
    engine = yaml.safe_load(find(plan, "ConfigMap", "demo-single")["data"]["engine.yaml"])
    router = yaml.safe_load(find(plan, "ConfigMap", "demo-router")["data"]["router.yaml"])
    sections = [engine["server"], *(router[name] for name in ("http", "grpc", "metrics", "probes"))]
    assert not [section for section in sections if "host" in section]


def test_engines_read_their_configuration(make_plan: MakePlan) -> None:
    plan = make_plan(
        pools={
            "large": {
                "gpus": 4,
                "parallelism": {"tensor": 2, "pipeline": 2},
                "memory": {"maxKV": "1Gi"},
                "microBatches": 8,
                "nccl": {"NCCL_BUFFSIZE": "4194304"},
            }
        },
        batching={"prefillWindow": "8ms"},
        allowFaultInjection=True,
    )
    text = find(plan, "ConfigMap", "demo-large")["data"]["engine.yaml"]
    config = msgspec.convert(yaml.safe_load(text), EngineConfig)
    assert (config.gpus, config.parallelism.tensor, config.parallelism.pipeline) == (4, 2, 2)
    assert config.parallelism.micro_batches == 8
    environment = worker_env(1, config.gpus, config.parallelism.nccl)
    assert environment["NCCL_BUFFSIZE"] == "4194304"
    assert environment["NCCL_MIN_NCHANNELS"] == "4"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert (config.memory.max_kv, config.memory.safety_reserve) == (1 << 30, 2 << 30)
    assert config.batching.prefill_window == 0.008
    assert config.server.pool == "large"
    assert config.server.allow_fault_injection
    assert config.model.max_model_len is None


def engine_config(plan: ServicePlan, pool: str = "single") -> EngineConfig:
    """As the engine reads it."""
    text = find(plan, "ConfigMap", f"demo-{pool}")["data"]["engine.yaml"]
    return msgspec.convert(yaml.safe_load(text), EngineConfig)


def test_engines_read_what_caches_and_sessions_may_take(make_plan: MakePlan) -> None:
    plan = make_plan(
        memory={"sessionKVLimit": "64Mi", "sessionIdle": "1m30s", "hostKV": "1Gi"},
        pools={"large": {"memory": {"prefixCache": False, "hostKV": 0, "adapterPercent": 50}}},
    )
    single = engine_config(plan).memory
    large = engine_config(plan, "large").memory
    assert (single.session_kv_limit, single.session_idle) == (64 << 20, 90.0)
    assert (single.prefix_cache, single.host_kv) == (True, 1 << 30)
    assert (large.prefix_cache, large.host_kv, large.session_idle) == (False, 0, 90.0)
    assert (single.adapter_share, large.adapter_share) == (0.1, 0.5)


def test_engines_read_the_levels_of_degrading(make_plan: MakePlan) -> None:
    levels = [
        {"belowPercent": 40, "maxOutputTokens": 99},
        {"belowPercent": 0, "maxTemperature": 0, "maxTopP": "0.5", "batchPercent": 100},
    ]
    heat = {"enabled": False, "powerCap": True, "after": "1m", "minBatchPercent": 50}
    wanted = {"changeSampling": False, "hysteresisPercent": 10, "throttling": heat}
    plan = make_plan(degrade=wanted | {"pressureLevels": levels})
    assert engine_config(plan).degrade == DegradeSection(
        change_sampling=False,
        hysteresis_percent=10,
        pressure_levels=(
            DegradeLevel(below_percent=40, max_output_tokens=99),
            DegradeLevel(below_percent=0, max_temperature=0, max_top_p=0.5, batch_percent=100),
        ),
        throttling=ThrottlingSection(
            enabled=False, power_cap=True, after=60.0, min_batch_percent=50
        ),
    )


def test_degrading_is_on_by_default_and_can_be_turned_off(make_plan: MakePlan) -> None:
    """Each level is stricter than the milder ones in everything, whatever it says."""
    ordered = ordered_levels(engine_config(make_plan()).degrade)
    assert [level.below for level in ordered] == [0.3, 0.15, 0.05]
    for name in ("max_output_tokens", "max_temperature", "max_top_p", "batch_share"):
        values = [getattr(level, name) for level in ordered]
        said = [value for value in values if value is not None]
        assert said == sorted(said, reverse=True)
        assert None not in values[len(values) - len(said) :], "a stricter level forgets it"
    assert min(level.max_output_tokens or 0 for level in ordered) >= 512
    assert engine_config(make_plan(degrade={"pressureLevels": []})).degrade.pressure_levels == ()


@pytest.mark.parametrize(
    ("degrade", "words"),
    [
        (
            {"pressureLevels": [{"belowPercent": 20}, {"belowPercent": 20}]},
            "pressureLevels must differ in below",
        ),
        ({"pressureLevels": [{"belowPercent": 150}]}, "below"),
        ({"pressureLevels": [{"belowPercent": 50, "batchPercent": 0}]}, "batchPercent"),
        ({"pressureLevels": [{"maxTopP": "0.5"}]}, "belowPercent"),
        ({"hysteresisPercent": 90}, "hysteresis"),
        ({"pressureLevels": [{"belowPercent": 50, "temperature": 0}]}, "temperature"),
    ],
)
def test_wrong_levels_are_refused(make_plan: MakePlan, degrade: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest, match=words):
        make_plan(degrade=degrade)


ROUTING = {
    "queue": {"timeout": "1m30s"},
    "placement": {"breaker": {"maxPause": "2m"}, "retries": {"percent": 0}},
}


def test_routers_read_their_configuration(make_plan: MakePlan) -> None:
    plan = make_plan(pools={"large": {}}, routing=ROUTING)
    text = find(plan, "ConfigMap", "demo-router")["data"]["router.yaml"]
    config = msgspec.convert(yaml.safe_load(text), RouterConfig)
    assert [(pool.name, pool.targets) for pool in config.pools] == [
        ("single", ("demo-single:9000",)),
        ("large", ("demo-large:9000",)),
    ]
    assert config.routing.queue.timeout == 90.0
    assert config.routing.placement.breaker.max_pause == 120.0
    assert config.routing.placement.affinity == AffinitySection()
    assert config.routing.placement.retries == RetrySection(percent=0)
    assert config.routing.large_request_kv == 6000 << 20
    assert (config.http.port, config.grpc.port, config.metrics.port) == (8000, 9000, 9090)


@pytest.mark.parametrize(
    ("kind", "name"), [("StatefulSet", "demo-single"), ("Deployment", "demo-router")]
)
def test_pods_have_no_privileges(make_plan: MakePlan, kind: str, name: str) -> None:
    pod = pod_spec(make_plan(), kind, name)
    made = container(make_plan(), kind, name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert made["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize(
    ("kind", "name", "waits"),
    [("StatefulSet", "demo-single", 45), ("Deployment", "demo-router", 15)],
)
def test_pods_end_gently(make_plan: MakePlan, kind: str, name: str, waits: int) -> None:
    pod = pod_spec(make_plan(), kind, name)
    made = container(make_plan(), kind, name)
    # The Cluster Autoscaler kills what takes longer.
    assert pod["terminationGracePeriodSeconds"] == waits + 540 + 15 <= 600
    patient = pod_spec(make_plan(limits={"totalTimeout": "9m0.5s"}), kind, name)
    assert patient["terminationGracePeriodSeconds"] == waits + 541 + 15
    assert made["lifecycle"]["preStop"]["sleep"]["seconds"] == waits


def test_engines_are_probed_over_grpc(make_plan: MakePlan) -> None:
    made = container(make_plan(), "StatefulSet", "demo-single")
    services = {
        probe: made[f"{probe}Probe"]["grpc"]["service"] for probe in ("liveness", "readiness")
    }
    assert services == {"liveness": "liveness", "readiness": "readiness"}
    start = made["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600


def test_an_engine_is_named_after_its_pod(make_plan: MakePlan) -> None:
    made = container(make_plan(), "StatefulSet", "demo-single")
    assert made["args"][-2:] == ["--engine-id", "$(POD_NAME)"]
    [name] = [env for env in made["env"] if env["name"] == "POD_NAME"]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_gpus_are_limits_unless_the_device_is_a_cpu(make_plan: MakePlan) -> None:
    large = container(make_plan(pools=LARGE), "StatefulSet", "demo-large")
    assert large["resources"]["requests"]["cpu"] == "4"
    assert large["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    on_cpu = container(make_plan(device="CPU"), "StatefulSet", "demo-single")["resources"]
    assert "limits" not in on_cpu


@pytest.mark.parametrize("device", ["Auto", "CUDA", "CPU"])
def test_who_asks_for_gpus_must_find_them(make_plan: MakePlan, device: str) -> None:
    plan = make_plan(device=device)
    config = yaml.safe_load(find(plan, "ConfigMap", "demo-single")["data"]["engine.yaml"])
    asks = "limits" in container(plan, "StatefulSet", "demo-single")["resources"]
    assert (config["device"], asks) == (("cpu", False) if device == "CPU" else ("cuda", True))


def test_weights_live_in_memory(make_plan: MakePlan) -> None:
    volumes = pod_spec(make_plan(), "StatefulSet", "demo-single")["volumes"]
    assert {"name": "run", "emptyDir": {"medium": "Memory"}} in volumes


def test_a_claim_is_mounted_where_the_engine_looks(make_plan: MakePlan) -> None:
    plan = make_plan(model={"source": "pvc://weights/llama/8b", "name": "llama"})
    mounts = container(plan, "StatefulSet", "demo-single")["volumeMounts"]
    assert {"name": "models", "mountPath": "/models/weights", "readOnly": True} in mounts
    volumes = pod_spec(plan, "StatefulSet", "demo-single")["volumes"]
    assert volumes[-1]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}


def test_pools_start_in_parallel_behind_a_headless_service(make_plan: MakePlan) -> None:
    stateful_set = find(make_plan(), "StatefulSet", "demo-single")["spec"]
    service = find(make_plan(), "Service", "demo-single")["spec"]
    assert stateful_set["podManagementPolicy"] == "Parallel"
    assert stateful_set["serviceName"] == "demo-single"
    assert service["clusterIP"] == "None"
    assert not service.get("publishNotReadyAddresses")
    assert service["selector"] == stateful_set["selector"]["matchLabels"]


def test_a_changed_configuration_rolls_the_pods(make_plan: MakePlan) -> None:
    def digest(plan: ServicePlan, kind: str, name: str) -> str:
        annotations = find(plan, kind, name)["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["serving.ullage.dev/config-hash"])

    before = make_plan()
    after = make_plan(batching={"maxSequences": 8})
    engine = ("StatefulSet", "demo-single")
    router = ("Deployment", "demo-router")
    assert digest(before, *engine) != digest(after, *engine)
    assert digest(before, *router) == digest(after, *router)


def test_scaling_rolls_nothing(make_plan: MakePlan) -> None:
    scaled = make_plan(pools={"single": {"replicas": 5}})
    one = find(make_plan(), "StatefulSet", "demo-single")["spec"]
    five = find(scaled, "StatefulSet", "demo-single")["spec"]
    assert (one["replicas"], five["replicas"]) == (1, 5)
    assert one["template"] == five["template"]


def test_only_routers_reach_engines(make_plan: MakePlan) -> None:
    spec = find(make_plan(), "NetworkPolicy", "demo-engine")["spec"]
    grpc, probe, metrics = spec["ingress"]
    assert [port["port"] for port in grpc["ports"]] == [9000]
    [routers] = grpc["from"]
    assert routers["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert [port["port"] for port in probe["ports"]] == [8081]
    [operator] = probe["from"]
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert metrics["ports"] == [{"port": 9090, "protocol": "TCP"}]
    assert metrics["from"] == [PROMETHEUS]


def test_a_budget_never_blocks_a_drain(make_plan: MakePlan) -> None:
    made = make_plan(pools={"single": {"replicas": 2}})
    for name in ("demo-single", "demo-router"):
        assert find(made, "PodDisruptionBudget", name)["spec"] | {"selector": 0} == {
            "maxUnavailable": 1,
            "selector": 0,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }


def test_only_what_may_have_several_pods_has_a_budget(make_plan: MakePlan) -> None:
    def budgets(router: int, **single: Any) -> set[str]:
        made = make_plan(router={"replicas": router}, pools={"single": single})
        return {each["metadata"]["name"] for each in made.apply
                if each["kind"] == "PodDisruptionBudget"}  # fmt: skip

    assert budgets(router=2, replicas=1) == {"demo-router"}
    assert budgets(router=1, replicas=2) == {"demo-single"}
    assert budgets(router=1, autoscaling={"maxReplicas": 3}) == {"demo-single"}
    assert budgets(router=1) == set()


def test_everything_is_owned_and_labelled(make_plan: MakePlan) -> None:
    for item in make_plan(pools={"large": {}}).apply:
        meta = item["metadata"]
        [owner] = meta["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-1", True)
        assert meta["namespace"] == "models"
        assert {
            f"app.kubernetes.io/{label}"
            for label in ("name", "instance", "component", "version", "part-of", "managed-by")
        } <= set(meta["labels"])


def test_selectors_match_the_pods_and_no_other_pool(make_plan: MakePlan) -> None:
    plan = make_plan(pools={"large": {}})
    for name in ("demo-single", "demo-large"):
        spec = find(plan, "StatefulSet", name)["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        for other in {"demo-single", "demo-large"} - {name}:
            selector = find(plan, "Service", other)["spec"]["selector"]
            assert not selector.items() <= labels.items()
