"""Make the bundle with which a GPU machine without a network can run benchmarks/gpu.

The GPU machine has Python, torch and the packages of transformers (docs/guide/gpu.md lists them).
The bundle is a folder with the missing wheels, the project's own wheel, and tokens computed on a
CPU for comparison. `scripts/gpu.sh` installs from this folder. Files that are still valid are kept,
so a second run needs no network.

examples:
  python scripts/gpu_bundle.py                       dist/gpu-bundle, for Python 3.12
  python scripts/gpu_bundle.py --python 3.11 --out /tmp/bundle-3.11
  ULLAGE_CXX=g++ python scripts/gpu_bundle.py        with g++ instead of ziglang

exit status: 0 made, 1 something is missing or too large, 130 interrupted
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "dist" / "gpu-bundle"
CONSTRAINTS = ROOT / "constraints.txt"

PACKAGES = (
    "cffi",
    "click",
    "cryptography",
    "execnet",
    "gguf",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "grpcio-status",
    "h11",
    "httptools",
    "iniconfig",
    "llguidance",
    "msgspec",
    "packaging",
    "pluggy",
    "prometheus_client",
    "protobuf",
    "pycparser",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "pyzmq",
    "setproctitle",
    "sortedcontainers",
    "uvicorn",
    "wsproto",
    "xxhash",
)
"""Packages that the GPU machine lacks or has in an unknown version, pinned by constraints.txt."""

OTHER_PINS = {"execnet": "2.1.2", "pytest_xdist": "3.8.0"}
"""Packages that only the GPU machine needs, to run the kernel tests on many cores."""

PYTHON = "3.12"
MACHINE = "x86_64"
NEWEST_GLIBC = 39
"""Minor version of glibc 2 in Ubuntu 24.04, which can run wheels for this and older versions."""

MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
"""Maximum total size of the bundle and the tracked files."""

WHEEL_SOURCES = ("engine", "operator", "proto", "crds", "pyproject.toml", "hatch_build.py")
ORACLE_SOURCES = (
    "benchmarks/gpu/tokens.py",
    "benchmarks/gpu/sequences.py",
    "benchmarks/support/small_models.py",
)
INTERRUPTED = 130


class BundleError(Exception):
    """The bundle cannot be made. The message names the reason and the remedy."""


def canonical(name: str) -> str:
    """Return a package's name as it is spelled in wheel file names."""
    return re.sub(r"[-_.]+", "_", name).lower()


def read_pins(constraints: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the pinned version of each package in PACKAGES.

    Raises:
        BundleError: a package has no pin.
    """
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    versions = OTHER_PINS | {canonical(name): version.strip() for name, _, version in pairs}

    missing = [name for name in PACKAGES if canonical(name) not in versions]
    if missing:
        raise BundleError(f"{constraints.name} pins no {', '.join(missing)}: add NAME==VERSION")
    return {name: versions[canonical(name)] for name in PACKAGES}


def find_wheel(wheels: Path, name: str, version: str) -> Path | None:
    """Return the wheel of a package and version, or None if the folder does not have this wheel."""
    for path in wheels.glob("*.whl"):
        if path.name.lower().startswith(f"{canonical(name)}-{version}-"):
            return path
    return None


def fetch_wheels(pins: dict[str, str], wheels: Path, python: str) -> list[Path]:
    """Download the wheels that the folder lacks, and return all needed wheels."""
    missing = [f"{name}=={version}" for name, version in pins.items()
               if find_wheel(wheels, name, version) is None]  # fmt: skip
    if missing:
        with step(f"download {len(missing)} wheels for Python {python}"), staging(wheels) as folder:
            platforms = [f"manylinux_2_{minor}" for minor in range(NEWEST_GLIBC, 16, -1)]
            options = [f"--platform={name}_{MACHINE}" for name in (*platforms, "manylinux2014")]
            options += ["--only-binary=:all:", f"--python-version={python}"]
            run_pip(
                ["download", "--quiet", "--no-deps", *options, f"--dest={folder}", *missing],
                f"pip cannot fetch {', '.join(missing)}",
                "connect to a package index, or name a folder of wheels in PIP_FIND_LINKS",
            )
    paths = [find_wheel(wheels, name, version) for name, version in pins.items()]
    return [path for path in paths if path is not None]


def build_wheel(wheels: Path) -> Path:
    """Build the project's own wheel, and return the wheel's path."""
    with step("build the project's wheel"), staging(wheels) as folder:
        run_pip(
            ["wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(ROOT)],
            "pip cannot build the project's wheel",
            "connect to a package index, which has hatchling, grpcio-tools and the compiler "
            "ziglang; ULLAGE_CXX=g++ does without ziglang",
        )
        (built,) = (path.name for path in folder.glob("*.whl"))
    return wheels / built


def run_pip(arguments: list[str], failure: str, remedy: str) -> None:
    """Run pip with these arguments.

    Raises:
        BundleError: pip failed.
    """
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], check=False)
    if done.returncode:
        raise BundleError(f"{failure}, see above: {remedy}")


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into `folder` at the end of the block.

    So an interrupted download leaves no partial file in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gpu-bundle-", dir=folder.parent) as name:
        yield Path(name)
        for path in Path(name).iterdir():
            path.replace(folder / path.name)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print the name of a step, and the seconds that the step took."""
    print(f"{what} ...", flush=True)
    started = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)


