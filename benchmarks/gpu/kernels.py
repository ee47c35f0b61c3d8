"""Runs the tests of the compiled kernels in parallel processes. pytest.log has the output."""

import importlib.util
import os
import re
import subprocess
import sys

from benchmarks.gpu.figures import Fact, Figure, Job, Report, count, none_of
from benchmarks.gpu.programme import ROOT

TESTS = "tests/engine/kernels/triton"
MOST_PROCESSES = 8
OPTIONS = (
    *("-q", "-m", "not slow", "-p", "no:cacheprovider"),
    # Warnings of other versions of torch and pytest are no failures of kernels.
    *("-W", "default", "-o", "filterwarnings=default"),
    *("--ignore", f"{TESTS}/test_compile.py"),
)
MOST_NAMED = 10
"""Maximum number of failed tests that the results name."""
COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")


def run(job: Job, report: Report) -> None:
    command = [sys.executable, "-m", "pytest", *OPTIONS]
    if importlib.util.find_spec("xdist") is not None and not job.tiny:
        command += ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1))]
    if importlib.util.find_spec("pytest_benchmark") is not None:
        # Its warning under xdist is an error for pytest.
        command += ["-p", "no:benchmark"]
    command.append(f"{TESTS}/test_conv.py" if job.tiny else TESTS)

    log = job.out / "pytest.log"
    with log.open("wb") as file:
        environment = os.environ | ({} if job.on_gpu else {"TRITON_INTERPRET": "1"})
        status = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=file, check=False, env=environment
        ).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = last_line(lines)
    counts = outcomes(last)
    report(count("tests that passed", counts.get("passed", 0), 1))
    report(none_of("tests that failed", counts.get("failed", 0) + counts.get("error", 0)))
    report(Figure("tests that were skipped", counts.get("skipped", 0), ""))
    report(none_of("pytest's exit status", status))
    if status:
        failures = [each for each in lines if each.startswith(("FAILED ", "ERROR "))]
        for text in (*failures[:MOST_NAMED], last):
            report(Fact("pytest.log", text))


def outcomes(line: str) -> dict[str, int]:
    """Return the numbers of tests in pytest's last line, by outcome."""
    counts = COUNTS.findall(line)
    return {outcome.replace("errors", "error"): int(number) for number, outcome in counts}


def last_line(lines: list[str]) -> str:
    """Return the last line that is not blank."""
    return next((line for line in reversed(lines) if line.strip()), "pytest printed nothing")
