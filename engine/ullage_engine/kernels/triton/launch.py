"""Triton behind types, of which it has none of its own.

Kernels are Python functions that are never called as such: `jit` hands their source to Triton. In
them, parameters annotated `tl.tensor` are pointers or numbers of the device, and upper-case ones
are constants that a kernel is compiled anew for.
"""

from collections.abc import Callable
from typing import Any, Protocol

import triton


class Kernel(Protocol):
    """A compiled function: launched over a grid by the host, or called by another one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Launches on the current stream: kernel[grid](tensors and numbers, constants)."""
        ...

    def __call__(self, *operands: Any) -> Any:
        """Within a kernel: values of the device in, values of the device out."""
        ...


def jit(function: Callable[..., Any]) -> Kernel:
    """See `triton.jit`."""
    kernel: Kernel = triton.jit(function)
    return kernel


def jit_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Kernel]:
    """`jit`, compiled once for all values of these parameters: for counts that differ from step to
    step, because a step that needs another variant waits a second for it."""

    def decorate(function: Callable[..., Any]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=list(numbers))
        return kernel

    return decorate


def power_of_two(size: int) -> int:
    """The next power of two; sizes of Triton's blocks have to be."""
    return 1 << (size - 1).bit_length()


def launch(kernel: Kernel, grid: tuple[int, ...], *operands: object, **constants: object) -> None:
    """Launches on the current stream; waits for nothing.

    A multiplication and an addition may become one operation, as in every other library's kernels:
    Triton asks to be told.
    """
    kernel[grid](*operands, **constants, enable_fp_fusion=True)
