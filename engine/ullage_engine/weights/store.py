"""Prepared weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ullage_engine.config import ModelSection
from ullage_engine.models.geometry import ModelGeometry

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights ready to compute with; read only."""

    geometry: ModelGeometry
    tensors: dict[str, torch.Tensor]
    nbytes: int
    """Bytes of all tensors."""


def load_weights(
    model: ModelSection,
    device: torch.device,
    dtype: torch.dtype,
    weights_dir: Path,
    progress: Progress,
) -> LoadedModel:
    """Prepares the weights once in `weights_dir`, then maps them.

    Raises:
        WeightsError: see `ullage_engine.weights.errors`.
    """
    raise NotImplementedError
