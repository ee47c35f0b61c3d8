"""What a container has of its own: a limit of memory, its view of it, and a small /dev/shm."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage_verify.memory_limit import MemoryLimit, memory_limit

SHARED_MEMORY_BYTES = 1 << 30
"""Size of /dev/shm in the container."""
_ENTER = """
mount --bind "$1" /dev/shm && mount --bind "$2" "$3" && shift 3 && exec "$@"
"""
"""Script that gives its process a /dev/shm of its own and the limit of its own control group."""
_NEIGHBOUR = """
import mmap, sys, time
size, pause = int(sys.argv[1]), float(sys.argv[2])
while True:
    block = mmap.mmap(-1, size)
    for start in range(0, size, 1 << 20):
        block[start] = 1
        block[start : start + (1 << 20)] = bytes(1 << 20)
    time.sleep(pause)
    block.close()
    time.sleep(pause)
"""
"""Program that takes memory and frees it again and again."""


@dataclass(frozen=True)
class SharedFiles:
    """The content of /dev/shm."""

    count: int
    num_bytes: int


class Container:
    """A control group, and a /dev/shm that outlives the processes, as in a pod.

    Args:
        group: the control group.
        shared_memory: folder where the file system of the /dev/shm is mounted.
    """

    def __init__(self, group: MemoryLimit, shared_memory: Path) -> None:
        self.group = group
        self._shared_memory = shared_memory

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs the given command in the container."""
        group = self.group.folder
        enter = ["unshare", "--mount", "--cgroup", "sh", "-c", _ENTER, "sh"]
        places = [str(self._shared_memory), str(group), str(group.parent)]
        return self.group.inside([*enter, *places, *command])

    def shared_files(self) -> SharedFiles:
        """Return how much the container's processes have left in /dev/shm."""
        files = [path for path in self._shared_memory.rglob("*") if path.is_file()]
        return SharedFiles(len(files), sum(path.stat().st_blocks * 512 for path in files))


@contextlib.contextmanager
def container(name: str) -> Iterator[Container]:
    """Yield a new container, which is removed at the end of the block.

    Args:
        name: name of its control group.

    Raises:
        OSError: this user may not make control groups or mount file systems.
    """
    with memory_limit(name) as group, tempfile.TemporaryDirectory(prefix="ullage-shm-") as folder:
        options = f"size={SHARED_MEMORY_BYTES}"
        _run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder])
        try:
            yield Container(group, Path(folder))
        finally:
            _run(["umount", "--lazy", folder])


@contextlib.contextmanager
def neighbour(group: MemoryLimit, num_bytes: int, pause_s: float) -> Iterator[None]:
    """Let another process of the group take and free memory until the end of the block.

    Args:
        group: the control group.
        num_bytes: bytes that the process takes.
        pause_s: seconds for which it keeps them, and for which it is without them.
    """
    command = [sys.executable, "-c", _NEIGHBOUR, str(num_bytes), str(pause_s)]
    process = subprocess.Popen(group.inside(command), start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"`{' '.join(command)}`: {result.stderr.strip()}")
