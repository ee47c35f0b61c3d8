"""Gives a process a distinct exit status if it aborts because memory ran out.

When memory runs out, Python code raises MemoryError, but Rust code aborts, and so does C++ code
that must not throw. The process then dies of SIGABRT, which does not reveal that memory was the
reason.
"""

import contextlib
import ctypes
from pathlib import Path

LIBRARY = Path(__file__).with_name("libullage.so")


def end_aborts_for_memory(status: int) -> None:
    """Make this process exit with `status` if it aborts because memory ran out.

    The exit status of other aborts does not change. Without the C++ library, this function has no
    effect.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(LIBRARY)).ullage_end_aborts(ctypes.c_int64(status))
