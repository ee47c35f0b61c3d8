"""Executes step plans on a device."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ullage_engine.core.batch import begun_blocks, build_batch
from ullage_engine.core.matrices import matrix_scratch_bytes, model_weights
from ullage_engine.core.plan import Moves, SampledToken, StepPlan
from ullage_engine.core.sampler import sample
from ullage_engine.core.warm_up import largest_plans, shape_plans
from ullage_engine.kernels.buffers import allocate, shaped, storage_bytes
from ullage_engine.kernels.float8 import HeadScales
from ullage_engine.kernels.pool import (
    HostPool,
    KVPool,
    StatePool,
    kv_block_bytes,
    move,
    scratch_blocks,
)
from ullage_engine.layers.compute import Compute, DeterministicCompute, FastCompute
from ullage_engine.layers.paged_compute import PagedCompute, can_page
from ullage_engine.memory.arena import (
    ArenaLayout,
    StepLimits,
    gather_tokens,
    sampler_arena,
    step_arena,
)
from ullage_engine.memory.predictor import state_pool_bytes, state_slots
from ullage_engine.models.decoder import Decoder
from ullage_engine.models.dtypes import KvDtype, kv_itemsize
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.parallel.microbatch import in_plan_order
from ullage_engine.parallel.neighbours import Alone, Neighbours, Transfers
from ullage_engine.weights.store import ALIGNMENT, LoadedModel


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Limits that size every buffer of the runner."""

    max_step_tokens: int
    """Most tokens in one step, prompt chunks and decodes together."""
    max_sequences: int
    """Most chunks in one step."""
    max_model_len: int
    """Longest sequence, tokens."""
    decode_max_batch_tokens: int
    """Tokens of context whose KV one pass of decode attention gathers."""
    block_tokens: int = 16
    deterministic: bool = False
    """A request's tokens do not depend on the steps that they are computed in."""
    kv_dtype: KvDtype = "auto"


