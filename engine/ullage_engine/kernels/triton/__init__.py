"""Kernels for NVIDIA GPUs. Importing this package does not import Triton; calling it does."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch

from ullage_engine.core.batch import DecodeGroup, PrefillTile
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.models.geometry import ModelGeometry

Format = Literal["plain", "int8", "fp8", "int4", "mxfp4"]
"""plain: numbers of the computing type. int8, fp8 (E4M3): a byte each. int4 (codes 0 to 15 for -8
to 7), mxfp4: two values a byte, the even one in the low half."""


@cache
def is_available() -> bool:
    """Whether there is a CUDA device, Triton to compile for it, and the C compiler it needs."""
    return (
        torch.cuda.is_available()
        and importlib.util.find_spec("triton") is not None
        and any((os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")))
    )


def attends(head_dim: int, block_tokens: int) -> bool:
    """Whether the attention kernels take such heads and pages: Triton's blocks are powers of two,
    and its matrix products at least 16 wide."""
    return (
        head_dim >= 16 and not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1)
    )


@dataclass(frozen=True, slots=True)
class PagedWorkspace:
    """What attention over pages needs beside the pages."""

    geometry: ModelGeometry
    partials: torch.Tensor
    """float32, as many as `ullage_engine.memory.partials.partial_elements`."""


class PagedAttention(Protocol):
    """Attention of some rows of a step."""

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Attends in one layer; the tokens' own KV is in the cache already."""
        ...


def paged_attentions(
    decodes: Sequence[DecodeGroup],
    prefills: Sequence[PrefillTile],
    rotated: torch.Tensor,
    attended: torch.Tensor,
    workspace: PagedWorkspace,
    window: int = 0,
) -> list[PagedAttention]:
    """Attention of every row of a step: rotated [heads + kv_heads, tokens, head_dim] into attended
    [tokens, heads * head_dim]; one launch for all decodes, one for all prompts."""
    from ullage_engine.kernels.triton.decode import PagedDecode
    from ullage_engine.kernels.triton.prefill import PagedPrefill

    buffers = (rotated, attended, workspace, window)
    attentions: list[PagedAttention] = []
    if decodes:
        attentions.append(PagedDecode(decodes, *buffers))
    if prefills:
        attentions.append(PagedPrefill(prefills, *buffers))
    return attentions


def quantized_matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: str,
    adds: bool = False,
) -> None:
    """See `ullage_engine.kernels.triton.matmul`; raises ValueError for a format not in `Format`."""
    from ullage_engine.kernels.triton import matmul

    for known in get_args(Format):
        if known == format:
            return matmul.quantized_matmul(x, packed, scales, zeros, out, known, adds)
    raise ValueError(f"format {format} has no kernel; there are {', '.join(get_args(Format))}")
