"""The reference of the API is that of the CRD, and leaves no field out."""

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "api_reference.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    path = ROOT / "crds" / "llmservices.serving.ullage.dev.yaml"
    read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return read


def test_the_page_is_of_this_crd() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "| `thresholdPercent` | integer 1 to 100 | `85` | Percent of the device's memory",
        "| `NAME.gpus` | integer 1 to 64 |  | GPUs of an engine,",
        "| **`secretName`** | string |  | Secret with one key a tenant",
        "* gpus must equal parallelism.tensor * parallelism.pipeline, which you may leave out ",
        "| `queue.timeout` | duration | `10s` | Longest wait",
        "| `pressureLevels[].belowPercent`",
    ],
)
def test_it_says_type_default_meaning_and_rules(
    reference: ModuleType, crd: dict[str, Any], line: str
) -> None:
    page = reference.render(crd).replace(
        "**`pressureLevels[].belowPercent`**", "`pressureLevels[].belowPercent`"
    )
    assert f"\n{line}" in page


def test_a_changed_default_changes_the_page(reference: ModuleType, crd: dict[str, Any]) -> None:
    changed = copy.deepcopy(crd)
    spec = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["batching"]["properties"]["maxSequences"]["default"] = 65
    assert "| `65` |" in reference.render(changed)
    assert "| `65` |" not in reference.render(crd)