class ModelRunner:
    """Owns the KV pool and every buffer of a step; one thread uses it.

    Order of use: `allocate_arena`, `allocate_kv`, `warm_up`, then `execute`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        device: torch.device,
        dtype: torch.dtype,
        settings: RunnerSettings,
        neighbours: Neighbours = Alone(),  # noqa: B008 - immutable
    ) -> None:
        self._loaded = loaded
        self._device = device
        self._dtype = dtype
        self._settings = settings
        self._neighbours = neighbours
        limits = step_limits(settings, dtype.itemsize)
        is_paged = can_page(loaded.geometry, settings.block_tokens, device)
        self._limits = replace(limits, fused=is_paged and not settings.deterministic)
        self._step_layout = step_arena(loaded.geometry, self._limits)
        sampler = sampler_arena(loaded.geometry, self._limits)
        self._sampler_layout = sampler if neighbours.samples else ArenaLayout(())
        self._model: Decoder | None = None
        self._arena: dict[str, torch.Tensor] = {}
        self._unpacked = torch.empty(0, dtype=torch.uint8)
        self._sampling: dict[str, torch.Tensor] = {}
        self._kv_scales: list[HeadScales] | None = None
        self._pool: KVPool | None = None
        self._host: HostPool | None = None
        self._state_pool: StatePool | None = None

    @property
    def geometry(self) -> ModelGeometry:
        return self._loaded.geometry

    @property
    def weights_bytes(self) -> int:
        return self._loaded.nbytes

    @property
    def step_arena_bytes(self) -> int:
        """Bytes that `allocate_arena` takes for activations, gathers and quantised products."""
        return self._step_layout.nbytes + matrix_scratch_bytes(self._loaded, self._limits)

    @property
    def sampler_arena_bytes(self) -> int:
        """Bytes that `allocate_arena` takes for logits."""
        return self._sampler_layout.nbytes

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        settings = self._settings
        itemsize = kv_itemsize(settings.kv_dtype, self._dtype)
        return kv_block_bytes(self.geometry, settings.block_tokens, itemsize)

    @property
    def state_pool_bytes(self) -> int:
        """Bytes that `allocate_kv` takes beside KV blocks: convolution states, and the block that
        rebuilding them needs; 0 for models without convolutions."""
        states = self.geometry.state_bytes(self._dtype.itemsize)
        return state_pool_bytes(states, self._settings.max_sequences) + self._scratch_bytes

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes that were really allocated, by name of the reservation that they belong to."""
        return {
            "weights": storage_bytes(self._loaded.tensors.values(), ALIGNMENT),
            "step_arena": storage_bytes([*self._arena.values(), self._unpacked]),
            "sampler_arena": storage_bytes(self._sampling.values()),
            "kv_pool": storage_bytes([self._kv.blocks]) - self._scratch_bytes,
            "state_pool": storage_bytes([self._states.states]) + self._scratch_bytes,
        }

    def allocate_arena(self) -> None:
        """Allocates both arenas, every page touched."""
        with torch.inference_mode():
            self._arena = allocate(self._step_layout, self._dtype, self._device)
            self._sampling = allocate(self._sampler_layout, self._dtype, self._device)
            self._unpacked = self._new_unpacked()
            self._model = self._build()
            if self._limits.fp8_kv:
                self._kv_scales = self._model.kv_scales()

    def _build(self) -> Decoder:
        parts, near = (self.geometry, self._limits, self._arena), self._neighbours
        compute = self._compute()
        plain = model_weights(self._loaded, self._limits, compute, self._dtype, self._unpacked)
        weights = replace(
            plain, matrix=lambda name: near.matrix(name, plain.matrix(name)), reduce=near.reduce
        )
        return Decoder(weights, *parts, compute)

    def _compute(self) -> Compute:
        parts = (self.geometry, self._limits, self._arena)
        if self._limits.fused:
            return PagedCompute(self.geometry, self._arena["partials"])
        return (DeterministicCompute if self._limits.deterministic else FastCompute)(*parts)

    def allocate_kv(self, num_blocks: int, num_host_slots: int = 0) -> None:
        """Allocates the KV pool and the host's slots, every page touched; both count from 0."""
        # A pool that is replaced goes before its successor comes.
        self._pool = self._host = self._state_pool = None
        with torch.inference_mode():
            self._pool = KVPool(
                self.geometry,
                num_blocks,
                self._settings.block_tokens,
                self._dtype,
                self._device,
                self._kv_scales,
            )
            self._host = HostPool(self._pool, num_host_slots)
            self._state_pool = StatePool(
                self.geometry, state_slots(self._settings.max_sequences), self._dtype, self._device
            )

    def prove(self) -> str | None:
        """Makes sure that this machine computes as the settings promise; None, or what is wrong.

        Overwrites the arena; call it before `warm_up`.
        """
        with torch.inference_mode():
            return self._loaded_model.prove()

    def warm_up(self) -> None:
        """Runs the largest steps, so that every buffer libraries make lazily exists.

        Overwrites the KV pool; call it before the first request.
        """
        self._run_few_layers(shape_plans(self._limits, self._kv.num_blocks))
        self.run_largest()

    def run_largest(self) -> None:
        """Runs only the steps that take the most memory; the part of `warm_up` that is repeated."""
        self._run_few_layers(largest_plans(self._limits, self._kv.num_blocks))

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Computes a step; one token for each chunk with `sampling`, in the plan's order.

        Of several ranks every one computes its part, and the tokens are on the one that samples.
        """
        with torch.inference_mode():
            for block in begun_blocks(plan, self._limits.block_tokens):
                self._kv.clear(block)
        parts = self._neighbours.split(plan)
        transfers = self._neighbours.transfers([part.num_tokens for part in parts])
        tokens = [
            token for index, part in enumerate(parts) for token in self._run(part, transfers, index)
        ]
        transfers.finish()
        return in_plan_order(plan, tokens) if tokens and len(parts) > 1 else tokens

    @torch.inference_mode()
    def move(self, moves: Moves) -> None:
        """Copies whole blocks over all layers: out to the host, in from it, then on the device.

        Allocates nothing, and steps executed later see the result.
        """
        assert self._host is not None, "allocate_kv comes first"
        move(moves, self._kv, self._host)

    @property
    def num_host_slots(self) -> int:
        """Blocks that host memory can hold."""
        return self._host.num_slots if self._host else 0

    def _new_unpacked(self) -> torch.Tensor:
        size = matrix_scratch_bytes(self._loaded, self._limits)
        # empty and zero_, because zeros would leave the pages unbacked until first use.
        return torch.empty(size, dtype=torch.uint8, device=self._device).zero_()

    @property
    def _loaded_model(self) -> Decoder:
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
    def _scratch_bytes(self) -> int:
        return scratch_blocks(self.geometry) * self.kv_block_bytes

    def _run_few_layers(self, plans: Iterable[StepPlan]) -> None:
        # Layers of one kind have the same shapes, and each frees what it took before the next.
        layers = self._loaded_model.one_of_each_kind()
        for plan in plans:
            transfers = self._neighbours.transfers([plan.num_tokens])
            self._run(plan, transfers, 0, layers)
            transfers.finish()

    @torch.inference_mode()
    def _run(
        self, plan: StepPlan, transfers: Transfers, index: int, layers: list[int] | None = None
    ) -> list[SampledToken]:
        """One micro-batch of a step, the index-th."""
        limits, model = self._limits, self._loaded_model
        batch = build_batch(
            plan,
            limits.block_tokens,
            limits.max_gather_tokens,
            limits.context_blocks,
            conv_kernel=self.geometry.conv_kernel if self.geometry.num_conv_layers else 0,
            scratch_block=self._kv.scratch_block,
        )
        caches, states = self._kv.layers, self._states.layers
        hidden = model.forward(batch, caches, states, transfers.receive(index), layers)
        if transfers.send(index, hidden) or not batch.sampled or not self._neighbours.samples:
            return []
        rows, vocab = len(batch.sampled), self.geometry.vocab
        computed = shaped(self._sampling["computed"], limits.product_rows(rows), vocab)
        model.logits(hidden, batch.sampled_rows, computed)
        logits = shaped(self._sampling["logits"], rows, vocab).copy_(computed[:rows])
        return sample(logits, batch.sampled)


def step_limits(settings: RunnerSettings, itemsize: int) -> StepLimits:
    """What the settings mean for the largest step."""
    return StepLimits(
        max_tokens=settings.max_step_tokens,
        max_rows=settings.max_sequences,
        max_model_len=settings.max_model_len,
        max_gather_tokens=gather_tokens(
            settings.max_model_len,
            settings.decode_max_batch_tokens,
            settings.block_tokens,
            settings.deterministic,
        ),
        block_tokens=settings.block_tokens,
        itemsize=itemsize,
        deterministic=settings.deterministic,
        fp8_kv=settings.kv_dtype == "fp8",
    )
