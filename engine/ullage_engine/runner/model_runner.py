"""Runs step plans on one device, and the largest possible plans during warm-up."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import msgspec
import torch

from ullage_engine.kernels.arena import (
    SLICE_TOKENS,
    ArenaLayout,
    StepLimits,
    sampler_arena,
    step_arena,
)
from ullage_engine.kernels.batch import Bucket, StepBatch, begun_blocks, build_batch
from ullage_engine.kernels.block_tables import BlockTables
from ullage_engine.kernels.kv_pool import (
    HeadScales,
    HostPool,
    KVPool,
    StatePool,
    allocate,
    kv_block_bytes,
    move,
    scratch_blocks,
    shaped,
    storage_bytes,
)
from ullage_engine.kernels.ranges import ranges
from ullage_engine.layers.attention import (
    AttentionBackend,
    DefaultBackend,
    DeterministicBackend,
    PagedBackend,
    can_page,
)
from ullage_engine.layers.decoder import Decoder
from ullage_engine.layers.linear import Linear
from ullage_engine.layers.moe import ExpertLinears
from ullage_engine.layers.native_decoder import NativeDecoder, library_refusal
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import ALIGNMENT, LoadedModel
from ullage_engine.parallel.pipeline import PipelineRank, StepTransfers, in_plan_order
from ullage_engine.protocol.requests import PromptLogprobs
from ullage_engine.protocol.step_plan import Chunk, Moves, SampledToken, StepPlan, state_slots
from ullage_engine.runner.logits_edits import PenaltyCounts
from ullage_engine.runner.prompt_logprobs import ScoredRows, as_message, score_rows
from ullage_engine.runner.sampler import sample
from ullage_engine.runner.step_graphs import Action, NewCapture, StepGraphs
from ullage_engine.runner.warm_up_plans import (
    GREEDY,
    decode_plans,
    largest_plans,
    make_chunk,
    probe_plans,
    shape_plans,
)
from ullage_engine.runner.weights import linear_scratch_bytes, model_weights

_CONSTANTS = ("cos", "sin", "mask")
"""Arena buffers that are filled only once and never change."""

_MEASURED_ROWS = 8
"""Number of sequences in the decode steps that are timed at startup."""

_TOKEN_STRIDE = 7919
"""Difference between successive token ids of a timed prompt: a prime, so that few ids repeat."""

Wrap = Callable[[str, Linear], Linear]
"""Function that takes a linear layer and its name, and returns a replacement layer."""

WrapExperts = Callable[[str, ExpertLinears], ExpertLinears]
"""Like `Wrap`, but for experts' linear layers."""

_Computed = tuple[list[Chunk], torch.Tensor, list[int] | None]
"""Chunks to sample, their logits, and each chunk's likeliest token if that is already known."""


