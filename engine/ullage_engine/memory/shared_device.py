"""Pure functions that attribute a shared GPU's memory to the processes that use it.

A GPU reports its free memory, which changes with every process that uses the GPU: another engine,
or a killed worker whose memory is still being returned. The ledger counts the bytes of this
process. The bytes of other processes only limit the KV pool.
"""

import time
from collections.abc import Callable, Mapping, Sequence

_MIB = 1 << 20

POLL_S = 0.1
"""Interval between readings of the free memory, in seconds."""
STABLE_S = 0.5
"""Seconds without a rise of free memory after which no further rise is expected."""
MAX_WAIT_S = 10.0
"""Maximum time to wait for memory, in seconds."""

_RISE_BYTES = 16 * _MIB
"""Largest increase of free memory, in bytes, that still counts as stable."""

_LEAST_OUTSIDE = 128 * _MIB
"""Minimum bytes that CUDA's context, modules and libraries use outside torch's allocator."""
_MOST_OUTSIDE = 2048 * _MIB
"""Maximum bytes that this process uses outside torch's allocator.

Any excess is attributed to other processes.
"""

_PAGE_BYTES = 2 * _MIB
"""Granularity of the driver's allocations."""

_FREE_AT_LEAST = 32 * _MIB
"""Bytes that always stay free, for kernels that libraries load later."""

_SEGMENT_ROOM = 2 * 20 * _MIB
"""Margin in bytes for rounding in torch's allocator, whose large pool has segments of 20 MiB."""

DIFFERENCE_TOLERANCE = 0.02
"""Fraction by which the ledger may differ from the driver's values."""


def wait_for_memory(
    read_free: Callable[[], int],
    enough: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until the memory of a process that ended has been returned.

    The wait ends when `enough` bytes are free, when no more have become free for `STABLE_S`, or
    after `MAX_WAIT_S`. Memory that other processes allocate in the meantime does not prolong the
    wait.

    Args:
        read_free: returns the free bytes of the device.
        enough: number of free bytes at which the wait ends at once.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.

    Returns:
        The free bytes.
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
    """Find the GPU on which other processes hold most of the budget.

    Args:
        memory: free and total bytes of each GPU, before this process allocates memory.
        threshold: share of a GPU that is the budget.

    Returns:
        The budget that other processes hold on that GPU, as a share of the GPU's memory, and the
        GPU's index. If the share is zero or less, other processes hold no part of any GPU's budget.
        On every GPU, at least `threshold` minus this share is free.
    """
    shares = [threshold - free / total for free, total in memory]
    largest = max(shares)
    return largest, shares.index(largest)


def find_own(
    before: Mapping[int, int], during: Mapping[int, int], after: Mapping[int, int], num_bytes: int
) -> int | None:
    """Return the driver's process id for this process, or None if it is ambiguous.

    In a container, the driver may list process ids of the host, and one of them may equal this
    process's id by chance. So this process is recognised by its memory, which grew by `num_bytes`
    and shrank again.

    Args:
        before: bytes of each process before this process allocated, by process id.
        during: bytes of each process while this process held `num_bytes` more.
        after: bytes of each process after this process freed `num_bytes`.
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
    """Return the bytes of a GPU that this process holds.

    Args:
        listed: bytes that the driver lists for this process, or None if the driver lists none.
        free_before: bytes that were free before this process had a context.
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
    """Return the bytes of a ledger's budget that other processes hold.

    Bytes that are neither reserved nor free belong to others. The safety reserve yields to the KV
    of the longest sequence, because a new worker on a full device must be able to continue the
    requests of its predecessor.

    Args:
        available: bytes of the budget that are not reserved.
        free: bytes of the device that are free.
        unallocated: bytes that are reserved and not allocated, including the safety reserve.
        safety_reserve: bytes that should stay free.
        least: KV bytes of the longest sequence.
    """
    unclaimed = free - unallocated
    if unclaimed < least:
        unclaimed = min(least, unclaimed + safety_reserve - _FREE_AT_LEAST)
    return max(0, available - max(0, unclaimed))


def allocator_fraction(promised: int, outside: int, reserved: int, total: int) -> float:
    """Return the share of a GPU that torch's allocator may have, 0 to 1.

    The allocator's limit counts only its segments, so bytes outside the allocator are subtracted.

    Args:
        promised: bytes that the ledger has reserved for this process.
        outside: bytes of this process outside the allocator, such as the CUDA context.
        reserved: bytes that the allocator has already reserved.
        total: bytes of the device.
    """
    limit = max(promised - outside, reserved + _SEGMENT_ROOM)
    return min(1.0, limit / total)


def differs(allocated: int, measured: int) -> bool:
    """Return whether the ledger deviates by more than `DIFFERENCE_TOLERANCE` from `measured`."""
    return abs(allocated - measured) > DIFFERENCE_TOLERANCE * measured
