"""Dumps a running process's stacks to standard error on SIGUSR1.

faulthandler dumps the threads from the signal handler, even if the process hangs in a library.
Tasks are dumped by the event loop itself, so they appear only if the loop is still running. After
the dump, the process continues.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any


def dump_on_signal() -> None:
    """Dump the stacks of all threads on SIGUSR1, which would otherwise terminate the process."""
    with contextlib.suppress(OSError, ValueError):  # standard error is not a file
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def dump_loop_on_signal(others: Callable[[], Iterable[int]] = tuple) -> None:
    """Dump the stacks of all threads and of the running event loop's tasks on SIGUSR1.

    Args:
        others: returns ids of processes to forward the signal to. Each must handle SIGUSR1.
    """
    loop = asyncio.get_running_loop()

    def dump() -> None:
        print("\n".join(map(_stack, asyncio.all_tasks(loop))), file=sys.stderr, flush=True)
        for pid in others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    faulthandler.unregister(signal.SIGUSR1)  # of the start, before there was a loop
    loop.add_signal_handler(signal.SIGUSR1, dump)
    with contextlib.suppress(OSError, ValueError):
        # After the loop's own handler, which it then calls.
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=True)


def _stack(task: "asyncio.Task[Any]") -> str:
    """Return a task's name and its stack of awaiting frames, outermost first.

    `Task.print_stack` shows only one frame, because it does not follow awaited coroutines.
    """
    lines = [f"Task {task.get_name()} (most recent call last):"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "\n".join(lines)
