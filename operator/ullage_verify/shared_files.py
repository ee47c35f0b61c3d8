"""Counts the files in /dev/shm that belong to a server, and that killed processes may leave."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ullage_verify.processes import PROC, ServerProcesses
from ullage_verify.target import TargetError

SHARED_MEMORY = Path("/dev/shm")
BLOCK_BYTES = 512
"""Unit of the blocks of a file that the kernel reports."""


class SharedUse(NamedTuple):
    """What a server's files in /dev/shm take."""

    num_files: int
    num_bytes: int


class SharedFiles:
    """The files in /dev/shm that a server's processes have opened or mapped at some time.

    A killed process no longer shows its files. So call `note` before each kill. If the server has a
    /dev/shm of its own, as in a container, all files there are the server's.

    Args:
        processes: the server's processes.
    """

    def __init__(self, processes: ServerProcesses) -> None:
        self._processes = processes
        self._folder = PROC / str(processes.pid) / "root" / SHARED_MEMORY.relative_to("/")
        self._inodes: set[int] = set()
        """Inodes of the files that processes of the server have used."""

    def note(self) -> None:
        """Note the files that the server's processes use now.

        Raises:
            TargetError: the server's first process has ended, or belongs to another user.
        """
        device = self._device()
        for pid in self._processes.family():
            self._inodes |= set(_mapped(pid, device)) | set(_opened(pid, device))

    def use(self) -> SharedUse:
        """Note the files in use, and return how many of the server's files exist, and their size.

        Raises:
            TargetError: the server's first process has ended, or belongs to another user.
        """
        self.note()
        is_own = self._device() != SHARED_MEMORY.stat().st_dev
        files = [file for file in _files(self._folder) if is_own or file.st_ino in self._inodes]
        return SharedUse(len(files), sum(file.st_blocks * BLOCK_BYTES for file in files))

    def _device(self) -> int:
        try:
            return self._folder.stat().st_dev
        except FileNotFoundError:
            raise TargetError(f"--pid {self._processes.pid}: this process has ended") from None
        except OSError as error:
            raise TargetError(f"{self._folder}: {error.strerror}; run as root") from None


def _files(folder: Path) -> Iterator[os.stat_result]:
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                yield path.lstat()


def _mapped(pid: int, device: int) -> Iterator[int]:
    """Yield the inodes of a device that a process has mapped."""
    name = f"{os.major(device):02x}:{os.minor(device):02x}"
    try:
        lines = (PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return  # the process has just ended, or belongs to another user
    for line in lines:
        # Fields: address, permissions, offset, device, inode, path.
        fields = line.split(None, 5)
        if fields[3] == name:
            yield int(fields[4])


def _opened(pid: int, device: int) -> Iterator[int]:
    """Yield the inodes of a device that a process has opened."""
    with contextlib.suppress(OSError):
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                stat = descriptor.stat()
                if stat.st_dev == device:
                    yield stat.st_ino
