"""What a quantised matrix is: small numbers, and the scales that turn them into weights.

weight[row, column] = value[row, column] * scale[row, column // group] + zero[row, column // group]
"""

from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

Format = Literal["int8", "int4", "fp8", "w8a8"]
"""int8 and int4: integers, activations stay as they are. fp8: E4M3. w8a8: int8, and activations
are rounded to int8 as well, row by row."""

GROUPS = (128, 64, 32)
"""Columns that share a scale in int4: the first of these that divides the number of columns."""

TILE_ROWS = 64
"""Rows whose int4 values lie together in the layout that torch's CPU kernel reads."""

LEAST: dict[Format, int] = {"int8": -128, "int4": -8, "w8a8": -127}
MOST: dict[Format, int] = {"int8": 127, "int4": 7, "w8a8": 127}

E4M3_MOST = 448.0


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

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in small numbers, each in an element of its own."""

    format: Format
    values: torch.Tensor
    """[out, in], int8 or float8_e4m3fn; of int4 from -8 to 7."""
    scales: torch.Tensor
    """[out, groups]."""
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
        grouped = self.values.to(torch.float32).view(rows, self.scales.shape[1], -1)
        weights = grouped * self.scales.unsqueeze(2).to(torch.float32)
        if self.zeros is not None:
            weights += self.zeros.unsqueeze(2).to(torch.float32)
        return weights.view(rows, columns)


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
