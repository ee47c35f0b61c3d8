"""Counts the CPU time of an engine's workers, which are processes beside its server."""

import threading
from collections.abc import Callable

import psutil


class WorkerCpu:
    """Counts the CPU time of workers and of their ranks and other children.

    The time between the last call of `seconds` and the end of a process is missing.

    Args:
        worker_pid: returns the process id of the current worker, or None if there is none.
    """

    def __init__(self, worker_pid: Callable[[], int | None]) -> None:
        self._worker_pid = worker_pid
        self._running: dict[psutil.Process, float] = {}
        """Seconds of the processes that ran at the last call."""
        self._ended = 0.0
        """Seconds of all other processes, as far as they were seen."""
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Return the seconds of all workers so far. Any thread may call this."""
        with self._lock:
            running = _seconds_by_process(self._worker_pid())
            self._ended += sum(
                seconds for process, seconds in self._running.items() if process not in running
            )
            self._running = running
            return self._ended + sum(running.values())


def _seconds_by_process(pid: int | None) -> dict[psutil.Process, float]:
    """Return the CPU seconds of a process and its descendants (empty if it has ended)."""
    if pid is None:
        return {}
    found: dict[psutil.Process, float] = {}
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[process] = times.user + times.system
    return found
