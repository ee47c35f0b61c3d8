"""Guards of the source tree: no package shadows the standard library, and sizes stay readable."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SOURCES = ["operator", "engine", "proto/ullage_rpc", "examples", "benchmarks", "scripts"]
SHORT_LINES = 10


def sources() -> list[Path]:
    return [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_directory_shadows_the_standard_library() -> None:
    # operator/__init__.py would end every Python started in the repository's root.
    folders = [*ROOT.iterdir(), *(ROOT / "tests").iterdir()]
    shadowing = [f for f in folders if f.name in sys.stdlib_module_names]
    assert not [f for f in shadowing if (f / "__init__.py").exists()]


def test_tests_are_not_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes_stay_readable(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines; split it"
    for function in functions(path):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{function.name}: {length} lines"


def test_two_thirds_of_the_functions_are_short() -> None:
    found = [function for path in sources() for function in functions(path)]
    short = [f for f in found if (f.end_lineno or 0) - f.lineno < SHORT_LINES]
    assert 3 * len(short) >= 2 * len(found), f"{len(short)} of {len(found)}"
