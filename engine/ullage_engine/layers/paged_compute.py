"""Computing on a GPU: attention reads pages where they lie, in kernels of our own."""

from collections.abc import Sequence

import torch

from ullage_engine.core.batch import StepBatch
from ullage_engine.kernels import triton
from ullage_engine.kernels.triton import PagedAttention, PagedWorkspace, paged_attentions
from ullage_engine.layers.matrix import Matrix, PlainMatrix
from ullage_engine.models.geometry import ModelGeometry


def can_page(geometry: ModelGeometry, block_tokens: int, device: torch.device) -> bool:
    """Whether `PagedCompute` computes such a model there."""
    return triton.runs_on(device) and triton.attends(geometry.head_dim, block_tokens)


class PagedCompute:
    """Nothing is gathered: of the arena's buffers for attention it needs only "partials"."""

    def __init__(self, geometry: ModelGeometry, partials: torch.Tensor) -> None:
        """`partials`: float32, `ullage_engine.memory.partials.partial_elements`."""
        self._workspace = PagedWorkspace(geometry, partials)

    def matrix(self, rows: torch.Tensor) -> Matrix:
        return PlainMatrix(rows)

    def attentions(
        self, batch: StepBatch, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[PagedAttention]:
        parts = (rotated, attended, self._workspace, window)
        return paged_attentions(batch.decodes, batch.prefills, *parts)

    def prove(self, head: Matrix | None) -> str | None:
        return None
