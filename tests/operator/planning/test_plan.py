"""The plan: what to apply, what to delete and what to report."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from jsonschema import Draft4Validator

from ullage_operator.api import schema
from ullage_operator.conditions.conditions import Workload, service_conditions, workload_of
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def observed(objects: list[dict[str, Any]], **more: Any) -> Observed:
    return Observed(now=NOW, objects={key_of(item): item for item in objects}, **more)


def live(plan: ServicePlan, ready: bool = True) -> list[dict[str, Any]]:
    """The plan's objects as a cluster reports them once its controllers are done."""
    return [with_status(item, ready) for item in plan.apply]


def with_status(item: dict[str, Any], ready: bool) -> dict[str, Any]:
    if item["kind"] not in ("Deployment", "StatefulSet"):
        return item
    replicas = item["spec"]["replicas"]
    status = {
        "observedGeneration": 1,
        "replicas": replicas,
        "updatedReplicas": replicas,
        "readyReplicas": replicas if ready else 0,
    }
    return item | {"metadata": item["metadata"] | {"generation": 1}, "status": status}


def conditions(plan: ServicePlan) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in plan.status["conditions"]}


def test_names_exist_before_the_router_looks_for_them(make_plan: MakePlan) -> None:
    order = [f"{i['kind']}/{i['metadata']['name']}" for i in make_plan(pools={"large": {}}).apply]
    assert order.index("ConfigMap/demo-single") < order.index("StatefulSet/demo-single")
    assert order.index("Service/demo-large") < order.index("Deployment/demo-router")
    assert order.index("ServiceAccount/demo-engine") < order.index("StatefulSet/demo-single")


def test_the_same_input_gives_the_same_plan(make_plan: MakePlan) -> None:
    assert make_plan() == make_plan()


def test_nothing_is_deleted_that_is_wanted(make_plan: MakePlan) -> None:
    assert make_plan(observed(live(make_plan()))).delete == ()


@pytest.mark.parametrize("owners", [[], [{"kind": "LLMService", "name": "demo", "uid": "uid-0"}]])
def test_what_the_service_does_not_own_is_never_deleted(
    make_plan: MakePlan, owners: list[dict[str, str]]
) -> None:
    before = live(make_plan(pools={"large": {}}))
    copy = next(item for item in before if item["kind"] == "ConfigMap")
    copy = copy | {"metadata": copy["metadata"] | {"name": "backup", "ownerReferences": owners}}
    deleted = [key_of(item) for item in make_plan(observed([*before, copy])).delete]
    assert ("StatefulSet", "demo-large") in deleted
    assert ("ConfigMap", "backup") not in deleted


def test_a_removed_pool_is_deleted_whole(make_plan: MakePlan) -> None:
    before = live(make_plan(pools={"large": {"replicas": 2}}))
    gone = make_plan(observed(before)).delete
    assert {key_of(item) for item in gone} == {
        (kind, "demo-large")
        for kind in ("ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet")
    }


def test_status_fits_the_schema(make_plan: MakePlan) -> None:
    plan = make_plan(observed(live(make_plan())))
    described = schema.standard(schema.load_schema()["properties"]["status"])
    Draft4Validator(described).validate(plan.status)
    assert not [*schema.unknown_fields(described, plan.status, "status")]
    assert plan.status["observedGeneration"] == 3
    assert plan.status["endpoint"] == "http://demo-router.models.svc:8000"


def test_the_scale_selector_matches_the_pods(make_plan: MakePlan) -> None:
    plan = make_plan()
    [pods] = [i["spec"]["template"] for i in plan.apply if i["kind"] == "StatefulSet"]
    selector = plan.status["pools"]["single"]["selector"]
    pairs = dict(pair.split("=") for pair in selector.split(","))
    assert pairs.items() <= pods["metadata"]["labels"].items()


def test_a_new_service_is_progressing(make_plan: MakePlan) -> None:
    assert conditions(make_plan()) == {
        "Ready": ("False", "NoEngineReady"),
        "Available": ("False", "NoEngineReady"),
        "Progressing": ("True", "RollingOut"),
        "Degraded": ("False", "AsExpected"),
        "MonitoringAvailable": ("False", "KindsAbsent"),
        "RolloutHealthy": ("True", "Stable"),
    }


def test_a_settled_service_is_ready(make_plan: MakePlan) -> None:
    assert conditions(make_plan(observed(live(make_plan())))) == {
        "Ready": ("True", "AllReady"),
        "Available": ("True", "Serving"),
        "Progressing": ("False", "Settled"),
        "Degraded": ("False", "AsExpected"),
        "MonitoringAvailable": ("False", "KindsAbsent"),
        "RolloutHealthy": ("True", "Stable"),
    }


def test_a_pod_that_cannot_be_placed_says_why(make_plan: MakePlan) -> None:
    pod = {
        "metadata": {"name": "demo-single-0"},
        "status": {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/1 nodes: Insufficient nvidia.com/gpu",
                }
            ]
        },
    }
    plan = make_plan(observed(live(make_plan(), ready=False), pods=[pod]))
    assert conditions(plan)["Ready"] == ("False", "Unschedulable")
    assert conditions(plan)["Degraded"] == ("True", "Unschedulable")
    message = plan.status["conditions"][0]["message"]
    assert message.startswith("pod demo-single-0: fits no node: 0/1 nodes: Insufficient nvidia")


def test_a_pool_of_several_gpus_is_like_any_other(make_plan: MakePlan) -> None:
    pools: dict[str, Any] = {"large": {}}
    plan = make_plan(observed(live(make_plan(pools=pools))), pools=pools)
    assert conditions(plan)["Ready"] == ("True", "AllReady")
    assert conditions(plan)["Degraded"] == ("False", "AsExpected")


