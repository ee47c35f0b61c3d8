"""Root mean square normalisation."""

import torch
import torch.nn.functional as F

ROWS = 512
"""Rows normalised at once, which bounds the temporary."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Writes x / sqrt(mean(x²) + eps) * weight, row by row (Zhang and Sennrich, 2019)."""
    shape = (x.shape[-1],)
    for start in range(0, x.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        out[rows].copy_(F.rms_norm(x[rows], shape, weight, eps))


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalises each head of [tokens, heads, head_dim] by itself, in place."""
    size = max(1, ROWS // heads.shape[1])
    for start in range(0, heads.shape[0], size):
        rows = heads[start : start + size]
        rows.copy_(F.rms_norm(rows, (rows.shape[-1],), weight, eps))
