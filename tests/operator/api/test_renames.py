"""Fields of 0.1.0 are refused with their new form, read where they are stored, and rewritten."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ullage_cli.main import main
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse, parse_filled
from ullage_operator.api.renames import (
    RENAMES,
    Rename,
    dropped_fields,
    remedy,
    rounded,
    upgraded,
)
from ullage_operator.api.schema import complete, load_schema

IN_PERCENT = tuple(
    each.old
    for each in RENAMES
    if each.new.endswith(("Percent", "percent")) and type(each.convert(0.001)) is float
)
Make = Callable[..., dict[str, Any]]
OLD_MANIFESTS = sorted((Path(__file__).parent / "manifests_0_1_0").glob("*.yaml"))
DEFINITION = load_schema()["properties"]["spec"]

OLD: dict[str, Any] = {
    "model": {"source": "file:///m", "name": "m", "quantization": "int8"},
    "device": "cpu",
    "memory": {"threshold": 0.9, "adapterShare": 0.25},
    "router": {"nodeSelector": {"disk": "ssd"}, "podLabels": {"team": "a"}, "processes": 4},
    "pools": {
        "single": {
            "memory": {"threshold": 0.5},
            "autoscaling": {"maxReplicas": 2, "targets": {"kvUtilization": 0.65}},
            "env": [{"name": "HF_TOKEN", "value": "x"}],
            "tolerations": [{"operator": "Exists"}],
        },
        "large": {},
        "spot": {},
    },
    "routing": {
        "ladder": ["shrinkContext", "queue"],
        "rungs": {
            "shrinkContext": {"maxDroppedShare": 0.5},
            "shrinkOutput": {"minShare": 0.25},
            "reject": {"minRetryAfter": 2, "maxRetryAfter": 20},
        },
        "placement": {
            "breaker": {"maxEjectedShare": 0.3},
            "retries": {"share": 0.1, "perSecond": 2.5},
        },
    },
    "cascade": {"steps": [{"service": "small"}], "confidence": {"threshold": 0.7}},
    "prompts": {
        "compress": {"method": "model", "threshold": 0.8, "share": 0.5, "factShare": 1}
        | {"timeout": "3s"}
    },
    "streaming": {"tokensPerSecond": 12.5},
    "degrade": {
        "hysteresis": 0.1,
        "throttling": {"batchStep": 0.5, "minBatchShare": 0.3},
        "levels": [{"below": 0.2, "batchShare": 0.75, "maxTemperature": 0.7, "maxTopP": 0.9}],
    },
    "tenants": {
        "secretName": "keys",
        "defaults": {"weight": 0.5},
        "named": [{"name": "a", "weight": 2, "tokensPerSecond": 0.5}],
    },
    "healing": {"minHealth": 0.4},
    "rollout": {"thresholds": {"errorRate": 0.025, "ttftRatio": 2, "e2eRatio": 1.25}},
    "slo": {"errorRate": 0.001},
    "observability": {"tracing": {"endpoint": "http://c:4317", "sampleRatio": 0.1}},
}
NEW: dict[str, Any] = {
    "model": {"source": "file:///m", "name": "m", "quantization": "Int8"},
    "device": "CPU",
    "memory": {"thresholdPercent": 90, "adapterPercent": 25},
    "router": {
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {"nodeSelector": {"disk": "ssd"}},
        }
    },
    "pools": {
        "single": {
            "memory": {"thresholdPercent": 50},
            "autoscaling": {"maxReplicas": 2, "targets": {"kvUtilizationPercent": 65}},
            "podTemplate": {
                "spec": {
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "engine", "env": [{"name": "HF_TOKEN", "value": "x"}]}],
                }
            },
        },
        "large": {"role": "Large"},
        "spot": {"role": "Overflow"},
    },
    "routing": {
        "ladder": ["ShrinkContext", "Queue"],
        "rungs": {
            "shrinkContext": {"maxDroppedPercent": 50},
            "shrinkOutput": {"minPercent": 25},
            "reject": {"minRetryDelay": "2s", "maxRetryDelay": "20s"},
        },
        "placement": {
            "breaker": {"maxEjectionPercent": 30},
            "retries": {"percent": 10, "perSecond": "2.5"},
        },
    },
    "cascade": {"steps": [{"service": "small"}], "confidence": {"thresholdPercent": 70}},
    "prompts": {
        "compress": {"method": "Extractive", "thresholdPercent": 80, "percent": 50}
        | {"factPercent": 100}
    },
    "streaming": {"tokensPerSecond": "12.5"},
    "degrade": {
        "hysteresisPercent": 10,
        "throttling": {"batchStepPercent": 50, "minBatchPercent": 30},
        "pressureLevels": [
            {"belowPercent": 20, "batchPercent": 75, "maxTemperature": "0.7", "maxTopP": "0.9"}
        ],
    },
    "tenants": {
        "secretName": "keys",
        "defaults": {"weight": "0.5"},
        "named": [{"name": "a", "weight": 2, "tokensPerSecond": "0.5"}],
    },
    "healing": {"minHealthPercent": 40},
    "rollout": {"thresholds": {"errorPercent": "2.5", "ttftPercent": 200, "e2ePercent": 125}},
    "slo": {"errorPercent": "0.1"},
    "observability": {"tracing": {"endpoint": "http://c:4317", "samplePercent": 10}},
}


def test_every_field_of_0_1_0_has_its_form_of_today(manifest: Make) -> None:
    assert upgraded(OLD, DEFINITION) == NEW
    assert upgraded(NEW, DEFINITION) == NEW
    assert parse(manifest(**NEW)).spec.memory.threshold == 0.9


def test_the_definition_has_what_the_table_names_and_nothing_that_it_replaces() -> None:
    lists = {"levels": "pressureLevels"}
    for rename in RENAMES:
        *above, name = rename.old.split(".")
        section: dict[str, Any] = DEFINITION
        for step in above:
            key = {"*": "additionalProperties", "[]": "items"}.get(step)
            section = section[key] if key else section["properties"][lists.get(step, step)]
        first = rename.new.partition(".")[0]
        assert not first or first in section["properties"], rename
        assert name == first or name not in section["properties"], rename


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"memory": {"threshold": 0.9}}, "spec.memory.threshold: unknown field; write threshold"),
        ({"slo": {"errorRate": 0.5}}, "spec.slo.errorRate: unknown field; write errorPercent: 50"),
        (
            {"pools": {"single": {"memory": {"adapterShare": 0.1}}}},
            "spec.pools.single.memory.adapterShare: unknown field; write adapterPercent: 10 ",
        ),
        (
            {"degrade": {"levels": [{"below": 0.5}]}},
            "spec.degrade.levels: unknown field; write pressureLevels instead",
        ),
        (
            {"router": {"nodeSelector": {"a": "b"}}},
            "spec.router.nodeSelector: unknown field; write podTemplate.spec.nodeSelector instead",
        ),
        (
            {"pools": {"single": {"env": []}}},
            "spec.pools.single.env: unknown field; write podTemplate.spec.containers[engine].env",
        ),
        (
            {"prompts": {"compress": {"timeout": "5s"}}},
            "spec.prompts.compress.timeout: unknown field; it has no effect any more; leave it out",
        ),
        (
            {"router": {"processes": 4}},
            "spec.router.processes: unknown field; a router pod has one process, so raise "
            "router.replicas instead; leave it out",
        ),
    ],
)
def test_an_old_field_is_unknown_and_its_new_name_is_told(
    manifest: Make, spec: dict[str, Any], line: str
) -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse(manifest(**spec))
    assert any(str(each).startswith(line) for each in caught.value.problems), caught.value


def test_the_rest_of_unknown_fields_has_no_history() -> None:
    assert remedy("spec.memory.treshold", 1) == ""
    assert remedy("spec.pools.single.threshold", 1) == ""


@given(st.sampled_from(RENAMES), st.one_of(st.integers(0, 100), st.decimals(0, 1, places=2)))
def test_a_share_is_as_large_in_percent(rename: Rename, share: Any) -> None:
    if rename.new.lower().endswith("percent") and rename.new != rename.old.rpartition(".")[2]:
        assert float(rename.convert(float(share))) == pytest.approx(100 * float(share))


@pytest.mark.parametrize("value", [None, "x", True, [], {}])
def test_what_is_no_number_is_left_to_the_checks(value: Any) -> None:
    old: dict[str, Any] = {"memory": {"threshold": value}, "pools": value, "degrade": value}
    assert upgraded(old, DEFINITION)["memory"] == {"thresholdPercent": value}


def test_an_operator_reads_what_an_older_definition_hands_out(manifest: Make) -> None:
    """The chart may have been upgraded before the definition."""
    old = manifest(**copy.deepcopy(OLD))
    old["spec"]["pools"] = copy.deepcopy(OLD["pools"])
    new = manifest(**NEW)
    assert parse_filled(old)[0] == parse(new)


@pytest.mark.parametrize("path", OLD_MANIFESTS, ids=lambda path: path.stem)
def test_the_examples_of_0_1_0_are_rewritten(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", str(path)]) == 2
    capsys.readouterr()
    assert main(["upgrade-manifest", "-f", str(path)]) == 0
    text = capsys.readouterr().out
    (written := tmp_path / "new.yaml").write_text(text)
    assert main(["plan", "-f", str(written)]) == 0

    old, new = (yaml.safe_load(each) for each in (path.read_text(), text))
    pools = old["spec"].get("pools", {})
    roles = {name: pool.get("role", "Standard") for name, pool in new["spec"]["pools"].items()}
    assert roles == {name: {"single": "Standard"}.get(name, name.title()) for name in pools}
    assert new["metadata"] == old["metadata"]


def test_other_documents_stay_and_mistakes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: Make
) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump_all([secret, manifest(memory={"threshold": 0.9})]))
    assert main(["upgrade-manifest", "-f", str(path)]) == 0
    first, second = yaml.safe_load_all(capsys.readouterr().out)
    assert first == secret
    assert second["spec"]["memory"] == {"thresholdPercent": 90}

    path.write_text(yaml.safe_dump(manifest(memory={"threshold": 1.855})))
    assert main(["upgrade-manifest", "-f", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"{path}: spec.memory.thresholdPercent: must be at most 100, not 186" in told

    for number in ("inf", "nan"):
        path.write_text(yaml.safe_dump(manifest(memory={"threshold": float(number)})))
        assert main(["upgrade-manifest", "-f", str(path)]) == 2
        told = capsys.readouterr().err
        assert f"{path}: spec.memory.threshold: {number} is not a number in JSON" in told


def test_values_that_cannot_stay_the_same_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: Make
) -> None:
    path = tmp_path / "old.yaml"
    first = manifest(
        memory={"threshold": 0.855, "adapterShare": 0.25},
        degrade={"levels": [{"below": 0.3}, {"below": 0.125}]},
        prompts={"compress": {"method": "model", "timeout": "5s"}},
        router={"processes": 4},
    )
    second = manifest(memory={"threshold": 0.9}) | {"metadata": {"name": "other"}}
    path.write_text(yaml.safe_dump(first))
    assert main(["upgrade-manifest", "-f", str(path)]) == 0
    shown = capsys.readouterr()
    spec = yaml.safe_load(shown.out)["spec"]
    assert spec["memory"] == {"thresholdPercent": 86, "adapterPercent": 25}
    assert spec["degrade"] == {"pressureLevels": [{"belowPercent": 30}, {"belowPercent": 13}]}
    whole = "shares are whole percentages"
    assert shown.err.splitlines() == [
        f"note: {path}: spec.memory.threshold: 0.855 is thresholdPercent: 86 now, "
        f"0.5 percentage points more: {whole}",
        f"note: {path}: spec.degrade.levels[1].below: 0.125 is belowPercent: 13 now, "
        f"0.5 percentage points more: {whole}",
        f"note: {path}: spec.prompts.compress.method: 'model' is method: Extractive now: "
        "extracts, without the model",
        f"note: {path}: spec.prompts.compress.timeout: '5s' is left out; it has no effect any more",
        f"note: {path}: spec.router.processes: 4 is left out; a router pod has one process, "
        "so raise router.replicas instead",
    ]

    path.write_text(yaml.safe_dump_all([second, first]))
    assert main(["upgrade-manifest", "-f", str(path)]) == 0
    assert f"note: {path}: demo: spec.memory.threshold: 0.855" in capsys.readouterr().err


@given(share=st.decimals(0, 1, places=5).map(float), rename=st.sampled_from(RENAMES))
def test_a_share_that_changes_is_named_with_the_nearest_percent(
    share: float, rename: Rename
) -> None:
    *above, name = rename.old.replace("*", "a").split(".")
    old: Any = {name: share}
    for step in reversed(above):
        old = [old] if step == "[]" else {step: old}
    before = upgraded(old)
    changed, notes = rounded(old)
    after = upgraded(changed)
    percents = [leaf for leaf in leaves(before) if isinstance(leaf, float) and leaf != share]
    if not rename.old.endswith(IN_PERCENT) or all(each.is_integer() for each in percents):
        assert after == before
        assert not notes or not rename.new or "method" in rename.old
        return
    [exact], [percent] = percents, leaves(after)
    assert isinstance(percent, int)
    assert abs(percent - exact) <= 0.5
    [note] = notes
    assert f"{share!r} is {rename.new}: {percent} now" in note.message
    assert f"write {rename.new}: {percent} instead" in remedy(note.path, share)


def leaves(value: Any) -> list[Any]:
    """Return the values of nested objects and lists."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return [value]
    return [leaf for each in inner for leaf in leaves(each)]


