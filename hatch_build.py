"""Make what the wheel, editable or not, has beside its sources: proto modules and the library."""

import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

SOURCES = Path("engine/ullage_engine/native/src")
LIBRARY = SOURCES.parent / "libullage.so"

COMPILER = "ziglang==0.17.1"
"""Clang with the headers of old C libraries: what it builds runs on any Linux of the last years."""

TARGET = ["-target", "x86_64-linux-gnu.2.28"]
OPTIONS = ["-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall"]
OPTIONS += ["-ffp-contract=off"]
"""Options of all sources. No compiler may fuse a product with a sum on its own, which each would do
in other places: answers have the same bits with any of them."""

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]

OWN_COMPILER = "ULLAGE_CXX"
"""Variable that names another compiler with its options, such as `g++` or `clang++ -g`."""

OBJECTS = {
    "library": ("library.cpp", []),
    "avx2": ("isa.cpp", ["-DULLAGE_ISA=avx2", *AVX2]),
    "avx512": ("isa.cpp", ["-DULLAGE_ISA=avx512", "-DULLAGE_AVX512=1", *AVX2, *AVX512]),
    "portable": ("isa.cpp", ["-DULLAGE_ISA=portable", "-DULLAGE_PORTABLE=1", "-Os"]),
}
"""Object files: source, and options beside those of all. They are linked in this order: of inline
functions that several have, as those of Team, the linker keeps the first, which must run on any
processor."""


def get_build_hook() -> type:
    """Returns what hatchling, which is only where packages are built, calls for each of them."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class BuildHook(BuildHookInterface):
        def dependencies(self) -> list[str]:
            """Returns what is needed beside what every build needs."""
            return [COMPILER] if has_library() and not os.environ.get(OWN_COMPILER) else []

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            compile_protos(Path(self.root))
            if has_library():
                compile_library(Path(self.root))
                build_data["pure_python"] = False
                build_data["tag"] = wheel_tag()

    return BuildHook


def has_library(machine: str = platform.machine()) -> bool:
    """Whether the library is for this platform; others compute with torch alone."""
    return sys.platform == "linux" and machine == "x86_64"


def wheel_tag(machine: str = platform.machine()) -> str:
    """Returns the tag of wheels that are built here."""
    if not has_library(machine):
        return "py3-none-any"
    # What another compiler links may need this machine's C library.
    return f"py3-none-{'linux' if os.environ.get(OWN_COMPILER) else 'manylinux_2_28'}_x86_64"


def compile_protos(root: Path) -> None:
    """Compiles proto/**/*.proto into Python modules."""
    from grpc_tools import protoc

    folder = root / "proto"
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    includes = [f"-I{folder}", f"-I{files('grpc_tools') / '_proto'}"]
    sources = [str(path) for path in sorted(folder.rglob("*.proto"))]
    if protoc.main(["protoc", *includes, *outputs, *sources]):
        raise RuntimeError("protoc failed; its message above names the file and line")


def compile_library(root: Path, library: Path | None = None) -> None:
    """Compile the C++ library of `ullage_engine.native`, once for each instruction set.

    `library`: the file to write, by default the package's.
    """
    own = os.environ.get(OWN_COMPILER)
    compiler = shlex.split(own) if own else [sys.executable, "-m", "ziglang", "c++", *TARGET]
    # Nothing of C++'s own library is needed, but g++ before 13 has no option to say so.
    linking = ["-shared", "-s", *([] if own else ["-nostdlib++"])]
    source, library = root / SOURCES, library or root / LIBRARY
    built = {name: library.with_name(f"{name}.{os.getpid()}.tmp.o") for name in OBJECTS}

    def compile_one(name: str) -> None:
        file, options = OBJECTS[name]
        run([*compiler, *OPTIONS, *options, "-c", str(source / file), "-o", str(built[name])])

    partial = library.with_suffix(f".{os.getpid()}.tmp")
    try:
        with ThreadPoolExecutor(len(OBJECTS)) as threads:
            list(threads.map(compile_one, OBJECTS))
        objects = [str(path) for path in built.values()]
        run([*compiler, *linking, "-o", str(partial), *objects, "-lpthread", "-lm"])
        # Processes that have mapped the old file keep it.
        partial.replace(library)
    finally:
        for path in (*built.values(), partial):
            path.unlink(missing_ok=True)


def run(command: list[str]) -> None:
    """Runs a compiler, whose messages go to standard error."""
    advice = f"failed: {shlex.join(command)}; {OWN_COMPILER} can name another C++ compiler"
    try:
        status = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise RuntimeError(f"{advice} ({error.strerror})") from error
    if status:
        raise RuntimeError(advice)


if __name__ == "__main__":
    compile_library(Path(__file__).parent)
