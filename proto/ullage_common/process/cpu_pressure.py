"""Reads how long threads have waited for a core, as measured by the kernel (PSI)."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def waiting_seconds(cgroup_root: Path = CGROUP, proc_root: Path = Path("/proc")) -> float | None:
    """Return for how many seconds some thread of the container has waited for a core so far.

    Time in which the container's CPU limit held its threads back counts, too. Without cgroup v2,
    the threads are those of the whole machine. The result is None if the kernel does not measure
    pressure.
    """
    for path in (cgroup_root / "cpu.pressure", proc_root / "pressure/cpu"):
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("some "):
                return int(line.rpartition("total=")[2]) / 1e6
    return None
