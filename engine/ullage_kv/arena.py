"""The host tier's memory: one shared mapping that is divided into slots of equal size.

The mapping is backed by an anonymous file (memfd). The kernel frees it even if the owning process
is killed, and its size is not limited by a container's small /dev/shm. While the owner is running,
other processes on the host can map the file through its path under /proc.
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
"""The constant MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap module lacks."""
_STEP_BYTES = 16 << 20
"""Bytes to make resident per system call. The call blocks the process's other threads."""
_REPORT_BYTES = 256 << 20
"""Bytes made resident between two progress reports."""


class ArenaError(Exception):
    """Raised if an arena's memory cannot be allocated or attached.

    The message states the sizes, and how to fix the problem.
    """


class Arena:
    """Shared, fully resident memory of `num_bytes` bytes, which `cut` divides into slots."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.slot_bytes = num_bytes
        self.num_slots = 1
        self._mapping = mmap.mmap(fd, num_bytes)
        self.memory = memoryview(self._mapping)
        """Writable view of the whole memory."""

    @classmethod
    def create(
        cls,
        num_bytes: int,
        *,
        available_bytes: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Arena":
        """Allocate new memory and touch every page of it.

        Args:
            num_bytes: size of the memory.
            available_bytes: maximum bytes to allocate. The default is the free memory of the
                container and the machine.
            progress: called with the number of resident bytes and the total number of bytes.

        Raises:
            ArenaError: if the memory is not available. This is checked before anything is
                allocated, so that the kernel does not kill a process.
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
                f"{_mib(num_bytes)} of host memory cannot be taken: {error}; allow memfd_create "
                "and that much memory, or set 0"
            ) from error
        return arena

    @classmethod
    def attach(cls, path: str, num_bytes: int) -> "Arena":
        """Map memory that another process on this host has created.

        Raises:
            ArenaError: if the owner has exited, or the memory has a different size.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"{path}: {error.strerror}, since its owner has ended") from error
        if os.fstat(fd).st_size != num_bytes:
            os.close(fd)
            raise ArenaError(f"{path}: {num_bytes} bytes were expected")
        return cls(fd, num_bytes)

    @property
    def path(self) -> str:
        """Path that other processes of this user can pass to `attach` while this process runs."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def cut(self, slot_bytes: int) -> None:
        """Divide the memory into page-aligned slots of at least `slot_bytes` bytes."""
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.num_slots = self.num_bytes // self.slot_bytes

    def slot(self, index: int, num_bytes: int | None = None) -> memoryview:
        """Return a view of a slot's memory, or of only its first `num_bytes` bytes."""
        start = index * self.slot_bytes
        return self.memory[start : start + (self.slot_bytes if num_bytes is None else num_bytes)]

    def huge_page_bytes(self) -> int:
        """Return how many bytes of this process's mapping are backed by huge pages."""
        smaps = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace")
        _, _, own = smaps.partition("memfd:ullage-kv")
        _, _, granted = own.partition("ShmemPmdMapped:")
        return int(granted.split(maxsplit=1)[0]) << 10 if granted else 0

    def drop_pages(self) -> None:
        """Free the memory pages in all attached processes, but keep the mapping and its path.

        Later reads return zeros, and later writes allocate pages again.
        """
        with contextlib.suppress(OSError):  # a kernel without MADV_REMOVE for memfd
            self._mapping.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Free the memory now, or when the last view of a slot is released."""
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mapping.close()
        os.close(self.fd)

    def make_resident(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Make every page resident without changing its contents.

        Raises:
            OSError: the kernel has no memory left.
        """
        with contextlib.suppress(OSError):  # a kernel without huge pages
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
                # On Linux before 5.14 a read makes a page of a memfd resident, too.
                bytes(self.memory[start : start + size : PAGE_BYTES])
        progress(self.num_bytes, self.num_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
