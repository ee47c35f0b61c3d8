"""Pipeline parallelism: process groups, micro-batches, and the transfers of hidden rows.

Groups are NCCL between GPUs and gloo between processes on a CPU. Every rank makes every group, in
one order. There are two kinds: the ranks that share a layer, and for each of them the pair it makes
with its successor in the next stage. A pair has a communicator of its own, so that what a stage
receives never waits behind what it sends. A step is split into micro-batches that flow through the
stages one behind the other; hidden rows are received one micro-batch ahead and sent while the next
is computed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import distributed

from ullage_engine.kernels.kv_pool import shaped
from ullage_engine.kernels.ranges import ranges
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.protocol.step_plan import Chunk, SampledToken, StepPlan


class RankGroup:
    """A rank's view of its group; made once a process, `close` ends it."""

    def __init__(
        self, layout: RankLayout, rank: int, store: Path, device: torch.device, timeout_s: float
    ) -> None:
        """Wait until all ranks have come.

        `store` is a file that does not exist yet, the same for all ranks. A transfer that takes
        longer than the timeout fails: on CUDA it ends the process, else it raises.

        Raises:
            RuntimeError: some rank did not come in time.
        """
        self.layout = layout
        self.rank = rank
        self.device = device
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
        """Sum a tensor over the ranks that share a layer, in place."""
        if self.layout.tensor > 1:
            with ranges("collective"):
                distributed.all_reduce(tensor, group=self._tensor)

    def send(self, tensor: torch.Tensor) -> distributed.Work:
        """Begin to send to the next stage; the tensor must not change until the work is done."""
        with ranges("transfer"):
            work = distributed.isend(tensor, self.rank + self.layout.tensor, group=self._after)
        assert work is not None, "a rank of the pair"
        return work

    def receive(self, tensor: torch.Tensor) -> distributed.Work:
        """Begin to receive from the previous stage, as many rows as it sends."""
        work = distributed.irecv(tensor, self.rank - self.layout.tensor, group=self._before)
        assert work is not None, "a rank of the pair"
        return work

    def close(self) -> None:
        distributed.destroy_process_group()

    def _own(self, groups: list[list[int]]) -> distributed.ProcessGroup | None:
        """Make groups; return the one that this rank is in."""
        created = [distributed.new_group(ranks, timeout=self._timeout) for ranks in groups]
        own = (each for each, ranks in zip(created, groups, strict=True) if self.rank in ranks)
        return next(own, None)


def _tensor_groups(layout: RankLayout) -> list[list[int]]:
    """List the ranks that share layers."""
    stages = range(layout.pipeline)
    ranks = range(layout.tensor)
    return [[layout.rank(stage, index) for index in ranks] for stage in stages]


def _pairs(layout: RankLayout) -> list[list[int]]:
    """List each rank and the one that it sends to."""
    ranks = range(layout.world - layout.tensor)
    return [[rank, rank + layout.tensor] for rank in ranks]


