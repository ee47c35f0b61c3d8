"""Lets a process exit with a distinct status if it aborts because memory ran out.

When memory runs out, Python raises MemoryError, but Rust aborts, and so does C++ code that must not
throw. The resulting SIGABRT does not reveal the reason.
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