def applied(declared: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Return an object as an API server hands it out that dropped what it does not know."""
    text = json.dumps({"kind": "LLMService", "spec": declared})
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": text}
    return {"metadata": {"name": "demo", "annotations": annotations}, "spec": spec}


def test_what_an_api_server_dropped_is_known_by_what_was_applied(manifest: Make) -> None:
    stored, _ = complete(load_schema(), manifest())
    assert dropped_fields(applied({"slo": {"errorRate": 0.01}}, stored["spec"])) == {
        "spec.slo.errorRate": 0.01
    }
    assert dropped_fields(applied({"router": {"processes": 4}}, stored["spec"])) == {
        "spec.router.processes": 4
    }
    assert not dropped_fields(applied({"slo": {"errorPercent": 1}}, stored["spec"]))
    # An older definition has dropped nothing.
    kept = {"slo": {"errorRate": 0.01}}
    assert not dropped_fields(applied(kept, kept))

    fields = {"f:spec": {"f:memory": {"f:threshold": {}}, "f:pools": {"f:a": {"f:env": {}}}}}
    entry = {"manager": "argocd", "operation": "Apply", "fieldsV1": fields}
    record = {"metadata": {"name": "demo", "managedFields": [entry]}, "spec": stored["spec"]}
    assert dropped_fields(record) == {"spec.memory.threshold": None, "spec.pools.a.env": None}
    record["metadata"]["managedFields"] = [entry | {"operation": "Update"}]
    assert not dropped_fields(record)


PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "upgrading.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w.\[\]]+): ([^`]+)`(.*?) \| `([\w.\[\]]+): ([^`]+)` \|$", re.MULTILINE)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their paths, with `[]` for the items of lists."""
    if isinstance(value, list):
        return {name: leaf for item in value for name, leaf in flat(item, f"{path}[]").items()}
    if not isinstance(value, dict):
        return {path.lstrip("."): value}
    return {
        name: leaf
        for key, item in value.items()
        for name, leaf in flat(item, f"{path}.{key}").items()
    }


def documented() -> list[tuple[str, Any, str, Any]]:
    """Return the rows of the page about values: path and value of 0.1.0, and of today."""
    rows = []
    for old, value, more, new, now in ROW.findall(PAGE):
        pairs = [(old, new)]
        if "also of a pool" in more:
            pairs.append((f"pools.NAME.{old}", f"pools.NAME.{new}"))
        if named := re.search(r"also of `(\w+\[\])`", more):
            section = old.split(".")[-2]
            pairs.append((old.replace(section, named[1]), new.replace(section, named[1])))
        for before, after in pairs:
            whole = after if "." in after else f"{before.rpartition('.')[0]}.{after}"
            rows.append((before, yaml.safe_load(value), whole, yaml.safe_load(now)))
    return rows


@pytest.mark.parametrize(("old", "value", "new", "now"), documented())
def test_the_page_about_upgrades_says_what_becomes_of_each_value(
    old: str, value: Any, new: str, now: Any
) -> None:
    spec: Any = value
    for step in reversed(old.split(".")):
        spec = {step.removesuffix("[]"): [spec] if step.endswith("[]") else spec}
    assert flat(upgraded(spec, DEFINITION)) == {new: now}
    assert rounded(spec) == (spec, []), "the page shows whole percentages"


def test_the_page_about_upgrades_has_every_field_that_changed() -> None:
    rows = {old.replace("NAME", "*").replace("[]", ".[]") for old, _, _, _ in documented()}
    of_values = {each.old for each in RENAMES if "podTemplate" not in each.new}
    assert of_values - rows == {
        "degrade.levels",  # by its items
        "prompts.compress.method",  # among the words
        "prompts.compress.timeout",
        "router.processes",
    }
    moved = {each.old.rpartition(".")[2] for each in RENAMES if "podTemplate" in each.new}
    assert not [name for name in moved if f"`{name}`" not in PAGE]
    assert "`timeout` of `prompts.compress`" in PAGE
    assert "`Extractive` now" in PAGE
    assert "| `processes`" in PAGE


def fields_v1(value: Any, key: str) -> dict[str, Any]:
    """Return the fieldsV1 of a value, in which items of lists have a key or their place."""
    if isinstance(value, dict):
        return {f"f:{name}": fields_v1(item, key) for name, item in value.items()}
    tree: dict[str, Any] = {}
    for place, item in enumerate(value) if isinstance(value, list) else ():
        name = f"i:{place}"
        if isinstance(item, dict) and key in item:
            name = "k:" + json.dumps({key: item[key]}, separators=(",", ":"))
        elif not isinstance(item, dict):
            name = "v:" + json.dumps(item)
        tree[name] = {".": {}} | fields_v1(item, key)
    return tree


LEVELS = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "c"])},
    optional={"below": st.just(0.1), "batchShare": st.just(0.5), "maxTopP": st.just(0.5)},
)


