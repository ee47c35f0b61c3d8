"""Every manifest that a page or an example shows is one that the API takes."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_operator.api.bases import Bases, base_problems
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse
from ullage_operator.api.schema import load_schema

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md")]
)
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
BLOCK = re.compile(r"^([ \t]*)```ya?ml\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
PATCH = re.compile(r"kubectl patch (?:llms|llmservices?)\S* .*?-p '(\{.*?\})'")
GROUP = "serving.ullage.dev/"
OTHERS = {"scrape_configs", "receivers"}
"""First fields of other programs' files."""
SPEC = load_schema()["properties"]["spec"]
SPEC_FIELDS = SPEC["properties"].keys()
POOL_FIELDS = SPEC["properties"]["pools"]["additionalProperties"]["properties"].keys()
MINIMAL = {"model": {"source": "hf://a/b", "name": "m"}}


def laid_over(value: Any, under: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(under, dict):
        return value
    return under | {name: laid_over(item, under.get(name)) for name, item in value.items()}


def spec_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the spec that a part of a manifest is of."""
    if document.keys() <= {"spec", "metadata"} and "spec" in document:
        part = document["spec"]
    elif document.keys() <= SPEC_FIELDS:
        part = document
    else:
        assert document.keys() <= POOL_FIELDS, f"no part of a manifest has {sorted(document)}"
        part = {"pools": {"single": document}}
    result: dict[str, Any] = laid_over(part, MINIMAL)
    return result


def problems(documents: list[dict[str, Any]], specs: dict[str, Any] | None = None) -> list[str]:
    """Return what the API would refuse of the services and bases among some documents."""
    found: list[str] = []
    bases = [each for each in documents if each.get("kind") == "LLMServiceBase"]
    specs = {**(specs or {}), **{each["metadata"]["name"]: each["spec"] for each in bases}}
    for document in documents:
        is_own = str(document.get("apiVersion", GROUP)).startswith(GROUP)
        if not is_own or OTHERS & document.keys():
            continue
        if document.get("kind") == "LLMServiceBase":
            found += map(str, base_problems(load_schema(), document))
            continue
        if "kind" not in document:
            document = {
                "apiVersion": f"{GROUP}v1alpha1",
                "kind": "LLMService",
                "metadata": {"name": "s"},
                "spec": spec_of(document),
            }
        try:
            parse(document, bases=Bases(specs))
        except InvalidManifest as error:
            found += map(str, error.problems)
    return found


def shown(page: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the documents that a page shows, with the line at which they begin."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        yield line, list(yaml.safe_load_all(textwrap.dedent(match[2])))
    for match in PATCH.finditer(text):
        patch = without_nulls(json.loads(match[1].replace("NAME", "single")))
        yield text[: match.start()].count("\n") + 1, [patch]


def without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(item) for name, item in value.items() if item is not None}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_api_takes_every_manifest_that_a_page_shows(page: Path) -> None:
    wrong = [
        f"{page.relative_to(ROOT)}:{line}: {problem}"
        for line, documents in shown(page)
        for problem in problems(documents)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_api_takes_every_example(path: Path) -> None:
    assert not problems(list(yaml.safe_load_all(path.read_text(encoding="utf-8"))))


def test_a_wrong_manifest_is_found(tmp_path: Path) -> None:
    text = """
```yaml
spec:
  memory: {threshold: 0.9}
```
1. In a list:
   ```yaml
   routing: {ladder: [Wait]}
   ```
kubectl patch llms NAME --type=merge -p '{"spec":{"routing":{"lader":null,"queue":{"size":1}}}}'
"""
    (page := tmp_path / "page.md").write_text(text)
    found = [problem for _, documents in shown(page) for problem in problems(documents)]
    assert [each.partition(":")[0] for each in found] == [
        "spec.memory.threshold",
        "spec.routing.ladder[0]",
        "spec.routing.queue.size",
    ]
