"""Compiles all kernels of the programme in advance, in several processes.

Later parts find the kernels in Triton's cache, even if this part reaches its time limit.
"""

import os
import subprocess
import sys
import time

from benchmarks.gpu.figures import Fact, Figure, Job, Report, none_of
from benchmarks.gpu.programme import ROOT

MOST_PROCESSES = 12
REHEARSED = "llama-8b"
"""The case that a rehearsal compiles, also for sm90, because compiling needs no GPU."""


def run(job: Job, report: Report) -> None:
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    command = [sys.executable, "-m", "benchmarks.gpu.compile", "--processes", str(processes)]
    if job.tiny:
        command += [REHEARSED, "--arch", "sm90", "--cache", str(job.scratch / "triton")]
    log = job.out / "compile.log"
    began = time.monotonic()
    with log.open("wb") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
    report(Figure("seconds in all", time.monotonic() - began, "s"))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines[-5:]:
        report(Fact("compile", line))
    report(none_of("exit status of the compilation, see compile.log", status))
