"""Reports the machine's packages, modules, driver and disks, with output of diagnostic commands."""

import contextlib
import importlib
import importlib.metadata
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil

from benchmarks.gpu.figures import Fact, Figure, Job, Report, count, none_of, one_line
from benchmarks.gpu.programme import ROOT

PACKAGES = ("ullage_common", "ullage_kv", "ullage_engine", "ullage_router")
LEFT_OUT = ("ullage_engine.vllm_worker", "ullage_engine.native.libullage")
"""Names that are not imported: the package that needs vLLM, and the C++ library."""
COMMANDS = (
    ("nvidia-smi", "-q"),
    (sys.executable, "-m", "pip", "freeze"),
    ("df", "-h"),
    ("uname", "-a"),
    ("lscpu",),
)
FAKE_USED_BYTES = 7_000_000_000
VERSIONS = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "msgspec", "ullage")
COMMAND_S = 10.0


def run(job: Job, report: Report) -> None:
    for name in VERSIONS:
        report(Fact(name, version(name)))
    report(Fact("python", sys.version.split()[0]))
    report(Fact("commit", commit(job)))
    report(Figure("cores", os.cpu_count() or 0, ""))
    report(Figure("memory", psutil.virtual_memory().total / 1e9, "GB"))
    report(Figure("free in memory's folder", shutil.disk_usage(job.scratch).free / 1e9, "GB"))

    modules = list(all_modules())
    missing = {name: error for name in modules if (error := import_error(name))}
    for name, error in missing.items():
        report(Fact(name, error))
    report(count("modules of Ullage", len(modules), 100))
    report(none_of("modules that cannot be imported", len(missing)))
    if job.tiny:
        rehearse_nvml(job, report)
    device(job, report)
    # Last, because these commands take seconds and judge nothing.
    write_machine(job)


def write_machine(job: Job) -> None:
    """Write the output of diagnostic commands to machine.txt."""
    with (job.out / "machine.txt").open("w", encoding="utf-8") as file:
        for command in COMMANDS:
            file.write(f"$ {' '.join(command)}\n")
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=COMMAND_S, check=False
                )
                file.write(done.stdout + done.stderr + "\n")
            except (OSError, subprocess.TimeoutExpired) as error:
                file.write(f"{error}\n\n")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit(job: Job) -> str:
    """Return the commit of this tree, or the bundle's commit without a repository, or "unknown"."""
    command = ("git", "log", "-1", "--format=%H")
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if own := done.stdout.strip():
            return own
    manifest = job.bundle / "manifest.json" if job.bundle else None
    if manifest is None or not manifest.is_file():
        return "unknown"
    return f"{json.loads(manifest.read_text(encoding='utf-8'))['commit']}, says the bundle"


def all_modules() -> Iterator[str]:
    """Yield the names of all modules in the engine and the router."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield package
        # A package that cannot be imported is reported like a module, for any error.
        for module in pkgutil.walk_packages(root.__path__, f"{package}.", lambda name: None):
            name = module.name
            if not name.startswith(LEFT_OUT) and not name.endswith("__main__"):
                yield name


def import_error(name: str) -> str:
    """Return in one line why a module cannot be imported (empty if it can)."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a missing or wrong package may raise anything
        return one_line(error)
    return ""


def rehearse_nvml(job: Job, report: Report) -> None:
    """Read a GPU's memory through NVIDIA's Python bindings, from a fake library in the tests."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from ullage_testing.fake_nvml import FakeNvml, compile_library

    compile_library(job.scratch)
    gpus = FakeNvml(job.scratch, job.scratch / "gpus")
    gpus.set({"memory_used": FAKE_USED_BYTES, "memory_total": 10 * FAKE_USED_BYTES})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.device_memory"],
        cwd=ROOT,
        env=gpus.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        report(Fact("NVML", done.stderr.strip().rpartition("\n")[2]))
    is_read = done.stdout.split() == [str(FAKE_USED_BYTES), str(10 * FAKE_USED_BYTES)]
    report(count("memory of a fake GPU is read", is_read, 1))


def device(job: Job, report: Report) -> None:
    import torch

    from ullage_engine.kernels.triton import runs_on

    report(Fact("torch's CUDA", str(torch.version.cuda)))
    report(Fact("TF32", f"allowed in cuBLAS: {torch.backends.cuda.matmul.allow_tf32}"))
    if not job.on_gpu:
        return
    # Without a compiler, torch's own operations would be measured instead of kernels.
    report(count("Triton compiles and runs", runs_on(torch.device("cuda", 0)), 1))
    properties = torch.cuda.get_device_properties(0)
    report(Fact("GPU", properties.name))
    report(Figure("memory of the GPU", properties.total_memory / 1e9, "GB"))
    free, total = torch.cuda.mem_get_info(0)
    # Memory of other processes would be charged to the parts.
    report(Figure("used at the beginning, with a context", (total - free) / 1e9, "GB"))
