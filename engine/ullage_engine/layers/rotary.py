"""Rotary position embedding, halves rotated (Su et al., 2021, in GPT-NeoX's order)."""

import torch

from ullage_engine.models.geometry import ModelGeometry


def fill_tables(geometry: ModelGeometry, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Writes the tables of every position; both are [positions, head_dim].

    The first half of `sin` is negated: rotating is then x * cos + swap_halves(x) * sin.
    """
    exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / geometry.rope_theta ** (exponents / geometry.head_dim)
    if geometry.rope_factors is not None:
        frequencies = frequencies / torch.tensor(geometry.rope_factors)
    angles = torch.outer(torch.arange(cos.shape[0]).float(), frequencies)
    half = geometry.head_dim // 2
    cosine, sine = angles.cos() * geometry.rope_scale, angles.sin() * geometry.rope_scale
    cos[:, :half], cos[:, half:] = cosine, cosine
    sin[:, :half], sin[:, half:] = -sine, sine


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotates heads x [heads, tokens, head_dim] by tables [tokens, head_dim] into `out`."""
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[:, :half])
    out[..., half:].addcmul_(x[..., :half], sin[:, half:])
