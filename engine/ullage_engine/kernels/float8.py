"""Keys and values in eight bits: float8 E4M3, and for each head a scale that is a power of two.

Dividing by such a scale and multiplying by it is exact, so the one rounding is E4M3's, and a kernel
that applies the scale to queries and sums has the bits of one that applies it to keys and values.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

LARGEST = 448.0
"""E4M3 has no infinity; what exceeds its largest number is stored as that."""

MIN_EXPONENT, MAX_EXPONENT = -15, 7
"""Of scales: every stored number and every scale is one of float16, too."""


class _Bits(NamedTuple):
    """Where the bits of E4M3 lie in a number of another type."""

    integers: torch.dtype
    shift: int
    mask: int
    bias: int
    """The number that these bits are is its value times 2 to the power -bias."""


_BITS = {
    torch.float32: _Bits(torch.int32, 20, -(1 << 31) | 0x7F << 20, 120),
    torch.bfloat16: _Bits(torch.int16, 4, -(1 << 15) | 0x7F << 4, 120),
    torch.float16: _Bits(torch.int16, 7, -(1 << 15) | 0x7F << 7, 8),
}


class HeadScales(NamedTuple):
    """What a stored 1 stands for in each head of a layer, in the computing type."""

    values: torch.Tensor  # [2 * kv_heads, 1, 1], keys first
    factors: torch.Tensor  # the same, times what `widen` finds missing


def head_scales(bounds: Sequence[float], dtype: torch.dtype, device: torch.device) -> HeadScales:
    """The least power of two for each head with which all up to its bound can be stored."""
    # A fraction of 0.5 to 1 times 2 to this power is the quotient.
    exponents = [
        min(MAX_EXPONENT, max(MIN_EXPONENT, math.frexp(bound / LARGEST)[1])) for bound in bounds
    ]
    values = torch.tensor([2.0**exponent for exponent in exponents], device=device)[:, None, None]
    factors = values * 2.0 ** _BITS[dtype].bias
    return HeadScales(values.to(dtype), factors.to(dtype))


def narrow(numbers: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes numbers, which it overwrites, as bytes of the same shape; what is too large for its
    scale becomes the largest number."""
    numbers.div_(scales).clamp_(-LARGEST, LARGEST)
    codes.view(torch.float8_e4m3fn).copy_(numbers)


def widen(codes: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Writes what bytes stand for; exact, and several times faster than torch's conversion.

    The bits are moved to their places in a wider number, whose exponent has another bias. Not a
    number reads as 480: `narrow` makes it of nothing but not a number.
    """
    layout = _BITS[out.dtype]
    bits = out.view(layout.integers)
    bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(layout.shift).bitwise_and_(layout.mask)
    out.mul_(factors)
