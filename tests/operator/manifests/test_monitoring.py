"""Monitors and who may scrape."""

import re
from datetime import UTC, datetime

import pytest

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.conditions import MONITORING, cluster_conditions
from ullage_operator.manifests.manifests import from_operator
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan

ALL = frozenset(MONITORING)
OFF = {"podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False}}
OPERATOR = from_operator(9090, Settings())
TEAM = {"podSelector": {"matchLabels": {"team": "x"}}}


def observed(serves=ALL):
    return Observed(now=datetime.now(UTC), serves=serves)


def kinds(plan):
    return [obj["kind"] for obj in plan.apply if obj["kind"] in MONITORING]


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


def test_labels_of_people_stand_under_those_of_the_operator(make_plan):
    wanted = {"labels": {"release": "prometheus"}}
    both = {"podMonitor": wanted, "prometheusRule": wanted}
    made = make_plan(observed(), observability=both).apply
    for obj in [obj for obj in made if obj["kind"] in MONITORING]:
        labels = obj["metadata"]["labels"]
        assert labels["release"] == "prometheus"
        assert labels["app.kubernetes.io/managed-by"] == "ullage-operator"


def test_series_say_whose_they_are_as_dashboards_ask(make_plan):
    made = make_plan(observed()).apply
    pods = {
        obj["metadata"]["name"]: obj for obj in made if obj["kind"] in ("Deployment", "StatefulSet")
    }
    monitors = [obj for obj in made if obj["kind"] == "PodMonitor"]
    assert monitors
    assert pods
    for monitor in monitors:
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        [relabeling] = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "llmservice"
        [label] = relabeling["sourceLabels"]
        prefix = "__meta_kubernetes_pod_label_"
        for pod in pods.values():
            labels = pod["spec"]["template"]["metadata"]["labels"]
            read = {
                prefix + re.sub("[^a-zA-Z0-9]", "_", name): each for name, each in labels.items()
            }
            assert read[label] == "demo"


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
