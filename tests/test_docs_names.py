"""The documentation names metrics, alerts, headers, variables, errors and defaults of the code."""

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ullage_common.process.metrics import HistogramName, metric_names
from ullage_engine import metric_names as engine
from ullage_operator import metric_names as operator
from ullage_operator.api.naming import OWNED
from ullage_operator.api.parsing import parse
from ullage_operator.api.schema import load_schema
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.conditions import MONITORING
from ullage_operator.conditions.pod_problem import STUCK_REASONS
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan, plan
from ullage_operator.planning.status import INVALID_SPEC
from ullage_operator.rollout.release import ENGINE_TLS, SECTIONS
from ullage_router import metric_names as router
from ullage_router.http import openapi
from ullage_router.http.openai.schemas import ChatRequest, CompletionRequest, Unsupported

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RULES = ROOT / "charts" / "ullage" / "files" / "rules"
REFERENCE = DOCS / "reference" / "api-reference.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
PAGES += sorted((ROOT / "charts").rglob("*.md"))
PAGES.remove(ROOT / "CHANGELOG.md")
PAST = {DOCS / "guide" / "upgrading.md", DOCS / "reasons" / "lessons.md"}
"""Pages that also name what an earlier version had."""

SOURCES = ("operator", "engine", "proto", "charts", "docker", "scripts", "benchmarks", "tests/e2e")
SUFFIXES = {".py", ".yaml", ".tpl", ".sh", ".proto", ".csv"}
OTHER_SOURCES = ("Makefile", "hatch_build.py", "pyproject.toml", ".ci/run")

