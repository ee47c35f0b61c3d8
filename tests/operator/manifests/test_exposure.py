"""How clients reach routers, and how many there are: Service, HTTPRoute, autoscaler."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ullage_cli.main import main
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.planning.observed import ObjectKey, Observed
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ROUTE = ObjectKey("HTTPRoute", "demo-router")
SCALER = "HorizontalPodAutoscaler"
GATEWAY = {
    "parentRefs": [{"name": "public", "namespace": "edge", "sectionName": "https"}],
    "hostnames": ["llm.example.com"],
}
SCALING = {"minReplicas": 2, "maxReplicas": 6, "targetCPUUtilizationPercentage": 60}


def seen(*objects: dict[str, Any], serves: tuple[str, ...] = ("HTTPRoute", SCALER)) -> Observed:
    """Return a cluster in which these objects live."""
    live = {ObjectKey(each["kind"], each["metadata"]["name"]): each for each in objects}
    return Observed(now=NOW, objects=live, serves=frozenset(serves))


def found(plan: ServicePlan, kind: str, name: str = "demo-router") -> list[dict[str, Any]]:
    return [each for each in plan.apply if (each["kind"], each["metadata"]["name"]) == (kind, name)]


def conditions(plan: ServicePlan) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in plan.status["conditions"]}


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize(
    "router",
    [
        {"service": {"type": "NodePort", "externalTrafficPolicy": "Local"}},
        {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]}},
        {"autoscaling": SCALING},
    ],
    ids=["nodes", "balancer", "autoscaling"],
)
def test_kubernetes_takes_every_object(
    make_plan: MakePlan, router: dict[str, Any], version: str
) -> None:
    for item in make_plan(seen(), router=router).apply:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_service_is_as_it_is_asked_for(make_plan: MakePlan) -> None:
    given = {
        "type": "LoadBalancer",
        "annotations": {"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"},
        "labels": {"team": "search"},
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
    }
    [service] = found(make_plan(router={"service": given}), "Service")
    meta = service["metadata"]
    spec = service["spec"]
    assert meta["annotations"] == given["annotations"]
    assert meta["labels"]["team"] == "search"
    assert meta["labels"]["app.kubernetes.io/component"] == "router"
    for name in ("type", "loadBalancerClass", "loadBalancerSourceRanges", "externalTrafficPolicy"):
        assert spec[name] == given[name], name
    assert [port["name"] for port in spec["ports"]] == ["http", "grpc"]


def test_a_service_of_which_nothing_is_asked_says_nothing_of_it(make_plan: MakePlan) -> None:
    [service] = found(make_plan(), "Service")
    assert service["spec"].keys() == {"selector", "ports", "ipFamilyPolicy"}
    assert "annotations" not in service["metadata"]


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ({"loadBalancerClass": "x"}, "loadBalancerClass: loadBalancerClass is only for load"),
        ({"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}, "set type to LoadBal"),
        ({"externalTrafficPolicy": "Local"}, "set type to LoadBalancer or NodePort"),
        ({"type": "ExternalName"}, "must be one of ClusterIP, NodePort, LoadBalancer"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "are the operator's own keys"),
    ],
)
def test_a_service_that_cannot_be_is_refused(
    make_plan: MakePlan, service: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidManifest, match=words) as refused:
        make_plan(router={"service": service})
    assert "spec.router.service" in str(refused.value)


def test_a_gateway_has_a_route_to_the_routers(make_plan: MakePlan) -> None:
    plan = make_plan(seen(), router={"gateway": GATEWAY})
    [route] = found(plan, "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == GATEWAY["parentRefs"]
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "demo-router", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}, "a gateway's own default would end streams"
    condition = conditions(plan)["RouteAccepted"]
    assert (condition["status"], condition["reason"]) == ("False", "Pending")
    assert "Gateway public" in condition["message"]


def test_without_gateway_api_a_condition_says_what_to_install(make_plan: MakePlan) -> None:
    plan = make_plan(seen(serves=()), router={"gateway": GATEWAY})
    assert not found(plan, "HTTPRoute")
    condition = conditions(plan)["RouteAccepted"]
    assert (condition["status"], condition["reason"]) == ("False", "KindsAbsent")
    assert "install Gateway API" in condition["message"]
    assert "spec.router.gateway" in condition["message"]


def test_without_the_field_there_is_neither_route_nor_condition(make_plan: MakePlan) -> None:
    plan = make_plan(seen())
    assert not found(plan, "HTTPRoute")
    assert "RouteAccepted" not in conditions(plan)


def test_the_route_goes_when_the_field_goes(make_plan: MakePlan) -> None:
    [route] = found(make_plan(seen(), router={"gateway": GATEWAY}), "HTTPRoute")
    later = make_plan(seen(route))
    assert [each["kind"] for each in later.delete] == ["HTTPRoute"]


@pytest.mark.parametrize(
    ("answers", "status", "reason", "words"),
    [
        ([("Accepted", "True", "Accepted", "")], "True", "Accepted", "by Gateway public"),
        (
            [("Accepted", "False", "NoMatchingListenerHostname", "no listener has the name")],
            *("False", "NoMatchingListenerHostname", "no listener has the name"),
        ),
        (
            [
                ("Accepted", "True", "Accepted", ""),
                ("ResolvedRefs", "False", "RefNotPermitted", ""),
            ],
            *("False", "RefNotPermitted", "RefNotPermitted"),
        ),
    ],
)
def test_a_condition_says_what_the_gateway_answers(
    make_plan: MakePlan,
    answers: list[tuple[str, str, str, str]],
    status: str,
    reason: str,
    words: str,
) -> None:
    names = ("type", "status", "reason", "message")
    listed = [dict(zip(names, answer, strict=True)) for answer in answers]
    [route] = found(make_plan(seen(), router={"gateway": GATEWAY}), "HTTPRoute")
    route |= {"status": {"parents": [{"parentRef": {"name": "public"}, "conditions": listed}]}}
    condition = conditions(make_plan(seen(route), router={"gateway": GATEWAY}))["RouteAccepted"]
    assert (condition["status"], condition["reason"]) == (status, reason)
    assert words in condition["message"]


def test_routers_follow_their_load(make_plan: MakePlan) -> None:
    [scaler] = found(make_plan(seen(), router={"autoscaling": SCALING}), SCALER)
    spec = scaler["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo-router"}
    assert spec["scaleTargetRef"] == target
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
    [metric] = spec["metrics"]
    assert metric["resource"]["target"] == {"type": "Utilization", "averageUtilization": 60}


def with_replicas(deployment: dict[str, Any], number: int) -> dict[str, Any]:
    return {**deployment, "spec": deployment["spec"] | {"replicas": number}}


def test_the_number_of_routers_is_left_to_the_autoscaler(make_plan: MakePlan) -> None:
    router = {"replicas": 3, "autoscaling": SCALING}
    first = make_plan(seen(), router=router)
    [deployment] = found(first, "Deployment")
    assert deployment["spec"]["replicas"] == 3, "where they begin"

    later = make_plan(seen(with_replicas(deployment, 5)), router=router)
    [scaled] = found(later, "Deployment")
    assert "replicas" not in scaled["spec"]
    assert "rolling out router" in conditions(later)["Progressing"]["message"]
    assert found(later, "PodDisruptionBudget")


def test_routers_come_back_from_below_the_bounds(make_plan: MakePlan) -> None:
    """A HorizontalPodAutoscaler leaves a Deployment alone that has no pods."""
    router = {"autoscaling": SCALING}
    [deployment] = found(make_plan(seen(), router=router), "Deployment")
    later = make_plan(seen(with_replicas(deployment, 0)), router=router)
    assert found(later, "Deployment")[0]["spec"]["replicas"] == 2


def test_how_many_routers_there_are_changes_no_pod(make_plan: MakePlan) -> None:
    """Quotas are split by the most routers that there may be, not by those of this moment."""
    spec = {"router": {"autoscaling": SCALING}, "tenants": {"secretName": "keys"}}
    first = make_plan(seen(), **spec)
    [deployment] = found(first, "Deployment")
    later = make_plan(seen(with_replicas(deployment, 5)), **spec)
    assert found(later, "Deployment")[0]["spec"]["template"] == deployment["spec"]["template"]
    config = yaml.safe_load(found(later, "ConfigMap")[0]["data"]["router.yaml"])
    assert config["tenants"]["share"] == pytest.approx(1 / 6)


def test_a_plan_prints_what_is_asked_for(
    manifest: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.yaml"
    made = manifest(router={"gateway": GATEWAY, "autoscaling": SCALING})
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    assert main(["plan", "-f", str(path)]) == 0
    kinds = {each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)}
    assert {"HTTPRoute", SCALER} <= kinds
