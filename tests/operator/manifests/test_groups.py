"""Engines that span several pods: what leader and followers are, and when followers are renewed."""

import dataclasses
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ullage_testing.manifests import minimal_manifest

from ullage_cli.local.plan import plan_local
from ullage_common.config.engine import EngineConfig, follower_place
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.parsing import parse
from ullage_operator.conditions.pod_problem import ObjectWarning
from ullage_operator.planning.observed import ObjectKey, Observed, key_of
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.planning.status import warned_objects
from ullage_operator.policy.engine_health import stream_targets

Make = Callable[..., dict[str, Any]]
MakePlan = Callable[..., ServicePlan]
Pod = dict[str, Any]

NODES = 4
WIDE = {"gpus": 16, "nodes": NODES, "parallelism": {"tensor": 4, "pipeline": 4}, "replicas": 2}
SPEC: dict[str, Any] = {
    "engine": "VLLM",
    "model": {"source": "pvc://weights/llama", "name": "llama"},
    "pools": {"large": WIDE},
    "tls": {"engines": {"secretName": "tls"}},
}
GROUP = "demo-large-group"
LEADERS = "demo-large"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def find(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    [item] = [o for o in plan.apply if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return item


def template(plan: ServicePlan, name: str) -> dict[str, Any]:
    pods: dict[str, Any] = find(plan, "StatefulSet", name)["spec"]["template"]
    return pods


def container(plan: ServicePlan, name: str) -> dict[str, Any]:
    engine: dict[str, Any]
    [engine] = template(plan, name)["spec"]["containers"]
    return engine


def environment(plan: ServicePlan, name: str) -> dict[str, Any]:
    """Values, and the fields of pods that are looked up."""
    return {
        e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"]
        for e in container(plan, name)["env"]
    }


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_every_object(make_plan: MakePlan, version: str) -> None:
    objects = make_plan(**SPEC).apply
    assert {"StatefulSet", "Deployment", "Service"} <= {item["kind"] for item in objects}
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)


def test_each_engine_has_a_leader_and_followers_with_equal_parts_of_its_gpus(
    make_plan: MakePlan,
) -> None:
    made = make_plan(**SPEC)
    sizes = {name: find(made, "StatefulSet", name)["spec"]["replicas"] for name in (LEADERS, GROUP)}
    assert sizes == {LEADERS: 2, GROUP: 2 * (NODES - 1)}
    for name in sizes:
        assert container(made, name)["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    [shm] = [v for v in template(made, GROUP)["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "2Gi"
    text = find(made, "ConfigMap", LEADERS)["data"]["engine.yaml"]
    config = msgspec.convert(yaml.safe_load(text), EngineConfig)
    assert (config.gpus, config.group.nodes) == (16, NODES)


def test_an_engine_of_one_pod_has_nothing_of_a_group(make_plan: MakePlan) -> None:
    made = make_plan(engine="VLLM")
    assert not [item for item in made.apply if "group" in item["metadata"]["name"]]
    assert find(made, "StatefulSet", "demo-single")["spec"]["serviceName"] == "demo-single"
    assert "VLLM_HOST_IP" not in environment(made, "demo-single")


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector["matchLabels"]
    members = selector.get("matchExpressions", ())
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        labels.get(each["key"]) in each["values"] for each in members
    )


@given(st.lists(st.integers(0, 2 * NODES - 1), max_size=40), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_drains_in_any_order_leave_all_groups_but_one(
    group_plan: ServicePlan, evictions: list[int], chance: random.Random
) -> None:
    """Plays evictions as the API server grants them, and pods that are back after a while."""
    labels = {name: template(group_plan, name)["metadata"]["labels"] for name in (LEADERS, GROUP)}
    members = [(index // NODES, index % NODES) for index in range(2 * NODES)]
    budgets = [item for item in group_plan.apply if item["kind"] == "PodDisruptionBudget"]
    of_pool = [
        [
            b
            for b in budgets
            if matches(b["spec"]["selector"], labels[LEADERS if not rank else GROUP])
        ]
        for _, rank in members
    ]
    assert [len(found) for found in of_pool] == [1] * len(members), "no pod may have two budgets"
    [budget] = {item["metadata"]["name"]: item["spec"] for [item] in of_pool}.values()
    away: set[tuple[int, int]] = set()

    def is_ready(member: tuple[int, int]) -> bool:
        return all((member[0], rank) not in away for rank in range(NODES))

    for index in evictions:
        member = members[index]
        num_ready = sum(map(is_ready, members))
        is_within = num_ready - 1 >= len(members) - budget["maxUnavailable"]
        always = budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow" and not is_ready(member)
        if member not in away and (is_within or always):
            away.add(member)
        assert len({group for group, _ in away}) <= 1
        if away and chance.random() < 0.3:
            away.remove(chance.choice(sorted(away)))


@pytest.fixture
def group_plan(make_plan: MakePlan) -> ServicePlan:
    return make_plan(**SPEC)


def test_a_scheduler_that_places_groups_finds_all_their_pods(make_plan: MakePlan) -> None:
    labels = {"scheduling.x-k8s.io/pod-group": "demo-large"}
    gang = {"metadata": {"labels": labels}, "spec": {"schedulerName": "gang"}}
    made = make_plan(**SPEC | {"pools": {"large": WIDE | {"podTemplate": gang}}})
    for name in (LEADERS, GROUP):
        pods = template(made, name)
        assert pods["metadata"]["labels"].items() >= labels.items()
        assert pods["spec"]["schedulerName"] == "gang"


def test_followers_run_the_worker_that_follows(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    follower = container(made, GROUP)
    leader = container(made, LEADERS)
    assert follower["command"] == ["python", "-m", "ullage_engine.vllm_worker"]
    assert follower["args"] == [
        "--follow",
        "--config",
        "/etc/ullage/engine.yaml",
        "--index",
        "$(POD_INDEX)",
        "--leader",
        "demo-large-{group}.demo-large-group.models.svc",
    ]
    assert follower["image"] == leader["image"]
    assert leader["command"] == ["ullage-engine"]
    env = environment(made, GROUP)
    assert env["POD_INDEX"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    for name in (GROUP, LEADERS):
        env = environment(made, name)
        assert env["VLLM_HOST_IP"] == "status.podIP"
        revision = "metadata.annotations['serving.ullage.dev/group-revision']"
        assert env["ULLAGE_GROUP_REVISION"] == revision
    mounts = {mount["mountPath"] for mount in follower["volumeMounts"]}
    assert mounts >= {"/etc/ullage", "/dev/shm", "/models/weights"}
    # They serve nobody, so they have no ports but that of probes, and no certificates.
    assert "/etc/ullage-engine-tls" not in mounts
    assert [port["containerPort"] for port in follower["ports"]] == [naming.PROBE_PORT]
    assert follower["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "probe"}
    assert follower["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "probe"}
    assert "lifecycle" not in follower
    pods = [template(made, name)["spec"] for name in (GROUP, LEADERS)]
    assert len({pod["terminationGracePeriodSeconds"] for pod in pods}) == 1


@given(st.integers(2, 64), st.integers(1, 50))
def test_every_rank_of_every_engine_is_one_follower(nodes: int, engines: int) -> None:
    places = [follower_place(index, nodes) for index in range(engines * (nodes - 1))]
    assert sorted(places) == [(group, rank) for group in range(engines) for rank in range(1, nodes)]
    # Fewer engines lose the last leaders' followers and no others.
    assert places == sorted(places)


def test_followers_find_a_leader_that_is_not_ready_and_routers_find_leaders_alone(
    make_plan: MakePlan,
) -> None:
    made = make_plan(**SPEC)
    rendezvous = find(made, "Service", GROUP)["spec"]
    assert (rendezvous["clusterIP"], rendezvous["publishNotReadyAddresses"]) == ("None", True)
    # The name of a pod is one of its StatefulSet's Service.
    assert find(made, "StatefulSet", LEADERS)["spec"]["serviceName"] == GROUP
    leader, follower = (template(made, name)["metadata"]["labels"] for name in (LEADERS, GROUP))
    routed = find(made, "Service", LEADERS)["spec"]["selector"]
    for selector in (rendezvous["selector"], routed):
        assert selector.items() <= leader.items()
        assert not selector.items() <= follower.items()


def test_only_the_pods_of_a_pool_talk_freely(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    leader, follower = (template(made, name)["metadata"]["labels"] for name in (LEADERS, GROUP))
    policies = [find(made, "NetworkPolicy", name)["spec"] for name in (f"{GROUP}-leaders", GROUP)]
    for policy, labels in zip(policies, (leader, follower), strict=True):
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        [rule] = policy["ingress"]
        assert "ports" not in rule
        allowed = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
        assert len(allowed) == 2
        for labels_of, match in zip((leader, follower), allowed, strict=True):
            assert match.items() <= labels_of.items()


def revision(plan: ServicePlan, name: str) -> str:
    return str(template(plan, name)["metadata"]["annotations"][naming.GROUP_REVISION])


@pytest.mark.parametrize(
    "pool",
    [
        {"podTemplate": {"spec": {"containers": [{"name": "engine", "stdin": True}]}}},
        {"memory": {"thresholdPercent": 50}},
        {"shmSize": "9Gi"},
    ],
)
def test_leaders_and_followers_are_renewed_together(
    make_plan: MakePlan, pool: dict[str, Any]
) -> None:
    before = make_plan(**SPEC)
    after = make_plan(**SPEC | {"pools": {"large": WIDE | pool}})
    assert revision(before, LEADERS) == revision(before, GROUP)
    assert revision(after, LEADERS) == revision(after, GROUP) != revision(before, GROUP)
    scaled = make_plan(**SPEC | {"pools": {"large": WIDE | {"replicas": 5}}})
    assert revision(scaled, GROUP) == revision(before, GROUP)


def pod_of(plan: ServicePlan, workload: str, index: int, old: bool = False) -> Pod:
    meta = template(plan, workload)["metadata"]
    kept = meta["annotations"] | ({naming.GROUP_REVISION: "old"} if old else {})
    name = f"{workload}-{index}"
    return {
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": f"uid-{name}",
            "labels": meta["labels"],
            "annotations": kept,
        },
        "spec": {},
        "status": {"podIP": "10.0.0.1"},
    }


def deleted(make_plan: MakePlan, pods: list[Pod]) -> list[str]:
    plan = make_plan(Observed(now=NOW, pods=pods), **SPEC)
    return [item["metadata"]["name"] for item in plan.delete]


def test_followers_are_renewed_once_their_leader_is_and_no_others(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    group = range(2 * (NODES - 1))
    followers = [pod_of(made, GROUP, index, old=True) for index in group]
    old = [pod_of(made, LEADERS, index, old=True) for index in range(2)]
    new = pod_of(made, LEADERS, 1)
    assert deleted(make_plan, [*old, *followers]) == []
    assert deleted(make_plan, [old[0], *followers]) == []  # the other leader is not there
    assert deleted(make_plan, [old[0], new, *followers]) == [f"{GROUP}-{i}" for i in (3, 4, 5)]
    renewed = [pod_of(made, GROUP, index) for index in group]
    assert deleted(make_plan, [old[0], new, *followers[:3], *renewed[3:]]) == []
    # One that was made before its leader's turn is of the wanted revision, and stays.
    assert deleted(make_plan, [*old, *renewed]) == []


@pytest.mark.parametrize("name", ["debug", f"{GROUP}-debug", f"{GROUP}-", "debug-0"])
def test_a_pod_that_only_has_a_followers_labels_is_left_alone(
    make_plan: MakePlan, name: str
) -> None:
    made = make_plan(**SPEC)
    copy = pod_of(made, GROUP, 0, old=True)
    copy["metadata"]["name"] = name
    follower = pod_of(made, GROUP, 0, old=True)
    leader = pod_of(made, LEADERS, 0)
    assert deleted(make_plan, [leader, follower, copy]) == [f"{GROUP}-0"]


def test_what_ends_already_is_not_deleted_again(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    follower = pod_of(made, GROUP, 0, old=True)
    leader = pod_of(made, LEADERS, 0)
    assert deleted(make_plan, [leader, follower]) == [f"{GROUP}-0"]
    follower["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:00Z"
    assert deleted(make_plan, [leader, follower]) == []


def test_followers_are_no_engines(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    started = {"podIP": "10.0.0.1", "containerStatuses": [{"name": "engine", "started": True}]}
    pods = [pod_of(made, name, 0) | {"status": started} for name in (LEADERS, GROUP)]
    assert list(stream_targets(pods, 0.5)) == ["uid-demo-large-0"]
    observed = Observed(now=NOW, objects={key_of(o): o for o in made.apply}, pods=pods)
    status = make_plan(observed, **SPEC).status
    assert status["engines"] == "0/3"  # two of pool large, one of pool single
    assert status["pools"].keys() == {"single", "large"}


def test_followers_keep_up_with_leaders_while_a_rollout_is_unknown(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    live = {key_of(o): o for o in made.apply if o["metadata"]["name"] != "demo-rollout"}
    observed = Observed(now=NOW, objects=live, is_rollout_readable=False)
    scaled = make_plan(observed, **SPEC | {"pools": {"large": WIDE | {"replicas": 3}}})
    sizes = {
        key_of(item): item["spec"]["replicas"]
        for item in scaled.apply
        if item["kind"] == "StatefulSet"
    }
    assert sizes == {
        ObjectKey("StatefulSet", LEADERS): 3,
        ObjectKey("StatefulSet", GROUP): 3 * (NODES - 1),
    }
    assert scaled.delete == ()


def test_names_of_a_group_are_known_again() -> None:
    for pool, is_canary in (("large", False), (naming.canary_pool("large"), True)):
        group = naming.group_pool(pool)
        assert naming.stable_pool(group) == "large"
        assert naming.is_canary_pool(group) is is_canary
        assert naming.leaders_name(naming.pool_name("demo", group)) == f"demo-{pool}"
    longest = naming.pool_name("n" * 36, naming.group_pool(naming.canary_pool("pool")))
    assert len(longest) == 52  # of which a StatefulSet's pods make a label of 63


def test_one_machine_is_one_node(manifest: Make, tmp_path: Path) -> None:
    service = parse(manifest(**{name: SPEC[name] for name in ("engine", "model", "pools")}))
    words = re.escape("spec.pools.large.nodes: ullage up runs on this machine alone")
    with pytest.raises(LocalFailure, match=words):
        plan_local(service, tmp_path, http_port=0, grpc_port=0, log_level="info", has_vllm=True)


def test_an_engine_refuses_nodes_with_unequal_parts() -> None:
    model = {"source": "file:///m", "name": "m"}
    config = {"model": model, "engine": "vllm", "gpus": 4, "group": {"nodes": 2}}
    assert msgspec.convert(config, EngineConfig).group.nodes == 2
    with pytest.raises(
        msgspec.ValidationError, match=r"gpus 3 is not a multiple of group\.nodes 2"
    ):
        msgspec.convert(config | {"gpus": 3}, EngineConfig)


def test_followers_whose_pods_are_refused_say_why(make_plan: MakePlan) -> None:
    made = make_plan(**SPEC)
    pods = [pod_of(made, LEADERS, 0), pod_of(made, LEADERS, 1)]
    objects = {key_of(item): item for item in made.apply}
    group = objects[ObjectKey("StatefulSet", GROUP)]
    meta = group["metadata"] | {"uid": "uid-of-group", "creationTimestamp": "2026-01-02T03:04:00Z"}
    objects[ObjectKey("StatefulSet", GROUP)] = group | {"metadata": meta}
    observed = Observed(now=NOW, objects=objects, pods=pods, status=made.status)
    service = parse(minimal_manifest(**SPEC))

    assert "uid-of-group" not in warned_objects(service, observed)
    assert make_plan(observed, **SPEC).recheck_s == 25
    later = dataclasses.replace(observed, now=NOW + timedelta(seconds=25))
    assert "uid-of-group" in warned_objects(service, later)

    quota = 'pods "demo-large-group-0" is forbidden: exceeded quota: gpus'
    events = {"uid-of-group": ObjectWarning("FailedCreate", quota)}
    told = make_plan(dataclasses.replace(later, warnings=events), **SPEC).status["conditions"]
    [degraded] = [each for each in told if each["type"] == "Degraded"]
    assert degraded["message"] == f"StatefulSet {GROUP} has 0 of 6 pods: {quota}"
