"""Memory of a process: how much it may still take, and how it returns what it freed."""

import contextlib
import ctypes
import gc
from collections import deque
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V2 = Path("memory.max")
_CGROUP_V1 = Path("memory/memory.limit_in_bytes")


def usable_bytes(cgroup_root: Path = CGROUP) -> int:
    """The container's limit, or what the machine has free if that is less."""
    import psutil  # routers' and the operator's image lack it and ask for no memory

    # What others hold is not ours to promise.
    available = int(psutil.virtual_memory().available)
    limit = container_limit(cgroup_root)
    return available if limit is None else min(limit, available)


def free_bytes(cgroup_root: Path = CGROUP) -> int:
    """Bytes that this container may still take: of its limit, and of what the machine has free."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = container_limit(cgroup_root)
    used = _container_used(cgroup_root)
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def _container_used(root: Path) -> int | None:
    """Bytes of the container without the cached files that the kernel drops when it needs room;
    None where there is no cgroup."""
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
    """Bytes above which the kernel kills; None without a limit."""
    for path in (cgroup_root / _CGROUP_V2, cgroup_root / _CGROUP_V1):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Without a limit cgroup v1 reports a number near 2**63.
        return int(text) if text.isdecimal() and int(text) < 1 << 62 else None
    return None


RECENT_LOOKS = 20
"""Looks at a count for which a kill is recent: where memory is short, a killed process may take
seconds to end."""


class OomKills:
    """Counts the processes beside one, itself included, that the kernel killed to free memory.

    The kernel counts for each cgroup. A process that has ended is in none any more, so its cgroup
    is remembered: call `look` regularly.
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
        """Note the present count, while the process lives."""
        try:
            lines = self._cgroups.read_text().splitlines()
            is_ending = self._sizes.read_text().startswith("0 ")
        except OSError:
            return
        # Until somebody waits for a process that has ended, v1 shows the root as its cgroup.
        if is_ending:
            return

        path = self._events(lines)
        if path != self._path:
            self._path = path
            self._looks.clear()
        self._looks.append(self.count())

    def recent(self) -> int:
        """Return how many were killed since the oldest of the recent looks."""
        return self.count() - self._looks[0] if self._looks else 0

    def _events(self, lines: list[str]) -> Path | None:
        """Return the file in which the kernel counts, by the lines of a process's cgroups."""
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
            # Inside a container its own cgroup may be mounted as the root.
            for file in files:
                if file.is_file():
                    return file
        return None

    def count(self) -> int:
        """Return how many were killed so far; 0 where the kernel does not say."""
        if self._path is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in self._path.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
        return self._looks[-1] if self._looks else 0


# Objects that come before the young ones are searched for cycles; Python's 700 is a few requests,
# and 50,000 that are garbage take longer than others may wait.
YOUNG_OBJECTS = 20_000


_M_MMAP_THRESHOLD = -3
"""Number of the parameter of glibc."""
_LARGE_BYTES = 1 << 20


def trim_heap() -> None:
    """Return freed heap pages to the kernel; worth it once, after loading something large.

    Does nothing where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def return_large_blocks() -> None:
    """Have blocks of a megabyte and more returned to the kernel as soon as they are freed.

    glibc learns to keep blocks of such sizes, up to 32 MiB each in the heap of each thread, once
    some were freed; a server whose requests may be megabytes would keep all of them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def freeze_gc() -> None:
    """Take what lives now out of every later search for garbage, and searches less often.

    For a server that has loaded what it keeps: its requests leave next to no cycles, and a search
    walks over all that is alive.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
