"""Alerts of the chart, by promtool: each fires when it should, and clears."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client import CollectorRegistry

from ullage_operator.api.settings import Settings
from ullage_operator.controller.controller import OperatorMetrics
from ullage_operator.kube.informer import WatchMetrics

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ullage"
RUNBOOKS = ROOT / "docs" / "runbooks"
NAMESPACE = "ullage-system"
"""Where `render` installs the chart."""
GPU = 'UUID="a",exported_pod="engine-0"'


class Case(NamedTuple):
    """An alert, samples every 15 s, and a minute at which it fires and one at which it does not."""

    alert: str
    series: dict[str, str]
    fires: float
    is_clear: float
    labels: Sequence[dict[str, str]] = ()
    """Labels of what the alerts are about; none: the GPU's."""


def of_operator(name: str, values: str, **labels: str) -> dict[str, str]:
    shown = {"namespace": NAMESPACE, "pod": "ullage-0", **labels}
    text = ",".join(f'{key}="{value}"' for key, value in shown.items())
    return {f"{name}{{{text}}}": values}


def flat(name: str, high: float, low: float) -> dict[str, str]:
    """Ten minutes high, then low."""
    return {f"{name}{{{GPU}}}": f"{high}x40 {low}x40"}


def memory(used: int) -> dict[str, str]:
    used_series, free_series = (f"DCGM_FI_DEV_FB_{name}{{{GPU}}}" for name in ("USED", "FREE"))
    return {used_series: f"{used}x40 10x40", free_series: f"{100 - used}x40 90x40"}


def step(name: str, before: str = "5x60") -> dict[str, str]:
    """A counter that grows by one after a quarter of an hour."""
    return {f"{name}{{{GPU}}}": f"{before} 6x80"}


def hopper_crc(name: str) -> dict[str, str]:
    """107 errors a second for ten minutes, in one field of the whole GPU."""
    return {f"{name}{{{GPU}}}": "0+1600x40 64000x40"}


def power(draw: str, limit: str) -> dict[str, str]:
    """690 of 700 W for ten minutes, then 400 W."""
    return {f"{draw}{{{GPU}}}": "690x40 400x40", f"{limit}{{{GPU}}}": "700x80"}


