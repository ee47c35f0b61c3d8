"""Linear layers, plain or quantised.

The C++ library and Triton kernels read quantised weights directly. Other layers dequantise one
panel of weights (a few rows of the matrix) at a time into scratch memory and multiply by it. All
layers of a model share one scratch buffer, so no step allocates memory for dequantised weights.

w8a8 rounds activations to int8, with one scale per row. Products are summed in int32. Each sum is
then multiplied by the scales of its row and its column. Integer sums are exact, so w8a8 is
batch-invariant.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.deterministic import RowProducts
from ullage_engine.kernels.kv_pool import widen, widening_factor
from ullage_engine.native.library import FORMATS, TILE_ROWS, Matrix, Model, shared_team
from ullage_engine.quantization.formats import (
    MIN_VALUE,
    TILE_GROUPS,
    Encoding,
    Packed,
    unpack_tiles,
)

# Dequantisation.
PANEL_BYTES = 2 << 20
"""Number of bytes of weights that are dequantised at a time.

Roughly this much stays in a core's cache until the matmul reads it.
"""

# Products of int8.
PASS_ROWS = 64
"""Number of rows that w8a8 rounds and multiplies at a time. This caps the scratch memory."""
_MOST = 127
"""Largest absolute value of an activation that is rounded to int8."""
_LEAST_SCALE = 1e-12
"""Minimum scale of a row of activations, which prevents a division by zero for all-zero rows."""
_EXACT_TERMS = 1024
"""Number of int8 products that can be summed exactly in float32: 1024 * 127 * 127 < 2^24."""
_CUDA_LEAST_ROWS = 32
"""Number of rows to which int8 matmuls are padded on CUDA: cuBLAS needs at least 17 rows."""

FusedProduct = Callable[..., None]
"""A kernel like `ullage_engine.kernels.triton.quantized_matmul`, with the same arguments."""


class Linear(Protocol):
    """A linear layer with weights [in, out]. Its methods write to memory that the caller passes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (in, out) of this rank's part of the layer."""
        ...

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compute x @ weights and write the result to out.

        x is [rows, in] and out is [rows, out]. Both are contiguous and have the same dtype.
        """
        ...

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add x @ weights to out."""
        ...


class PlainLinear:
    """Unquantised linear layer."""

    def __init__(self, rows: torch.Tensor) -> None:
        """Create a layer from `rows` [out, in], the layout of weights in checkpoints."""
        self._weight = rows.t()
        self.shape = (rows.shape[1], rows.shape[0])

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, self._weight, out=out)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.addmm_(x, self._weight)


class RowInvariantLinear:
    """Unquantised linear layer with batch-invariant matmuls."""

    def __init__(self, rows: torch.Tensor, products: RowProducts) -> None:
        """Create a layer from `rows` [out, in], the layout of weights in checkpoints."""
        self._weight = rows.t()
        self._products = products
        self.shape = (rows.shape[1], rows.shape[0])

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._products.multiply(x, self._weight, out)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._products.add(x, self._weight, out)

    def verify_row_invariance(self, sizes: Iterable[int]) -> bool:
        """Check which row counts are batch-invariant. See `RowProducts.verify_row_invariance`."""
        return self._products.verify_row_invariance(self._weight, sizes)


class Dequantizer(Protocol):
    """Dequantises one matrix, one panel of rows at a time."""

    def fill(self, start: int, end: int) -> torch.Tensor:
        """Dequantise rows `start` to `end` of the matrix, and return them as [end - start, in].

        The rows are in scratch memory, which the next call overwrites.
        """
        ...


