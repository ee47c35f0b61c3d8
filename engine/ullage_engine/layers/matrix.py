"""Weight matrices in whatever format, and on however many ranks: what models multiply by."""

from collections.abc import Iterable
from typing import Protocol

import torch

from ullage_engine.kernels.products import RowProducts


class Matrix(Protocol):
    """A weight matrix [in, out]; both operations write into memory they are given."""

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out), as this rank computes it."""
        ...

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes x @ self: x [rows, in], out [rows, out], both contiguous and of one type."""
        ...

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Adds x @ self to out."""
        ...


class PlainMatrix:
    """Numbers of the computing type."""

    def __init__(self, rows: torch.Tensor) -> None:
        """`rows` is [out, in], as checkpoints store it."""
        self._weight = rows.t()

    @property
    def shape(self) -> tuple[int, int]:
        return self._weight.shape[0], self._weight.shape[1]

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, self._weight, out=out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.addmm_(x, self._weight)


class RowMatrix:
    """Numbers of the computing type, by products whose rows do not depend on one another."""

    def __init__(self, rows: torch.Tensor, products: RowProducts) -> None:
        """`rows` is [out, in], as checkpoints store it."""
        self._weight = rows.t()
        self._products = products

    @property
    def shape(self) -> tuple[int, int]:
        return self._weight.shape[0], self._weight.shape[1]

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._products.multiply(x, self._weight, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._products.add(x, self._weight, out)

    def prove(self, sizes: Iterable[int]) -> bool:
        """See `RowProducts.prove`."""
        return self._products.prove(self._weight, sizes)
