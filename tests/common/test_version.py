"""Programs run from sources alone, where no metadata of an installed package says a version."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ullage_common
from ullage_common import version

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["ullage_engine.main", "ullage_router.main", "ullage_operator.main"]


@pytest.fixture(scope="module")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sources, and every installed package but Ullage."""
    packages = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(("ullage-", "_ullage", "__editable__")):
            (packages / path.name).symlink_to(path)
    folders = [*(ROOT / name for name in ("engine", "operator", "proto")), packages]
    return os.pathsep.join(map(str, folders))


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_start_from_sources_alone(program: str, python_path: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        # -S: the environment's site-packages, which know Ullage, are not on the path.
        return subprocess.run(
            [sys.executable, "-S", "-m", program, *arguments],
            env={"PYTHONPATH": python_path, "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    shown = run("--version")
    assert (shown.returncode, shown.stdout.split()[-1:]) == (0, ["unknown"]), shown.stderr
    helped = run("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    if program != "ullage_operator.main":
        wrong = run("--config", str(tmp_path / "none.yaml"))
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("error: ")
        assert wrong.stderr.count("\n") == 1


def test_an_installed_package_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ullage_common, "installed_version", {"ullage": "1.2.3"}.__getitem__)
    assert version() == "1.2.3"
