"""What is recorded of a service, and its alerts, by promtool: each fires when it should, and
clears."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ullage_common.process.metrics import metric_names
from ullage_engine import metric_names as engine_names
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.conditions import MONITORING
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan
from ullage_router import metric_names as router_names

RUNBOOK = Path(__file__).parents[3] / "docs" / "runbooks" / "service.md"
LIVE = Path(__file__).parents[2] / "observability"
OF_ENGINES = {
    "UllageEnginesUneven",
    "UllageOutputLengthsDrift",
    "UllageStartProofFailures",
    "UllageWorkersRestart",
    "UllageEngineOutOfMemory",
    "UllageCollectiveErrors",
    "UllageNonFiniteLogits",
    "UllageKVTierFails",
    "UllagePrefixCacheMisses",
    "UllageBoostOff",
    "UllageGPUDriverSilent",
}
OF_OBJECTIVES = {"UllageServiceErrors", "UllageServiceFirstTokenLate", "UllageServiceLate"}
"""Alerts that read only what is recorded."""


@pytest.fixture
def make_groups(manifest):
    """The groups of rules of a minimal service; keywords add fields to its spec."""

    def groups(settings=None, **spec):
        seen = Observed(now=datetime.now(UTC), serves=frozenset(MONITORING))
        made = plan(parse(manifest(**spec)), seen, settings or Settings()).apply
        [rule] = [obj for obj in made if obj["kind"] == "PrometheusRule"]
        return rule["spec"]["groups"]

    return groups


def alerts_of(groups):
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def recorded(groups, window):
    """Expressions by objective."""
    return {
        rule["labels"]["objective"]: rule["expr"]
        for group in groups
        for rule in group["rules"]
        if rule.get("record") == f"ullage:slo_burn:rate{window}"
    }


def test_what_is_recorded_is_about_the_slo(make_groups):
    groups = make_groups(slo={"ttftP95": "2500ms", "e2eP95": "25s", "errorPercent": 1})
    found = recorded(groups, "1h")
    assert found["errors"].endswith("/ 0.01")
    assert re.findall('le="([^"]+)"', found["ttft_p95"]) == ["2.5"]
    assert re.findall('le="([^"]+)"', found["e2e_p95"]) == ["30.0", "20.0"]
    assert re.findall('le="([^"]+)"', found["e2e_p99"]) == ["60.0", "30.0"]
    assert found["e2e_p999"].endswith("/ 0.001")
    assert all(found.keys() == recorded(groups, each).keys() for each in ("5m", "30m", "6h", "3d"))
    for rule in alerts_of(groups).values():
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].startswith("models/demo: ")


def test_alerts_are_about_this_services_pods_only(make_groups):
    groups = make_groups(pools={"large": {}})
    expressions = {name: rule["expr"] for name, rule in alerts_of(groups).items()}
    assert all('namespace="models"' in each for each in expressions.values())
    patterns = {name: {*re.findall('pod=~"([^"]+)"', each)} for name, each in expressions.items()}
    [engines] = patterns["UllageWorkersRestart"]
    assert {name for name, used in patterns.items() if used == {engines}} == OF_ENGINES
    for name in ("demo-single-0", "demo-large-12", "demo-single-next-0"):
        assert re.fullmatch(engines, name)
    assert {name for name, used in patterns.items() if not used} == OF_OBJECTIVES
    [routers] = {*re.findall('pod=~"([^"]+)"', " ".join(recorded(groups, "5m").values()))}
    assert {each for used in patterns.values() for each in used} == {routers, engines}
    # Kubernetes cuts a long name, and the dash with it, before it adds five letters.
    for name in ("demo-router-6c9f8d7b5-x2x4z", "demo-router-6c9f8d7x2x4z"):
        assert re.fullmatch(routers, name)
    of_others = ("demo-big-single-0", "demo-single-single-0", "demo-router-single-0")
    for name in (*of_others, "demo-router-router-6c9f8d7b5-x2x4z"):
        assert not re.fullmatch(engines, name)
        assert not re.fullmatch(routers, name)


def test_every_metric_of_a_rule_is_one_that_pods_export(make_groups):
    exported = {
        name.exposed + suffix
        for module in (router_names, engine_names)
        for name in metric_names(module)
        for suffix in ("", "_bucket", "_sum", "_count")
    }
    text = " ".join(rule["expr"] for group in make_groups() for rule in group["rules"])
    used = set(re.findall(r"ullage_\w+", text))
    assert len(used) > 15
    assert used <= exported
    for histogram in (router_names.TTFT, router_names.E2E, router_names.STREAM_SPEED):
        bounds = {f"{bound}" for bound in histogram.buckets} | {"+Inf"}
        assert {*re.findall(f'{histogram.name}_bucket[^}}]*le="([^"]+)"', text)} <= bounds


class Case(NamedTuple):
    """Series that make an alert fire, and minutes at which it does and does not."""

    alert: str
    series: list[dict[str, str]]
    labels: Sequence[dict[str, str]] = ({},)
    """Labels of each of the alerts that fire, of what they are about."""
    fires: int = 20
    is_clear: int = 60
    interval: str = "1m"


ROUTER = "demo-router-6c9f8d7b5-x2x4z"


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """Samples of a pod's metric."""
    pod = ROUTER if "router" in name else "demo-single-0"
    shown = {"namespace": "models", "pod": pod, **labels}
    text = ",".join(f'{key}="{value}"' for key, value in shown.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def late(name: str, bounds: list[str], until: int = 30, in_time: int = 0) -> list[dict[str, str]]:
    """A hundred requests a minute, of which up to a minute only so many are within the bounds."""
    values = f"0+{in_time}x{until} {in_time * until}+100x60"
    every = f"0+100x{until} {100 * until}+100x60"
    buckets = [series(f"{name}_bucket", values, le=bound) for bound in bounds]
    count = series(f"{name}_count", every)
    return [*buckets, count, series("ullage_router_requests_total", every, code="200")]


def objectives(*names: str) -> list[dict[str, str]]:
    return [{"namespace": "models", "objective": name} for name in names]


FAILING = [
    series("ullage_router_requests_total", "0+10x30 300x60", code="503"),
    series("ullage_router_requests_total", "0x30 0+10x60", code="200"),
]
CASES = [
    Case("UllageServiceErrors", FAILING, objectives("errors")),
    Case(
        "UllageServiceFirstTokenLate",
        late("ullage_router_ttft_seconds", ["5.0"], in_time=90),
        objectives("ttft_p95"),
    ),
    Case(
        "UllageServiceLate",
        late("ullage_router_e2e_seconds", ["2.5", "5.0"]),
        objectives("e2e_p95"),
    ),
    Case(
        "UllageServiceTailLate",
        late("ullage_router_e2e_seconds", ["10.0", "20.0"], until=50, in_time=98),
        objectives("e2e_p99", "e2e_p999"),
        fires=40,
        is_clear=90,
    ),
    Case("UllageBudgetBurnsFast", FAILING, objectives("errors"), is_clear=70),
    Case(
        "UllageServiceAbsent",
        [series("ullage_router_inflight_requests", "_x30 1x60")],
        [{"namespace": "models"}],
    ),
    Case(
        "UllageHeadroomExhausted",
        [
            series("ullage_router_refusals_total", "0+2x120 240x240", reason="KV_HEADROOM"),
            series("ullage_router_refusals_total", "0+9x360", reason="NO_ENGINE"),
            series("ullage_router_requests_total", "0+20x360", code="200"),
        ],
        interval="15s",
    ),
    Case("UllageQueueSaturated", [series("ullage_router_queue_requests", "250x30 200x60")]),
    Case("UllageQueueSaturated", [series("ullage_router_queue_bytes", "6e10x30 5e10x60")]),
    Case(
        "UllageStreamsSlow",
        [
            series("ullage_router_stream_tokens_per_second_bucket", "0+1x30 30x60", le="4.0"),
            series("ullage_router_stream_tokens_per_second_bucket", "0+10x90", le="+Inf"),
        ],
    ),
    Case("UllageEnginesSilent", [series("ullage_router_reports_missed_total", "0+1x30 30x60")]),
    Case("UllageEnginesStale", [series("ullage_router_stale_engines", "1x30 0x60")]),
    Case(
        "UllageEnginesDiffer",
        [
            series("ullage_router_fingerprints", "2x60 1x60", pool="single"),
            series("ullage_router_fingerprints", "1x120", pool="large"),
        ],
        [{"pool": "single"}],
        fires=40,
        is_clear=90,
    ),
    Case(
        "UllageCertificateExpires",
        [
            series("ullage_certificate_expiry_timestamp_seconds", "86400x30 864000x60"),
            series("ullage_router_certificate_expiry_timestamp_seconds", "0x90"),
        ],
        [{"pod": "demo-single-0"}],
    ),
    Case(
        "UllageCertificateUnusable",
        [series("ullage_router_certificate_problems", "1x30 0x60")],
        [{"pod": "demo-router-6c9f8d7b5-x2x4z"}],
    ),
    Case(
        "UllageFileStoreFull",
        [
            series("ullage_router_file_bytes", "95x30 80x60"),
            series("ullage_router_file_bytes_limit", "100x90"),
        ],
    ),
    Case(
        "UllageFileStoreFull",
        [
            series("ullage_router_files", "95x30 80x60"),
            series("ullage_router_files_limit", "100x90"),
        ],
    ),
    Case("UllageFileStoreClosed", [series("ullage_router_file_store_open", "0x30 1x60")]),
    Case(
        "UllageEnginesUneven",
        [
            series("ullage_requests_running", "20x40 10x60", pod="demo-single-0"),
            series("ullage_requests_running", "9x100", pod="demo-single-1"),
            # A pool is not compared with another, and few requests are not compared at all.
            series("ullage_requests_running", "3x100", pod="demo-large-0"),
            series("ullage_requests_running", "0x100", pod="demo-large-1"),
            series("ullage_kv_used_ratio", "0.9x40 0.4x60", pod="demo-single-0"),
            series("ullage_kv_used_ratio", "0.1x100", pod="demo-single-1"),
        ],
        [{"pool": "single", "measure": measure} for measure in ("requests", "kv")],
        fires=30,
        is_clear=60,
    ),
    Case(
        "UllageRouterSaturated",
        [
            series("process_cpu_seconds_total", "0+57x30 1710+30x60", pod=ROUTER),
            series("process_cpu_seconds_total", "0+600x90", pod="demo-single-0"),
        ],
        [{"pod": ROUTER}],
    ),
    Case(
        "UllageCPUShort",
        [
            series("ullage_cpu_waiting_seconds_total", "0+40x40 1600+20x60"),
            series("ullage_router_cpu_waiting_seconds_total", "0+40x40 1600+20x60"),
        ],
        [{"pod": "demo-single-0"}, {"pod": ROUTER}],
        fires=30,
    ),
    Case("UllageWorkersRestart", [series("ullage_worker_restarts_total", "0+1x30 30x60")]),
    Case("UllageEngineOutOfMemory", [series("ullage_oom_events_total", "0x10 1x80")]),
    Case("UllageCollectiveErrors", [series("ullage_collective_errors_total", "0x10 1x80")]),
    Case("UllageStartProofFailures", [series("ullage_start_proof_failures_total", "0x10 1x80")]),
    Case("UllageNonFiniteLogits", [series("ullage_nonfinite_logits_total", "0x10 3x80")]),
    Case(
        "UllageKVTierFails",
        [series("ullage_kv_tier_failures_total", "0+50x30 1500x60", tier="file", status="timeout")],
        [{"tier": "file", "status": "timeout"}],
    ),
    Case(
        "UllagePrefixCacheMisses",
        [
            series("ullage_prefix_cache_hits_tokens_total", "0+30000x30 900000+90000x60"),
            series("ullage_prefix_cache_queries_tokens_total", "0+100000x90"),
        ],
    ),
    Case(
        "UllageBoostOff",
        [series("ullage_engine_boost_off", "1x30 0x60")],
        [{"pod": "demo-single-0"}],
    ),
    Case(
        "UllageGPUDriverSilent",
        [series("ullage_gpu_driver_silent", "1x30 0x60")],
        [{"pod": "demo-single-0"}],
    ),
]
DAYS = 24 * 60
SLOW = Case(
    "UllageBudgetBurnsSlowly",
    [
        series("ullage_router_requests_total", "0+4x144 576x48", code="500"),
        series("ullage_router_requests_total", "0+196x192", code="200"),
    ],
    objectives("errors"),
    fires=3 * DAYS,
    is_clear=3 * DAYS + 8 * 60,
    interval="30m",
)


DRIFT = Case(
    "UllageOutputLengthsDrift",
    [
        series("ullage_request_generation_tokens_sum", "0+12000x48 576000+24000x24"),
        series("ullage_request_generation_tokens_count", "0+60x72"),
    ],
    fires=26 * 60,
    is_clear=23 * 60,
    interval="30m",
)


def promtool_test(case: Case, rule: dict[str, Any]) -> dict[str, Any]:
    alerts = [
        {"exp_labels": labels | rule["labels"], "exp_annotations": rule["annotations"]}
        for labels in case.labels
    ]
    at = {case.fires: alerts, case.is_clear: []}
    return {
        "interval": case.interval,
        "input_series": [*case.series],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": expected}
            for minute, expected in at.items()
        ],
    }


