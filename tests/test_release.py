"""scripts/release.py: versions, news, and the tree that a release needs."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
release = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "release.py")))
commit_message = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "commit_message.py")))

VERSIONS = st.tuples(*[st.integers(0, 99)] * 3).map(lambda parts: ".".join(map(str, parts)))


@given(VERSIONS, VERSIONS)
def test_only_a_newer_version_follows(version: str, current: str) -> None:
    if Version(version) > Version(current):
        release.check_version(version, current)
    else:
        with pytest.raises(release.ReleaseError, match="use a higher one"):
            release.check_version(version, current)


@pytest.mark.parametrize("version", ["", "1", "0.2", "v0.2.0", "0.2.0rc1", "0.2.0.0", "next"])
def test_a_version_of_another_form_is_refused(version: str) -> None:
    with pytest.raises(release.ReleaseError, match=r"use one such as 1\.2\.3"):
        release.check_version(version, "0.1.0")


def test_the_examples_of_the_help_name_versions_that_can_follow() -> None:
    versions = re.findall(r"^  release\.py (\S+)", str(release.__doc__), re.MULTILINE)
    assert versions
    for version in versions:
        release.check_version(version, release.current_version())


def test_the_version_is_written_where_it_is_read() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    chart = (ROOT / "charts/ullage/Chart.yaml").read_text(encoding="utf-8")
    assert 'version = "9.8.7"' in release.with_project_version(project, "9.8.7")
    changed = release.with_chart_version(chart, "9.8.7")
    assert "\nversion: 9.8.7\n" in changed
    assert "\nappVersion: 9.8.7\n" in changed
    assert changed.count("9.8.7") == 2


def test_requirements_are_the_wheels() -> None:
    names = ["Jinja2-3.1.6-py3-none-any.whl", "ullage-0.2.0-py3-none-linux_x86_64.whl"]
    assert release.requirements([Path(name) for name in names]) == [
        "jinja2==3.1.6",
        "ullage==0.2.0",
    ]


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"tank")
    (tmp_path / "SHA256SUMS").write_text(release.checksums([tmp_path / "a"]), encoding="utf-8")
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, check=False)
    assert done.returncode == 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with what the first steps of a release read."""
    root = tmp_path / "tree"
    for name in ("pyproject.toml", "CHANGELOG.md", "scripts/release.py", "newsfragments/README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet")
    (root / "newsfragments/+tank.feature.md").write_text("Tanks have room.\n", encoding="utf-8")
    commit_all(root)
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True)


def commit_all(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "tests: make a tree")


def dry_run(root: Path, version: str = "9.0.0") -> subprocess.CompletedProcess[str]:
    return run_release(root, version, "--dry-run")


def run_release(root: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/release.py", *arguments]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)} | more
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def test_a_dry_run_shows_the_news_and_changes_nothing(tree: Path) -> None:
    done = dry_run(tree)
    assert done.returncode == 0, done.stderr
    assert "## 9.0.0" in done.stdout
    assert "- Tanks have room." in done.stdout
    git(tree, "diff", "--exit-code")


def test_a_tree_that_is_not_ready_is_refused(tree: Path) -> None:
    (tree / "newsfragments/+tank.feature.md").unlink()
    assert "the tree has changes" in dry_run(tree, "9.0.1").stderr

    commit_all(tree)
    refused = dry_run(tree, "9.0.1")
    assert "newsfragments/ is empty" in refused.stderr
    assert refused.returncode == 1


@pytest.fixture
def programs(tree: Path, tmp_path: Path) -> dict[str, str]:
    """An environment with an identity for git, and programs that fail as soon as they run."""
    shutil.copy(SCRIPTS / "images.py", tree / "scripts")
    shutil.copy(ROOT / "hatch_build.py", tree)
    commit_all(tree)
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("cyclonedx-py", "helm"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "t", f"GIT_{role}_EMAIL": "t@example.org"}
    return environment


def test_a_tag_of_another_commit_is_refused(tree: Path, programs: dict[str, str]) -> None:
    git(tree, "tag", "v9.0.0")
    refused = run_release(tree, "9.0.0", **programs)
    assert "tag v9.0.0 is at" in refused.stderr
    assert "use a higher version" in refused.stderr


def test_a_commit_without_its_tag_gets_it(tree: Path, programs: dict[str, str]) -> None:
    """The tag may fail after the commit, as without a key to sign it."""
    project = tree / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(release.with_project_version(text, "9.0.0"), encoding="utf-8")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "release: publish 9.0.0")
    (tree / "art").mkdir()
    (tree / "art" / "ullage.whl").write_text("made before", encoding="utf-8")

    done = run_release(tree, "9.0.0", **programs)

    assert "HEAD is v9.0.0: making its artefacts" in done.stdout, done.stderr
    git(tree, "rev-parse", "v9.0.0")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--images", "engin"], "--images engin is none of operator, engine"),
        (["--registry", "ghcr.io"], "--registry 'ghcr.io' is not HOST/FOLDER"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_done(
    tree: Path, arguments: list[str], reason: str
) -> None:
    shutil.copy(SCRIPTS / "images.py", tree / "scripts")
    shutil.copy(ROOT / "hatch_build.py", tree)
    assert reason in run_release(tree, "9.0.0", *arguments).stderr


def test_a_folder_that_is_no_repository_is_an_error_in_one_line(tree: Path) -> None:
    shutil.rmtree(tree / ".git")
    refused = dry_run(tree)
    assert refused.stderr.startswith("error: git status: ")
    assert refused.returncode == 1


def test_a_registry_on_this_machine_has_no_tls() -> None:
    for registry in ("localhost:5000/u", "127.0.0.1/u", "[::1]:5000/u"):
        assert release.is_local(registry)
    for registry in ("ghcr.io/u", "localhost.example:5000/u", "127.0.0.10/u", ""):
        assert not release.is_local(registry)


@pytest.mark.parametrize(
    "message",
    [
        "router: log an accepted request once\n\nThe second line told nothing.\n",
        "kv/store: own pending blocks\n\nWhy.\n# a comment of git\n",
        "Merge branch 'x'\n",
    ],
)
def test_a_good_message_of_a_commit_passes(message: str) -> None:
    assert not commit_message.faults(message)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("", "is not `room: verb object`"),
        ("Log once\n\nWhy.\n", "is not `room: verb object`"),
        ("router: log once\n", "there is no body"),
        ("router: log once.\n\nWhy.\n", "ends with a full stop"),
        ("router: log once\nWhy.\n", "line 2 is not empty"),
        (f"router: {'x' * 80}\n\nWhy.\n", "subject has 88 characters"),
    ],
)
def test_a_fault_of_a_message_is_named(message: str, fault: str) -> None:
    assert any(fault in each for each in commit_message.faults(message))