def test_times_change_only_with_the_status(make_plan: MakePlan) -> None:
    first = make_plan().status
    later = NOW + timedelta(minutes=5)
    objects = {key_of(item): item for item in live(make_plan())}
    second = make_plan(Observed(now=later, objects=objects, status=first)).status
    times = {c["type"]: c["lastTransitionTime"] for c in second["conditions"]}
    assert times == {
        "Ready": "2026-01-02T03:09:05Z",
        "Available": "2026-01-02T03:09:05Z",
        "Progressing": "2026-01-02T03:09:05Z",
        "Degraded": "2026-01-02T03:04:05Z",
        "MonitoringAvailable": "2026-01-02T03:04:05Z",
        "RolloutHealthy": "2026-01-02T03:04:05Z",
    }


def test_zero_engines_are_said_to_be_wanted(make_plan: MakePlan) -> None:
    plan = make_plan(pools={"single": {"replicas": 0}})
    assert conditions(plan)["Available"] == ("False", "ScaledToZero")


def reasons(router: Workload, *pools: Workload) -> list[str]:
    return [finding.reason for finding in service_conditions(router, pools, ())]


def test_one_pool_without_engines_is_not_ready_but_available() -> None:
    router = Workload("router", 1, 1, 1, settled=True)
    serving = Workload("single", 1, 1, 1, settled=True)
    lost = Workload("large", 1, 1, 0, settled=True)
    assert reasons(router, serving, lost) == ["PodsNotReady", "Serving", "Starting", "AsExpected"]


def test_without_a_router_nothing_is_available() -> None:
    router = Workload("router", 1, 1, 0, settled=True)
    assert reasons(router, Workload("single", 1, 1, 1, settled=True))[1] == "NoRouterReady"


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"generation": 2}},
        {"status": {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 1}},
        {"status": {"observedGeneration": 1, "replicas": 3, "updatedReplicas": 2}},
        {"spec": {"replicas": 3}},
        {"status": {}},
    ],
)
def test_a_workload_settles_only_when_all_is_done(change: dict[str, Any]) -> None:
    done: dict[str, Any] = {
        "metadata": {"generation": 1},
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2},
    }
    assert workload_of("single", 2, done).settled
    assert not workload_of("single", 2, done | change).settled


def follow(make_plan: MakePlan, *steps: dict[str, Any]) -> ServicePlan:
    """The plan after edits that build on one another, a minute apart unless they say otherwise.

    Controllers do at once what they are told; nobody asks routers.
    """
    plan = make_plan(image="one")
    spec = {"image": "one"}
    now = NOW
    for step in ({}, *steps):
        spec |= {name: value for name, value in step.items() if name != "after"}
        now += step.get("after", timedelta(minutes=1))
        known = {key_of(item): item for item in live(plan)}
        plan = make_plan(Observed(now=now, objects=known, status=plan.status), **spec)
    return plan


EDIT = {"image": "two"}
HELD = {"rollout": {"autoRollback": False}}
LATER = {"after": timedelta(days=1)}


@pytest.mark.parametrize(
    ("steps", "progressing", "stage"),
    [
        ([], ("False", "Settled"), "Stable"),
        ([EDIT], ("True", "CanaryStarting"), "Starting"),
        ([EDIT, {}], ("True", "CanaryStep1"), "Canary"),
        ([EDIT, {}, LATER], ("False", "NotMeasured"), "RolledBack"),
        ([EDIT | HELD, {}, LATER], ("False", "NotMeasured"), "Paused"),
        ([EDIT | {"rollout": {"paused": True}}], ("False", "Paused"), "Paused"),
        ([EDIT | {"rollout": {"strategy": "Rolling"}}], ("True", "RollingOut"), "Promoting"),
        ([EDIT | {"rollout": {"strategy": "Rolling"}}, {}], ("False", "Settled"), "Stable"),
    ],
)
def test_progressing_tells_of_a_rollout_until_the_engines_are_what_the_spec_asks_for(
    make_plan: MakePlan, steps: list[dict[str, Any]], progressing: tuple[str, str], stage: str
) -> None:
    plan = follow(make_plan, *steps)
    assert (conditions(plan)["Progressing"], plan.status["rollout"]["stage"]) == (
        progressing,
        stage,
    )
    if progressing[1] != "Settled":
        assert said(plan, "Progressing") == plan.status["rollout"]["message"]


def said(plan: ServicePlan, kind: str) -> str:
    return next(str(c["message"]) for c in plan.status["conditions"] if c["type"] == kind)


def test_an_edit_that_waits_for_engines_is_in_progress(make_plan: MakePlan) -> None:
    known = {key_of(item): item for item in live(follow(make_plan), ready=False)}
    plan = make_plan(Observed(now=NOW + timedelta(minutes=1), objects=known), **EDIT)
    assert conditions(plan)["Progressing"] == ("True", "NoStableEngine")


def test_a_scaled_router_is_rolled_out_whatever_became_of_the_engines(make_plan: MakePlan) -> None:
    held = follow(make_plan, EDIT | {"rollout": {"paused": True}})
    known = {key_of(item): item for item in live(held)}
    spec: dict[str, Any] = EDIT | {"rollout": {"paused": True}, "router": {"replicas": 5}}
    plan = make_plan(Observed(now=NOW, objects=known, status=held.status), **spec)
    assert conditions(plan)["Progressing"] == ("True", "RollingOut")
