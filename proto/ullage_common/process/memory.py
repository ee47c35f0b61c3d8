"""Memory of a process: how much it may still take, and how it returns what it freed."""

import ctypes
import gc
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
    limit, used = container_limit(cgroup_root), _container_used(cgroup_root)
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


# Objects that come before the young ones are searched for cycles; Python's 700 is a few requests.
YOUNG_OBJECTS = 50_000


def trim_heap() -> None:
    """Returns freed heap pages to the kernel; worth it once, after loading something large.

    Does nothing where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def freeze_gc() -> None:
    """Takes what lives now out of every later search for garbage, and searches less often.

    For a server that has loaded what it keeps: its requests leave next to no cycles, and a search
    walks over all that is alive.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