CODE = re.compile(r"```[a-z]*\n.*?^[ \t]*```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
METRIC = re.compile(r"\b(ullage_[a-z0-9_]+|vllm:[a-z][a-z0-9_]+)(?:\{([^}]*)\})?")
SHORT_METRIC = re.compile(r"`(_[a-z0-9_]+)(?:\{([^}]*)\})?`")
"""The end of a metric's name, in a line that has a name with the same beginning."""

LABEL = re.compile(r"([a-z_]+)\s*(?:[=!]~?|,|$|\s)")
OF_SCRAPES = {"namespace", "pod", "instance", "job", "llmservice", "container"}
RECORDED = re.compile(r"\bullage:[a-z0-9_]+:[a-z0-9_]+")
ALERT = re.compile(r"\bUllage[A-Z][A-Za-z]+\b")
HEADER = re.compile(r"\bx-ullage-[a-z-]+[a-z]")
VARIABLE = re.compile(r"\bULLAGE_[A-Z0-9_]+[A-Z0-9]")
CONSTANT = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`")
OF_OTHERS = {
    "CERTIFICATE_VERIFY_FAILED",
    "IPC_LOCK",
    "NO_PROXY",
    "WRONG_VERSION_NUMBER",
}
"""Words of OpenSSL, of Linux and of clients."""

PROBLEMS = {"PodProblem", "problem_of"}
"""Functions that report a problem, with its reason as the second argument."""

TABLE = re.compile(r"(?:^\|.*\n){3,}", re.MULTILINE)
NUMBER = r"(?<![\w.]){}(?![\w.]\w)"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_of(page: Path) -> str:
    """Return the blocks and spans of code of a page."""
    return "\n".join(CODE.findall(text_of(page)))


def sources() -> str:
    """Return the text of all sources, in which names of code occur."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    paths = [path for path in paths if path.suffix in SUFFIXES and path.is_file()]
    return "\n".join(text_of(path) for path in [*paths, *(ROOT / name for name in OTHER_SOURCES)])


def exported_metrics() -> dict[str, set[str]]:
    """Return the labels of each series that processes export, by name."""
    labels: dict[str, set[str]] = {}
    for module in (router, engine, operator):
        for name in metric_names(module):
            own = set(name.labels) | OF_SCRAPES
            labels[name.exposed] = own
            if isinstance(name, HistogramName):
                labels[f"{name.name}_bucket"] = own | {"le"}
                labels |= {f"{name.name}_{end}": own for end in ("sum", "count")}
    for name, alias in engine.VLLM_NAMES.items():
        for exposed in [each for each in labels if each.startswith(name.name)]:
            labels[f"{alias}{exposed.removeprefix(name.name)}"] = labels[exposed]
    return labels


def packages() -> set[str]:
    """Return the names of modules that look like metrics."""
    folders = [ROOT / name for name in ("operator", "engine", "proto", "scripts", "tests/support")]
    return {each.name for folder in folders for each in folder.glob("ullage_*")}


def service_plan() -> ServicePlan:
    """Return the plan of a small service that stores files, in a cluster with Prometheus."""
    manifest = {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "demo", "namespace": "models", "uid": "u", "generation": 1},
        "spec": {
            "model": {"source": "hf://a/b", "name": "m"},
            "router": {"files": {}, "replicas": 1},
        },
    }
    observed = Observed(now=datetime.now(UTC), serves=frozenset(MONITORING))
    return plan(parse(manifest), observed, Settings())


def service_rules() -> list[dict[str, Any]]:
    """Return the recording rules and alerts that the operator makes for a service."""
    [rule] = [each for each in service_plan().apply if each["kind"] == "PrometheusRule"]
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


def chart_rules() -> list[dict[str, Any]]:
    groups = [
        group for path in RULES.glob("*.yaml") for group in yaml.safe_load(text_of(path))["groups"]
    ]
    return [rule for group in groups for rule in group["rules"]]


def test_every_metric_and_label_that_a_page_names_is_exported() -> None:
    exported = exported_metrics()
    modules = packages()
    checked = set()
    wrong = []
    for page in PAGES:
        if page in PAST:
            continue
        for name, labels in METRIC.findall(code_of(page)):
            if name in modules or name.endswith("_"):
                continue
            checked.add(name)
            unknown = set(LABEL.findall(labels)) - exported.get(name, set())
            if name not in exported or unknown:
                wrong.append(f"{page.relative_to(ROOT)}: {name} {sorted(unknown)}")
        lines = "\n".join(line for line in text_of(page).splitlines() if METRIC.search(line))
        for end, labels in SHORT_METRIC.findall(lines):
            ends = [own for name, own in exported.items() if name.endswith(end)]
            unknown = set(LABEL.findall(labels)) - set().union(*ends)
            if not ends or unknown:
                wrong.append(f"{page.relative_to(ROOT)}: {end} {sorted(unknown)}")
    assert not wrong, "\n".join(wrong)
    assert len(checked) > 100, "the pages' code is not found"


def test_every_alert_and_recorded_series_that_a_page_names_exists() -> None:
    rules = [*service_rules(), *chart_rules()]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    recorded = {rule["record"] for rule in rules if "record" in rule}
    wrong = []
    for page in PAGES:
        names = set(ALERT.findall(text_of(page))) - alerts
        names |= set(RECORDED.findall(code_of(page))) - recorded
        wrong += [f"{page.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert not wrong, "\n".join(wrong)
    assert f"{len(alerts)} alerts" in text_of(ROOT / "README.md")


def test_the_runbook_has_the_threshold_of_uneven_engines() -> None:
    [rule] = [each for each in service_rules() if each.get("alert") == "UllageEnginesUneven"]
    [threshold] = re.findall(r"\) > (\d+)\) and", rule["expr"])
    runbook = text_of(DOCS / "runbooks" / "service.md")
    assert f"`routing.placement.affinity.maxExtraLoad` ({threshold} by default" in runbook


def test_the_page_of_the_operator_names_every_kind_that_it_makes() -> None:
    page = text_of(DOCS / "guide" / "operator.md")
    section = page[page.index("## What it makes") : page.index("### Ports")]
    singular = section.replace("Policies", "Policy")
    assert not [kind.name for kind in OWNED if kind.name not in singular]


def test_pages_show_the_addresses_that_the_status_shows() -> None:
    status = service_plan().status
    shown = status["endpoint"].replace("demo-", "NAME-").replace(".models.", ".NAMESPACE.")
    assert f"`{shown}/v1` as their base URL" in text_of(DOCS / "guide" / "install.md")
    rollout = text_of(DOCS / "guide" / "rollout.md")
    assert f" {status['endpoint'].replace('demo-', 'chat-')} " in rollout


def test_every_header_variable_and_reason_that_a_page_names_is_in_the_code() -> None:
    words = set(re.findall(r"[\w-]+", sources()))
    wrong = []
    for page in PAGES:
        text = text_of(page)
        names = {*HEADER.findall(text), *VARIABLE.findall(text), *CONSTANT.findall(text)}
        missing = sorted(names - words - OF_OTHERS)
        wrong += [f"{page.relative_to(ROOT)}: {name}" for name in missing]
    assert not wrong, "\n".join(wrong)


def test_the_reference_has_every_header_of_requests_and_answers() -> None:
    document = openapi.document([("/v1/chat/completions", "POST")])
    headers = set(HEADER.findall(document.decode()))
    assert {"x-ullage-action", "x-ullage-timeout", "x-ullage-replace"} <= headers
    assert headers == set(HEADER.findall(text_of(REFERENCE)))


def test_pages_name_every_path() -> None:
    """All but the console's own, which its page asks for."""
    text = text_of(DOCS / "reference" / "api.md") + text_of(DOCS / "guide" / "operator.md")
    paths = [path for path in openapi.OPERATIONS if not path.startswith("/console")]
    assert len(paths) > 30
    unnamed = []
    for path in paths:
        pattern = re.escape(path).replace(r"\{name\}", "(ID|NAME)")
        unnamed += [] if re.search(rf"{pattern}\b", text) else [path]
    assert not unnamed


def test_pages_about_access_name_the_paths_that_need_no_key() -> None:
    operations = openapi.OPERATIONS.items()
    open_paths = {
        path for path, methods in operations for each in methods.values() if not each.needs_key
    }
    open_paths = {path for path in open_paths if not path.startswith("/console")}
    for page in (ROOT / "SECURITY.md", DOCS / "guide" / "tenants.md"):
        assert open_paths - set(re.findall(r"`(/\S+)`", text_of(page))) == set(), page.name


def test_the_reference_has_every_field_of_a_chat_and_of_a_completion() -> None:
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    named = set(re.findall(r"`(\w+)", text_of(REFERENCE)))
    assert not fields - set(Unsupported.__struct_fields__) - named


def test_pages_list_the_sections_that_a_canary_tries() -> None:
    """docs/guide/rollout.md names the sections of a release, of which a change is tried."""
    page = text_of(DOCS / "guide" / "rollout.md")
    section = page[
        page.index("These changes start a canary") : page.index("Pools that do not change")
    ]
    names = {"tls.engines" if name == ENGINE_TLS else name for name in SECTIONS}
    assert names - set(re.findall(r"`([\w.]+)`", section)) == set()


def test_every_condition_is_on_the_page_of_conditions() -> None:
    """docs/guide/healing.md explains a condition, or names the page that does."""
    trees = [
        ast.parse(text_of(path)) for path in (ROOT / "operator" / "ullage_operator").rglob("*.py")
    ]
    values: dict[str, str] = {}
    used = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                values[name] = value
            case ast.Call(func=ast.Name(id="Condition"), args=[ast.Name(id=name), *_]):
                used.add(name)
    conditions = {values[name] for name in used if name in values}
    assert {"Ready", "ScalingActive", "ModelCacheWarm", "RouteAccepted"} <= conditions
    page = text_of(DOCS / "guide" / "healing.md")
    assert [
        each for each in sorted(conditions) if not re.search(rf"^\| {each} \||`{each}`", page, re.M)
    ] == []


def reasons_of_problems() -> set[str]:
    """Return the reasons that the operator's sources give to problems of pods and of objects."""
    reasons = {*STUCK_REASONS, INVALID_SPEC}
    for path in (ROOT / "operator" / "ullage_operator").rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in PROBLEMS:
                second = node.args[1] if len(node.args) > 1 else None
                reasons |= {second.value} if isinstance(second, ast.Constant) else set()
    return reasons


def test_the_reasons_of_degraded_are_in_the_table() -> None:
    page = text_of(DOCS / "guide" / "healing.md")
    table = page[page.index("## What Degraded says") : page.index("## Healing")]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))))
    reasons = reasons_of_problems()
    assert {"NodeLost", "PodsNotMade", "ClaimsDropped"} <= reasons
    assert reasons - named == set()


