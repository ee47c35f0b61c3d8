"""Process groups of one engine: NCCL between GPUs, gloo between processes on a CPU.

Every rank makes every group, in one order. Two kinds: the ranks that share a layer, and for each
of them the pair it makes with its successor in the next stage. A pair has a communicator of its
own, so that what a stage receives never waits behind what it sends.
"""

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from ullage_engine.parallel.layout import RankLayout


class RankGroup:
    """A rank's view of its group; made once a process, `close` ends it."""

    def __init__(
        self, layout: RankLayout, rank: int, store: Path, device: torch.device, timeout_s: float
    ) -> None:
        """Waits until all ranks have come.

        `store` is a file that does not exist yet, the same for all ranks. A transfer that takes
        longer than the timeout fails: on CUDA it ends the process, else it raises.

        Raises:
            RuntimeError: some rank did not come in time.
        """
        self.layout, self.rank, self.device = layout, rank, device
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=distributed.FileStore(str(store), layout.world),  # type: ignore[attr-defined]
            rank=rank,
            world_size=layout.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        self._timeout = timedelta(seconds=timeout_s)
        self._tensor = self._own(_tensor_groups(layout))
        pairs = [self._own([pair]) for pair in _pairs(layout)]
        mine = [pair for pair in pairs if pair is not None]
        self._before = mine[0] if not layout.is_first(rank) else None
        self._after = mine[-1] if not layout.is_last(rank) else None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks that share a layer, in place."""
        if self.layout.tensor > 1:
            distributed.all_reduce(tensor, group=self._tensor)

    def send(self, tensor: torch.Tensor) -> distributed.Work:
        """Begins to send to the next stage; the tensor must not change until the work is done."""
        work = distributed.isend(tensor, self.rank + self.layout.tensor, group=self._after)
        assert work is not None, "a rank of the pair"
        return work

    def receive(self, tensor: torch.Tensor) -> distributed.Work:
        """Begins to receive from the previous stage, as many rows as it sends."""
        work = distributed.irecv(tensor, self.rank - self.layout.tensor, group=self._before)
        assert work is not None, "a rank of the pair"
        return work

    def close(self) -> None:
        distributed.destroy_process_group()

    def _own(self, groups: list[list[int]]) -> distributed.ProcessGroup | None:
        """Makes groups, and tells the one that this rank is in."""
        made = [distributed.new_group(ranks, timeout=self._timeout) for ranks in groups]
        own = (each for each, ranks in zip(made, groups, strict=True) if self.rank in ranks)
        return next(own, None)


def _tensor_groups(layout: RankLayout) -> list[list[int]]:
    """Ranks that share layers."""
    stages, ranks = range(layout.pipeline), range(layout.tensor)
    return [[layout.rank(stage, index) for index in ranks] for stage in stages]


def _pairs(layout: RankLayout) -> list[list[int]]:
    """Each rank and the one that it sends to."""
    ranks = range(layout.world - layout.tensor)
    return [[rank, rank + layout.tensor] for rank in ranks]
