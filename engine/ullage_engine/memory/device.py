"""How much memory a CPU device has: what the container may use, or the machine has free."""

from pathlib import Path

import psutil

_CGROUP_V2 = Path("memory.max")
_CGROUP_V1 = Path("memory/memory.limit_in_bytes")


def cpu_device_bytes(configured: int | None, cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of a CPU device: `configured`, else the cgroup's limit or what the machine has free."""
    if configured is not None:
        return configured
    # What others hold is not ours to promise.
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_limit(cgroup_root)
    # Without a limit cgroup v1 reports a number near 2**63.
    return available if limit is None else min(limit, available)


def _cgroup_limit(root: Path) -> int | None:
    for path in (root / _CGROUP_V2, root / _CGROUP_V1):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None
