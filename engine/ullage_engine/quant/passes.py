"""Texts through a model without an engine: for calibration and for measuring quality."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ullage_engine.core.batch import build_batch
from ullage_engine.core.matrices import matrix_scratch_bytes, model_weights
from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.kernels.buffers import allocate
from ullage_engine.kernels.pool import KVPool, StatePool
from ullage_engine.layers.compute import FastCompute
from ullage_engine.layers.matrix import Matrix
from ullage_engine.memory.arena import BLOCK_TOKENS, StepLimits, gather_tokens, step_arena
from ullage_engine.models.decoder import Decoder
from ullage_engine.models.dtypes import KvDtype
from ullage_engine.weights.store import LoadedModel

Wrap = Callable[[str, Matrix], Matrix]


class TextPass:
    """One window of text at a time, each without knowledge of the others."""

    def __init__(
        self,
        loaded: LoadedModel,
        dtype: torch.dtype,
        window: int,
        wrap: Wrap | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        """`wrap` may put something between the model and each of its matrices."""
        device = next(iter(loaded.tensors.values())).device
        self._geometry, self._limits = loaded.geometry, _limits(window, dtype, kv_dtype)
        arena = allocate(step_arena(loaded.geometry, self._limits), dtype, device)
        parts = (loaded.geometry, self._limits, arena)
        compute = FastCompute(*parts)
        size = matrix_scratch_bytes(loaded, self._limits)
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
        weights = model_weights(loaded, self._limits, compute, dtype, scratch)
        if wrap is not None:
            make = weights.matrix
            weights = replace(weights, matrix=lambda name: wrap(name, make(name)))
        self._decoder = Decoder(weights, *parts, compute)
        blocks = -(-window // BLOCK_TOKENS)
        scales = self._decoder.kv_scales() if self._limits.fp8_kv else None
        self._pool = KVPool(loaded.geometry, blocks, BLOCK_TOKENS, dtype, device, scales)
        self._states = StatePool(loaded.geometry, 1, dtype, device)

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states after the last layer; they live until the next call."""
        blocks = list(range(-(-len(tokens) // BLOCK_TOKENS)))
        for block in blocks:
            self._pool.clear(block)
        chunk = Chunk(
            request_id="text",
            token_ids=tokens,
            start=0,
            block_ids=blocks,
            sampling=None,
            history=tokens,
            num_prompt_tokens=len(tokens),
        )
        limits = self._limits
        batch = build_batch(
            StepPlan([chunk]),
            BLOCK_TOKENS,
            limits.max_gather_tokens,
            limits.context_blocks,
            self._geometry.conv_kernel,
        )
        return self._decoder.forward(batch, self._pool.layers, self._states.layers)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of what follows each token, [tokens, vocab]."""
        hidden = self.hidden(tokens)
        out = hidden.new_empty(len(tokens), self._geometry.vocab)
        self._decoder.logits(hidden, list(range(len(tokens))), out)
        return out


def _limits(window: int, dtype: torch.dtype, kv_dtype: KvDtype) -> StepLimits:
    return StepLimits(
        max_tokens=window,
        max_rows=1,
        max_model_len=window,
        max_gather_tokens=gather_tokens(window, window, BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        itemsize=dtype.itemsize,
        fp8_kv=kv_dtype == "fp8",
    )