def in_few(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts tests of different metrics together, as each takes its time."""
    few: list[tuple[dict[str, Any], set[str]]] = []
    for test in tests:
        metrics = {each["series"].partition("{")[0] for each in test["input_series"]}
        fitting = (
            both
            for both in few
            if both[0]["interval"] == test["interval"] and not both[1] & metrics
        )
        found = next(fitting, None)
        if found is None:
            few.append((test, metrics))
            continue
        found[0]["input_series"] += test["input_series"]
        found[0]["alert_rule_test"] += test["alert_rule_test"]
        found[1].update(metrics)
    return [test for test, _ in few]


def test_every_alert_fires_and_clears(make_groups, promtool, tmp_path):
    groups = make_groups(slo={"ttftP95": "5s", "e2eP95": "5s"})
    alerts = alerts_of(groups)
    assert alerts.keys() == {case.alert for case in (*CASES, SLOW, DRIFT)}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    paths = []
    # As seldom as the cases allow, for each evaluation of all rules takes its time.
    for name, interval, cases in (
        ("days", "4h", [SLOW]),
        ("hours", "30m", [DRIFT]),
        ("minutes", "5m", CASES),
    ):
        given = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": interval,
            "group_eval_order": [group["name"] for group in groups],
            "tests": in_few([promtool_test(case, alerts[case.alert]) for case in cases]),
        }
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(given))
    checked = promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    done = promtool("test", "rules", *map(str, paths))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_section_and_every_section_its_alert(make_groups):
    alerts = alerts_of(make_groups())
    assert re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE) == [*alerts]
    for name, alert in alerts.items():
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks/service.md#{name.lower()}"
        assert all(alert["annotations"][each].endswith(".") for each in ("summary", "description"))


def test_the_runbook_names_every_alert_that_no_real_fault_has_fired(make_groups):
    fired = set()
    for path in LIVE.glob("test_*_faults.py"):
        fired |= set(re.findall(r'"(Ullage\w+)"', path.read_text()))
    preface = RUNBOOK.read_text().partition("\n## ")[0]
    assert set(re.findall(r"\bUllage\w+", preface)) == alerts_of(make_groups()).keys() - fired


def test_runbooks_may_be_elsewhere(make_groups):
    alerts = alerts_of(make_groups(Settings(runbooks="https://wiki/books")))
    for name, alert in alerts.items():
        found = alert["annotations"]["runbook_url"]
        assert found == f"https://wiki/books/service.md#{name.lower()}"
