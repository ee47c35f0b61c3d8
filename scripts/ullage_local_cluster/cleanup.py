"""Removes a cluster: its processes, mounts, network links, iptables chains and control groups.

This module does not need the cluster's programs, so it can also remove a crashed cluster.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ullage_local_cluster.processes import kill_all, run, running_pid
from ullage_local_cluster.proxy import remove_chains
from ullage_local_cluster.settings import ClusterError, ClusterSettings

CGROUPS = Path("/sys/fs/cgroup")
KUBELET_LINKS = Path("/var/log/containers")
"""Folder in which the kubelet always links container logs, wherever its other files are."""
CNI_RESULTS = Path("/var/lib/cni/results")
"""Folder in which libcni records each pod's network."""


def take_down(settings: ClusterSettings) -> None:
    """Kill and remove everything except the logs. No program needs to save its state."""
    kill_all(lambda: cluster_processes(settings))
    # A mount that is shared with another one may go together with it.
    while points := mounts(settings.home):
        if not any(is_unmounted(point) for point in points):
            raise ClusterError(f"{points[0]} cannot be unmounted; see what uses it with fuser -m")
    for link in links(settings):
        # The end of a pod's network ends its link, too.
        run("ip", "link", "delete", link, check=False)
    remove_chains(settings)
    for group in control_groups(settings):
        remove_group(group)
    remove_files(settings)


def control_groups(settings: ClusterSettings) -> list[Path]:
    """Return the cluster's control group in each of this machine's cgroup hierarchies."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS / settings.group]
    return [
        folder / settings.group
        for folder in CGROUPS.iterdir()
        if (folder / "cgroup.procs").exists()
    ]


def cluster_processes(settings: ClusterSettings) -> set[int]:
    """Return the ids of started programs, containerd's shims and processes in containers."""
    pids = set(filter(None, map(running_pid, settings.home.glob("*.pid"))))
    for group in control_groups(settings):
        for file in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                pids |= {int(word) for word in file.read_text().split()}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_shim = Path(os.fsdecode(words[0])).name.startswith("containerd-shim")
            if is_shim and os.fsencode(settings.socket) in words:
                pids.add(int(folder.name))
    return pids


def mounts(folder: Path) -> list[str]:
    """Return the mount points in a folder, deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    return [point for point in reversed(points) if Path(point).is_relative_to(folder)]


def is_unmounted(point: str) -> bool:
    """Unmount a folder, and return whether it is now unmounted."""
    command = ["umount", "--lazy", point]
    return not subprocess.run(command, capture_output=True, check=False).returncode


def links(settings: ClusterSettings) -> list[str]:
    """Return the cluster's network links: the bridge and its ports."""
    shown: list[Mapping[str, object]] = json.loads(run("ip", "-json", "link", "show") or "[]")
    return [
        str(link["ifname"])
        for link in shown
        if settings.bridge in (link["ifname"], link.get("master"))
    ]


def remove_group(group: Path) -> None:
    """Remove a control group and the groups inside it."""
    folders = [*sorted(group.rglob("*/"), reverse=True), group] if group.exists() else []
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def remove_files(settings: ClusterSettings) -> None:
    """Remove the cluster's files except for its logs."""
    logs = settings.home / "log"
    for link in KUBELET_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(logs):
            link.unlink()
    for result in CNI_RESULTS.glob(f"{settings.name}-*-eth0"):
        sandbox = result.name.removeprefix(f"{settings.name}-").removesuffix("-eth0")
        (CNI_RESULTS / f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
        result.unlink()

    # The mark goes last: until then, taking down goes on where it was interrupted.
    mark = started_mark(settings)
    for path in settings.home.iterdir():
        if path in (logs, mark):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    mark.unlink(missing_ok=True)


def started_mark(settings: ClusterSettings) -> Path:
    """Return the path of the file that exists from a cluster's start to its end."""
    return settings.home / "started"
