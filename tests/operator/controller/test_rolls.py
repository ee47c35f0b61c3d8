"""Which pods an edit of a spec makes anew: those that must read it, and no others."""

from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.section_reader import camel
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan, plan

POOL = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}
BASE: dict[str, Any] = {
    "model": {"source": "file:///models/a", "name": "m"},
    "device": "CPU",
    "pools": {"single": {}, "large": POOL | {"role": "Large"}},
    "rollout": {"strategy": "Rolling"},
}
NOBODY: set[str] = set()
ROUTER = {"router"}
SINGLE = {"single"}
LARGE = {"large"}
ENGINES = SINGLE | LARGE
ALL = ROUTER | ENGINES
KEYS = {"secretName": "keys"}
KEDA = {"maxReplicas": 4, "provider": "KEDA", "prometheusURL": "http://prometheus:9090"}
ENV = {"name": "engine", "env": [{"name": "A", "value": "b"}]}
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "gpu"}
NAMED = KEYS | {"named": [{"name": "a", "weight": 2}]}

EDITS: list[tuple[dict[str, Any], set[str]]] = [
    # How many there are.
    ({"replicas": 5}, NOBODY),
    ({"pools": {"single": {"replicas": 5}}}, NOBODY),
    ({"pools": {"large": {"replicas": 0}}}, NOBODY),
    ({"router": {"replicas": 4}}, NOBODY),
    ({"router": {"autoscaling": {"maxReplicas": 4}}}, NOBODY),
    ({"stop": True}, NOBODY),
    ({"pools": {"single": {"autoscaling": {"maxReplicas": 4}}}}, NOBODY),
    ({"pools": {"single": {"autoscaling": KEDA}}}, NOBODY),
    # What no pod reads.
    ({"router": {"service": {"type": "LoadBalancer"}}}, NOBODY),
    ({"router": {"gateway": {"parentRefs": [{"name": "public"}]}}}, NOBODY),
    ({"baseRefs": []}, NOBODY),  # pods read what comes of bases
    ({"slo": {"errorPercent": 10}}, NOBODY),
    ({"observability": {"podMonitor": {"enabled": False}}}, NOBODY),
    ({"observability": {"podMonitor": {"interval": "30s"}}}, NOBODY),
    ({"observability": {"podMonitor": {"labels": {"team": "x"}}}}, NOBODY),
    ({"healing": {"enabled": False}}, NOBODY),
    ({"healing": {"restartsPerHour": 9}}, NOBODY),
    ({"rollout": {"minRequests": 7}}, NOBODY),
    ({"rollout": {"strategy": "Canary"}}, NOBODY),
    ({"serviceAccount": {"annotations": {"a": "b"}}}, NOBODY),
    (
        {"pools": {"single": {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain"}}}},
        NOBODY,
    ),
    # What routers alone read.
    ({"slo": {"e2eP95": "9s"}}, ROUTER),  # they refuse what would be later
    ({"slo": {"ttftP95": "1s"}}, ROUTER),  # they count the requests that are late by it
    ({"pools": {"single": {"autoscaling": {"maxReplicas": 4, "minReplicas": 0}}}}, ROUTER),
    ({"routing": {"wake": {"timeout": "1m"}}}, ROUTER),
    ({"pools": {"large": {"role": "Overflow"}}}, ROUTER),
    ({"routing": {"largeRequestTokens": 9}}, ROUTER),
    ({"routing": {"largeRequestKV": "1Gi"}}, ROUTER),
    ({"routing": {"ladder": ["Reject"]}}, ROUTER),
    ({"routing": {"queue": {"maxRequests": 9}}}, ROUTER),
    ({"routing": {"queue": {"timeout": "3s"}}}, ROUTER),
    ({"routing": {"placement": {"breaker": {"failures": 2}}}}, ROUTER),
    ({"routing": {"placement": {"retries": {"burst": 2}}}}, ROUTER),
    ({"routing": {"prefill": {"window": "1ms"}}}, ROUTER),
    ({"routing": {"coalesce": {"enabled": False}}}, ROUTER),
    ({"routing": {"replace": {"enabled": True}}}, ROUTER),
    ({"routing": {"rungs": {"shrinkOutput": {"minTokens": 2}}}}, ROUTER),
    ({"prompts": {"cleanse": {"html": True}}}, ROUTER),
    ({"prompts": {"compress": {"method": "Extractive"}}}, ROUTER),
    ({"prompts": {"specialTokens": "Trusted"}}, ROUTER),
    ({"streaming": {"coalesceTokens": 1}}, ROUTER),
    ({"streaming": {"keepalive": "1s"}}, ROUTER),
    ({"router": {"publicStats": True}}, ROUTER),
    ({"router": {"cors": {"allowedOrigins": ["https://chat.example.com"]}}}, ROUTER),
    ({"router": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}}, ROUTER),
    ({"router": {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}}}, ROUTER),
    ({"cascade": {"steps": [{"service": "small"}]}}, ROUTER),
    ({"tenants": KEYS}, ROUTER),
    ({"tenants": NAMED}, ROUTER),
    ({"tls": {"router": {"secretName": "tls"}}}, ROUTER),
    # A new pool has new pods; routers learn its name when they start.
    ({"pools": {"more": POOL}}, ROUTER | {"more"}),
    ({"pools": {"large": None}}, ROUTER | LARGE),
    # What engines alone read.
    ({"model": {"source": "file:///models/b"}}, ENGINES),
    ({"model": {"source": "oci://r.example/m:1"}, "modelPullPolicy": "Always"}, ENGINES),
    ({"model": {"dtype": "Float32"}}, ENGINES),
    ({"model": {"deterministic": True}}, ENGINES),
    ({"model": {"maxModelLen": 9000}}, ENGINES),
    ({"model": {"allowUnknownConfig": True}}, ENGINES),
    ({"device": "CUDA"}, ENGINES),
    ({"device": "CUDA", "pools": {"single": {"resourceClaims": [CLAIM]}}}, ENGINES),
    ({"image": "registry.example/engine:2"}, ENGINES),
    ({"engine": "Native"}, ENGINES),
    ({"s3": {"region": "eu-west-1"}}, ENGINES),
    ({"vllm": {"args": {"enforce_eager": True}}}, ENGINES),
    ({"adapters": [{"name": "a", "source": "file:///a", "rank": 8}]}, ENGINES),
    ({"allowFaultInjection": True}, ENGINES),
    ({"batching": {"decodeWindow": "1ms"}}, ENGINES),
    ({"batching": {"maxSequences": 8}}, ENGINES),
    ({"degrade": {"pressureLevels": []}}, ENGINES),
    ({"limits": {"stepDeadline": "20s"}}, ENGINES),
    ({"memory": {"maxKV": "1Gi"}}, ENGINES),
    ({"memory": {"sessionKVLimit": "1Gi"}}, ENGINES),
    ({"memory": {"hostKV": "1Gi"}}, ENGINES),
    ({"memory": {"adapterPercent": 50}}, ENGINES),
    ({"memory": {"maxLoras": 2}}, ENGINES),
    ({"memory": {"maxLoraRank": 64}}, ENGINES),
    ({"adapterClaims": ["tuned"]}, ENGINES),
    ({"model": {"source": "oci://r.example/m:1"}, "modelPullPolicy": "Always"}, ENGINES),
    ({"memory": {"tiers": {"host": {"size": "1Gi"}}}}, ENGINES),
    ({"memory": {"tiers": {"remote": {}}}}, ENGINES),
    ({"pools": {"single": {"memory": {"tiers": {"file": {}}}}}}, SINGLE),
    # What one pool's engines alone read.
    ({"pools": {"single": {"memory": {"maxKV": "1Gi"}}}}, SINGLE),
    ({"pools": {"single": {"resources": {"requests": {"cpu": "2"}}}}}, SINGLE),
    ({"pools": {"single": {"podTemplate": {"spec": {"containers": [ENV]}}}}}, SINGLE),
    ({"pools": {"large": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}}}, LARGE),
    ({"pools": {"large": {"microBatches": 2}}}, LARGE),
    ({"pools": {"large": {"podTemplate": {"spec": {"shareProcessNamespace": True}}}}}, LARGE),
    ({"router": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}}, ROUTER),
    ({"pools": {"large": {"shmSize": "2Gi"}}}, LARGE),
    ({"pools": {"large": {"startTimeout": "2h"}}}, LARGE),
    ({"pools": {"large": {"modelCache": {"claimName": "c"}}}}, LARGE),
    ({"pools": {"large": {"modelCache": {"claimTemplate": {"size": "1Gi"}}}}}, LARGE),
    # What both read.
    ({"limits": {"maxOutputTokens": 9}}, ALL),
    ({"limits": {"requestTimeout": "9s"}}, ALL),
    ({"limits": {"totalTimeout": "8m"}}, ALL),
    ({"memory": {"thresholdPercent": 50}}, ALL),
    ({"memory": {"safetyReserve": "1Gi"}}, ALL),
    ({"observability": {"logLevel": "Debug"}}, ALL),
    ({"tls": {"engines": {"secretName": "tls"}}}, ALL),
    ({"tickets": {"secretName": "tickets"}}, ALL),
    ({"imagePullSecrets": [{"name": "p"}]}, ALL),
    ({"serviceAccount": {"name": "mine"}}, ALL),
    ({"securityContext": {"runAsUser": 7, "runAsGroup": 7, "fsGroup": 7}}, ALL),
]


