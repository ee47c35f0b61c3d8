"""Puts prometheus and promtool into .venv/bin: `.venv/bin/python tests/charts/get_prometheus.py`.

They are in no package index of Python's. Debian's package is downloaded and unpacked; nothing is
installed, and nothing started.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("prometheus", "promtool")


def main() -> int:
    targets = [Path(sys.prefix, "bin", name) for name in NAMES]
    if not all(target.exists() for target in targets):
        if shutil.which("apt-get") is None or platform.machine() != "x86_64":
            print("error: no apt-get for x86_64 here; install prometheus yourself")
            return 1
        with tempfile.TemporaryDirectory() as folder:
            download = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
            subprocess.run(download, cwd=folder, check=True)
            [package] = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
            for target in targets:
                unfinished = target.with_suffix(".part")
                shutil.copy(Path(folder, "usr", "bin", target.name), unfinished)
                os.replace(unfinished, target)
    print(*targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
