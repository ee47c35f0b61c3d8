"""A service that is stopped has no engine, keeps all else, and comes up as it was asked for."""

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from ullage_cli.local.checks import check_service
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan, plan
from ullage_operator.planning.standing import plan_standing, read, standing
from ullage_operator.policy.pool_sizes import ScalingDecisions, own_policies
from ullage_operator.policy.scaling import ScalingDecision
from ullage_operator.rollout.objects import with_stop_said

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
URL = "http://prometheus:9090"
KEDA = {"provider": "KEDA", "prometheusURL": URL, "maxReplicas": 6}
CLAIM = {"modelCache": {"claimName": "weights"}}
POOLS: dict[str, Any] = {
    "single": {"replicas": 3} | CLAIM,
    "large": {"replicas": 2, "autoscaling": {"maxReplicas": 4, "minReplicas": 0}},
    "wide": {"gpus": 1, "replicas": 2, "autoscaling": KEDA},
}
SIZES = {"demo-single": 3, "demo-large": 2, "demo-wide": 2}
PAUSED = {"autoscaling.keda.sh/paused-replicas": "0"}

Make = Callable[..., dict[str, Any]]


def planned(manifest: dict[str, Any], live: list[dict[str, Any]], **seen: Any) -> ServicePlan:
    objects = {key_of(item): item for item in live}
    observed = Observed(now=NOW, objects=objects, serves=frozenset({"ScaledObject"}), **seen)
    return plan(parse(manifest), observed, Settings())


def sizes(items: Any) -> dict[str, int | None]:
    sets = [item for item in items if item["kind"] == "StatefulSet"]
    return {item["metadata"]["name"]: item["spec"].get("replicas") for item in sets}


