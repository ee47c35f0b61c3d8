"""Runs the parts in the order of their value, each in a separate process with a time limit.

A part may leave processes behind, such as a hung worker or a server that holds the GPU's memory.
These processes are ended before the next part begins. This process adopts orphans
(PR_SET_CHILD_SUBREAPER), so that no descendant escapes.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.figures import Job, Results

ROOT = Path(__file__).parents[2]

PASSED = "passed"
FAILED = "failed"
CRASHED = "crashed"
TIMED_OUT = "timed out"
NOT_RUN = "not run"
STATUSES = (PASSED, FAILED, CRASHED, TIMED_OUT, NOT_RUN)

FIRST_S = 150.0
SECOND_S = 440.0
"""Maximum seconds for each of the two runs, `first` and `second`."""

REHEARSAL_FACTOR = 3.0
"""Factor for the time limits in a rehearsal, because two busy cores start a service slowly."""

LEAST_S = 5.0
"""Minimum number of remaining seconds for a part to begin."""

TF32_OVERRIDES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that make float32 computations use TF32."""

END_S = 2.0
"""Seconds within which a part's processes must end after SIGTERM."""

KILL_S = 10.0
"""Seconds to wait for a part's processes after SIGKILL. A process may hang in a GPU driver call
forever. The next part runs nevertheless."""

WATCH_S = 0.5
"""Seconds between two checks that the programme is still alive."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Part:
    """One part of the programme."""

    name: str
    call: int
    """The run to which the part belongs: 1 for `first`, 2 for `second`."""
    seconds: float
    """Time limit on a GPU in seconds."""
    proves: str


PARTS = (
    Part("machine", 1, 40, "every package is there, and every module can be imported"),
    Part("rates", 1, 40, "rates of copies, products, uploads and launches, recorded"),
    Part("compiled", 1, 75, "every kernel that is launched compiles"),
    Part("kernels", 1, 60, "the kernels' tests pass, compiled"),
    Part("tokens", 1, 45, "greedy tokens of eight families equal a CPU's"),
    Part("worker", 2, 50, "host slots, host tier, float8 KV and NVML work together"),
    Part("overload", 2, 85, "four prompts of 12k tokens: 200 or 429, nothing else"),
    Part("faults", 2, 110, "streams survive injected, killed and real exhaustion"),
    Part("steps", 2, 75, "decode steps are near their floor"),
    Part("mixed", 2, 25, "mixed steps take no memory beyond that of the warm-up"),
    Part("lfm2", 2, 80, "LFM2-8B-A1B in float32: right, and faster than four GPUs were"),
    Part("large", 2, 40, "long prompts go to the large pool"),
    Part("soak", 2, 80, "mixed sessions in constant memory, across a kill"),
    Part("swap", 2, 45, "preempted and swapped sequences have the tokens of undisturbed ones"),
    Part("graphs", 2, 40, "decode steps as CUDA graphs: the same tokens, in less time"),
    Part("families", 2, 30, "decode steps of LFM2 and gpt-oss, recorded"),
    Part("speeds", 2, 40, "attention and quantised products against copies and cuBLAS"),
    Part("formats", 2, 70, "weights in int4 and float8 are prepared, loaded and served"),
)
BY_NAME = {part.name: part for part in PARTS}


def run_parts(parts: Sequence[Part], job: Job, limit_s: float, *, again: bool) -> bool:
    """Run parts one after another within a time limit in seconds.

    If a part has already passed with the same folder and size, it runs only if `again` is true.

    Returns:
        Whether all parts passed.
    """
    adopt_orphans()
    results = Results(job.out)
    deadline = time.monotonic() + limit_s
    done = set() if again else passed_before(results, tiny=job.tiny)

    verdicts = []
    for part in parts:
        if part.name in done:
            print(f"{part.name}: passed before; --again repeats it", flush=True)
            continue
        remaining_s = deadline - time.monotonic()
        if remaining_s < LEAST_S:
            message = f"the {limit_s:g} s of this call were over"
            results.end(part.name, NOT_RUN, 0.0, message, tiny=job.tiny)
            print(f"{part.name}: NOT RUN, time is over", flush=True)
            verdicts.append(NOT_RUN)
            continue
        seconds = part.seconds * (REHEARSAL_FACTOR if job.tiny else 1.0)
        verdicts.append(run_part(part, job, results, min(seconds, remaining_s)))
    return all(verdict == PASSED for verdict in verdicts)


def run_part(part: Part, job: Job, results: Results, limit_s: float) -> str:
    """Run one part in a separate process, show its output, and record how the part ended."""
    print(f"{part.name} (at most {limit_s:.0f} s): {part.proves}", flush=True)
    began = time.monotonic()
    before = len(results.read())
    results.begin(part.name, limit_s)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "part", part.name, *arguments(job)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in TF32_OVERRIDES},
        start_new_session=True,
    )
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_descendants()
        process.poll()
    seconds = time.monotonic() - began

    rows = results.read()[before:]
    status = verdict(code, rows, part.name)
    message = explain(status, code, rows, part.name, limit_s)
    results.end(part.name, status, seconds, message, tiny=job.tiny)
    shown = status if status == PASSED else status.upper()
    print(f"{part.name}: {shown} after {seconds:.1f} s{message and ', ' + message}", flush=True)
    return status


def verdict(code: int | None, rows: Sequence[dict[str, Any]], part: str) -> str:
    """Return how a part ended, from its lines and exit status (None if killed at its limit)."""
    if code is None:
        return TIMED_OUT
    if code != 0:
        return CRASHED
    figures = [row for row in rows if row.get("part") == part and "figure" in row]
    if not figures:
        # A part that judged nothing proved nothing.
        return FAILED
    return PASSED if all(row["passes"] for row in figures) else FAILED


def explain(
    status: str, code: int | None, rows: Sequence[dict[str, Any]], part: str, limit_s: float
) -> str:
    """Explain why a part did not end by itself, and where its traceback is (empty if it did)."""
    if status == TIMED_OUT:
        return f"its {limit_s:.0f} s were over; {traceback_log(part)} has where it was"
    if status != CRASHED or code is None:
        return ""
    reason = next((row["crashed"] for row in rows if "crashed" in row), None)
    if reason is None:
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{reason}; see {traceback_log(part)}"


def traceback_log(part: str) -> str:
    """Return the path of a part's traceback file, next to the results."""
    return f"{part}.traceback.log"


