"""Guards of the source tree: sizes stay readable, and rooms stay rooms.

Which room may import which is import-linter's affair (pyproject.toml).
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
SHORT_FUNCTION_LINES = 10
MAX_FILES_PER_FOLDER = 12
MIN_LINES_OF_ONE_IMPORTER = 60
PACKAGES = [
    ROOT / "engine/ullage_engine",
    ROOT / "engine/ullage_kv",
    ROOT / "operator/ullage_router",
    ROOT / "operator/ullage_operator",
    ROOT / "proto/ullage_common",
]
SOURCES = ["operator", "engine", "proto/ullage_common", "examples", "benchmarks", "scripts"]


def sources() -> list[Path]:
    return [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Names of a file's functions, and their lines."""
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def module_name(path: Path) -> str:
    package = next(each for each in PACKAGES if path.is_relative_to(each))
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def imported_names(path: Path) -> set[str]:
    """Every dotted name that a file imports; of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def is_program(path: Path) -> bool:
    return 'if __name__ == "__main__":' in text(path)


def test_no_directory_shadows_the_standard_library() -> None:
    # operator/__init__.py would end every Python started in the repository's root.
    folders = [*ROOT.iterdir(), *(ROOT / "tests").iterdir()]
    shadowing = [f for f in folders if f.name in sys.stdlib_module_names]
    assert not [f for f in shadowing if (f / "__init__.py").exists()]


def test_tests_are_not_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_sizes_stay_readable(subtests: pytest.Subtests) -> None:
    for path in sources():
        with subtests.test(str(path.relative_to(ROOT))):
            assert len(text(path).splitlines()) <= MAX_FILE_LINES, "split it by idea"
            too_long = [each for each in functions(path) if each[1] > MAX_FUNCTION_LINES]
            assert not too_long


def test_two_thirds_of_the_functions_are_short() -> None:
    lengths = [length for path in sources() for _, length in functions(path)]
    num_short = sum(length <= SHORT_FUNCTION_LINES for length in lengths)
    assert 3 * num_short >= 2 * len(lengths), f"{num_short} of {len(lengths)}"


def test_folders_hold_few_files(subtests: pytest.Subtests) -> None:
    for package in PACKAGES:
        files = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
        for folder, count in Counter(path.parent for path in files).items():
            with subtests.test(str(folder.relative_to(ROOT))):
                assert count <= MAX_FILES_PER_FOLDER


def test_every_folder_says_what_it_is(subtests: pytest.Subtests) -> None:
    """What it owns and what it may not know: two sentences at the least."""
    for package in PACKAGES:
        for folder in sorted({path.parent for path in package.rglob("*.py")} - {package}):
            with subtests.test(str(folder.relative_to(ROOT))):
                docstring = ast.get_docstring(ast.parse(text(folder / "__init__.py"))) or ""
                assert len(re.findall(r"\.(?=\s|$)", docstring)) >= 2, docstring


def test_a_short_file_has_more_than_one_importer(subtests: pytest.Subtests) -> None:
    """What only one file of its package needs belongs into that file."""
    for package in PACKAGES:
        files = list(package.rglob("*.py"))
        imports = {path: imported_names(path) for path in files}
        for path in files:
            name, length = module_name(path), len(text(path).splitlines())
            if path.name == "__init__.py" or length >= MIN_LINES_OF_ONE_IMPORTER:
                continue
            importers = [other for other in files if name in imports[other] and other != path]
            with subtests.test(name):
                is_fine = len(importers) != 1 or is_program(path)
                assert is_fine, f"{length} lines, imported by {importers[0].name} alone"
