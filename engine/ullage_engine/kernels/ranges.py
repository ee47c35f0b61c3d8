"""Marks named ranges of a step for profilers: NVTX ranges for Nsight, or torch profiler ranges.

The names are prefill, decode, sample, score (of prompt tokens), transfer (KV between device and
host, activations between pipeline stages) and collective. By default there is no profiler, and
every range is the same no-op object.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

Name = Literal["prefill", "decode", "sample", "score", "transfer", "collective"]
_Make = Callable[[str], AbstractContextManager[object]]


class Ranges:
    """Opens this process's profiling ranges. Use it only on the thread that computes steps."""

    def __init__(self) -> None:
        self._off: AbstractContextManager[object] = nullcontext()
        self._usual: _Make | None = None
        self._make: _Make | None = None

    def __call__(self, name: Name) -> AbstractContextManager[object]:
        """Return a context manager that opens a range for a `with` block."""
        return self._off if self._make is None else self._make(name)

    def to_nvtx(self) -> None:
        """Open NVTX ranges for Nsight from now on. This needs a CUDA device."""
        import torch

        self._usual = self._make = torch.cuda.nvtx.range

    def to_profiler(self) -> None:
        """Open torch profiler ranges until `restore` is called."""
        from torch.profiler import record_function

        self._make = record_function

    def restore(self) -> None:
        """Revert to what was in use before `to_profiler`: NVTX ranges or no-op ranges."""
        self._make = self._usual


ranges = Ranges()