class StepTransfers:
    """The hidden rows that a step's micro-batches receive and send, in their order."""

    def __init__(
        self,
        group: RankGroup | None,
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
        """Receives the hidden rows of a micro-batch; None on the first stage, which embeds."""
        if not self._received:
            return None
        assert self._receiving is not None, "micro-batches come in their order"
        self._receiving.wait()
        self._receiving = self._begin_receiving(index + 1)
        return self._received[index]

    def send(self, index: int, hidden: torch.Tensor) -> bool:
        """Send the hidden rows of a micro-batch on; False on the last stage, which keeps them."""
        if not self._sent:
            return False
        assert self._group is not None, "rows for another rank, and no group"
        rows = self._sent[index].copy_(hidden)
        with self._beside():
            self._sending.append(self._group.send(rows))
        return True

    def finish(self) -> None:
        """Wait until everything is sent, so that the buffers are free for the next step."""
        for work in self._sending:
            work.wait()

    def _begin_receiving(self, index: int) -> distributed.Work | None:
        if index >= len(self._received):
            return None
        assert self._group is not None, "rows of another rank, and no group"
        with self._beside():
            return self._group.receive(self._received[index])

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run transfers on their own stream, after what the computing stream has so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


class PipelineRank:
    """A rank's part in what several compute together: micro-batches, transfers and sums.

    Buffers are allocated once. On CUDA transfers run beside the computation: they are begun on a
    stream of their own, and NCCL makes the computing stream wait for what it needs.
    """

    def __init__(
        self,
        group: RankGroup | None = None,
        max_rows: int = 0,
        hidden: int = 0,
        dtype: torch.dtype = torch.float32,
        max_batches: int = 1,
        *,
        splits_chunks: bool = False,
    ) -> None:
        """Without a group it is the only rank, for which nothing is split, summed or sent.

        `max_rows`: rows of the largest product of a whole step, padding included. `splits_chunks`:
        a chunk may be in several micro-batches, as it may where no layer has a convolution state.
        """
        layout = group.layout if group else RankLayout()
        rank, device = (group.rank, group.device) if group else (0, torch.device("cpu"))
        self.samples = rank == layout.sampling_rank
        """Whether this rank chooses tokens."""
        self.is_alone = group is None
        """Whether there is no other rank."""
        self.reduce = group.all_reduce if group and layout.tensor > 1 else None
        """Sums over the ranks that share a layer, in place; None where there is but one."""
        self._group = group
        self._hidden = hidden
        self._max_batches = max_batches
        self._splits_chunks = splits_chunks
        self._is_staged = layout.pipeline > 1
        self._min_tokens = MIN_BATCH_TOKENS[device.type]

        def buffer(is_needed: bool) -> torch.Tensor:
            return torch.zeros(max_rows * hidden * is_needed, dtype=dtype, device=device)

        self.partial_sums = buffer(layout.tensor > 1)
        """Flat room for the largest partial product; one is summed after the other."""
        self._received = buffer(not layout.is_first(rank))
        self._sent = buffer(not layout.is_last(rank))
        self._stream = _side_stream(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; `transfer_bytes` computes them beforehand."""
        return self.partial_sums.nbytes + self._received.nbytes + self._sent.nbytes

    def split(self, plan: StepPlan) -> list[StepPlan]:
        """Split a step into micro-batches."""
        if not self._is_staged:
            return [plan]
        return micro_batches(
            plan, self._max_batches, self._min_tokens, splits_chunks=self._splits_chunks
        )

    def transfers(self, rows: Sequence[int]) -> StepTransfers:
        """Start the transfers of a step whose micro-batches have so many rows."""
        received = self._parts(self._received, rows)
        sent = self._parts(self._sent, rows)
        return StepTransfers(self._group, received, sent, self._stream)

    def _parts(self, buffer: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        if not buffer.numel():
            return []
        whole = shaped(buffer, sum(rows), self._hidden)
        starts = [0, *accumulate(rows)]
        return [whole.narrow(0, start, size) for start, size in zip(starts, rows, strict=False)]


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


MIN_BATCH_TOKENS = {"cpu": 8, "cuda": 128}
"""Tokens below which another micro-batch costs more than it hides.

Every micro-batch reads a stage's weights once more. That is free while its products take longer
than reading does: from about 190 tokens on on an H200 (788 TFLOP/s against 4.3 TB/s), and a
bfloat16 product of 16 rows takes 1.4 times as long as one of a single row on a processor. Less than
that on a GPU lets a prompt chunk of 512 tokens be four micro-batches, of which a stage waits for
one."""


def micro_batches(
    plan: StepPlan, max_batches: int, min_tokens: int, *, splits_chunks: bool = False
) -> list[StepPlan]:
    """Cut a plan into at most `max_batches`, of `min_tokens` or more where there are enough.

    Chunks are dealt out whole, or with `splits_chunks` those of several tokens fill the
    micro-batches evenly, one after the other: what goes on in the next one finds the KV of what
    came before, since every stage computes micro-batches in their order. The same plan is split the
    same way on every rank. Moves are left out; they are done before.
    """
    sizes = [len(chunk.token_ids) for chunk in plan.chunks]
    whole = [index for index, size in enumerate(sizes) if size == 1 or not splits_chunks]
    split = [chunk for index, chunk in enumerate(plan.chunks) if index not in set(whole)]
    num_parts = len(whole) + sum(len(chunk.token_ids) for chunk in split)
    count = max(1, min(max_batches, num_parts, plan.num_tokens // min_tokens))
    if count == 1:
        return [StepPlan(plan.chunks)]
    # The longest first, each to the emptiest; their order within a micro-batch is the plan's.
    loads = [0] * count
    dealt: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(whole, key=lambda each: (-sizes[each], each)):
        emptiest = min(range(count), key=lambda each: (loads[each], each))
        loads[emptiest] += sizes[index]
        dealt[emptiest].append(index)
    batches = [[plan.chunks[index] for index in sorted(indices)] for indices in dealt]
    _fill(batches, loads, split)
    return [StepPlan(batch) for batch in batches if batch]


def _fill(batches: list[list[Chunk]], loads: list[int], chunks: list[Chunk]) -> None:
    """Append chunks to batches, cut where one is as full as all would be on average."""
    remaining = sum(len(chunk.token_ids) for chunk in chunks)
    index = -1
    room = 0
    for chunk in chunks:
        first = 0
        num_tokens = len(chunk.token_ids)
        while first < num_tokens:
            while room <= 0:
                index += 1
                level = -(-(sum(loads[index:]) + remaining) // (len(loads) - index))
                room = level - loads[index]
            end = min(num_tokens, first + room)
            batches[index].append(_piece(chunk, first, end))
            room -= end - first
            remaining -= end - first
            first = end


def _piece(chunk: Chunk, first: int, end: int) -> Chunk:
    """Return some consecutive tokens of a chunk; only the last of its tokens is sampled after."""
    is_last = end == len(chunk.token_ids)
    return replace(
        chunk,
        token_ids=chunk.token_ids[first:end],
        start=chunk.start + first,
        sampling=chunk.sampling if is_last else None,
    )


def in_plan_order(plan: StepPlan, tokens: Sequence[SampledToken]) -> list[SampledToken]:
    """Return the tokens of all micro-batches in the order of the plan's chunks."""
    by_request: dict[str, list[SampledToken]] = {}
    for token in tokens:
        by_request.setdefault(token.request_id, []).append(token)
    sampled = [chunk.request_id for chunk in plan.chunks if chunk.sampling is not None]
    return [token for request_id in sampled for token in by_request[request_id]]
