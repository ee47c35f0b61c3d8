"""Executes step plans on a device."""

from dataclasses import dataclass

import torch

from ullage_engine.core.plan import SampledToken, StepPlan
from ullage_engine.weights.store import LoadedModel


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
    ) -> None:
        self._settings = settings

    @property
    def geometry(self) -> object:
        raise NotImplementedError

    @property
    def weights_bytes(self) -> int:
        raise NotImplementedError

    @property
    def step_arena_bytes(self) -> int:
        """Bytes that `allocate_arena` takes for activations and gathers."""
        raise NotImplementedError

    @property
    def sampler_arena_bytes(self) -> int:
        """Bytes that `allocate_arena` takes for logits and sampling."""
        raise NotImplementedError

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        raise NotImplementedError

    def allocate_arena(self) -> None:
        """Allocates both arenas, every page touched."""
        raise NotImplementedError

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocates the KV pool, every page touched; blocks are numbered from 0."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Runs the largest steps, so that every buffer libraries make lazily exists."""
        raise NotImplementedError

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Computes a step; one token for each chunk with `sampling`, in the plan's order."""
        raise NotImplementedError
