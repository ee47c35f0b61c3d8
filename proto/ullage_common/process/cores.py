"""Counts the CPU cores that a process may use, and pins processes to cores."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ullage_common.process.config_file import ConfigError

_THREADS = ("core_cpus_list", "thread_siblings_list")
"""Files that list a physical core's hardware threads. Linux before 5.3 has only the second file."""


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that the process's affinity and its cgroup's quota allow.

    The quota is rounded up to whole cores. With more busy threads than the quota allows, the kernel
    would throttle all threads for the rest of every scheduling period.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup_root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def physical_cores(
    cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")
) -> list[list[int]]:
    """Return groups of logical cores that share a physical core, ordered by CPU package.

    A logical core forms its own group if the kernel does not list its siblings.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for core in sorted(cores):
        topology = root / f"cpu{core}/topology"
        threads = _read(topology, _THREADS) or str(core)
        package = _read(topology, ["physical_package_id"])
        place = (int(package) if package else sys.maxsize, threads)
        groups.setdefault(place, []).append(core)
    # Within a package, order by the first thread: numbers of cores are unique only within a die.
    return [groups[place] for place in sorted(groups, key=lambda place: place[0])]


def _read(folder: Path, names: Sequence[str]) -> str:
    """Return the text of the first readable file (empty if no file can be read)."""
    for name in names:
        try:
            return (folder / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
    return ""


def is_pinned() -> bool:
    """Return whether the process may use only some of the machine's cores."""
    return len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def pin(cores: Sequence[int]) -> None:
    """Pin the process and its children to these cores.

    Raises:
        ConfigError: the process may not use one of the cores.
    """
    allowed = os.sched_getaffinity(0)
    if others := sorted(set(cores) - allowed):
        raise ConfigError(
            f"server.cores: {others[0]} is not among the cores that this process may use, "
            f"{', '.join(map(str, sorted(allowed)))}; name some of these, or leave it out"
        )
    os.sched_setaffinity(0, cores)


def _quota(root: Path) -> float | None:
    """Return the cgroup's CPU quota in cores, or None without a quota.

    cgroup v2 has one file with `quota period` or `max period`. cgroup v1 has two files, and -1
    stands for no quota.
    """
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdecimal() and int(period) else None
