"""Child processes that are forked from this one, and so need not import its libraries again.

Fork only while the process has a single thread and has not yet used a GPU, because a child has
neither the other threads nor a valid CUDA context.
"""

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
"""Operation of prctl(2) that sets the signal to receive when the parent exits."""


class ForkedProcess:
    """A child process. Any thread may call the methods, which are those of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit status as of the last call of `poll` or `wait`, negative if a signal killed the
        process, or None if it was running."""
        # The kernel reports a child's exit only once, so only one thread may ask for it.
        self._lock = threading.Lock()
        # Stays open until this process exits, because a thread may be waiting for it.
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process is running."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process to exit. Return its exit status, or None after `timeout` seconds."""
        select.select([self._descriptor], [], [], timeout)
        return self.poll()

    def kill(self) -> None:
        """Send SIGKILL, unless the process has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


def fork(run: Callable[[], int]) -> int:
    """Fork a child process that exits with the status that `run` returns. Return its process id.

    The kernel kills the child when the thread that called this function exits.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid

    # The child must never return into the code of its parent.
    status = 1
    try:
        die_with_parent(parent)
        status = run()
    except SystemExit as error:
        status = _status_of(error)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            # A thread may still be writing the last lines, which often say why the child exits.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _status_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` exits for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        sys.exit(0)
