"""Guards of the source tree: folders have the names and the docstrings that tools and readers need.

Which room may import which is import-linter's affair (pyproject.toml).
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    ROOT / "engine/ullage_engine",
    ROOT / "engine/ullage_kv",
    ROOT / "operator/ullage_router",
    ROOT / "operator/ullage_operator",
    ROOT / "operator/ullage_cli",
    ROOT / "proto/ullage_common",
]


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_no_directory_shadows_the_standard_library() -> None:
    # operator/__init__.py would end every Python started in the repository's root.
    folders = [*ROOT.iterdir(), *(ROOT / "tests").iterdir()]
    shadowing = [f for f in folders if f.name in sys.stdlib_module_names]
    assert not [f for f in shadowing if (f / "__init__.py").exists()]


def test_tests_are_not_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_folder_says_what_it_is(subtests: pytest.Subtests) -> None:
    """What it owns and what it may not know: two sentences at the least."""
    for package in PACKAGES:
        for folder in sorted({path.parent for path in package.rglob("*.py")} - {package}):
            with subtests.test(str(folder.relative_to(ROOT))):
                docstring = ast.get_docstring(ast.parse(text(folder / "__init__.py"))) or ""
                assert len(re.findall(r"\.(?=\s|$)", docstring)) >= 2, docstring
