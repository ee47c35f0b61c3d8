"""A cgroup that bounds memory, where tests may make one, and a process that fills it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")

HOG_BYTES = 500 << 20
"""What a hog takes at most."""
_HOG = """
import sys

# It waits in here until it is in the cgroup.
_, events, before, most = sys.stdin.readline(), *sys.argv[1:]

def num_kills():
    counts = dict(line.split() for line in open(events))
    return int(counts["oom_kill"])

taken = []
while num_kills() == int(before) and len(taken) < int(most) >> 20:
    taken.append(b"x" * (1 << 20))
sys.stdin.readline()  # with all that it has, until it is told to end
"""


class Container:
    """A cgroup of either version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        is_v1 = (folder / "memory.usage_in_bytes").exists()
        self._used = folder / ("memory.usage_in_bytes" if is_v1 else "memory.current")
        self._limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        self._events = folder / ("memory.oom_control" if is_v1 else "memory.events")

    @property
    def bounds_memory(self) -> bool:
        return self._limit.exists()

    @property
    def num_kills(self) -> int:
        """Processes that the kernel has killed here to free memory."""
        counts = dict(line.split() for line in self._events.read_text().splitlines())
        return int(counts["oom_kill"])

    def take(self, pid: int) -> None:
        """Move a process into the cgroup. Memory that the process already has is not moved."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def leave_free(self, num_bytes: int) -> None:
        """Bound it to what it uses now and so much more, with no swap beside it."""
        most = str(int(self._used.read_text()) + num_bytes)
        self._limit.write_text(most)
        for name, value in (("memory.memsw.limit_in_bytes", most), ("memory.swap.max", "0")):
            if (self._folder / name).exists():
                (self._folder / name).write_text(value)

    @contextlib.contextmanager
    def hog(self, victims: Iterable[int]) -> Iterator[None]:
        """Have another process in it take memory until the kernel kills one of the victims.

        The process keeps what it has for the block. It takes no more after the first kill. It is
        the next victim, as the kernel may want one before the first has returned its memory. The
        fork server, which is larger, must not be: a new one would belong to the container, where
        the old one did not, and no worker would fit beside it.
        """
        for pid in victims:
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        facts = [str(self._events), str(self.num_kills), str(HOG_BYTES)]
        command = [sys.executable, "-c", _HOG, *facts]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("900")
            self.take(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            try:
                yield
            finally:
                process.kill()


@contextlib.contextmanager
def make_container() -> Iterator[Container]:
    """Create a cgroup for the block. Skip the test if that is not allowed."""
    parent = _parent()
    folder = parent / f"ullage-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {parent}: {error.strerror}")

    try:
        container = Container(folder)
        if not container.bounds_memory:
            pytest.skip(f"cgroups in {parent} do not bound memory")
        yield container
    finally:
        # A cgroup that has processes cannot be removed.
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _parent() -> Path:
    """Return the cgroup of this process, or the one that is mounted as the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = ROOT / "memory" / path.lstrip("/")
            return own if own.is_dir() else ROOT / "memory"
    return ROOT
