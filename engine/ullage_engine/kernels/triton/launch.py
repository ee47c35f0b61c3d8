"""Launching Triton kernels: types for them, number formats, and whether this machine runs them.

Kernels are Python functions that are never called as such: `jit` hands their source to Triton. In
them, parameters annotated `tl.tensor` are pointers or numbers of the device, and upper-case ones
are constants that a kernel is specialised for. Small number formats are unpacked with integer
operations that every GPU has: converting float8 in hardware needs sm89, while these are exact on
any GPU and in the interpreter. Whether kernels compile and run here is found out by doing it once.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from triton.runtime.cache import get_cache_manager


class Kernel(Protocol):
    """A compiled function: launched over a grid by the host, or called by another one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Launches on the current stream: kernel[grid](tensors and numbers, constants)."""
        ...

    def __call__(self, *operands: Any) -> Any:
        """Within a kernel: values of the device in, values of the device out."""
        ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Compile a kernel with `triton.jit`."""
    kernel: Kernel = triton.jit(function)
    return kernel


def jit_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile a kernel once for all values of these parameters: for counts that differ from step
    to step, because a step that needs another variant waits a second for it.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=list(numbers))
        return kernel

    return decorate


def power_of_two(size: int) -> int:
    """Return the next power of two; sizes of Triton's blocks have to be."""
    return 1 << (size - 1).bit_length()


def launch(kernel: Kernel, grid: tuple[int, ...], *operands: object, **constants: object) -> None:
    """Launches on the current stream; waits for nothing.

    A multiplication and an addition may become one operation, as in every other library's kernels:
    Triton asks to be told.
    """
    kernel[grid](*operands, **constants, enable_fp_fusion=True)


@jit
def e4m3(code: tl.tensor) -> tl.tensor:
    """Read float8 E4M3 as float32: its bits, moved into a float16, are 2^-8 of its value.

    Not a number (0x7f) reads as 480; no quantiser writes it.
    """
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def e2m1(code: tl.tensor) -> tl.tensor:
    """Read float4 E2M1 in the low four bits as float32: as in `e4m3`, 2^-14 of its value."""
    bits = code.to(tl.uint16)
    half = ((bits & 0x8) << 12) | ((bits & 0x7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@jit
def e8m0(code: tl.tensor) -> tl.tensor:
    """Read a power of two from its biased exponent, float32; 0 stands for 2^-127 and read as
    zero.
    """
    return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)


SIZE = 16


@jit
def count(out: tl.tensor, SIZE: tl.constexpr) -> None:
    """Write 0, 1, 2 and so on."""
    places = tl.arange(0, SIZE)
    tl.store(out + places, places)


def launch_count(out: torch.Tensor) -> None:
    """Launch the smallest of kernels; out int32 [SIZE]."""
    launch(count, (1,), out, SIZE=SIZE)


def obstacle(device: torch.device) -> str | None:
    """Find what keeps kernels from being compiled and run there, with the remedy, in one line.

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
    values = out.tolist()
    if values != list(range(SIZE)):
        raise RuntimeError(f"a kernel that counts to {SIZE} computed {values}")
