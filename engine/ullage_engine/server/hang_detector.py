"""Detects hung workers from their messages and from process statistics in /proc.

`HangDetector` does no I/O and reads no clock, so that tests do not have to wait for real deadlines.
`ProcStats` holds the kernel's statistics for a worker and its ranks.
"""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ullage_engine.server.restart_policy import RestartPolicy

_RECENT_STEPS = 128
"""Number of recent steps to compare. The longest one determines how long a step may be idle."""
_REMEMBERED_STEPS = 1024
"""Number of recent steps to compare. The longest one determines a step's CPU time limit.

The window is large enough that it most likely includes steps with prompts, steps with long
contexts, and steps during which other processes were busy on the same cores.
"""

MAX_TICK_S = 0.5
"""Maximum time in seconds that one check may add to a worker's silence.

A longer gap means that the detector itself was not running, because the server was stopped or its
container was frozen. The worker may then have sent messages that the server has not read yet.
"""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcStats:
    """Kernel statistics of one process with all its threads, or of several processes combined."""

    is_stopped: bool
    """Whether a signal has stopped the process, so that it waits for SIGCONT."""
    is_waiting: bool
    """Whether every thread is waiting for events, so that none runs or waits for a core or disk."""
    cpu_ticks: int
    """CPU time so far in kernel ticks of 10 ms, including that of exited child processes."""
    thread_ticks: Mapping[int, int] = field(default_factory=dict)
    """Each thread's CPU time so far in kernel ticks, by thread id."""


def read_proc_stats(pid: int) -> ProcStats | None:
    """Return the combined statistics of a process and its children, or None if it has exited.

    Ranks often wait for each other. The combined statistics therefore say "waiting" only if all
    processes are waiting, but "stopped" if at least one of them is stopped.
    """
    own = _read(pid)
    if own is None:
        return None
    group = [own, *(stats for child in _children(pid) if (stats := _read(child)) is not None)]
    return ProcStats(
        is_stopped=any(each.is_stopped for each in group),
        is_waiting=all(each.is_waiting for each in group),
        cpu_ticks=sum(each.cpu_ticks for each in group),
        thread_ticks={tid: ticks for each in group for tid, ticks in each.thread_ticks.items()},
    )


def _read(pid: int) -> ProcStats | None:
    try:
        process = _fields(Path(f"/proc/{pid}/stat"))
        tasks = Path(f"/proc/{pid}/task").iterdir()
        threads = {int(path.name): _fields(path / "stat") for path in tasks}
    except (FileNotFoundError, ProcessLookupError):
        return None
    states = {fields[0] for fields in threads.values()}
    return ProcStats(
        is_stopped=states == {"T"},
        is_waiting=states <= {"S", "I", "T"},
        cpu_ticks=_ticks(process[11:15]),
        thread_ticks={tid: _ticks(fields[11:13]) for tid, fields in threads.items()},
    )


def _ticks(fields: list[str]) -> int:
    return sum(int(each) for each in fields)