def write_oracle(out: Path) -> None:
    """Compute oracle.json, the reference tokens, with the GPU programme. This takes minutes."""
    command = [sys.executable, "-m", "benchmarks.gpu", "oracle", "--device=cpu"]
    with step("compute the oracle tokens on this CPU"), staging(out) as folder:
        done = subprocess.run([*command, f"--out={folder}"], cwd=ROOT, check=False)
        if done.returncode:
            raise BundleError(
                "the oracle tokens could not be computed, see above: "
                "`make install-dev` installs what the programme needs"
            )


def git(*arguments: str) -> str:
    """Return the output of git.

    Raises:
        BundleError: the folder is not a git repository.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BundleError(f"git {arguments[0]} failed, {done.stderr.strip()}: use a git checkout")
    return done.stdout


def source_files(*places: str) -> list[Path]:
    """Return the files in these folders that git does not ignore."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places)
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


def digest(paths: Iterable[Path]) -> str:
    """Return one SHA-256 over the names and contents of several files."""
    summed = hashlib.sha256()
    for path in paths:
        summed.update(f"{path.relative_to(ROOT)}\0{sha256(path)}\0".encode())
    return summed.hexdigest()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_manifest(out: Path) -> dict[str, Any]:
    """Return the manifest of the last bundle (empty if it is missing or cannot be read)."""
    try:
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def has_changed(path: Path, recorded: dict[str, Any] | None, sources: str) -> bool:
    """Return whether a file must be rebuilt because it is missing, damaged or out of date."""
    if recorded is None or not path.is_file():
        return True
    return recorded.get("sources") != sources or recorded.get("sha256") != sha256(path)


def described(path: Path, **more: str) -> dict[str, Any]:
    """Return the manifest's entry for a file."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path), **more}


def own_wheel(out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest entry for the project's wheel, which is rebuilt if a source changed."""
    sources = digest(source_files(*WHEEL_SOURCES))
    recorded = manifest.get("product")
    path = out / "wheels" / (recorded or {}).get("file", "none")
    if has_changed(path, recorded, sources):
        path = build_wheel(out / "wheels")
    return described(path, version=path.name.split("-")[1], sources=sources)


def oracle(out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the oracle tokens' manifest entry. Recompute the tokens if the programme changed."""
    sources = digest(source_files(*ORACLE_SOURCES))
    path = out / "oracle.json"
    if has_changed(path, manifest.get("oracle"), sources):
        write_oracle(out)
    return described(path, sources=sources)


def make(out: Path, python: str, *, has_oracle: bool) -> dict[str, Any]:
    """Make the bundle, and return its manifest.

    Without `has_oracle`, the oracle tokens stay unchanged.
    """
    manifest = read_manifest(out)
    if manifest.get("python", python) != python:
        remedy = "name another folder with --out, or remove it"
        raise BundleError(f"{out} is for Python {manifest['python']}, not {python}: {remedy}")

    pins = read_pins()
    wheels = fetch_wheels(pins, out / "wheels", python)
    product = own_wheel(out, manifest)
    for path in (out / "wheels").glob("*.whl"):
        if path not in wheels and path.name != product["file"]:
            path.unlink()

    new_manifest = {
        "python": python,
        "commit": git("rev-parse", "HEAD").strip(),
        "is_modified": bool(git("status", "--porcelain", "--untracked-files=no").strip()),
        "product": product,
        "wheels": [described(path, version=path.name.split("-")[1]) for path in wheels],
        "oracle": oracle(out, manifest) if has_oracle else manifest.get("oracle"),
    }
    partial = out / "manifest.tmp"
    partial.write_text(json.dumps(new_manifest, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / "manifest.json")
    return new_manifest


def check_size(bundle: Sequence[Path], tracked: Sequence[Path], limit: int = LIMIT_BYTES) -> str:
    """Check the size of the bundle and the tracked files, and return a line that reports it.

    Raises:
        BundleError: the size exceeds the limit.
    """
    sizes = {path: path.stat().st_size for path in (*bundle, *tracked)}
    total = sum(sizes.values())
    own = sum(sizes[path] for path in bundle)
    if total > limit:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        named = ", ".join(f"{path} {sizes[path] / MIB:.1f} MiB" for path in largest)
        raise BundleError(
            f"{total / MIB:.1f} MiB would travel, {limit / MIB:.0f} MiB may: "
            f"leave out some of the largest ({named})"
        )
    return (
        f"bundle {own / MIB:.1f} MiB and tracked files {(total - own) / MIB:.1f} MiB: "
        f"{total / MIB:.1f} of {limit / MIB:.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="dist/gpu-bundle")
    parser.add_argument("--python", default=PYTHON, metavar="X.Y", help="the machine's: 3.12")
    parser.add_argument(
        "--keep-oracle",
        action="store_true",
        help="no new oracle tokens (a rehearsal makes its own)",
    )
    arguments = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", arguments.python):
        parser.error(f"--python {arguments.python}: give a version such as 3.12")

    out = arguments.out.resolve()
    try:
        manifest = make(out, arguments.python, has_oracle=not arguments.keep_oracle)
        tracked = [ROOT / name for name in git("ls-files", "-z").split("\0") if name]
        bundle = [path for path in out.rglob("*") if path.is_file()]
        line = check_size(bundle, [path for path in tracked if path.is_file()])
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    print(f"{out}: {len(manifest['wheels']) + 1} wheels, commit {manifest['commit'][:12]}")
    print(line)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
