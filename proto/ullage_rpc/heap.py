"""Memory that is freed, and garbage that is looked for."""

import ctypes
import gc

# Objects that come before the young ones are searched for cycles; Python's 700 is a few requests.
YOUNG_OBJECTS = 50_000


def give_back_heap() -> None:
    """Returns freed heap pages to the kernel; worth it once, after loading something large.

    Does nothing where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def settle_heap() -> None:
    """Takes what lives now out of every later search for garbage, and searches less often.

    For a server that has loaded what it keeps: its requests leave next to no cycles, and a search
    walks over all that is alive.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