def defaults_below(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the defaults of a field, or of the fields of a section."""
    if "properties" in schema:
        for below in schema["properties"].values():
            yield from defaults_below(below)
    elif "default" in schema:
        yield schema["default"]


def section_of(path: str) -> dict[str, Any]:
    """Return the schema of a section of the spec or of a pool, by its path (empty if unknown)."""
    spec = load_schema()["properties"]["spec"]
    pool = spec["properties"]["pools"]["additionalProperties"]
    for schema in (spec, pool):
        for part in path.removeprefix("spec.").split("."):
            schema = schema.get("properties", {}).get(part, {})
        if schema:
            return schema
    return {}


def shown(value: Any) -> list[str]:
    """Return the words by which a page shows a default."""
    values = value if isinstance(value, list) else [value]
    return [str(each).lower() if isinstance(each, bool) else str(each) for each in values]


def wrong_defaults(text: str) -> Iterator[str]:
    """Yield the fields of a page's tables whose defaults are not those of the definition.

    The first cell of such a table names a section, and its second one is `default`. A row has one
    field or several, with their defaults in the same order.
    """
    for table in TABLE.findall(text):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        named = re.search(r"`([\w.]+)`", rows[0][0])
        if not named or rows[0][1] != "default":
            continue
        section = section_of(named[1])
        assert section, f"there is no section {named[1]}"
        for row in rows[2:]:
            path: list[str] = []
            for field in re.findall(r"`([\w.]+)`", row[0]):
                # `breaker.pause`, `maxPause`: the second one is below breaker, too.
                path = field.split(".") if "." in field else [*path[:-1], field]
                schema = section
                for part in path:
                    schema = schema.get("properties", {}).get(part, {})
                if not schema:
                    yield f"{named[1]}.{'.'.join(path)} does not exist"
                for default in defaults_below(schema):
                    yield from (
                        f"{named[1]}.{'.'.join(path)} is {word}, not {row[1]}"
                        for word in shown(default)
                        if not re.search(NUMBER.format(re.escape(word)), row[1])
                    )


def test_tables_of_defaults_have_those_of_the_definition() -> None:
    wrong = [
        f"{page.relative_to(ROOT)}: {problem}"
        for page in PAGES
        for problem in wrong_defaults(text_of(page))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_default_is_found() -> None:
    text = """
| `spec.routing.queue` | default | meaning |
|---|---|---|
| `maxRequests` | 25 | |
| `aging`, `backfill` | 50ms, 16 | |
| `size` | 1 | |
"""
    assert list(wrong_defaults(text)) == [
        "spec.routing.queue.maxRequests is 256, not 25",
        "spec.routing.queue.size does not exist",
    ]
