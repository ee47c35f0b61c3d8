"""Whose memory of a GPU is whose, decided purely.

A GPU says how much of it is free, and that changes with every process that uses it: an engine
beside this one, or a worker that was killed and whose memory is still being returned. The ledger
holds the bytes of this process alone; what others hold only bounds the KV pool.
"""

import time
from collections.abc import Callable, Mapping, Sequence

_MIB = 1 << 20

POLL_S = 0.1
"""Seconds between two looks at the free memory."""
STABLE_S = 0.5
"""Seconds without more free memory after which nothing more is being returned."""
MAX_WAIT_S = 10.0

_RISE_BYTES = 16 * _MIB
"""What free memory may rise by while it counts as stable."""

_LEAST_OUTSIDE = 128 * _MIB
_MOST_OUTSIDE = 2048 * _MIB
"""Bytes that CUDA's context, modules and libraries take of a process outside torch's allocator, at
least and at most; what is measured beyond belongs to others."""

_PAGE_BYTES = 2 * _MIB
"""Least step by which the driver gives a process memory."""

_FREE_AT_LEAST = 32 * _MIB
"""Bytes that stay free in any case, for kernels that libraries load later."""

_SEGMENT_ROOM = 2 * 20 * _MIB
"""Room for torch's allocator to round up in: the segments of its large pool are 20 MiB."""

DIFFERENCE_TOLERANCE = 0.02
"""Share by which the ledger may differ from what the driver says."""


def wait_for_memory(
    read_free: Callable[[], int],
    enough: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until memory of a process that ended has been returned; return the free bytes.

    That is when `enough` bytes are free, when no more have become free for `STABLE_S`, or after
    `MAX_WAIT_S`. Memory that others take meanwhile is no reason to wait.
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
    """Return the share of a GPU's memory that others hold of its budget, and the GPU's index.

    It is that of the GPU where it is largest; not above zero, others hold nothing of any budget.
    Of every GPU at least `threshold` less this share is free.

    Args:
        memory: free and all bytes of each GPU, before this process has any.
        threshold: share of a GPU that is the budget.
    """
    shares = [threshold - free / total for free, total in memory]
    largest = max(shares)
    return largest, shares.index(largest)


def find_own(
    before: Mapping[int, int], during: Mapping[int, int], after: Mapping[int, int], num_bytes: int
) -> int | None:
    """Return the process id by which the driver knows this process; None: it cannot be told.

    In a container the driver may list ids of the host, and one of them may be ours by chance. So a
    process is recognised by its memory: it grew by `num_bytes` while this process held that many,
    and shrank again.

    Args:
        before: bytes of each process before this one allocated, by process id.
        during: the same while it held `num_bytes` more.
        after: the same when it had freed them.
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
    """Return the bytes of a GPU that this process has.

    Args:
        listed: what the driver lists for this process; None: it does not.
        free_before: bytes that were free before this process had a context.
        free: bytes that are free now.
        reserved: bytes that torch's allocator has of the device.
    """
    if listed is not None:
        return max(listed, reserved)

    # A neighbour's growth looks like ours, and what a dead one returns like our shrinking.
    outside = free_before - free - reserved
    return reserved + min(max(outside, _LEAST_OUTSIDE), _MOST_OUTSIDE)


def bytes_of_others(
    available: int, free: int, unallocated: int, safety_reserve: int, least: int
) -> int:
    """Return the bytes of a ledger's budget that other processes hold.

    Bytes that are neither reserved nor free belong to others. The safety reserve yields to the KV
    of the longest sequence: a worker that was replaced on a full device must be able to go on with
    its requests.

    Args:
        available: bytes of the budget that nothing is reserved for.
        free: bytes of the device that are free.
        unallocated: bytes that are reserved and not allocated, the safety reserve among them.
        safety_reserve: bytes that are to stay free.
        least: KV bytes of the longest sequence.
    """
    unclaimed = free - unallocated
    if unclaimed < least:
        unclaimed = min(least, unclaimed + safety_reserve - _FREE_AT_LEAST)
    return max(0, available - max(0, unclaimed))


def allocator_fraction(promised: int, outside: int, reserved: int, total: int) -> float:
    """Return the share of a GPU that torch's allocator may have, 0 to 1.

    The limit counts the allocator's segments alone, so what lies outside is taken off.

    Args:
        promised: bytes that the ledger has reserved for this process.
        outside: bytes of this process that are not the allocator's, such as the context.
        reserved: bytes that the allocator has already.
        total: bytes of the device.
    """
    limit = max(promised - outside, reserved + _SEGMENT_ROOM)
    return min(1.0, limit / total)


def differs(allocated: int, measured: int) -> bool:
    """Whether the ledger is wrong by more than `DIFFERENCE_TOLERANCE` of what was measured."""
    return abs(allocated - measured) > DIFFERENCE_TOLERANCE * measured
