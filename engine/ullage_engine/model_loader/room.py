"""Checks that a folder has room for files before the first byte is written.

A folder in memory (tmpfs) may report more free space than the container's memory limit allows.
Exceeding that limit would get the process killed instead of making the write fail.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ullage_common.process.memory import free_bytes
from ullage_engine.memory.ledger import mib
from ullage_engine.protocol.errors import WeightsError

MARGIN_BYTES = 16 << 20
"""Bytes to leave free for file system metadata and small files in the folder."""

_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Room:
    """How much space is left for writing to a folder."""

    free: int | None
    """Free bytes of the folder's file system, or None if the file system does not report them."""
    memory: int | None
    """Bytes of memory that the container may still allocate, or None if the folder is not in
    memory."""


def check_room(
    folder: Path,
    num_bytes: int,
    where: str = "server.weights_dir",
    files: str = "the prepared weights",
) -> None:
    """Check that a folder has space for `num_bytes`.

    Args:
        folder: the folder.
        num_bytes: number of bytes to write.
        where: how the error message refers to the folder.
        files: how the error message refers to the files.

    Raises:
        WeightsError: the bytes do not fit.
    """
    refusal = refuse(room_of(folder), num_bytes, files)
    if refusal:
        raise WeightsError(f"{where} {folder}: {refusal}")


def refuse(room: Room, num_bytes: int, files: str = "the prepared weights") -> str:
    """Return why files of this total size do not fit into a folder, or "" if they do.

    A safety margin must also stay free. The text gives the sizes and a remedy.
    """
    needed = num_bytes + MARGIN_BYTES
    if room.free is not None and room.free < needed:
        return (
            f"{files} need {mib(needed)}, but {mib(room.free)} are free there; "
            "name a folder with more room, on a disk"
        )
    if room.memory is not None and room.memory < needed:
        return (
            f"the folder is in memory (tmpfs), where {files} need {mib(needed)}, but this "
            f"container may take only {mib(room.memory)} more; name a folder on a disk, or raise "
            "the memory limit"
        )
    return ""


def room_of(folder: Path) -> Room:
    """Return how much space is left in an existing folder."""
    status = os.statvfs(folder)
    # tmpfs without a limit, like some network file systems, has no blocks at all.
    free = status.f_bavail * status.f_frsize if status.f_blocks else None
    return Room(free, free_bytes() if _is_in_memory(folder) else None)


def _is_in_memory(folder: Path) -> bool:
    """Return whether a folder is in memory (tmpfs)."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == number:
            return file_system.split()[0] in ("tmpfs", "ramfs")
    return False
