"""Pipeline parallelism: process groups, micro-batches, and the transfers of hidden states.

Groups use NCCL between GPUs and gloo between processes on a CPU. Every rank creates every group, in
the same order. There are two kinds of groups: all ranks that share a layer, and pairs of a rank and
its successor in the next stage. Each pair has its own communicator, so that a stage's receives
never wait behind its sends. A step is split into micro-batches that flow through the stages one
after another. Hidden states are received one micro-batch ahead, and sent while the next micro-batch
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

MIN_BATCH_TOKENS = {"cpu": 8, "cuda": 128}
"""Minimum tokens per micro-batch, by device. Smaller micro-batches cost more than they save.

Every micro-batch rereads the weights of a stage. This is free as long as the matmuls take longer
than the read: from about 190 tokens on an H200 (788 TFLOP/s against 4.3 TB/s). On a CPU, a bfloat16
matmul of 16 rows takes 1.4 times as long as a matmul of a single row. The limit for GPUs is below
190, so that a prompt chunk of 512 tokens is split into four micro-batches and each stage only waits
for one of them.
"""


class RankGroup:
    """One rank's view of its process group. Create one per process, and `close` it at the end."""

    def __init__(
        self, layout: RankLayout, rank: int, store: Path, device: torch.device, timeout_s: float
    ) -> None:
        """Join the group, and wait until all ranks have joined.

        Args:
            layout: arrangement of the ranks.
            rank: index of this rank.
            store: path of a file that does not exist yet, the same for all ranks.
            device: device of this rank.
            timeout_s: seconds after which a transfer fails. On CUDA the failure terminates the
                process, on a CPU it raises an error.

        Raises:
            RuntimeError: a rank did not join in time.
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
        """Start sending to the next stage. Do not modify the tensor until the send completes."""
        with ranges("transfer"):
            work = distributed.isend(tensor, self.rank + self.layout.tensor, group=self._after)
        assert work is not None, "a rank of the pair"
        return work

    def receive(self, tensor: torch.Tensor) -> distributed.Work:
        """Start receiving from the previous stage. The tensor's size sets the number of rows."""
        work = distributed.irecv(tensor, self.rank - self.layout.tensor, group=self._before)
        assert work is not None, "a rank of the pair"
        return work

    def close(self) -> None:
        """Leave the group."""
        distributed.destroy_process_group()

    def _own(self, groups: list[list[int]]) -> distributed.ProcessGroup | None:
        """Create one process group for each list of ranks. Return this rank's group, or None."""
        created = [distributed.new_group(ranks, timeout=self._timeout) for ranks in groups]
        own = (each for each, ranks in zip(created, groups, strict=True) if self.rank in ranks)
        return next(own, None)


def _tensor_groups(layout: RankLayout) -> list[list[int]]:
    """Return the groups of ranks that share layers."""
    stages = range(layout.pipeline)
    ranks = range(layout.tensor)
    return [[layout.rank(stage, index) for index in ranks] for stage in stages]


def _pairs(layout: RankLayout) -> list[list[int]]:
    """Return the pairs of each rank and its successor in the next stage."""
    ranks = range(layout.world - layout.tensor)
    return [[rank, rank + layout.tensor] for rank in ranks]


