"""A process that takes memory beside a server and frees it, within safe bounds.

`neighbour` runs this module as a program. The program has three bounds. It takes at most a share of
the available memory. It stops early if memory runs low. If memory runs out all the same, the kernel
ends this program first.
"""

import asyncio
import contextlib
import mmap
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from ullage_verify.memory_limit import PROCESSES, free_bytes, group_of

SHARE = 0.5
"""Maximum share of the available memory that the neighbour takes."""
KEPT_SHARE = 0.25
"""Share of the available memory that must stay available while others take memory, too."""
MAX_BYTES = 4 << 30
"""Maximum number of bytes that the neighbour takes."""
MIN_BYTES = 64 << 20
"""Minimum number of bytes. A smaller neighbour would prove nothing."""
STEP_BYTES = 16 << 20
PAUSE_S = 0.5
"""Seconds for which the neighbour holds its memory, and seconds until it takes memory again."""
PATIENCE_S = 120.0
"""Maximum run time of the neighbour, in seconds."""
TAKEN = b"taken"
"""Word that the neighbour prints as soon as it holds memory."""
LOW = 3
"""Exit status of a neighbour that found too little memory."""
_MEMINFO = Path("/proc/meminfo")


class NeighbourError(Exception):
    """Raised if no neighbour can take memory. The message says why, and how to fix it."""


def available_bytes(group: Path | None) -> int:
    """Return the memory that a new process may take without harm to others.

    Args:
        group: control group of the process, whose limits apply, or None for no limits.
    """
    lines = _MEMINFO.read_text().splitlines()
    [kibibytes] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    available = int(kibibytes) << 10
    free = free_bytes(group) if group else None
    return available if free is None else min(available, free)


@contextlib.asynccontextmanager
async def neighbour(pid: int, rounds: int) -> "AsyncIterator[Neighbour]":
    """Start a neighbour of a process. The neighbour is killed at the end of the block.

    The neighbour joins the process's control group if this user may do that. Otherwise the
    neighbour takes memory of the host.

    Args:
        pid: a process of the server.
        rounds: how often the neighbour takes memory and frees it.

    Raises:
        NeighbourError: too little memory is available.
    """
    own = _group(os.getpid())
    group = _group(pid)
    can_join = group is not None and os.access(group / PROCESSES, os.W_OK)
    available = available_bytes(group if can_join else own)
    size = min(int(SHARE * available), MAX_BYTES)
    if size < MIN_BYTES:
        raise NeighbourError(
            f"a neighbour could take only {size >> 20} MiB without harm to others; free memory"
        )
    floor = int(KEPT_SHARE * available)
    command = [sys.executable, "-m", __name__, str(size), str(floor), str(rounds)]
    command += [str(PAUSE_S), str(group) if can_join else ""]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield Neighbour(process, size)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Neighbour:
    """A running neighbour.

    Args:
        process: the neighbour's process.
        num_bytes: bytes that the neighbour takes.
    """

    def __init__(self, process: asyncio.subprocess.Process, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._process = process

    async def taken(self) -> float:
        """Wait until the neighbour holds memory, and return the time on the monotonic clock.

        Raises:
            NeighbourError: the neighbour has ended before that.
        """
        assert self._process.stdout
        async with asyncio.timeout(PATIENCE_S):
            word = await self._process.stdout.readline()
        if word.strip() != TAKEN:
            raise NeighbourError(await self._failure())
        return time.monotonic()

    async def ended(self) -> None:
        """Wait until the neighbour has freed its memory for the last time.

        Raises:
            NeighbourError: the neighbour has failed.
        """
        async with asyncio.timeout(PATIENCE_S):
            status = await self._process.wait()
        if status:
            raise NeighbourError(await self._failure())

    async def _failure(self) -> str:
        status = await self._process.wait()
        if status == LOW:
            return "memory ran low while the neighbour took its part; free memory"
        return f"the neighbour that takes memory ended with status {status}; free memory"


def _group(pid: int) -> Path | None:
    """Return the control group of a process, or None if the group is not visible here."""
    try:
        group = group_of(pid)
    except OSError:
        return None
    return group if group.is_dir() else None


def main(size: int, floor: int, rounds: int, pause_s: float, group: Path | None) -> int:
    """Take memory and free it, for some rounds, and return the exit status.

    Args:
        size: bytes to take.
        floor: bytes that must stay available. If fewer are left, no more memory is taken.
        rounds: how often memory is taken.
        pause_s: seconds for which memory is held, and seconds between two rounds.
        group: control group to join, or None.
    """
    # If memory runs out all the same, the kernel ends this process and no other.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if group:
        (group / PROCESSES).write_text(str(os.getpid()))

    for number in range(rounds):
        blocks: list[mmap.mmap] = []
        while len(blocks) * STEP_BYTES < size and available_bytes(group) - STEP_BYTES > floor:
            block = mmap.mmap(-1, STEP_BYTES)
            for start in range(0, STEP_BYTES, mmap.PAGESIZE):
                block[start] = 1
            blocks.append(block)
            if not number and len(blocks) == 1:
                sys.stdout.buffer.write(TAKEN + b"\n")
                sys.stdout.flush()
        if not blocks:
            return LOW
        time.sleep(pause_s)
        for block in blocks:
            block.close()
        time.sleep(pause_s)
    return 0


if __name__ == "__main__":
    _size, _floor, _rounds, _pause, _folder = sys.argv[1:]
    _joined = Path(_folder) if _folder else None
    sys.exit(main(int(_size), int(_floor), int(_rounds), float(_pause), _joined))
