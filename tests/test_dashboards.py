"""Dashboards of the chart are those of this code, whole, and about metrics that there are."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_common.process.metrics import metric_names
from ullage_engine import metric_names as engine
from ullage_operator import metric_names as operator
from ullage_router import metric_names as router

ROOT = Path(__file__).parents[1]
FILES = ROOT / "charts" / "ullage" / "files"
PAGES = {path.stem: json.loads(path.read_text()) for path in (FILES / "dashboards").glob("*.json")}


def pictures(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Panels without the headings of rows."""
    return (panel for panel in page["panels"] if panel["type"] != "row")


def test_they_are_of_this_code() -> None:
    script = ROOT / "scripts" / "dashboards.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(PAGES) == 6


def test_every_panel_says_what_it_shows_and_of_what(subtests: pytest.Subtests) -> None:
    for name, page in PAGES.items():
        with subtests.test(name):
            assert page["uid"] == name
            assert page["description"].endswith(".")
            titles = [panel["title"] for panel in pictures(page)]
            assert len(titles) == len({*titles})
            for panel in pictures(page):
                assert panel["title"][0].isupper()
                assert panel["description"].endswith(".")
                assert panel["fieldConfig"]["defaults"]["unit"]
                assert panel["datasource"]["uid"] == "$datasource"
                targets = panel["targets"]
                assert targets
                assert len({each["refId"] for each in targets}) == len(targets)
                assert all(each["legendFormat"] for each in targets)


def test_panels_lie_beside_one_another(subtests: pytest.Subtests) -> None:
    for name, page in PAGES.items():
        with subtests.test(name):
            numbers = [panel["id"] for panel in page["panels"]]
            assert len(numbers) == len({*numbers})
            taken = set()
            for panel in page["panels"]:
                x, y, w, h = (panel["gridPos"][key] for key in "xywh")
                cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
                assert x + w <= 24, panel["title"]
                assert not cells & taken, panel["title"]
                taken |= cells


def test_queries_read_metrics_that_there_are(subtests: pytest.Subtests) -> None:
    named = [each for module in (router, engine, operator) for each in metric_names(module)]
    ends = ("", "_bucket", "_sum", "_count")
    known = {each.exposed + end for each in named for end in ends}
    known |= {"process_cpu_seconds_total", "process_resident_memory_bytes", "ALERTS"}
    rules = yaml.safe_load((FILES / "rules" / "gpu.yaml").read_text())["groups"]
    known |= {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    known |= {"ullage:slo_burn:rate5m", "ullage:slo_burn:rate1h"}
    for name, page in PAGES.items():
        with subtests.test(name):
            for target in (each for panel in pictures(page) for each in panel["targets"]):
                read = set(re.findall(r"[\w:]+(?=\{)", target["expr"]))
                assert read, target["expr"]
                assert read <= known, target["expr"]


def test_rates_fit_the_screen_and_every_variable_is_a_choice(subtests: pytest.Subtests) -> None:
    for name, page in PAGES.items():
        with subtests.test(name):
            variables = {each["name"] for each in page["templating"]["list"]}
            expressions = [t["expr"] for panel in pictures(page) for t in panel["targets"]]
            used = set(re.findall(r"\$([a-z_]\w*)", " ".join(expressions))) - {"__rate_interval"}
            assert used <= variables - {"datasource"}
            assert used
            for expression in expressions:
                windows = set(re.findall(r"rate\(.*?\[(.+?)\]", expression))
                assert windows <= {"$__rate_interval"}
                # A counter as it stands says how old its process is.
                counters = re.findall(r"(?<!rate\()\bullage_\w+_total\{", expression)
                assert not counters, expression