class ModelRunner:
    """Runs step plans, and owns the KV pool and all buffers of a step.

    The class is not thread-safe. Call `allocate_arena`, `allocate_kv` and `warm_up`, in this order,
    before the first `execute`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        device: torch.device,
        dtype: torch.dtype,
        limits: StepLimits,
        pipeline_rank: PipelineRank | None = None,
        wrap: Wrap | None = None,
        wrap_experts: WrapExperts | None = None,
        kv_type: torch.dtype | None = None,
        new_capture: NewCapture | None = None,
    ) -> None:
        """Size all buffers without allocating them.

        Args:
            loaded: weights of this rank, with the model's configuration.
            device: device to compute on.
            dtype: type of activations and unquantised matmuls.
            limits: limits of a step, which determine the size of every buffer.
            pipeline_rank: splits steps and communicates with the other ranks of the group. None if
                one rank computes alone.
            wrap: returns a replacement for each linear layer of the model.
            wrap_experts: returns a replacement for the linear layers of experts.
            kv_type: dtype of stored keys and values, unless they are stored as float8. None to
                store them as `dtype`.
            new_capture: starts capturing decode steps as CUDA graphs. Graphs require a single rank
                that computes only with kernels. The model must have no experts, because the host
                may have to read how many rows each expert has.
        """
        self._loaded = loaded
        self._device = device
        self._dtype = dtype
        self._kv_type = kv_type or dtype
        self._rank = pipeline_rank or PipelineRank()
        self._wrap = wrap
        self._wrap_experts = wrap_experts

        is_paged = can_page(loaded.model_config, limits.block_tokens, device)
        is_plain = wrap is None and wrap_experts is None and self._rank.is_alone
        uses_library = is_plain and not library_refusal(loaded, limits, device, dtype)
        self._limits = replace(
            limits,
            fused=is_paged and not limits.deterministic,
            library_threads=torch.get_num_threads() if uses_library else 0,
            max_slice_tokens=SLICE_TOKENS[device.type],
        )

        self._step_layout = step_arena(loaded.model_config, self._limits)
        sampler = sampler_arena(loaded.model_config, self._limits)
        self._sampler_layout = sampler if self._rank.samples else ArenaLayout(())

        # Set by `allocate_arena`. The library computes with `_native`, torch with `_model`.
        self._model: Decoder | None = None
        self._native: NativeDecoder | None = None
        self._arena: dict[str, torch.Tensor] = {}
        self._unpacked = torch.empty(0, dtype=torch.uint8)
        self._sampling: dict[str, torch.Tensor] = {}
        self._kv_scales: list[HeadScales] | None = None

        # Set by `allocate_kv`.
        self._pool: KVPool | None = None
        self._host: HostPool | None = None
        self._state_pool: StatePool | None = None

        # State that is carried from step to step.
        self._counts = PenaltyCounts(limits.max_rows)
        self._tables = BlockTables(limits.max_rows)
        self._scored: list[PromptLogprobs] = []
        self._hidden: torch.Tensor | None = None
        """Hidden states of the last micro-batch, as long as its prompt tokens are to be scored."""
        self._first_rows: dict[str, int] = {}
        """Row of `_hidden` with each chunk's first token, by request id."""
        self._graphs: StepGraphs | None = None
        takes_graphs = self._limits.fused and self._rank.is_alone and not self.model_config.experts
        if new_capture is not None and takes_graphs:
            most_blocks = -(-limits.max_model_len // limits.block_tokens)
            self._graphs = StepGraphs(new_capture, self._limits.context_blocks(most_blocks))

    @property
    def num_graphs(self) -> int:
        """Number of decode steps captured as CUDA graphs."""
        return len(self._graphs) if self._graphs is not None else 0

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of this rank's part of the model."""
        return self._loaded.model_config

    @property
    def weights_bytes(self) -> int:
        """Size of this rank's weights in bytes."""
        return self._loaded.nbytes

    @property
    def step_arena_bytes(self) -> int:
        """Size in bytes of the arena for activations, gathers and quantised matmuls."""
        return self._step_layout.nbytes + self._scratch_linear_bytes

    @property
    def sampler_arena_bytes(self) -> int:
        """Size in bytes of the arena for logits."""
        return self._sampler_layout.nbytes

    @property
    def kv_block_bytes(self) -> int:
        """Size of one KV block in bytes, summed over all layers."""
        itemsize = 1 if self._limits.fp8_kv else self._kv_type.itemsize
        limits = self._limits
        return kv_block_bytes(
            self.model_config, limits.block_tokens, itemsize, windowed=limits.windowed
        )

    @property
    def state_pool_bytes(self) -> int:
        """Number of bytes that `allocate_kv` allocates in addition to KV blocks.

        They hold the convolution states, and an extra block that is needed to recompute these
        states. The number is 0 for models without convolutions.
        """
        state_bytes = self.model_config.state_bytes(self._dtype.itemsize)
        return state_slots(self._limits.max_rows) * state_bytes + self._scratch_bytes

    def allocated_bytes(self) -> dict[str, int]:
        """Return the number of bytes actually allocated for each reservation, by name."""
        return {
            "weights": storage_bytes(self._loaded.tensors.values(), ALIGNMENT),
            "step_arena": storage_bytes([*self._arena.values(), self._unpacked]),
            "sampler_arena": storage_bytes(self._sampling.values()),
            "kv_pool": storage_bytes([self._kv.blocks]) - self._scratch_bytes,
            "state_pool": storage_bytes([self._states.states]) + self._scratch_bytes,
        }

    def allocate_arena(self) -> None:
        """Allocate both arenas, touch every page, and build the decoder."""
        with torch.inference_mode():
            self._arena = allocate(self._step_layout, self._dtype, self._device)
            self._sampling = allocate(self._sampler_layout, self._dtype, self._device)
            size = self._scratch_linear_bytes
            # empty and zero_, because zeros would leave the pages unbacked until first use.
            self._unpacked = torch.empty(size, dtype=torch.uint8, device=self._device).zero_()

            if self._limits.library_threads:
                self._native = NativeDecoder(self._loaded, self._limits, self._arena)
            else:
                self._model = self._build()

            if self._limits.fp8_kv:
                decoder = self._native or self.decoder
                self._kv_scales = decoder.kv_scales()

    def _build(self) -> Decoder:
        """Build the decoder that computes with torch."""
        parts = (self.model_config, self._limits, self._arena)
        backend: AttentionBackend
        if self._limits.fused:
            backend = PagedBackend(self.model_config, self._arena["partials"])
        else:
            kind = DeterministicBackend if self._limits.deterministic else DefaultBackend
            backend = kind(*parts)

        weights = model_weights(
            self._loaded, self._limits, backend, self._dtype, self._unpacked, self._rank
        )
        if self._wrap is not None:
            wrap = self._wrap
            linear = weights.linear
            weights = replace(weights, linear=lambda name: wrap(name, linear(name)))
        if self._wrap_experts is not None:
            wrap_experts = self._wrap_experts
            experts = weights.experts
            weights = replace(weights, experts=lambda name: wrap_experts(name, experts(name)))

        return Decoder(weights, *parts, backend)

    def allocate_kv(
        self, num_blocks: int, num_host_slots: int = 0, shared: torch.Tensor | None = None
    ) -> None:
        """Allocate the KV pool and the host slots, and touch every page.

        Args:
            num_blocks: number of blocks in the KV pool, with IDs from 0.
            num_host_slots: number of host slots to allocate, with IDs from 0.
            shared: memory of the host tier, whose slots are numbered after the allocated ones. See
                `HostPool`.
        """
        # The old pool is freed before its successor is allocated, so that memory never holds both.
        # Graphs hold pointers into the old pool, so they go with it.
        if self._graphs is not None:
            self._graphs.clear()
        self._pool = self._host = self._state_pool = None

        with torch.inference_mode():
            self._pool = KVPool(
                self.model_config,
                num_blocks,
                self._limits.block_tokens,
                self._kv_type,
                self._device,
                self._kv_scales,
                windowed=self._limits.windowed,
            )
            self._host = HostPool(self._pool, num_host_slots, shared)

            self._state_pool = StatePool(
                self.model_config,
                state_slots(self._limits.max_rows),
                self._dtype,
                self._device,
            )
            if self._native is not None:
                self._native.use_memory(self._pool.layers, self._state_pool.layers)

    def verify_row_invariance(self) -> str | None:
        """Check on this machine that a row's results do not depend on the other rows of its batch.

        This batch invariance is checked only if the settings guarantee it. The check overwrites the
        arena, so call this method before `warm_up`.

        Returns:
            A description of the fault, or None if the check passes.
        """
        if self._native is not None:
            return None
        with torch.inference_mode():
            return self.decoder.verify_row_invariance()

    def warm_up(self) -> None:
        """Run the largest steps, so that libraries allocate all lazily created buffers now.

        The steps overwrite the KV pool, so call this method before the first request.
        """
        if self._native is None:
            self._run_few_layers(shape_plans(self._limits, self._kv.num_blocks))
        self.run_largest()

    def measure_context_seconds(self) -> float:
        """Measure how many seconds each additional token of context adds to a decode step.

        The steps overwrite the KV pool. All ranks of a group must measure together. The result is 0
        if the difference is too small to measure.
        """
        limits = self._limits
        rows = min(_MEASURED_ROWS, limits.max_rows, limits.max_tokens)
        longest = min(limits.max_gather_tokens // rows, limits.max_model_len)

        # The faster of two runs counts.
        short = min(self._decode_seconds(rows, 1) for _ in range(2))
        long = min(self._decode_seconds(rows, longest) for _ in range(2))
        return max(0.0, long - short) / max(1, rows * (longest - 1))

    def measure_prompt_seconds(self, tokens: int, start: int = 0) -> float:
        """Measure how many seconds a step takes to compute `tokens` prompt tokens.

        `start` is the position of the first token in its sequence.

        The steps overwrite the KV pool. All ranks of a group must measure together.
        """
        chunk = make_chunk(0, tokens, start, self._limits, self._kv.num_blocks, None)
        # Tokens differ because equal tokens would choose the same experts.
        vocab = self.model_config.vocab
        token_ids = [_TOKEN_STRIDE * index % vocab for index in range(tokens)]
        chunk = msgspec.structs.replace(chunk, token_ids=token_ids)
        return min(self._step_seconds([chunk]) for _ in range(2))

    def derived(self) -> dict[str, torch.Tensor]:
        """Return the constant tensors that were computed from the model at startup, by name.

        Examples are rotary tables and KV scales. No step modifies these tensors.
        """
        tensors = {name: self._arena[name] for name in _CONSTANTS if name in self._arena}
        for index, scales in enumerate(self._kv_scales or ()):
            tensors[f"kv_scales.{index}"] = scales.values
        if self._native is not None:
            tensors |= self._native.vectors()
        return tensors

    @torch.inference_mode()
    def check_derived(self) -> str:
        """Recompute rotary tables and KV scales, and compare them with those in memory.

        The check overwrites the arena's activations.

        Returns:
            The name of a tensor that differs, or an empty string if all match.
        """
        decoder = self._native or self.decoder
        if self._kv_scales is not None:
            again = decoder.kv_scales()
            for index, (one, other) in enumerate(zip(self._kv_scales, again, strict=True)):
                if not torch.equal(one.values, other.values):
                    return f"kv_scales.{index}"
        return decoder.check_tables()

    @torch.inference_mode()
    def probe(self) -> Iterator[torch.Tensor]:
        """Run the probe (a few fixed steps) and yield its logits [rows, vocab].

        Logits are valid until the next step is computed. The steps overwrite the KV pool. All ranks
        of a group compute the probe together, and ranks that do not sample yield nothing.
        """
        for plan in self.probe_plans():
            for _, logits in self.logits(plan):
                yield logits

    def probe_plans(self) -> list[StepPlan]:
        """Return the step plans of the probe."""
        return probe_plans(self._limits, self._kv.num_blocks, self.model_config.vocab)

    def _decode_seconds(self, rows: int, context: int) -> float:
        """Measure how many seconds a step takes for `rows` decodes with this context length."""
        return self._step_seconds(
            [
                make_chunk(row, 1, context - 1, self._limits, self._kv.num_blocks, GREEDY)
                for row in range(rows)
            ]
        )

    def _step_seconds(self, chunks: list[Chunk]) -> float:
        started = time.perf_counter()
        self.execute(StepPlan(chunks))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def run_largest(self) -> None:
        """Capture graphs and run the steps that take the most memory.

        This part of `warm_up` is repeated for each new KV pool.
        """
        # Graphs come first, since capturing frees the cached memory that larger steps leave.
        self._capture_graphs()
        vocab = self.model_config.vocab
        self._run_few_layers(largest_plans(self._limits, self._kv.num_blocks, vocab))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a step, and return the tokens that it samples, in plan order.

        Every rank of a group computes its part, but only the sampling rank returns tokens.
        """
        if not plan.moves.prefetch:
            # A pending prefetch may belong to an earlier plan that was never executed.
            self._finish_prefetch()

        try:
            parts = self._computed(plan)
            tokens = [token for part in parts for token in self._sample(*part)]
        finally:
            self._finish_prefetch()

        return in_plan_order(plan, tokens) if tokens else []

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        """Return what steps have scored since the last call, in their order.

        Only the sampling rank scores. A step that was computed twice is in the list twice.
        """
        scored = self._scored
        self._scored = []
        return scored

    def _sample(
        self, chunks: list[Chunk], logits: torch.Tensor, likeliest: list[int] | None
    ) -> list[SampledToken]:
        with ranges("sample"):
            team = self._native.team if self._native is not None else None
            return sample(logits, chunks, self._counts, likeliest, team, self._as_computed(logits))

    def _as_computed(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the logits as the model computed them, in its own dtype.

        `logits` is their float32 copy, which has the same shape. Return None if the C++ library
        computes the model, because its logits are float32 already.
        """
        if self._native is not None:
            return None
        return shaped(self._sampling["computed"], *logits.shape)

    def _score(self, plan: StepPlan) -> None:
        """Score the targets of the micro-batch whose hidden states were just computed."""
        hidden = self._hidden
        self._hidden = None
        if hidden is None:
            return

        with ranges("score"):
            for chunk in plan.chunks:
                if positions := chunk.scored_range():
                    self._scored.append(self._scored_chunk(chunk, positions, hidden))

    def _scored_chunk(self, chunk: Chunk, positions: range, hidden: torch.Tensor) -> PromptLogprobs:
        """Compute the log-probabilities of a chunk's targets at these positions.

        The logits of at most `max_rows` rows are computed at a time, in the sampler's buffer.
        """
        targets = chunk.targets
        assert targets is not None, "a chunk without targets has no positions to score"
        parts: list[ScoredRows] = []
        for start in range(positions.start, positions.stop, self._limits.max_rows):
            stop = min(start + self._limits.max_rows, positions.stop)
            row = self._first_rows[chunk.request_id] + start - 1 - chunk.start
            logits = self._logits_of(hidden, range(row, row + stop - start))
            parts.append(
                score_rows(
                    logits,
                    targets.token_ids[start - targets.start : stop - targets.start],
                    targets.num_alternatives,
                    self._native.team if self._native is not None else None,
                    self._as_computed(logits),
                )
            )
        return as_message(chunk.request_id, positions.start, parts)

    def _logits_of(self, hidden: torch.Tensor, rows: range) -> torch.Tensor:
        """Compute the logits of some rows of hidden states, in the sampler's buffer."""
        logits = shaped(self._sampling["logits"], len(rows), self.model_config.vocab)
        if self._native is not None:
            self._native.logits(rows, logits)
            return logits
        computed = self._computed_logits(len(rows))
        self.decoder.logits_of(hidden[rows.start : rows.stop], computed)
        return logits.copy_(computed[: len(rows)])

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Iterator[tuple[list[Chunk], torch.Tensor]]:
        """Compute a step. For each micro-batch, yield the sampled chunks and their logits.

        Logits [rows, vocab] are valid until the next micro-batch is computed. Ranks that do not
        sample yield nothing.
        """
        for chunks, logits, _ in self._computed(plan):
            yield chunks, logits

    def _computed(self, plan: StepPlan) -> Iterator[_Computed]:
        """Compute a step's micro-batches, and yield the logits from which this rank samples.

        Micro-batches in which this rank samples nothing are left out.
        """
        self._clear_begun_blocks(plan)
        parts = self._rank.split(plan)
        transfers = self._rank.transfers([part.num_tokens for part in parts])
        for index, part in enumerate(parts):
            computed = self._run(part, transfers, index)
            if computed is not None:
                yield computed
            # Behind the sampled rows, whose buffer this overwrites.
            self._score(part)
        transfers.finish()

    @torch.inference_mode()
    def hidden(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step without sampling. This rank must hold the whole model.

        Returns:
            Hidden states of the batch's rows after the last layer. They are valid until the next
            step.
        """
        self._clear_begun_blocks(plan)
        if self._native is not None:
            self._run_native(plan)
            return self._native.hidden(plan.num_tokens)
        return self._forward(self._batch(plan), self._rank.transfers([plan.num_tokens]), 0)

    @torch.inference_mode()
    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor, first: int = 0) -> None:
        """Compute the logits for rows of hidden states, and write them to `out`.

        Args:
            hidden: the latest result of the method `hidden`.
            out: receives the logits [rows, vocab]. Its size determines the number of rows.
            first: index of the first row.
        """
        rows = range(first, first + len(out))
        if self._native is not None:
            self._native.logits(list(rows), out)
        else:
            self.decoder.logits_of(hidden[first : rows.stop], out)

    @torch.inference_mode()
    def move(self, moves: Moves) -> None:
        """Copy whole KV blocks, in all layers, as listed in `moves`.

        Blocks are copied to the host, then from the host, then within the device. No memory is
        allocated. Later steps see the copies, except that prefetched blocks may not arrive until
        the end of the next step.
        """
        assert self._host is not None, "allocate_kv comes first"
        self._finish_prefetch()
        with ranges("transfer"):
            move(moves, self._kv, self._host)
        if moves.swap_out or moves.swap_in:
            # Other processes read and write these slots as soon as the step is done.
            self.sync()

    @torch.inference_mode()
    def measure_swap(self) -> float:
        """Measure how many seconds it takes to copy one KV block to the host or back.

        The host must have at least one slot.
        """
        assert self._host is not None, "allocate_kv comes first"
        return self._host.measure()

    def sync(self) -> None:
        """Wait until the device has finished all launched work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def swap_seconds(self) -> float:
        """Seconds spent so far on copies to the host and back."""
        return self._host.timer.seconds if self._host else 0.0

    def _finish_prefetch(self) -> None:
        if self._host is not None:
            self._host.finish_prefetch()

    @property
    def num_host_slots(self) -> int:
        """Number of KV blocks that host memory can hold."""
        return self._host.num_slots if self._host else 0

    @property
    def decoder(self) -> Decoder:
        """The decoder that computes with torch."""
        assert self._model is not None, "allocate_arena comes first"
        return self._model

    @property
    def _kv(self) -> KVPool:
        assert self._pool is not None, "allocate_kv comes first"
        return self._pool

    @property
    def _states(self) -> StatePool:
        assert self._state_pool is not None, "allocate_kv comes first"
        return self._state_pool

    @property
    def _scratch_linear_bytes(self) -> int:
        if self._limits.library_threads:
            return 0
        return linear_scratch_bytes(self._loaded, self._limits, self._device)

    @property
    def _scratch_bytes(self) -> int:
        return scratch_blocks(self.model_config) * self.kv_block_bytes

    @torch.inference_mode()
    def _run_few_layers(self, plans: Iterable[StepPlan]) -> None:
        # One layer of each kind is enough: layers of one kind have the same shapes, and each frees
        # its temporaries before the next one runs.
        layers = [0] if self._native is not None else self.decoder.one_of_each_kind()
        for plan in plans:
            transfers = self._rank.transfers([plan.num_tokens])
            computed = self._run(plan, transfers, 0, layers)
            if computed is not None:
                chunks, logits, _ = computed
                sample(logits, chunks, computed=self._as_computed(logits))
            self._score(plan)
            transfers.finish()
        self.take_prompt_logprobs()

    def _clear_begun_blocks(self, plan: StepPlan) -> None:
        for block in begun_blocks(plan, self._limits.block_tokens):
            self._kv.clear(block)

    def _batch(self, plan: StepPlan, bucket: Bucket | None = None) -> StepBatch:
        """Lay out the rows of a step.

        `bucket` rounds up the number of context blocks. See `build_batch`.
        """
        limits = self._limits
        if bucket is None:
            graphs = None if plan.prompts else self._graphs
            bucket = limits.context_blocks if graphs is None else graphs.width

        return build_batch(
            plan,
            limits.block_tokens,
            bucket,
            padded_decodes=limits.product_rows if limits.fused else None,
            conv_kernel=self.model_config.conv_kernel if self.model_config.num_conv_layers else 0,
            scratch_block=self._kv.scratch_block,
            windowed=limits.windowed,
            tables=self._tables,
        )

    def _forward(
        self,
        batch: StepBatch,
        transfers: StepTransfers,
        index: int,
        layers: list[int] | None = None,
    ) -> torch.Tensor:
        """Compute micro-batch `index` of a step up to this rank's last layer."""
        caches = self._kv.layers
        states = self._states.layers
        received = transfers.receive(index)
        with ranges("prefill" if len(batch.rows.prompts.counts) else "decode"):
            return self.decoder.forward(batch, caches, states, received, layers)

    def _run(
        self, plan: StepPlan, transfers: StepTransfers, index: int, layers: list[int] | None = None
    ) -> _Computed | None:
        """Compute micro-batch `index` of a step. Return its sampled chunks and their logits.

        Return None if this rank samples nothing in the micro-batch.
        """
        if self._native is not None:
            return self._run_native(plan, range(layers[0], layers[-1] + 1) if layers else None)

        batch = self._batch(plan)
        if layers is None and self._replay(batch):
            return self._sampled(batch)

        hidden = self._forward(batch, transfers, index, layers)
        if _has_targets(plan) and self._rank.samples:
            self._hidden = hidden
            self._first_rows = batch.first_rows
        if transfers.send(index, hidden) or not batch.sampled or not self._rank.samples:
            return None

        self.decoder.logits(hidden, self._computed_logits(len(batch.sampled)))
        return self._sampled(batch)

    def _replay(self, batch: StepBatch) -> bool:
        """Replay the graph that computes a batch's logits. Return False if there is none."""
        replay = self._graphs.find(batch) if self._graphs else None
        if replay is None:
            return False

        self.decoder.prepare(batch)
        with ranges("decode"):
            replay()
        return True

    def _computed_logits(self, rows: int) -> torch.Tensor:
        """Return the buffer for the model's logits, with `rows` rows and any padding rows."""
        padded = self._limits.product_rows(rows)
        return shaped(self._sampling["computed"], padded, self.model_config.vocab)

    def _sampled(self, batch: StepBatch) -> _Computed:
        """Return the sampled chunks of a batch and their logits in float32."""
        rows = len(batch.sampled)
        logits = shaped(self._sampling["logits"], rows, self.model_config.vocab)
        return batch.sampled, logits.copy_(self._computed_logits(rows)[:rows]), None

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Capture a decode step for each row count and block table width, largest first."""
        if self._graphs is None:
            return

        self._graphs.clear()
        for plan in decode_plans(self._limits, self._kv.num_blocks):
            for width in reversed(self._graphs.widths):
                batch = self._batch(plan, partial(max, width))
                action = self._decode_action(batch)
                # Run once before, since compiling and loading kernels cannot be captured.
                action()
                self._graphs.capture(batch, action)

    def _decode_action(self, batch: StepBatch) -> Action:
        """Prepare a decode step, and return a function that computes it up to its logits.

        The function can be captured as a CUDA graph. To use it for a later step of the same shape,
        prepare that step with the decoder first.
        """
        step = self.decoder.prepare(batch)
        caches = self._kv.layers
        states = self._states.layers
        computed = self._computed_logits(len(batch.sampled))

        def action() -> None:
            hidden = self.decoder.compute(step, caches, states)
            self.decoder.logits(hidden, computed)

        return action

    def _run_native(self, plan: StepPlan, layers: range | None = None) -> _Computed | None:
        """Compute a step with the C++ library. Return its sampled chunks and their logits.

        Return None if no chunk is sampled.
        """
        assert self._native is not None, "not the library's"
        sampled = plan.sampled_parts()
        logits = shaped(self._sampling["logits"], len(sampled), self.model_config.vocab)
        with ranges("prefill" if plan.prompts else "decode"):
            likeliest = self._native.run(plan.chunks, logits, layers)
        if _has_targets(plan):
            self._hidden = self._native.hidden(plan.num_tokens)
            sizes = [len(chunk.token_ids) for chunk in plan.chunks]
            rows = accumulate(sizes, initial=0)
            self._first_rows = {
                chunk.request_id: row for chunk, row in zip(plan.chunks, rows, strict=False)
            }
        return (sampled, logits, likeliest) if sampled else None


def _has_targets(plan: StepPlan) -> bool:
    return any(chunk.targets is not None for chunk in plan.chunks)
