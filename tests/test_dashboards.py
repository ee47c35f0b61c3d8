"""Dashboards of the chart are those of this code, whole, and about metrics that there are."""

import copy
import enum
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

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


def unknown(given: Any, read: Any, place: str = "") -> Iterator[str]:
    """Places of a document that Grafana's models do not read, or read as something else."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            if key not in read:
                yield f"{place}.{key}"
            else:
                yield from unknown(value, read[key], f"{place}.{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (own, other) in enumerate(zip(given, read, strict=True)):
            yield from unknown(own, other, f"{place}[{number}]")
    elif given != read:
        yield place


def mistyped(value: Any, wanted: Any, place: str = "") -> Iterator[str]:
    """Places at which a value is not of the type that Grafana's schema has there."""
    origin = typing.get_origin(wanted)
    arguments = typing.get_args(wanted)
    if isinstance(value, dict) and hasattr(wanted, "from_json"):  # the decoder leaves some as such
        value = wanted.from_json(value)
    if wanted in (Any, object) or isinstance(wanted, typing.TypeVar):
        return
    if origin in (typing.Union, types.UnionType):
        if not any(not [*mistyped(value, each)] for each in arguments):
            yield place
    elif origin is typing.Literal:
        if value not in arguments:
            yield place
    elif origin is list:
        if not isinstance(value, list):
            yield place
            return
        for number, each in enumerate(value):
            yield from mistyped(each, arguments[0], f"{place}[{number}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield place
    elif wanted is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield place
    elif wanted is type(None) or isinstance(value, enum.Enum) or not hasattr(value, "to_json"):
        # The decoder leaves the values of enumerations as text.
        if issubclass(wanted, enum.Enum):
            if value not in [*wanted, *(each.value for each in wanted)]:
                yield place
        elif type(value) is not wanted:
            yield place
    elif not isinstance(value, wanted):
        yield place
    else:
        scope = vars(sys.modules[type(value).__module__])
        for name, hint in typing.get_type_hints(type(value), scope).items():
            yield from mistyped(getattr(value, name), hint, f"{place}.{name}")


def misfits(page: dict[str, Any]) -> list[str]:
    """Places of a page that are not of Grafana's schema, from which the SDK's models are made."""
    register_default_plugins()
    read = Dashboard.from_json(page)
    return [
        *unknown(page, json.loads(json.dumps(read, cls=JSONEncoder))),
        *mistyped(read, Dashboard),
    ]


def test_they_are_of_grafanas_schema(subtests: pytest.Subtests) -> None:
    for name, page in PAGES.items():
        with subtests.test(name):
            assert misfits(page) == []


@pytest.mark.parametrize(
    ("key", "value"), [("titel", "x"), ("title", 3), ("gridPos", []), ("transparent", "yes")]
)
def test_what_is_not_of_grafanas_schema_is_found(key: str, value: Any) -> None:
    page = copy.deepcopy(PAGES["ullage-tiers"])
    page["panels"][1][key] = value
    try:
        found = misfits(page)
    except (AttributeError, TypeError, KeyError):  # what the decoder itself says
        return
    assert found


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
