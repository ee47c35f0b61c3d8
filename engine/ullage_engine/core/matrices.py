"""Which matrices a loaded model is multiplied by."""

import torch

from ullage_engine.kernels.quantized import quantized_matrix, row_matrix, scratch_bytes
from ullage_engine.layers.compute import Compute
from ullage_engine.layers.matrix import Matrix
from ullage_engine.memory.arena import StepLimits
from ullage_engine.models.decoder import Weights
from ullage_engine.weights.store import LoadedModel


def matrix_scratch_bytes(loaded: LoadedModel, limits: StepLimits) -> int:
    """Memory that products with quantised matrices are computed in."""
    return scratch_bytes(
        loaded.encodings.values(), limits.itemsize, deterministic=limits.deterministic
    )


def model_weights(
    loaded: LoadedModel,
    limits: StepLimits,
    compute: Compute,
    dtype: torch.dtype,
    scratch: torch.Tensor,
) -> Weights:
    """The tensors of a model and its matrices, plain or quantised; `scratch` is uint8 of
    `matrix_scratch_bytes`."""

    def matrix(name: str) -> Matrix:
        if name not in loaded.encodings:
            return compute.matrix(loaded.tensors[name])
        packed = loaded.packed(name)
        if limits.deterministic:
            return row_matrix(packed, dtype, scratch, compute.matrix)
        return quantized_matrix(packed, dtype, scratch)

    return Weights(loaded.tensors, matrix)