def dequant_rows(encoding: Encoding, itemsize: int) -> int:
    """Return the number of rows to dequantise at once (one panel), which is at least one."""
    rows, columns = encoding.shape
    return min(rows, max(1, PANEL_BYTES // (columns * itemsize)))


def dequant_bytes(encoding: Encoding, rows: int, itemsize: int) -> int:
    """Return the size in bytes of the scratch memory for `rows` rows of dequantised weights."""
    return rows * encoding.shape[1] * itemsize


def nibble_bytes(encoding: Encoding, rows: int) -> int:
    """Return the size in bytes of the scratch memory for `rows` rows of unpacked int4 values."""
    return rows * encoding.shape[1] // 2 if encoding.format == "int4" else 0


def make_dequantizer(
    packed: Packed, rows: int, dtype: torch.dtype, scratch: torch.Tensor
) -> Dequantizer:
    """Create a dequantiser for a matrix, for panels of at most `rows` rows.

    `scratch` (uint8) holds dequantised weights at its start and unpacked int4 values at its end.
    All matrices share this memory, and it is laid out so that the unpacked int4 values of one
    matrix never overwrite the dequantised weights of another.
    """
    encoding = packed.encoding
    end = dequant_bytes(encoding, rows, dtype.itemsize)
    panel = scratch[:end].view(dtype).view(rows, -1)
    halves = scratch[scratch.numel() - nibble_bytes(encoding, rows) :].view(torch.int8)
    if encoding.format == "int4":
        return Int4Dequantizer(packed, panel, halves)
    return (Fp8Dequantizer if encoding.format == "fp8" else Int8Dequantizer)(packed, panel)


@dataclass(frozen=True, slots=True)
class Int8Dequantizer:
    """Dequantiser for int8 weights."""

    packed: Packed
    panel: torch.Tensor

    def fill(self, start: int, end: int) -> torch.Tensor:
        panel = self.panel[: end - start].copy_(self.packed.values[start:end])
        return _scaled(panel, self.packed, start, end)


@dataclass(frozen=True, slots=True)
class Fp8Dequantizer:
    """Dequantiser for float8 E4M3 weights."""

    packed: Packed
    panel: torch.Tensor

    def fill(self, start: int, end: int) -> torch.Tensor:
        panel = self.panel[: end - start]
        widen(self.packed.values[start:end], widening_factor(panel.dtype), panel)
        return _scaled(panel, self.packed, start, end)


@dataclass(frozen=True, slots=True)
class Int4Dequantizer:
    """Dequantiser for int4 weights that are stored row by row."""

    packed: Packed
    panel: torch.Tensor
    halves: torch.Tensor

    def fill(self, start: int, end: int) -> torch.Tensor:
        values = self.packed.values[start:end].view(torch.int8)
        halves = self.halves[: values.numel()].view(values.shape)
        panel = self.panel[: end - start]
        _split(values, halves, panel[:, 0::2], panel[:, 1::2])
        return _scaled(panel, self.packed, start, end)


def _split(
    values: torch.Tensor, halves: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> None:
    """Unpack each byte into two int4 values (-8 to 7), written to `low` and `high`."""
    torch.bitwise_and(values, 15, out=halves)
    low.copy_(halves.add_(MIN_VALUE["int4"]))
    torch.bitwise_right_shift(values, 4, out=halves)
    # The shift of a signed byte copies its sign into the upper half.
    high.copy_(halves.bitwise_and_(15).add_(MIN_VALUE["int4"]))


def _scaled(panel: torch.Tensor, packed: Packed, start: int, end: int) -> torch.Tensor:
    """Multiply a panel's values by their scales and add their zeros, in place."""
    grouped = panel.view(end - start, packed.encoding.num_groups, -1)
    grouped.mul_(packed.scales[start:end].unsqueeze(2))
    if packed.zeros is not None:
        grouped.add_(packed.zeros[start:end].unsqueeze(2))
    return panel


def int_scratch_bytes(shape: tuple[int, int]) -> int:
    """Return how many bytes of scratch memory an `Int8Linear` with weights [out, in] needs."""
    rows, columns = shape
    return PASS_ROWS * (columns + 4 * columns + 2 * 4 * rows + 4)


class Int8Linear:
    """Linear layer for w8a8: int8 weights and activations, each with one scale per row."""

    def __init__(self, packed: Packed, scratch: torch.Tensor) -> None:
        """Create a layer with the weights `packed`.

        `scratch` is a uint8 buffer with at least `int_scratch_bytes` bytes.
        """
        num_rows, num_columns = packed.encoding.shape
        self.shape = (num_columns, num_rows)
        self._weight = packed.values.t()
        self._scales = packed.scales.view(1, -1)

        sizes = [PASS_ROWS * size * 4 for size in (num_columns, num_rows, num_rows, 1)]
        pieces = torch.split(scratch, [*sizes, scratch.numel() - sum(sizes)])
        floats, sums, products, scales, rest = pieces
        self._floats = floats.view(torch.float32).view(PASS_ROWS, -1)
        self._sums = sums.view(torch.int32).view(PASS_ROWS, -1)
        self._products = products.view(torch.float32).view(PASS_ROWS, -1)
        self._row_scales = scales.view(torch.float32).view(PASS_ROWS, 1)
        self._rounded = rest[: PASS_ROWS * num_columns].view(torch.int8).view(PASS_ROWS, -1)

        self._least_rows = _CUDA_LEAST_ROWS if scratch.is_cuda else 1

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, x.shape[0], PASS_ROWS):
            rows = slice(start, min(start + PASS_ROWS, x.shape[0]))
            out[rows].copy_(self._product(x[rows]))

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, x.shape[0], PASS_ROWS):
            rows = slice(start, min(start + PASS_ROWS, x.shape[0]))
            out[rows].add_(self._product(x[rows]))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x by this layer's weights, and return the float32 product in scratch memory."""
        count = x.shape[0]
        self._round(x)
        padded = max(count, self._least_rows)
        self._rounded[count:padded].zero_()
        int_product(self._rounded[:padded], self._weight, self._sums[:padded])
        products = self._products[:count].copy_(self._sums[:count])
        products.mul_(self._row_scales[:count]).mul_(self._scales)
        return products

    def _round(self, x: torch.Tensor) -> None:
        """Round rows to int8: |x - rounded * scale| <= scale / 2, where scale = max|row| / 127."""
        count = x.shape[0]
        floats = self._floats[:count].copy_(x)
        scales = self._row_scales[:count]
        torch.linalg.vector_norm(floats, torch.inf, dim=1, keepdim=True, out=scales)
        scales.div_(_MOST).clamp_(min=_LEAST_SCALE)
        self._rounded[:count].copy_(floats.div_(scales).round_().clamp_(-_MOST, _MOST))


def native_scratch_bytes(shape: tuple[int, int]) -> int:
    """Return how many bytes of scratch memory a `NativeLinear` with weights [out, in] needs."""
    rows, columns = shape
    return PASS_ROWS * (4 * columns + 4 * rows + 2 * 4 * columns // TILE_GROUPS[0] + columns)


def native_matrix(packed: Packed) -> Matrix:
    """Return the C++ library's descriptor of a tiled matrix: address, shape, format, group size."""
    encoding = packed.encoding
    sizes = (*encoding.shape, FORMATS[encoding.format], encoding.group)
    return Matrix(packed.values.data_ptr(), *sizes)


class NativeLinear:
    """Batch-invariant linear layer with tiled weights, computed by the C++ library."""

    def __init__(self, packed: Packed, scratch: torch.Tensor) -> None:
        """Create a layer with the weights `packed`.

        `scratch` is a uint8 buffer with at least `native_scratch_bytes` bytes.
        """
        rows, columns = packed.encoding.shape
        self.shape = (columns, rows)
        # The description has a pointer into the tiles, so both live as long as the layer.
        self._tiles = packed.values
        self._matrix = native_matrix(packed)
        self._team = shared_team(torch.get_num_threads())

        factors = 4 * columns // TILE_GROUPS[0]
        sizes = [PASS_ROWS * size for size in (4 * columns, 4 * rows, factors, factors, columns)]
        pieces = torch.split(scratch, [*sizes, scratch.numel() - sum(sizes)])
        inputs, outputs, scales, sums, rounded, _ = pieces
        self._inputs = inputs.view(torch.float32).view(PASS_ROWS, columns)
        self._outputs = outputs.view(torch.float32).view(PASS_ROWS, rows)
        self._buffers = Model(
            rounded=rounded.data_ptr(), row_scales=scales.data_ptr(), row_sums=sums.data_ptr()
        )

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for rows, product in self._products(x):
            out[rows].copy_(product)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for rows, product in self._products(x):
            out[rows].add_(product)

    def _products(self, x: torch.Tensor) -> Iterable[tuple[slice, torch.Tensor]]:
        for start in range(0, x.shape[0], PASS_ROWS):
            rows = slice(start, min(start + PASS_ROWS, x.shape[0]))
            count = rows.stop - start
            inputs = self._inputs[:count].copy_(x[rows])
            product = self._outputs[:count]
            self._team.multiply(self._matrix, inputs, product, self._buffers)
            yield rows, product


def int_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute x @ weight exactly into `out` (int32), for int8 x [rows, in] and weight [in, out]."""
    multiple_of_8 = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0
    if hasattr(torch, "_int_mm") and (multiple_of_8 or not x.is_cuda):
        torch._int_mm(x, weight, out=out)
    else:
        emulated_int_product(x, weight, out)


def emulated_int_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `int_product` with float32 matmuls, for devices without int8 matmuls.

    Each float32 sum has so few terms that it is exact.
    """
    out.zero_()
    for start in range(0, x.shape[1], _EXACT_TERMS):
        terms = slice(start, start + _EXACT_TERMS)
        out.add_(torch.mm(x[:, terms].float(), weight[terms].float()).to(torch.int32))


def scratch_bytes(
    encodings: Iterable[Encoding], itemsize: int, *, deterministic: bool = False
) -> int:
    """Return the size in bytes of the scratch memory that layers with these encodings share.

    Args:
        encodings: encodings of all quantised matrices.
        itemsize: bytes per dequantised weight.
        deterministic: whether matrices are dequantised in full (see `row_invariant_linear`).
    """
    panels = 0
    halves = 0
    whole = 0
    for each in encodings:
        if each.is_tiled or each.format == "w8a8":
            size = native_scratch_bytes if each.is_tiled else int_scratch_bytes
            whole = max(whole, size(each.shape))
            continue

        rows = each.shape[0] if deterministic else dequant_rows(each, itemsize)
        panels = max(panels, dequant_bytes(each, rows, itemsize))
        halves = max(halves, nibble_bytes(each, rows))

    return max(whole, panels + halves)


def quantized_linear(
    packed: Packed, dtype: torch.dtype, scratch: torch.Tensor, fused: FusedProduct | None = None
) -> Linear:
    """Create the fastest linear layer for a quantised matrix.

    Args:
        packed: quantised weights.
        dtype: type of activations.
        scratch: uint8 buffer of `scratch_bytes` bytes, shared by all layers.
        fused: the Triton kernel, or None on devices without Triton.
    """
    encoding = packed.encoding
    if encoding.is_tiled:
        return NativeLinear(packed, scratch)
    if encoding.format == "w8a8":
        return Int8Linear(packed, scratch)
    if fused is not None and has_kernel(encoding, encoding.format):
        return FusedQuantizedLinear(packed, fused)
    return PanelLinear(packed, dtype, scratch)


def row_invariant_linear(
    packed: Packed,
    dtype: torch.dtype,
    scratch: torch.Tensor,
    plain: Callable[[torch.Tensor], Linear],
) -> Linear:
    """Create a batch-invariant linear layer for a quantised matrix.

    Layers with tiled or w8a8 weights are already batch-invariant, because integer sums are exact.
    Any other matrix is dequantised in full before each product. `plain` creates the layer that
    multiplies by the dequantised weights [out, in].
    """
    if packed.encoding.is_tiled:
        return NativeLinear(packed, scratch)
    if packed.encoding.format == "w8a8":
        return Int8Linear(packed, scratch)
    return DequantizedLinear(packed, dtype, scratch, plain)


class PanelLinear:
    """Linear layer whose weights are dequantised and multiplied panel by panel."""

    def __init__(self, packed: Packed, dtype: torch.dtype, scratch: torch.Tensor) -> None:
        self._rows = dequant_rows(packed.encoding, dtype.itemsize)
        self.shape = (packed.encoding.shape[1], packed.encoding.shape[0])
        self._panels = make_dequantizer(packed, self._rows, dtype, scratch)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for columns, panel in self._each():
            torch.mm(x, panel.t(), out=out[:, columns])

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for columns, panel in self._each():
            out[:, columns].addmm_(x, panel.t())

    def _each(self) -> Iterable[tuple[slice, torch.Tensor]]:
        columns = self.shape[1]
        for start in range(0, columns, self._rows):
            end = min(columns, start + self._rows)
            yield slice(start, end), self._panels.fill(start, end)


class DequantizedLinear:
    """Linear layer that dequantises all its weights before each product."""

    def __init__(
        self,
        packed: Packed,
        dtype: torch.dtype,
        scratch: torch.Tensor,
        plain: Callable[[torch.Tensor], Linear],
    ) -> None:
        rows, columns = packed.encoding.shape
        self.shape = (columns, rows)
        self._dequantizer = make_dequantizer(packed, rows, dtype, scratch)
        # The scratch is filled first: `plain` may be checked before the first product, and a check
        # on zeros would prove nothing.
        self._plain = plain(self._dequantizer.fill(0, rows))

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._dequantizer.fill(0, self.shape[1])
        self._plain.forward(x, out)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._dequantizer.fill(0, self.shape[1])
        self._plain.forward_add(x, out)


class FusedQuantizedLinear:
    """Linear layer whose kernel reads quantised weights directly, for any number of rows."""

    def __init__(self, packed: Packed, product: FusedProduct) -> None:
        self._packed = packed
        self._product = product
        self.encoding = packed.encoding
        self.shape = (packed.encoding.shape[1], packed.encoding.shape[0])

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._multiply(x, out, adds=False)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._multiply(x, out, adds=True)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        packed = self._packed
        stored = (packed.values, packed.scales, packed.zeros)
        self._product(x, *stored, out, packed.encoding.format, adds)


def has_kernel(encoding: Encoding, format: triton.Format) -> bool:
    """Return whether a Triton kernel supports this encoding's group size (weights per scale)."""
    return triton.takes_groups(format, encoding.shape[1], encoding.num_groups)


class TiledEmbedding:
    """An embedding that is stored in tiles and looked up by token."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def read(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the embedding rows of these tokens to out [tokens, hidden]."""
        for start in range(0, len(token_ids), TILE_ROWS):
            some = token_ids[start : start + TILE_ROWS]
            rows = out[start : start + TILE_ROWS]
            tiles = unpack_tiles(self._packed.values[some // TILE_ROWS], self._packed.encoding)
            lanes = torch.arange(len(some)) * TILE_ROWS + some % TILE_ROWS
            rows.copy_(tiles.dequantise()[lanes])
