"""Monitors, alerts and who may scrape."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from ullage_common.process.metrics import metric_names
from ullage_engine import metric_names as engine_names
from ullage_operator.api.spec import Settings, parse
from ullage_operator.conditions.conditions import MONITORING, cluster_conditions
from ullage_operator.controller.plan import Observed, plan
from ullage_operator.manifests.manifests import from_operator
from ullage_router import metric_names as router_names

RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
ALL = frozenset(MONITORING)
OF_ENGINES = {
    "UllageWorkersRestart",
    "UllageEngineOutOfMemory",
    "UllageNonFiniteLogits",
    "UllageKVTierFails",
    "UllagePrefixCacheMisses",
}
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
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "models/demo" in rule["annotations"]["summary"]


def test_alerts_are_about_this_services_pods_only(make_plan):
    found = rules(make_plan(observed(), pools={"large": {}}))
    patterns = {r: {*re.findall('pod=~"([^"]+)"', rule["expr"])} for r, rule in found.items()}
    [engines] = patterns["UllageWorkersRestart"]
    assert {name for name, used in patterns.items() if used == {engines}} == OF_ENGINES
    for name in ("demo-single-0", "demo-large-12", "demo-single-next-0"):
        assert re.fullmatch(engines, name)
    [routers] = {each for name in patterns.keys() - OF_ENGINES for each in patterns[name]}
    # Kubernetes cuts a long name, and the dash with it, before it adds five letters.
    for name in ("demo-router-6c9f8d7b5-x2x4z", "demo-router-6c9f8d7x2x4z"):
        assert re.fullmatch(routers, name)
    of_others = ("demo-big-single-0", "demo-single-single-0", "demo-router-single-0")
    for name in (*of_others, "demo-router-router-6c9f8d7b5-x2x4z"):
        assert not re.fullmatch(engines, name) and not re.fullmatch(routers, name)


def test_every_metric_of_an_alert_is_one_that_pods_export(make_plan):
    exported = {
        name.exposed + suffix
        for module in (router_names, engine_names)
        for name in metric_names(module)
        for suffix in ("", "_bucket")
    }
    text = " ".join(rule["expr"] for rule in rules(make_plan(observed())).values())
    used = set(re.findall(r"ullage_\w+", text))
    assert len(used) == 11
    assert used <= exported


def test_labels_of_people_stand_under_those_of_the_operator(make_plan):
    wanted = {"labels": {"release": "prometheus"}}
    both = {"podMonitor": wanted, "prometheusRule": wanted}
    made = make_plan(observed(), observability=both).apply
    for obj in [obj for obj in made if obj["kind"] in MONITORING]:
        labels = obj["metadata"]["labels"]
        assert labels["release"] == "prometheus"
        assert labels["app.kubernetes.io/managed-by"] == "ullage-operator"


def series(name, values, **labels):
    """Samples every minute of a pod's metric."""
    pod = "demo-router-6c9f8d7b5-x2x4z" if "router" in name else "demo-single-0"
    text = ",".join(
        f'{key}="{value}"' for key, value in {"namespace": "models", "pod": pod, **labels}.items()
    )
    return {"series": f"{name}{{{text}}}", "values": values}


def histogram(name, slow_until):
    """Ten requests a minute, which take between 10 and 20 s up to a minute, and less than 1 s
    afterwards."""
    fast = f"0x{slow_until} 0+10x60"
    every = f"0+10x{slow_until + 61}"
    buckets = {"1": fast, "10": fast, "20": every, "+Inf": every}
    return [series(f"{name}_bucket", values, le=le) for le, values in buckets.items()]


LABELS = {
    "UllageServiceAbsent": {"namespace": "models"},
    "UllageKVTierFails": {"tier": "file", "status": "error"},
}
"""Those that an alert has of what it is about."""
FIRES: dict[str, list[dict[str, str]]] = {
    "UllageServiceAbsent": [series("ullage_router_inflight_requests", "_x30 1x60")],
    "UllageServiceErrors": [
        series("ullage_router_requests_total", "0+1x30 30x60", code="503"),
        series("ullage_router_requests_total", "0+20x90", code="200"),
    ],
    "UllageServiceFirstTokenLate": histogram("ullage_router_ttft_seconds", 30),
    "UllageServiceLate": histogram("ullage_router_e2e_seconds", 30),
    "UllageEnginesSilent": [series("ullage_router_reports_missed_total", "0+1x30 30x60")],
    "UllageWorkersRestart": [series("ullage_worker_restarts_total", "0+1x30 30x60")],
    "UllageEngineOutOfMemory": [series("ullage_oom_events_total", "0x10 1x80")],
    "UllageNonFiniteLogits": [series("ullage_nonfinite_logits_total", "0x10 3x80")],
    "UllageKVTierFails": [
        series("ullage_kv_tier_failures_total", "0+50x30 1500x60", tier="file", status="error")
    ],
    "UllagePrefixCacheMisses": [
        series("ullage_prefix_cache_hits_tokens_total", "0+30000x30 900000+90000x60"),
        series("ullage_prefix_cache_queries_tokens_total", "0+100000x90"),
    ],
}
"""What makes each alert fire within 20 minutes; all is well from the 30th on."""


def test_every_alert_has_its_runbook(make_plan):
    for name, rule in rules(make_plan(observed())).items():
        page, anchor = rule["annotations"]["runbook"].split("#")
        assert anchor == name.lower()
        assert f"\n## {name}\n" in (RUNBOOKS / page).read_text()


def test_every_alert_fires_and_clears(make_plan, promtool, tmp_path):
    found = rules(make_plan(observed(), slo={"ttftP95": "5s", "e2eP95": "5s"}))
    assert found.keys() == FIRES.keys()
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "demo", "rules": list(found.values())}]})
    )
    tests = []
    for name, samples in FIRES.items():
        rule = found[name]
        labels = LABELS.get(name, {})
        alert = {"exp_labels": labels | rule["labels"], "exp_annotations": rule["annotations"]}
        at = [(20, [alert]), (60, [])]
        tests.append(
            {
                "interval": "1m",
                "input_series": samples,
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected}
                    for minute, expected in at
                ],
            }
        )
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


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
