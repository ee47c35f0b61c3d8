"""Keeps README's file tree equal to the code: one line a file, from the file's docstring.

usage: python scripts/readme_tree.py [--check]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "engine/ullage_engine",
    "operator/ullage_router",
    "operator/ullage_operator",
    "proto/ullage_rpc",
)
LONGEST = 100
"""Letters of a first paragraph that is taken whole; of a longer one its first sentence."""


def tree() -> str:
    """The lines of all packages."""
    return "".join(line for package in PACKAGES for line in lines(ROOT / package))


def lines(package: Path) -> Iterator[str]:
    yield f"{package.relative_to(ROOT).as_posix()}/\n"
    files = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    for path in sorted(files, key=lambda path: (len(path.parts), path)):
        yield f"  {path.relative_to(package).as_posix():26} {clause(path)}\n"


def clause(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    if len(first) > LONGEST:
        first = re.split(r"(?<=[a-z)`])\. |: `python|: one YAML|; ", first)[0]
    return first.rstrip(".")


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    start = text.index(f"{PACKAGES[0]}/\n")
    end = text.index("proto/ullage/  ", start)
    wanted = text[:start] + tree() + text[end:]
    if "--check" in sys.argv and wanted != text:
        print("README.md: the file tree is not that of the code; run scripts/readme_tree.py")
        return 1
    if wanted != text:
        readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
