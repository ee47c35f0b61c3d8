"""Control groups: a new one that limits a server's memory, and the limits of existing ones."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROCESSES = "cgroup.procs"
"""Name of the file that lists the processes of a control group."""
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Folders of the control groups that limit memory, in cgroup v1 and in v2."""
LIMITS = ("memory.limit_in_bytes", "memory.max")
"""Names of the files with the limit of a control group, in cgroup v1 and in v2."""
HOG_BYTES = 32 << 20
PATIENCE_S = 60.0
POLL_S = 0.005
_HOG = """
import os, sys, time
size = int(sys.argv[1])
while True:
    if os.fork() == 0:
        block = b"1" * size
        time.sleep(600)
    time.sleep(0.05)
"""
"""Program that forks small processes until the kernel must kill a process.

The kernel first kills the largest process in the group, which is the server's worker.
"""


def group_of(pid: int) -> Path:
    """Return the folder of the control group that limits a process's memory.

    Raises:
        OSError: the kernel lists no control group with a memory limit for the process.
    """
    root = _root()
    is_v1 = root == ROOTS[0]
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",")) if is_v1 else not controllers:
            return root / path.lstrip("/")
    raise OSError(f"/proc/{pid}/cgroup names no group with a limit of memory")


def used_bytes(group: Path) -> int:
    """Return the memory use of a control group, without file caches."""
    is_v1 = (group / LIMITS[0]).exists()
    current = "memory.usage_in_bytes" if is_v1 else "memory.current"
    cached = "total_inactive_file" if is_v1 else "inactive_file"
    lines = (group / "memory.stat").read_text().splitlines()
    stats = dict(line.split() for line in lines)
    return int((group / current).read_text()) - int(stats[cached])


def free_bytes(group: Path) -> int | None:
    """Return the memory that a control group may still use, or None without a limit.

    The limits of the groups above it apply, too.
    """
    free: list[int] = []
    for folder in (group, *group.parents):
        for name in LIMITS:
            with contextlib.suppress(FileNotFoundError, ValueError):  # "max" is no limit
                free.append(int((folder / name).read_text()) - used_bytes(folder))
        if folder in ROOTS:
            break
    return min(free, default=None)


def _root() -> Path:
    """Return the folder of all control groups that limit memory.

    Raises:
        OSError: this machine has no such control groups.
    """
    root = next((each for each in ROOTS if (each / PROCESSES).exists()), None)
    if root is None:
        raise OSError(f"neither {ROOTS[0]} nor {ROOTS[1]} has control groups")
    return root


class MemoryLimit:
    """A new control group that limits memory.

    Args:
        name: name of the group.

    Raises:
        OSError: this user may not create control groups.
    """

    def __init__(self, name: str) -> None:
        root = _root()
        self._is_v1 = root == ROOTS[0]
        self._folder = root / name
        if not self._is_v1:
            with contextlib.suppress(OSError):  # the controller may be on already
                (root / "cgroup.subtree_control").write_text("+memory")

        self._hog: subprocess.Popen[bytes] | None = None
        """Process that uses up the group's memory, or None while no such process runs."""
        self._is_released = threading.Event()
        self._origin: Path | None = None
        """Control group to which `release` returns the processes that `take` moved."""
        self._folder.mkdir()
        self._limit = self._folder / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")
        if not self._limit.exists():
            self._folder.rmdir()
            raise OSError(f"{root} does not limit memory")

    @property
    def folder(self) -> Path:
        """Folder of the group among the control groups that limit memory."""
        return self._folder

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs the given command inside the control group."""
        enter = f'echo $$ > {self._folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    def take(self, pid: int) -> None:
        """Move a running process into the group. Memory that it already uses is not counted.

        Raises:
            OSError: the process's group is unknown.
        """
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self._origin = self._origin or group_of(pid)
            (self._folder / PROCESSES).write_text(str(pid))

    def lift(self) -> None:
        """Remove the group's memory limit."""
        self._limit.write_text("-1" if self._is_v1 else "max")

    def release(self) -> None:
        """Kill the memory hog, lift the limit, and move processes back to their old group."""
        # A hog that another thread is about to start must not outlive the limit.
        self._is_released.set()
        self._end_hog()
        self.lift()
        if self._origin is None:
            return
        for pid in (self._folder / PROCESSES).read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (self._origin / PROCESSES).write_text(pid)

    def limit(self, num_bytes: int) -> None:
        """Limit the group's memory to `num_bytes`."""
        self._limit.write_text(str(num_bytes))

    def allow(self, more_bytes: int) -> None:
        """Limit the group's memory to its current use, without file caches, plus `more_bytes`."""
        self.limit(self.used_bytes() + more_bytes)

    def kill_largest(self, room_bytes: int) -> None:
        """Fill the group with small processes until the kernel has killed a process.

        So that this takes little time, the limit is `room_bytes` above the current use meanwhile.
        It is as before as soon as a process was killed, because the limit of a container does not
        shrink, and a server may read it when it starts a process again.

        Raises:
            TimeoutError: the kernel has not killed a process in time.
            OSError: the processes that fill the group have exited before that.
        """
        limit = self._limit.read_text()
        before = self.num_kills()
        self.allow(room_bytes)
        until = time.monotonic() + PATIENCE_S
        command = self.inside([sys.executable, "-c", _HOG, str(HOG_BYTES)])
        self._hog = hog = subprocess.Popen(command, start_new_session=True)
        try:
            while self.num_kills() == before and not self._is_released.is_set():
                if (status := hog.poll()) is not None:
                    raise OSError(f"the process that fills the memory ended with status {status}")
                if time.monotonic() > until:
                    raise TimeoutError("the kernel killed nothing")
                time.sleep(POLL_S)
        finally:
            self._limit.write_text(limit)
            self._end_hog()

    def _end_hog(self) -> None:
        """Kill the process that uses up the group's memory, if there is one.

        This works even if another thread is in `kill_largest`.
        """
        if hog := self._hog:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(hog.pid, 9)
            hog.wait()
            self._hog = None

    def num_kills(self) -> int:
        """Return how many of the group's processes the kernel has killed for lack of memory."""
        file = "memory.oom_control" if self._is_v1 else "memory.events"
        lines = (self._folder / file).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))

    def used_bytes(self) -> int:
        """Return the group's memory use, without file caches."""
        return used_bytes(self._folder)

    def close(self) -> None:
        """Wait until the group's processes have exited, and remove the group."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                return


@contextlib.contextmanager
def memory_limit(name: str) -> Iterator[MemoryLimit]:
    """Create a control group for the block, and remove it at the end."""
    group = MemoryLimit(name)
    try:
        yield group
    finally:
        group.close()
