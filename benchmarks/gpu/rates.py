"""Measures the GPU's peak rates, to which other parts compare their speeds."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.checkpoint import service_checkpoint
from benchmarks.gpu.figures import Fact, Figure, Job, Report

COPIED_BYTES = 1 << 30
MATRIX = 8192
UPLOADED_BYTES = 2 << 30
LAUNCHES = 2000


def run(job: Job, report: Report) -> None:
    device = torch.device(job.device)

    copied, multiplied = rates(device, job.tiny)
    report(Figure("copies, read and written", copied / 1e9, "GB/s"))
    report(Figure("bfloat16 products", multiplied / 1e12, "TFLOP/s"))
    for name, seconds in uploads(device, job):
        report(Figure(f"upload, {name}", upload_bytes(job) / seconds / 1e9, "GB/s"))
    if job.on_gpu:
        report(Figure("a launch", launch_seconds(device) * 1e6, "us"))

    began_checkpoint = time.monotonic()
    folder = service_checkpoint(job)
    report(Figure("service's checkpoint written", time.monotonic() - began_checkpoint, "s"))
    report(Fact("checkpoint", f"{sum(f.stat().st_size for f in folder.iterdir()) / 1e9:.2f} GB"))


def rates(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Return the bytes/s of a copy (read and written) and the operations/s of a matmul."""
    size = COPIED_BYTES if not tiny else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device)

    side = MATRIX if not tiny else 64
    x = torch.randn(side, side, device=device).to(torch.bfloat16)
    out = torch.empty_like(x)
    product_s = seconds_of(lambda: torch.mm(x, x, out=out), device)
    return 2 * size / copy_s, 2 * side**3 / product_s


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return an action's seconds. On a GPU, take the median of many runs with a cold L2 cache."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(action, return_mode="median")) / 1e3
    action()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def upload_bytes(job: Job) -> int:
    return UPLOADED_BYTES if not job.tiny else 1 << 20


def uploads(device: torch.device, job: Job) -> list[tuple[str, float]]:
    """Return the seconds of copies to the device from pinned, pageable and memory-mapped memory."""
    size = upload_bytes(job)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    path = job.scratch / "upload"

    sources = {
        "pinned": torch.zeros(size, dtype=torch.uint8, pin_memory=job.on_gpu),
        "pageable": torch.zeros(size, dtype=torch.uint8),
        "mapped": mapped(path, size),
    }

    measured = []
    for name, source in sources.items():
        best = min(timed(lambda source=source: target.copy_(source), device) for _ in range(2))
        measured.append((name, best))

    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return measured


def mapped(path: Path, size: int) -> torch.Tensor:
    with path.open("wb") as file:
        file.write(bytes(size))
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run of an action until it has ended on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def launch_seconds(device: torch.device) -> float:
    """Return the host's seconds per launch of the smallest kernel, in a queue of launches."""
    x = torch.zeros(1, device=device)

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    timed(launch_many, device)
    return timed(launch_many, device) / LAUNCHES
