"""Runs the benchmark in one process or in one process per stage, and prints the report.

This code is not in `__main__`, because spawned processes do not import `__main__`.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from torch.multiprocessing.spawn import ProcessExitedException, spawn

from benchmarks.gpu.lfm2.judge import PUBLISHED, Measured, Work, failures, figures_of
from benchmarks.gpu.lfm2.measure import TooFewSamples, run_rank, say


def run_processes(work: Work) -> int:
    """Start one process per stage. If a process fails, or at Ctrl-C, all processes end."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        started = spawn(  # type: ignore[no-untyped-call]
            spawned, args=(work, store), nprocs=work.stages, join=False
        )
        try:
            while not started.join():
                pass
        except ProcessExitedException as error:
            return int(error.exit_code)
        finally:
            for process in started.processes:
                process.kill()
                process.join()
    return 0


def spawned(rank: int, work: Work, store: Path) -> None:
    status = run(rank, work, store)
    if status:
        sys.exit(status)


def run(rank: int, work: Work, store: Path | None) -> int:
    """Compute one stage, and return the process's exit status."""
    try:
        measured = run_rank(rank, work, store)
    except TooFewSamples as error:
        say(f"error: {error}")
        return 1
    return 0 if measured is None else report(work, measured)


def report(work: Work, measured: Measured) -> int:
    """Print all figures and the failed figures, and return the exit status."""
    figures = figures_of(work, measured)
    for figure in figures:
        say(f"{figure.name}: {figure.value:.6g} {figure.unit}")

    failed = failures(figures, measured)
    for reason in failed:
        say(f"FAILED: {reason}")

    result = {
        "benchmark": "lfm2",
        **asdict(work),
        **asdict(measured),
        "samples_per_second": work.samples / measured.seconds,
        "published_samples_per_second": PUBLISHED if work.judges_speed else None,
        "failed": failed,
    }
    say(json.dumps(result))
    return 1 if failed else 0
