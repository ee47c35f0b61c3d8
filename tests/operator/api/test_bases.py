"""What services share stands in a base: under what they say themselves, and never in its way."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import base_definition
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_cli.main import main
from ullage_operator.api import schema
from ullage_operator.api.bases import Bases, base_problems, is_default, merged
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse, parse_filled
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.spec import Service

Make = Callable[..., dict[str, Any]]
DEFINITION = schema.load_schema()
REFS = {"baseRefs": [{"name": "a"}, {"name": "b"}]}


def read(manifest: dict[str, Any], **specs: Any) -> Service:
    return parse(manifest, bases=Bases(specs))


def test_a_base_says_what_the_service_leaves_out(manifest: Make) -> None:
    made = manifest(baseRefs=[{"name": "a"}], pools={"single": {"replicas": 3}})
    base = {"router": {"replicas": 4}, "pools": {"single": {"replicas": 5, "shmSize": "1Gi"}}}
    spec = read(made, a=base).spec
    assert spec.router.replicas == 4
    assert (spec.pools["single"].replicas, spec.pools["single"].shm_size) == (3, "1Gi")
    assert not spec.router.public_stats, "neither says it"


def test_a_later_base_wins_whatever_it_says(manifest: Make) -> None:
    """Bases have no defaults, so the last may bring a default back."""
    four = {"router": {"replicas": 4}}
    two = {"router": {"replicas": 2}}
    assert read(manifest(**REFS), a=four, b=two).spec.router.replicas == 2
    assert read(manifest(**REFS), a=two, b=four).spec.router.replicas == 4
    assert read(manifest(**REFS), a=four, b={}).spec.router.replicas == 4


def test_what_an_api_server_filled_in_counts_as_not_said(manifest: Make) -> None:
    made = manifest(baseRefs=[{"name": "a"}], router={"replicas": 2})
    stored, problems = schema.complete(DEFINITION, made)
    assert not problems
    bases = Bases({"a": {"router": {"replicas": 4}}})
    assert parse_filled(stored, bases)[0] == parse(made, bases=bases)
    assert parse(made, bases=bases).spec.router.replicas == 4


def test_pools_of_a_base_take_the_place_of_the_default_pool(manifest: Make) -> None:
    shared = {"pools": {"large": {"role": "Large", "gpus": 4}}}
    made = manifest(baseRefs=[{"name": "a"}])
    assert list(read(made, a=shared).spec.pools) == ["large"]
    made = manifest(baseRefs=[{"name": "a"}], pools={"single": {"replicas": 2}})
    assert list(read(made, a=shared).spec.pools) == ["single", "large"]


def test_a_base_gives_pools_their_roles_and_the_first_one_its_size(manifest: Make) -> None:
    made = manifest(baseRefs=[{"name": "a"}])
    made["spec"]["pools"] = {"big": {}}
    shared = {"pools": {"small": {"replicas": 3}, "big": {"role": "Large"}}}
    pools = read(made, a=shared).spec.pools
    assert [(name, pool.role, pool.replicas) for name, pool in pools.items()] == [
        ("small", "standard", 3),
        ("big", "large", 1),
    ]


def pod(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


def engine(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "engine", **fields}]}


def test_pod_templates_are_merged_by_the_names_of_containers(manifest: Make) -> None:
    theirs = pod(nodeSelector={"gpu": "h200"}, **engine(env=[{"name": "A", "value": "base"}]))
    own = pod(nodeSelector={"zone": "b"}, **engine(env=[{"name": "B", "value": "own"}]))
    made = manifest(baseRefs=[{"name": "a"}], pools={"single": own})
    template = read(made, a={"pools": {"single": theirs}}).spec.pools["single"].pod_template
    assert template["spec"]["nodeSelector"] == {"gpu": "h200", "zone": "b"}
    [container] = template["spec"]["containers"]
    assert {each["name"] for each in container["env"]} == {"A", "B"}


def test_a_base_that_is_missing_is_named_with_the_place(manifest: Make) -> None:
    with pytest.raises(InvalidManifest) as refused:
        read(manifest(**REFS), a={})
    [problem] = refused.value.problems
    assert str(problem) == (
        "spec.baseRefs[1].name: there is no LLMServiceBase b; create it, or leave it out"
    )


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"router": {"replicas": 0}}, "spec.router.replicas: must be at least 1, not 0"),
        ({"memory": {"safetyReserve": "few"}}, "spec.memory.safetyReserve: must be a quantity"),
        ({"pools": {"single": {"gpus": 3}}}, "gpus must equal parallelism.tensor"),
        ({"healing": {"silentAfter": "1s"}}, "must be at least 30s"),
    ],
)
def test_what_comes_of_a_base_is_checked_as_by_an_api_server(
    manifest: Make, base: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidManifest, match="LLMServiceBase a") as refused:
        read(manifest(baseRefs=[{"name": "a"}]), a=base)
    assert words in str(refused.value)


def leaves(node: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the whole numbers of a definition's sections, with their paths."""
    found = []
    for name, each in node.get("properties", {}).items():
        if each.get("type") == "integer" and "default" in each:
            found.append(((*path, name), each))
        found += leaves(each, (*path, name))
    return found


