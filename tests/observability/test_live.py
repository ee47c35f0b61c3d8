"""What dashboards, runbooks and rules ask is answered by a Prometheus that scrapes a service."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from ullage_dashboards.engines import ENGINE, TIERS
from ullage_dashboards.gpus import GPU
from ullage_dashboards.model import Dashboard
from ullage_dashboards.services import FLEET, OPERATOR, ROUTER

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"


def has_data(series: list[dict[str, Any]]) -> bool:
    return any(math.isfinite(float(each["value"][1])) for each in series)


@pytest.mark.parametrize(
    "page", [FLEET, ROUTER, ENGINE, TIERS, GPU, OPERATOR], ids=lambda page: page.uid
)
def test_every_query_has_data_or_says_what_it_needs(prometheus: Any, page: Dashboard) -> None:
    wrong = []
    for title, query in page.queries():
        text = query.text.replace("$__rate_interval", "10m")
        text = re.sub(r"\$(namespace|llmservice|pod)\b", ".*", text)
        if has_data(prometheus.query(text)) == bool(query.needs):
            wrong.append(f"{title}, {query.legend} (needs: {query.needs or 'nothing'}): {text}")
    assert not wrong, "\n".join(wrong)


def test_choices_are_found(prometheus: Any) -> None:
    for page in (FLEET, ENGINE, GPU, OPERATOR):
        for variable in page.variables:
            series, _, label = variable.query[len("label_values(") : -1].rpartition(", ")
            text = re.sub(r"\$\w+", ".*", series)
            found = prometheus.query(f"count by ({label}) ({text})")
            assert all(each["metric"].get(label) for each in found), variable
            assert found, variable


def test_runbooks_queries_run(prometheus: Any) -> None:
    blocks = [
        (path.name, block)
        for path in sorted(RUNBOOKS.glob("*.md"))
        for block in re.findall(r"```promql\n(.*?)```", path.read_text(), re.DOTALL)
    ]
    assert len(blocks) > 60
    found = [name for name, block in blocks if has_data(prometheus.query(block))]
    assert {*found} == {name for name, _ in blocks}
    assert len(found) > len(blocks) / 2


def test_all_rules_are_well(prometheus: Any) -> None:
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 80
    wrong = [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")]
    assert not wrong
    firing = {each["metric"]["alertname"] for each in prometheus.query("ALERTS")}
    assert "UllageGPUECCUncorrectable" in firing