class StepTransfers:
    """Passes one step's hidden states from pipeline stage to stage, by micro-batch.

    Each rank receives them from the previous stage, if any, and sends its own to the next, if any.
    Micro-batches are transferred in order.
    """

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
        """Wait for the hidden states of a micro-batch, and start receiving those of the next one.

        Micro-batches are received in order. On the first stage, which embeds tokens and receives
        nothing, the result is None.
        """
        if not self._received:
            return None

        assert self._receiving is not None, "micro-batches come in their order"
        self._receiving.wait()
        self._receiving = self._begin_receiving(index + 1)
        return self._received[index]

    def send(self, index: int, hidden: torch.Tensor) -> bool:
        """Start sending the hidden states of a micro-batch to the next stage.

        Returns:
            False on the last stage, which sends nothing.
        """
        if not self._sent:
            return False

        assert self._group is not None, "rows for another rank, and no group"
        rows = self._sent[index].copy_(hidden)
        with self._on_stream():
            self._sending.append(self._group.send(rows))
        return True

    def finish(self) -> None:
        """Wait until all rows are sent, so that the buffers are free for the next step."""
        for work in self._sending:
            work.wait()

    def _begin_receiving(self, index: int) -> distributed.Work | None:
        if index >= len(self._received):
            return None

        assert self._group is not None, "rows of another rank, and no group"
        with self._on_stream():
            return self._group.receive(self._received[index])

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Launch transfers on a separate stream, after all work queued on the compute stream."""
        if self._stream is None:
            yield
            return

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


class PipelineRank:
    """Splits one rank's steps into micro-batches, and exchanges data with the other ranks.

    The data are hidden states for the next stage, and partial sums for the ranks that share a
    layer. Buffers are allocated once. On CUDA, transfers are launched on a separate stream, so that
    they overlap with computation. NCCL makes the compute stream wait for the hidden states it
    needs.
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
        """Allocate the buffers of a rank.

        Args:
            group: the rank's process group. None if this rank computes alone, in which case it
                never splits a step and has nothing to sum or send.
            max_rows: number of rows in the largest matmul of a whole step, including padding.
            hidden: width of the hidden states.
            dtype: dtype of the hidden states.
            max_batches: maximum number of micro-batches in a step.
            splits_chunks: whether a chunk may be split over several micro-batches. This must be
                false if a layer has a convolution state.
        """
        layout = group.layout if group else RankLayout()
        rank = group.rank if group else 0
        device = group.device if group else torch.device("cpu")

        self.samples = rank == layout.sampling_rank
        """Whether this rank samples tokens."""
        self.is_alone = group is None
        """Whether this rank computes alone."""
        self.reduce = group.all_reduce if group and layout.tensor > 1 else None
        """Sums a tensor in place over the ranks that share a layer. None if no layer is shared."""

        self._group = group
        self._hidden = hidden
        self._max_batches = max_batches
        self._splits_chunks = splits_chunks
        self._is_staged = layout.pipeline > 1
        self._min_tokens = MIN_BATCH_TOKENS[device.type]

        def buffer(is_needed: bool) -> torch.Tensor:
            return torch.zeros(max_rows * hidden * is_needed, dtype=dtype, device=device)

        self.partial_sums = buffer(layout.tensor > 1)
        """Flat buffer for the largest partial matmul result. Results are summed one at a time."""
        self._received = buffer(not layout.is_first(rank))
        self._sent = buffer(not layout.is_last(rank))
        self._stream = _side_stream(device)

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes. `transfer_bytes` predicts it before they are allocated."""
        return self.partial_sums.nbytes + self._received.nbytes + self._sent.nbytes

    def split(self, plan: StepPlan) -> list[StepPlan]:
        """Split a step into micro-batches."""
        if not self._is_staged:
            return [plan]

        return micro_batches(
            plan, self._max_batches, self._min_tokens, splits_chunks=self._splits_chunks
        )

    def transfers(self, rows: Sequence[int]) -> StepTransfers:
        """Start the transfers of a step, given the row count of each micro-batch."""
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


def micro_batches(
    plan: StepPlan, max_batches: int, min_tokens: int, *, splits_chunks: bool = False
) -> list[StepPlan]:
    """Split a plan into at most `max_batches` micro-batches of about equal size.

    Chunks are not split by default. With `splits_chunks`, chunks of several tokens are split where
    needed to fill the micro-batches evenly, one after another. The later parts of a split chunk
    find the KV of the earlier parts in the cache, because every stage computes micro-batches in
    order. Every rank splits a plan in the same way. The micro-batches contain no block moves,
    because these are performed before the step.

    Args:
        plan: plan to split.
        max_batches: maximum number of micro-batches.
        min_tokens: minimum tokens per micro-batch, if the plan has this many.
        splits_chunks: whether a chunk may be split over several micro-batches.
    """
    sizes = [len(chunk.token_ids) for chunk in plan.chunks]
    whole = [index for index, size in enumerate(sizes) if size == 1 or not splits_chunks]
    split = [chunk for index, chunk in enumerate(plan.chunks) if index not in set(whole)]
    num_parts = len(whole) + sum(len(chunk.token_ids) for chunk in split)
    count = max(1, min(max_batches, num_parts, plan.num_tokens // min_tokens))
    if count == 1:
        return [StepPlan(plan.chunks)]

    # The longest chunk goes first, each to the emptiest micro-batch. Within a micro-batch chunks
    # keep the plan's order.
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
    """Distribute chunks across batches in order, splitting chunks to even out batch sizes."""
    remaining = sum(len(chunk.token_ids) for chunk in chunks)
    index = -1
    room = 0

    for chunk in chunks:
        first = 0
        num_tokens = len(chunk.token_ids)
        while first < num_tokens:
            # Batches that whole chunks have filled already have no room.
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
    """Return tokens `first` to `end` of a chunk as a separate chunk.

    When a chunk is split in this way, only the piece with its last token samples a token.
    """
    is_last = end == len(chunk.token_ids)
    return replace(
        chunk,
        token_ids=chunk.token_ids[first:end],
        start=chunk.start + first,
        sampling=chunk.sampling if is_last else None,
    )


def in_plan_order(plan: StepPlan, tokens: Sequence[SampledToken]) -> list[SampledToken]:
    """Return the sampled tokens of all micro-batches, in the order of the plan's chunks."""
    by_request: dict[str, list[SampledToken]] = {}
    for token in tokens:
        by_request.setdefault(token.request_id, []).append(token)
    sampled = [chunk.request_id for chunk in plan.chunks if chunk.sampling is not None]
    return [token for request_id in sampled for token in by_request[request_id]]
