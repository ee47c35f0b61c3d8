"""What a runner needs to know of the other ranks; with one rank, nothing."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ullage_engine.core.plan import StepPlan
from ullage_engine.layers.matrix import Matrix
from ullage_engine.parallel.group import RankGroup
from ullage_engine.parallel.microbatch import LEAST_TOKENS, micro_batches
from ullage_engine.parallel.pipeline import StageLink
from ullage_engine.parallel.reduced import ReducedMatrix
from ullage_engine.parallel.slices import ROW_PARALLEL


class Transfers(Protocol):
    """Hidden rows of one step's micro-batches, in their order."""

    def receive(self, index: int) -> torch.Tensor | None:
        """Of the stage before; None where there is none."""
        ...

    def send(self, index: int, hidden: torch.Tensor) -> bool:
        """To the stage after; False where there is none."""
        ...

    def finish(self) -> None:
        """Call it at the end of the step."""
        ...


class Neighbours(Protocol):
    """A rank's place among others."""

    @property
    def samples(self) -> bool:
        """Whether this rank chooses tokens."""
        ...

    @property
    def reduce(self) -> Callable[[torch.Tensor], None] | None:
        """Sums over the ranks that share a layer, in place; None where there is but one."""
        ...

    def matrix(self, name: str, part: Matrix) -> Matrix:
        """A matrix by its prepared name, made of this rank's part of it."""
        ...

    def split(self, plan: StepPlan) -> list[StepPlan]:
        """The micro-batches of a step."""
        ...

    def transfers(self, rows: Sequence[int]) -> Transfers:
        """Of a step whose micro-batches have so many rows."""
        ...


class NoTransfers:
    """One stage: nothing comes, nothing goes."""

    def receive(self, index: int) -> torch.Tensor | None:
        return None

    def send(self, index: int, hidden: torch.Tensor) -> bool:
        return False

    def finish(self) -> None: ...


class Alone:
    """The only rank."""

    samples = True
    reduce = None

    def matrix(self, name: str, part: Matrix) -> Matrix:
        return part

    def split(self, plan: StepPlan) -> list[StepPlan]:
        return [plan]

    def transfers(self, rows: Sequence[int]) -> Transfers:
        return NoTransfers()


class Connected:
    """One of several ranks; allocates what transfers need, once."""

    def __init__(
        self, group: RankGroup, max_rows: int, hidden: int, dtype: torch.dtype, most_batches: int
    ) -> None:
        """`max_rows` counts padding: the rows of the largest product."""
        self._group = group
        self._most_batches = most_batches
        is_shared = group.layout.tensor > 1
        self._sums = torch.zeros(max_rows * hidden * is_shared, dtype=dtype, device=group.device)
        self._link = StageLink(group, max_rows, hidden, dtype)

    @property
    def samples(self) -> bool:
        return self._group.rank == self._group.layout.sampling_rank

    @property
    def reduce(self) -> Callable[[torch.Tensor], None] | None:
        return self._group.all_reduce if self._group.layout.tensor > 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; `transfer_bytes` says them beforehand."""
        return self._sums.nbytes + self._link.nbytes

    def matrix(self, name: str, part: Matrix) -> Matrix:
        is_partial = name.rpartition(".")[2] in ROW_PARALLEL
        if self._group.layout.tensor == 1 or not is_partial:
            return part
        return ReducedMatrix(part, self._group, self._sums)

    def split(self, plan: StepPlan) -> list[StepPlan]:
        if self._group.layout.pipeline == 1:
            return [plan]
        return micro_batches(plan, self._most_batches, LEAST_TOKENS[self._group.device.type])

    def transfers(self, rows: Sequence[int]) -> Transfers:
        return self._link.step(rows) if self._group.layout.pipeline > 1 else NoTransfers()
