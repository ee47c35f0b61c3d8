"""Keeps the block tables of sequences from step to step, as rows of one int32 array."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ullage_engine.protocol.step_plan import Chunk

Ints = npt.NDArray[np.int32]

_FIRST_COLUMNS = 64


@dataclass(slots=True)
class _Row:
    """The row that holds the block table of one sequence."""

    index: int
    block_ids: list[int]
    length: int = 0
    """Number of block ids in the row."""


class BlockTables:
    """Keeps a row of block ids for each sequence, so that each step writes only the new ids.

    A row is reused if the sequence's next chunk passes the same list object of block ids. Such a
    list only grows, and its entries never change (`Chunk.block_ids`). Any other list causes the
    whole row to be rewritten.
    """

    def __init__(self, num_kept: int) -> None:
        """Allocate rows for `num_kept` sequences. More rows are allocated if a step is larger."""
        self._table = np.zeros((num_kept, _FIRST_COLUMNS), np.int32)
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        """The row of each request, least recently used first."""

    @property
    def table(self) -> Ints:
        """Block ids, int32 [rows, columns], contiguous. `update` may replace the array."""
        return self._table

    def update(self, chunks: Sequence[Chunk]) -> list[int]:
        """Write the chunks' new block ids and return the row of each chunk in `table`.

        The rows are valid until the next call.
        """
        self._make_room(rows=len(chunks))
        return [self._update(chunk).index for chunk in chunks]

    def _update(self, chunk: Chunk) -> _Row:
        row = self._rows.get(chunk.request_id)
        if row is None:
            row = self._rows[chunk.request_id] = _Row(self._free_index(), chunk.block_ids)
        self._rows.move_to_end(chunk.request_id)

        if row.block_ids is not chunk.block_ids:
            row.block_ids = chunk.block_ids
            row.length = 0
        end = len(chunk.block_ids)
        if row.length != end:
            self._make_room(columns=end)
            self._table[row.index, row.length : end] = chunk.block_ids[row.length :]
            row.length = end
        return row

    def _free_index(self) -> int:
        if len(self._rows) < len(self._table):
            return len(self._rows)
        _, oldest = self._rows.popitem(last=False)
        return oldest.index

    def _make_room(self, rows: int = 0, columns: int = 0) -> None:
        old_rows, old_columns = self._table.shape
        if rows <= old_rows and columns <= old_columns:
            return
        # The width doubles, since a sequence grows by one block at a time.
        new_columns = old_columns if columns <= old_columns else max(columns, 2 * old_columns)
        table = np.zeros((max(rows, old_rows), new_columns), np.int32)
        table[:old_rows, :old_columns] = self._table
        self._table = table