def arguments(job: Job) -> Iterator[str]:
    """Yield the command-line arguments that pass this job to a child process."""
    yield from ("--device", job.device, "--out", str(job.out), "--scratch", str(job.scratch))
    if job.bundle is not None:
        yield from ("--bundle", str(job.bundle))
    if job.tiny:
        yield "--tiny"


def passed_before(results: Results, *, tiny: bool) -> set[str]:
    """Return the parts that passed in their last run with this size."""
    ends = [row for row in results.read() if "ended" in row and row.get("tiny") == tiny]
    last = {row["part"]: row["ended"] for row in ends}
    return {part for part, ended in last.items() if ended == PASSED}


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends first."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants() -> None:
    """End all descendants with SIGTERM, so that servers end their workers, then with SIGKILL."""
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(descendants, timeout=END_S)

    # Servers that replaced a worker may have started more.
    deadline = time.monotonic() + KILL_S
    while alive and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_S)
        reap()
        alive = [each for each in psutil.Process().children(recursive=True) if is_running(each)]
    for process in alive:
        print(f"process {process.pid} does not end, even by SIGKILL", file=sys.stderr)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def reap() -> None:
    """Read the exit statuses of adopted children, because they have no other parent."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_with_parent() -> None:
    """End this process and its descendants if the programme is killed.

    A thread watches the programme. PR_SET_PDEATHSIG would end this process alone.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        end_descendants()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
