#!/usr/bin/env python3
"""Print the folders in tests/ whose tests a change may break, or nothing if all tests may break.

usage: changed_rooms.py [BASE]

The change consists of all differences from BASE, including uncommitted and untracked files. The
default for BASE is the merge base with origin/main. A change in a folder of product code selects
the tests of that folder and of the packages that import it. All tests are selected if no rule
covers a file, if nothing has changed, or if there is no BASE.

examples:
  changed_rooms.py
  ULLAGE_TEST_ROOMS="$(changed_rooms.py HEAD~3)" scripts/test.sh .venv/bin/python
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import PurePath

UPSTREAM = "origin/main"
SERVICES = ("e2e", "observability")
"""Folders with tests of whole services, which any product package can break."""
ROOMS: dict[str, tuple[str, ...]] = {
    "operator/ullage_operator": ("operator", "kubeapi", "charts", "cli", *SERVICES),
    "operator/ullage_router": ("router", "replay", "cli", "offline", *SERVICES),
    "operator/ullage_cli": ("cli", "offline", *SERVICES),
    "operator/ullage_offline": ("offline",),
    "operator/ullage_verify": ("verify", "bench", "cli", "benchmarks", "e2e"),
    "operator/ullage_bench": ("bench", "cli"),
    "operator/ullage_replay": ("replay", "cli"),
    "engine/ullage_engine": ("engine", "kv", "replay", "benchmarks", *SERVICES),
    "engine/ullage_kv": ("kv", "engine", *SERVICES),
    "benchmarks": ("benchmarks",),
    "charts": ("charts", "observability"),
    "crds": ("operator", "kubeapi", "charts"),
    "examples": ("cli", "operator", "e2e"),
    "docs": (),
    "newsfragments": (),
    "scripts/ullage_clients": (),
}
"""Maps the folder of a changed file to folders in tests/. tests/test_*.py always run."""
ANY_FOLDER = "."


def rooms_of(paths: Iterable[str], folders: set[str]) -> set[str] | None:
    """Return the folders in tests/ that changed files may affect, or None for all folders.

    Args:
        paths: changed files, relative to the root of the repository.
        folders: names of the folders in tests/.
    """
    rooms = set[str]()
    for path in paths:
        rooms_of_path = _rooms_of_one(PurePath(path), folders)
        if rooms_of_path is None:
            return None
        rooms |= rooms_of_path
    return rooms


def _rooms_of_one(path: PurePath, folders: set[str]) -> set[str] | None:
    if path.parts[0] == "tests" and len(path.parts) > 2:
        room = path.parts[1]
        return {room} if room in folders - {"support"} else None

    for parent in path.parents:
        if str(parent) in ROOMS:
            return set(ROOMS[str(parent)])

    is_page = path.suffix == ".md" and len(path.parts) == 1
    return set() if is_page else None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def changed_paths(base: str) -> list[str]:
    """Return the files that differ from a commit, including untracked files.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    tracked = _git("diff", "--name-only", base).splitlines()
    untracked = _git("ls-files", "--others", "--exclude-standard").splitlines()
    return [*tracked, *untracked]


def main() -> int:
    """Print the selected folders in sorted order on one line."""
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return 0

    try:
        base = sys.argv[1] if len(sys.argv) > 1 else _git("merge-base", "HEAD", UPSTREAM)
        paths = changed_paths(base)
        folders = {each.split("/")[1] for each in _git("ls-files", "tests/*/*").splitlines()}
    except (OSError, subprocess.CalledProcessError):
        return 0  # no history to compare with

    rooms = rooms_of(paths, folders)
    if paths and rooms is not None:
        # A name that no folder has restricts the run to the files beside the folders.
        print(*(sorted(rooms) or [ANY_FOLDER]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
