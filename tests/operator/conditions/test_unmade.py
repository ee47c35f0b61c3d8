"""Pods that Kubernetes does not make are told of, once it had the time to."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ullage_operator.conditions.pod_problem import ObjectWarning
from ullage_operator.planning.observed import ObjectKey, Observed, key_of
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
QUOTA = 'pods "demo-router-1" is forbidden: exceeded quota: few'


def unmade(item: dict[str, Any]) -> dict[str, Any]:
    """As its controller leaves it that may make no pods."""
    status: dict[str, Any] = {"observedGeneration": 1, "replicas": 0}
    if item["kind"] == "Deployment":
        failure = {"type": "ReplicaFailure", "status": "True", "message": QUOTA}
        status["conditions"] = [{"type": "Available", "status": "False"}, failure]
    return item | {"metadata": item["metadata"] | {"generation": 1}, "status": status}


def observed(before: ServicePlan, after_s: float, **more: Any) -> Observed:
    now = NOW + timedelta(seconds=after_s)
    workloads = ("Deployment", "StatefulSet")
    live = [unmade(item) if item["kind"] in workloads else item for item in before.apply]
    objects = {key_of(item): item for item in live}
    return Observed(now=now, objects=objects, status=before.status, **more)


def degraded(plan: ServicePlan) -> tuple[str, str, str]:
    found = next(c for c in plan.status["conditions"] if c["type"] == "Degraded")
    return found["status"], found["reason"], found["message"]


def pod(name: str, **labels: str) -> dict[str, Any]:
    meta = {"name": name, "uid": name, "labels": labels}
    return {"metadata": meta, "status": {"phase": "Running"}}


ROUTERS = [pod(name, **{"app.kubernetes.io/component": "router"}) for name in ("r1", "r2")]


def test_pods_that_nobody_makes_degrade_a_service_within_a_minute(make_plan: MakePlan) -> None:
    first = make_plan()
    soon = make_plan(observed(first, 20))
    assert degraded(soon) == ("False", "AsExpected", "no pod is stuck")
    assert soon.recheck_s == 10
    late = make_plan(observed(soon, 600))
    status, reason, message = degraded(late)
    assert (status, reason) == ("True", "PodsNotMade")
    assert message == f"Deployment demo-router has 0 of 2 pods: {QUOTA} (and 1 more)"
    assert late.recheck_s is None


def test_a_statefulset_hands_on_no_reason_so_the_message_says_where_to_look(
    make_plan: MakePlan,
) -> None:
    soon = make_plan(observed(make_plan(), 20))
    late = make_plan(observed(soon, 600, pods=ROUTERS))
    assert degraded(late)[2] == (
        "StatefulSet demo-single has 0 of 1 pods: a quota or an admission policy may refuse them; "
        "kubectl describe statefulset demo-single"
    )


def test_the_event_of_a_statefulset_says_why(make_plan: MakePlan) -> None:
    soon = make_plan(observed(make_plan(), 20))
    why = 'create Pod demo-single-0 failed: no PriorityClass with name "gold" was found'
    late = observed(soon, 40, pods=ROUTERS, warnings={"uid-9": ObjectWarning("FailedCreate", why)})
    late.objects[ObjectKey("StatefulSet", "demo-single")]["metadata"]["uid"] = "uid-9"
    assert degraded(make_plan(late))[2] == f"StatefulSet demo-single has 0 of 1 pods: {why}"


def test_routers_that_cannot_be_replaced_say_why(make_plan: MakePlan) -> None:
    """A quota for two pods: no third one can start, and none of the old ones ends before."""
    soon = make_plan(observed(make_plan(), 20))
    engine = pod("demo-single-0", **{"serving.ullage.dev/pool": "single"})
    late = observed(soon, 600, pods=[*ROUTERS, engine])
    router = late.objects[ObjectKey("Deployment", "demo-router")]
    counts = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 0}
    router["status"] |= counts
    assert degraded(make_plan(late)) == (
        "True",
        "PodsNotMade",
        f"Deployment demo-router has 0 of 2 pods of its newest template: {QUOTA}",
    )
    router["status"]["updatedReplicas"] = 2
    assert degraded(make_plan(late))[1] == "AsExpected"


@pytest.mark.parametrize("phase", ["Running", "Pending"])
def test_pods_that_exist_are_no_such_trouble_whatever_their_workload_tells(
    make_plan: MakePlan, phase: str
) -> None:
    soon = make_plan(observed(make_plan(), 20))
    engine = pod("demo-single-0", **{"serving.ullage.dev/pool": "single"})
    engine["status"]["phase"] = phase
    late = make_plan(observed(soon, 600, pods=[*ROUTERS, engine]))
    assert degraded(late)[1] == "AsExpected"


def test_routers_that_were_just_asked_for_are_not_told_of(make_plan: MakePlan) -> None:
    """In a service that has long progressed: their controller knows of them and then makes them."""
    soon = make_plan(observed(make_plan(), 20))
    seen = observed(soon, 600)
    for item in seen.objects.values():
        if item["kind"] == "Deployment":
            item["status"] |= {"replicas": 1, "conditions": []}
        elif item["kind"] == "StatefulSet":
            item["status"]["replicas"] = 1
    soon.status["router"]["replicas"] = 1
    assert degraded(make_plan(seen))[1] == "AsExpected"


def test_a_pod_that_is_just_being_replaced_is_not_told_of(make_plan: MakePlan) -> None:
    """Its service has progressed for long, but its status named all pods a moment ago."""
    soon = make_plan(observed(make_plan(), 20))
    for part in (soon.status["router"], soon.status["pools"]["single"]):
        part["replicas"] = 2
    assert degraded(make_plan(observed(soon, 600)))[1] == "AsExpected"