@given(levels=st.lists(LEVELS, max_size=3, unique_by=lambda level: level["name"]))
@pytest.mark.parametrize("key", ["name", ""])
def test_fields_in_lists_that_were_dropped_are_known_by_server_side_apply(
    key: str, levels: list[dict[str, Any]]
) -> None:
    spec = {"degrade": {"levels": levels}, "imagePullSecrets": ["a"], "slo": {}}
    entry = {"operation": "Apply", "fieldsV1": {"f:spec": fields_v1(spec, key)}}

    def dropped(live: dict[str, Any]) -> set[str]:
        found = dropped_fields({"metadata": {"managedFields": [entry]}, "spec": live})
        assert all(remedy(path, None).startswith("write ") for path in found)
        return set(found)

    def expected(places: list[str]) -> set[str]:
        return {
            f"spec.degrade.levels[{place}].{name}"
            for place, level in zip(places, levels, strict=True)
            for name in level
            if name in ("below", "batchShare")
        }

    assert not dropped(spec)
    # Items that the object no longer has are called by their keys.
    absent = [f"name={level['name']}" if key else str(n) for n, level in enumerate(levels)]
    assert dropped({"slo": {}}) == expected(absent) | {"spec.degrade.levels"}

    # Items that it has are called by their places.
    kept = [{"name": level["name"]} for level in levels]
    there = {"degrade": {"levels": kept}}
    assert dropped(there) == expected([str(n) for n in range(len(levels))])
    if key:
        there["degrade"]["levels"] = kept[::-1]
        assert dropped(there) == expected([str(n) for n in range(len(levels))][::-1])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"spec": 1}', '{"spec": {"memory": []}}'])
def test_an_annotation_that_says_nothing_is_passed_over(text: str) -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": text}
    assert not dropped_fields({"metadata": {"annotations": annotations}, "spec": {}})


def test_what_kubectl_prints_is_rewritten_item_by_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"model": {"source": "hf://a/b", "name": "m"}, "memory": {"threshold": 0.9}}
    head = {"apiVersion": "serving.ullage.dev/v1alpha1", "kind": "LLMService"}
    items = [{**head, "metadata": {"name": name}, "spec": spec} for name in ("a", "b")]
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    assert main(["upgrade-manifest", "-f", str(path)]) == 0
    [made] = yaml.safe_load_all(capsys.readouterr().out)
    assert [each["spec"]["memory"] for each in made["items"]] == [{"thresholdPercent": 90}] * 2

    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": []}))
    assert main(["upgrade-manifest", "-f", str(path)]) == 2
    assert "holds no LLMService" in capsys.readouterr().err
