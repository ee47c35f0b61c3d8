"""Products with quantised matrices.

A few rows are multiplied by a kernel that reads the small numbers themselves, where the platform
has one. For many rows, panels of the matrix are brought back to the computing type and multiplied
as any other. Scratch memory is one buffer for all matrices of a model.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.int_products import IntMatrix, int_scratch_bytes
from ullage_engine.kernels.panels import halves_bytes, make_panels, panel_bytes, panel_rows
from ullage_engine.layers.expert_matrices import PickedExperts, packed_experts
from ullage_engine.layers.matrix import Matrix
from ullage_engine.quant.formats import Encoding, Format
from ullage_engine.quant.packing import Packed

FEW_ROWS = {"int8": 24, "int4": 40}
"""Most rows that torch's CPU kernels multiply faster than panels do, in bfloat16: they take 11 µs a
row for 3072 x 576 weights, and a panel's dequantisation as long as 24 or 40 of them. In other types
they are slower than panels for a single row."""

EXPERT_KERNELS: dict[Format, triton.Format] = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8",
    "w8a8": "int8",
}
"""What experts are multiplied as; for MXFP4 see `ullage_engine.kernels.mxfp4`. Activations of w8a8
are not rounded: what counts for the few rows of an expert is to read its weights small."""


class FusedProduct(Protocol):
    """Multiplies by small numbers as they are stored; what a GPU's kernels offer."""

    def __call__(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        out: torch.Tensor,
        format: str,
        adds: bool = False,
    ) -> None:
        """Writes x [rows, in] @ weights to out [rows, out], or adds it. The others lie row by row,
        see `ullage_engine.quant.packing`."""
        ...


def scratch_bytes(
    encodings: Iterable[Encoding], itemsize: int, *, deterministic: bool = False
) -> int:
    """Scratch memory that products with any of these matrices take."""
    panels, halves, whole = 0, 0, 0
    for each in encodings:
        if each.format == "w8a8":
            whole = max(whole, int_scratch_bytes(each.shape))
            continue
        rows = each.shape[0] if deterministic else panel_rows(each, itemsize)
        panels = max(panels, panel_bytes(each, rows, itemsize))
        halves = max(halves, halves_bytes(each, rows))
    return max(whole, panels + halves)


def quantized_matrix(
    packed: Packed, dtype: torch.dtype, scratch: torch.Tensor, fused: FusedProduct | None = None
) -> Matrix:
    """The matrix in whatever way is fastest here; `scratch` uint8 of `scratch_bytes`."""
    encoding = packed.encoding
    if encoding.format == "w8a8":
        return IntMatrix(packed, scratch)
    if fused is not None and _has_kernel(encoding, encoding.format):
        return FusedMatrix(packed, fused)
    return PanelMatrix(packed, dtype, scratch)


def picked_experts(packed: Packed, count: int) -> PickedExperts | None:
    """All experts' matrices, stored one above the other, by kernels that find each expert's rows on
    the device; None where no kernel takes such groups."""
    format = EXPERT_KERNELS[packed.encoding.format]
    if not _has_kernel(packed.encoding, format):
        return None
    values, scales = (
        each.view(count, -1, each.shape[1]) for each in (packed.values, packed.scales)
    )
    zeros = None if packed.zeros is None else packed.zeros.view(scales.shape)
    matrices = packed_experts(values, scales, format, zeros)
    return PickedExperts(matrices, matrices)


def row_matrix(
    packed: Packed,
    dtype: torch.dtype,
    scratch: torch.Tensor,
    plain: Callable[[torch.Tensor], Matrix],
) -> Matrix:
    """The matrix with rows of products independent of one another.

    It is dequantised whole before each product, which `plain` makes of a matrix of the computing
    type [out, in]. Sums of whole numbers are exact, so w8a8 needs none of this.
    """
    if packed.encoding.format == "w8a8":
        return IntMatrix(packed, scratch)
    return WholeMatrix(packed, dtype, scratch, plain)


class PanelMatrix:
    """Fused for few rows on a CPU, panel by panel for many and elsewhere."""

    def __init__(self, packed: Packed, dtype: torch.dtype, scratch: torch.Tensor) -> None:
        self._rows = panel_rows(packed.encoding, dtype.itemsize)
        self._out, self._in = packed.encoding.shape
        self._panels = make_panels(packed, self._rows, dtype, scratch)
        self._few = _few_rows_product(packed, dtype)
        self._most_few = FEW_ROWS[packed.encoding.format] if self._few else 0

    @property
    def shape(self) -> tuple[int, int]:
        return self._in, self._out

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._few is not None and x.shape[0] <= self._most_few:
            out.copy_(self._few(x))
            return
        for columns, panel in self._each():
            torch.mm(x, panel.t(), out=out[:, columns])

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._few is not None and x.shape[0] <= self._most_few:
            out.add_(self._few(x))
            return
        for columns, panel in self._each():
            out[:, columns].addmm_(x, panel.t())

    def _each(self) -> Iterable[tuple[slice, torch.Tensor]]:
        for start in range(0, self._out, self._rows):
            end = min(self._out, start + self._rows)
            yield slice(start, end), self._panels.fill(start, end)


class WholeMatrix:
    """Dequantised into scratch memory before each product."""

    def __init__(
        self,
        packed: Packed,
        dtype: torch.dtype,
        scratch: torch.Tensor,
        plain: Callable[[torch.Tensor], Matrix],
    ) -> None:
        self._out, self._in = packed.encoding.shape
        self._panels = make_panels(packed, self._out, dtype, scratch)
        # Weights of some kind stay behind: what `plain` proves of the place must not be of zeros.
        self._plain = plain(self._panels.fill(0, self._out))

    @property
    def shape(self) -> tuple[int, int]:
        return self._in, self._out

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._panels.fill(0, self._out)
        self._plain.multiply(x, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._panels.fill(0, self._out)
        self._plain.add(x, out)


class FusedMatrix:
    """A kernel that reads the stored numbers, whatever the number of rows."""

    def __init__(self, packed: Packed, product: FusedProduct) -> None:
        self._packed, self._product = packed, product

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._packed.encoding.shape
        return columns, rows

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._multiply(x, out, adds=False)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._multiply(x, out, adds=True)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        packed = self._packed
        stored = (packed.values, packed.scales, packed.zeros)
        self._product(x, *stored, out, packed.encoding.format, adds)


def _has_kernel(encoding: Encoding, format: triton.Format) -> bool:
    return triton.takes_groups(format, encoding.shape[1], encoding.num_groups)


def _few_rows_product(
    packed: Packed, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """torch's kernel for few rows on a CPU, where it reads this encoding fast; its results are new
    tensors, of few rows."""
    encoding = packed.encoding
    if packed.values.is_cuda or dtype != torch.bfloat16:
        return None
    if encoding.is_tiled:
        values = packed.values.view(encoding.shape[0], -1)
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, values, encoding.group, packed.scales
        )
    if encoding.format == "int8" and encoding.num_groups == 1 and packed.zeros is None:
        scales = packed.scales.flatten()
        return lambda x: torch.ops.aten._weight_int8pack_mm(x, packed.values, scales)
    return None
