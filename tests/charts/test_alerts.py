"""Alerts of the chart, by promtool: each fires when it should, and clears."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
GPU = 'UUID="a",exported_pod="engine-0"'


class Case(NamedTuple):
    """An alert, samples every 15 s, and a minute at which it fires and one at which it does not."""

    alert: str
    series: dict[str, str]
    fires: float
    is_clear: float


def flat(name: str, high: float, low: float) -> dict[str, str]:
    """Ten minutes high, then low."""
    return {f"{name}{{{GPU}}}": f"{high}x40 {low}x40"}


def memory(used: int) -> dict[str, str]:
    used_series, free_series = (f"DCGM_FI_DEV_FB_{name}{{{GPU}}}" for name in ("USED", "FREE"))
    return {used_series: f"{used}x40 10x40", free_series: f"{100 - used}x40 90x40"}


def step(name: str, before: str = "5x60") -> dict[str, str]:
    """A counter that grows by one after a quarter of an hour."""
    return {f"{name}{{{GPU}}}": f"{before} 6x80"}


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
    Case("UllageGPUXid", flat("DCGM_FI_DEV_XID_ERRORS", 0, 79), 11, 9),
    Case("UllageGPUXid", {f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}": "_x40 79x60"}, 11, 24),
    Case("UllageGPUECCUncorrectable", flat("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1, 0), 5, 15),
    Case("UllageGPURowRemapFailure", flat("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1, 0), 5, 15),
    Case("UllageNVLinkReplays", step(LINK.format("REPLAY")), 17, 28),
    Case("UllageNVLinkReplays", step("DCGM_FI_DEV_NVLINK_ERROR_DL_REPLAY", "_x60"), 17, 28),
    Case("UllageNVLinkRecoveries", step(LINK.format("RECOVERY")), 17, 28),
    Case(
        "UllageNVLinkCRCErrors",
        {
            f"{LINK.format('CRC_FLIT')}{{{GPU}}}": "0+1000x40 40000x40",
            f"{LINK.format('CRC_DATA')}{{{GPU}}}": "0+600x40 24000x40",
        },
        5,
        15,
    ),
    Case("UllagePCIeReplays", step("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), 17, 28),
]


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
    labels = {"engine_pod": "e", "pod": "e", "UUID": "a"}
    if "exported_pod" in min(case.series):
        labels = {"engine_pod": "engine-0", "exported_pod": "engine-0", "UUID": "a"}
    expected = {"exp_labels": labels | alert["labels"], "exp_annotations": alert["annotations"]}
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": each} for name, each in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.fires}m", "alertname": case.alert, "exp_alerts": [expected]},
            {"eval_time": f"{case.is_clear}m", "alertname": case.alert, "exp_alerts": []},
        ],
    }


def test_alerts_about_gpus_fire_and_clear(promtool: Any, rules: Path, tmp_path: Path) -> None:
    alerts = {each["alert"]: each for each in alerts_of(rules)}
    tests = [promtool_test(case, alerts[case.alert]) for case in CASES]
    path = tmp_path / "test.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests})
    )
    # All in one run, as it takes a second to start.
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_about_gpus_is_tested_and_has_its_runbook(rules: Path) -> None:
    named = {each["alert"]: each for each in alerts_of(rules) if "layer" in each["labels"]}
    assert named.keys() == {case.alert for case in CASES}
    for name, alert in named.items():
        page, anchor = alert["annotations"]["runbook"].split("#")
        assert anchor == name.lower()
        assert f"\n## {name}\n" in (RUNBOOKS / page).read_text()


def test_runbooks_may_be_elsewhere(render: Any) -> None:
    spec = prometheus_rule(render, "prometheusRule.runbooks=https://wiki/runbooks/")
    urls = [
        each["annotations"]["runbook_url"]
        for group in spec["groups"]
        for each in group["rules"]
        if "layer" in each.get("labels", {})
    ]
    assert "https://wiki/runbooks/gpu.md#ullagegpuidle" in urls
    [operator] = prometheus_rule(render, "prometheusRule.gpu=false")["groups"]
    assert operator["name"] == "ullage-operator"


def test_the_exporter_is_asked_for_all_that_alerts_read(rules: Path) -> None:
    text = (Path(__file__).parents[2] / "charts/ullage/files/dcgm-counters.csv").read_text()
    counters = {line.split(",")[0] for line in text.splitlines() if line and line[0] != "#"}
    for case in CASES:
        names = {series.split("{")[0] for series in case.series}
        alternatives = [each for each in CASES if each.alert == case.alert]
        assert any(
            {series.split("{")[0] for series in each.series} <= counters for each in alternatives
        ), names
