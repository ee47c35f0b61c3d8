"""A change of a room runs its tests and those of the rooms above; anything unknown runs all."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "changed_rooms.py"
FOLDERS = {each.name for each in (ROOT / "tests").iterdir() if each.is_dir()}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed_rooms", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("paths", "among", "not_among"),
    [
        (["operator/ullage_router/policy/decide.py"], {"router", "e2e"}, {"operator", "engine"}),
        (["engine/ullage_engine/worker/engine.py"], {"engine", "e2e"}, {"router", "operator"}),
        (["tests/router/policy/test_decide.py"], {"router"}, {"e2e", "engine"}),
        (["crds/llmservice.yaml", "docs/README.md"], {"operator", "kubeapi"}, {"router"}),
        (["README.md", "docs/guide/install.md"], set(), FOLDERS),
    ],
)
def test_rooms_of_a_change(paths: list[str], among: set[str], not_among: set[str]) -> None:
    rooms = load().rooms_of(paths, FOLDERS)
    assert among <= rooms
    assert not rooms & not_among


@pytest.mark.parametrize(
    "path",
    [
        "proto/ullage_common/config/config.py",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "scripts/test.sh",
        "tests/conftest.py",
        "tests/support/ullage_testing/ports.py",
        "something/new.py",
    ],
)
def test_what_no_rule_knows_runs_all(path: str) -> None:
    assert load().rooms_of(["docs/README.md", path], FOLDERS) is None


def test_every_rule_names_folders_that_exist() -> None:
    for folder, rooms in load().ROOMS.items():
        assert (ROOT / folder).is_dir(), folder
        assert set(rooms) <= FOLDERS, folder


def test_a_clone_without_a_change_runs_all(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def printed() -> str:
        command = [sys.executable, str(SCRIPT)]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "main")
    (tmp_path / "README.md").write_text("a")
    git("add", ".")
    git("commit", "-qm", "a")
    assert printed() == ""  # no origin/main

    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert printed() == ""

    folder = tmp_path / "engine" / "ullage_kv"
    folder.mkdir(parents=True)
    (folder / "new.py").write_text("")
    assert printed().split() == sorted(load().ROOMS["engine/ullage_kv"])
