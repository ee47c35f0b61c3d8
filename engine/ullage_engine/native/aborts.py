"""The end of a process that aborts because memory ran out.

Python raises MemoryError. C++ code that may not throw and Rust abort instead, and SIGABRT alone
does not say why.
"""

import contextlib
import ctypes
from pathlib import Path

LIBRARY = Path(__file__).with_name("libullage.so")


def end_aborts_for_memory(status: int) -> None:
    """Have this process exit with `status` where it aborts while the kernel gives it no memory.

    Other aborts stay what they are, and so do all of them where the C++ library is missing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(LIBRARY)).ullage_end_aborts(ctypes.c_int64(status))
