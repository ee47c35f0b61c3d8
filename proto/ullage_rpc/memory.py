"""How much memory a process on this machine may still take."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V2 = Path("memory.max")
_CGROUP_V1 = Path("memory/memory.limit_in_bytes")


def usable_bytes(cgroup_root: Path = CGROUP) -> int:
    """The container's limit, or what the machine has free if that is less."""
    # What others hold is not ours to promise.
    available = int(psutil.virtual_memory().available)
    limit = container_limit(cgroup_root)
    return available if limit is None else min(limit, available)


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
