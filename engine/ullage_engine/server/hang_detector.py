"""Detection of hung workers, by their messages and by the kernel's figures in /proc.

`HangDetector` is pure, so that tests need not wait for its deadlines. `ProcStats` has the kernel's
figures of a worker and of the ranks that it started.
"""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ullage_engine.server.restart_policy import RestartPolicy

_RECENT_STEPS = 128
"""Number of last steps whose slowest gives the order of magnitude of the next one."""
_REMEMBERED_STEPS = 1024
"""Number of last steps whose longest bounds the next one.

Among so many are some with prompts, some with a long context and some with busy neighbours."""

MAX_TICK_S = 0.5
"""Most seconds that are counted between two ticks.

A longer gap means that the detector itself could not run, since the server was stopped or its
container frozen. The worker's messages are still unread then."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcStats:
    """The kernel's figures of one process with all its threads, or of several processes."""

    is_stopped: bool
    """Whether a signal has stopped the process, so that it waits for SIGCONT."""
    is_waiting: bool
    """Whether all threads wait for events. None runs, and none waits for a core or a disk."""
    cpu_ticks: int
    """CPU time so far, in kernel ticks of 10 ms, including that of ended children."""
    thread_ticks: Mapping[int, int] = field(default_factory=dict)
    """CPU time so far of each thread in kernel ticks, by thread id."""


def read_proc_stats(pid: int) -> ProcStats | None:
    """Return the stats of a process together with its children, None if the process is gone.

    A rank often waits for the others, so one waiting rank means nothing. One stopped rank stops
    them all.
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
    """List the children of the main thread, which starts all ranks."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fields(path: Path) -> list[str]:
    """Return the fields of a stat file after the second, which may contain blanks.

    The first of them is the state.
    """
    return path.read_text().rpartition(")")[2].split()


class HangDetector:
    """Measures how long a worker has been silent, idle, busy and without progress, tick by tick.

    The longest known step bounds the next one. It is the step that the worker measured at its
    start, or the longest of the last `_REMEMBERED_STEPS` if that is longer. A worker hangs if its
    busiest thread has computed for a multiple of that time. Time in which neighbours had its cores
    does not count. A worker without a measured step only has the deadline.
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
        """CPU time of each thread at the first check of this silence, in kernel ticks."""
        self._busy_s = 0.0
        """CPU time of the busiest thread since then, in seconds."""

    @property
    def is_suspect(self) -> bool:
        """Whether the worker is silent for longer than a healthy one, so that /proc is read."""
        return self._silent_s > MAX_TICK_S

    @property
    def longest_step_s(self) -> float:
        """Seconds of the longest known step, 0 if the worker measured none at its start."""
        if self._measured_step_s <= 0.0:
            return 0.0
        return max(self._measured_step_s, max(self._steps, default=0.0))

    def on_ready(self, longest_step_s: float) -> None:
        """Record the longest step that the worker measured at its start, in seconds.

        It is 0 if the worker measured none.
        """
        self._measured_step_s = longest_step_s
        self.on_progress()

    def on_message(self) -> None:
        """Record that the worker sent a message."""
        self._silent_s = self._still_s = self._stopped_s = self._busy_s = 0.0
        self._cpu_ticks = None
        self._thread_ticks = None

    def on_progress(self) -> None:
        """Record a finished step or a stage of loading. A heartbeat is no progress."""
        self._waiting_s = 0.0

    def on_step(self, seconds: float) -> None:
        """Record a finished step that took `seconds`."""
        self._steps.append(seconds)
        self._num_steps += 1
        self.on_progress()

    def tick(self, elapsed_s: float, *, is_loading: bool, has_work: bool) -> None:
        """Count the time since the last tick."""
        elapsed_s = min(elapsed_s, MAX_TICK_S)
        self._silent_s += elapsed_s
        # A worker without work owes no step. Its time counts from the next request.
        self._waiting_s = self._waiting_s + elapsed_s if is_loading or has_work else 0.0

    def observe(self, stats: ProcStats, elapsed_s: float) -> None:
        """Count the time since the last tick as still or stopped, by the kernel's figures."""
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
        """Return why the worker counts as hung, empty while it does not."""
        policy = self._policy
        if self._stopped_s > policy.stopped_after_s:
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
