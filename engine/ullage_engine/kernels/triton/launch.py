"""Launches Triton kernels, decodes 4-bit and 8-bit floats in kernels, and checks for GPU support.

A kernel is a Python function whose source `jit` passes to Triton. Python itself never calls it.
Parameters annotated `tl.tensor` are pointers or scalars on the device. Upper-case parameters are
compile-time constants: Triton compiles one variant of the kernel per value.

These narrow floats are unpacked with integer operations, which are exact on every GPU and in
Triton's interpreter. Converting float8 in hardware would need sm89. `obstacle` compiles and runs a
kernel to find out whether this machine can run Triton kernels.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from triton.runtime.cache import get_cache_manager


class Kernel(Protocol):
    """A kernel that the host launches over a grid, or that another kernel calls."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel over this grid on the current stream.

        Call it with tensors, scalars and the kernel's constants.
        """
        ...

    def __call__(self, *operands: Any) -> Any:
        """Call the kernel from another kernel, with values on the device."""
        ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Declare a Triton kernel, which is compiled on its first launch."""
    kernel: Kernel = triton.jit(function)
    return kernel


def jit_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a Triton kernel that is not specialised for the values of these parameters.

    Use it for counts that differ from step to step. Otherwise Triton recompiles the kernel for some
    values, which stalls a step for about a second.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=list(numbers))
        return kernel

    return decorate


def power_of_two(size: int) -> int:
    """Round up to a power of two, as the sizes of Triton's blocks must be."""
    return 1 << (size - 1).bit_length()


def launch(kernel: Kernel, grid: tuple[int, ...], *operands: object, **constants: object) -> None:
    """Launch a kernel on the current stream without waiting for it.

    The compiler may fuse a multiplication and an addition into a single operation (FMA), as in the
    kernels of other libraries.
    """
    kernel[grid](*operands, **constants, enable_fp_fusion=True)


@jit
def e4m3(code: tl.tensor) -> tl.tensor:
    """Convert float8 E4M3 codes to float32.

    The bits are shifted into a float16, which then represents the value times 2^-8. The NaN code
    (0x7f) decodes to 480, but no quantiser writes this code.
    """
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def e2m1(code: tl.tensor) -> tl.tensor:
    """Convert float4 E2M1 codes to float32 in the same way as `e4m3`.

    A code occupies the low four bits of a byte. The shifted bits represent the value times 2^-14.
    """
    bits = code.to(tl.uint16)
    half = ((bits & 0x8) << 12) | ((bits & 0x7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@jit
def e8m0(code: tl.tensor) -> tl.tensor:
    """Convert E8M0 codes (biased exponents of powers of two) to float32.

    Code 0 stands for 2^-127 but decodes to zero.
    """
    return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)


SIZE = 16


@jit
def count(out: tl.tensor, SIZE: tl.constexpr) -> None:
    """Write the integers 0 to SIZE - 1 to `out`."""
    places = tl.arange(0, SIZE)
    tl.store(out + places, places)


def launch_count(out: torch.Tensor) -> None:
    """Launch `count`, a minimal kernel that writes 0, 1, 2 and so on to `out`, int32 [SIZE]."""
    launch(count, (1,), out, SIZE=SIZE)


def obstacle(device: torch.device) -> str | None:
    """Return why kernels cannot run on the device and how to fix it, in one line.

    Return None if kernels can be compiled and run.
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
        except Exception as error:  # Triton, its tools and the driver raise errors of many types
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"{cause}; {remedy}"
    return None


def _write_to_cache() -> None:
    """Check that Triton can add kernels to its cache.

    Compiling a kernel does not prove this, because the kernel may already be cached.
    """
    get_cache_manager("00").put("", "probe", binary=False)


def _compute(device: torch.device) -> None:
    out = torch.zeros(SIZE, dtype=torch.int32, device=device)
    launch_count(out)
    values = out.tolist()
    if values != list(range(SIZE)):
        raise RuntimeError(f"a kernel that counts to {SIZE} computed {values}")
