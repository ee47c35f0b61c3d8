"""The first calls of torch's vector functions in a process, on one thread.

A function of the vector library that torch was built with sets itself up when it is called first.
Two threads that were first together have computed with two accuracies: one half of a tensor was
right, the other wrong by 1.5e-4.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_NUMBERS = 4096
"""Enough for every vector loop, and for its remainder's."""

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
"""What steps and calibrations compute, and what their like would."""


def make_first_calls() -> None:
    """Call every function once on this thread alone, before any step may call it on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in _TYPES:
            numbers = torch.linspace(0.125, 1.0, _NUMBERS + 1).to(dtype)
            for function in _FUNCTIONS:
                function(numbers)
    finally:
        torch.set_num_threads(num_threads)
