"""From weights to small numbers. Scales are rounded to the type they will be stored in before
values are, so that a value's error is half a step whatever that type is."""

import torch

from ullage_engine.quant.formats import E4M3_MOST, LEAST, MOST, Encoding, Format, Quantized

_TINY = 1e-12
"""Scale of weights that are all zero; representable in every type but float16, where it is 0."""


def quantise(weights: torch.Tensor, encoding: Encoding, dtype: torch.dtype) -> Quantized:
    """Rounds weights [out, in]; scales and zeros are of `dtype`, except float32 for w8a8."""
    weights = weights.to(torch.float32)
    match encoding.format:
        case "int4":
            return quantise_int4(weights, encoding.group, dtype)
        case "fp8":
            return quantise_fp8(weights, dtype)
        case "w8a8":
            return quantise_symmetric(weights, "w8a8", torch.float32)
        case _:
            return quantise_symmetric(weights, "int8", dtype)


def quantise_symmetric(weights: torch.Tensor, format: Format, dtype: torch.dtype) -> Quantized:
    """127 steps to each side of zero, one scale for each row.

    |weight - dequantised| <= scale / 2, for scale = max|row| / 127.
    """
    most = MOST[format]
    scales = _stored(weights.abs().amax(dim=1, keepdim=True) / most, dtype)
    values = (weights / scales.to(torch.float32)).round_().clamp_(-most, most)
    return Quantized(format, values.to(torch.int8), scales)


def quantise_fp8(weights: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """E4M3, one scale for each row.

    |weight - dequantised| <= max(|weight| / 16, scale / 1024): half of the last of 3 bits, and half
    of the smallest subnormal step 2^-9. Values beyond 448 scales are cut, by the scale's rounding.
    """
    scales = _stored(weights.abs().amax(dim=1, keepdim=True) / E4M3_MOST, dtype)
    values = (weights / scales.to(torch.float32)).clamp_(-E4M3_MOST, E4M3_MOST)
    return Quantized("fp8", values.to(torch.float8_e4m3fn), scales)


def quantise_int4(weights: torch.Tensor, group: int, dtype: torch.dtype) -> Quantized:
    """16 steps from the group's least to its greatest weight, zero among them.

    The zero point is a whole number of steps, as GPTQ and AWQ have it, so weights of zero stay
    zero. Narrower ranges of less squared error were measured to be worse (docs/decisions/0013).
    |weight - dequantised| <= scale / 2, but for the rounding of scale and zero to `dtype`: the zero
    point's rounding cuts half a step off the range at most.
    """
    rows, columns = weights.shape
    grouped = weights.view(rows, columns // group, group)
    low, high = grouped.amin(dim=2).clamp_(max=0.0), grouped.amax(dim=2).clamp_(min=0.0)
    scales = _stored((high - low) / 15, dtype)
    steps = scales.to(torch.float32)
    point = (-low / steps).round_().clamp_(0, 15) + LEAST["int4"]
    values = (grouped / steps.unsqueeze(2)).round_() + point.unsqueeze(2)
    values = values.clamp_(LEAST["int4"], MOST["int4"]).to(torch.int8)
    return Quantized("int4", values.flatten(1), scales, (-point * steps).to(dtype))


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as they are stored, never zero."""
    least = max(_TINY, torch.finfo(dtype).tiny)
    return scales.clamp(min=least).to(dtype)
