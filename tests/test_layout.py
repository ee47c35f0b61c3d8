"""Guards of the source tree: folders have the names and the docstrings that tools and readers need.

Which room may import which is import-linter's affair (pyproject.toml).
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    ROOT / "engine/ullage_engine",
    ROOT / "engine/ullage_kv",
    ROOT / "operator/ullage_router",
    ROOT / "operator/ullage_operator",
    ROOT / "operator/ullage_cli",
    ROOT / "operator/ullage_verify",
    ROOT / "operator/ullage_bench",
    ROOT / "operator/ullage_replay",
    ROOT / "operator/ullage_offline",
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


def test_unrelated_values_are_assigned_on_lines_of_their_own(subtests: pytest.Subtests) -> None:
    """`a, b = x, y` is for a swap, or for values that read an earlier target."""
    for path in sources():
        lines = [node.lineno for node in ast.walk(ast.parse(text(path))) if is_packed(node)]
        with subtests.test(str(path.relative_to(ROOT))):
            assert not lines


def sources() -> Iterator[Path]:
    """Yield every file of Python that people write."""
    for folder in ("operator", "engine", "proto", "benchmarks", "scripts", "tests", "examples"):
        yield from (p for p in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in p.name)


def is_packed(node: ast.AST) -> bool:
    """Return whether an assignment of a tuple to a tuple could be several assignments."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    [target, *others] = node.targets
    if others or not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    if any(isinstance(each, ast.Starred) for each in (*target.elts, *node.value.elts)):
        return False
    pairs = itertools.combinations(range(len(target.elts)), 2)
    return not any(depends(node.value.elts[j], target.elts[i]) for i, j in pairs)


def depends(value: ast.expr, target: ast.expr) -> bool:
    """Return whether a value may be another one once the target is assigned."""
    inside = list(ast.walk(value))
    if isinstance(target, ast.Name):
        return any(isinstance(each, ast.Name) and each.id == target.id for each in inside)
    # A call, an attribute or an item may read what an attribute or an item is set to.
    return any(isinstance(each, ast.Attribute | ast.Call | ast.Subscript) for each in inside)


def test_the_check_of_assignments_knows_a_swap() -> None:
    packed = [is_packed(ast.parse(line).body[0]) for line in ("a, b = 1, 2", "a.x, b = c, d")]
    needed = [
        is_packed(ast.parse(line).body[0])
        for line in ("a, b = b, a", "a, b = x, a + 1", "s.a, s.b = 1, s.f()", "a, b = f()")
    ]
    assert all(packed)
    assert not any(needed)
