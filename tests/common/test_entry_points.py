"""Programs of a wheel that was installed without the packages of an extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ullage_common.entry_points import OWN_PACKAGES, missing_extra

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Names under which packages are installed, where they differ."""
HIDE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == {package!r} else find_spec(name)
from ullage_common import entry_points
sys.exit(entry_points.{program}())
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
    package = OWN_PACKAGES[extra][-1]
    code = HIDE.format(package=package, program=function)
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = f"{program}: the package {package} is missing; pip install 'ullage[{extra}]'\n"
    assert done.stderr == expected


def test_each_extra_brings_the_packages_that_it_is_known_by() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    extras["cli"] += extras["operator"]
    for extra, packages in OWN_PACKAGES.items():
        for package in packages:
            name = DISTRIBUTIONS.get(package, package)
            assert any(each.startswith(name) for each in extras[extra]), (extra, package)
            assert not any(each.startswith(name) for each in project["dependencies"])
        assert missing_extra(extra) is None


def test_a_whole_installation_runs() -> None:
    code = "from ullage_common import entry_points; entry_points.router()"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: ullage-router" in done.stdout
