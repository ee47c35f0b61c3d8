"""Matrix products whose rows do not depend on one another.

A row of a product is the same sums whatever stands in the other rows, but libraries choose the
order of each sum by the shape of the whole product, and rounding follows the order. A product of
`UNIT_ROWS` rows is the reference here. Larger ones are used where they were proven to give the same
bits on this machine, with these shapes and threads; else the product is computed in parts.
"""

from collections.abc import Iterable, Sequence

import torch

from ullage_engine.memory.rungs import UNIT_ROWS

_SEED = 20
_Shape = tuple[int, ...]


class RowProducts:
    """Products of x [units of rows, in] and weights [in, out], alone and in batches."""

    def __init__(self) -> None:
        self._sizes: dict[_Shape, list[int]] = {}
        self._batches: set[tuple[_Shape, _Shape]] = set()

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Writes x @ weight."""
        for rows in self._parts(x.shape[0], weight.shape):
            torch.mm(x[rows], weight, out=out[rows])

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Adds x @ weight to out."""
        for rows in self._parts(x.shape[0], weight.shape):
            out[rows].addmm_(x[rows], weight)

    def multiply_each(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Writes x [batch, rows, in] @ y [batch, in, out]."""
        if (x.shape, y.shape) in self._batches:
            torch.bmm(x, y, out=out)
        else:
            _multiply_each_unit(x, y, out)

    def prove(self, weight: torch.Tensor, sizes: Iterable[int]) -> bool:
        """Finds the sizes in which rows of x @ weight equal those of a unit.

        False: not even a unit's rows do, because their place in it matters.
        """
        ordered = sorted({UNIT_ROWS, *sizes}, reverse=True)
        x = fill_random(weight.new_empty(ordered[0], weight.shape[0]))
        start = fill_random(weight.new_empty(1, weight.shape[1]))
        self._sizes[weight.shape] = [UNIT_ROWS]
        reference = _both(self, x, weight, start)
        unit = reference[:, :UNIT_ROWS]
        if not torch.equal(_both(self, x[:UNIT_ROWS].roll(1, 0), weight, start), unit.roll(1, 1)):
            return False
        self._sizes[weight.shape] = [
            size
            for size in ordered
            if size == UNIT_ROWS or _is_equal_in(size, x, weight, start, reference)
        ]
        return True

    def prove_each(self, x: _Shape, y: torch.Tensor) -> bool:
        """Whether a batch of products of shapes x and y is computed as one, from now on."""
        left = fill_random(y.new_empty(x))
        whole = left.new_empty((x[0], x[1], y.shape[2]))
        parts = torch.empty_like(whole)
        _multiply_each_unit(left, y, parts)
        if torch.equal(torch.bmm(left, y, out=whole), parts):
            self._batches.add((torch.Size(x), y.shape))
        return (torch.Size(x), y.shape) in self._batches

    def _parts(self, rows: int, weight: _Shape) -> Iterable[slice]:
        sizes = self._sizes.get(weight, [UNIT_ROWS])
        return [slice(0, rows)] if rows in sizes else _cut(rows, sizes)


def _cut(rows: int, sizes: Sequence[int]) -> Iterable[slice]:
    """Cuts rows into parts of these sizes, the largest first; the last size is a unit."""
    start = 0
    for size in sizes:
        while rows - start >= size:
            yield slice(start, start + size)
            start += size


def fill_random(x: torch.Tensor) -> torch.Tensor:
    """Fills a tensor in place, always alike."""
    generator = torch.Generator(x.device).manual_seed(_SEED)
    return x.normal_(generator=generator)


def _both(
    products: RowProducts, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The product, and the product added to `start`; [2, rows, out]."""
    out = start.repeat(2, x.shape[0], 1)
    products.multiply(x, weight, out[0])
    products.add(x, weight, out[1])
    return out


def _is_equal_in(
    size: int, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor, reference: torch.Tensor
) -> bool:
    out = start.repeat(size, 1)
    multiplied = torch.mm(x[:size], weight)
    return torch.equal(multiplied, reference[0, :size]) and torch.equal(
        out.addmm_(x[:size], weight), reference[1, :size]
    )


def _multiply_each_unit(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    for index in range(x.shape[0]):
        item = slice(index, index + 1)
        for start in range(0, x.shape[1], UNIT_ROWS):
            rows = slice(start, start + UNIT_ROWS)
            torch.bmm(x[item, rows], y[item], out=out[item, rows])
