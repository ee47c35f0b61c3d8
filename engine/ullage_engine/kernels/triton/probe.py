"""Whether this machine can compile kernels and run them, found out by doing it once."""

from collections.abc import Callable

import torch
import triton.language as tl
from triton.runtime.cache import get_cache_manager

from ullage_engine.kernels.triton.launch import jit, launch

SIZE = 16


@jit
def count(out: tl.tensor, SIZE: tl.constexpr) -> None:
    """Writes 0, 1, 2 and so on."""
    places = tl.arange(0, SIZE)
    tl.store(out + places, places)


def launch_count(out: torch.Tensor) -> None:
    """The smallest of kernels; out int32 [SIZE]."""
    launch(count, (1,), out, SIZE=SIZE)


def obstacle(device: torch.device) -> str | None:
    """What keeps kernels from being compiled and run there, with the remedy, in one line.

    None: nothing does.
    """
    attempts: list[tuple[Callable[[], None], str]] = [
        (_write_to_cache, "set TRITON_CACHE_DIR to a directory that can be written"),
        (
            lambda: _compute(device),
            "install gcc (or name another C compiler in CC) and Python's headers (python3-dev)",
        ),
    ]
    for attempt, remedy in attempts:
        try:
            attempt()
        except Exception as error:  # whatever Triton, its tools and the driver raise
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"{cause}; {remedy}"
    return None


def _write_to_cache() -> None:
    """Kernels that are in the cache already would hide that others cannot be added."""
    get_cache_manager("00").put("", "probe", binary=False)


def _compute(device: torch.device) -> None:
    out = torch.zeros(SIZE, dtype=torch.int32, device=device)
    launch_count(out)
    found = out.tolist()
    if found != list(range(SIZE)):
        raise RuntimeError(f"a kernel that counts to {SIZE} computed {found}")