def as_live(plan: ServicePlan, before: list[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return what a plan's objects are in a cluster, whose numbers others may write."""
    known = {key_of(item): item for item in before}
    live = [copy.deepcopy(item) for item in plan.apply]
    for item in live:
        if item["kind"] == "StatefulSet" and "replicas" not in item["spec"]:
            item["spec"]["replicas"] = known[key_of(item)]["spec"]["replicas"]
    return live


def conditions(plan: ServicePlan) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in plan.status["conditions"]}


def router_file(plan: ServicePlan) -> dict[str, Any]:
    [config] = [i for i in plan.apply if key_of(i) == ("ConfigMap", "demo-router")]
    return dict(yaml.safe_load(config["data"]["rollout.yaml"]))


def test_no_pool_has_an_engine_whoever_scales_it(manifest: Make) -> None:
    live = as_live(planned(manifest(pools=POOLS), []))
    wake = ScalingDecisions({"large": ScalingDecision(3, "Wake", "wanted")})
    stopped = planned(manifest(pools=POOLS, stop=True), live, scaling=wake)
    assert sizes(stopped.apply) == dict.fromkeys(SIZES, 0)
    [scaler] = [item for item in stopped.apply if item["kind"] == "ScaledObject"]
    assert scaler["metadata"]["annotations"] == PAUSED
    assert own_policies(parse(manifest(pools=POOLS, stop=True))) == {}


def test_all_but_budgets_stays(manifest: Make) -> None:
    """Routers answer, and configuration, claims and caches are there when it comes back."""
    live = as_live(planned(manifest(pools=POOLS), []))
    stopped = planned(manifest(pools=POOLS, stop=True), live)
    assert {item["kind"] for item in stopped.delete} <= {"PodDisruptionBudget"}
    pods = [item["spec"]["template"] for item in live if item["kind"] == "StatefulSet"]
    assert pods == [i["spec"]["template"] for i in stopped.apply if i["kind"] == "StatefulSet"]
    [routers] = [item for item in stopped.apply if item["kind"] == "Deployment"]
    assert routers["spec"]["replicas"] == 2


def test_the_status_says_so_with_the_remedy(manifest: Make) -> None:
    live = as_live(planned(manifest(pools=POOLS), []))
    stopped = planned(manifest(pools=POOLS, stop=True), live)
    for kind in ("Ready", "Available"):
        said = conditions(stopped)[kind]
        assert (said["status"], said["reason"]) == ("False", "Stopped")
        assert "set it to false" in said["message"]
    assert conditions(stopped)["Degraded"]["status"] == "False"
    assert "ScalingActive" not in conditions(stopped)
    assert stopped.status["engines"] == "0/0"


def test_routers_are_told_in_the_file_that_they_read_while_they_run(manifest: Make) -> None:
    before = planned(manifest(pools=POOLS), [])
    stopped = planned(manifest(pools=POOLS, stop=True), as_live(before))
    assert router_file(stopped)["stopped"] is True
    assert "stopped" not in router_file(before), "older routers know no such field"
    deployments = [
        [item["spec"]["template"] for item in made.apply if item["kind"] == "Deployment"]
        for made in (before, stopped)
    ]
    assert deployments[0] == deployments[1]


def test_it_comes_back_as_a_new_service_begins(manifest: Make) -> None:
    live = as_live(planned(manifest(pools=POOLS), []))
    stopped = as_live(planned(manifest(pools=POOLS, stop=True), live), live)
    back = planned(manifest(pools=POOLS), stopped)
    assert sizes(back.apply) == SIZES
    [scaler] = [item for item in back.apply if item["kind"] == "ScaledObject"]
    assert "annotations" not in scaler["metadata"]

    later = planned(manifest(pools=POOLS), as_live(back, stopped))
    assert sizes(later.apply) == SIZES | {"demo-wide": None}, "KEDA decides again"


def test_a_stop_that_goes_on_changes_nothing(manifest: Make) -> None:
    live = as_live(planned(manifest(pools=POOLS), []))
    first = planned(manifest(pools=POOLS, stop=True), live)
    again = planned(manifest(pools=POOLS, stop=True), as_live(first, live))
    assert again.apply == first.apply


def test_an_edit_while_it_is_stopped_needs_no_canary(manifest: Make) -> None:
    stopped = as_live(planned(manifest(pools=POOLS, stop=True), []))
    edited = planned(manifest(pools=POOLS, stop=True, image="r.example/engine:2"), stopped)
    assert not [name for name in sizes(edited.apply) if name.endswith("-next")]
    assert sizes(edited.apply) == dict.fromkeys(SIZES, 0)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_file_whose_rest_is_not_known_says_it_too(is_stopped: bool) -> None:
    text = with_stop_said("revision: abc\nstopped: true\nadapters: [a]\n", is_stopped)
    document = yaml.safe_load(text)
    assert document.get("stopped", False) is is_stopped
    assert (document["revision"], document["adapters"]) == ("abc", ["a"])


def test_an_invalid_edit_starts_nothing_that_was_stopped(manifest: Make) -> None:
    """Not even where no valid spec was kept, so that live objects are all that is known."""
    live = as_live(planned(manifest(pools=POOLS, stop=True), []))
    for item in live:
        item.setdefault("data", {}).pop("spec.json", None)
    wrong = manifest(pools=POOLS, stop=True)
    wrong["spec"]["limits"] = {"requestTimeout": "never"}
    observed = Observed(now=NOW, objects={key_of(item): item for item in live})
    declared = read(wrong, Settings())
    assert declared.service is None
    stands = standing(wrong, declared, observed, Settings())
    assert stands is not None
    assert stands.is_partial
    assert plan_standing(stands, observed, Settings()).apply == ()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_keda_is_paused_where_nothing_else_is_known(manifest: Make, is_stopped: bool) -> None:
    live = as_live(planned(manifest(pools=POOLS, stop=not is_stopped), []))
    for item in live:
        item.setdefault("data", {}).pop("spec.json", None)
    wrong = manifest(pools=POOLS, stop=is_stopped)
    wrong["spec"]["limits"] = {"requestTimeout": "never"}
    observed = Observed(now=NOW, objects={key_of(item): item for item in live})
    stands = standing(wrong, read(wrong, Settings()), observed, Settings())
    assert stands is not None
    assert stands.is_partial
    applied = plan_standing(stands, observed, Settings()).apply
    [scaler] = [item for item in applied if item["kind"] == "ScaledObject"]
    assert (scaler["metadata"]["annotations"] == PAUSED) is is_stopped


def test_a_local_run_names_the_field(manifest: Make) -> None:
    with pytest.raises(LocalFailure, match=r"spec\.stop: the service is stopped; set it to false"):
        check_service(parse(manifest(stop=True)), has_vllm=True)