def merged(old: Any, new: Any) -> Any:
    """A merge patch."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    made = dict(old)
    for name, value in new.items():
        made[name] = merged(made.get(name, {}), value)
    return {name: value for name, value in made.items() if value is not None}


def templates(make_plan, spec, **more) -> dict[str, Any]:
    return pod_templates(make_plan(**deepcopy(spec), **more))


def pod_templates(made: ServicePlan) -> dict[str, Any]:
    """By pool or component."""
    found = {}
    for obj in made.apply:
        if obj["kind"] in ("Deployment", "StatefulSet"):
            found[obj["metadata"]["name"].removeprefix("demo-")] = obj["spec"]["template"]
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def test_an_edit_rolls_what_reads_it(make_plan, subtests):
    before = templates(make_plan, BASE)
    for edit, rolled in EDITS:
        with subtests.test(edit=edit):
            assert changed(before, templates(make_plan, merged(BASE, edit))) == rolled


def workload_annotations(made: ServicePlan) -> dict[str, dict[str, str]]:
    """By pool."""
    workloads = (item["metadata"] for item in made.apply if item["kind"] == "StatefulSet")
    return {meta["name"].removeprefix("demo-"): meta["annotations"] for meta in workloads}


def test_an_edit_of_pods_is_of_their_release_or_of_what_all_releases_share(make_plan, subtests):
    """Engines that wait for a rollout would lack it otherwise, and an edit that no engine reads
    would give them their turn."""
    before = workload_annotations(make_plan(**deepcopy(BASE)))
    for edit, rolled in EDITS:
        with subtests.test(edit=edit):
            after = workload_annotations(make_plan(**merged(deepcopy(BASE), edit)))
            is_release, is_shared = (
                any(after[pool][name] != before[pool][name] for pool in after.keys() & before)
                for name in (naming.REVISION, naming.SHARED_HASH)
            )
            assert is_shared == (bool(rolled & ENGINES) and not is_release)


def test_the_table_is_long_and_every_section_is_in_it():
    assert len(EDITS) >= 60
    # `cascade` and the like are left out of a spec that does not want them.
    assert {name for edit, _ in EDITS for name in edit} >= set(parse_sections())


def parse_sections() -> list[str]:
    manifest = {
        "apiVersion": naming.API_VERSION,
        "kind": naming.KIND,
        "metadata": {"name": "demo"},
        "spec": deepcopy(BASE),
    }
    spec = parse(manifest).spec
    return [camel(name) for name in spec.__struct_fields__]


def test_each_edit_is_of_something(make_plan):
    """No row tests an edit that is none: the table would pass though nothing were read."""
    before = make_plan(**deepcopy(BASE))
    for edit, rolled in EDITS:
        after = merged(BASE, edit)
        assert after != BASE
        if rolled:
            assert make_plan(**deepcopy(after)).apply != before.apply


def test_more_routers_roll_routers_where_they_split_a_tenants_quota(make_plan):
    """The share is read when a router starts; by default every router grants all."""
    split = merged(BASE, {"tenants": NAMED | {"acrossRouters": "Split"}})
    more = merged(split, {"router": {"replicas": 4}})
    assert changed(templates(make_plan, split), templates(make_plan, more)) == ROUTER


@pytest.mark.parametrize(
    ("settings", "rolled"),
    [
        ({"log_level": "debug"}, NOBODY),
        ({"namespace": "elsewhere"}, NOBODY),
        ({"router_image": "registry.example/router:2"}, ROUTER),
        ({"engine_image": "registry.example/engine:2"}, ENGINES),
        ({"dns_lag_s": 60.0}, ENGINES),
        ({"mesh": "istio"}, ALL),
        ({"image_pull_policy": "Always"}, ALL),
        ({"image_pull_secrets": ("registry",)}, ALL),
    ],
    ids=str,
)
def test_a_setting_of_the_operator_rolls_what_reads_it(manifest, settings, rolled):
    def made(chosen: Settings) -> dict[str, Any]:
        service = parse(manifest(**deepcopy(BASE)))
        return pod_templates(plan(service, Observed(now=datetime.now(UTC)), chosen))

    assert changed(made(Settings()), made(Settings(**settings))) == rolled


def test_another_operator_rolls_nothing_but_by_its_images(make_plan, monkeypatch):
    before = templates(make_plan, BASE)
    monkeypatch.setattr("ullage_operator.manifests.builder.VERSION", "99.0.0")
    assert templates(make_plan, BASE) == before
    assert Settings().engine_image not in str(before["router"])
