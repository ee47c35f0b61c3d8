"""Reads a process's memory limits, counts OOM kills, and returns freed memory to the kernel."""

import contextlib
import ctypes
import gc
from collections import deque
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V2 = Path("memory.max")
_CGROUP_V1 = Path("memory/memory.limit_in_bytes")

RECENT_LOOKS = 20
"""Number of calls to `OomKills.look` during which an OOM kill still counts as recent.

One call is not enough, because a killed process may take seconds to exit when memory is short.
"""
YOUNG_OBJECTS = 20_000
"""Number of new objects that triggers a garbage collection of the young generation.

Python's default of 700 is reached within a few requests. A collection of 50,000 objects would pause
the process for too long.
"""
_M_MMAP_THRESHOLD = -3
"""glibc's constant M_MMAP_THRESHOLD, a parameter of mallopt."""
_LARGE_BYTES = 1 << 20


def usable_bytes(cgroup_root: Path = CGROUP) -> int:
    """Return the smaller of the container's memory limit and the machine's free memory in bytes."""
    import psutil  # absent from the images of router and operator, which do not call this

    # Memory of other processes cannot be promised.
    available = int(psutil.virtual_memory().available)
    limit = container_limit(cgroup_root)
    return available if limit is None else min(limit, available)


def free_bytes(cgroup_root: Path = CGROUP) -> int:
    """Return how many more bytes the container can allocate.

    Both the container's memory limit and the machine's available memory are considered.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = container_limit(cgroup_root)
    used = _container_used(cgroup_root)
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def _container_used(root: Path) -> int | None:
    """Return the container's memory use without reclaimable caches, or None without a cgroup."""
    for current, stat, cached in (
        (root / "memory.current", root / "memory.stat", "inactive_file"),
        (
            root / "memory/memory.usage_in_bytes",
            root / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            used = int(current.read_text(encoding="ascii"))
            lines = stat.read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue

        stats = dict(line.split() for line in lines)
        return used - int(stats.get(cached, 0))
    return None


def container_limit(cgroup_root: Path = CGROUP) -> int | None:
    """Return the container's memory limit in bytes, or None without a limit."""
    for path in (cgroup_root / _CGROUP_V2, cgroup_root / _CGROUP_V1):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Without a limit cgroup v1 reports a number near 2**63.
        return int(text) if text.isdecimal() and int(text) < 1 << 62 else None
    return None


class OomKills:
    """Counts the processes that the kernel has OOM-killed in a given process's cgroup.

    The kernel counts OOM kills per cgroup. A process's cgroup cannot be looked up after the process
    has exited, so the caller must call `look` regularly.

    Args:
        pid: id of the process.
    """

    def __init__(
        self, pid: int, cgroup_root: Path = CGROUP, proc_root: Path = Path("/proc")
    ) -> None:
        self._cgroups = proc_root / str(pid) / "cgroup"
        self._sizes = proc_root / str(pid) / "statm"
        self._root = cgroup_root
        self._path: Path | None = None
        self._looks: deque[int] = deque(maxlen=RECENT_LOOKS)
        self.look()

    def look(self) -> None:
        """Record the current number of OOM kills, if the process is still alive."""
        try:
            lines = self._cgroups.read_text().splitlines()
            is_ending = self._sizes.read_text().startswith("0 ")
        except OSError:
            return
        # In v1 the cgroup of a zombie is the root.
        if is_ending:
            return

        path = self._events(lines)
        if path != self._path:
            self._path = path
            self._looks.clear()
        self._looks.append(self.count())

    @property
    def is_counted(self) -> bool:
        """Whether the kernel counts OOM kills in the process's cgroup where this can be read."""
        return self._path is not None

    def recent(self) -> int:
        """Return the number of recent OOM kills.

        These are the kills since the oldest of the last RECENT_LOOKS calls to `look`.
        """
        return self.count() - self._looks[0] if self._looks else 0

    def _events(self, lines: list[str]) -> Path | None:
        """Return the kernel's file that counts the cgroup's OOM kills, or None if there is none.

        Args:
            lines: lines of the process's `/proc/PID/cgroup`.
        """
        for line in lines:
            _, controllers, path = line.split(":", 2)
            folder = path.lstrip("/")
            if "memory" in controllers.split(","):
                files = [
                    self._root / "memory" / each / "memory.oom_control" for each in (folder, "")
                ]
            elif not controllers:
                files = [self._root / each / "memory.events" for each in (folder, "")]
            else:
                continue
            # Inside a container, its own cgroup may be mounted as the root.
            for file in files:
                if file.is_file():
                    return file
        return None

    def count(self) -> int:
        """Return the number of OOM kills so far (0 if the kernel provides no count)."""
        if self._path is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in self._path.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
        return self._looks[-1] if self._looks else 0


def trim_heap() -> None:
    """Return freed heap pages to the kernel, for example after loading something large.

    This does nothing if the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def return_large_blocks() -> None:
    """Make glibc return blocks of at least a megabyte to the kernel as soon as they are freed.

    By default, glibc raises its threshold after such a block is freed, and then keeps blocks of up
    to 32 MiB in each thread's heap. A server with requests of several megabytes would keep all that
    memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    Call this after a server has loaded all its long-lived objects. Requests leave hardly any
    reference cycles, and each collection would otherwise visit all live objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
