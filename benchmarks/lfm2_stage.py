"""One stage of a pipeline: a run of the engine's layers, and the links to its neighbours."""

from collections import deque

import torch
import torch.distributed as dist
from lfm2_model import SeededWeights

from ullage_engine.core.batch import StepBatch, build_batch
from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.core.request import SamplingParams
from ullage_engine.kernels.buffers import allocate, shaped
from ullage_engine.kernels.pool import KVPool, StatePool
from ullage_engine.layers.compute import FastCompute
from ullage_engine.layers.expert_matrices import expert_matrices
from ullage_engine.memory.arena import StepLimits, gather_tokens, step_arena
from ullage_engine.models.decoder import Decoder, Weights
from ullage_engine.models.geometry import ModelGeometry

BLOCK_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)


class Stage:
    """Everything is allocated here, once; weights are made layer by layer."""

    def __init__(
        self,
        geometry: ModelGeometry,
        weights: SeededWeights,
        samples: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        is_last: bool,
    ) -> None:
        """For micro-batches of up to `samples` of `tokens`."""
        self._geometry, self._device, self._dtype = geometry, device, dtype
        self._tokens, self._blocks_each = tokens, -(-tokens // BLOCK_TOKENS)
        self._max_rows = samples * tokens
        self._limits = StepLimits(
            max_tokens=self._max_rows,
            max_rows=samples,
            max_model_len=tokens,
            max_gather_tokens=gather_tokens(tokens, 0, BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            itemsize=dtype.itemsize,
        )
        arena = allocate(step_arena(geometry, self._limits), dtype, device)
        self._model = self._build(weights, arena, is_last)
        self._kv = KVPool(geometry, samples * self._blocks_each, BLOCK_TOKENS, dtype, device)
        self._states = StatePool(geometry, samples, dtype, device)
        head_rows = self._limits.product_rows(samples) if is_last else 0
        self._head_rows = torch.zeros(head_rows * geometry.vocab, dtype=dtype, device=device)
        self._batch: StepBatch | None = None

    def _build(
        self, weights: SeededWeights, arena: dict[str, torch.Tensor], is_last: bool
    ) -> Decoder:
        geometry = self._geometry
        tensors = weights.ends() if is_last or geometry.first_layer == 0 else {}
        for index in range(geometry.num_layers):
            tensors |= weights.layer(geometry.first_layer + index)
        compute = FastCompute(geometry, self._limits, arena)
        made = Weights(
            tensors,
            matrix=lambda name: compute.matrix(tensors[name]),
            experts=lambda name: expert_matrices(tensors[name], compute.matrix, False),
        )
        return Decoder(made, geometry, self._limits, arena, compute)

    def rows(self, prompts: list[list[int]]) -> int:
        return len(prompts) * self._tokens

    def new_hidden(self) -> torch.Tensor:
        """Memory for one micro-batch's hidden states."""
        shape = (self._max_rows, self._geometry.hidden)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def new_logits(self, samples: int) -> torch.Tensor:
        """Memory for the logits of so many samples."""
        shape = (samples, self._geometry.vocab)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def forward(self, prompts: list[list[int]], hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [rows, hidden] after this stage's layers; they live until the next call."""
        plan = StepPlan([self._chunk(index, prompt) for index, prompt in enumerate(prompts)])
        self._batch = build_batch(
            plan,
            BLOCK_TOKENS,
            self._limits.max_gather_tokens,
            self._limits.context_blocks,
            conv_kernel=self._geometry.conv_kernel,
        )
        return self._model.forward(self._batch, self._kv.layers, self._states.layers, hidden)

    def logits(self, samples: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the logits after each sample's last token, for `forward`'s result."""
        assert self._batch is not None, "forward comes first"
        rows = shaped(self._head_rows, self._limits.product_rows(samples), self._geometry.vocab)
        self._model.logits(hidden, self._batch.sampled_rows, rows)
        out.copy_(rows[:samples])

    def _chunk(self, index: int, prompt: list[int]) -> Chunk:
        first = index * self._blocks_each
        return Chunk(
            request_id=str(index),
            token_ids=prompt,
            start=0,
            block_ids=list(range(first, first + self._blocks_each)),
            sampling=GREEDY,
            history=prompt,
            num_prompt_tokens=len(prompt),
            next_state_slot=index,
        )


class Link:
    """Hidden states from the stage before and to the stage after, one micro-batch ahead.

    A transfer begins when its memory is free and is waited for when its memory is needed; on CUDA
    NCCL's own stream does it, and waiting is one stream's for the other.
    """

    def __init__(self, rank: int, stages: int, like: torch.Tensor) -> None:
        """`like` has the shape of the largest micro-batch's hidden states."""
        self._rank, self._stages = rank, stages
        self._incoming = [torch.zeros_like(like) for _ in range(2 if rank > 0 else 0)]
        self._outgoing = [torch.zeros_like(like) for _ in range(0 if self.is_last else 2)]
        self._receiving: deque[dist.Work] = deque()
        self._sending: deque[dist.Work] = deque()
        self._num_expected = self._num_received = self._num_sent = 0

    @property
    def is_last(self) -> bool:
        return self._rank == self._stages - 1

    def expect(self, count: int) -> None:
        """Begins to receive the first of `count` micro-batches."""
        self._num_expected, self._num_received = count, 0
        self._begin_receiving(0)

    def receive(self, rows: int) -> torch.Tensor | None:
        """The next micro-batch's hidden states, of so many rows; None in the first stage.

        They live until the next but one call. Begins to receive the one after.
        """
        if self._rank == 0:
            return None
        self._receiving.popleft().wait()
        hidden = self._incoming[self._num_received % 2]
        self._num_received += 1
        self._begin_receiving(self._num_received)
        return hidden[:rows]

    def send(self, hidden: torch.Tensor) -> None:
        """Begins to send a copy of these to the next stage."""
        if len(self._sending) == len(self._outgoing):
            self._sending.popleft().wait()
        memory = self._outgoing[self._num_sent % 2]
        memory[: hidden.shape[0]].copy_(hidden)
        self._sending.append(_begun(dist.isend(memory, self._rank + 1)))
        self._num_sent += 1

    def finish(self) -> None:
        """Waits until everything has been sent."""
        while self._sending:
            self._sending.popleft().wait()

    def _begin_receiving(self, index: int) -> None:
        if self._rank > 0 and index < self._num_expected:
            memory = self._incoming[index % 2]
            self._receiving.append(_begun(dist.irecv(memory, self._rank - 1)))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "not a process of the group"
    return work
