"""Cosine and sine tables for rotary position embedding, bit-identical on every machine.

Frequencies and angles are rounded to float32 wherever the reference implementations round them, so
that models get the position embeddings they were trained with. Each rounding is applied to an exact
value. The cosine and sine of an angle are computed in float64 and rounded once.

The results depend only on additions, products and comparisons, which IEEE 754 defines exactly. The
vector functions of torch and numpy differ between processors, and torch's results have been off by
1.5e-4 on one of two threads in the first call of a process.

The reduction to a quarter turn and both polynomials are taken from fdlibm (Sun Microsystems, 1993).
"""

import decimal
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from ullage_engine.model_config.model_config import ModelConfig

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

_BLOCK_ANGLES = 1 << 14
"""Number of angles that are computed at once, so that temporary arrays stay in a core's cache."""

_DIGITS = 40
"""Number of decimal digits to which powers are computed before they are rounded to float32."""

_QUARTERS_PER_RADIAN = 6.36619772367581382433e-01
_QUARTER_TURN = (
    1.57079632673412561417e00,
    6.07710050630396597660e-11,
    2.02226624879595063154e-21,
)
"""π/2, split into a sum of two 33-bit terms and a remainder.

The products of the first two terms with an integer of up to 20 bits are exact.
"""

_SINE = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
"""Polynomial coefficients of r^3, r^5, ... for the sine of angles up to an eighth of a turn."""

_COSINE = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)
"""Polynomial coefficients of r^4, r^6, ... for the cosine of angles up to an eighth of a turn."""


def fill_tables(model_config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Fill the cosine and sine tables for every position, each [positions, head_dim].

    The first half of `sin` is negated, so that a rotation is x * cos + swap_halves(x) * sin.
    """
    half = model_config.head_dim // 2
    for rows, cosine, sine in _blocks(model_config, cos.shape[0]):
        cos[rows, :half] = cosine
        cos[rows, half:] = cosine
        sin[rows, half:] = sine
        sin[rows, :half] = -sine


def fill_half_tables(model_config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Fill cosine and sine tables [positions, head_dim / 2], in which no values are negated."""
    for rows, cosine, sine in _blocks(model_config, cos.shape[0]):
        cos[rows] = cosine
        sin[rows] = sine


def different_table(model_config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> str:
    """Return "cos" or "sin" if that table differs from a recomputed one, or "" if neither does.

    For full tables [positions, head_dim], only the second half of each row is compared. Half tables
    are compared in full.
    """
    half = model_config.head_dim // 2
    for rows, cosine, sine in _blocks(model_config, cos.shape[0]):
        for name, table, expected in (("cos", cos, cosine), ("sin", sin, sine)):
            if not torch.equal(table[rows, -half:].cpu(), expected.to(table.dtype)):
                return name
    return ""


def _blocks(
    model_config: ModelConfig, positions: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield ranges of positions with their cosines and sines, float32 [positions, head_dim / 2]."""
    scale = model_config.rope_scale
    frequencies = rotary_frequencies(model_config)
    rows = max(1, _BLOCK_ANGLES // len(frequencies))

    for start in range(0, positions, rows):
        end = min(start + rows, positions)
        numbers = np.arange(start, end).astype(np.float32)
        cosine, sine = cosine_and_sine(np.multiply.outer(numbers, frequencies))
        cosine = cosine * scale
        sine = sine * scale
        yield slice(start, end), _rounded(cosine), _rounded(sine)


def _rounded(numbers: Float64s) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.float32))


def rotary_frequencies(model_config: ModelConfig) -> Float32s:
    """Return the rotation angle per position, in radians, of each pair of columns."""
    head_dim = model_config.head_dim
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    base = decimal.Decimal(float(np.float32(model_config.rope_theta)))

    with decimal.localcontext(prec=_DIGITS):
        powers = [float(base ** decimal.Decimal(float(each))) for each in exponents]

    frequencies = np.float32(1.0) / np.array(powers, dtype=np.float32)
    if model_config.rope_factors is not None:
        frequencies /= np.array(model_config.rope_factors, dtype=np.float32)
    return frequencies


def cosine_and_sine(angles: Float32s) -> tuple[Float64s, Float64s]:
    """Return the cosine and the sine of angles in radians.

    When rounded to float32, the results are correct to the last bit, except for ties halfway
    between two float32 values. Beyond a million quarter turns, results lose precision, but they are
    still the same on every machine.
    """
    wide = angles.astype(np.float64)
    quarters = np.rint(wide * _QUARTERS_PER_RADIAN)
    rest = wide
    for part in _QUARTER_TURN:
        rest = rest - quarters * part

    square = rest * rest
    sine = rest + rest * square * _polynomial(square, _SINE)
    cosine = 1.0 - (0.5 * square - square * square * _polynomial(square, _COSINE))

    # Each quarter turn makes the sine a cosine, and the cosine a negated sine.
    quadrant = quarters.astype(np.int64) & 3
    is_odd = (quadrant & 1).astype(bool)
    turned_cosine = np.where(is_odd, sine, cosine)
    turned_sine = np.where(is_odd, cosine, sine)
    np.negative(turned_cosine, out=turned_cosine, where=(quadrant == 1) | (quadrant == 2))
    np.negative(turned_sine, out=turned_sine, where=quadrant >= 2)
    return turned_cosine, turned_sine


def _polynomial(x: Float64s, coefficients: tuple[float, ...]) -> Float64s:
    """Return c0 + c1 x + c2 x² + ..., by Horner's rule."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total *= x
        total += coefficient
    return total
