"""Named ranges of a step, for whoever looks at one: NVTX for Nsight, or torch's profiler.

The names are prefill, decode, sample, transfer (KV between device and host, activations between
stages) and collective. Nobody looks, by default: then a range is one shared object that does
nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

Name = Literal["prefill", "decode", "sample", "transfer", "collective"]
_Make = Callable[[str], AbstractContextManager[object]]


class Ranges:
    """Opens the ranges of this process; one thread computes."""

    def __init__(self) -> None:
        self._off: AbstractContextManager[object] = nullcontext()
        self._usual: _Make | None = None
        self._make: _Make | None = None

    def __call__(self, name: Name) -> AbstractContextManager[object]:
        """Open a range for a `with` block."""
        return self._off if self._make is None else self._make(name)

    def to_nvtx(self) -> None:
        """Show ranges to Nsight from now on; of use where there is a CUDA device."""
        import torch

        self._usual = self._make = torch.cuda.nvtx.range

    def to_profiler(self) -> None:
        """Show ranges to torch's profiler until `restore`."""
        from torch.profiler import record_function

        self._make = record_function

    def restore(self) -> None:
        """Go back to what was before `to_profiler`."""
        self._make = self._usual


ranges = Ranges()
