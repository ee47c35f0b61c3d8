"""The processes of a server on this machine, as /proc describes them."""

import contextlib
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")
SAMPLE_S = 0.3
"""Time over which processor use is measured, seconds."""
MODEL_SHARE = 0.5
"""Least memory of a process with a model, as a share of the largest process's memory."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServerProcesses:
    """A server's first process and its descendants.

    Args:
        pid: the first process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stopped: list[tuple[int, str]] = []
        """Ids and start times of the processes that got SIGSTOP."""

    def family(self) -> list[int]:
        """Return the ids of all living processes of the server."""
        children: dict[int, list[int]] = {}
        for folder in PROC.iterdir():
            if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
                children.setdefault(parent, []).append(int(folder.name))

        found = [self.pid] if (PROC / str(self.pid)).exists() else []
        for pid in found:
            found += children.get(pid, ())
        return found

    def busiest(self, seconds: float = SAMPLE_S) -> int | None:
        """Return the process that computes most during some seconds, or None if all have exited.

        Only processes with the memory of a model count, because a router or a server in front of
        the engines computes, too. A service may have several engines, and only one of them may hold
        a client's streams.
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
        """Return the resident memory of all processes. Shared pages count several times."""
        return sum(map(_resident_bytes, self.family()))

    def send(self, number: signal.Signals) -> int | None:
        """Send a signal to the busiest process, and return its id, or None if all have exited."""
        worker = self.busiest()
        if worker is None:
            return None
        if number == signal.SIGSTOP:
            self._stopped.append((worker, _started(worker)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)
        return worker

    def resume(self) -> None:
        """Continue the processes that were stopped and that nobody has replaced."""
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
    """Return the start time of a process in the kernel's form, or empty if it has exited."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _cpu_ticks(pid: int) -> int:
    """Return the processor time that a process has used, in clock ticks."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return 0  # the process has just exited


def _resident_bytes(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0  # the process has just ended
