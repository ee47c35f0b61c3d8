"""Triton kernels for NVIDIA GPUs.

Importing this package does not import Triton. Its functions import Triton only when called.
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
"""Format of the weights in a matmul.

`plain` weights have the activations' dtype. `int8` and `fp8` (E4M3) weights take one byte per
value. `int4` (codes 0 to 15 for -8 to 7) and `mxfp4` pack two values per byte, with the
even-indexed value in the low half.
"""


MIN_GROUP = 32
"""Minimum number of weights that share a scale: twice the minimum depth of a tensor-core operation.
"""

MX_GROUP = 32
"""Number of values that share one scale in MXFP4."""

log = logging.getLogger("ullage.engine.kernels")


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether Triton kernels are used on this device. Otherwise torch operations are used.

    The decision is made once per device by compiling and running a kernel, and applies to all code
    that has both implementations. If a GPU cannot run the kernels, a warning explains the remedy.
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
    """Return whether the kernels support weights with `groups` scales per column.

    `depth` is the number of weights per column.
    """
    group = depth // groups
    fits = group == MX_GROUP if format == "mxfp4" else group % MIN_GROUP == 0 or groups == 1
    return group * groups == depth and fits


def attends(head_dim: int, block_tokens: int) -> bool:
    """Return whether the attention kernels support these head and page sizes.

    Triton's block sizes are powers of two, and its matmuls are at least 16 wide.
    """
    return (
        head_dim >= 16 and not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1)
    )


@dataclass(frozen=True, slots=True)
class PagedWorkspace:
    """The buffers that paged attention needs in addition to the pages."""

    model_config: ModelConfig
    partials: torch.Tensor
    """Buffer for the partial results of splits: float32 [`kernels.arena.partial_elements`]."""


Put = Callable[[Indices], torch.Tensor]
"""Function that returns the device tensor for an index array (see `kernels.staging.Staging`)."""


def paged_attentions(
    rows: PagedRows,
    put: Put,
    rotated: torch.Tensor,
    attended: torch.Tensor,
    workspace: PagedWorkspace,
    window: int = 0,
) -> "list[PagedDecode | PagedPrefill]":
    """Prepare a step's attention: one object for all decodes and another for all prompts.

    Args:
        rows: KV slots and blocks of the step's rows.
        put: function that puts index arrays on the device.
        rotated: rotated heads, [heads + kv_heads, tokens, head_dim].
        attended: output, [tokens, heads * head_dim].
        workspace: buffers for the results of splits.
        window: size of the sliding window in tokens, or 0 for no window.
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
    """Prepare a step's convolutions. Each one takes a single kernel launch.

    Args:
        plan: inputs of each row's convolution.
        put: function that puts index arrays on the device.
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
    """Compute x @ weights^T with `ullage_engine.kernels.triton.matmul.quantized_matmul`.

    Raises:
        ValueError: no kernel supports this format.
    """
    from ullage_engine.kernels.triton import matmul

    for supported in get_args(Format):
        if supported == format:
            return matmul.quantized_matmul(x, packed, scales, zeros, out, supported, adds)
    raise ValueError(f"format {format} has no kernel; there are {', '.join(get_args(Format))}")
