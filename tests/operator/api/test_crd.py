"""The CRD is one that a real API server takes, and says the same as the operator's own types."""

import re
import typing
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.process.config_file import Strict
from ullage_operator.api import schema, spec
from ullage_operator.api.section_reader import camel

CRD = yaml.safe_load(schema.crd_path().read_text(encoding="utf-8"))
VERSION = CRD["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "properties" in node.get("additionalProperties", {}):
        yield from nodes(node["additionalProperties"], f"{path}.*")


NODES = dict(nodes(SCHEMA))


def test_kubernetes_takes_it() -> None:
    kubernetes_validate.validate(CRD, "1.35", strict=True)


def test_helm_keeps_it_when_the_chart_goes() -> None:
    assert CRD["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


STORED_TYPES = dict(
    line.split()
    for line in Path(__file__).with_name("types_of_0_1_0.txt").read_text("utf-8").splitlines()
)
"""Types of the fields of 0.1.0 by their paths."""


def test_no_field_of_0_1_0_has_another_type_under_its_name() -> None:
    """A stored value of another type keeps the API server from server-side apply to the object, the
    operator's status included. A field of any scalar takes each of them."""
    now = {path.removeprefix("."): type_of(node) for path, node in NODES.items()}
    changed = {
        path: (kind, now[path])
        for path, kind in STORED_TYPES.items()
        if path in now and now[path] not in (kind, "int-or-string")
    }
    assert changed == {}


def test_no_rule_reads_a_fraction_that_0_1_0_stored_under_its_name() -> None:
    """The API server cannot evaluate it, and then refuses every write to the object."""
    fractions = [path for path, kind in STORED_TYPES.items() if kind == "number"]
    now = {path.removeprefix("."): node for path, node in NODES.items()}
    ruled = [path for path in fractions if "x-kubernetes-validations" in now.get(path, {})]
    assert ruled == []


DECIMALS = {
    "spec.tenants.defaults.weight": (Decimal("0.01"), Decimal(100)),
    "spec.tenants.defaults.tokensPerSecond": (Decimal("0.1"), Decimal("999999999.999999")),
    "spec.streaming.tokensPerSecond": (Decimal(0), Decimal(100000)),
}


@pytest.mark.parametrize("path", DECIMALS)
@given(
    st.decimals(0, 200_000, places=6)
    | st.decimals(0, 2, places=3)
    | st.sampled_from([*map(Decimal, ("0.01", "0.1", "100", "100.0", "100000", "0.009999"))])
)
def test_patterns_of_decimals_are_their_bounds(path: str, value: Decimal) -> None:
    low, high = DECIMALS[path]
    pattern = NODES[f".{path}"]["pattern"]
    assert bool(re.search(pattern, f"{value:f}")) is (low <= value <= high)


def type_of(node: dict[str, Any]) -> str:
    is_scalar = node.get("x-kubernetes-int-or-string", False)
    return "int-or-string" if is_scalar else str(node["type"])


def test_every_field_is_described() -> None:
    silent = [p for p, n in NODES.items() if "description" not in n and p not in ("", ".metadata")]
    assert not [path for path in silent if not path.endswith("[]")]


def test_schema_is_structural(subtests: pytest.Subtests) -> None:
    for path, node in NODES.items():
        with subtests.test(path):
            assert "$ref" not in node
            assert not {"anyOf", "oneOf", "allOf", "not"} & set(node)
            assert ("type" in node) != node.get("x-kubernetes-int-or-string", False)


RULED = {path: node for path, node in NODES.items() if "x-kubernetes-validations" in node}


def test_rules_parse_and_speak_to_people(subtests: pytest.Subtests) -> None:
    for path, node in RULED.items():
        for rule in node["x-kubernetes-validations"]:
            with subtests.test(path, rule=rule["rule"]):
                celpy.Environment().compile(rule["rule"])
                assert len(rule["message"].split()) > 4


def test_cost_of_rules_is_bounded(subtests: pytest.Subtests) -> None:
    """The API server refuses a rule over text or lists of unknown length."""
    for path, node in RULED.items():
        with subtests.test(path):
            assert node.get("type") != "string" or "maxLength" in node
            assert node.get("type") != "array" or "maxItems" in node


MAX_CONVERSIONS = 31
"""Numbers of several types that a rule may make texts of. To Kubernetes 1.30 each of them may be as
long as a request, 3 MiB, of which one costs a thirty-first of a rule's budget."""


def test_few_numbers_of_several_types_become_texts_in_a_rule(subtests: pytest.Subtests) -> None:
    for path, node in RULED.items():
        for rule in node["x-kubernetes-validations"]:
            with subtests.test(path, rule=rule["rule"]):
                assert _conversions(rule["rule"], node.get("maxItems", 1)) <= MAX_CONVERSIONS


def _conversions(rule: str, max_items: int) -> int:
    """Return how often a rule calls `string` for a list of as many items as are allowed."""
    count = 0
    for call in re.finditer(r"\bstring\(", rule):
        before = rule[: call.start()]
        loops = [
            loop.end()
            for loop in re.finditer(r"\bself\.\w+\(", before)
            if before[loop.end() :].count("(") >= before[loop.end() :].count(")")
        ]
        count += max_items ** len(loops)
    return count


def test_a_loop_in_a_loop_converts_often() -> None:
    assert _conversions("self.all(a, self.all(b, string(a) == string(b)))", 8) == 128
    assert _conversions("self.all(a, [string(a)].all(x, self.all(b, x == string(b))))", 5) == 30


def test_defaults_fulfil_the_schema_by_themselves() -> None:
    """The API server checks a default before it fills in the defaults below it."""
    for path, node in NODES.items():
        if "default" in node:
            assert not [*schema.structure(node, node["default"])], path
            assert not [*schema.rules(node, node["default"], path)], path


def test_no_number_is_a_floating_point_number() -> None:
    """Programs write them differently, and their bounds are compared by whole parts."""
    assert not [path for path, node in NODES.items() if node.get("type") == "number"]


def test_shares_are_percentages_by_name_and_bounds() -> None:
    percentages = {path: node for path, node in NODES.items() if path.lower().endswith("percent")}
    assert len(percentages) > 20
    for path, node in percentages.items():
        is_whole = node.get("type") == "integer" and "maximum" in node
        assert is_whole or schema.is_decimal(node), path


def test_durations_have_one_form() -> None:
    patterns = {node["pattern"] for node in NODES.values() if "(h|m|s" in node.get("pattern", "")}
    assert len(patterns) == 1


def test_scale_subresource_points_at_fields() -> None:
    scale = VERSION["subresources"]["scale"]
    assert set(scale.values()) <= set(NODES)
    assert VERSION["subresources"]["status"] == {}


def test_printer_columns() -> None:
    columns = VERSION["additionalPrinterColumns"]
    names = [column["name"] for column in columns if not column.get("priority")]
    assert names == ["Ready", "Reason", "Engines", "Rollout", "URL", "Age"]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert wide == ["Model", "Routers", "gRPC"]


def test_columns_show_fields_that_there_are(subtests: pytest.Subtests) -> None:
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"].partition("[?")[0]
        with subtests.test(column["name"]):
            assert path.startswith(".metadata.") or path in NODES


def sections(kind: Any, path: str) -> Iterator[tuple[str, set[str]]]:
    """Path and API names of every section of the operator's types."""
    fields = msgspec.structs.fields(kind)
    yield path, {camel(field.name) for field in fields}
    for field in fields:
        below = f"{path}.{camel(field.name)}"
        suffix = {dict: ".*", tuple: "[]"}.get(typing.get_origin(field.type), "")
        for candidate in getattr(field.type, "__args__", (field.type,)):
            if isinstance(candidate, type) and issubclass(candidate, Strict):
                yield from sections(candidate, below + suffix)


def test_the_operator_reads_exactly_the_fields_that_the_api_has(
    subtests: pytest.Subtests,
) -> None:
    for path, names in sections(spec.Spec, ".spec"):
        with subtests.test(path):
            node = NODES[path]
            if path == ".spec.tenants.defaults":
                names.discard("enabled")  # the API switches tenants off by name only
            assert names == set(node["properties"])


def test_package_and_tree_agree_where_the_crd_is() -> None:
    assert schema.crd_path().name == schema.CRD_FILE
    assert Path(__file__).parents[3] / "crds" / schema.CRD_FILE == schema.crd_path()
