"""Freed memory that the C library keeps for itself."""

import ctypes


def give_back_heap() -> None:
    """Returns freed heap pages to the kernel; worth it once, after loading something large.

    Does nothing where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
