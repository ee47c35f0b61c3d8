"""One weight matrix of every expert: multiplied expert by expert, or for all experts at once."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from ullage_engine.layers.matrix import Matrix
from ullage_engine.memory.rungs import token_rung, unit_rows

GROUPED_ALIGNMENT = 16
"""Bytes; rows of what `grouped_mm` multiplies have whole multiples of it."""

PANEL_ELEMENTS = 1 << 24
"""Elements of a grouped product computed at once, which bounds the temporary: it has no `out`."""

PANEL_COLUMNS = 16
"""A panel has a multiple of these, and at least as many."""


class ExpertMatrices(Protocol):
    """The matrix [in, out] that every expert has of its own."""

    def one(self, expert: int) -> Matrix:
        """One expert's."""
        ...

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        """Writes x @ the matrix of each row's expert.

        Args:
            x: [pairs and more, in], sorted by expert; the rest is room for padding, and changed.
            ends: int32 [experts], the row after each expert's last.
            pairs: rows that count.
            out: [pairs and more, out]; what is left in the rest means nothing.
        """
        ...


class LoopedExperts:
    """Any matrices, one expert's rows after another's; learns on the host where they end.

    An expert's rows are rounded up to a size that products are prepared for. What that computes of
    the next expert's rows is wrong, and overwritten by it.
    """

    def __init__(
        self, matrices: Sequence[Matrix], padded: Callable[[int], int] = token_rung
    ) -> None:
        """`padded` rounds rows up, as `token_rung`, `unit_rows` or not at all."""
        self._matrices, self._padded = matrices, padded

    def one(self, expert: int) -> Matrix:
        return self._matrices[expert]

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        x[pairs:].zero_()
        start = 0
        for matrix, end in zip(self._matrices, ends.tolist(), strict=True):
            if end > start:
                rows = slice(start, start + self._padded(end - start))
                matrix.multiply(x[rows], out[rows])
            start = end


class GroupedExperts:
    """Plain numbers, all experts in one product whose extents stay on the device.

    On CUDA before compute capability 9.0 the library itself reads the extents back and loops.
    """

    def __init__(self, weights: torch.Tensor, matrices: Sequence[Matrix]) -> None:
        """`weights` is [experts, out, in]; `matrices` are its experts'."""
        self._weights, self._matrices = weights, matrices

    def one(self, expert: int) -> Matrix:
        return self._matrices[expert]

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        for columns in column_panels(self._weights.shape[1], PANEL_ELEMENTS // pairs):
            panel = self._weights[:, columns].transpose(1, 2)
            out[:pairs, columns].copy_(F.grouped_mm(x[:pairs], panel, offs=ends))


def expert_matrices(
    weights: torch.Tensor, matrix: Callable[[torch.Tensor], Matrix], deterministic: bool
) -> ExpertMatrices:
    """The fastest way for plain weights [experts, out, in]; `matrix` makes a Matrix of one."""
    matrices = [matrix(each) for each in weights]
    if deterministic:
        return LoopedExperts(matrices, unit_rows)
    if not weights.is_cuda:
        return LoopedExperts(matrices)
    if can_group(weights):
        return GroupedExperts(weights, matrices)
    return LoopedExperts(matrices, _exact_rows)


def can_group(weights: torch.Tensor) -> bool:
    """Whether CUDA multiplies these weights [experts, out, in] in one grouped product."""
    return (
        hasattr(F, "grouped_mm")
        and weights.dtype == torch.bfloat16
        and all(size * weights.itemsize % GROUPED_ALIGNMENT == 0 for size in weights.shape[1:])
    )


def _exact_rows(rows: int) -> int:
    return rows


def column_panels(columns: int, most: int) -> list[slice]:
    """Cuts columns into panels of at most `most`, in multiples that every kernel takes."""
    size = max(PANEL_COLUMNS, most // PANEL_COLUMNS * PANEL_COLUMNS)
    return [slice(start, min(start + size, columns)) for start in range(0, columns, size)]
