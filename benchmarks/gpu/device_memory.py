"""Measures the device's used memory while a service runs: from NVML, or from workers on a CPU."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.gpu.figures import Job
from benchmarks.support.one_engine import WORKERS
from ullage_engine.gpu.nvml import Gpu, Nvml

INTERVAL_S = 0.05
STABLE_BYTES = 32 << 20
STABLE_S = 1.0
SETTLE_S = 8.0
MOST_SHARE = 0.85
"""Maximum share of the device's memory for engines."""

Measure = Callable[[], tuple[int, int]]
"""Returns the used and the total bytes of the device."""


def measure(job: Job) -> Measure:
    """Return the function that measures the first device's memory."""
    return nvml_used if job.on_gpu else workers_used


def nvml_used() -> tuple[int, int]:
    """Return the used bytes (of all processes) and the total bytes of the first visible GPU."""
    sample = _first_gpu().sample(with_links=False)
    assert sample.memory_used_bytes is not None
    assert sample.memory_total_bytes is not None
    return int(sample.memory_used_bytes), int(sample.memory_total_bytes)


@cache
def _first_gpu() -> Gpu:
    return Nvml().gpus(os.environ, 1)[0]


def workers_used() -> tuple[int, int]:
    """Return the resident bytes of this process's workers, and the machine's total memory."""
    held = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if WORKERS & set(process.cmdline()):
                held += process.memory_info().rss
    return held, psutil.virtual_memory().total


@dataclass
class Sampler:
    """Samples used memory 20 times per second in a thread while the block runs."""

    job: Job
    name: str
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Samples: the time by `time.monotonic`, the used bytes and the total bytes."""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"used memory of {self.name} was not sampled") from self._error
        self._write(self.job.out / "vram.csv")

    def share(self) -> float:
        """Return the peak of the used bytes as a share of the device's memory."""
        return max(used / total for _, used, total in self.samples)

    def spread(self, since: float, until: float) -> int:
        """Return the difference between the maximum and minimum used bytes in a time span."""
        used = self.between(since, until)
        return max(used) - min(used) if used else 0

    def between(self, since: float, until: float) -> list[int]:
        """Return the samples of used bytes in a time span."""
        return [used for at, used, _ in self.samples if since <= at <= until]

    def _run(self) -> None:
        measured = measure(self.job)
        try:
            while not self._is_over.wait(INTERVAL_S):
                self.samples.append((time.monotonic(), *measured()))
        except Exception as error:  # an error of the driver, raised when the block ends
            self._error = error

    def _write(self, path: Path) -> None:
        began = self.samples[0][0] if self.samples else 0.0
        with path.open("a", encoding="utf-8") as file:
            for at, used, _ in self.samples:
                file.write(f"{self.name},{at - began:.2f},{used}\n")


def settled(job: Job, seconds: float = SETTLE_S) -> int:
    """Return the used bytes once they are constant for a second, or after a time limit.

    The driver frees a killed process's memory only some time after the process has ended.
    """
    measured = measure(job)
    deadline = time.monotonic() + seconds
    lowest = highest = measured()[0]
    since = time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < STABLE_S:
        time.sleep(INTERVAL_S)
        used = measured()[0]
        lowest = min(lowest, used)
        highest = max(highest, used)
        if highest - lowest > STABLE_BYTES:
            lowest = highest = used
            since = time.monotonic()
    return measured()[0]


if __name__ == "__main__":
    print(*nvml_used())
