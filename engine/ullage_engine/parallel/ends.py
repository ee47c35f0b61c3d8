"""Waits for processes to end: told by the kernel, or looking at them where that is forbidden."""

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping

_LOOK_S = 0.1


def ended_ranks(processes: Mapping[int, subprocess.Popen[bytes]]) -> Iterator[int]:
    """Ranks in the order in which their processes end; waits for each."""
    with contextlib.ExitStack() as stack:
        waiting: dict[int, int] = {}
        try:
            for rank, process in processes.items():
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                waiting[descriptor] = rank
        except OSError:  # a sandbox does not allow it, or the process is gone already
            yield from _looked_at(processes)
            return
        yield from _told(waiting)


def _told(waiting: dict[int, int]) -> Iterator[int]:
    """`waiting`: ranks by descriptor."""
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting:
        for descriptor, _ in poll.poll():
            poll.unregister(descriptor)
            yield waiting.pop(descriptor)


def _looked_at(processes: Mapping[int, subprocess.Popen[bytes]]) -> Iterator[int]:
    waiting = dict(processes)
    while waiting:
        ended = [rank for rank, process in waiting.items() if process.poll() is not None]
        for rank in ended:
            del waiting[rank]
            yield rank
        time.sleep(_LOOK_S)