LINK = "DCGM_FI_DEV_NVLINK_{}_ERROR_COUNT_TOTAL"
CASES = [
    Case("UllageGPUIdle", flat("DCGM_FI_DEV_GPU_UTIL", 3, 50), 5, 15),
    Case("UllageGPUIdle", flat("DCGM_FI_DEV_GPU_UTIL_RATIO", 0.03, 0.5), 5, 15),
    Case("UllageGPUIdle", {'DCGM_FI_DEV_GPU_UTIL{UUID="a",pod="e"}': "3x40 50x40"}, 5, 15),
    Case("UllageGPUSaturated", flat("DCGM_FI_DEV_GPU_UTIL", 97, 50), 5, 15),
    Case("UllageGPUSaturated", flat("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.97, 0.5), 5, 15),
    Case("UllageGPUMemoryHigh", memory(85), 5, 15),
    Case("UllageGPUMemoryCritical", memory(96), 5, 15),
    Case("UllageGPUMemoryCritical", flat("DCGM_FI_DEV_FB_USED_RATIO", 0.96, 0.1), 5, 15),
    Case("UllageGPUTemperatureHigh", flat("DCGM_FI_DEV_GPU_TEMP", 85, 84), 5, 15),
    Case("UllageGPUTemperatureHigh", flat("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 95, 96), 5, 15),
    Case("UllageGPUTemperatureCritical", flat("DCGM_FI_DEV_GPU_TEMP", 96, 95), 5, 15),
    Case(
        "UllageGPUThrottled",
        {f'DCGM_EXP_CLOCK_EVENTS_COUNT{{clock_event="hw_thermal",{GPU}}}': "2x40 0x40"},
        5,
        15,
    ),
    Case(
        "UllageGPUPowerNearLimit",
        power("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_ENFORCED_POWER_LIMIT"),
        10,
        15,
    ),
    Case(
        "UllageGPUPowerNearLimit",
        power("DCGM_FI_DEV_BOARD_POWER_WATTS", "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"),
        10,
        15,
    ),
    Case("UllageGPUXid", flat("DCGM_FI_DEV_XID_ERRORS", 0, 79), 15, 5),
    Case("UllageGPUXid", {f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}": "_x40 79x60"}, 15, 25),
    Case("UllageGPUECCUncorrectable", flat("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1, 0), 5, 15),
    Case("UllageGPURowRemapFailure", flat("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1, 0), 5, 15),
    Case("UllageNVLinkReplays", step(LINK.format("REPLAY")), 20, 30),
    Case("UllageNVLinkReplays", step("DCGM_FI_DEV_NVLINK_ERROR_DL_REPLAY", "_x60"), 20, 30),
    Case("UllageNVLinkReplays", step("DCGM_FI_DEV_NVLINK_REPLAY_TOTAL"), 20, 30),
    Case("UllageNVLinkRecoveries", step(LINK.format("RECOVERY")), 20, 30),
    Case("UllageNVLinkRecoveries", step("DCGM_FI_DEV_NVLINK_ERROR_DL_RECOVERY"), 20, 30),
    Case("UllageNVLinkRecoveries", step("DCGM_FI_DEV_NVLINK_RECOVERY_TOTAL"), 20, 30),
    Case(
        "UllageNVLinkCRCErrors",
        {
            f"{LINK.format('CRC_FLIT')}{{{GPU}}}": "0+1000x40 40000x40",
            f"{LINK.format('CRC_DATA')}{{{GPU}}}": "0+600x40 24000x40",
        },
        10,
        15,
    ),
    Case("UllageNVLinkCRCErrors", hopper_crc("DCGM_FI_DEV_NVLINK_ERROR_DL_CRC"), 10, 15),
    Case("UllageNVLinkCRCErrors", hopper_crc("DCGM_FI_DEV_NVLINK_CRC_ERROR_TOTAL"), 10, 15),
    Case(
        "UllageNVLinkCRCErrors",
        hopper_crc("DCGM_FI_DEV_NVLINK_ERROR_DL_CRC")
        | {f"{LINK.format(kind)}{{{GPU}}}": "0x80" for kind in ("CRC_FLIT", "CRC_DATA")},
        10,
        15,
    ),
    Case("UllagePCIeReplays", step("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), 20, 30),
]


OBJECTS = "ullage_operator_objects"
RECONCILE = "ullage_operator_reconcile"
OTHERS = [
    Case(
        "UllageGPUsUneven",
        {
            'DCGM_FI_PROF_SM_ACTIVE{UUID="a",exported_pod="engine-0"}': "0.9x160",
            'DCGM_FI_PROF_SM_ACTIVE{UUID="b",exported_pod="engine-0"}': "0.4x80 0.8x80",
            'DCGM_FI_PROF_SM_ACTIVE{UUID="c",exported_pod="engine-1"}': "0.1x160",
        },
        20,
        30,
        [{"engine_pod": "engine-0"}],
    ),
    Case(
        "UllageGPUExporterAbsent",
        {
            'ullage_rank_layers{device="cuda:0",pod="e"}': "16x200",
            f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}}": "_x100 50x100",
        },
        20,
        40,
        [{}],
    ),
    Case(
        "UllageOperatorAbsent",
        of_operator("ullage_operator_leader", "_x80 1x80"),
        15,
        30,
        [{"namespace": NAMESPACE}],
    ),
    Case("UllageNobodyLeads", of_operator("ullage_operator_leader", "0x80 1x80"), 15, 30, [{}]),
    Case(
        "UllageReconcileFails",
        of_operator(f"{RECONCILE}_total", "0+1x160 160x100", result="bug"),
        30,
        60,
        [{}],
    ),
    Case(
        "UllageReconcileSlow",
        {
            **of_operator(f"{RECONCILE}_seconds_bucket", "0x160 0+1x160", le="5.0"),
            **of_operator(f"{RECONCILE}_seconds_bucket", "0+1x320", le="10.0"),
            **of_operator(f"{RECONCILE}_seconds_bucket", "0+1x320", le="+Inf"),
        },
        30,
        60,
        [{}],
    ),
    Case(
        "UllageOperatorIdle",
        {
            **of_operator(OBJECTS, "2x320", kind="LLMService"),
            **of_operator(f"{RECONCILE}_total", "3x160 3+1x160", result="ok"),
        },
        30,
        60,
        [{}],
    ),
    Case(
        "UllageOperatorIdle",
        {
            **of_operator(OBJECTS, "2x320", kind="LLMService"),
            **of_operator(f"{RECONCILE}_total", "_x160 0+1x160", result="ok"),
        },
        30,
        60,
        [{}],
    ),
    Case(
        "UllageOperatorBlind",
        {
            **of_operator(OBJECTS, "0x120 1x120", kind="LLMService"),
            'ullage_router_inflight_requests{namespace="models",pod="demo-router-0"}': "1x240",
        },
        25,
        40,
        [{}],
    ),
    Case(
        "UllageWatchFails",
        of_operator(
            "ullage_operator_watch_restarts_total", "0+1x120 120x200", kind="Pod", reason="denied"
        ),
        25,
        60,
        [{"kind": "Pod", "reason": "denied"}],
    ),
]
ALL = [*CASES, *OTHERS]


def prometheus_rule(render: Any, *values: str) -> dict[str, Any]:
    objects = render("prometheusRule.enabled=true", *values)
    [rule] = [each for each in objects if each["kind"] == "PrometheusRule"]
    return dict(rule["spec"])


@pytest.fixture(scope="session")
def rules(render: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a Prometheus reads of what the chart installs."""
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(prometheus_rule(render)))
    return path


def alerts_of(rules: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load(rules.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_prometheus_takes_all_rules(promtool: Any, rules: Path) -> None:
    done = promtool("check", "rules", str(rules))
    assert done.returncode == 0, done.stdout + done.stderr


def promtool_test(case: Case, alert: dict[str, Any]) -> dict[str, Any]:
    labels = case.labels
    if not labels and "exported_pod" in min(case.series):
        labels = [{"engine_pod": "engine-0", "exported_pod": "engine-0", "UUID": "a"}]
    expected = [
        {"exp_labels": each | alert["labels"], "exp_annotations": alert["annotations"]}
        for each in labels or [{"engine_pod": "e", "pod": "e", "UUID": "a"}]
    ]
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": each} for name, each in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.fires}m", "alertname": case.alert, "exp_alerts": expected},
            {"eval_time": f"{case.is_clear}m", "alertname": case.alert, "exp_alerts": []},
        ],
    }


def test_every_alert_fires_and_clears(promtool: Any, rules: Path, tmp_path: Path) -> None:
    alerts = {each["alert"]: each for each in alerts_of(rules)}
    assert alerts.keys() == {case.alert for case in ALL}
    groups = [each["name"] for each in yaml.safe_load(rules.read_text())["groups"]]
    given = {
        "rule_files": [str(rules)],
        # As seldom as the cases allow, for each evaluation of all rules takes its time.
        "evaluation_interval": "5m",
        "group_eval_order": groups,
        "tests": [promtool_test(case, alerts[case.alert]) for case in ALL],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(given))
    # All in one run, as it takes a second to start.
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_section_and_every_section_its_alert(rules: Path) -> None:
    sections: dict[str, list[str]] = {"gpu.md": [], "operator.md": []}
    for alert in alerts_of(rules):
        page, anchor = alert["annotations"]["runbook_url"].split("#")
        folder, _, name = page.rpartition("/")
        assert (folder, anchor) == ("docs/runbooks", alert["alert"].lower())
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["labels"].keys() == {"severity", "layer"}
        sections[name].append(alert["alert"])
    for name, alerts in sections.items():
        text = (RUNBOOKS / name).read_text()
        assert re.findall("^## (.+)$", text, re.MULTILINE) == alerts


def test_alerts_about_the_operator_are_about_metrics_that_it_has(rules: Path) -> None:
    registry = CollectorRegistry()
    OperatorMetrics(registry, lambda: 0.0).total.labels(result="ok").inc()
    watches = WatchMetrics(registry)
    watches.count(["LLMService"], Counter)
    watches.restarts.labels("Pod", "denied").inc()
    known = {sample.name for metric in registry.collect() for sample in metric.samples}
    used = {
        name
        for each in alerts_of(rules)
        for name in re.findall(r"ullage_operator_\w+", each["expr"])
    }
    assert used
    assert used <= known


def test_runbooks_may_be_elsewhere(render: Any) -> None:
    value = "prometheusRule.runbooks=https://wiki/books/"
    spec = prometheus_rule(render, value)
    urls = [
        rule["annotations"]["runbook_url"]
        for group in spec["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert "https://wiki/books/gpu.md#ullagegpuidle" in urls
    assert all(url.startswith("https://wiki/books/") for url in urls)
    [operator] = [each for each in render(value) if each["kind"] == "Deployment"]
    [container] = operator["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert Settings.from_env(environment).runbooks == "https://wiki/books"


def test_rules_about_the_operator_know_their_namespace(render_values: Any) -> None:
    objects = render_values({"prometheusRule": {"enabled": True, "gpu": False}})
    [rule] = [each for each in objects if each["kind"] == "PrometheusRule"]
    [group] = rule["spec"]["groups"]
    assert {*re.findall('namespace="([^"]+)"', str(group))} == {"system"}
    assert NAMESPACE not in str(group)


FROM_4_9 = {
    *("GPU_UTIL_RATIO", "FB_USED_RATIO", "FB_USED_PERCENT", "FB_CAPACITY_BYTES"),
    *("GPU_TEMP_CELSIUS", "MEMORY_TEMP_CELSIUS", "SM_CLOCK_HERTZ", "MEMORY_CLOCK_HERTZ"),
    *("BOARD_POWER_WATTS", "BOARD_POWER_LIMIT_ENFORCED_WATTS", "XID_ERROR", "PCIE_REPLAY_TOTAL"),
    *("NVLINK_CRC_FLIT_ERROR_TOTAL", "NVLINK_CRC_DATA_ERROR_TOTAL", "NVLINK_CRC_ERROR_TOTAL"),
    *("NVLINK_REPLAY_ERROR_TOTAL", "NVLINK_REPLAY_TOTAL", "NVLINK_RECOVERY_ERROR_TOTAL"),
    *("NVLINK_RECOVERY_TOTAL", "NVLINK_RECOVERY_EVENT_TOTAL", "NVLINK_THROUGHPUT_TOTAL"),
    "ROW_REMAP_UNCORRECTABLE_TOTAL",
}
"""Names that the exporter has since 4.9, or under other settings than ours."""
OF_BLACKWELL = {"NVLINK_COUNT_LINK_RECOVERY_EVENTS"}
"""Fields that an exporter may lose others for, so that ours does not ask for them."""


def test_the_exporter_is_asked_for_every_field_that_rules_read() -> None:
    counters = (CHART / "files" / "dcgm-counters.csv").read_text()
    asked = set(re.findall(r"^DCGM_\w+(?=,)", counters, re.MULTILINE))
    read = set(re.findall(r"\bDCGM_\w+", (CHART / "files" / "rules" / "gpu.yaml").read_text()))
    elsewhere = {f"DCGM_FI_DEV_{name}" for name in FROM_4_9 | OF_BLACKWELL}
    assert elsewhere <= read
    assert read - elsewhere <= asked


def test_the_exporter_is_asked_for_all_that_alerts_read(render_values: Any) -> None:
    values = {"dcgmCounters": {"enabled": True, "namespace": "monitoring"}}
    named = {"fullnameOverride": "ullage", **values}
    [counters_map] = [each for each in render_values(named) if each["kind"] == "ConfigMap"]
    text = counters_map["data"]["dcgm-metrics.csv"]
    counters = {line.split(",")[0] for line in text.splitlines() if line and line[0] != "#"}
    for case in CASES:
        names = {series.split("{")[0] for series in case.series}
        alternatives = [each for each in CASES if each.alert == case.alert]
        assert any(
            {series.split("{")[0] for series in each.series} <= counters for each in alternatives
        ), names
    exporter = yaml.safe_load((CHART / "files" / "dcgm-exporter-values.yaml").read_text())
    [volume] = exporter["extraConfigMapVolumes"]
    [mount] = exporter["extraVolumeMounts"]
    assert volume["configMap"] == {"name": counters_map["metadata"]["name"]}
    assert mount["name"] == volume["name"]
    assert exporter["arguments"] == ["-f", f"{mount['mountPath']}/dcgm-metrics.csv"]
    [interval] = exporter["extraEnv"]
    assert 5000 <= int(interval["value"]) <= 10000
