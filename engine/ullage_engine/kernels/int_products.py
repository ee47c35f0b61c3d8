"""Products of int8 activations and int8 weights (w8a8).

Every row of activations is rounded to int8 with a scale of its own, products are summed as int32,
and the scales of row and column are multiplied in afterwards. Sums of whole numbers are exact, so a
row's result depends on nothing but the row.
"""

import torch

from ullage_engine.quant.packing import Packed

PASS_ROWS = 64
"""Rows rounded and multiplied at a time; they bound the scratch memory."""

_MOST = 127
_LEAST_SCALE = 1e-12
_EXACT_TERMS = 1024
"""Products of int8 that float32 adds up exactly: 1024 * 127 * 127 < 2^24."""

_CUDA_LEAST_ROWS = 32
"""cuBLAS multiplies int8 from 17 rows."""


def int_scratch_bytes(shape: tuple[int, int]) -> int:
    """Scratch memory for weights [out, in]."""
    rows, columns = shape
    return PASS_ROWS * (columns + 4 * columns + 2 * 4 * rows + 4)


class IntMatrix:
    """int8 weights with a scale for each row."""

    def __init__(self, packed: Packed, scratch: torch.Tensor) -> None:
        self._out, self._in = packed.encoding.shape
        self._weight = packed.values.t()
        self._scales = packed.scales.view(1, -1)
        sizes = [PASS_ROWS * size * 4 for size in (self._in, self._out, self._out, 1)]
        pieces = torch.split(scratch, [*sizes, scratch.numel() - sum(sizes)])
        floats, sums, products, scales, rest = pieces
        self._floats = floats.view(torch.float32).view(PASS_ROWS, -1)
        self._sums = sums.view(torch.int32).view(PASS_ROWS, -1)
        self._products = products.view(torch.float32).view(PASS_ROWS, -1)
        self._row_scales = scales.view(torch.float32).view(PASS_ROWS, 1)
        self._rounded = rest[: PASS_ROWS * self._in].view(torch.int8).view(PASS_ROWS, -1)
        self._least_rows = _CUDA_LEAST_ROWS if scratch.is_cuda else 1

    @property
    def shape(self) -> tuple[int, int]:
        return self._in, self._out

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, x.shape[0], PASS_ROWS):
            rows = slice(start, min(start + PASS_ROWS, x.shape[0]))
            out[rows].copy_(self._product(x[rows]))

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, x.shape[0], PASS_ROWS):
            rows = slice(start, min(start + PASS_ROWS, x.shape[0]))
            out[rows].add_(self._product(x[rows]))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        self._round(x)
        padded = max(count, self._least_rows)
        self._rounded[count:padded].zero_()
        int_product(self._rounded[:padded], self._weight, self._sums[:padded])
        products = self._products[:count].copy_(self._sums[:count])
        products.mul_(self._row_scales[:count]).mul_(self._scales)
        return products

    def _round(self, x: torch.Tensor) -> None:
        """Rounds rows to int8; |x - rounded * scale| <= scale / 2 for scale = max|row| / 127."""
        count = x.shape[0]
        floats = self._floats[:count].copy_(x)
        scales = self._row_scales[:count]
        torch.linalg.vector_norm(floats, torch.inf, dim=1, keepdim=True, out=scales)
        scales.div_(_MOST).clamp_(min=_LEAST_SCALE)
        self._rounded[:count].copy_(floats.div_(scales).round_().clamp_(-_MOST, _MOST))


def int_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Writes x @ weight, exactly: int8 [rows, in] and [in, out], int32 out."""
    multiple_of_8 = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0
    if hasattr(torch, "_int_mm") and (multiple_of_8 or not x.is_cuda):
        torch._int_mm(x, weight, out=out)
    else:
        emulated_int_product(x, weight, out)


def emulated_int_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same numbers where no instruction makes them: float32 sums of terms so few that each is
    exact."""
    out.zero_()
    for start in range(0, x.shape[1], _EXACT_TERMS):
        terms = slice(start, start + _EXACT_TERMS)
        out.add_(torch.mm(x[:, terms].float(), weight[terms].float()).to(torch.int32))
