"""Kernels for NVIDIA GPUs. Importing this package does not import Triton."""

import importlib.util
from functools import cache
from typing import Literal

import torch

Format = Literal["plain", "int8", "fp8", "int4", "mxfp4"]
"""plain: numbers of the computing type. int8 and fp8 (E4M3): a scale for each column. int4 (codes
0 to 15 for -8 to 7) and mxfp4: two values a byte, the even one in the low half, a scale for each
group."""


@cache
def is_available() -> bool:
    """Whether there is a CUDA device and Triton to compile for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def attends(head_dim: int, block_tokens: int) -> bool:
    """Whether the attention kernels take such heads and pages: Triton's blocks are powers of two,
    and its matrix products at least 16 wide."""
    return (
        head_dim >= 16 and not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1)
    )
