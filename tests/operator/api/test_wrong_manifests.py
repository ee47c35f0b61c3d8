"""A wrong manifest is answered with the field and the reason: by `ullage plan` and by the API.

The API server is the one that KUBECONFIG names, else the test server. It is given the definition
under a group of its own, so that nobody else's is in the way.
"""

import contextlib
import copy
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ullage_kubeapi.mistakes import RULES, TABLE, UNKNOWN, Wrong, manifest
from ullage_kubeapi.server import running
from ullage_kubeapi.trial import CRD, CRDS, MERGE, login, read_crd, until

from ullage_cli.main import main
from ullage_operator.api import schema
from ullage_operator.api.parsing import parse_stored

STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


@dataclass
class Api:
    """The API of one group on one server."""

    client: httpx.Client
    group: str
    kubeconfig: Path

    @property
    def services(self) -> str:
        return f"/apis/{self.group}/v1alpha1/namespaces/default/llmservices"

    def named(self, made: dict[str, Any]) -> dict[str, Any]:
        return made | {"apiVersion": f"{self.group}/v1alpha1"}

    def answer(self, made: dict[str, Any]) -> httpx.Response:
        return self.client.post(self.services, params=STRICT, json=self.named(made))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not os.environ.get("KUBECONFIG"):
            server = stack.enter_context(running())
            patch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path_factory.mktemp("api"))))
        client = stack.enter_context(httpx.Client(**login(), timeout=30))
        definition = under(f"t{os.getpid()}-{time.monotonic_ns() % 10**6}.ullage.dev")
        made = client.post(CRDS, json=definition)
        assert made.status_code == 201, made.text
        stack.callback(client.delete, f"{CRDS}/{definition['metadata']['name']}")
        seen = Api(client, definition["spec"]["group"], Path(os.environ["KUBECONFIG"]))
        until(lambda: client.get(seen.services).status_code == 200, "the definition is served")
        yield seen


def under(group: str) -> dict[str, Any]:
    """The definition as one of another group."""
    made: dict[str, Any] = read_crd()
    made["metadata"]["name"] = f"llmservices.{group}"
    made["spec"]["group"] = group
    made["spec"]["names"] |= {"shortNames": [], "categories": []}
    return made


def test_the_table_is_long_and_says_each_thing_once() -> None:
    assert len(TABLE) >= 70
    assert len({str((wrong.changes, wrong.field)) for wrong in TABLE}) == len(TABLE)


def test_every_rule_of_the_definition_is_in_the_table() -> None:
    """But for rules about changes, and those that a pool's section shares with the service's."""
    said = " ".join(problem for wrong in RULES for problem in planned(manifest(wrong)))
    for message in messages(schema.load_schema()):
        assert message in said, message


def messages(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for rule in node.get("x-kubernetes-validations", ()):
            if "oldSelf" not in rule["rule"]:
                yield rule["message"]
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from messages(each)


def planned(made: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in schema.complete(schema.load_schema(), made)[1]]


def test_the_plan_answers_with_field_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    path = tmp_path / "wrong.yaml"
    for wrong in TABLE:
        path.write_text(yaml.safe_dump(manifest(wrong)), encoding="utf-8")
        with subtests.test(wrong.field, changes=wrong.changes):
            assert main(["plan", "-f", str(path)]) == 2
            [line] = capsys.readouterr().err.splitlines()
            _, _, problem = line.partition(f"{path}: ")
            assert problem.startswith(f"{wrong.field}: ")
            assert wrong.text in problem


def test_the_api_answers_with_the_same_field_and_the_rules_text(
    api: Api, subtests: pytest.Subtests
) -> None:
    for wrong in TABLE:
        answer = api.answer(manifest(wrong))
        with subtests.test(wrong.field, changes=wrong.changes):
            assert answer.status_code in (400, 422), answer.text
            if wrong in UNKNOWN:
                assert f'unknown field "{wrong.field}"' in answer.json()["message"]
                continue
            causes = answer.json()["details"]["causes"]
            messages = [each["message"] for each in causes if plain(each["field"]) == wrong.field]
            assert messages, causes
            assert not wrong.is_rule or any(wrong.text in each for each in messages), causes


def plain(field: str) -> str:
    """A path as the plan spells it; the API server has keys of maps in brackets at times."""
    field = field.removeprefix(".")
    for pool in ("single", "large", "huge"):
        field = field.replace(f"pools[{pool}]", f"pools.{pool}")
    return field


@pytest.mark.parametrize("wrong", [UNKNOWN[1], TABLE[len(UNKNOWN) + 5], RULES[7]])
def test_kubectl_prints_field_and_reason(api: Api, wrong: Wrong, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(api.named(manifest(wrong))), encoding="utf-8")
    command = ["kubectl", "--kubeconfig", str(api.kubeconfig), "apply", "-f", str(path)]
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(
            [*command, "--dry-run=server", "-n", "default"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0
        assert wrong.field in plain(done.stderr)
        assert not wrong.is_rule or wrong.text in done.stderr
        return
    pytest.skip("kubectl is not installed")


def test_a_name_that_clients_ask_for_stays(api: Api) -> None:
    right = api.named(manifest(Wrong({"metadata.name": "right"}, "", "")))
    assert api.client.post(api.services, json=right).status_code == 201
    changed = {"spec": {"model": {"name": "other"}}}
    answer = api.client.patch(f"{api.services}/right", json=changed, headers=MERGE)
    [cause] = answer.json()["details"]["causes"]
    assert cause["field"] == "spec.model.name"
    assert "name cannot change" in cause["message"]
    image = {"spec": {"model": {"source": "file:///other"}}}
    assert api.client.patch(f"{api.services}/right", json=image, headers=MERGE).status_code == 200


@pytest.mark.parametrize("role", ["Standard", "Large"])
def test_scaling_is_about_the_pool_of_ordinary_requests(api: Api, role: str) -> None:
    """`kubectl scale` changes a pool under any name, or says why it does not."""
    name = f"scaled-{role.lower()}"
    pools = {"main": {"role": role}, "more": {"role": "Overflow", "replicas": 3}}
    made = api.named(manifest(Wrong({"metadata.name": name, "pools": pools}, "", "")))
    path = f"{api.services}/{name}"
    assert api.client.post(api.services, json=made).status_code == 201
    assert api.client.get(f"{path}/scale").json()["spec"]["replicas"] == 1

    scale = {"spec": {"replicas": 2}}
    answer = api.client.patch(f"{path}/scale", json=scale, headers=MERGE)
    assert answer.status_code == 200, answer.text
    scaled = parse_stored(api.client.get(path).json()).spec.pools
    assert {name: pool.replicas for name, pool in scaled.items()} == {"main": 2, "more": 3}

    own = {"spec": {"pools": {"main": {"replicas": 2}}}}
    assert api.client.patch(path, json=own, headers=MERGE).status_code == 200
    again = {"spec": {"replicas": 4}}
    answer = api.client.patch(f"{path}/scale", json=again, headers=MERGE)
    assert answer.status_code == 422
    assert "set pools.NAME.replicas" in answer.json()["message"]


@pytest.mark.parametrize("example", sorted(CRD.parents[1].glob("examples/*.yaml")), ids=str)
def test_the_api_takes_the_examples(api: Api, example: Path) -> None:
    made = yaml.safe_load(example.read_text(encoding="utf-8"))
    answer = api.answer(copy.deepcopy(made))
    assert answer.status_code == 201, answer.text
