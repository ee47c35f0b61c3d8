"""Which matrices a loaded model is multiplied by."""

from collections.abc import Iterator

import msgspec
import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.mxfp4 import decodes, mxfp4_experts
from ullage_engine.kernels.quantized import (
    picked_experts,
    quantized_matrix,
    row_matrix,
    scratch_bytes,
)
from ullage_engine.layers.compute import Compute
from ullage_engine.layers.expert_matrices import ExpertMatrices, LoopedExperts, expert_matrices
from ullage_engine.layers.matrix import Matrix
from ullage_engine.memory.arena import StepLimits
from ullage_engine.memory.experts import mxfp4_scratch_bytes
from ullage_engine.models.decoder import Weights
from ullage_engine.quant.formats import MXFP4_GROUP, Encoding
from ullage_engine.quant.packing import Packed
from ullage_engine.weights.store import LoadedModel


def matrix_scratch_bytes(loaded: LoadedModel, limits: StepLimits) -> int:
    """Memory that products with quantised matrices are computed in."""
    packed = any(each.format == "mxfp4" for each in loaded.encodings.values())
    device = _device(loaded)
    decoded = mxfp4_scratch_bytes(device.type, limits.itemsize) if packed and decodes(device) else 0
    encodings = [each for each in _encodings_of_products(loaded) if each.format != "mxfp4"]
    others = scratch_bytes(encodings, limits.itemsize, deterministic=limits.deterministic)
    return max(decoded, others)


def model_weights(
    loaded: LoadedModel,
    limits: StepLimits,
    compute: Compute,
    dtype: torch.dtype,
    scratch: torch.Tensor,
) -> Weights:
    """The tensors of a model and its matrices, plain or quantised; `scratch` is uint8 of
    `matrix_scratch_bytes`."""
    tensors, deterministic = loaded.tensors, limits.deterministic
    fused = triton.quantized_matmul if triton.runs_on(_device(loaded)) else None

    def quantized(packed: Packed) -> Matrix:
        if deterministic:
            return row_matrix(packed, dtype, scratch, compute.matrix)
        return quantized_matrix(packed, dtype, scratch, fused)

    def matrix(name: str) -> Matrix:
        if name in loaded.encodings:
            return quantized(loaded.packed(name))
        return compute.matrix(tensors[name])

    def experts(name: str) -> ExpertMatrices:
        if name not in loaded.encodings:
            return expert_matrices(tensors[name], compute.matrix, deterministic)
        stored, count = loaded.packed(name), _num_experts(loaded)
        if stored.encoding.format == "mxfp4":
            blocks = stored.values.view(count, -1, stored.encoding.num_groups, MXFP4_GROUP // 2)
            scales = stored.scales.view(count, -1, stored.encoding.num_groups)
            return mxfp4_experts(blocks, scales, dtype, scratch)
        picked = picked_experts(stored, count) if fused and not deterministic else None
        if picked is not None:
            return picked
        return LoopedExperts([quantized(part) for part in stored.split(count)], deterministic)

    return Weights(tensors, matrix=matrix, experts=experts)


def _encodings_of_products(loaded: LoadedModel) -> Iterator[Encoding]:
    """Experts are multiplied one at a time."""
    for name, encoding in loaded.encodings.items():
        rows, columns = encoding.shape
        if ".experts_" in name:
            rows //= _num_experts(loaded)
        yield msgspec.structs.replace(encoding, shape=(rows, columns))


def _device(loaded: LoadedModel) -> torch.device:
    return next(iter(loaded.tensors.values())).device


def _num_experts(loaded: LoadedModel) -> int:
    assert loaded.geometry.experts is not None, "weights of experts, and no experts"
    return loaded.geometry.experts.num_experts
