"""What the layers of one step share: the rows, and a view of the arena for each buffer."""

import torch

from ullage_engine.core.batch import StepBatch
from ullage_engine.kernels.buffers import shaped
from ullage_engine.memory.arena import StepLimits
from ullage_engine.models.geometry import ModelGeometry


class Step:
    """Views are made once a step, so that a layer is only its operations."""

    def __init__(
        self,
        batch: StepBatch,
        geometry: ModelGeometry,
        limits: StepLimits,
        arena: dict[str, torch.Tensor],
    ) -> None:
        self.batch = batch
        self.device = arena["hidden"].device
        self.tokens = len(batch.token_ids)
        self.rows = limits.product_rows(self.tokens)
        """Tokens and padding: the rows of every matrix product."""
        self.hidden = shaped(arena["hidden"], self.rows, geometry.hidden)
        self.normed = shaped(arena["normed"], self.rows, geometry.hidden)
        self._arena = arena

    def view(self, name: str, *shape: int) -> torch.Tensor:
        """The start of a buffer, in this shape."""
        return shaped(self._arena[name], *shape)

    def find(self, name: str) -> torch.Tensor | None:
        """A flat buffer that only some steps have."""
        return self._arena.get(name)

    def indices(self, values: list[int]) -> torch.Tensor:
        """Numbers as a tensor on the device."""
        return torch.tensor(values, device=self.device)
