"""The stacks of a running process on its standard error, when it gets SIGUSR1: where it is busy, or
what it waits for. It goes on as before.

Threads are dumped by faulthandler, from inside the signal, also of a process that hangs in a
library. Tasks of an event loop are dumped by the loop, so only while that turns.
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
    """Dump all threads at each SIGUSR1, which would end the process otherwise."""
    with contextlib.suppress(OSError, ValueError):  # a standard error that is no file
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def dump_loop_on_signal(others: Callable[[], Iterable[int]] = tuple) -> None:
    """Dump all threads and the tasks of the running loop at each SIGUSR1.

    `others`: returns processes that get the signal, too; each must dump at it.
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
    """Return a task's name and what it waits in, outermost first. Its own `print_stack` shows one
    frame only: those of awaited coroutines hang on these and not on the frame."""
    lines = [f"Task {task.get_name()} (most recent call last):"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "\n".join(lines)
