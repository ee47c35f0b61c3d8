"""Kernels for NVIDIA GPUs. Importing this package does not import Triton; calling it does."""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ullage_engine.kernels.batch import ConvPlan, PagedRows
from ullage_engine.kernels.staging import Indices
from ullage_engine.model_config.model_config import ModelConfig

if TYPE_CHECKING:
    from ullage_engine.kernels.triton.attention import PagedDecode, PagedPrefill
    from ullage_engine.kernels.triton.conv import FusedConvolution

Format = Literal["plain", "int8", "fp8", "int4", "mxfp4"]
"""plain: numbers of the computing type. int8, fp8 (E4M3): a byte each. int4 (codes 0 to 15 for -8
to 7), mxfp4: two values a byte, the even one in the low half."""


MIN_GROUP = 32
"""Least group of scales: half of one is the least depth that tensor cores multiply."""

MX_GROUP = 32
"""Values that share a scale in MXFP4."""

log = logging.getLogger("ullage.engine.kernels")


@cache
def runs_on(device: torch.device) -> bool:
    """Whether kernels compute on this device; where they do not, torch's operations do.

    Everything that has both asks here, so that one decision holds for all: it is made once, by
    compiling a kernel and running it, and a GPU that has to do without is logged with the remedy.
    """
    if device.type != "cuda":
        return False
    obstacle = _obstacle(device)
    if obstacle is not None:
        log.warning("%s computes with torch's operations, which are slower: %s", device, obstacle)
    return obstacle is None


def _obstacle(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install the gpu extra (pip install 'ullage[gpu]')"
    from ullage_engine.kernels.triton.launch import obstacle

    return obstacle(device)


def takes_groups(format: Format, depth: int, groups: int) -> bool:
    """Whether products take weights in which so many groups of a column's have a scale each."""
    group = depth // groups
    fits = group == MX_GROUP if format == "mxfp4" else group % MIN_GROUP == 0 or groups == 1
    return group * groups == depth and fits


def attends(head_dim: int, block_tokens: int) -> bool:
    """Whether the attention kernels take such heads and pages: Triton's blocks are powers of two,
    and its matrix products at least 16 wide.
    """
    return (
        head_dim >= 16 and not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1)
    )


@dataclass(frozen=True, slots=True)
class PagedWorkspace:
    """The buffers that attention over pages needs beside the pages."""

    model_config: ModelConfig
    partials: torch.Tensor
    """Results of splits, float32, `ullage_engine.kernels.arena.partial_elements` of them."""


Put = Callable[[Indices], torch.Tensor]
"""Where an index array of the step is on the device."""


def paged_attentions(
    rows: PagedRows,
    put: Put,
    rotated: torch.Tensor,
    attended: torch.Tensor,
    workspace: PagedWorkspace,
    window: int = 0,
) -> "list[PagedDecode | PagedPrefill]":
    """Prepare attention of every row of a step: rotated [heads + kv_heads, tokens, head_dim] into
    attended [tokens, heads * head_dim]; one launch for all decodes, one for all prompts.
    """
    from ullage_engine.kernels.triton.attention import PagedDecode, PagedPrefill

    buffers = (rotated, attended, workspace, window)
    attentions: list[PagedDecode | PagedPrefill] = []
    if len(rows.lengths):
        attentions.append(PagedDecode(rows, put, *buffers))
    if len(rows.tiles.counts):
        attentions.append(PagedPrefill(rows, put, *buffers))
    return attentions


def fused_convolution(
    plan: ConvPlan, put: Put, projected: torch.Tensor, out: torch.Tensor
) -> "FusedConvolution":
    """Prepare a step's convolutions, one launch a layer: projected [tokens, 3 * channels] into out
    [tokens, channels].
    """
    from ullage_engine.kernels.triton.conv import FusedConvolution

    return FusedConvolution(plan, put, projected, out)


def quantized_matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    out: torch.Tensor,
    format: str,
    adds: bool = False,
) -> None:
    """Multiplies as `ullage_engine.kernels.triton.matmul` does; ValueError for an unknown
    format.
    """
    from ullage_engine.kernels.triton import matmul

    for supported in get_args(Format):
        if supported == format:
            return matmul.quantized_matmul(x, packed, scales, zeros, out, supported, adds)
    raise ValueError(f"format {format} has no kernel; there are {', '.join(get_args(Format))}")
