"""Devices that pods claim by dynamic resource allocation."""

from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

import kubernetes_validate
import pytest

from ullage_operator.api.errors import InvalidManifest
from ullage_operator.conditions.diagnosis import diagnose_pod
from ullage_operator.conditions.placement import fits_place_of, roomless_s
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TEMPLATE = "resourceClaimTemplateName"
GPUS = {"name": "gpus", TEMPLATE: "two-h200"}
NICS = {"name": "nic", TEMPLATE: "rdma", "request": "port"}
CLAIMED = {"resourceClaims": [GPUS, NICS], "gpus": 2, "parallelism": {"tensor": 2}}
UNALLOCATED = "0/2 nodes are available: 2 cannot allocate all claims. no new claims to deallocate."


def stateful_sets(made: ServicePlan) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o for o in made.apply if o["kind"] == "StatefulSet"}


def pod_of(stateful_set: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = stateful_set["spec"]["template"]["spec"]
    return pod


def test_claims_take_the_place_of_limits(make_plan: MakePlan) -> None:
    made = make_plan(pools={"single": CLAIMED, "plain": {}})
    claimed, plain = (pod_of(stateful_sets(made)[f"demo-{name}"]) for name in ("single", "plain"))
    assert claimed["resourceClaims"] == [GPUS, {"name": "nic", TEMPLATE: "rdma"}]
    [container] = claimed["containers"]
    wanted = [{"name": "gpus"}, {"name": "nic", "request": "port"}]
    assert container["resources"]["claims"] == wanted
    assert "limits" not in container["resources"]
    assert "resourceClaims" not in plain
    assert plain["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    for item in made.apply:
        kubernetes_validate.validate(item, "1.35", strict=True)


def test_every_pod_of_a_group_claims_devices_of_its_own(make_plan: MakePlan) -> None:
    wide = CLAIMED | {"gpus": 4, "nodes": 2, "parallelism": {"tensor": 2, "pipeline": 2}}
    made = stateful_sets(make_plan(engine="VLLM", pools={"large": wide, "single": {}}))
    leader = pod_of(made["demo-large"])
    follower = pod_of(made["demo-large-group"])
    assert leader["resourceClaims"] == follower["resourceClaims"] != []
    for pod in (leader, follower):
        assert [each["name"] for each in pod["containers"][0]["resources"]["claims"]] == [
            "gpus",
            "nic",
        ]


def test_a_pod_template_adds_claims_and_changes_none(make_plan: MakePlan) -> None:
    own = {"name": "log", TEMPLATE: "logs"}
    template = {"spec": {"resourceClaims": [own]}}
    made = make_plan(pools={"single": CLAIMED | {"podTemplate": template}})
    claims = pod_of(stateful_sets(made)["demo-single"])["resourceClaims"]
    assert [each["name"] for each in claims] == ["gpus", "nic", "log"]
    template = {"spec": {"resourceClaims": [{"name": "gpus", TEMPLATE: "other"}]}}
    with pytest.raises(InvalidManifest, match=r"resourceClaims\[gpus\]: is set by the operator"):
        make_plan(pools={"single": CLAIMED | {"podTemplate": template}})


def degraded(made: ServicePlan) -> str:
    conditions = {each["type"]: each for each in made.status["conditions"]}
    return str(conditions["Degraded"]["message"])


def test_an_api_server_that_keeps_no_claims_is_told_of(make_plan: MakePlan) -> None:
    """Before 1.34, and without the feature, it drops the fields silently."""
    spec = {"pools": {"single": CLAIMED}}
    first = make_plan(**spec)
    live = {key_of(item): deepcopy(item) for item in first.apply}
    assert "resourceClaims" not in degraded(make_plan(Observed(now=NOW, objects=live), **spec))
    for item in live.values():
        if item["kind"] == "StatefulSet":
            del pod_of(item)["resourceClaims"]
    message = degraded(make_plan(Observed(now=NOW, objects=live), **spec))
    assert message.startswith("spec.pools.single.resourceClaims: the API server drops the claims")
    assert "use Kubernetes 1.34" in message


def claiming(*templates: str, message: str = UNALLOCATED) -> dict[str, Any]:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
        "lastTransitionTime": (NOW - timedelta(seconds=90)).isoformat(),
    }
    claims = [{"name": f"c{i}", TEMPLATE: name} for i, name in enumerate(templates)]
    return {
        "metadata": {"name": "demo-single-0", "labels": {"serving.ullage.dev/pool": "single"}},
        "spec": {"resourceClaims": claims, "containers": [{"name": "engine"}]},
        "status": {"conditions": [condition]},
    }


def test_a_canary_without_devices_takes_the_place_of_a_pod_that_has_as_many() -> None:
    canary = claiming("two-h200", "rdma")
    assert roomless_s(canary, NOW) == 90
    assert fits_place_of(canary, claiming("rdma", "two-h200"))
    assert not fits_place_of(canary, claiming("two-h200"))
    assert not fits_place_of(claiming("two-h200", "two-h200"), claiming("two-h200"))


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (UNALLOCATED, "add a node with free devices, free some, or correct spec.pools.single.res"),
        ("pod: ResourceClaim not created yet", "create the ResourceClaimTemplate that spec.pools."),
    ],
)
def test_a_pod_without_its_devices_names_them_and_the_remedy(said: str, remedy: str) -> None:
    problem = diagnose_pod(claiming("two-h200", message=said), NOW)
    assert problem is not None
    assert problem.message.startswith(f"asks for a claim of two-h200 and fits no node: {said}; ")
    assert remedy in problem.message
