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