NUMBERS = leaves(DEFINITION["properties"]["spec"])


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


@settings(max_examples=40, deadline=None)
@given(place=st.sampled_from(NUMBERS), own=st.integers(1, 3), theirs=st.integers(1, 3))
def test_a_field_is_the_services_unless_it_is_the_default(
    place: tuple[tuple[str, ...], Any], own: int, theirs: int
) -> None:
    path, node = place
    section = DEFINITION["properties"]["spec"]
    stored = nested(path, own)
    schema.fill(section, stored)
    value: Any = merged(section, stored, nested(path, theirs), has_defaults=True)
    for name in path:
        value = value[name]
    assert value == (theirs if is_default(node, own) else own)


def test_the_definition_of_bases_is_that_of_services(capsys: pytest.CaptureFixture[str]) -> None:
    made = yaml.safe_load(base_definition.TARGET.read_text(encoding="utf-8"))
    assert made == base_definition.definition(), "run python scripts/base_definition.py"
    spec = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert "default" not in str(spec["properties"]["router"]["properties"]["replicas"])
    assert "baseRefs" not in spec["properties"]
    assert "required" not in spec["properties"]["model"]


def base(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.ullage.dev/v1alpha1",
        "kind": "LLMServiceBase",
        "metadata": {"name": "shared"},
        "spec": spec,
    }


def test_a_base_is_read_as_the_api_server_reads_it() -> None:
    assert base_problems(DEFINITION, base(router={"replicas": 4})) == []
    [unknown] = base_problems(DEFINITION, base(router={"replica": 4}))
    assert str(unknown) == "spec.router.replica: unknown field; did you mean replicas?"
    for own in ({"replicas": 2}, {"stop": True}):
        [not_shared] = base_problems(DEFINITION, base(**own))
        assert "unknown field" in str(not_shared)
    [wrong] = base_problems(DEFINITION, base(router={"replicas": "four"}))
    assert "spec.router.replicas" in str(wrong)
    [other] = base_problems(DEFINITION, base() | {"kind": "LLMService"})
    assert "must be LLMServiceBase" in str(other)


@pytest.fixture
def files(tmp_path: Path, manifest: Make) -> tuple[str, str]:
    made = manifest(baseRefs=[{"name": "shared"}], router={"replicas": 2})
    paths = tmp_path / "service.yaml", tmp_path / "base.yaml"
    for path, document in zip(paths, (made, base(router={"replicas": 4})), strict=True):
        path.write_text(yaml.safe_dump(copy.deepcopy(document)), encoding="utf-8")
    return str(paths[0]), str(paths[1])


def test_a_plan_has_what_bases_say(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    service, shared = files
    assert main(["plan", "-f", service, "--base", shared]) == 0
    shown = capsys.readouterr()
    objects = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(shown.out)}
    assert objects["Deployment", "demo-router"]["spec"]["replicas"] == 4
    assert "spec.router.replicas is the default, so a base overrides it" in shown.err


def test_a_plan_names_the_base_whose_file_is_missing(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", files[0]]) == 2
    assert "spec.baseRefs[0].name: there is no LLMServiceBase shared" in capsys.readouterr().err


def test_bases_are_no_part_of_a_release(manifest: Make) -> None:
    """Moving a field from services to a base changes nothing of them."""
    own = read(manifest(pools={"single": {"replicas": 3}}, router={"replicas": 4})).spec
    made = manifest(baseRefs=[{"name": "a"}])
    shared = read(made, a={"pools": {"single": {"replicas": 3}}, "router": {"replicas": 4}}).spec
    before = to_api(own)
    after = to_api(shared)
    assert before.pop("baseRefs") == []
    assert after.pop("baseRefs") == [{"name": "a"}]
    assert before == after
