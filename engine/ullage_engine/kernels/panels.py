"""Quantised matrices turned back into the computing type, some rows at a time, in memory that is
given: no step allocates for it."""

from typing import Protocol

import torch

from ullage_engine.quant.formats import LEAST, TILE_ROWS, Encoding
from ullage_engine.quant.packing import Packed

PANEL_BYTES = 2 << 20
"""Of dequantised weights at a time: about what a core's cache keeps until it is multiplied."""

_E4M3_SHIFTS = {torch.bfloat16: 4, torch.float16: 7, torch.float32: 20}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class Panels(Protocol):
    """Dequantises rows of one matrix."""

    def fill(self, start: int, end: int) -> torch.Tensor:
        """Rows start to end as [end - start, in], in scratch memory that the next call reuses."""
        ...


def panel_rows(encoding: Encoding, itemsize: int) -> int:
    """Rows of a panel: whole tiles, and at least one."""
    rows, columns = encoding.shape
    fitting = PANEL_BYTES // (columns * itemsize) // TILE_ROWS * TILE_ROWS
    return min(rows, max(TILE_ROWS, fitting))


def panel_bytes(encoding: Encoding, rows: int, itemsize: int) -> int:
    """Scratch memory for the weights of panels of so many rows."""
    return rows * encoding.shape[1] * itemsize


def halves_bytes(encoding: Encoding, rows: int) -> int:
    """Scratch memory for halves of bytes while such panels are filled."""
    return rows * encoding.shape[1] // 2 if encoding.format == "int4" else 0


def make_panels(packed: Packed, rows: int, dtype: torch.dtype, scratch: torch.Tensor) -> Panels:
    """Panels of at most `rows` rows in `scratch`, uint8: weights at its start, halves at its end,
    so that one matrix's halves are never another's weights."""
    encoding = packed.encoding
    end = panel_bytes(encoding, rows, dtype.itemsize)
    panel = scratch[:end].view(dtype).view(rows, -1)
    halves = scratch[scratch.numel() - halves_bytes(encoding, rows) :].view(torch.int8)
    if encoding.is_tiled:
        return TilePanels(packed, panel, halves)
    if encoding.format == "int4":
        return NibblePanels(packed, panel, halves)
    return (E4m3Panels if encoding.format == "fp8" else BytePanels)(packed, panel)


class BytePanels:
    """int8."""

    def __init__(self, packed: Packed, panel: torch.Tensor) -> None:
        self._packed, self._panel = packed, panel

    def fill(self, start: int, end: int) -> torch.Tensor:
        panel = self._panel[: end - start].copy_(self._packed.values[start:end])
        return _scaled(panel, self._packed, start, end)


class NibblePanels:
    """int4, row by row."""

    def __init__(self, packed: Packed, panel: torch.Tensor, halves: torch.Tensor) -> None:
        self._packed, self._panel, self._halves = packed, panel, halves

    def fill(self, start: int, end: int) -> torch.Tensor:
        values = self._packed.values[start:end].view(torch.int8)
        halves = self._halves[: values.numel()].view(values.shape)
        panel = self._panel[: end - start]
        _split(values, halves, panel[:, 0::2], panel[:, 1::2])
        return _scaled(panel, self._packed, start, end)


class TilePanels:
    """int4, tiled; start and end are multiples of a tile. The panel is the transpose of what it is
    for others: it is written along the rows of the weights, as the tiles are."""

    def __init__(self, packed: Packed, panel: torch.Tensor, halves: torch.Tensor) -> None:
        self._packed, self._panel, self._halves = packed, panel.view(-1), halves

    def fill(self, start: int, end: int) -> torch.Tensor:
        encoding, half = self._packed.encoding, TILE_ROWS // 2
        columns, rows = encoding.shape[1], end - start
        values = self._packed.values[start // TILE_ROWS : end // TILE_ROWS].view(torch.int8)
        halves = self._halves[: values.numel()].view(values.shape)
        panel = self._panel[: rows * columns].view(columns, rows)
        tiles = panel.view(columns, -1, TILE_ROWS).transpose(0, 1)
        _split(values, halves, tiles[..., :half], tiles[..., half:])
        pairs = self._packed.scales[:, start:end].unsqueeze(1)
        grouped = panel.view(encoding.num_groups, encoding.group, rows)
        grouped.mul_(pairs[..., 0]).add_(pairs[..., 1])
        return panel.t()


class E4m3Panels:
    """fp8 by integer operations: torch converts it one number at a time on a CPU.

    Shifted so that its mantissa meets that of the computing type, the bits are the value times a
    power of two, subnormals included, which the scale takes back.
    """

    def __init__(self, packed: Packed, panel: torch.Tensor) -> None:
        self._packed, self._panel = packed, panel
        bits = _BITS[panel.dtype]
        self._bits = panel.view(bits)
        self._shift = _E4M3_SHIFTS[panel.dtype]
        sign = torch.iinfo(bits).min
        self._mask = sign | 0x7F << self._shift
        self._unit = 2.0**8 if panel.dtype == torch.float16 else 2.0**120

    def fill(self, start: int, end: int) -> torch.Tensor:
        bits = self._bits[: end - start].copy_(self._packed.values[start:end].view(torch.int8))
        bits.bitwise_left_shift_(self._shift).bitwise_and_(self._mask)
        panel = self._panel[: end - start].mul_(self._unit)
        return _scaled(panel, self._packed, start, end)


def _split(
    values: torch.Tensor, halves: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> None:
    """Writes the values of both halves of every byte, -8 to 7."""
    torch.bitwise_and(values, 15, out=halves)
    low.copy_(halves.add_(LEAST["int4"]))
    torch.bitwise_right_shift(values, 4, out=halves)
    # The shift of a signed byte copies its sign into the upper half.
    high.copy_(halves.bitwise_and_(15).add_(LEAST["int4"]))


def _scaled(panel: torch.Tensor, packed: Packed, start: int, end: int) -> torch.Tensor:
    grouped = panel.view(end - start, packed.encoding.num_groups, -1)
    grouped.mul_(packed.scales[start:end].unsqueeze(2))
    if packed.zeros is not None:
        grouped.add_(packed.zeros[start:end].unsqueeze(2))
    return panel
