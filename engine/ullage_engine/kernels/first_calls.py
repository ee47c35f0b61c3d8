"""Calls each of torch's vector functions once per process, on one thread, before steps use them.

Torch is built with a vector library. Each function of that library initialises itself in its first
call, and this initialisation is not thread-safe. When two threads raced to make the first call,
half of the resulting tensor was off by 1.5e-4.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_NUMBERS = 4096
"""Tensor size that exercises every vector loop. One more element also exercises the remainder loop.
"""

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.exp,
    torch.log,
    torch.sqrt,
    torch.rsqrt,
    torch.sigmoid,
    torch.tanh,
    torch.sin,
    torch.cos,
    F.silu,
    lambda x: F.softmax(x, dim=-1),
    lambda x: F.log_softmax(x, dim=-1),
    lambda x: F.rms_norm(x, (x.shape[-1],)),
)
"""Torch functions that steps and calibrations call, plus similar ones for future use."""


def make_first_calls() -> None:
    """Call every vector function once, with torch limited to the current thread.

    This must happen before any step, because steps call these functions from several threads.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in _TYPES:
            numbers = torch.linspace(0.125, 1.0, _NUMBERS + 1).to(dtype)
            for function in _FUNCTIONS:
                function(numbers)
    finally:
        torch.set_num_threads(num_threads)
