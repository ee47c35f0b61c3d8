"""Works out how much of a shared GPU's memory each process uses.

A GPU reports how much memory is free. This also depends on other processes, such as another
engine, or a killed worker whose memory is still being released. The ledger tracks this process's
memory, so the rest of the missing memory must be held by other processes. It only reduces the size
of the KV pool.
"""

import time
from collections.abc import Callable, Mapping, Sequence

_MIB = 1 << 20

POLL_S = 0.1
"""Interval between readings of the free memory, in seconds."""
STABLE_S = 0.5
"""Seconds without an increase in free memory after which it is considered stable."""
MAX_WAIT_S = 10.0
"""Maximum time to wait for memory to be released, in seconds."""

_RISE_BYTES = 16 * _MIB
"""Largest increase in free memory, in bytes, that is ignored as noise."""

_LEAST_OUTSIDE = 128 * _MIB
"""Minimum bytes to assume for CUDA's context and libraries, outside torch's allocator."""
_MOST_OUTSIDE = 2048 * _MIB
"""Maximum bytes outside torch's allocator that are attributed to this process.

Any excess is attributed to other processes.
"""

_PAGE_BYTES = 2 * _MIB
"""Granularity of the driver's memory allocations in bytes."""

_FREE_AT_LEAST = 32 * _MIB
"""Bytes that are always left free, for kernels that libraries load later."""

_SEGMENT_ROOM = 2 * 20 * _MIB
"""Margin in bytes for rounding in torch's allocator, whose large pool has segments of 20 MiB."""

DIFFERENCE_TOLERANCE = 0.02
"""Maximum relative difference between the ledger and what the driver reports."""


def wait_for_memory(
    read_free: Callable[[], int],
    enough: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until the memory of a process that has exited is released.

    The wait ends when `enough` bytes are free, when free memory has not increased for `STABLE_S`,
    or after `MAX_WAIT_S`. Memory that other processes allocate in the meantime does not prolong the
    wait.

    Args:
        read_free: returns the free bytes of the device.
        enough: number of free bytes at which the wait ends immediately.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.

    Returns:
        The number of free bytes.
    """
    started = clock()
    risen_at = started
    free = highest = read_free()

    while free < enough and clock() - risen_at < STABLE_S and clock() - started < MAX_WAIT_S:
        sleep(POLL_S)
        free = read_free()
        if free > highest + _RISE_BYTES:
            highest = free
            risen_at = clock()

    return free


def largest_share_of_others(
    memory: Sequence[tuple[int, int]], threshold: float
) -> tuple[float, int]:
    """Find the GPU on which other processes take up the largest part of the memory budget.

    Args:
        memory: free and total bytes of each GPU, before this process allocates memory.
        threshold: fraction of a GPU's memory that this process may use (its budget).

    Returns:
        How much of the budget is taken on that GPU, as a fraction of the GPU's memory, and the
        GPU's index. If the fraction is zero or less, the whole budget is free on every GPU.
        Otherwise, every GPU has at least `threshold` minus this fraction free.
    """
    shares = [threshold - free / total for free, total in memory]
    largest = max(shares)
    return largest, shares.index(largest)


def find_own(
    before: Mapping[int, int], during: Mapping[int, int], after: Mapping[int, int], num_bytes: int
) -> int | None:
    """Return the process id under which the driver lists this process, or None if ambiguous.

    In a container, the driver may list the host's process ids. One of them may happen to equal
    this process's own id. This process is therefore recognised by its memory usage, which grew by
    `num_bytes` and then shrank again.

    Args:
        before: bytes held by each process before the allocation, by process id.
        during: bytes held by each process while this process held `num_bytes` more.
        after: bytes held by each process after this process freed `num_bytes`.
        num_bytes: bytes that this process allocated and freed.
    """

    def is_near(grown: int) -> bool:
        return abs(grown - num_bytes) < _PAGE_BYTES

    own = [
        pid
        for pid, held in during.items()
        if is_near(held - before.get(pid, 0)) and is_near(held - after.get(pid, 0))
    ]
    return own[0] if len(own) == 1 else None


def own_bytes(listed: int | None, free_before: int, free: int, reserved: int) -> int:
    """Return how many bytes of a GPU's memory this process holds.

    Args:
        listed: bytes that the driver reports for this process, or None if it does not report them.
        free_before: bytes that were free before this process created a CUDA context.
        free: bytes that are free now.
        reserved: bytes of the device that torch's allocator has reserved.
    """
    if listed is not None:
        return max(listed, reserved)

    # The growth of another process looks like ours, and memory that an ended process returned looks
    # like our shrinking. So the measurement is clamped.
    outside = free_before - free - reserved
    return reserved + min(max(outside, _LEAST_OUTSIDE), _MOST_OUTSIDE)


def bytes_of_others(
    available: int, free: int, unallocated: int, safety_reserve: int, least: int
) -> int:
    """Return how many bytes of a ledger's budget other processes hold.

    Bytes that should be available but are not free are attributed to other processes. If too few
    bytes are free for the KV of even the longest sequence, this KV may use part of the safety
    reserve. A restarted worker can then continue its predecessor's requests.

    Args:
        available: bytes of the budget that are not reserved.
        free: bytes of the device that are free.
        unallocated: bytes that are reserved but not yet allocated, including the safety reserve.
        safety_reserve: bytes that should stay free.
        least: bytes of KV cache that the longest sequence needs.
    """
    unclaimed = free - unallocated
    if unclaimed < least:
        unclaimed = min(least, unclaimed + safety_reserve - _FREE_AT_LEAST)
    return max(0, available - max(0, unclaimed))


def allocator_fraction(promised: int, outside: int, reserved: int, total: int) -> float:
    """Return the fraction of a GPU's memory that torch's allocator may use, 0 to 1.

    The limit covers only the allocator's own segments, so this process's other memory is
    subtracted.

    Args:
        promised: bytes that the ledger has reserved for this process.
        outside: bytes of this process outside the allocator, such as the CUDA context.
        reserved: bytes that the allocator has already reserved.
        total: bytes of the device.
    """
    limit = max(promised - outside, reserved + _SEGMENT_ROOM)
    return min(1.0, limit / total)


def differs(allocated: int, measured: int) -> bool:
    """Return whether the ledger's total is wrong by more than `DIFFERENCE_TOLERANCE`.

    Args:
        allocated: bytes that this process has allocated according to the ledger.
        measured: bytes that this process was measured to hold on the device.
    """
    return abs(allocated - measured) > DIFFERENCE_TOLERANCE * measured
