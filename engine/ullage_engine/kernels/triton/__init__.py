"""Triton kernels for NVIDIA GPUs.

Importing this package does not import Triton. Its functions import Triton when they need it.
"""

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
"""Format of a product's weights.

plain: numbers of the activations' type.
int8, fp8 (E4M3): one byte a value.
int4 (codes 0 to 15 for -8 to 7), mxfp4: two values a byte, the even one in the low half."""


MIN_GROUP = 32
"""Fewest weights that may share a scale. Half of them is the least depth of a tensor core."""

MX_GROUP = 32
"""Number of values that share a scale in MXFP4."""

log = logging.getLogger("ullage.engine.kernels")


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether Triton kernels compute on this device. Otherwise torch's operations do.

    The decision is made once for each device, by compiling a kernel and running it, and holds for
    all code that has both implementations. If a GPU cannot run the kernels, a warning with the
    remedy is logged.
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
    """Return whether the kernels multiply weights with `groups` scales in each column."""
    group = depth // groups
    fits = group == MX_GROUP if format == "mxfp4" else group % MIN_GROUP == 0 or groups == 1
    return group * groups == depth and fits


def attends(head_dim: int, block_tokens: int) -> bool:
    """Return whether the attention kernels support heads and pages of these sizes.

    Triton's blocks are powers of two, and its matrix products at least 16 wide.
    """
    return (
        head_dim >= 16 and not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1)
    )


@dataclass(frozen=True, slots=True)
class PagedWorkspace:
    """The buffers that attention over pages needs in addition to the pages."""

    model_config: ModelConfig
    partials: torch.Tensor
    """Buffer for the results of splits: float32 [`kernels.arena.partial_elements`]."""


Put = Callable[[Indices], torch.Tensor]
"""Returns the device tensor for an index array of the step, see `kernels.staging.Staging.put`."""


def paged_attentions(
    rows: PagedRows,
    put: Put,
    rotated: torch.Tensor,
    attended: torch.Tensor,
    workspace: PagedWorkspace,
    window: int = 0,
) -> "list[PagedDecode | PagedPrefill]":
    """Prepare the attention of a step: one object for all decodes and one for all prompts.

    Args:
        rows: KV places of the step's rows.
        put: puts index arrays on the device.
        rotated: rotated heads, [heads + kv_heads, tokens, head_dim].
        attended: output, [tokens, heads * head_dim].
        workspace: buffers for the results of splits.
        window: tokens of the sliding window; 0: none.
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
    """Prepare the convolutions of a step. Each layer launches one kernel.

    Args:
        plan: inputs of each row's convolution.
        put: puts index arrays on the device.
        projected: inputs B, C and u, [tokens, 3 * channels].
        out: output, [tokens, channels].
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
    """Write x @ weights^T with `ullage_engine.kernels.triton.matmul.quantized_matmul`.

    Raises:
        ValueError: no kernel multiplies this format.
    """
    from ullage_engine.kernels.triton import matmul

    for supported in get_args(Format):
        if supported == format:
            return matmul.quantized_matmul(x, packed, scales, zeros, out, supported, adds)
    raise ValueError(f"format {format} has no kernel; there are {', '.join(get_args(Format))}")