def _children(pid: int) -> list[int]:
    """Return the ids of the children of a process's main thread, which starts all ranks."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fields(path: Path) -> list[str]:
    """Return the fields of a /proc stat file that follow the process name.

    The name may contain spaces. The first returned field is the process state.
    """
    return path.read_text().rpartition(")")[2].split()


class HangDetector:
    """Decides whether a worker hangs, based on its messages, its progress and its CPU use.

    A worker counts as hung if its busiest thread has used a multiple of the longest known step as
    CPU time without finishing a step. The longest known step is either the step that the worker
    measured at startup, or the longest of the last `_REMEMBERED_STEPS` steps, whichever took
    longer. Time during which other processes used the worker's cores does not count. If the worker
    measured no step, only the fixed deadline applies.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._num_steps = 0
        self._measured_step_s = 0.0
        self._silent_s = 0.0
        self._still_s = 0.0
        self._stopped_s = 0.0
        self._waiting_s = 0.0
        self._cpu_ticks: int | None = None
        self._thread_ticks: Mapping[int, int] | None = None
        """CPU time of each thread at the first check of the current silence, in kernel ticks."""
        self._busy_s = 0.0
        """CPU seconds of the busiest thread since the first check of the current silence."""

    @property
    def is_suspect(self) -> bool:
        """Return whether the worker has been silent for so long that /proc should be checked."""
        return self._silent_s > MAX_TICK_S

    @property
    def is_stopped(self) -> bool:
        """Return whether the worker counts as hung because a signal has stopped it."""
        return self._stopped_s > self._policy.stopped_after_s

    @property
    def longest_step_s(self) -> float:
        """Return the longest known step in seconds, or 0 if the worker measured none at startup."""
        if self._measured_step_s <= 0.0:
            return 0.0
        return max(self._measured_step_s, max(self._steps, default=0.0))

    def on_ready(self, longest_step_s: float) -> None:
        """Record the duration of the longest step that the worker measured at startup, in seconds.

        The value is 0 if the worker measured no step.
        """
        self._measured_step_s = longest_step_s
        self.on_progress()

    def on_message(self) -> None:
        """Record that the worker sent a message."""
        self._silent_s = self._still_s = self._stopped_s = self._busy_s = 0.0
        self._cpu_ticks = None
        self._thread_ticks = None

    def on_progress(self) -> None:
        """Record a finished step or loading stage. A heartbeat does not count as progress."""
        self._waiting_s = 0.0

    def on_step(self, seconds: float) -> None:
        """Record that a step finished and took `seconds`."""
        self._steps.append(seconds)
        self._num_steps += 1
        self.on_progress()

    def tick(self, elapsed_s: float, *, is_loading: bool, has_work: bool) -> None:
        """Add the time since the last check to the time for which the worker has been silent.

        If the worker is loading or has work, also add it to the time without progress.
        """
        elapsed_s = min(elapsed_s, MAX_TICK_S)
        self._silent_s += elapsed_s
        # A worker without work owes no step. Its time counts from the next request.
        self._waiting_s = self._waiting_s + elapsed_s if is_loading or has_work else 0.0

    def observe(self, stats: ProcStats, elapsed_s: float) -> None:
        """Update the worker's idle, stopped and busy times from kernel statistics."""
        elapsed_s = min(elapsed_s, MAX_TICK_S)
        is_still = stats.is_waiting and stats.cpu_ticks == self._cpu_ticks
        self._cpu_ticks = stats.cpu_ticks
        self._still_s = self._still_s + elapsed_s if is_still else 0.0
        self._stopped_s = self._stopped_s + elapsed_s if stats.is_stopped else 0.0

        before = self._thread_ticks
        if before is None:
            before = self._thread_ticks = stats.thread_ticks
        spent = (ticks - before.get(tid, ticks) for tid, ticks in stats.thread_ticks.items())
        self._busy_s = max(spent, default=0) / _TICKS_PER_S

    def reason(self, *, is_loading: bool) -> str:
        """Return why the worker counts as hung, or "" if it does not."""
        policy = self._policy
        if self.is_stopped:
            return "stopped by a signal"
        if is_loading:
            return "silent while loading" if self._waiting_s > policy.load_silence_s else ""
        if self._waiting_s > policy.step_deadline_s:
            return "no step within the deadline"

        longest_s = self.longest_step_s
        num_steps = self._num_steps
        recent = list(self._steps)[-_RECENT_STEPS:]
        suspect_s = policy.suspect_after_s(max(recent, default=None), longest_s, num_steps)
        if min(self._waiting_s, self._still_s) > suspect_s:
            return "idle in a step"
        if longest_s > 0.0 and min(self._waiting_s, self._busy_s) > policy.busy_after_s(
            longest_s, num_steps
        ):
            return "busy in a step without an end"
        return ""
