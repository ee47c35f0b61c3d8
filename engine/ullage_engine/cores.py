"""How many CPU cores this process may keep busy."""

import math
import os
from pathlib import Path


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores of its affinity, and no more than its cgroup's quota pays for, rounded up.

    With more threads than that the kernel stops all of them for the rest of every period.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup_root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Cores; cgroup v2 says `quota period` or `max period`, v1 has a file each and -1 for none."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdecimal() and int(period) else None
