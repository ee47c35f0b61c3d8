"""Monitors, alerts and who may scrape."""

import re
from datetime import UTC, datetime

import pytest

from ullage_engine.server.metrics import EngineMetrics
from ullage_operator.api.spec import Settings, parse
from ullage_operator.conditions.conditions import MONITORING, cluster_conditions
from ullage_operator.controller.plan import Observed, plan
from ullage_operator.manifests.manifests import from_operator
from ullage_router.telemetry.metrics import Metrics

ALL = frozenset(MONITORING)
OFF = {"podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False}}
OPERATOR = from_operator(9090, Settings())
TEAM = {"podSelector": {"matchLabels": {"team": "x"}}}


def observed(serves=ALL):
    return Observed(now=datetime.now(UTC), serves=serves)


def kinds(plan):
    return [obj["kind"] for obj in plan.apply if obj["kind"] in MONITORING]


def rules(plan):
    (made,) = [obj for obj in plan.apply if obj["kind"] == "PrometheusRule"]
    (group,) = made["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


@pytest.mark.parametrize(
    ("serves", "observability", "made"),
    [
        (ALL, {}, ["PodMonitor", "PodMonitor", "PrometheusRule"]),
        (frozenset(), {}, []),
        ({"PodMonitor"}, {}, ["PodMonitor", "PodMonitor"]),
        ({"PrometheusRule"}, {}, ["PrometheusRule"]),
        (ALL, OFF, []),
    ],
)
def test_what_the_cluster_knows_and_the_service_wants(make_plan, serves, observability, made):
    assert kinds(make_plan(observed(serves), observability=observability)) == made


def test_the_alerts_are_about_the_slo(make_plan):
    slo = {"ttftP95": "2500ms", "e2eP95": "1m", "errorRate": 0.01}
    found = rules(make_plan(observed(), slo=slo))
    assert found["UllageServiceFirstTokenLate"]["expr"].endswith("> 2.5")
    assert found["UllageServiceLate"]["expr"].endswith("> 60")
    assert found["UllageServiceErrors"]["expr"].endswith("> 0.01")
    for rule in found.values():
        assert re.search(r'namespace="models",pod=~"\(?demo-', rule["expr"])
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "models/demo" in rule["annotations"]["summary"]


def test_alerts_are_about_this_services_pods_only(make_plan):
    found = rules(make_plan(observed(), pools={"large": {}}))
    patterns = {r: re.findall('pod=~"([^"]+)"', rule["expr"])[0] for r, rule in found.items()}
    engines = patterns.pop("UllageWorkersRestart")
    for name in ("demo-single-0", "demo-large-12", "demo-single-next-0"):
        assert re.fullmatch(engines, name)
    [routers] = set(patterns.values())
    # Kubernetes cuts a long name, and the dash with it, before it adds five letters.
    for name in ("demo-router-6c9f8d7b5-x2x4z", "demo-router-6c9f8d7x2x4z"):
        assert re.fullmatch(routers, name)
    of_others = ("demo-big-single-0", "demo-single-single-0", "demo-router-single-0")
    for name in (*of_others, "demo-router-router-6c9f8d7b5-x2x4z"):
        assert not re.fullmatch(engines, name) and not re.fullmatch(routers, name)


def test_every_metric_of_an_alert_is_one_that_pods_export(make_plan):
    router, engine = Metrics(), EngineMetrics("m")
    router.watch("inflight_requests", "as the service has it", float)
    exported = {
        name
        for registry in (router.registry, engine.registry)
        for family in registry.collect()
        for suffix in ("", "_total", "_bucket")
        for name in [family.name + suffix]
    }
    text = " ".join(rule["expr"] for rule in rules(make_plan(observed())).values())
    used = set(re.findall(r"ullage_\w+", text))
    assert len(used) == 5
    assert used <= exported


def test_labels_of_people_stand_under_those_of_the_operator(make_plan):
    wanted = {"labels": {"release": "prometheus"}}
    both = {"podMonitor": wanted, "prometheusRule": wanted}
    made = make_plan(observed(), observability=both).apply
    for obj in [obj for obj in made if obj["kind"] in MONITORING]:
        labels = obj["metadata"]["labels"]
        assert labels["release"] == "prometheus"
        assert labels["app.kubernetes.io/managed-by"] == "ullage-operator"


def scraping(plan):
    """For each NetworkPolicy the rules that let others than the operator reach the metrics port."""
    return {
        obj["metadata"]["name"]: [
            rule
            for rule in obj["spec"]["ingress"]
            if 9090 in [port["port"] for port in rule["ports"]] and rule != OPERATOR
        ]
        for obj in plan.apply
        if obj["kind"] == "NetworkPolicy"
    }


def test_only_who_is_named_may_scrape(make_plan):
    for named in ([TEAM], [TEAM, {"namespaceSelector": {}}]):
        found = scraping(make_plan(observability={"metricsFrom": named}))
        assert set(found) == {"demo-router", "demo-engine"}
        assert all([rule["from"] for rule in rules] == [named] for rules in found.values())


def test_by_default_the_operators_metrics_namespace_may_scrape(make_plan, manifest):
    label = {"kubernetes.io/metadata.name": "monitoring"}
    peers = [{"namespaceSelector": {"matchLabels": label}}]
    for rules in scraping(make_plan()).values():
        assert [rule["from"] for rule in rules] == [peers]
    nowhere = Settings.from_env({"ULLAGE_METRICS_NAMESPACE": ""})
    found = scraping(plan(parse(manifest()), observed(), nowhere))
    assert found == {"demo-router": [], "demo-engine": []}


def test_where_nobody_is_named_nobody_may_scrape(make_plan):
    """An empty `from` would let everybody in."""
    found = scraping(make_plan(observability={"metricsFrom": []}))
    assert found == {"demo-router": [], "demo-engine": []}


@pytest.mark.parametrize(
    ("serves", "missing", "said"),
    [
        (ALL, (), {"MonitoringAvailable": (True, "Served")}),
        (
            frozenset({"PodMonitor"}),
            ("patch services in namespace n",),
            {
                "MonitoringAvailable": (False, "KindsAbsent"),
                "MissingPermission": (True, "Forbidden"),
            },
        ),
    ],
)
def test_conditions_about_the_cluster(serves, missing, said):
    found = {each.type: (each.holds, each.reason) for each in cluster_conditions(serves, missing)}
    assert found == said
    for each in cluster_conditions(serves, missing):
        if each.type == "MissingPermission":
            assert "patch services in namespace n" in each.message
        elif not each.holds:
            assert "PrometheusRule" in each.message
            assert "PodMonitor " not in each.message
