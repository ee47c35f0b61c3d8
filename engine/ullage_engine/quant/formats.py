"""What a quantised matrix is: small numbers, and the scales that turn them into weights.

weight[row, column] = value[row, column] * scale[row, column // group] + zero[row, column // group]

MXFP4's values and scales are codes: one of 16 numbers, and a power of two.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

Format = Literal["int8", "int4", "fp8", "w8a8", "mxfp4"]
"""int8 and int4: integers, activations stay as they are. fp8: E4M3. w8a8: int8, and activations
are rounded to int8 as well, row by row. mxfp4: experts of checkpoints that have it; nothing is
rounded to it."""

GROUPS = (128, 64, 32)
"""Columns that share a scale in int4: the first of these that divides the number of columns."""

TILE_ROWS = 64
"""Rows whose int4 values lie together in the layout that torch's CPU kernel reads."""

LEAST: dict[Format, int] = {"int8": -128, "int4": -8, "w8a8": -127}
MOST: dict[Format, int] = {"int8": 127, "int4": 7, "w8a8": 127}

E4M3_MOST = 448.0

MXFP4_GROUP = 32

MXFP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of codes 0 to 7; those of 8 to 15 are negative."""


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix is stored."""

    format: Format
    shape: tuple[int, int]
    """(out, in)."""
    group: int
    """Columns that share a scale; all of them: one scale for each row."""
    has_zeros: bool = False
    is_tiled: bool = False
    """int4 in the layout of torch's CPU kernel instead of row by row."""
    count: int = 1
    """Of tiled matrices one above the other, so many have their scales to themselves."""

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in small numbers, each in an element of its own."""

    format: Format
    values: torch.Tensor
    """[out, in], int8 or float8_e4m3fn; of int4 from -8 to 7, of mxfp4 uint8 from 0 to 15."""
    scales: torch.Tensor
    """[out, groups]; of mxfp4 uint8, each 127 more than the power of two."""
    zeros: torch.Tensor | None = None
    """[out, groups], added."""

    @property
    def encoding(self) -> Encoding:
        rows, columns = self.values.shape
        return Encoding(
            format=self.format,
            shape=(rows, columns),
            group=columns // self.scales.shape[1],
            has_zeros=self.zeros is not None,
        )

    def dequantise(self) -> torch.Tensor:
        """The weights, float32 [out, in]."""
        rows, columns = self.values.shape
        values, scales = self.values, self.scales
        if self.format == "mxfp4":
            values, scales = mxfp4_numbers()[values.int()], mxfp4_powers()[scales.int()]
        grouped = values.to(torch.float32).view(rows, scales.shape[1], -1)
        weights = grouped * scales.unsqueeze(2).to(torch.float32)
        if self.zeros is not None:
            weights += self.zeros.unsqueeze(2).to(torch.float32)
        return weights.view(rows, columns)


def mxfp4_numbers() -> torch.Tensor:
    """The number of each code, float32 [16]."""
    magnitudes = torch.tensor(MXFP4_MAGNITUDES)
    return torch.cat([magnitudes, -magnitudes])


def mxfp4_powers() -> torch.Tensor:
    """What each scale multiplies by, float32 [256]: 2^(byte - 127), and 255 is not a number."""
    powers = (torch.arange(256, dtype=torch.float64) - 127).exp2()
    powers[255] = float("nan")
    return powers.to(torch.float32)


def stacked(parts: list[Quantized]) -> Quantized:
    """Matrices of one encoding but for their rows, one above the other."""
    first = parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Quantized(
        first.format,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def int4_group(columns: int) -> int | None:
    """Columns of an int4 group; None if no group divides them."""
    return next((group for group in GROUPS if columns % group == 0), None)


def chosen_encoding(format: Format, shape: tuple[int, int]) -> Encoding:
    """How weights of this shape are quantised: int8 stands in where int4 has no group."""
    columns = shape[1]
    if format != "int4":
        return Encoding(format=format, shape=shape, group=columns)
    group = int4_group(columns)
    if group is None:
        return Encoding(format="int8", shape=shape, group=columns)
    return Encoding(format="int4", shape=shape, group=group, has_zeros=True)
