"""Finds and signals the processes of a server on this machine, using /proc."""

import contextlib
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")
SAMPLE_S = 0.3
"""Number of seconds over which the CPU use of processes is measured."""
MODEL_SHARE = 0.5
"""Minimum memory of a process with a model, as a fraction of the largest process's memory."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServerProcesses:
    """A server's first process and its descendants.

    Args:
        pid: the id of the first process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stopped: list[tuple[int, str]] = []
        """Process ids and start times of the processes that were sent SIGSTOP."""

    def family(self) -> list[int]:
        """Return the ids of the server's live processes."""
        children: dict[int, list[int]] = {}
        for folder in PROC.iterdir():
            if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
                children.setdefault(parent, []).append(int(folder.name))

        family = [self.pid] if (PROC / str(self.pid)).exists() else []
        for pid in family:
            family += children.get(pid, ())
        return family

    def busiest(self, seconds: float = SAMPLE_S) -> int | None:
        """Return the id of the process with the highest CPU use, or None if all have exited.

        Only processes with enough memory for a model are considered, because routers and servers
        in front of engines use the CPU, too. If a service has several engines, the busiest process
        is likely to serve the client's streams.

        Args:
            seconds: time over which the CPU use is measured.
        """
        sizes = {pid: _resident_bytes(pid) for pid in self.family()}
        least = MODEL_SHARE * max(sizes.values(), default=0)
        before = {pid: _cpu_ticks(pid) for pid, size in sizes.items() if size >= least}
        time.sleep(seconds)
        # Size decides between processes that compute nothing, for example because all are stopped.
        used = {
            pid: (_cpu_ticks(pid) - ticks, _resident_bytes(pid)) for pid, ticks in before.items()
        }
        return max(used, key=lambda pid: used[pid], default=None)

    def resident_bytes(self) -> int:
        """Return the total resident bytes of all processes.

        Each process is charged its part of the pages that it shares with others.
        """
        return sum(map(_proportional_bytes, self.family()))

    def send(self, number: signal.Signals) -> int | None:
        """Send a signal to the busiest process. Return its id, or None if all have exited."""
        worker = self.busiest()
        if worker is None:
            return None
        if number == signal.SIGSTOP:
            self._stopped.append((worker, _started(worker)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)
        return worker

    def resume(self) -> None:
        """Resume the stopped processes that still exist."""
        for pid, started in self._stopped:
            # Another process may have got the id in the meantime.
            if started and _started(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self._stopped.clear()


def _parent(folder: Path) -> int | None:
    try:
        # The command in parentheses may have spaces, so count from its end.
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None  # the process has just ended


def _started(pid: int) -> str:
    """Return the start time of a process as /proc shows it (empty if it has exited)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _cpu_ticks(pid: int) -> int:
    """Return the CPU time that a process has used, in clock ticks (0 if it has exited)."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return 0  # the process has just exited


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        (kibibytes,) = [line.split()[1] for line in lines if line.startswith("Pss:")]
        return int(kibibytes) << 10
    except (OSError, ValueError):
        return 0  # the process has just ended, or belongs to another user


def _resident_bytes(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0  # the process has just ended
