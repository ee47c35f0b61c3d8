"""One weight matrix of every expert: multiplied expert by expert, or for all experts at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from ullage_engine.kernels import triton
from ullage_engine.layers.matrix import Matrix
from ullage_engine.memory.rungs import token_rung, unit_rows

if TYPE_CHECKING:
    from ullage_engine.kernels.triton.experts import PackedExperts

GROUPED_ALIGNMENT = 16
"""Bytes; rows of what `grouped_mm` multiplies have whole multiples of it."""

PANEL_ELEMENTS = 1 << 24
"""Elements of a grouped product computed at once, which bounds the temporary: it has no `out`."""

FEW_PAIRS = 4
"""Pairs up to which each is multiplied by itself on a CPU: those of one token, because with two
tokens an expert that both chose is read twice (benchmarks/experts.py)."""

DEVICE_FEW_PAIRS = 16
"""The same by a kernel that picks experts on the device, which saves sorting; not yet measured."""

PANEL_COLUMNS = 16
"""A panel has a multiple of these, and at least as many."""


class SortedExperts(Protocol):
    """The matrix [in, out] that every expert has of its own, for rows sorted by expert."""

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


class PickingExperts(Protocol):
    """The same for few rows in any order."""

    def multiply_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """Writes out [pairs, out], each row by its expert in chosen [pairs].

        x [pairs, in], or a row for every so many pairs in a row, those of one token.
        """
        ...


class ExpertMatrices(SortedExperts, PickingExperts, Protocol):
    """Both."""

    @property
    def few_pairs(self) -> int:
        """Pairs up to which `multiply_each` is faster than sorting and `multiply`."""
        ...


class LoopedExperts:
    """Any matrices, one expert's rows after another's; learns on the host where they end.

    On a CPU an expert's rows are rounded up to a size that products are prepared for. What that
    computes of the next expert's rows is wrong, and overwritten by it.
    """

    def __init__(self, matrices: Sequence[Matrix], deterministic: bool = False) -> None:
        """Deterministic: matrices multiply whole units of rows (`ullage_engine.memory.rungs`)."""
        self._matrices, self._deterministic = matrices, deterministic

    @property
    def few_pairs(self) -> int:
        return 0 if self._deterministic else FEW_PAIRS

    def one(self, expert: int) -> Matrix:
        return self._matrices[expert]

    def multiply_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        share = out.shape[0] // x.shape[0]
        for pair, expert in enumerate(chosen.tolist()):
            row = pair // share
            self._matrices[expert].multiply(x[row : row + 1], out[pair : pair + 1])

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        x[pairs:].zero_()
        start = 0
        for matrix, end in zip(self._matrices, ends.tolist(), strict=True):
            if end > start:
                rows = slice(start, start + self._padded(end - start, x.device))
                matrix.multiply(x[rows], out[rows])
            start = end

    def _padded(self, rows: int, device: torch.device) -> int:
        if self._deterministic:
            return unit_rows(rows)
        return token_rung(rows) if device.type == "cpu" else rows


class GroupedExperts(LoopedExperts):
    """Plain numbers, all experts in one product whose extents stay on the device.

    On CUDA before compute capability 9.0 the library itself reads the extents back and loops.
    """

    def __init__(self, weights: torch.Tensor, matrices: Sequence[Matrix]) -> None:
        """`weights` is [experts, out, in]; `matrices` are its experts'."""
        super().__init__(matrices)
        self._weights = weights

    @property
    def few_pairs(self) -> int:
        return 0

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        for columns in column_panels(self._weights.shape[1], PANEL_ELEMENTS // pairs):
            panel = self._weights[:, columns].transpose(1, 2)
            out[:pairs, columns].copy_(F.grouped_mm(x[:pairs], panel, offs=ends))


@dataclass(frozen=True, slots=True)
class PickedExperts:
    """Few pairs by a kernel that picks their experts on the device, many another way."""

    few: PickingExperts
    many: SortedExperts

    @property
    def few_pairs(self) -> int:
        return DEVICE_FEW_PAIRS

    def one(self, expert: int) -> Matrix:
        return self.many.one(expert)

    def multiply_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        self.few.multiply_each(x, chosen, out)

    def multiply(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        self.many.multiply(x, ends, pairs, out)


def expert_matrices(
    weights: torch.Tensor, matrix: Callable[[torch.Tensor], Matrix], deterministic: bool
) -> ExpertMatrices:
    """The fastest way for plain weights [experts, out, in]; `matrix` makes a Matrix of one."""
    matrices = [matrix(each) for each in weights]
    if deterministic or not weights.is_cuda:
        return LoopedExperts(matrices, deterministic)
    many = GroupedExperts(weights, matrices) if can_group(weights) else LoopedExperts(matrices)
    if not triton.runs_on(weights.device):
        return many
    return PickedExperts(packed_experts(weights, None, "plain"), many)


def packed_experts(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    format: triton.Format,
    zeros: torch.Tensor | None = None,
) -> "PackedExperts":
    """All experts' weights in a format of the kernels: [experts, out, ...]."""
    # Imported when needed: only where there is Triton.
    from ullage_engine.kernels.triton.experts import PackedExperts

    inside = packed.shape[2] * (2 if format in ("int4", "mxfp4") else 1)
    return PackedExperts(packed, scales, zeros, (inside, packed.shape[1]), format)


def can_group(weights: torch.Tensor) -> bool:
    """Whether CUDA multiplies these weights [experts, out, in] in one grouped product."""
    return (
        hasattr(F, "grouped_mm")
        and weights.dtype == torch.bfloat16
        and all(size * weights.itemsize % GROUPED_ALIGNMENT == 0 for size in weights.shape[1:])
    )


def column_panels(columns: int, most: int) -> list[slice]:
    """Cuts columns into panels of at most `most`, in multiples that every kernel takes."""
    size = max(PANEL_COLUMNS, most // PANEL_COLUMNS * PANEL_COLUMNS)
    return [slice(start, min(start + size, columns)) for start in range(0, columns, size)]
