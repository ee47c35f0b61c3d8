"""Hidden rows between stages: received one micro-batch ahead, sent while the next is computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import distributed

from ullage_engine.kernels.buffers import shaped
from ullage_engine.parallel.group import RankGroup


class StageLink:
    """One rank's ends of the wires to its neighbours in the pipeline.

    Buffers are allocated once. On CUDA transfers run beside the computation: they are begun on a
    stream of their own, and NCCL makes the computing stream wait for what it needs.
    """

    def __init__(self, group: RankGroup, max_rows: int, hidden: int, dtype: torch.dtype) -> None:
        """`max_rows` is the rows of a whole step, over all its micro-batches."""
        layout, rank = group.layout, group.rank
        self._group = group
        self._hidden = hidden
        self._receives, self._sends = not layout.is_first(rank), not layout.is_last(rank)
        wanted = max_rows * hidden
        self._received = torch.zeros(wanted * self._receives, dtype=dtype, device=group.device)
        self._sent = torch.zeros(wanted * self._sends, dtype=dtype, device=group.device)
        self._stream = _side_stream(group.device)

    @property
    def nbytes(self) -> int:
        return self._received.nbytes + self._sent.nbytes

    def step(self, rows: Sequence[int]) -> "StepTransfers":
        """The transfers of one step, of so many rows a micro-batch."""
        return StepTransfers(
            self._group,
            self._parts(self._received, rows) if self._receives else [],
            self._parts(self._sent, rows) if self._sends else [],
            self._stream,
        )

    def _parts(self, buffer: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        whole = shaped(buffer, sum(rows), self._hidden)
        starts = [0, *accumulate(rows)]
        return [whole.narrow(0, start, size) for start, size in zip(starts, rows, strict=False)]


class StepTransfers:
    """Received and sent rows of one step's micro-batches, in their order."""

    def __init__(
        self,
        group: RankGroup,
        received: list[torch.Tensor],
        sent: list[torch.Tensor],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._group = group
        self._received = received
        self._sent = sent
        self._stream = stream
        self._sending: list[distributed.Work] = []
        self._receiving = self._begin_receiving(0)

    def receive(self, index: int) -> torch.Tensor | None:
        """The hidden rows of a micro-batch; None on the first stage, which embeds."""
        if not self._received:
            return None
        assert self._receiving is not None, "micro-batches come in their order"
        self._receiving.wait()
        self._receiving = self._begin_receiving(index + 1)
        return self._received[index]

    def send(self, index: int, hidden: torch.Tensor) -> bool:
        """Sends the hidden rows of a micro-batch on; False on the last stage, which keeps them."""
        if not self._sent:
            return False
        rows = self._sent[index].copy_(hidden)
        with self._beside():
            self._sending.append(self._group.send(rows))
        return True

    def finish(self) -> None:
        """Waits until everything is sent, so that the buffers are free for the next step."""
        for work in self._sending:
            work.wait()

    def _begin_receiving(self, index: int) -> distributed.Work | None:
        if index >= len(self._received):
            return None
        with self._beside():
            return self._group.receive(self._received[index])

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Runs transfers on their own stream, after what the computing stream has so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
