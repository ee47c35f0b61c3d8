"""Stop an installation that would bring CUDA to a Linux machine without an NVIDIA GPU.

PyTorch's default wheel for Linux needs gigabytes of CUDA packages. The CPU wheel is in a separate
index. This script runs pip with --dry-run, and installs nothing.

usage: python scripts/refuse_cuda_wheels.py CONSTRAINTS

exit status: 0 the installation may continue, 1 the wheel would install CUDA
"""

import importlib.util
import json
import shutil
import subprocess
import sys

REMEDY = """error: torch from this package index brings CUDA (gigabytes) to a machine without a
GPU. Set PIP_EXTRA_INDEX_URL to PyTorch's CPU index (the installation page of pytorch.org shows it:
Linux, Pip, CPU) and run make again. To install CUDA all the same: make ... CUDA=yes"""


def main(constraints: str) -> int:
    is_asked = sys.platform == "linux" and not shutil.which("nvidia-smi")
    if not is_asked or importlib.util.find_spec("torch"):
        return 0
    if any(name.startswith(("nvidia-", "cuda-")) for name in would_install("torch", constraints)):
        print(REMEDY, file=sys.stderr)
        return 1
    return 0


def would_install(package: str, constraints: str) -> list[str]:
    """Return the names of all packages that pip would install (none if pip fails)."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
    report = subprocess.run([*pip, "-c", constraints, package], stdout=subprocess.PIPE, check=False)
    if report.returncode:
        return []  # the installation itself reports the error
    packages = json.loads(report.stdout)["install"]
    return [item["metadata"]["name"].lower() for item in packages]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
