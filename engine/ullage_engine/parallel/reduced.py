"""Row-parallel matrices: every tensor rank multiplies its share of the inputs, then all add up."""

from typing import Protocol

import torch

from ullage_engine.kernels.buffers import shaped
from ullage_engine.layers.matrix import Matrix


class Reducer(Protocol):
    """Sums over the ranks that share a layer."""

    def all_reduce(self, tensor: torch.Tensor) -> None: ...


class ReducedMatrix:
    """A matrix whose inputs are shared out over ranks; each gets the whole product."""

    def __init__(self, part: Matrix, reducer: Reducer, buffer: torch.Tensor) -> None:
        """`part` is [this rank's inputs, out]; `buffer` is flat and holds the largest product.
        Matrices of one rank share it, for they are multiplied one after the other."""
        self._part = part
        self._reducer = reducer
        self._buffer = buffer

    @property
    def shape(self) -> tuple[int, int]:
        return self._part.shape

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._part.multiply(x, out)
        self._reducer.all_reduce(out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        product = shaped(self._buffer, *out.shape)
        self.multiply(x, product)
        out.add_(product)
