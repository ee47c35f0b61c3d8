"""The operations of a layer that exist twice: fastest, and with rows independent of each other."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ullage_engine.core.batch import StepBatch
from ullage_engine.kernels.attention import (
    DecodeAttention,
    PrefillAttention,
    Workspace,
    fill_mask,
)
from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.kernels.products import RowProducts, fill_random
from ullage_engine.kernels.split import (
    SplitWorkspace,
    fill_span_mask,
    split_decodes,
    split_prefill,
)
from ullage_engine.layers.matrix import Matrix, PlainMatrix, RowMatrix
from ullage_engine.memory.arena import StepLimits, mask_width, span_mask_width
from ullage_engine.memory.rungs import (
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    SPAN_TOKENS,
    UNIT_ROWS,
    unit_rows,
)
from ullage_engine.models.geometry import ModelGeometry


class Attention(Protocol):
    """Attention of some rows of a step."""

    def run(self, cache: LayerCache, sinks: torch.Tensor | None) -> None:
        """Attends in one layer; the tokens' own KV is in the cache already.

        sinks [heads]: of each head's softmax, the logit of one more entry with nothing behind it.
        """
        ...


class Compute(Protocol):
    """What a model's layers are computed with."""

    def matrix(self, rows: torch.Tensor) -> Matrix:
        """A matrix of the computing type; `rows` is [out, in], as it is stored."""
        ...

    def attentions(
        self, batch: StepBatch, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        """Attention of every row of a step: rotated [heads + kv_heads, tokens, head_dim] into
        attended [tokens, heads * head_dim]. A row sees the last `window` tokens, 0: all."""
        ...

    def prove(self, head: Matrix | None) -> str | None:
        """Makes sure of what the class promises for all matrices made so far; what is wrong, else
        None. Only rows that are sampled are multiplied by `head`."""
        ...


class FastCompute:
    """Whole products, and attention in whatever shapes are fastest."""

    def __init__(
        self, geometry: ModelGeometry, limits: StepLimits, arena: dict[str, torch.Tensor]
    ) -> None:
        mask = shaped(arena["mask"], MAX_TILE_ROWS, mask_width(limits.max_model_len))
        fill_mask(mask)
        buffers = (arena["queries"], arena["gathered"], arena["scores"])
        codes = arena.get("gathered_codes")
        self._workspace = Workspace(geometry, limits.block_tokens, *buffers, mask, codes)

    def matrix(self, rows: torch.Tensor) -> Matrix:
        return PlainMatrix(rows)

    def attentions(
        self, batch: StepBatch, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        parts = (rotated, attended, self._workspace, window)
        decodes = [DecodeAttention(group, *parts) for group in batch.decodes]
        return [*decodes, *(PrefillAttention(tile, *parts) for tile in batch.prefills)]

    def prove(self, head: Matrix | None) -> str | None:
        return None


class DeterministicCompute:
    """A row's result depends on its token's context alone: not on the other rows of the step, nor
    on how the context was cut into steps."""

    def __init__(
        self, geometry: ModelGeometry, limits: StepLimits, arena: dict[str, torch.Tensor]
    ) -> None:
        products = RowProducts()
        mask = shaped(arena["mask"], MAX_TILE_ROWS, span_mask_width())
        fill_span_mask(mask)
        self._matrices: list[RowMatrix] = []
        self._products, self._limits, self._geometry = products, limits, geometry
        self._workspace = SplitWorkspace(
            geometry=geometry,
            block_tokens=limits.block_tokens,
            products=products,
            queries=arena["queries"],
            gathered=arena["gathered"],
            scores=arena["scores"],
            merged=arena["merged"],
            scaled=arena["scaled"],
            mask=mask,
            codes=arena.get("gathered_codes"),
        )

    def matrix(self, rows: torch.Tensor) -> Matrix:
        self._matrices.append(RowMatrix(rows, self._products))
        return self._matrices[-1]

    def attentions(
        self, batch: StepBatch, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        parts = (rotated, attended, self._workspace, window)
        decodes = [split_decodes(group, *parts) for group in batch.decodes]
        return [*decodes, *(split_prefill(tile, *parts) for tile in batch.prefills)]

    def prove(self, head: Matrix | None) -> str | None:
        geometry, limits = self._geometry, self._limits
        if geometry.has_sinks or any(layer.window for layer in geometry.layers):
            return f"{geometry.architecture} has windows and sinks, which have no such path"
        steps = {limits.product_rows(tokens) for tokens in range(1, limits.max_tokens + 1)}
        samples = {limits.product_rows(rows) for rows in range(1, limits.max_rows + 1)}
        # Matrices of one shape are multiplied alike, so one of each is enough.
        for matrix in {each.shape: each for each in self._matrices}.values():
            if not matrix.prove(samples if matrix is head else steps):
                return (
                    f"products of {UNIT_ROWS} rows with {list(matrix.shape)} weights give a row "
                    "other bits in another place"
                )
        for sequences, rows in self._attended_shapes():
            self._prove_attention(sequences, rows)
        return None

    def _attended_shapes(self) -> list[tuple[int, int]]:
        """(sequences, rows of queries a KV head) of every product of attention."""
        size, limits = self._geometry.group_size, self._limits
        most = min(2 * limits.max_rows - 1, limits.max_gather_tokens // SPAN_TOKENS)
        decodes = [(1 << power, unit_rows(size)) for power in range(most.bit_length())]
        tiles = [MIN_TILE_ROWS << power for power in range(3)]
        return [*decodes, *((1, size * rows) for rows in tiles if rows <= MAX_TILE_ROWS)]

    def _prove_attention(self, sequences: int, rows: int) -> None:
        batch, head_dim = sequences * self._geometry.num_kv_heads, self._geometry.head_dim
        context = shaped(self._workspace.gathered, batch, SPAN_TOKENS, head_dim)
        fill_random(context)
        self._products.prove_each((batch, rows, head_dim), context.transpose(1, 2))
        self._products.prove_each((batch, rows, SPAN_TOKENS), context)
