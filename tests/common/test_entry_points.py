"""Programs of a wheel that was installed without the packages of an extra."""

import subprocess
import sys

import pytest

HIDE = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"kopf", "rich", "httpx", "uvicorn", "msgspec", "torch"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from ullage_common import entry_points
sys.exit(entry_points.%s())
"""


@pytest.mark.parametrize(
    ("function", "program", "extra"),
    [
        ("command", "ullage", "cli"),
        ("operator", "ullage-operator", "operator"),
        ("router", "ullage-router", "router"),
        ("engine", "ullage-engine", "engine"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(function: str, program: str, extra: str) -> None:
    command = [sys.executable, "-c", HIDE % function, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{program}: the package ")
    assert done.stderr.endswith(f"is missing; pip install 'ullage[{extra}]'\n")


def test_a_whole_installation_runs() -> None:
    code = "from ullage_common import entry_points; entry_points.router()"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: ullage-router" in done.stdout
