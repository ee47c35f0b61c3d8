"""The memory of the host tier: one shared mapping, cut into equal slots.

It is a file without a name (memfd), so nothing is left behind however its owner ends, a container's
small /dev/shm does not bound it, and other processes of the host map it by its path below /proc
while the owner lives.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from ullage_common.process.memory import free_bytes

PAGE_BYTES = 4096
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which mmap has no name for."""
_STEP_BYTES = 16 << 20
"""Bytes that are made resident at once: no other thread of the process runs meanwhile."""
_REPORT_BYTES = 256 << 20
"""Bytes between two reports of progress."""


class ArenaError(Exception):
    """The memory cannot be had; the message names the figures and what to change."""


class Arena:
    """Shared memory of `num_bytes`, all of it resident. `cut` divides it into slots."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.slot_bytes = num_bytes
        self.num_slots = 1
        self._mapping = mmap.mmap(fd, num_bytes)
        self.memory = memoryview(self._mapping)
        """All bytes, writable."""

    @classmethod
    def create(
        cls,
        num_bytes: int,
        *,
        available_bytes: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Arena":
        """Make new memory and touches every page of it.

        Args:
            available_bytes: that may be taken; None: what the container and the machine have free.
            progress: gets the bytes that are resident, and those wanted.

        Raises:
            ArenaError: it is not there. Nothing was taken: the kernel would have ended somebody.
        """
        available = free_bytes() if available_bytes is None else available_bytes
        if num_bytes > available:
            raise ArenaError(
                f"{_mib(num_bytes)} of host memory are more than the {_mib(available)} that this "
                "container may still take; raise its memory limit or set less"
            )
        fd = -1
        try:
            fd = os.memfd_create("ullage-kv")
            os.ftruncate(fd, num_bytes)
            arena = cls(fd, num_bytes)
            arena.make_resident(progress)
        except (OSError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(
                f"{_mib(num_bytes)} of host memory cannot be had: {error}; allow memfd_create and "
                "that much memory, or set 0"
            ) from error
        return arena

    @classmethod
    def attach(cls, path: str, num_bytes: int) -> "Arena":
        """Map the memory that another process of this host has made.

        Raises:
            ArenaError: its owner has ended, or it is not of this size.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"{path}: {error.strerror}; its owner has ended") from error
        if os.fstat(fd).st_size != num_bytes:
            os.close(fd)
            raise ArenaError(f"{path}: {num_bytes} bytes were expected")
        return cls(fd, num_bytes)

    @property
    def path(self) -> str:
        """Path by which other processes of the same user attach while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def cut(self, slot_bytes: int) -> None:
        """Divides the memory into slots of this size, each at the beginning of a page."""
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.num_slots = self.num_bytes // self.slot_bytes

    def slot(self, index: int, num_bytes: int | None = None) -> memoryview:
        """Return a slot's memory, or its first `num_bytes`."""
        start = index * self.slot_bytes
        return self.memory[start : start + (self.slot_bytes if num_bytes is None else num_bytes)]

    def huge_page_bytes(self) -> int:
        """Bytes of this process' mapping that the kernel keeps in huge pages."""
        smaps = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace")
        _, _, own = smaps.partition("memfd:ullage-kv")
        _, _, granted = own.partition("ShmemPmdMapped:")
        return int(granted.split(maxsplit=1)[0]) << 10 if granted else 0

    def drop_pages(self) -> None:
        """Give the memory back, of all processes that have attached, and keep its path. What is
        read later is 0, and what is written takes memory again."""
        with contextlib.suppress(OSError):  # a kernel that cannot
            self._mapping.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give the memory back. Views of slots must be gone, or the last of them does."""
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mapping.close()
        os.close(self.fd)

    def make_resident(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Touches every page, so that none is missing later; keeps what they hold.

        Raises:
            OSError: the kernel has no more memory for it.
        """
        with contextlib.suppress(OSError):  # a kernel without them
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, self.num_bytes, _STEP_BYTES):
            if start % _REPORT_BYTES == 0:
                progress(start, self.num_bytes)
            size = min(_STEP_BYTES, self.num_bytes - start)
            try:
                self._mapping.madvise(_POPULATE_WRITE, start, size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Linux before 5.14: what is read is there as well.
                bytes(self.memory[start : start + size : PAGE_BYTES])
        progress(self.num_bytes, self.num_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
